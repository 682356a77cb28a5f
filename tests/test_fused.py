"""Gradients that are written out give the numbers of autograd."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from agents import GRPO, PPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from agents.fused import Actor
from agents.kl_control import FixedKL
from agents.objectives import Clipped, KLPenalty
from agents.updates import AutogradUpdate

RELU = {"activation_fn": torch.nn.ReLU}
TWO_SIZES = {"net_arch": {"pi": [32], "vf": [48, 16]}}
PPO_CASES = [
    ("CartPole-v1", {}),
    ("CartPole-v1", {"batch_size": 50, "clip_range_vf": 0.1, "ent_coef": 0.02}),
    ("CartPole-v1", {"batch_size": 128, "clip_range_lower": 1.5, "clip_range_high": 0.3}),
    ("CartPole-v1", {"batch_size": 43, "policy_kwargs": TWO_SIZES, "normalize_advantage": False}),
    ("CartPole-v1", {"target_kl": 1e-4, "learning_rate": 3e-3, "max_grad_norm": 0.05}),
    ("CartPole-v1", {"objective": FixedKL(0.7), "n_epochs": 8, "learning_rate": 3e-3}),
    ("Pendulum-v1", {"ent_coef": 0.02, "policy_kwargs": RELU}),
    ("Pendulum-v1", {"ent_coef": 0.02, "use_sde": True, "sde_sample_freq": 4}),
    ("MountainCarContinuous-v0", {"use_sde": True, "policy_kwargs": {"log_std_init": -1.0}}),
]


def train(monkeypatch, fuses, agent_class, env, steps=384, callback=None, **kwargs):
    monkeypatch.setattr(agent_class, "fuses", fuses)
    agent = agent_class("MlpPolicy", env, seed=0, device="cpu", **kwargs)
    assert (agent.network is not None) == fuses
    return agent.learn(steps, callback=callback)


def state(agent):
    """Weights and Adam's moments by name, as tensors."""
    found = dict(agent.policy.named_parameters())
    for index, moments in agent.policy.optimizer.state_dict()["state"].items():
        found |= {f"{name} of {index}": value for name, value in moments.items()}
    return {name: torch.as_tensor(value).detach() for name, value in found.items()}


def assert_same_training(one, two):
    first, second = state(one), state(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], atol=2e-6, rtol=2e-4, msg=name)
    logs, other_logs = one.logger.name_to_value, two.logger.name_to_value
    assert logs.keys() == other_logs.keys()
    for name in logs:
        if not name.startswith("time/"):
            assert logs[name] == pytest.approx(other_logs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(("env_id", "kwargs"), PPO_CASES)
def test_a_training_with_ppo_is_the_plain_one(monkeypatch, env_id, kwargs):
    fused, plain = (
        train(
            monkeypatch, fuses, PPO, make_vec_env(env_id, 4, seed=0),
            **{"n_steps": 32, "batch_size": 32, "n_epochs": 4, **kwargs},
        )
        for fuses in (True, False)
    )  # fmt: skip
    assert_same_training(fused, plain)
    if "target_kl" in kwargs:
        assert fused.logger.name_to_value["train/grad_norm"] > 0


@pytest.mark.parametrize("agent_class", [GRPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline])
def test_a_training_without_a_critic_is_the_plain_one(monkeypatch, agent_class):
    group = {} if agent_class is ReinforcePlusPlus else {"group_size": 2}
    fused, plain = (
        train(
            monkeypatch, fuses, agent_class, make_vec_env("CartPole-v1", 4, seed=0),
            batch_size=32, n_epochs=3, ent_coef=0.01, **group,
        )
        for fuses in (True, False)
    )  # fmt: skip
    assert_same_training(fused, plain)
    # The critic is not trained, and Adam has nothing to say of it.
    assert all(p.grad is None or not p.grad.any() for p in fused.policy.value_net.parameters())


def test_dict_observations_are_flattened_alike(monkeypatch):
    class Both(gym.Env):
        observation_space = gym.spaces.Dict(
            a=gym.spaces.Box(-1, 1, (3,), np.float64), b=gym.spaces.Discrete(4)
        )
        action_space = gym.spaces.Discrete(3)

        def _observe(self):
            return {"a": self.np_random.uniform(-1, 1, 3), "b": int(self.np_random.integers(4))}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self._observe(), {}

        def step(self, action):
            end = self.np_random.random()
            return self._observe(), float(action), end < 0.1, end > 0.9, {}

    agents = []
    for fuses in (True, False):
        monkeypatch.setattr(PPO, "fuses", fuses)
        env = make_vec_env(Both, 4, seed=0)
        agents.append(PPO("MultiInputPolicy", env, n_steps=32, batch_size=32, seed=0).learn(256))
    assert agents[0].network is not None
    assert_same_training(*agents)


def test_small_work_runs_on_one_thread_and_the_number_is_given_back():
    seen = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for width in (64, 512):
            agent = PPO(
                "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64,
                policy_kwargs={"net_arch": [width, width]}, seed=0,
            )  # fmt: skip
            agent.learn(64, callback=lambda *_: seen.append(torch.get_num_threads()))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert (seen[0], seen[-1]) == (1, 2)


class Silent(BaseCallback):
    """Looks at the steps and does nothing."""

    def _on_step(self):
        assert self.locals["values"].shape == self.locals["log_probs"].shape == (4,)
        return True


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("use_sde", [False, True])
def test_a_callback_that_looks_changes_nothing(monkeypatch, env_id, use_sde):
    if use_sde and env_id == "CartPole-v1":
        pytest.skip("state-dependent exploration is for continuous actions")
    runs = [
        train(
            monkeypatch, True, PPO, make_vec_env(env_id, 4, seed=0), callback=callback,
            n_steps=64, batch_size=64, use_sde=use_sde, sde_sample_freq=8,
        )
        for callback in (None, Silent())
    ]  # fmt: skip
    assert_same_training(*runs)
    first, second = (run.rollout_buffer for run in runs)
    for name in ("actions", "logprobs", "values"):
        one, two = getattr(first, name), getattr(second, name)
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4, msg=name)


def test_a_checkpoint_goes_on_in_either_path(monkeypatch, tmp_path):
    def make(fuses, steps, **kwargs):
        env = make_vec_env("CartPole-v1", 4, seed=0)
        return train(monkeypatch, fuses, PPO, env, steps, n_steps=32, batch_size=64, **kwargs)

    first = make(True, 128)
    first.save(tmp_path / "agent")
    saved = state(first)
    ends = []
    for fuses in (True, False):
        monkeypatch.setattr(PPO, "fuses", fuses)
        env = make_vec_env("CartPole-v1", 4, seed=5)
        agent = PPO.load(tmp_path / "agent", env=env)
        for name, value in state(agent).items():
            assert torch.equal(value, saved[name]), name
        ends.append(agent.learn(128, reset_num_timesteps=False))
    assert_same_training(*ends)
    assert int(state(ends[0])["step of 0"]) > int(saved["step of 0"])


def test_weights_and_optimizers_that_are_replaced_are_taken_up(monkeypatch):
    env = make_vec_env("CartPole-v1", 4, seed=0)
    agent = train(monkeypatch, True, PPO, env, 128, n_steps=32, batch_size=64)
    other = PPO("MlpPolicy", env, n_steps=32, batch_size=64, seed=1)
    for parameter, new in zip(agent.policy.parameters(), other.policy.parameters(), strict=True):
        parameter.data = new.data.clone()
    observation = env.reset()
    torch.manual_seed(0)
    expected = agent.policy(torch.from_numpy(observation))[0]
    torch.manual_seed(0)
    assert torch.equal(torch.from_numpy(Actor(agent.network)(observation)), expected)
    # Another optimiser is not Adam's flat form: the plain path trains.
    agent.policy.optimizer = torch.optim.SGD(agent.policy.parameters(), lr=0.1)
    before = state(agent)["action_net.weight"].clone()
    agent.learn(128)
    assert not torch.equal(before, state(agent)["action_net.weight"])
    assert "exp_avg of 0" not in state(agent)


class Clamp(BaseFeaturesExtractor):
    """Has no parameters, and is no flattening either."""

    def __init__(self, observation_space):
        super().__init__(observation_space, observation_space.shape[0])

    def forward(self, observations):
        return torch.tanh(observations / 10)


@pytest.mark.parametrize(
    "policy_kwargs",
    [
        {"features_extractor_class": Clamp},
        {"net_arch": []},
        {"activation_fn": torch.nn.ELU},
        {"optimizer_class": torch.optim.SGD},
        {"optimizer_kwargs": {"weight_decay": 0.1}},
        {"share_features_extractor": False},
    ],
)
def test_other_policies_go_the_plain_path(policy_kwargs):
    agent = PPO(
        "MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, policy_kwargs=policy_kwargs, seed=0
    )
    assert agent.network is None
    agent.learn(32)


def freeze(agent):
    for parameter in agent.policy.mlp_extractor.parameters():
        parameter.requires_grad = False


def replace_layer(agent):
    torch.manual_seed(1)
    agent.policy.action_net = torch.nn.Linear(64, 2)
    agent.policy.optimizer = torch.optim.Adam(agent.policy.parameters(), lr=1e-3)


def replace_policy(agent):
    agent.policy = PPO("MlpPolicy", agent.env, seed=5).policy


def share_memory(agent):
    agent.policy.share_memory()


def hook(agent):
    agent.policy.action_net.weight.register_hook(torch.zeros_like)


def hook_step(agent):
    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 0.5

    agent.policy.optimizer.register_step_pre_hook(halve)


def train_a_part(agent):
    agent.policy.optimizer = torch.optim.Adam(agent.policy.action_net.parameters(), lr=1e-3)


def forget_a_step(agent):
    agent.policy.optimizer.state[agent.policy.value_net.bias]["step"] = torch.tensor(1.0)


def move_memory(agent):
    agent.policy.action_net.weight.data = agent.policy.action_net.weight.data.clone()


@pytest.mark.parametrize(
    "change",
    [freeze, replace_layer, replace_policy, share_memory, hook, hook_step, train_a_part,
     forget_a_step, move_memory],
)  # fmt: skip
def test_what_is_done_to_the_policy_is_taken_up(monkeypatch, change):
    ends = []
    for fuses in (True, False):
        env = make_vec_env("CartPole-v1", 4, seed=0)
        agent = train(monkeypatch, fuses, PPO, env, 128, n_steps=32, batch_size=32)
        change(agent)
        ends.append(agent.learn(256, reset_num_timesteps=False))
    assert_same_training(*ends)


def test_a_copy_of_an_agent_trains_all_of_its_layers(monkeypatch):
    agent = train(
        monkeypatch, True, PPO, make_vec_env("Pendulum-v1", 4, seed=0), 128, n_steps=32,
        batch_size=32,
    )  # fmt: skip
    twin = copy.deepcopy(agent)
    before = state(twin)
    before = {name: value.clone() for name, value in before.items()}
    twin.learn(256)
    for name, value in twin.policy.named_parameters():
        assert not torch.equal(value, before[name]), name
    for name, value in agent.policy.named_parameters():
        assert torch.equal(value, before[name]), name


def test_actions_of_several_dimensions(monkeypatch):
    class Matrix(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (3,))
        action_space = gym.spaces.Box(-1, 1, (2, 3))

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.sample() * 0, {}

        def step(self, action):
            assert action.shape == (2, 3)
            return np.full(3, action.mean()), float(action.sum()), False, False, {}

    for agent_class in (PPO, stable_baselines3.PPO):
        agent = agent_class("MlpPolicy", make_vec_env(Matrix, 2), n_steps=16, batch_size=16, seed=0)
        agent.learn(32)


def test_an_objective_of_ones_own_goes_the_plain_path(monkeypatch):
    class Own(PPO):
        def policy_loss(self, logprobs, batch):
            loss, terms = super().policy_loss(logprobs, batch)
            return 2 * loss, terms

    agent = Own("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, seed=0)
    agent.learn(16)
    assert isinstance(agent._choose_update(agent.rollout_buffer.as_transitions()), AutogradUpdate)


def test_micro_batches_go_the_plain_path_and_change_nothing():
    ends = []
    for micro_batch_size in (None, 5):
        env = make_vec_env("CartPole-v1", 4, seed=0)
        agent = PPO(
            "MlpPolicy", env, n_steps=32, batch_size=32, seed=0, micro_batch_size=micro_batch_size
        )
        ends.append(agent.learn(128))
    update = ends[1]._choose_update(ends[1].rollout_buffer.as_transitions())
    assert isinstance(update, AutogradUpdate)
    assert_same_training(*ends)


finite = st.floats(-3, 3, allow_nan=False, width=32)


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(st.tuples(st.floats(-25, 25, width=32), finite), min_size=1, max_size=8),
    objective=st.sampled_from(
        [Clipped(), Clipped(0.1, 0.3), Clipped(0.2, None, 1.5), KLPenalty(0.5), Clipped(0.0)]
    ),
)
def test_derivatives_are_those_of_autograd(steps, objective):
    log_ratio, advantages = np.array(steps, dtype=np.float32).T.copy()
    low, high = (1 - getattr(objective, "clip_range", 0)), (1 + getattr(objective, "clip_range", 0))
    ratio = np.exp(log_ratio)
    if np.isclose(ratio, low).any() or np.isclose(ratio, high).any():
        return  # at a kink any slope between the two will do
    logprobs = torch.from_numpy(log_ratio.copy()).requires_grad_()
    zeros = torch.zeros(len(steps))
    expected, statistics = objective.loss(logprobs, zeros, torch.from_numpy(advantages))
    expected.sum().backward()
    loss, gradient, terms = objective.derivative(log_ratio, advantages)
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient, logprobs.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert terms.keys() == statistics.keys()
    for name, term in terms.items():
        np.testing.assert_allclose(term, statistics[name].numpy(), rtol=1e-4, atol=1e-5)
