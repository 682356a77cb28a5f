"""Faults that users of other libraries met, each with the small test that shows it."""

import subprocess
import sys
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecNormalize

from agents import GRPO, PPO
from agents.progress import ProgressCallback


def weights(agent):
    return torch.cat([parameter.detach().flatten() for parameter in agent.policy.parameters()])


class Line(gym.Env):
    """Observes the step of the episode and the number of the episode; never ends by itself.

    The reward is 1, and an episode is the same whenever it starts.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, action_space=None, length=None, spoil=None):
        self.action_space = action_space or spaces.Discrete(2)
        self.length, self.spoil, self.episode, self.total = length, spoil, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.episode += 1
        return np.array([0, self.episode], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        self.total += 1
        observation, reward = np.array([self.steps, self.episode], np.float32), 1.0
        if self.spoil is not None:
            observation, reward = self.spoil(self.total, observation, reward)
        return observation, reward, self.steps == self.length, False, {}


def limited(steps, **kwargs):
    return gym.wrappers.TimeLimit(Line(**kwargs), steps)


# Truncation


def test_a_time_limit_is_no_end():
    """Reward 1 forever is worth 1/(1 − γ), and no bonus shows in the stored rewards."""

    class Blind(gym.ObservationWrapper):
        observation_space = spaces.Box(-1, 1, (1,), np.float32)

        def observation(self, observation):
            return np.ones(1, np.float32)

    agent = PPO(
        "MlpPolicy", make_vec_env(lambda: Blind(limited(8)), n_envs=4), n_steps=16, batch_size=64,
        gamma=0.9, learning_rate=3e-2, seed=0, max_grad_norm=100,
    )  # fmt: skip
    agent.learn(64 * 40)
    assert agent.rollout_buffer.truncated.sum() == 8
    assert (agent.rollout_buffer.rewards == 1).all()
    with torch.no_grad():
        assert float(agent.policy.predict_values(torch.ones(1, 1))) == pytest.approx(10, rel=0.05)


# Autoreset


def test_transitions_do_not_depend_on_the_autoreset_mode():
    """The same states, actions, rewards and next states, and none that nobody took."""

    class Transitions(BaseCallback):
        def __init__(self):
            super().__init__()
            self.seen = Counter()
            self.state = None

        def _on_rollout_start(self):
            self.state = self.model._last_obs

        def _on_step(self):
            seen = self.locals
            for i, info in enumerate(seen["infos"]):
                after = info["terminal_observation"] if seen["dones"][i] else seen["new_obs"][i]
                key = (*self.state[i], seen["actions"][i], seen["rewards"][i], *after)
                self.seen[tuple(map(float, key))] += 1
            self.state = seen["new_obs"]
            return True

    collected = []
    for mode in AutoresetMode:
        makers = [lambda: limited(5), lambda: limited(7, length=3)]
        env = SyncVectorEnv(makers, autoreset_mode=mode)
        agent = PPO("MlpPolicy", env, n_steps=24, batch_size=48, n_epochs=1, seed=0)
        callback = Transitions()
        agent.learn(48, callback=callback)
        collected.append(callback.seen)
        assert {info["l"] for info in agent.ep_info_buffer} == {3, 5}
        assert sum(callback.seen.values()) == 48
    assert collected[0] == collected[1] == collected[2]


# Clipping and bounds


def test_the_action_that_was_drawn_is_the_one_that_is_stored():
    """Clipped 50σ away for the environment, its first ratio is 1 nevertheless."""
    space = spaces.Box(5.0, 6.0, (2,), np.float32)
    agent = PPO(
        "MlpPolicy", make_vec_env(lambda: Line(space), n_envs=2), n_steps=8, batch_size=16,
        n_epochs=1, seed=0, policy_kwargs={"log_std_init": np.log(0.1)},
    )  # fmt: skip
    agent.learn(16)
    assert agent.rollout_buffer.actions.abs().max() < 1
    logged = agent.logger.name_to_value
    assert logged["train/approx_kl"] == pytest.approx(0, abs=1e-6)
    assert logged["train/clip_fraction"] == 0
    assert (agent.predict(np.zeros(2, np.float32))[0] == 5).all()


@pytest.mark.parametrize("squash_output", [True, False])
def test_state_dependent_exploration_keeps_the_bounds(squash_output):
    """The environment asserts it; the bounds differ, and neither is symmetric."""
    low, high = np.array([[0, -5], [3, 5]], np.float32)
    space = spaces.Box(low, high)
    agent = PPO(
        "MlpPolicy", make_vec_env(lambda: limited(9, action_space=space), n_envs=2), n_steps=32,
        batch_size=64, n_epochs=1, seed=0, use_sde=True, sde_sample_freq=4,
        policy_kwargs={"squash_output": squash_output, "log_std_init": 0.5},
    )  # fmt: skip

    class Taken(BaseCallback):
        actions, noise = (), frozenset()

        def _on_step(self):
            self.actions = (*self.actions, self.locals["clipped_actions"])
            matrix = self.model.policy.action_dist.exploration_mat
            self.noise |= {tuple(matrix.flatten().tolist())}
            return True

    taken = Taken()
    agent.learn(128, callback=taken)
    assert len(taken.noise) == 2 * 32 / 4  # drawn anew every 4 steps of two rollouts
    actions = np.concatenate(taken.actions)
    assert actions.min(0) == pytest.approx(low, abs=0.5)
    assert actions.max(0) == pytest.approx(high, abs=0.5)
    for deterministic in (True, False):
        observations = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
        predicted, _ = agent.predict(observations, deterministic=deterministic)
        assert all(map(space.contains, predicted))


# Normalisation


def test_a_normalised_agent_acts_the_same_in_a_new_process(tmp_path):
    env = VecNormalize(make_vec_env("Pendulum-v1", seed=0))
    agent = PPO("MlpPolicy", env, n_steps=64, seed=0).learn(64)
    assert env.obs_rms.count == pytest.approx(65, abs=1e-3)  # real steps and one reset
    agent.save(tmp_path / "agent")
    env.save(str(tmp_path / "normaliser"))
    observations = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    expected, _ = agent.predict(env.normalize_obs(observations), deterministic=True)
    code = f"""
import numpy as np
from agents import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
env = VecNormalize.load({str(tmp_path / "normaliser")!r}, make_vec_env("Pendulum-v1"))
observations = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
agent = PPO.load({str(tmp_path / "agent")!r})
print(agent.predict(env.normalize_obs(observations), deterministic=True)[0].tolist())
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert output.stdout.strip() == str(expected.tolist()), output.stderr


# What is not finite


def nan_reward(step, observation, reward):
    return observation, np.nan if step == 5 else reward


def infinite_observation(step, observation, reward):
    return np.full(2, np.inf, np.float32) if step == 5 else observation, reward


@pytest.mark.parametrize("agent_class", [PPO, GRPO])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan_reward, "reward of slot 1 holds nan at step 10"),
        (infinite_observation, "observation of slot 1 holds inf at step 10"),
    ],
)
def test_an_environment_that_gives_nan_is_named(agent_class, spoil, message):
    makers = [lambda: limited(20), lambda: limited(20, spoil=spoil)]
    kwargs = {"n_steps": 16, "batch_size": 32} if agent_class is PPO else {"group_size": 1}
    agent = agent_class("MlpPolicy", SyncVectorEnv(makers), seed=0, **kwargs)
    before = weights(agent)
    with pytest.raises(FloatingPointError, match=message):
        agent.learn(64)
    assert torch.equal(weights(agent), before)


def test_nan_at_either_end_of_an_episode_is_named():
    class Starts(Line):
        """Spoils the first observation of an episode."""

        def __init__(self, spoilt):
            super().__init__(length=4)
            self.spoilt = spoilt

        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            return observation * (np.nan if self.episode == self.spoilt else 1), info

    for agent_class, kwargs, at in (
        (PPO, {"n_steps": 16, "batch_size": 16}, 4), (GRPO, {"group_size": 1}, 0)
    ):  # fmt: skip
        for spoilt, step in ((1, 0), (2, at)):
            agent = agent_class("MlpPolicy", Starts(spoilt), seed=0, **kwargs)
            with pytest.raises(FloatingPointError, match=f"slot 0 holds nan at step {step};"):
                agent.learn(16)
    last = limited(5, spoil=infinite_observation)
    with pytest.raises(FloatingPointError, match="last observation of slot 0 holds inf at step 5"):
        PPO("MlpPolicy", last, n_steps=16, batch_size=16, seed=0).learn(16)


# Seeds and resumption


def test_the_seed_decides_everything():
    results = []
    for noise, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(noise)
        np.random.seed(noise)
        agent = PPO("MlpPolicy", "Pendulum-v1", n_steps=32, batch_size=16, seed=seed).learn(64)
        results.append(weights(agent))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_two_halves_are_a_whole(tmp_path):
    """To the bit, where the environment stands at a reset: draws, optimiser, counts, logs."""

    class Still(gym.ObservationWrapper):
        def observation(self, observation):
            return observation * np.array([1, 0], np.float32)

    def make():
        env = make_vec_env(lambda: Still(limited(8, length=6)), n_envs=2)
        return env, PPO("MlpPolicy", env, n_steps=24, batch_size=16, n_epochs=2, seed=0)

    _, whole = make()
    whole.learn(192)
    _, half = make()
    half.learn(96).save(tmp_path / "half")
    torch.manual_seed(99)
    np.random.seed(99)
    resumed = PPO.load(tmp_path / "half", env=make()[0])
    resumed.learn(96, reset_num_timesteps=False)
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.num_timesteps == whole.num_timesteps == 192
    assert resumed._n_updates == whole._n_updates == 8
    assert [e["r"] for e in resumed.ep_info_buffer] == [e["r"] for e in whole.ep_info_buffer]


# Exceptions


class Broken(RuntimeError):
    """What a test raises."""


class Breaks(BaseCallback):
    """Raises at one step."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def _on_step(self):
        if self.n_calls == self.at:
            raise Broken
        return True


@pytest.mark.parametrize("who", ["callback", "environment"])
@pytest.mark.parametrize("kind", ["control", "text"])
def test_after_an_exception_everything_is_closed_and_training_goes_on(
    tiny_llama, tmp_path, who, kind
):
    scored = []

    def reward(text, sample):
        scored.append(text)
        if who == "environment" and len(scored) == 6:
            raise Broken
        return 0.0

    def spoil(step, observation, reward):
        if who == "environment" and step == 21:
            raise Broken
        return observation, reward

    if kind == "control":
        agent = PPO("MlpPolicy", limited(5, spoil=spoil), n_steps=8, batch_size=8, seed=0)
    else:
        env = gym.make_vec(
            "textrl_env:TextRL-v0", num_envs=4, task="copy", model=tiny_llama, max_new_tokens=5,
            min_new_tokens=4, reward=reward, reward_timeout=None,
        )  # fmt: skip
        agent = PPO("LMPolicy", env, seed=0)
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    bar, checkpoints = ProgressCallback(), CheckpointCallback(3, str(tmp_path), "model")
    callbacks = [bar, checkpoints, *([Breaks(7 if kind == "text" else 21)] * (who == "callback"))]
    expected = Broken if kind == "control" or who == "callback" else Exception
    with pytest.raises(expected):
        agent.learn(10_000, callback=callbacks, progress_bar=True)
    assert not bar._progress.live.is_started
    assert bar._progress.tasks[0].completed == agent.num_timesteps > 0
    rows = (tmp_path / "progress.csv").read_text().splitlines()
    assert len(rows) == 1 + (2 if kind == "control" else 1)
    files = sorted(tmp_path.glob("model_*"))
    assert files
    for file in files:
        assert PPO.load(file).num_timesteps <= agent.num_timesteps
    steps = agent.num_timesteps
    agent.learn(16, progress_bar=True, reset_num_timesteps=False)
    assert agent.num_timesteps >= steps + 16
    agent.learn(16, progress_bar=True)
    assert torch.isfinite(weights(agent)).all()


# Evaluation


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_return_is_the_environment_s_under_a_wrapper_that_scales():
    def scaled():
        return gym.wrappers.TransformReward(Monitor(gym.make("CartPole-v1")), lambda r: r / 100)

    agent = PPO("MlpPolicy", scaled(), n_steps=64, seed=0).learn(64)
    assert float(agent.rollout_buffer.rewards.max()) == pytest.approx(0.01)
    assert np.mean([info["r"] for info in agent.ep_info_buffer]) > 5
    returns, lengths = evaluate_policy(agent, scaled(), 3, return_episode_rewards=True)
    assert returns == lengths
