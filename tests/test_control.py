"""The same agents on environments other than text, beside Stable-Baselines3."""

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecMonitor,
    VecNormalize,
)

from agents import GRPO, PPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from agents.fused import FusedUpdate
from agents.kl_control import FixedKL, TwoSidedKL
from agents.updates import AutogradUpdate
from textrl_env.sb3 import GymVecEnv


class Recorder(BaseCallback):
    """Keeps the names and some values of what a callback is shown."""

    def __init__(self):
        super().__init__()
        self.calls, self.steps, self.names = [], [], set()

    def _on_training_start(self):
        self.calls.append("training_start")

    def _on_rollout_start(self):
        self.calls.append("rollout_start")

    def _on_step(self):
        self.calls.append("step")
        self.names = set(self.locals)
        keys = ("new_obs", "rewards", "dones", "actions", "clipped_actions")
        self.steps.append({key: np.array(self.locals[key]) for key in keys})
        self.steps[-1]["num_timesteps"] = self.num_timesteps
        return True

    def _on_rollout_end(self):
        self.calls.append("rollout_end")

    def _on_training_end(self):
        self.calls.append("training_end")


class Limits(gym.Env):
    """Observes its step; terminates at step 5 from even seeds, is cut at step 3 from odd ones."""

    observation_space = spaces.Box(-10, 10, (2,), np.float32)

    def __init__(self, action_space=None):
        self.action_space = action_space or spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.start = 0, int(self.np_random.integers(2))
        return np.array([0, self.start], np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = np.array([self.steps, self.start], np.float32)
        self.taken = action
        terminated = self.steps == 5
        truncated = self.start == 1 and self.steps == 3
        return observation, float(self.steps), terminated, truncated, {}


class SharedShuffling(np.random.Generator):
    """Draws permutations as Stable-Baselines3's buffer does, from numpy's global state."""

    def permutation(self, count):
        return np.random.permutation(count)


@pytest.mark.parametrize("use_sde", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_rollout_equals_stable_baselines3(env_id, use_sde):
    """The same seed gives the same observations, actions, rewards, values and advantages."""
    if use_sde and env_id == "CartPole-v1":
        pytest.skip("state-dependent exploration is for continuous actions")
    runs = []
    for agent_class in (PPO, stable_baselines3.PPO):
        env = make_vec_env(env_id, n_envs=3, seed=7)
        agent = agent_class(
            "MlpPolicy", env, n_steps=230, batch_size=230, n_epochs=1, seed=7, gamma=0.9,
            gae_lambda=0.8, use_sde=use_sde, learning_rate=0.0,
        )  # fmt: skip
        recorder = Recorder()
        agent.learn(690, callback=recorder)
        runs.append((agent, recorder))
    (ours, first), (theirs, second) = runs
    assert first.calls == second.calls
    for one, two in zip(first.steps, second.steps, strict=True):
        for key, value in one.items():
            np.testing.assert_array_equal(value, two[key], err_msg=key)
    missing = second.names - first.names
    assert missing <= {"__class__", "idx", "done", "terminal_obs", "terminal_value"}
    batch, buffer = ours.rollout_buffer, theirs.rollout_buffer

    def flat(array):
        return torch.as_tensor(array).reshape(3, 230)  # theirs is flattened slot by slot

    for name, other in (
        ("values", buffer.values),
        ("logprobs", buffer.log_probs),
        ("advantages", buffer.advantages),
        ("returns", buffer.returns),
    ):
        torch.testing.assert_close(getattr(batch, name), flat(other), atol=1e-4, rtol=1e-4)
    assert [e["r"] for e in ours.ep_info_buffer] == [e["r"] for e in theirs.ep_info_buffer]


def test_a_whole_training_equals_stable_baselines3():
    """With the same mini-batches, the weights after several updates are the same."""
    runs = []
    for agent_class in (PPO, stable_baselines3.PPO):
        agent = agent_class(
            "MlpPolicy", make_vec_env("CartPole-v1", n_envs=2, seed=3), n_steps=64, batch_size=32,
            n_epochs=3, seed=3, ent_coef=0.01, clip_range=lambda progress: 0.2 * progress,
            learning_rate=lambda progress: 1e-3 * progress, clip_range_vf=0.1,
        )  # fmt: skip
        if agent_class is PPO:
            agent.shuffling = SharedShuffling(np.random.PCG64())
        agent.learn(512)
        runs.append(torch.cat([p.detach().flatten() for p in agent.policy.parameters()]))
    torch.testing.assert_close(*runs, atol=1e-5, rtol=1e-4)


def beside_stable_baselines3(**kwargs):
    """Both agents after the same training, with the same mini-batches."""
    agents = []
    for agent_class in (PPO, stable_baselines3.PPO):
        env = make_vec_env("Pendulum-v1", n_envs=2, seed=3)
        agent = agent_class(
            "MlpPolicy", env, **{"n_steps": 128, "batch_size": 32, "seed": 3, **kwargs}
        )
        if agent_class is PPO:
            agent.shuffling = SharedShuffling(np.random.PCG64())
        agents.append(agent.learn(512))
    return agents


def test_logged_values_equal_stable_baselines3():
    ours, theirs = (
        agent.logger.name_to_value for agent in beside_stable_baselines3(n_epochs=2, ent_coef=0.1)
    )
    for name in (
        "explained_variance", "entropy_loss", "policy_gradient_loss", "value_loss", "std",
        "learning_rate", "clip_range", "n_updates",
    ):  # fmt: skip
        assert ours[f"train/{name}"] == pytest.approx(theirs[f"train/{name}"], rel=1e-3), name


@pytest.mark.parametrize("target_kl", [3e-4, 1e-3, 3e-3])
def test_the_epochs_stop_where_those_of_stable_baselines3_do(target_kl):
    """Before the step of the mini-batch whose KL exceeds 1.5 times the target."""
    ours, theirs = beside_stable_baselines3(n_epochs=8, target_kl=target_kl, learning_rate=1e-3)
    assert ours._n_updates == theirs._n_updates < 16
    torch.testing.assert_close(
        *(
            torch.cat([p.detach().flatten() for p in agent.policy.parameters()])
            for agent in (ours, theirs)
        ),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("update", ["autograd", "fused"])
def test_options_of_ppo_reach_the_loss(update):
    """The upper clip of its own, schedules of either, and advantages that stay as they are."""

    def loss(ratio, **kwargs):
        agent = PPO("MlpPolicy", "CartPole-v1", n_steps=2, batch_size=2, seed=0, **kwargs)
        _, callback = agent._setup_learn(1, None)
        agent.collect_rollouts(callback)
        agent.compute_advantages(agent.rollout_buffer)
        batch = agent.rollout_buffer.as_transitions()
        batch.advantages = torch.tensor([[1.0], [3.0]])
        batch.logprobs = batch.logprobs - np.log(ratio)
        agent._current_progress_remaining = 0.5
        if update == "autograd":
            means = AutogradUpdate(agent, batch).gradients(batch)
        else:
            fused = FusedUpdate(agent, agent.network, batch)
            means = fused.gradients(next(fused.mini_batches(np.arange(2), 2)))
        return means["policy_gradient_loss"]

    plain = {"normalize_advantage": False}
    assert loss(1.5, **plain) == pytest.approx(-2.4)
    assert loss(1.5, **plain, clip_range_high=0.4) == pytest.approx(-2.8)
    assert loss(1.5, **plain, clip_range_high=lambda p: 0.6 * p) == pytest.approx(-2.6)
    assert loss(1.5, **plain, clip_range=lambda p: 0.2 * p) == pytest.approx(-2.2)
    assert loss(1.5) == pytest.approx(0.5**0.5 * (1.5 - 1.2) / 2)


def test_a_kl_penalty_holds_the_update_and_adapts(tmp_path):
    """The rule of the 2017 paper, told the divergence of the update that was made."""

    def train(objective, steps=64):
        agent = PPO(
            "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64, n_epochs=20, learning_rate=1e-2,
            seed=0, objective=objective,
        )  # fmt: skip
        agent.set_logger(configure(str(tmp_path), []))
        return agent.learn(steps)

    divergences = []
    for coef in (0.0, 1.0, 1e4):
        agent = train(FixedKL(coef))
        divergences.append(agent._divergence())
        assert agent.logger.name_to_value["train/kl_penalty_coef"] == coef
        assert "train/clip_fraction" not in agent.logger.name_to_value
    assert divergences[0] > divergences[1] > divergences[2] >= 0
    [before, after] = (TwoSidedKL(1.0, target) for target in (1e9, 1e-9))
    assert train(before).objective.coef == 0.5
    assert train(after).objective.coef == 2.0
    agent = train(TwoSidedKL(1.0, 1e-9))
    agent.save(tmp_path / "agent")
    assert PPO.load(tmp_path / "agent").objective.coef == 2.0
    shared = TwoSidedKL(1.0, 1e-9)
    train(shared)
    assert shared.coef == 1.0
    with pytest.raises(ValueError, match="objective is 'kl'"):
        train("kl")
    with pytest.raises(ValueError, match=r"clips nothing, and clip_range_high is 0\.3"):
        PPO("MlpPolicy", "CartPole-v1", objective=shared, clip_range_high=0.3)


@pytest.mark.parametrize("mode", [*AutoresetMode, "vec"])
def test_truncation_bootstraps_and_termination_does_not(mode):
    """In every autoreset mode, and the logged rewards stay the environment's."""
    if mode == "vec":
        env = make_vec_env(Limits, n_envs=4, seed=1)
    else:
        env = gym.vector.SyncVectorEnv([Limits] * 4, autoreset_mode=mode)
    agent = PPO("MlpPolicy", env, n_steps=12, batch_size=48, seed=1, gamma=0.5, gae_lambda=1.0)
    _, callback = agent._setup_learn(1, None)
    agent.collect_rollouts(callback)
    agent.compute_advantages(agent.rollout_buffer)
    batch, policy = agent.rollout_buffer, agent.policy
    assert batch.truncated.any()
    assert batch.terminated.any()
    with torch.no_grad():
        for i, t in torch.nonzero(batch.truncated | batch.terminated).tolist():
            steps, start = batch.observations[i, t].tolist()
            assert batch.rewards[i, t] == steps + 1
            expected = batch.rewards[i, t].clone()
            if batch.truncated[i, t]:
                assert (steps + 1, start) == (3, 1)
                final = torch.tensor([[steps + 1, start]])
                expected += 0.5 * policy.predict_values(final)[0, 0]
            torch.testing.assert_close(batch.returns[i, t], expected)
    lengths = {info["l"] for info in agent.ep_info_buffer}
    assert lengths <= {3, 5}


def test_actions_are_clipped_for_the_environment_only():
    space = spaces.Box(np.array([-0.01, 0.0]), np.array([0.0, 0.02]), dtype=np.float32)
    env = make_vec_env(lambda: Limits(space), n_envs=1)
    recorder = Recorder()
    agent = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=0)
    agent.learn(16, callback=recorder)
    for step in recorder.steps:
        np.testing.assert_array_equal(
            step["clipped_actions"], np.clip(step["actions"], space.low, space.high)
        )
    stored = agent.rollout_buffer.actions
    assert (stored.abs() > 0.02).any()
    logprobs = agent.evaluate(agent.rollout_buffer).logprobs
    assert logprobs.shape == (1, 16)


@pytest.mark.parametrize(
    "agent_class", [GRPO, RLOO, ReinforcePlusPlusBaseline], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("kind", ["vec", "vector"])
def test_a_group_starts_from_one_seed(agent_class, kind):
    if kind == "vec":
        env = make_vec_env("CartPole-v1", n_envs=6)
    else:
        env = gym.make_vec("CartPole-v1", num_envs=6, vectorization_mode="sync")
    agent = agent_class("MlpPolicy", env, group_size=3, seed=0)
    agent.learn(1)
    batch = agent.rollout_buffer
    starts = batch.observations[:, 0]
    assert torch.equal(starts[:3], starts[:1].expand(3, -1))
    assert torch.equal(starts[3:], starts[3:4].expand(3, -1))
    assert not torch.equal(starts[0], starts[3])
    assert batch.mask.sum(1).min() > 5
    agent.learn(1, reset_num_timesteps=False)
    assert not torch.equal(agent.rollout_buffer.observations[0, 0], starts[0])


@pytest.mark.parametrize(
    "agent_class",
    [PPO, GRPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline],
    ids=lambda c: c.__name__,
)
def test_every_agent_improves_on_cartpole(agent_class):
    kwargs = {"learning_rate": 3e-3, "seed": 0}
    if agent_class is PPO:
        kwargs |= {"n_steps": 64, "batch_size": 256, "n_epochs": 8, "gae_lambda": 0.8}
    else:
        kwargs |= {"batch_size": 1024, "n_epochs": 4}
    agent = agent_class("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, seed=0), **kwargs)
    agent.learn(16_000)
    returns = [info["r"] for info in agent.ep_info_buffer]
    assert np.mean(returns[-20:]) > 100


def test_dict_observations_and_all_action_spaces():
    class Any(gym.Env):
        def __init__(self, observation_space, action_space):
            self.observation_space, self.action_space = observation_space, action_space

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.observation_space.seed(int(self.np_random.integers(1000)))
            return self.observation_space.sample(), {}

        def step(self, action):
            assert self.action_space.contains(action)
            done = bool(self.np_random.random() < 0.2)
            return self.observation_space.sample(), 1.0, done, False, {}

    box = spaces.Box(-1, 1, (3,), np.float32)
    both = spaces.Dict(a=box, b=spaces.Discrete(4))
    for observation_space, policy in ((box, "MlpPolicy"), (both, "MultiInputPolicy")):
        for action_space in (
            spaces.Discrete(3),
            spaces.MultiDiscrete([2, 3]),
            spaces.MultiBinary(4),
            spaces.Box(-2, 3, (2,), np.float32),
        ):
            for agent_class in (PPO, GRPO):
                env = make_vec_env(lambda o=observation_space, a=action_space: Any(o, a), n_envs=4)
                kwargs = {"n_steps": 8} if agent_class is PPO else {"group_size": 2}
                agent = agent_class(policy, env, seed=0, **kwargs)
                agent.learn(32)
                assert all(p.isfinite().all() for p in agent.policy.parameters())
                assert agent.rollout_buffer.actions.shape[2:] == action_space.shape


def test_vectors_that_restart_late():
    """Gymnasium's native CartPole spends a step on each restart: no part of anything learnt."""
    native = gym.make_vec("CartPole-v1", num_envs=4)
    with pytest.raises(ValueError, match="vectorization_mode='sync'"):
        GymVecEnv(native)
    recorder = Recorder()
    agent = PPO("MlpPolicy", native, n_steps=128, seed=0)
    agent.learn(1, callback=recorder)
    batch = agent.rollout_buffer
    ended = batch.terminated | batch.truncated
    assert ended.sum() > 10
    # The step after an end is the restart: its action was ignored and its reward is 0.
    assert torch.equal(~batch.mask[:, 1:], ended[:, :-1])
    assert (batch.rewards[batch.mask] == 1).all()
    assert agent.num_timesteps == int(batch.mask.sum())
    starts = batch.observations[:, 1:][~batch.mask[:, :-1]]
    assert starts.abs().max() <= 0.05
    assert len(batch.as_transitions()) == agent.num_timesteps
    # Episodes have their true length, and returns end with them.
    agent.compute_advantages(batch)
    [slot, end] = torch.nonzero(ended)[0].tolist()
    assert agent.ep_info_buffer[0]["l"] == agent.ep_info_buffer[0]["r"] >= 8
    lengths = sorted(info["l"] for info in agent.ep_info_buffer)
    assert sum(lengths) + 4 * 128 - int(batch.mask.sum()) <= 4 * 128
    torch.testing.assert_close(batch.returns[slot, end], torch.tensor(1.0))


def test_wrappers_that_would_count_restarts_are_refused():
    late = GymVecEnv(gym.make_vec("CartPole-v1", num_envs=2), allow_late=True)
    for wrapper in (VecMonitor, VecNormalize):
        with pytest.raises(ValueError, match=f"{wrapper.__name__} would take the restarts"):
            PPO("MlpPolicy", wrapper(late))


def test_a_late_vector_of_images_keeps_its_mask():
    """Stable-Baselines3 puts a wrapper around channels that come last."""

    class Images(gym.vector.VectorEnv):
        metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        num_envs = 2
        single_observation_space = spaces.Box(0, 255, (36, 36, 3), np.uint8)
        observation_space = gym.vector.utils.batch_space(single_observation_space, 2)
        single_action_space = spaces.Discrete(2)
        action_space = gym.vector.utils.batch_space(single_action_space, 2)

        def _observe(self):
            return np.zeros((2, 36, 36, 3), np.uint8)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return self._observe(), {}

        def step(self, actions):
            self.t = (self.t + 1) % 6
            reward = np.full(2, 100.0 if self.t == 0 else 1.0)
            return self._observe(), reward, np.full(2, self.t == 5), np.zeros(2, bool), {}

    agent = PPO("CnnPolicy", Images(), n_steps=24, batch_size=24, n_epochs=1, seed=0).learn(1)
    batch = agent.rollout_buffer
    assert (~batch.mask).sum() == 8
    assert (batch.rewards[batch.mask] == 1).all()
    assert {info["r"] for info in agent.ep_info_buffer} == {5.0}


@pytest.mark.parametrize("callback", [None, lambda *_: True])
def test_arrays_that_an_environment_fills_anew_are_copied(callback):
    class Reuses(DummyVecEnv):
        """Gives its own buffers, and no last observation."""

        def step_wait(self):
            super().step_wait()
            infos = [{} for _ in range(self.num_envs)]
            return self.buf_obs[None], self.buf_rews, self.buf_dones, infos

    agent = PPO("MlpPolicy", Reuses([Limits] * 2), n_steps=12, batch_size=24, seed=0)
    agent.learn(1, callback=callback)
    batch = agent.rollout_buffer
    assert torch.equal(batch.observations[..., 0] + 1, batch.rewards)
    assert batch.terminated.sum() >= 4
    assert not batch.truncated.any()


def test_a_linear_clip_range_of_the_values_ends_at_zero():
    agent = PPO(
        "MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=1,
        clip_range_vf=lambda progress: 0.2 * progress, seed=0,
        policy_kwargs={"activation_fn": torch.nn.ELU},
    )  # fmt: skip
    agent.learn(64)
    assert agent.value_clip_range() == 0.0


def test_a_rollout_of_restarts_alone_changes_nothing():
    agent = PPO(
        "MlpPolicy", gym.make_vec("CartPole-v1", num_envs=1), n_steps=1, batch_size=2,
        normalize_advantage=False, objective=FixedKL(1.0), seed=0,
    )  # fmt: skip
    agent.learn(60)
    assert agent.num_timesteps == 60


@pytest.mark.parametrize("callback", [None, lambda *_: True])
def test_no_action_follows_from_an_observation_that_is_not_a_number(callback):
    class Breaks(Limits):
        def step(self, action):
            assert np.isfinite(action).all()
            self.total = getattr(self, "total", 0) + 1
            observation, *rest = super().step(action)
            return observation * (np.nan if self.total == 7 else 1), *rest

    env = make_vec_env(lambda: Breaks(spaces.Box(-1, 1, (2,), np.float32)), 1)
    agent = PPO("MlpPolicy", env, n_steps=64, seed=0)
    with pytest.raises(FloatingPointError, match="slot 0 holds nan at step 7"):
        agent.learn(64, callback=callback)


def test_numbers_of_numpy_are_numbers():
    agent = PPO(
        "MlpPolicy", "CartPole-v1", n_steps=np.int64(32), batch_size=np.int64(32),
        ent_coef=np.float32(0.01), seed=0,
    )  # fmt: skip
    agent.learn(32)
    with pytest.raises(ValueError, match="batch_size is 0"):
        PPO("MlpPolicy", "CartPole-v1", batch_size=0)


def test_a_late_vector_without_a_callback_gives_the_same_rollout():
    rollouts = []
    for callback in (None, Recorder()):
        agent = PPO("MlpPolicy", gym.make_vec("CartPole-v1", num_envs=4), n_steps=64, seed=0)
        agent.learn(1, callback=callback)
        rollouts.append(agent.rollout_buffer)
    for name in ("observations", "actions", "mask", "rewards", "terminated"):
        assert torch.equal(getattr(rollouts[0], name), getattr(rollouts[1], name)), name
    for name in ("logprobs", "values", "last_values"):
        torch.testing.assert_close(getattr(rollouts[0], name), getattr(rollouts[1], name))


def test_vectors_that_share_their_arrays():
    shared = gym.make_vec(
        "CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"copy": False}
    )
    agent = PPO("MlpPolicy", shared, n_steps=32, seed=0).learn(64)
    observations = agent.rollout_buffer.observations
    assert len(torch.unique(observations[0], dim=0)) == 32


def test_environments_in_other_processes():
    for env in (
        make_vec_env("CartPole-v1", n_envs=2, seed=0, vec_env_cls=SubprocVecEnv),
        gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async"),
    ):
        agent = PPO("MlpPolicy", env, n_steps=16, seed=0).learn(32)
        assert agent.rollout_buffer.mask.shape == (2, 16)
        agent.env.close()


def test_padding_is_in_no_mini_batch():
    agent = GRPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=4), group_size=2, seed=0)
    _, callback = agent._setup_learn(1, None)
    agent.collect_rollouts(callback)
    agent.compute_advantages(agent.rollout_buffer)
    batch = agent.rollout_buffer
    assert not batch.mask.all()
    flat = batch.as_transitions()
    assert flat.mask.all()
    assert len(flat) == int(batch.mask.sum()) == agent.num_timesteps
    assert torch.equal(flat.advantages[:, 0], batch.advantages.expand_as(batch.mask)[batch.mask])


def test_gradients_are_clipped_and_logged():
    seen = []
    for max_grad_norm in (1e9, 1e-3):
        agent = PPO(
            "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64, n_epochs=1, seed=0,
            max_grad_norm=max_grad_norm,
        )  # fmt: skip
        agent.policy.optimizer = torch.optim.SGD(agent.policy.parameters(), lr=1.0)
        before = torch.cat([p.detach().flatten() for p in agent.policy.parameters()])
        agent.learning_rate = 1.0
        agent._setup_lr_schedule()
        agent.learn(64)
        after = torch.cat([p.detach().flatten() for p in agent.policy.parameters()])
        seen.append(float((after - before).norm()))
    assert seen[0] > 0.01
    assert seen[1] == pytest.approx(1e-3, rel=0.01)


def test_logs_on_control_are_of_episodes(tmp_path):
    agent = PPO("MlpPolicy", "Pendulum-v1", n_steps=512, seed=0)
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    agent.learn(1024)
    header, *rows = (tmp_path / "progress.csv").read_text().splitlines()
    names = header.split(",")
    assert "rollout/task_reward" not in names
    assert {"rollout/ep_rew_mean", "train/std", "train/explained_variance"} <= set(names)
    logged = dict(zip(names, rows[-1].split(","), strict=True))
    assert float(logged["rollout/ep_len_mean"]) == 200
