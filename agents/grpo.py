"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.vector import VectorEnv
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from agents.advantages import group_advantages
from agents.agent import Agent
from agents.kl_control import KLController
from agents.objectives import Clipped, Objective
from agents.trajectories import Trajectories


class GRPO(Agent):
    """PPO's clipped objective with an advantage from the group instead of a critic.

    Each start state (a prompt, or a reset seed) gets `group_size` episodes. The advantage of an
    episode, the same at each of its steps, is its return against its siblings' (eq. 4 of the
    paper)::

        A = (R − mean_group(R)) / (std_group(R) + ε)

    Siblings with equal returns teach nothing: their advantage is 0. The constants of other
    implementations are in `agents.presets`: ``GRPO(..., **PRESETS["verl"].grpo_arguments)``.

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
        group_size: Episodes per start state G; it must divide the number of slots.
        scale_rewards: What the advantage is divided by: the ``"group"``'s standard deviation, the
            ``"batch"``'s, or ``"none"`` (Dr. GRPO, arXiv:2503.20783).
        epsilon: ε of the division: 1e-4 as in TRL, so that rounding in the KL terms is not blown up
            to an advantage; verl has 1e-6.
        clip_range: The probability ratio is clipped below 1 − clip_range.
        clip_range_high: And above 1 + clip_range_high (DAPO, arXiv:2503.14476); None is
            `clip_range`.
        clip_range_lower: Dual clip c > 1 (arXiv:1912.09729): bounds the loss of a token with a
            negative advantage by c·|A|; verl has 3. None leaves it out, as the paper does.
        ent_coef: Weight of the entropy bonus.
        kl_loss_coef: Weight β of the KL to the reference as a loss, as in the paper. The
            environment's `kl_coef` puts it into the reward instead; use one of the two.
        kl_loss: Estimator of that loss: ``"k2"`` has the right gradient, ``"k3"`` is the paper's;
            see `textrl_env.kl`.
        kl_controller: Sets the environment's `kl_coef`, anew after each rollout; None keeps it.
        loss_aggregation: How token losses become one number: ``"seq-mean-token-mean"`` as in the
            paper, ``"token-mean"`` as in DAPO, see `agents.aggregation`. Where there is no text a
            mini-batch is transitions, and its loss their mean.
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
        >>> env = gym.make_vec("textrl_env:TextRL-v0", num_envs=16, task="addition", kl_coef=0.01)
        >>> agent = GRPO("LMPolicy", env, learning_rate=2e-4, group_size=8, seed=0)
        >>> agent = agent.learn(40)
        >>> agent.rollout_buffer.advantages.shape == agent.rollout_buffer.mask.shape
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
        group_size: int = 8,
        scale_rewards: str = "group",
        epsilon: float = 1e-4,
        clip_range: float = 0.2,
        clip_range_high: float | None = None,
        clip_range_lower: float | None = None,
        ent_coef: float = 0.0,
        kl_loss_coef: float = 0.0,
        kl_loss: str = "k2",
        kl_controller: KLController | None = None,
        loss_aggregation: str = "seq-mean-token-mean",
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
        self.scale_rewards = scale_rewards
        self.epsilon = epsilon
        self.clip_range = clip_range
        self.clip_range_high = clip_range_high
        self.clip_range_lower = clip_range_lower
        zeros = torch.zeros(1)  # raises where scale_rewards is none of those there are
        group_advantages(zeros, zeros.long(), scale=scale_rewards)
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
        """The return of each episode against its group's, at each of its steps."""
        advantages = group_advantages(
            trajectories.episode_returns,
            trajectories.groups,
            eps=self.epsilon,
            scale=self.scale_rewards,
            valid=trajectories.valid,
        )
        trajectories.advantages = advantages[:, None].expand_as(trajectories.mask)

    def policy_objective(self) -> Objective:
        """The clipped objective."""
        return Clipped(self.clip_range, self.clip_range_high, self.clip_range_lower)
