"""PPO: proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

import warnings
from copy import copy
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule
from stable_baselines3.common.utils import FloatSchedule

from agents.advantages import gae
from agents.agent import Agent, is_language_policy
from agents.kl_control import KLController
from agents.masked import masked_sum
from agents.objectives import Clipped, KLPenalty, Objective
from agents.policies import LMPolicy
from agents.trajectories import Trajectories
from textrl_env.kl import kl_estimate
from textrl_env.sb3 import KLRolloutBuffer


class PPO(Agent):
    """The clipped objective, or a KL penalty, with a critic and generalised advantage estimation.

    The arguments are those of ``stable_baselines3.PPO``, with the same defaults on control. Where
    text wants another value, the default is None and says which.

    Args:
        policy: ``"LMPolicy"`` for text; ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"``
            or a policy class otherwise.
        env: Gymnasium id, `Env`, Gymnasium `VectorEnv` or Stable-Baselines3 `VecEnv`.
        learning_rate: A number, or a function of the remaining progress (1 to 0). None is 3e-4,
            and 1e-5 for a language model; `tiny` takes 2e-4.
        n_steps: Steps per slot and rollout. None is 2,048; on text it stays None, and a rollout is
            one whole completion per slot.
        batch_size: Transitions per optimiser step, on text completions. None is 64.
        n_epochs: Passes over a rollout. None is 10, and 2 on text.
        gamma: Discount γ. None is 0.99, and 1.0 on text, where it would favour short completions.
        gae_lambda: λ of the advantage (arXiv:1506.02438). None is 0.95, and 1.0 on text.
        clip_range: The probability ratio is clipped below 1 − clip_range and above 1 + clip_range;
            a number, or a function of the remaining progress.
        clip_range_vf: Clips the change of the value; None does not.
        normalize_advantage: Whitens the advantages of each mini-batch.
        ent_coef: Weight of the entropy bonus.
        vf_coef: Weight of the value loss.
        max_grad_norm: Gradients are clipped to this norm.
        use_sde: State-dependent exploration, for continuous actions.
        sde_sample_freq: Steps between its noise samples; -1 once per rollout.
        rollout_buffer_class: Only Stable-Baselines3's own, or `textrl_env.sb3.KLRolloutBuffer`,
            whose work this agent does by itself; override `compute_advantages` for another.
        rollout_buffer_kwargs: Arguments of `KLRolloutBuffer`; not needed here.
        target_kl: Stops the epochs when the KL to the rollout's policy exceeds 1.5 times this.
        stats_window_size: Episodes that the logged means cover.
        tensorboard_log: Folder for TensorBoard, or None.
        policy_kwargs: Arguments of the policy, such as ``{"net_arch": [64, 64]}``.
        verbose: 0 silent, 1 logs to the terminal.
        seed: Seeds everything that the agent draws.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``.
        objective: ``"clip"``, or the KL penalty with its β: ``FixedKL(1.0)``, or the paper's rule
            ``TwoSidedKL(1.0, target=0.01)``, see `agents.kl_control`. It is told the mean over
            steps of KL(π_old‖π) after each update.
        clip_range_high: Upper clip, where it differs from `clip_range` (DAPO, arXiv:2503.14476).
        clip_range_lower: Dual clip c > 1 (arXiv:1912.09729): bounds the loss of a token with a
            negative advantage by c·|A|. None is none, and 3.0 on text; infinity leaves it out.
        micro_batch_size: Rows that are run at a time. It bounds memory and changes nothing.
        loss_aggregation: How token losses become one number, see `agents.aggregation`.
        kl_loss_coef: Weight of the KL to the reference as a loss.
        kl_loss: Its estimator, see `textrl_env.kl`.
        kl_controller: Sets the environment's `kl_coef`, anew after each rollout; None keeps it.
        collector: ``"generate"``, ``"step"`` or ``"auto"``, see `Agent`.

    Raises:
        AssertionError: As in Stable-Baselines3: there is one transition to normalise by, or a clip
            range is no number or schedule.
        ValueError: A rollout buffer is given that this agent cannot honour, or options contradict.

    Examples:
        >>> agent = PPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0).learn(64)
        >>> agent.num_timesteps, agent.gamma
        (64, 0.99)
        >>> import gymnasium as gym
        >>> env = gym.make_vec("textrl_env:TextRL-v0", num_envs=8, task="addition", kl_coef=0.01)
        >>> PPO("LMPolicy", env, learning_rate=2e-4, seed=0).learn(20).gamma
        1.0
    """

    uses_critic = True

    def __init__(
        self,
        policy: str | type[BasePolicy],
        env: GymEnv | VectorEnv[Any, Any, Any] | str | None,
        learning_rate: float | Schedule | None = None,
        n_steps: int | None = None,
        batch_size: int | None = None,
        n_epochs: int | None = None,
        gamma: float | None = None,
        gae_lambda: float | None = None,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        objective: str | KLController = "clip",
        clip_range_high: float | Schedule | None = None,
        clip_range_lower: float | None = None,
        micro_batch_size: int | None = None,
        loss_aggregation: str = "token-mean",
        kl_loss_coef: float = 0.0,
        kl_loss: str = "k2",
        kl_controller: KLController | None = None,
        collector: str = "auto",
    ) -> None:
        _check_buffer(rollout_buffer_class, rollout_buffer_kwargs)
        text = is_language_policy(policy)
        self.gamma = _default(gamma, 1.0 if text else 0.99)
        self.gae_lambda = _default(gae_lambda, 1.0 if text else 0.95)
        # A copy: its β moves with this agent, and another may be given the same.
        self.objective = copy(objective)
        self.clip_range = clip_range
        self.clip_range_high = clip_range_high
        self.clip_range_lower = _default(clip_range_lower, 3.0 if text else None)
        self.clip_range_vf = clip_range_vf
        self.normalize_advantage = normalize_advantage
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=_default(n_steps, None if text else 2048),
            batch_size=_default(batch_size, 64),
            micro_batch_size=micro_batch_size,
            n_epochs=_default(n_epochs, 2 if text else 10),
            group_size=1,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
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
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            _init_setup_model=_init_setup_model,
        )

    def _check_options(self) -> None:
        super()._check_options()
        if not (self.objective == "clip" or isinstance(self.objective, KLController)):
            raise ValueError(
                f"objective is {self.objective!r}; use 'clip', or one of agents.kl_control for a "
                "KL penalty, such as TwoSidedKL(1.0, target=0.01)."
            )
        if isinstance(self.objective, KLController) and self.clip_range_high is not None:
            raise ValueError(
                f"objective is {self.objective}, which clips nothing, and clip_range_high is "
                f"{self.clip_range_high}; leave one out."
            )
        for name in ("clip_range", "clip_range_high", "clip_range_vf"):
            if name == "clip_range" or getattr(self, name) is not None:
                self._check_schedule(name)
        if self.clip_range_vf is not None and not callable(self.clip_range_vf):
            assert self.clip_range_vf > 0, (
                f"clip_range_vf is {self.clip_range_vf}; it must be positive, or None for no clip."
            )
        if self.n_steps is None or self.env is None or self.batch_size is None:
            return
        size = self.n_steps * self.n_envs
        if self.normalize_advantage:
            # https://github.com/DLR-RM/stable-baselines3/issues/440
            assert self.batch_size > 1, (
                "batch_size is 1, and one advantage cannot be normalised; take more, or "
                "normalize_advantage=False."
            )
            assert size > 1, (
                f"n_steps * n_envs is {size}, and one advantage cannot be normalised; take more "
                "steps, or normalize_advantage=False."
            )
        if size % self.batch_size:
            warnings.warn(
                f"batch_size is {self.batch_size}, which does not divide the n_steps * n_envs = "
                f"{size} transitions of a rollout: the last mini-batch of each epoch has "
                f"{size % self.batch_size}; choose a factor of {size}.",
                UserWarning,
                stacklevel=4,
            )

    def _setup_model(self) -> None:
        super()._setup_model()
        # Functions of the remaining progress, as callbacks and scripts expect of the attributes.
        self.clip_range = FloatSchedule(self.clip_range)
        if self.clip_range_high is not None:
            self.clip_range_high = FloatSchedule(self.clip_range_high)
        if self.clip_range_vf is not None:
            self.clip_range_vf = FloatSchedule(self.clip_range_vf)

    def train(self) -> None:
        """Updates the policy on the last rollout, and sets β of a KL penalty for the next."""
        super().train()
        if isinstance(self.objective, KLController):
            self.logger.record("train/kl_penalty_coef", self.objective.coef)
            assert self.rollout_buffer is not None
            if bool(self.rollout_buffer.loss_mask.any()):
                self.objective.update(self._divergence(), len(self.rollout_buffer))
        else:
            self.logger.record("train/clip_range", self._now(self.clip_range))
        if self.clip_range_vf is not None:
            self.logger.record("train/clip_range_vf", self._now(self.clip_range_vf))

    def compute_advantages(self, trajectories: Trajectories) -> None:
        """Generalised advantage estimates, and the returns that the critic learns."""
        assert trajectories.values is not None
        trajectories.advantages, trajectories.returns = gae(
            trajectories.rewards,
            trajectories.values,
            terminated=trajectories.terminated,
            truncated=trajectories.truncated,
            mask=trajectories.mask,
            final_values=trajectories.final_values,
            last_values=trajectories.last_values,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )

    def policy_objective(self) -> Objective:
        """The clipped objective (eq. 7), or the one with a KL penalty (eq. 8)."""
        if isinstance(self.objective, KLController):
            return KLPenalty(self.objective.coef)
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return Clipped(self._now(self.clip_range), self._now(high), self.clip_range_lower)

    def value_clip_range(self) -> float | None:
        """How far a value may move from its old one in the loss."""
        return None if self.clip_range_vf is None else self._now(self.clip_range_vf)

    def _divergence(self) -> float:
        """The mean over the rollout's steps of KL(π_old‖π), π as it is now."""
        batch = self.rollout_buffer
        assert batch is not None
        if not isinstance(self.policy, LMPolicy):
            batch = batch.as_transitions()
        rows = torch.arange(len(batch), device=self.device)
        total = 0.0
        with torch.no_grad():
            for part in rows.split(self.micro_batch_size or self.batch_size or len(rows)):
                piece = batch.select(part)
                kl = kl_estimate(piece.logprobs, self.evaluate(piece).logprobs, "k3")
                total += float(masked_sum(kl, piece.loss_mask))
        return total / max(int(batch.loss_mask.sum()), 1)

    def _now(self, clip_range: float | Schedule) -> float:
        return FloatSchedule(clip_range)(self._current_progress_remaining)


def _check_buffer(buffer_class: type[RolloutBuffer] | None, kwargs: dict[str, Any] | None) -> None:
    """Refuses a rollout buffer that would do anything that this agent does not do by itself."""
    if buffer_class not in (None, RolloutBuffer, DictRolloutBuffer, KLRolloutBuffer):
        raise ValueError(
            f"rollout_buffer_class is {buffer_class!r}, but rollouts are kept as Trajectories; "
            "leave it out, and override compute_advantages() to change what is computed of them."
        )
    if kwargs and buffer_class is not KLRolloutBuffer:
        raise ValueError(
            f"rollout_buffer_kwargs is {kwargs!r}, but rollouts are kept as Trajectories, which "
            "take none; leave it out."
        )


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value
