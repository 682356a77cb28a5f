"""Whole completions and single steps are the same experience."""

from dataclasses import fields

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.callbacks import BaseCallback

from agents import GRPO, PPO, RLOO
from textrl_env.rewards import Reward


class Recorder(BaseCallback):
    """Keeps what a callback is shown at every step, and what it sees at the rollout's end."""

    def __init__(self):
        super().__init__()
        self.steps, self.calls = [], []

    def _on_training_start(self):
        self.calls.append("training_start")

    def _on_rollout_start(self):
        self.calls.append("rollout_start")

    def _on_step(self):
        shown = self.locals
        self.calls.append("step")
        self.steps.append(
            {
                "num_timesteps": self.num_timesteps,
                "n_steps": shown["n_steps"],
                "actions": shown["actions"].copy(),
                "rewards": shown["rewards"].copy(),
                "dones": shown["dones"].copy(),
                "log_probs": shown["log_probs"].numpy().copy(),
                "new_obs": {key: value.copy() for key, value in shown["new_obs"].items()},
                "infos": [dict(info) for info in shown["infos"]],
            }
        )
        return True

    def _on_rollout_end(self):
        self.calls.append("rollout_end")

    def _on_training_end(self):
        self.calls.append("training_end")


def per_character(completion, sample):
    """A reward at every token."""
    return float(len(completion) % 3)


def assert_equal_infos(first, second):
    assert first.keys() == second.keys()
    for key, value in first.items():
        if key == "episode":
            assert value["l"] == second[key]["l"]
            assert value["r"] == pytest.approx(second[key]["r"], abs=1e-4)
        elif key == "terminal_observation":
            for part in value:
                np.testing.assert_array_equal(value[part], second[key][part])
        elif isinstance(value, float):
            assert second[key] == pytest.approx(value, abs=1e-4)
        else:
            assert second[key] == value, key


def assert_equal_trajectories(first, second):
    for field in fields(first):
        if field.name in ("advantages", "returns"):
            continue  # made of the rest, and a group's division enlarges rounding
        one, two = getattr(first, field.name), getattr(second, field.name)
        if isinstance(one, dict):
            for key in one:
                assert torch.equal(one[key], two[key]), key
        elif one is None:
            assert two is None, field.name
        elif one.is_floating_point():
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4, msg=field.name)
        else:
            assert torch.equal(one, two), field.name


def collect(model, collector, agent_class, options, seed, vectorization="native", **kwargs):
    options = {"max_new_tokens": 5, "kl_coef": 0.1, "model": model, **options}
    num_envs = 4
    mode = options.pop("autoreset_mode", AutoresetMode.NEXT_STEP)
    if vectorization == "native":
        env = gym.make_vec(
            "textrl_env:TextRL-v0", num_envs=num_envs, autoreset_mode=mode, **options
        )
    else:
        from stable_baselines3.common.vec_env import DummyVecEnv

        env = DummyVecEnv([lambda: gym.make("textrl_env:TextRL-v0", **options)] * num_envs)
    if agent_class is not PPO:
        kwargs["group_size"] = 2
    agent = agent_class("LMPolicy", env, seed=seed, collector=collector, n_epochs=1, **kwargs)
    recorder = Recorder()
    agent.learn(1, callback=recorder)
    return agent, recorder


OPTIONS = st.fixed_dictionaries(
    {
        "task": st.sampled_from(["addition", "copy", "sort", "sentiment"]),
        "kl_mode": st.sampled_from(["reference", "policy", "none"]),
        "max_new_tokens": st.integers(2, 6),
        "on_limit": st.sampled_from(["terminate", "truncate"]),
        "temperature": st.sampled_from([1.0, 0.7]),
        "autoreset_mode": st.sampled_from(list(AutoresetMode)),
        "min_new_tokens": st.integers(0, 1),
        "stop": st.sampled_from([None, ["1", "a"]]),
        "allowed_tokens": st.sampled_from([None, range(40, 110)]),
        "reward": st.sampled_from([None, Reward(per_character, per="token")]),
    }
)


@given(OPTIONS, st.sampled_from([PPO, GRPO, RLOO]), st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_generate_and_step_agree(tiny_llama, options, agent_class, seed):
    generated, from_generate = collect(tiny_llama, "generate", agent_class, options, seed)
    stepped, from_step = collect(tiny_llama, "step", agent_class, options, seed)
    assert_equal_trajectories(generated.rollout_buffer, stepped.rollout_buffer)
    assert from_generate.calls == from_step.calls
    assert generated.num_timesteps == stepped.num_timesteps
    for one, two in zip(from_generate.steps, from_step.steps, strict=True):
        assert one["num_timesteps"] == two["num_timesteps"]
        assert one["n_steps"] == two["n_steps"]
        np.testing.assert_array_equal(one["actions"], two["actions"])
        np.testing.assert_array_equal(one["dones"], two["dones"])
        np.testing.assert_allclose(one["rewards"], two["rewards"], atol=1e-4)
        np.testing.assert_allclose(one["log_probs"], two["log_probs"], atol=1e-4)
        for key in one["new_obs"]:
            np.testing.assert_array_equal(one["new_obs"][key], two["new_obs"][key])
        for info, other in zip(one["infos"], two["infos"], strict=True):
            assert_equal_infos(info, other)


def test_a_vector_of_single_environments_agrees(tiny_llama):
    options = {"task": "addition", "max_new_tokens": 4}
    native, _ = collect(tiny_llama, "generate", GRPO, options, 3)
    wrapped, _ = collect(tiny_llama, "step", GRPO, options, 3, vectorization="dummy")
    assert_equal_trajectories(native.rollout_buffer, wrapped.rollout_buffer)
    policy = {**options, "kl_mode": "policy"}
    native, _ = collect(tiny_llama, "generate", GRPO, policy, 3)
    wrapped, _ = collect(tiny_llama, "step", GRPO, policy, 3, vectorization="dummy")
    assert_equal_trajectories(native.rollout_buffer, wrapped.rollout_buffer)


def test_the_agent_subtracts_its_own_logprob_once(tiny_llama):
    for collector in ("generate", "step"):
        agent, recorder = collect(tiny_llama, collector, GRPO, {"task": "copy"}, 0)
        batch = agent.rollout_buffer
        expected = batch.task_rewards + 0.1 * (batch.ref_logprobs - batch.logprobs)
        torch.testing.assert_close(batch.rewards, expected * batch.mask, atol=1e-5, rtol=1e-5)
        for t, step in enumerate(recorder.steps):
            np.testing.assert_allclose(step["rewards"], batch.rewards[:, t], atol=1e-6)


def test_the_reward_sits_on_the_last_token(tiny_llama):
    """Not one position later, also where the completion fills the limit or has one token."""
    for limit in (1, 5):
        options = {"kl_mode": "none", "max_new_tokens": limit, "reward": lambda text, sample: 1.0}
        agent, _ = collect(tiny_llama, "generate", GRPO, {"task": "copy", **options}, 0)
        batch = agent.rollout_buffer
        last = batch.mask.sum(1) - 1
        expected = torch.zeros_like(batch.rewards)
        expected[torch.arange(len(batch)), last] = 1.0
        assert torch.equal(batch.rewards, expected)
        assert torch.equal(batch.terminated, expected.bool())


def test_a_callback_that_changes_rewards_is_heard(tiny_llama):
    class Double(BaseCallback):
        def _on_step(self):
            self.locals["rewards"] *= 2
            return True

    for collector in ("generate", "step"):
        plain, _ = collect(tiny_llama, collector, RLOO, {"task": "copy"}, 0)
        env = gym.make_vec(
            "textrl_env:TextRL-v0",
            num_envs=4, task="copy", model=tiny_llama, kl_coef=0.1, max_new_tokens=5,
        )  # fmt: skip
        doubled = RLOO("LMPolicy", env, seed=0, group_size=2, collector=collector)
        doubled.learn(1, callback=Double())
        torch.testing.assert_close(doubled.rollout_buffer.rewards, 2 * plain.rollout_buffer.rewards)


def test_a_callback_stops_in_the_middle_of_a_rollout(tiny_llama):
    class StopAt(Recorder):
        def _on_step(self):
            super()._on_step()
            return np.bool_(len(self.steps) < 2)

    for collector in ("generate", "step"):
        env = gym.make_vec(
            "textrl_env:TextRL-v0", num_envs=4, task="copy", model=tiny_llama, min_new_tokens=3
        )
        agent = GRPO("LMPolicy", env, seed=0, group_size=2, collector=collector)
        before = [parameter.clone() for parameter in agent.policy.parameters()]
        callback = StopAt()
        agent.learn(10_000, callback=callback)
        assert callback.calls == [
            "training_start", "rollout_start", "step", "step", "training_end",
        ]  # fmt: skip
        assert agent.num_timesteps == 8
        assert all(map(torch.equal, before, agent.policy.parameters()))
