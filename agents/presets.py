"""Constants in which peers differ, so that a run of theirs can be reproduced.

The formulas are shared. What differs is an ε, the divisor of a standard deviation, the rule for a
group of one, how token losses are added up, and which estimator the KL has.

Examples:
    >>> import torch
    >>> from agents.advantages import group_advantages
    >>> returns, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 0])
    >>> PRESETS["verl"].grpo_arguments["clip_range_lower"]  # GRPO(..., **it)
    3.0
    >>> for name in ("verl", "trl"):
    ...     advantages = group_advantages(returns, groups, **PRESETS[name].group_arguments)
    ...     print(f"{name} {advantages[0]:.5f}")
    verl 0.86602
    trl 0.86588
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypedDict


class GroupArguments(TypedDict):
    """Keyword arguments of `agents.advantages.group_advantages`."""

    eps: float
    ddof: int
    singletons: str


class GRPOArguments(TypedDict):
    """Keyword arguments of `agents.GRPO`."""

    epsilon: float
    loss_aggregation: str
    clip_range: float
    clip_range_lower: float | None
    kl_loss: str


@dataclass(frozen=True)
class Preset:
    """The constants of one peer.

    Attributes:
        group_eps: `eps` of `agents.advantages.group_advantages`.
        group_ddof: Its `ddof`.
        group_singletons: Its `singletons`.
        loss_aggregation: A mode of `agents.aggregation`.
        clip_range: ε of `agents.objectives.clipped_objective`.
        clip_range_lower: c of its dual clip, or None.
        kl_estimator: Estimator in the reward, see `textrl_env.kl.kl_estimate`.
        kl_loss: Estimator as a loss.
        kl_clamp: Its `clamp` as a loss, or None.
    """

    group_eps: float
    group_ddof: int
    group_singletons: str
    loss_aggregation: str
    clip_range: float
    clip_range_lower: float | None
    kl_estimator: str
    kl_loss: str
    kl_clamp: float | None

    @property
    def grpo_arguments(self) -> GRPOArguments:
        """Keyword arguments of `agents.GRPO`."""
        return {
            "epsilon": self.group_eps,
            "loss_aggregation": self.loss_aggregation,
            "clip_range": self.clip_range,
            "clip_range_lower": self.clip_range_lower,
            "kl_loss": self.kl_loss,
        }

    @property
    def group_arguments(self) -> GroupArguments:
        """Keyword arguments of `agents.advantages.group_advantages`."""
        return {
            "eps": self.group_eps,
            "ddof": self.group_ddof,
            "singletons": self.group_singletons,
        }


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "verl": Preset(
            group_eps=1e-6,
            group_ddof=1,
            group_singletons="keep",
            loss_aggregation="token-mean",
            clip_range=0.2,
            clip_range_lower=3.0,
            kl_estimator="k1",
            kl_loss="k3",
            kl_clamp=10.0,
        ),
        # With its default loss type, "dapo".
        "trl": Preset(
            group_eps=1e-4,
            group_ddof=1,
            group_singletons="zero",
            loss_aggregation="token-mean",
            clip_range=0.2,
            clip_range_lower=None,
            kl_estimator="k1",
            kl_loss="k3",
            kl_clamp=None,
        ),
        # Its group_norm estimator; a group of one is NaN there.
        "openrlhf": Preset(
            group_eps=1e-9,
            group_ddof=1,
            group_singletons="zero",
            loss_aggregation="token-mean",
            clip_range=0.2,
            clip_range_lower=None,
            kl_estimator="k1",
            kl_loss="k3",
            kl_clamp=None,
        ),
    }
)
