"""Objectives of the policy and of the critic, as losses of each step.

A policy objective takes log π and log π_old of the actions and the advantages, all (B, T), and
returns the loss of each step, (B, T), with statistics of each step to log, (B, T) too:
``approx_kl`` (k3 estimate of KL(π_old‖π), as in Stable-Baselines3), ``ppo_kl`` (k1, as in verl)
and, where the objective clips, ``clip_fraction``. `agents.aggregation` makes one number of them.

`Clipped` and `KLPenalty` are what an agent chooses between: the loss with its coefficients, and its
derivative for networks whose gradients are written out (`agents.fused`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from agents.masked import masked_mean
from textrl_env.kl import kl_estimate

# exp(20) is about 5e8: no loss is infinite, and no gradient NaN.
_MAX_LOG_RATIO = 20.0
# The sequence ratio of GSPO is a geometric mean, and never that large.
_MAX_SEQUENCE_LOG_RATIO = 10.0

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]

Array = NDArray[np.float32]
Derivative = tuple[Array, Array, dict[str, Array]]


class Objective(ABC):
    """An objective of the policy with its coefficients."""

    @abstractmethod
    def loss(
        self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> Loss:
        """Returns the loss of each step and statistics, all (B, T)."""

    @abstractmethod
    def derivative(self, log_ratio: Array, advantages: Array) -> Derivative:
        """Returns the loss of each step, ∂loss/∂log π and the statistics of `loss`, all (B,).

        Args:
            log_ratio: log π − log π_old, (B,).
            advantages: (B,).
        """


@dataclass(frozen=True)
class Clipped(Objective):
    """The clipped surrogate, see `clipped_objective`."""

    clip_range: float = 0.2
    clip_range_high: float | None = None
    clip_range_lower: float | None = None

    def __post_init__(self) -> None:
        _check_clip_ranges(self.clip_range, self.clip_range_high, self.clip_range_lower)

    def loss(
        self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> Loss:
        """Returns the loss and statistics, see `clipped_objective`."""
        return clipped_objective(
            logprobs,
            old_logprobs,
            advantages,
            self.clip_range,
            self.clip_range_high,
            self.clip_range_lower,
        )

    def derivative(self, log_ratio: Array, advantages: Array) -> Derivative:
        """Returns loss, derivative and statistics, see `Objective`."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        bounded = _bound(log_ratio)
        ratio = np.exp(bounded)
        unclipped: Array = -advantages * ratio
        clipped = -advantages * np.minimum(np.maximum(ratio, 1 - self.clip_range), 1 + high)
        is_clipped = clipped > unclipped
        loss = np.maximum(unclipped, clipped)
        statistics = _array_statistics(log_ratio, clip_fraction=is_clipped)
        # Within the bounds the derivative of −A·ρ is itself; outside them, nothing moves.
        flat = is_clipped | (bounded != log_ratio)
        if self.clip_range_lower is not None:
            bound = -advantages * np.float32(self.clip_range_lower)
            binds = (advantages < 0) & (loss > bound)
            loss[binds] = bound[binds]
            statistics["clip_fraction_lower"] = binds.astype(np.float32)
            flat |= binds
        unclipped[flat] = 0.0
        return loss, unclipped, statistics


@dataclass(frozen=True)
class KLPenalty(Objective):
    """The KL-penalised surrogate, see `kl_penalty_objective`."""

    kl_coef: float

    def loss(
        self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> Loss:
        """Returns the loss and statistics, see `kl_penalty_objective`."""
        return kl_penalty_objective(logprobs, old_logprobs, advantages, self.kl_coef)

    def derivative(self, log_ratio: Array, advantages: Array) -> Derivative:
        """Returns loss, derivative and statistics, see `Objective`."""
        bounded = _bound(log_ratio)
        unclipped: Array = -advantages * np.exp(bounded)
        excess, kl_coef = np.expm1(bounded), np.float32(self.kl_coef)
        loss = unclipped + kl_coef * (excess - bounded)
        unclipped += kl_coef * excess
        unclipped[bounded != log_ratio] = 0.0
        return loss, unclipped, _array_statistics(log_ratio)


def clipped_objective(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
    clip_range_lower: float | None = None,
) -> Loss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    With ρ = π/π_old the loss is max(−A·ρ, −A·clip(ρ, 1 − clip_range, 1 + clip_range_high)). The
    dual clip (Ye et al. 2019, arXiv:1912.09729) bounds it by −A·c where A < 0.

    Args:
        logprobs: log π, (B, T); gradients flow through it.
        old_logprobs: log π_old, (B, T).
        advantages: A, (B, T).
        clip_range: Lower clip, and the upper one too where that is None.
        clip_range_high: Upper clip (DAPO, arXiv:2503.14476, has 0.28).
        clip_range_lower: c of the dual clip, above 1 (verl has 3); None or infinity is none.

    Returns:
        The loss and statistics. ``clip_fraction`` is 1 where the clipped branch is the larger,
        ``clip_fraction_lower`` where the dual clip binds.

    Raises:
        ValueError: A clip range is negative, or `clip_range_lower` is not above 1.

    Examples:
        >>> ratio = torch.tensor([[1.5, 1.0, 5.0]])
        >>> advantages = torch.tensor([[1.0, 1.0, -1.0]])
        >>> loss, _ = clipped_objective(ratio.log(), torch.zeros(1, 3), advantages)
        >>> loss
        tensor([[-1.2000, -1.0000,  5.0000]])
        >>> loss, _ = clipped_objective(
        ...     ratio.log(), torch.zeros(1, 3), advantages, clip_range_lower=3.0
        ... )
        >>> loss
        tensor([[-1.2000, -1.0000,  3.0000]])
    """
    _check_clip_ranges(clip_range, clip_range_high, clip_range_lower)
    ratio = _ratio(logprobs, old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * _clip(ratio, clip_range, clip_range_high)
    loss = torch.maximum(unclipped, clipped)
    statistics = _statistics(logprobs, old_logprobs, clip_fraction=clipped > unclipped)
    if clip_range_lower is not None:
        bound = -advantages * clip_range_lower
        binds = (advantages < 0) & (loss > bound)
        loss = torch.where(binds, bound, loss)
        statistics["clip_fraction_lower"] = binds.to(loss.dtype)
    return loss, statistics


def kl_penalty_objective(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    kl_coef: float,
) -> Loss:
    """The KL-penalised surrogate of PPO (arXiv:1707.06347, eq. 8): −A·ρ + β·KL(π_old‖π).

    The KL is estimated by k3 on the actions, which π_old drew: here, unlike for KL(π‖π_ref), its
    gradient is exact in expectation. `agents.kl_control.TwoSidedKL` is the paper's rule for β.

    Args:
        logprobs: log π, (B, T); gradients flow through it.
        old_logprobs: log π_old, (B, T).
        advantages: A, (B, T).
        kl_coef: β.

    Examples:
        >>> loss, _ = kl_penalty_objective(
        ...     torch.tensor([[2.0]]).log(), torch.zeros(1, 1), torch.ones(1, 1), kl_coef=1.0
        ... )
        >>> loss  # −2 + (2 − 1 − log 2)
        tensor([[-1.6931]])
    """
    log_ratio = _log_ratio(logprobs, old_logprobs)
    kl = kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3")
    loss = -advantages * log_ratio.exp() + kl_coef * kl
    return loss, _statistics(logprobs, old_logprobs)


def gspo_objective(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_range: float = 3e-4,
    clip_range_high: float | None = 4e-4,
) -> Loss:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071), token form.

    The ratio is that of the sequence, s = exp(mean_t log ρ_t), clipped as a whole; each step has
    the value of s and the gradient s·∇log π (section 4.3 of the paper). Aggregate it with
    ``"seq-mean-token-mean"``: then advantages that are equal within a sequence give the gradient
    of the sequence form (eq. 5).

    Args:
        logprobs: log π, (B, T); gradients flow through it.
        old_logprobs: log π_old, (B, T).
        advantages: A, (B, T).
        mask: Steps of each sequence, bool (B, T).
        clip_range: Lower clip; far smaller than for ratios of single tokens.
        clip_range_high: Upper clip; None is `clip_range`.

    Returns:
        The loss and statistics.

    Raises:
        ValueError: A clip range is negative.

    Examples:
        >>> loss, _ = gspo_objective(
        ...     torch.tensor([[0.2, 0.4]]),
        ...     torch.zeros(1, 2),
        ...     -torch.ones(1, 2),
        ...     torch.ones(1, 2) > 0,
        ... )
        >>> loss  # exp(0.3) at both
        tensor([[1.3499, 1.3499]])
    """
    sequence = masked_mean(logprobs.detach() - old_logprobs, mask, dim=1)[:, None]
    # Straight through: the value of the sequence's ratio, the gradient of the token's.
    log_ratio = sequence + (logprobs - logprobs.detach())
    ratio = log_ratio.clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * _clip(ratio, clip_range, clip_range_high)
    loss = torch.maximum(unclipped, clipped)
    return loss, _statistics(logprobs, old_logprobs, clip_fraction=clipped > unclipped)


def cispo_objective(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
) -> Loss:
    """Clipped importance-sampling weights (CISPO, MiniMax 2025, arXiv:2506.13585).

    The loss is −sg[clip(ρ, 1 − clip_range, 1 + clip_range_high)]·A·log π: unlike in
    `clipped_objective`, a step whose ratio is clipped keeps a gradient.

    Args:
        logprobs: log π, (B, T); gradients flow through it.
        old_logprobs: log π_old, (B, T).
        advantages: A, (B, T).
        clip_range: Lower clip; 1 is none, as in the paper's experiments.
        clip_range_high: Upper clip; None is `clip_range`.

    Returns:
        The loss and statistics; ``clip_fraction`` is 1 where the ratio is outside the clip.

    Raises:
        ValueError: A clip range is negative.

    Examples:
        >>> loss, _ = cispo_objective(
        ...     torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.ones(1, 1)
        ... )
        >>> loss  # the ratio e² is clipped to 1.2
        tensor([[1.2000]])
    """
    ratio = _ratio(logprobs.detach(), old_logprobs)
    clipped = _clip(ratio, clip_range, clip_range_high)
    loss = -clipped * advantages * logprobs
    return loss, _statistics(logprobs, old_logprobs, clip_fraction=clipped != ratio)


def reinforce_objective(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
) -> Loss:
    """REINFORCE (Williams 1992): −A·log π, exact on the policy that drew the actions.

    Args:
        logprobs: log π, (B, T); gradients flow through it.
        old_logprobs: log π_old, (B, T); for the statistics only.
        advantages: A, (B, T).

    Examples:
        >>> loss, _ = reinforce_objective(
        ...     torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), torch.tensor([[0.5]])
        ... )
        >>> loss
        tensor([[0.5000]])
    """
    return -advantages * logprobs, _statistics(logprobs, old_logprobs)


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    old_values: torch.Tensor | None = None,
    clip_range: float | None = None,
    *,
    pessimistic: bool = False,
) -> torch.Tensor:
    """Returns the squared error of the critic at each step, (V − G)², without a factor ½.

    With a clip range, V is held within ±clip_range of its old value. Stable-Baselines3 then takes
    the clipped error alone, the default here; verl and OpenAI's baselines take the larger of both
    (`pessimistic`), and verl halves it, as a `vf_coef` of 0.5 does.

    Args:
        values: V, (B, T); gradients flow through it.
        returns: Targets G, (B, T).
        old_values: V during the rollout, (B, T); needed with a clip range.
        clip_range: None does not clip.
        pessimistic: Takes the larger of the clipped and the unclipped error.

    Raises:
        ValueError: The clip range is negative, or there are no old values to clip around.

    Examples:
        >>> values, old, returns = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.5])
        >>> value_loss(values, returns)
        tensor([0.2500])
        >>> value_loss(values, returns, old, clip_range=0.2)
        tensor([0.0900])
        >>> value_loss(values, returns, old, clip_range=0.2, pessimistic=True)
        tensor([0.2500])
    """
    error = (values - returns).square()
    if clip_range is None:
        return error
    if not clip_range >= 0:
        raise ValueError(
            f"The clip range of the values is {clip_range}; it must not be negative, or None."
        )
    if old_values is None:
        raise ValueError("A clip range of the values needs old_values to clip around; pass them.")
    held = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped = (held - returns).square()
    return torch.maximum(error, clipped) if pessimistic else clipped


def value_loss_derivative(
    values: Array, returns: Array, old_values: Array, clip_range: float | None = None
) -> tuple[Array, Array]:
    """Returns `value_loss`, with the clipped error alone, and its derivative by V.

    Args:
        values: V, (B,).
        returns: Targets G, (B,).
        old_values: V during the rollout, (B,).
        clip_range: None does not clip.

    Examples:
        >>> one, zero = np.ones(1, dtype=np.float32), np.zeros(1, dtype=np.float32)
        >>> value_loss_derivative(2 * one, one, zero)
        (array([1.], dtype=float32), array([2.], dtype=float32))
        >>> value_loss_derivative(2 * one, one, zero, clip_range=0.5)[1]
        array([-0.], dtype=float32)
    """
    if clip_range is None:
        difference = values - returns
        return np.square(difference), 2 * difference
    change = values - old_values
    held = old_values + np.minimum(np.maximum(change, -clip_range), clip_range)
    difference = held - returns
    return np.square(difference), 2 * difference * (np.abs(change) <= clip_range)


def _log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    return _log_ratio(logprobs, old_logprobs).exp()


def _bound(log_ratio: Array) -> Array:
    return np.minimum(np.maximum(log_ratio, -_MAX_LOG_RATIO), _MAX_LOG_RATIO)


def _check_clip_ranges(low: float, high: float | None, dual: float | None = None) -> None:
    high = low if high is None else high
    if not (low >= 0 and high >= 0):
        raise ValueError(
            f"The clip ranges are {low} and {high}; they are distances from a ratio of 1, and must "
            "not be negative."
        )
    if dual is not None and not dual > 1:
        raise ValueError(f"clip_range_lower is {dual}; the dual clip needs more than 1, or None.")


def _clip(ratio: torch.Tensor, clip_range: float, clip_range_high: float | None) -> torch.Tensor:
    _check_clip_ranges(clip_range, clip_range_high)
    return ratio.clamp(
        1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)
    )


def _statistics(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    clip_fraction: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    logprobs = logprobs.detach()
    statistics = {
        "approx_kl": kl_estimate(old_logprobs, logprobs, "k3"),
        "ppo_kl": kl_estimate(old_logprobs, logprobs, "k1"),
    }
    if clip_fraction is not None:
        statistics["clip_fraction"] = clip_fraction.to(logprobs.dtype)
    return statistics


def _array_statistics(
    log_ratio: Array, clip_fraction: NDArray[np.bool_] | None = None
) -> dict[str, Array]:
    """The same as `_statistics`, of arrays."""
    statistics = {"approx_kl": np.expm1(log_ratio) - log_ratio, "ppo_kl": -log_ratio}
    if clip_fraction is not None:
        statistics["clip_fraction"] = clip_fraction.astype(np.float32)
    return statistics
