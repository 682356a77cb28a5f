"""REINFORCE++ and its baseline form (Hu 2025, arXiv:2501.03262)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from gymnasium.vector import VectorEnv
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from agents.advantages import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from agents.agent import Agent, is_language_policy
from agents.kl_control import KLController
from agents.objectives import Clipped, Objective
from agents.trajectories import Trajectories


class ReinforcePlusPlus(Agent):
    """REINFORCE with PPO's tricks and neither critic nor groups.

    The advantage of a step is the discounted reward from it on, the KL term of each token among
    the rewards, whitened over the whole rollout; the objective is PPO's clipped one.

    Args:
        policy: ``"LMPolicy"`` for text; ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"``
            or a policy class otherwise.
        env: Gymnasium id, `Env`, Gymnasium `VectorEnv` or Stable-Baselines3 `VecEnv`. One rollout
            is one episode per slot.
        learning_rate: A number, or a function of the remaining progress (1 to 0). None is 3e-4,
            and 1e-5 for a language model: 1e-6 to 1e-5 is usual for 0.1 to 7 billion parameters,
            and `tiny` takes 2e-4.
        batch_size: Episodes (transitions where there is no text) per optimiser step; None takes
            the whole rollout, which is on-policy.
        micro_batch_size: Rows that are run at a time. It bounds memory and changes nothing.
        n_epochs: Passes over a rollout.
        group_size: Episodes per start state; it must divide the number of slots. None is 1, and 8
            in the baseline form.
        gamma: Discount γ. None is 0.99, and 1.0 on text, where it would favour short completions.
        clip_range: The probability ratio is clipped to 1 ± clip_range.
        ent_coef: Weight of the entropy bonus.
        kl_loss_coef: Weight of the KL to the reference as a loss, beside the one in the reward.
        kl_loss: Estimator of that loss, see `textrl_env.kl`.
        kl_controller: Sets the environment's `kl_coef`, anew after each rollout; None keeps it.
        loss_aggregation: How token losses become one number, see `agents.aggregation`.
        max_grad_norm: Gradients are clipped to this norm.
        target_kl: Stops the epochs when the KL to the rollout's policy exceeds 1.5 times this.
        collector: ``"generate"``, ``"step"`` or ``"auto"``, see `Agent`.
        stats_window_size: Episodes that the logged means cover.
        tensorboard_log: Folder for TensorBoard, or None.
        policy_kwargs: Arguments of the policy, such as ``{"model": "tiny"}``.
        verbose: 0 silent, 1 logs to the terminal.
        seed: Seeds everything that the agent draws.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``.

    Examples:
        >>> import gymnasium as gym
        >>> env = gym.make_vec("textrl_env:TextRL-v0", num_envs=8, task="addition", kl_coef=0.01)
        >>> agent = ReinforcePlusPlus("LMPolicy", env, learning_rate=2e-4, seed=0).learn(20)
        >>> batch = agent.rollout_buffer
        >>> bool(batch.advantages[batch.mask].mean().abs() < 1e-5)
        True
    """

    default_group_size: ClassVar[int] = 1

    def __init__(
        self,
        policy: str | type[BasePolicy],
        env: GymEnv | VectorEnv[Any, Any, Any] | str | None,
        learning_rate: float | Schedule | None = None,
        batch_size: int | None = None,
        micro_batch_size: int | None = None,
        n_epochs: int = 1,
        group_size: int | None = None,
        gamma: float | None = None,
        clip_range: float = 0.2,
        ent_coef: float = 0.0,
        kl_loss_coef: float = 0.0,
        kl_loss: str = "k2",
        kl_controller: KLController | None = None,
        loss_aggregation: str = "token-mean",
        max_grad_norm: float = 1.0,
        target_kl: float | None = None,
        collector: str = "auto",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        default_gamma = 1.0 if is_language_policy(policy) else 0.99
        self.gamma = default_gamma if gamma is None else gamma
        self.clip_range = clip_range
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=None,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            n_epochs=n_epochs,
            group_size=self.default_group_size if group_size is None else group_size,
            ent_coef=ent_coef,
            vf_coef=0.0,
            max_grad_norm=max_grad_norm,
            loss_aggregation=loss_aggregation,
            kl_loss_coef=kl_loss_coef,
            kl_loss=kl_loss,
            kl_controller=kl_controller,
            target_kl=target_kl,
            collector=collector,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
        )

    def compute_advantages(self, trajectories: Trajectories) -> None:
        """The whitened reward-to-go of each step."""
        trajectories.advantages = reinforce_plus_plus_advantages(
            trajectories.rewards, trajectories.loss_mask, self.gamma
        )

    def policy_objective(self) -> Objective:
        """The clipped objective."""
        return Clipped(self.clip_range)


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """REINFORCE++ whose return is taken against the mean of its group.

    Each start state gets `group_size` episodes. The advantage, the same at each step of an
    episode, is its return minus its group's mean, whitened over the whole rollout: unlike in GRPO
    the scale is the batch's, so an easy group is not blown up.

    The arguments are those of `ReinforcePlusPlus`; `gamma` is not used, since the return of an
    episode is its sum.

    Examples:
        >>> import gymnasium as gym
        >>> env = gym.make_vec("textrl_env:TextRL-v0", num_envs=8, task="addition", kl_coef=0.01)
        >>> agent = ReinforcePlusPlusBaseline("LMPolicy", env, group_size=4, seed=0).learn(20)
        >>> agent.rollout_buffer.groups.tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """

    default_group_size = 8

    def compute_advantages(self, trajectories: Trajectories) -> None:
        """The return of each episode against its group's mean, whitened."""
        trajectories.advantages = reinforce_plus_plus_baseline_advantages(
            trajectories.episode_returns, trajectories.groups, trajectories.loss_mask
        )
