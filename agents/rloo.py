"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector import VectorEnv
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from agents.advantages import discounted_returns, leave_one_out_advantages
from agents.agent import Agent
from agents.kl_control import KLController
from agents.objectives import Clipped, Objective
from agents.trajectories import Trajectories


class RLOO(Agent):
    """REINFORCE whose baseline is the mean return of the siblings.

    Each start state (a prompt, or a reset seed) gets `group_size` episodes, and an episode's
    advantage is its return minus the mean return of the others of its group (section 3 of the
    paper): without bias, and without a critic. The KL to the reference is part of the return, per
    completion; with `reward_to_go` a step answers only for what comes after it, which has the same
    expectation and less variance.

    Args:
        policy: ``"LMPolicy"`` for text; ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"``
            or a policy class otherwise.
        env: Gymnasium id, `Env`, Gymnasium `VectorEnv` or Stable-Baselines3 `VecEnv`. One rollout
            is one episode per slot, so `num_envs` is ``prompts per rollout × group_size``.
        learning_rate: A number, or a function of the remaining progress (1 to 0). None is 3e-4,
            and 1e-5 for a language model: 1e-6 to 1e-5 is usual for 0.1 to 7 billion parameters,
            and `tiny` takes 2e-4.
        batch_size: Episodes (transitions where there is no text) per optimiser step; None takes
            the whole rollout, which is on-policy.
        micro_batch_size: Rows that are run at a time. It bounds memory and changes nothing.
        n_epochs: Passes over a rollout.
        group_size: Episodes per start state; it must divide the number of slots. A group of one
            keeps its return.
        reward_to_go: Charges a step with the rewards and KL terms from it on, rather than with
            those of the whole episode.
        clip_range: The probability ratio is clipped to 1 ± clip_range; on the first pass over a
            rollout that changes nothing, and the gradient is REINFORCE's.
        ent_coef: Weight of the entropy bonus.
        kl_loss_coef: Weight of the KL to the reference as a loss, beside the one in the reward.
        kl_loss: Estimator of that loss, see `textrl_env.kl`.
        kl_controller: Sets the environment's `kl_coef`, anew after each rollout; None keeps it.
        loss_aggregation: How token losses become one number; ``"seq-mean-token-sum"`` is the
            gradient of the completion's log-probability, see `agents.aggregation`. Where there is
            no text a mini-batch is transitions, and its loss their mean.
        max_grad_norm: Gradients are clipped to this norm.
        target_kl: Stops the epochs when the KL to the rollout's policy exceeds 1.5 times this.
        collector: ``"generate"``, ``"step"`` or ``"auto"``, see `Agent`.
        stats_window_size: Episodes that the logged means cover.
        tensorboard_log: Folder for TensorBoard, or None.
        policy_kwargs: Arguments of the policy, such as ``{"model": "tiny"}``.
        verbose: 0 silent, 1 logs to the terminal.
        seed: Seeds everything that the agent draws.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``.

    Raises:
        ValueError: `group_size` does not divide the number of slots, or options contradict.

    Examples:
        >>> import gymnasium as gym
        >>> env = gym.make_vec("textrl_env:TextRL-v0", num_envs=8, task="addition", kl_coef=0.01)
        >>> agent = RLOO("LMPolicy", env, learning_rate=2e-4, group_size=4, seed=0).learn(20)
        >>> groups = agent.rollout_buffer.advantages[:, 0].view(2, 4)
        >>> bool(groups.sum(1).abs().max() < 1e-5)
        True
    """

    def __init__(
        self,
        policy: str | type[BasePolicy],
        env: GymEnv | VectorEnv[Any, Any, Any] | str | None,
        learning_rate: float | Schedule | None = None,
        batch_size: int | None = None,
        micro_batch_size: int | None = None,
        n_epochs: int = 1,
        group_size: int = 4,
        reward_to_go: bool = False,
        clip_range: float = 0.2,
        ent_coef: float = 0.0,
        kl_loss_coef: float = 0.0,
        kl_loss: str = "k2",
        kl_controller: KLController | None = None,
        loss_aggregation: str = "seq-mean-token-sum",
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
        self.reward_to_go = reward_to_go
        self.clip_range = clip_range
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=None,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            n_epochs=n_epochs,
            group_size=group_size,
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
        """The return of each episode against its siblings', at each of its steps."""
        returns = trajectories.episode_returns
        advantages = leave_one_out_advantages(
            returns, trajectories.groups, valid=trajectories.valid
        )[:, None]
        if self.reward_to_go:
            to_go = discounted_returns(trajectories.rewards, trajectories.mask, gamma=1.0)
            advantages = advantages + (to_go - returns[:, None])
        trajectories.advantages = torch.where(trajectories.mask, advantages, 0.0)

    def policy_objective(self) -> Objective:
        """REINFORCE's objective, with the ratio clipped once the policy has moved."""
        return Clipped(self.clip_range)
