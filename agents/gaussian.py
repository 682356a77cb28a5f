"""A Gaussian policy whose standard deviation depends on the state."""

from __future__ import annotations

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution, Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import Schedule

# A density that is neither a spike nor flat beyond float32.
_LOG_STD_BOUNDS = (-20.0, 2.0)


class StateDependentStdPolicy(ActorCriticPolicy):
    """Independent Gaussians with mean and log standard deviation from the network.

    ``"MlpPolicy"`` has one log standard deviation for all states, a parameter of its own; here the
    last layer of the actor gives it beside the mean, within −20 and 2. ``log_std_init`` is its
    value at the start. The arguments are those of `ActorCriticPolicy`.

    Raises:
        ValueError: The actions are not continuous, or `use_sde` asks for another noise.

    Examples:
        >>> from agents import PPO
        >>> agent = PPO(StateDependentStdPolicy, "Pendulum-v1", n_steps=64, seed=0).learn(64)
        >>> agent.policy.action_net.out_features  # mean and log standard deviation of one action
        2
    """

    def _build(self, lr_schedule: Schedule) -> None:
        if not (isinstance(self.action_space, spaces.Box) and not self.use_sde):
            raise ValueError(
                "StateDependentStdPolicy is for continuous actions without use_sde, but the "
                f"action space is {self.action_space} and use_sde is {self.use_sde}; use "
                "'MlpPolicy'."
            )
        super()._build(lr_schedule)
        assert isinstance(self.action_dist, DiagGaussianDistribution)
        del self.log_std
        actions = self.action_dist.action_dim
        self.action_net = torch.nn.Linear(self.mlp_extractor.latent_dim_pi, 2 * actions)
        if self.ortho_init:
            self.init_weights(self.action_net, gain=0.01)
        with torch.no_grad():
            self.action_net.bias[actions:] = self.log_std_init
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    def _get_action_dist_from_latent(self, latent_pi: torch.Tensor) -> Distribution:
        assert isinstance(self.action_dist, DiagGaussianDistribution)
        mean, log_std = self.action_net(latent_pi).chunk(2, dim=1)
        return self.action_dist.proba_distribution(mean, log_std.clamp(*_LOG_STD_BOUNDS))
