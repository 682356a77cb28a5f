"""`textrl_env.sb3`: a faithful `VecEnv`, and β·log π_old for agents that know nothing of it."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest
from conftest import EOS, ids
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from textrl_env.sb3 import GymVecEnv, KLCallback, KLRolloutBuffer, split_infos
from textrl_env.tasks import FunctionTask

MODES = list(AutoresetMode)
TASK = FunctionTask(["2+2=", "say b", "c?"], score=lambda text, sample: len(text) / 3)


def text_venv(model, num_envs=2, **options):
    options = {"task": TASK, "model": model, "max_new_tokens": 4, "device": "cpu", **options}
    return gym.make_vec("TextRL-v0", num_envs=num_envs, **options)


def cartpole():
    return gym.make("CartPole-v1", max_episode_steps=15)  # some end, some are cut


# The bridge


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [True, False])
def test_cartpole_is_as_in_dummy_vec_env(mode, copy):
    bridge = GymVecEnv(SyncVectorEnv([cartpole] * 3, autoreset_mode=mode, copy=copy))
    dummy = DummyVecEnv([cartpole] * 3)
    generator = np.random.default_rng(0)
    assert bridge.observation_space == dummy.observation_space
    assert bridge.action_space == dummy.action_space
    for venv in (bridge, dummy):
        venv.seed(3)
        venv.set_options({"low": -0.01, "high": 0.02})
    np.testing.assert_array_equal(bridge.reset(), dummy.reset())
    ends = []
    for _ in range(60):
        actions = generator.integers(0, 2, 3)
        mine, theirs = bridge.step(actions), dummy.step(actions)
        for one, other in zip(mine[:3], theirs[:3], strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        for info, expected, done in zip(mine[3], theirs[3], mine[2], strict=True):
            assert info.keys() == expected.keys()
            assert info["TimeLimit.truncated"] is bool(expected["TimeLimit.truncated"])
            if done:
                terminal = info["terminal_observation"]
                np.testing.assert_array_equal(terminal, expected["terminal_observation"])
                ends.append(info["TimeLimit.truncated"])
    assert set(ends) == {True, False}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("on_limit", ["terminate", "truncate"])
@pytest.mark.parametrize("kl_mode", ["none", "reference"])
def test_text_is_as_in_dummy_vec_env(tiny_llama, mode, on_limit, kl_mode):
    """Rewards differ by the rounding of float32 where the reference scores a batch."""
    options = {
        "task": TASK, "model": tiny_llama, "max_new_tokens": 3, "kl_mode": kl_mode,
        "on_limit": on_limit, "device": "cpu", "dtype": "float64",
    }  # fmt: skip
    bridge = GymVecEnv(text_venv(autoreset_mode=mode, num_envs=3, **options))
    dummy = DummyVecEnv([lambda: gym.make("TextRL-v0", **options)] * 3)
    generator = np.random.default_rng(0)
    for venv in (bridge, dummy):
        venv.seed(3)
    mine, theirs = bridge.reset(), dummy.reset()
    assert bridge.reset_infos == dummy.reset_infos
    for _ in range(20):
        for key in theirs:
            np.testing.assert_array_equal(mine[key], theirs[key])
        actions = np.where(generator.random(3) < 0.3, EOS, generator.integers(3, 259, 3))
        mine, rewards, dones, infos = bridge.step(actions)
        theirs, expected_rewards, expected_dones, expected = dummy.step(actions)
        np.testing.assert_allclose(rewards, expected_rewards, rtol=1e-6)
        assert rewards.dtype == np.float32
        assert dones.tolist() == expected_dones.tolist()
        assert bridge.reset_infos == dummy.reset_infos
        for info, other in zip(infos, expected, strict=True):
            terminal, other_terminal = (i.pop("terminal_observation", None) for i in (info, other))
            assert (terminal is None) == (other_terminal is None)
            for key in terminal or ():
                np.testing.assert_array_equal(terminal[key], other_terminal[key])
            for key in ("kl", "ref_logprob"):
                assert info.pop(key) == pytest.approx(other.pop(key), abs=1e-9)
            assert info == other
            assert [type(v) for v in info.values()] == [type(other[key]) for key in info]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("truncated", [True, False])
def test_truncation_is_told_from_termination(mode, terminated, truncated):
    class Ends(gym.Env):
        observation_space = gym.spaces.Dict(x=gym.spaces.Box(-1, 1, (2,)))
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"x": np.zeros(2, dtype=np.float32)}, {}

        def step(self, action):
            return {"x": np.ones(2, dtype=np.float32)}, 0.5, terminated, truncated, {}

    env = GymVecEnv(SyncVectorEnv([Ends], autoreset_mode=mode, copy=False))
    env.reset()
    observations, rewards, dones, (info,) = env.step(np.array([0]))
    done = terminated or truncated
    assert dones.tolist() == [done]
    assert rewards.tolist() == [0.5]
    assert info["TimeLimit.truncated"] is (truncated and not terminated)
    assert observations["x"].tolist() == [[0.0, 0.0] if done else [1.0, 1.0]]
    if done:
        assert info["terminal_observation"]["x"].tolist() == [1.0, 1.0]
    else:
        assert "terminal_observation" not in info


def test_seeds_and_options_are_used_once(tiny_llama):
    env = GymVecEnv(text_venv(tiny_llama, num_envs=3, kl_mode="none"))
    env.seed(7)
    env.set_options([{"prompt_index": i} for i in (2, 0, 1)])
    env.reset()
    assert [info["prompt_index"] for info in env.reset_infos] == [2, 0, 1]
    drawn = []
    for _ in range(6):
        env.reset()
        drawn.append([info["prompt_index"] for info in env.reset_infos])
    assert len({tuple(d) for d in drawn}) > 1
    env.seed(7)
    env.reset()
    assert [info["prompt_index"] for info in env.reset_infos] == drawn[0]
    env.set_options({"prompt_index": 1})
    env.reset()
    assert [info["prompt_index"] for info in env.reset_infos] == [1, 1, 1]
    env.set_options([{"prompt_index": 1}, {}, {}])
    with pytest.raises(ValueError, match="have different keys; give every slot the same ones"):
        env.reset()


def test_attributes_and_methods_of_the_native_vector(tiny_llama):
    env = GymVecEnv(text_venv(tiny_llama, allowed_tokens=ids("ab"), min_new_tokens=1))
    env.reset()
    assert env.get_attr("kl_coef") == [0.05, 0.05]
    env.set_attr("kl_coef", 0.5)
    assert env.get_attr("kl_coef", indices=[1]) == [0.5]
    assert env.step(np.array(ids("aa")))[3][1]["kl_coef"] == 0.5
    masks = env.env_method("action_masks")
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[EOS, *ids("ab")]] * 2
    assert env.env_method("action_masks", indices=0)[0].shape == (259,)
    assert env.has_attr("action_masks")
    assert not env.has_attr("no_such_attribute")
    assert env.env_is_wrapped(Monitor) == [False, False]
    assert env.render_mode is None


@pytest.mark.parametrize("single", [False, True])
def test_the_coefficient_is_set_through_wrappers(tiny_llama, single):
    if single:
        options = {"task": TASK, "model": tiny_llama, "device": "cpu"}
        env = DummyVecEnv([lambda: Monitor(gym.make("TextRL-v0", **options))] * 2)
    else:
        env = GymVecEnv(RecordEpisodeStatistics(text_venv(tiny_llama)))
    env.env_method("set_kl_coef", 0.5)
    env.reset()
    assert [info["kl_coef"] for info in env.step(np.array(ids("ab")))[3]] == [0.5, 0.5]
    assert env.get_attr("kl_coef") == [0.5, 0.5]
    assert not env.has_attr("no_such_attribute")


def test_attributes_and_methods_of_single_environments():
    def make():
        return Monitor(cartpole())

    env = GymVecEnv(SyncVectorEnv([make] * 2))
    assert env.get_attr("gravity") == [9.8, 9.8]
    env.set_attr("gravity", 5.0, indices=[1])
    assert env.get_attr("gravity") == [9.8, 5.0]
    env.set_attr("gravity", 6.0)
    assert env.get_attr("gravity", indices=1) == [6.0]
    env.reset()
    assert env.env_method("get_episode_rewards") == [[], []]
    assert env.env_method("get_wrapper_attr", "force_mag", indices=[0]) == [10.0]
    assert env.env_is_wrapped(Monitor) == [True, True]
    env.close()


def test_attributes_of_other_processes():
    env = GymVecEnv(AsyncVectorEnv([cartpole] * 2))
    try:
        assert env.get_attr("gravity") == [9.8, 9.8]
        env.set_attr("gravity", 5.0)
        assert env.get_attr("gravity") == [5.0, 5.0]
        assert env.env_is_wrapped(Monitor) == [False, False]
    finally:
        env.close()


def test_images(tiny_llama):
    env = GymVecEnv(text_venv(tiny_llama, kl_mode="none", render_mode="rgb_array"))
    env.reset()
    assert env.render_mode == "rgb_array"
    assert [image.dtype for image in env.get_images()] == [np.uint8] * 2
    assert env.render().ndim == 3


@pytest.mark.parametrize("mode", MODES)
def test_episode_statistics_reach_the_info(tiny_llama, mode):
    venv = text_venv(tiny_llama, kl_mode="none", autoreset_mode=mode)
    env = GymVecEnv(RecordEpisodeStatistics(venv))
    env.reset()
    env.step(np.array(ids("aa")))
    _, rewards, dones, infos = env.step(np.array([EOS, *ids("a")]))
    assert dones.tolist() == [True, False]
    assert infos[0]["episode"]["l"] == infos[0]["num_tokens"] == 2
    assert infos[0]["episode"]["r"] == pytest.approx(rewards[0])
    assert "episode" not in infos[1]
    assert set(env.reset_infos[0]) == {"prompt", "prompt_index"}


@pytest.mark.parametrize("mode", MODES)
def test_vec_monitor_and_evaluate_policy(tiny_llama, mode):
    env = VecMonitor(GymVecEnv(text_venv(tiny_llama, kl_mode="none", autoreset_mode=mode)))

    class Fixed:
        def predict(self, obs, state=None, episode_start=None, deterministic=True):
            return np.array([*ids("a"), EOS]), None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        returns, lengths = evaluate_policy(
            Fixed(), env, n_eval_episodes=4, return_episode_rewards=True
        )
    assert sorted(zip(lengths, returns, strict=True)) == [
        (1, 0.0),
        (1, 0.0),
        (4, pytest.approx(4 / 3)),
        (4, pytest.approx(4 / 3)),
    ]


def test_split_infos():
    infos = {
        "episode": {"r": np.array([1.0, 0.0]), "_r": np.array([True, False])},
        "_episode": np.array([True, False]),
        "image": np.zeros((2, 3)),
        "_image": np.array([False, True]),
        "label": np.array([None, "b"], dtype=object),
        "_label": np.array([False, True]),
        "total": 3,  # of the whole vector: no slot's
    }
    first, second = split_infos(infos, 2)
    assert first == {"episode": {"r": 1.0}}
    assert second.keys() == {"image", "label"}
    assert second["label"] == "b"
    assert second["image"].shape == (3,)


# The consumer


class Recorder(BaseCallback):
    """What an agent stored, beside what the environment gave for it."""

    def __init__(self):
        super().__init__()
        self.infos, self.given, self.log_probs = [], [], []

    def _on_step(self):
        self.given.append(self.locals["rewards"].copy())
        self.infos.append(self.locals["infos"])
        self.log_probs.append(self.locals["log_probs"].cpu().numpy().copy())
        return True

    def _on_rollout_end(self):
        self.stored = self.model.rollout_buffer.rewards.copy()


def train(env, callbacks, algorithm=PPO, n_steps=24, timesteps=96, **options):
    agent = algorithm(
        "MultiInputPolicy", env, n_steps=n_steps, batch_size=24, n_epochs=1, seed=0, device="cpu",
        **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return agent.learn(timesteps, callback=callbacks)


def shaped(recorder):
    """task_reward − β·(log π_old − log π_ref) of every step, by hand."""
    return np.array(
        [
            [
                info["task_reward"] - info["kl_coef"] * (log_prob - info["ref_logprob"])
                for info, log_prob in zip(infos, log_probs, strict=True)
            ]
            for infos, log_probs in zip(recorder.infos, recorder.log_probs, strict=True)
        ]
    )


@pytest.mark.parametrize("mode", MODES)
def test_callback_stores_the_exact_kl_penalty(tiny_llama, mode, monkeypatch):
    monkeypatch.setattr("textrl_env.core._CONSUMER_PATIENCE", 1)  # the warning would be an error
    recorder = Recorder()
    env = GymVecEnv(text_venv(tiny_llama, kl_coef=0.3, autoreset_mode=mode))
    train(env, [KLCallback(), recorder])
    assert env.venv.unwrapped.mdp.kl_consumer
    expected = shaped(recorder)[-24:]
    np.testing.assert_allclose(recorder.stored, expected, atol=1e-5)
    np.testing.assert_array_equal(recorder.stored, np.array(recorder.given[-24:]))


@pytest.mark.parametrize("wrap", ["single", "bridge", "monitored"])
def test_buffer_and_callback_are_the_same(tiny_llama, wrap, monkeypatch):
    monkeypatch.setattr("textrl_env.core._CONSUMER_PATIENCE", 1)

    def make():
        if wrap == "single":
            return gym.make(
                "TextRL-v0", task=TASK, model=tiny_llama, max_new_tokens=4, device="cpu"
            )
        env = GymVecEnv(text_venv(tiny_llama))
        return VecMonitor(env) if wrap == "monitored" else env

    by_callback, by_buffer = Recorder(), Recorder()
    one = train(make(), [KLCallback(), by_callback])
    env = make()
    other = train(
        env, [by_buffer], rollout_buffer_class=KLRolloutBuffer, rollout_buffer_kwargs={"env": env}
    )
    np.testing.assert_array_equal(by_callback.stored, by_buffer.stored)
    np.testing.assert_array_equal(
        one.policy.action_net.weight.detach(), other.policy.action_net.weight.detach()
    )
    assert np.abs(np.array(by_buffer.given[-24:]) - by_buffer.stored).max() > 0.1


@pytest.mark.parametrize("buffered", [False, True])
def test_the_coefficient_may_change_between_rollouts(tiny_llama, buffered):
    class Grow(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_start(self):
            self.training_env.set_attr("kl_coef", 0.1 + self.training_env.get_attr("kl_coef")[0])

    env, recorder = GymVecEnv(text_venv(tiny_llama, kl_coef=0.1)), Recorder()
    options = {}
    if buffered:
        options = {"rollout_buffer_class": KLRolloutBuffer, "rollout_buffer_kwargs": {"env": env}}
    train(env, [recorder, Grow()] if buffered else [KLCallback(), recorder, Grow()], **options)
    assert recorder.infos[-1][0]["kl_coef"] == pytest.approx(0.3)
    np.testing.assert_allclose(recorder.stored, shaped(recorder)[-24:], atol=1e-5)


def test_without_a_consumer_there_is_one_warning(tiny_llama, monkeypatch):
    monkeypatch.setattr("textrl_env.core._CONSUMER_PATIENCE", 20)
    agent = PPO("MultiInputPolicy", GymVecEnv(text_venv(tiny_llama)), n_steps=24, batch_size=24)
    with pytest.warns(UserWarning, match="nobody has announced") as caught:
        agent.learn(96)
    assert sum("nobody has announced" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("kl_mode", ["none", "policy"])
def test_a_consumer_where_none_is_wanted(tiny_llama, kl_mode):
    env = GymVecEnv(text_venv(tiny_llama, kl_mode=kl_mode))
    with pytest.raises(ValueError, match=f"kl_mode is '{kl_mode}'.*leave the callback or buffer"):
        train(env, KLCallback())
    with pytest.raises(ValueError, match="leave the callback or buffer out"):
        train(env, None, rollout_buffer_class=KLRolloutBuffer, rollout_buffer_kwargs={"env": env})


def test_rescaled_rewards_are_refused(tiny_llama):
    env = VecNormalize(GymVecEnv(text_venv(tiny_llama)), norm_obs=False)
    with pytest.raises(ValueError, match=r"use VecNormalize\(..., norm_reward=False\)"):
        train(env, KLCallback())
    with pytest.raises(ValueError, match="VecNormalize rescales the rewards"):
        train(env, None, rollout_buffer_class=KLRolloutBuffer, rollout_buffer_kwargs={"env": env})
    train(VecNormalize(env.venv, norm_obs=False, norm_reward=False), KLCallback())
    assert env.venv.venv.unwrapped.mdp.kl_consumer


def test_the_callback_leaves_agents_alone_that_subtract(tiny_llama):
    recorder = Recorder()
    env = GymVecEnv(text_venv(tiny_llama))
    agent = PPO("MultiInputPolicy", env, n_steps=8, batch_size=16, n_epochs=1)
    agent.subtracts_kl = True
    agent.learn(16, callback=[KLCallback(), recorder])
    expected = [[i["task_reward"] - i["kl_coef"] * i["kl"] for i in s] for s in recorder.infos]
    np.testing.assert_allclose(recorder.stored, expected, atol=1e-6)


def test_saving_and_loading_with_the_buffer(tiny_llama, tmp_path):
    env = GymVecEnv(text_venv(tiny_llama))
    options = {"rollout_buffer_class": KLRolloutBuffer, "rollout_buffer_kwargs": {"env": env}}
    agent = train(env, None, timesteps=48, **options)
    agent.save(tmp_path / "agent")
    again = PPO.load(tmp_path / "agent", env=env, rollout_buffer_kwargs={"env": env})
    observation = env.reset()
    assert (
        again.predict(observation, deterministic=True)[0].tolist()
        == agent.predict(observation, deterministic=True)[0].tolist()
    )
    again.learn(48)


def test_the_callback_works_with_maskable_ppo(tiny_llama, monkeypatch):
    sb3_contrib = pytest.importorskip("sb3_contrib")
    monkeypatch.setattr("textrl_env.core._CONSUMER_PATIENCE", 1)
    recorder = Recorder()
    env = GymVecEnv(text_venv(tiny_llama, allowed_tokens=ids("ab"), min_new_tokens=2))
    train(env, [KLCallback(), recorder], sb3_contrib.MaskablePPO)
    np.testing.assert_allclose(recorder.stored, shaped(recorder)[-24:], atol=1e-5)
    # Both log-probabilities are over the masked tokens: two letters, then the end as well.
    assert min(np.concatenate(recorder.log_probs)) > -3


def test_the_agent_learns_through_the_bridge(tiny_llama):
    """From a vocabulary of three the likeliest completion by far becomes the rewarded one."""
    task = FunctionTask(["p"], score=lambda text, sample: float(text.count("a")))
    env = GymVecEnv(
        text_venv(tiny_llama, num_envs=8, task=task, allowed_tokens=ids("ab"), kl_coef=0.01)
    )
    sb3_contrib = pytest.importorskip("sb3_contrib")
    agent = sb3_contrib.MaskablePPO(
        "MultiInputPolicy", env, n_steps=16, batch_size=32, n_epochs=4, learning_rate=3e-3,
        gamma=1.0, seed=0, device="cpu",
    )  # fmt: skip
    recorder = Recorder()
    agent.learn(2048, callback=[KLCallback(), recorder])

    def mean_return(steps):
        ended = [i["task_reward"] for infos in steps for i in infos if "text" in i]
        return np.mean(ended)

    assert mean_return(recorder.infos[-32:]) > mean_return(recorder.infos[:32]) + 1


def test_ppo_with_a_language_model_as_its_policy(tiny_llama):
    policies = pytest.importorskip("agents.policies")
    recorder = Recorder()
    env = GymVecEnv(text_venv(tiny_llama))
    agent = PPO(
        policies.LMPolicy, env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu",
        policy_kwargs={"model": tiny_llama},
    )  # fmt: skip
    agent.learn(16, callback=[KLCallback(), recorder])
    # The policy starts as the reference: no KL is charged.
    ref_logprobs = [[i["ref_logprob"] for i in infos] for infos in recorder.infos]
    np.testing.assert_allclose(recorder.log_probs, ref_logprobs, atol=1e-4)
