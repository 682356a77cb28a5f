"""The Gaussian whose standard deviation depends on the state."""

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env

from agents import GRPO, PPO, StateDependentStdPolicy


class Precision(gym.Env):
    """In state 1 the action must be 0, in state 0 it does not matter; one step."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Box(-5, 5, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.array([self.np_random.integers(2)], np.float32)
        return self.state, {}

    def step(self, action):
        return self.state, float(-self.state[0] * np.square(action).sum()), True, False, {}


def make(agent_class=PPO, **kwargs):
    env = make_vec_env(Precision, n_envs=8, seed=0)
    return agent_class(StateDependentStdPolicy, env, seed=0, **kwargs)


def std(agent, state):
    return agent.policy.get_distribution(torch.tensor([[state]])).distribution.stddev[0]


def test_logprobs_and_entropies_are_those_of_its_gaussians():
    agent = make(policy_kwargs={"log_std_init": -0.7}, n_steps=8, batch_size=64)
    observations, actions = torch.rand(5, 1), torch.randn(5, 2)
    values, logprobs, entropy = agent.policy.evaluate_actions(observations, actions)
    latent = agent.policy.mlp_extractor.forward_actor(observations)
    outputs = agent.policy.action_net(latent).double()
    mean, log_std = outputs[:, :2], outputs[:, 2:]
    assert float(log_std.detach().mean()) == pytest.approx(-0.7, abs=0.02)
    exact = -0.5 * ((actions - mean) / log_std.exp()) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    torch.testing.assert_close(logprobs.double(), exact.sum(1), atol=1e-5, rtol=1e-5)
    exact = (log_std + 0.5 * np.log(2 * np.pi) + 0.5).sum(1)
    torch.testing.assert_close(entropy.double(), exact, atol=1e-5, rtol=1e-5)
    assert values.shape == (5, 1)


@pytest.mark.parametrize("agent_class", [PPO, stable_baselines3.PPO])
def test_the_noise_shrinks_where_it_costs(agent_class):
    agent = make(
        agent_class, n_steps=64, batch_size=128, learning_rate=3e-3, gamma=0.9, ent_coef=0.02
    )
    agent.learn(10_000)
    assert (std(agent, 1.0) < 0.5 * std(agent, 0.0)).all()


def test_it_is_saved_and_loaded(tmp_path):
    agent = make(n_steps=16, batch_size=32).learn(128)
    agent.save(tmp_path / "agent")
    loaded = PPO.load(tmp_path / "agent")
    assert torch.equal(std(loaded, 1.0), std(agent, 1.0))
    make(GRPO, group_size=4).learn(64)


def test_other_actions_are_refused():
    with pytest.raises(ValueError, match="Discrete\\(2\\)"):
        PPO(StateDependentStdPolicy, "CartPole-v1")
    with pytest.raises(ValueError, match="use_sde is True"):
        PPO(StateDependentStdPolicy, "Pendulum-v1", use_sde=True)
