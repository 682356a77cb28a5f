"""Hyperparameters of every environment and agent of the control benchmarks.

PPO's and TRPO's are those of RL Baselines3 Zoo (``hyperparams/ppo.yml`` and ``trpo.yml``), and our
PPO takes the same as Stable-Baselines3's. Where the zoo names an older version of an environment,
its row is used for the version here. What a row leaves out is the library's default.

The zoo has no rows for GRPO, RLOO and REINFORCE++. Theirs were tuned lightly on CartPole, looked at
on Acrobot and Pendulum, and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from stable_baselines3.common.utils import LinearSchedule

AgentName = Literal["ppo", "sb3-ppo", "grpo", "rloo", "reinforce++", "reinforce++-baseline", "trpo"]


@dataclass(frozen=True)
class Settings:
    """How an agent is trained on an environment.

    Attributes:
        n_envs: Slots of the environment.
        norm_obs: Whether `VecNormalize` normalises the observations.
        norm_reward: Whether it scales the rewards, with the agent's γ.
        arguments: Of the agent. A string ``"lin_x"`` falls linearly from x to 0, and
            ``activation_fn`` of ``policy_kwargs`` is the name of a class of `torch.nn`.
    """

    n_envs: int = 1
    norm_obs: bool = False
    norm_reward: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def resolved_arguments(self) -> dict[str, Any]:
        """Returns the arguments with schedules and classes in place of their names."""
        arguments = dict(self.arguments)
        for name, value in arguments.items():
            if isinstance(value, str) and value.startswith("lin_"):
                arguments[name] = LinearSchedule(float(value.removeprefix("lin_")), 0.0, 1.0)
        if "activation_fn" in arguments.get("policy_kwargs", {}):
            policy_kwargs = dict(arguments["policy_kwargs"])
            policy_kwargs["activation_fn"] = getattr(torch.nn, policy_kwargs["activation_fn"])
            arguments["policy_kwargs"] = policy_kwargs
        return arguments


def _settings(n_envs: int = 1, *, normalize: bool = False, **arguments: Any) -> Settings:
    return Settings(n_envs, normalize, normalize, arguments)


# Without an entropy bonus they settle on a bad deterministic policy, whose siblings are all alike.
# RLOO's advantages are not scaled, hence its bonus is that much larger.
_WITHOUT_CRITIC: dict[AgentName, dict[str, Any]] = {
    "grpo": {"group_size": 8, "ent_coef": 0.05},
    "rloo": {"group_size": 8, "ent_coef": 1.0},
    "reinforce++": {"ent_coef": 0.05},
    "reinforce++-baseline": {"group_size": 8, "ent_coef": 0.05},
}


def _episodes(n_envs: int = 16, *, norm_obs: bool = False, **arguments: Any) -> Settings:
    """Settings without a critic, which do not need scaled rewards."""
    defaults = {"learning_rate": "lin_0.001", "n_epochs": 4, "batch_size": 512}
    return Settings(n_envs, norm_obs, False, defaults | arguments)


@dataclass(frozen=True)
class Entry:
    """An environment: its budget and the settings of each family of agents.

    Attributes:
        total_timesteps: Environment steps of a run.
        ppo: Settings of both PPOs.
        trpo: Settings of TRPO.
        episodes: Settings that GRPO, RLOO and both forms of REINFORCE++ share; a rollout is one
            episode per slot.
        gamma: Discount of REINFORCE++; the others sum rewards.
    """

    total_timesteps: int = 1_000_000
    ppo: Settings = field(default_factory=Settings)
    trpo: Settings = field(default_factory=Settings)
    episodes: Settings = field(default_factory=_episodes)
    gamma: float = 0.99

    def settings(self, agent: AgentName) -> Settings:
        """Returns the settings of an agent."""
        if agent in ("ppo", "sb3-ppo"):
            return self.ppo
        if agent == "trpo":
            return self.trpo
        own = dict(_WITHOUT_CRITIC[agent])
        if agent == "reinforce++":
            own["gamma"] = self.gamma
        return dataclasses.replace(self.episodes, arguments={**own, **self.episodes.arguments})


_WIDE_RELU = {
    "log_std_init": -2,
    "ortho_init": False,
    "activation_fn": "ReLU",
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}
_LOCOMOTION = Entry(
    total_timesteps=300_000,
    trpo=_settings(
        2,
        normalize=True,
        batch_size=128,
        n_steps=1024,
        gamma=0.99,
        gae_lambda=0.95,
        sub_sampling_factor=1,
        cg_max_steps=25,
        cg_damping=0.1,
        n_critic_updates=20,
        learning_rate=1e-3,
    ),
    # No bonus: nothing bounds the entropy of a Gaussian.
    episodes=_episodes(norm_obs=True, batch_size=1024, ent_coef=0.0),
)
_HALF_CHEETAH = dataclasses.replace(
    _LOCOMOTION,
    ppo=_settings(
        normalize=True,
        n_steps=512,
        batch_size=64,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.92,
        learning_rate=2.0633e-5,
        ent_coef=0.000401762,
        clip_range=0.1,
        max_grad_norm=0.8,
        vf_coef=0.58096,
        policy_kwargs=_WIDE_RELU,
    ),
    trpo=dataclasses.replace(
        _LOCOMOTION.trpo, arguments={**_LOCOMOTION.trpo.arguments, "target_kl": 0.04}
    ),
)
_HOPPER = dataclasses.replace(
    _LOCOMOTION,
    ppo=_settings(
        normalize=True,
        n_steps=512,
        batch_size=32,
        n_epochs=5,
        gamma=0.999,
        gae_lambda=0.99,
        learning_rate=9.80828e-5,
        ent_coef=0.00229519,
        clip_range=0.2,
        max_grad_norm=0.7,
        vf_coef=0.835671,
        policy_kwargs=_WIDE_RELU,
    ),
)
_INVERTED_PENDULUM = Entry(
    total_timesteps=300_000,
    ppo=_settings(
        normalize=True,
        n_steps=32,
        batch_size=64,
        n_epochs=5,
        gamma=0.999,
        gae_lambda=0.9,
        learning_rate=0.000222425,
        ent_coef=1.37976e-7,
        clip_range=0.4,
        max_grad_norm=0.3,
        vf_coef=0.19816,
    ),
    # The zoo has no row of TRPO for it; the one for MuJoCo is the nearest.
    trpo=_LOCOMOTION.trpo,
    episodes=_LOCOMOTION.episodes,
)

ZOO: dict[str, Entry] = {
    "CartPole-v1": Entry(
        total_timesteps=100_000,
        ppo=_settings(
            8,
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            gamma=0.98,
            gae_lambda=0.8,
            ent_coef=0.0,
            learning_rate="lin_0.001",
            clip_range="lin_0.2",
        ),
        trpo=_settings(
            2,
            n_steps=512,
            batch_size=512,
            cg_damping=1e-3,
            gae_lambda=0.98,
            gamma=0.99,
            learning_rate=1e-3,
            n_critic_updates=20,
        ),
    ),
    "Acrobot-v1": Entry(
        total_timesteps=200_000,
        ppo=_settings(
            16,
            normalize=True,
            n_steps=256,
            n_epochs=4,
            gamma=0.99,
            gae_lambda=0.94,
            ent_coef=0.0,
        ),
        trpo=_settings(2, normalize=True, n_steps=1024),
        episodes=_episodes(norm_obs=True),
    ),
    "MountainCar-v0": Entry(
        ppo=_settings(
            16,
            normalize=True,
            n_steps=16,
            n_epochs=4,
            gamma=0.99,
            gae_lambda=0.98,
            ent_coef=0.0,
        ),
        trpo=_settings(2, normalize=True, n_steps=1024, n_critic_updates=20),
        episodes=_episodes(norm_obs=True),
    ),
    "MountainCarContinuous-v0": Entry(
        total_timesteps=20_000,
        ppo=_settings(
            1,
            normalize=True,
            n_steps=8,
            batch_size=256,
            n_epochs=10,
            gamma=0.9999,
            gae_lambda=0.9,
            learning_rate=7.77e-5,
            ent_coef=0.00429,
            clip_range=0.1,
            max_grad_norm=5,
            vf_coef=0.19,
            use_sde=True,
            policy_kwargs={"log_std_init": -3.29, "ortho_init": False},
        ),
        trpo=_settings(2, normalize=True, use_sde=True, sde_sample_freq=4),
        episodes=_episodes(8, norm_obs=True, ent_coef=0.0),
    ),
    "Pendulum-v1": Entry(
        total_timesteps=100_000,
        ppo=_settings(
            4,
            n_steps=1024,
            n_epochs=10,
            gamma=0.9,
            gae_lambda=0.95,
            ent_coef=0.0,
            learning_rate=1e-3,
            clip_range=0.2,
            use_sde=True,
            sde_sample_freq=4,
        ),
        trpo=_settings(
            2, n_steps=1024, gamma=0.9, n_critic_updates=15, use_sde=True, sde_sample_freq=4
        ),
        episodes=_episodes(learning_rate="lin_0.003", n_epochs=10, batch_size=400, ent_coef=0.0),
        gamma=0.9,
    ),
    "LunarLander-v3": Entry(
        ppo=_settings(
            16,
            n_steps=1024,
            batch_size=64,
            n_epochs=4,
            gamma=0.999,
            gae_lambda=0.98,
            ent_coef=0.01,
        ),
        trpo=_settings(
            2,
            n_steps=512,
            cg_damping=0.01,
            gae_lambda=0.98,
            gamma=0.99,
            learning_rate=1e-3,
            n_critic_updates=15,
        ),
    ),
    "InvertedPendulum-v4": _INVERTED_PENDULUM,
    "InvertedPendulum-v5": _INVERTED_PENDULUM,
    "HalfCheetah-v4": _HALF_CHEETAH,
    "HalfCheetah-v5": _HALF_CHEETAH,
    "Hopper-v4": _HOPPER,
    "Hopper-v5": _HOPPER,
}


def entry(env_id: str) -> Entry:
    """Returns an environment's entry; one that is not in the zoo gets every library's defaults.

    Examples:
        >>> entry("CartPole-v1").settings("ppo").n_envs
        8
        >>> entry("Taxi-v3").settings("sb3-ppo")
        Settings(n_envs=1, norm_obs=False, norm_reward=False, arguments={})
    """
    return ZOO.get(env_id, Entry())
