"""The interface is that of Stable-Baselines3: names, order, defaults, logs, errors."""

import inspect
import io

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import CallbackList, ConvertCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import DummyVecEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agents import GRPO, PPO
from textrl_env.sb3 import GymVecEnv, KLRolloutBuffer
from textrl_env.tasks import FunctionTask

SMALL = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 0}


def text_env(model, num_envs=4, **options):
    options = {"task": "copy", "model": model, "max_new_tokens": 4, "kl_coef": 0.1} | options
    return gym.make_vec("textrl_env:TextRL-v0", num_envs=num_envs, **options)


class Writer(KVWriter):
    """Keeps what is logged: for each dump the values, and where they are not written."""

    def __init__(self):
        self.dumps = []

    def write(self, key_values, key_excluded, step=0):
        self.dumps.append(
            {key: (value, key_excluded[key] or ()) for key, value in key_values.items()}
        )

    def close(self):
        pass


# Arguments


def test_the_arguments_of_ppo_are_those_of_stable_baselines3():
    ours, theirs = (
        inspect.signature(cls.__init__).parameters for cls in (PPO, stable_baselines3.PPO)
    )
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in ours.items():
        if name not in theirs:
            assert parameter.kind is parameter.KEYWORD_ONLY, name
        elif name != "env":
            assert parameter.default in (None, theirs[name].default), name
    first, second = (cls("MlpPolicy", "CartPole-v1") for cls in (PPO, stable_baselines3.PPO))
    resolved = set(theirs) - {
        "self", "policy", "env", "rollout_buffer_class", "rollout_buffer_kwargs", "device",
        "stats_window_size", "clip_range", "_init_setup_model",
    }  # fmt: skip
    for name in resolved:
        assert getattr(first, name) == getattr(second, name), name
    assert first.clip_range(0.3) == second.clip_range(0.3) == 0.2
    assert first._stats_window_size == second._stats_window_size


def test_positional_arguments_mean_the_same():
    arguments = (
        "MlpPolicy", "Pendulum-v1", 1e-3, 32, 16, 3, 0.9, 0.8, 0.1, 0.3, False, 0.01, 0.6, 0.4,
        True, 4, None, None, 0.02, 7, None, {"net_arch": [8]}, 0, 5, "cpu", True,
    )  # fmt: skip
    ours, theirs = PPO(*arguments), stable_baselines3.PPO(*arguments)
    for name in (
        "learning_rate", "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda",
        "normalize_advantage", "ent_coef", "vf_coef", "max_grad_norm", "use_sde",
        "sde_sample_freq", "target_kl", "_stats_window_size", "tensorboard_log", "policy_kwargs",
        "verbose", "seed", "device",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.clip_range(1.0) == theirs.clip_range(1.0) == 0.1
    assert ours.clip_range_vf(1.0) == theirs.clip_range_vf(1.0) == 0.3


@pytest.mark.parametrize(
    "method", ["learn", "save", "load", "predict", "set_env", "set_parameters", "set_logger"]
)
def test_the_arguments_of_methods_are_those_of_stable_baselines3(method):
    ours, theirs = (
        list(inspect.signature(getattr(cls, method)).parameters)
        for cls in (PPO, stable_baselines3.PPO)
    )
    assert ours == theirs


def test_rollout_buffers(tiny_llama):
    """Those whose work the agent does by itself are taken, others refused."""

    class Own(RolloutBuffer):
        pass

    for buffer_class in (None, RolloutBuffer, DictRolloutBuffer):
        PPO("MlpPolicy", "CartPole-v1", rollout_buffer_class=buffer_class)
    with pytest.raises(ValueError, match=r"Own.*override compute_advantages"):
        PPO("MlpPolicy", "CartPole-v1", rollout_buffer_class=Own)
    with pytest.raises(ValueError, match="rollout_buffer_kwargs is"):
        PPO("MlpPolicy", "CartPole-v1", rollout_buffer_kwargs={"gamma": 1.0})
    rewards = []
    for kwargs in ({}, {"rollout_buffer_class": KLRolloutBuffer}):
        env = text_env(tiny_llama)
        if kwargs:
            kwargs["rollout_buffer_kwargs"] = {"env": env}
        agent = PPO("LMPolicy", env, seed=0, **kwargs).learn(1)
        rewards.append(agent.rollout_buffer.rewards)
    assert torch.equal(*rewards)


def test_clip_ranges_are_schedules_and_numbers_in_a_checkpoint(tmp_path):
    agent = PPO("MlpPolicy", "CartPole-v1", clip_range=0.3, clip_range_vf=0.4, clip_range_high=0.5)
    assert PPO("MlpPolicy", "CartPole-v1").clip_range_vf is None
    agent.save(tmp_path / "numbers")
    for loaded in (agent, PPO.load(tmp_path / "numbers")):
        values = [loaded.clip_range(0.5), loaded.clip_range_vf(0.5), loaded.clip_range_high(0.5)]
        assert values == [0.3, 0.4, 0.5]
    agent = PPO("MlpPolicy", "CartPole-v1", clip_range=lambda progress: 0.2 * progress)
    assert agent.clip_range(0.5) == 0.1
    agent.save(tmp_path / "schedule")
    with pytest.raises(ValueError, match="clip_range was the function"):
        PPO.load(tmp_path / "schedule")
    # As scripts do: names that the checkpoint does not have are ignored.
    custom = {"clip_range": FloatSchedule(0.1), "lr_schedule": lambda progress: 0.0}
    assert PPO.load(tmp_path / "schedule", custom_objects=custom).clip_range(1.0) == 0.1


# Logs


class Success(gym.Wrapper):
    """Says at the end of each episode whether it was long."""

    def step(self, action):
        *transition, info = super().step(action)
        return *transition, info | {"is_success": bool(transition[2])}


@pytest.mark.parametrize("monitored", [True, False])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_logged_keys_are_those_of_stable_baselines3(env_id, monitored):
    n_steps = 64 if env_id == "CartPole-v1" else 256
    dumps = []
    for agent_class in (PPO, stable_baselines3.PPO):
        if monitored:
            env = make_vec_env(env_id, seed=1, wrapper_class=Success)
        else:
            env = DummyVecEnv([lambda: gym.make(env_id)])
            env.seed(1)
        writer = Writer()
        agent = agent_class(
            "MlpPolicy", env, n_steps=n_steps, n_epochs=1, seed=1, clip_range_vf=0.5
        )
        agent.set_logger(Logger(None, [writer]))
        agent.learn(3 * n_steps)
        dumps.append(writer.dumps)
    ours, theirs = dumps
    assert len(ours) == len(theirs) == 3
    assert ("rollout/ep_rew_mean" in theirs[0]) == ("rollout/success_rate" in ours[0]) == monitored
    after_rollout = {
        "rollout/entropy", "time/rollout_seconds", "time/rollout_tokens_per_second"
    }  # fmt: skip
    after_update = {"train/grad_norm", "train/ppo_kl", "time/update_seconds"}
    for i, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        assert set(two) <= set(one)
        assert set(one) - set(two) == after_rollout | (after_update if i else set())
        for key, (value, excluded) in two.items():
            assert one[key][1] == excluded, key
            drawn = key.startswith("rollout") and not i  # later the mini-batches differ
            if drawn or "clip_range" in key or "learning_rate" in key or "updates" in key:
                assert one[key][0] == pytest.approx(value), key


@pytest.mark.parametrize(("log_interval", "dumps"), [(1, 4), (3, 1), (None, 0)])
def test_log_interval_counts_rollouts(log_interval, dumps):
    agent = PPO("MlpPolicy", "CartPole-v1", **SMALL)
    writer = Writer()
    agent.set_logger(Logger(None, [writer]))
    agent.learn(64, log_interval=log_interval)
    assert len(writer.dumps) == dumps
    with pytest.raises(ValueError, match="log_interval is 0"):
        agent.learn(64, log_interval=0)


def test_a_run_goes_on_in_its_tensorboard_folder(tmp_path):
    agent = PPO("MlpPolicy", "CartPole-v1", tensorboard_log=str(tmp_path), **SMALL)
    agent.learn(32)
    agent.learn(32, tb_log_name="named")
    agent.learn(32, tb_log_name="named", reset_num_timesteps=False)
    agent.save(tmp_path / "agent.zip")
    agent = PPO.load(tmp_path / "agent.zip", env=gym.make("CartPole-v1"))
    agent.learn(32, tb_log_name="named", reset_num_timesteps=False)
    assert agent.num_timesteps == 96
    (tmp_path / "agent.zip").unlink()
    agent.learn(16, tb_log_name="named")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["PPO_1", "named_1", "named_2"]
    events = EventAccumulator(str(tmp_path / "named_1")).Reload()
    assert [event.step for event in events.Scalars("rollout/entropy")] == [*range(16, 97, 16)]


# Environments


class Sampled(gym.Env):
    """Gives observations of its space at random, and asserts that actions are of theirs."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        done = bool(self.np_random.random() < 0.2)
        return self.observation_space.sample(), 1.0, done, False, {}


BOX, TWO = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "error", "message"),
    [
        (spaces.Tuple([BOX, TWO]), TWO, NotImplementedError, "observation_space is Tuple"),
        (spaces.Text(4), TWO, NotImplementedError, "observation_space is Text"),
        (spaces.Dict(a=BOX, b=spaces.Text(4)), TWO, NotImplementedError, r"space\['b'\] is Text"),
        (spaces.Dict(a=spaces.Dict(b=BOX)), TWO, NotImplementedError, "Nested"),
        (BOX, spaces.Text(4), AssertionError, "action spaces"),
        (BOX, spaces.Tuple([TWO, TWO]), AssertionError, "action spaces"),
        (BOX, spaces.Discrete(5, start=2), ValueError, r"action_space is Discrete\(5, start=2\)"),
        (BOX, spaces.MultiDiscrete([2, 2], start=[0, 1]), ValueError, "action_space is Multi"),
        (spaces.Discrete(5, start=2), TWO, ValueError, "observation_space is Discrete"),
    ],
)
def test_spaces_that_are_not_supported(observation_space, action_space, error, message):
    def make():
        return Sampled(observation_space, action_space)

    policy = "MultiInputPolicy" if isinstance(observation_space, spaces.Dict) else "MlpPolicy"
    for agent_class, kwargs in ((PPO, SMALL), (GRPO, {"group_size": 1})):
        with pytest.raises(error, match=message):
            agent_class(policy, make(), **kwargs)
        if not isinstance(action_space, spaces.Text):
            with pytest.raises(error, match=message):
                agent_class(policy, gym.vector.SyncVectorEnv([make] * 2), **kwargs)


def test_actions_that_do_not_count_from_0_can_be_moved():
    """By the wrapper that the message names."""
    env = Sampled(BOX, spaces.Discrete(5, start=2))
    agent = PPO(
        "MlpPolicy",
        gym.wrappers.TransformAction(env, lambda action: action + 2, spaces.Discrete(5)),
        **SMALL,
    ).learn(32)
    assert set(agent.rollout_buffer.actions.flatten().tolist()) <= set(range(5))


def test_spaces_of_float64():
    action_space = spaces.Box(-1, 1, (2,), np.float64)
    observation_space = spaces.Box(-1, 1, (3,), np.float64)
    env = make_vec_env(lambda: Sampled(observation_space, action_space), n_envs=2)
    for agent_class, kwargs in ((PPO, SMALL), (GRPO, {"group_size": 1, "seed": 0})):
        agent = agent_class("MlpPolicy", env, **kwargs).learn(64)
        batch = agent.rollout_buffer
        for name in ("actions", "logprobs", "rewards", "advantages"):
            assert getattr(batch, name).dtype == torch.float32, name
        assert action_space.contains(agent.predict(env.reset())[0][0])


def test_another_environment_must_fit(tiny_llama):
    agent = PPO("MlpPolicy", "CartPole-v1", **SMALL).learn(16)
    with pytest.raises(AssertionError, match="number of environments"):
        agent.set_env(make_vec_env("CartPole-v1", n_envs=2))
    with pytest.raises(ValueError, match="spaces do not match"):
        agent.set_env(gym.make("Pendulum-v1"))
    agent.set_env(gym.make("CartPole-v1"))
    assert agent.learn(16).num_timesteps == 16
    text = PPO("LMPolicy", text_env(tiny_llama), seed=0)
    with pytest.raises(AssertionError, match="number of environments"):
        text.set_env(text_env(tiny_llama, num_envs=2))
    with pytest.raises(ValueError, match="spaces do not match"):
        text.set_env(text_env(tiny_llama, max_new_tokens=9))


def test_parameters_have_stable_baselines3_names():
    agent, other = (PPO("MlpPolicy", "CartPole-v1", seed=seed) for seed in (0, 1))
    parameters = agent.get_parameters()
    assert set(parameters) == {"policy", "policy.optimizer"}
    other.set_parameters(parameters)
    assert all(map(torch.equal, other.policy.parameters(), agent.policy.parameters()))
    for changed, error in (
        (parameters | {"critic": {}}, ValueError),
        (parameters | {"env": {}}, ValueError),
        ({"policy": parameters["policy"]}, ValueError),
        (parameters | {"policy": {}}, RuntimeError),
    ):
        with pytest.raises(error):
            other.set_parameters(changed)
    other.set_parameters({"policy": parameters["policy"]}, exact_match=False)


def test_a_gymnasium_vector_is_evaluated_through_the_bridge():
    """Stable-Baselines3's functions refuse the vector itself."""
    agent = PPO("MlpPolicy", "CartPole-v1", **SMALL)

    def make():
        return gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")

    with pytest.raises(ValueError, match="not a Gymnasium environment"):
        evaluate_policy(agent, make())
    mean, _ = evaluate_policy(agent, GymVecEnv(make()), n_eval_episodes=2, warn=False)
    assert mean > 0


# Bad input


def test_mini_batches_are_checked_as_in_stable_baselines3():
    with pytest.warns(UserWarning, match="batch_size is 10, which does not divide .* 16"):
        PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=10)
    with pytest.raises(AssertionError, match=r"n_steps \* n_envs is 1"):
        PPO("MlpPolicy", "CartPole-v1", n_steps=1)
    with pytest.raises(AssertionError, match="batch_size is 1"):
        PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=1)
    kwargs = {"n_steps": 1, "batch_size": 1, "normalize_advantage": False}
    assert PPO("MlpPolicy", "CartPole-v1", **kwargs).learn(3).num_timesteps == 3


@pytest.mark.filterwarnings("ignore:batch_size is 8")
@pytest.mark.parametrize("use_sde", [False, True])
def test_a_last_mini_batch_of_one_is_finite(use_sde):
    agent = PPO("MlpPolicy", "Pendulum-v1", n_steps=17, batch_size=8, use_sde=use_sde, seed=0)
    agent.learn(34)
    assert all(p.isfinite().all() for p in agent.policy.parameters())
    assert all(np.isfinite(value) for value in agent.logger.name_to_value.values())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": "0"}, TypeError, "seed is '0'"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"learning_rate": "x"}, AssertionError, "learning_rate is 'x'"),
        ({"clip_range": "x"}, AssertionError, "clip_range is 'x'"),
        ({"clip_range_vf": 0.0}, AssertionError, "clip_range_vf is 0.0; it must be positive"),
        ({"max_grad_norm": "1"}, ValueError, "max_grad_norm is '1'"),
        ({"n_steps": "8"}, ValueError, "n_steps is '8'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        PPO("MlpPolicy", "CartPole-v1", **arguments)


def test_wrong_types_are_named(tiny_llama):
    agent = PPO("LMPolicy", text_env(tiny_llama), seed=np.int64(0))
    agent.save(io.BytesIO())
    with pytest.raises(ValueError, match="observation is 'text'; pass a dictionary"):
        agent.predict("text")
    with pytest.raises(ValueError, match="mixing Gym API"):
        agent.predict(({}, {}))
    with pytest.raises(TypeError, match="pass a list of prompts"):
        FunctionTask((text for text in ["a", "b"]), score=lambda text, sample: 0.0)
    for name, value in (("model", 3), ("reference", 3), ("stop", 5), ("num_envs", "4")):
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            gym.make_vec("textrl_env:TextRL-v0", **{"num_envs": 2, name: value})


@pytest.mark.parametrize("kind", ["none", "function", "list", "CallbackList", "callback"])
def test_callbacks_of_any_form(kind):
    calls = []

    def count(local_variables, global_variables):
        calls.append(local_variables["self"].num_timesteps)
        return len(calls) < 20

    callback = {
        "none": None,
        "function": count,
        "list": [ConvertCallback(count)],
        "CallbackList": CallbackList([ConvertCallback(count)]),
        "callback": ConvertCallback(count),
    }[kind]
    agent = PPO("MlpPolicy", "CartPole-v1", **SMALL)
    assert agent.learn(48, callback=callback) is agent
    assert calls == ([] if kind == "none" else list(range(1, 21)))
    assert agent.num_timesteps == (48 if kind == "none" else 20)
