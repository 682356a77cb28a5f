"""Controllers of β, the weight of the KL to the reference.

A controller is told the KL of a rollout and how many samples it was measured on, and sets the
`coef` of the next. The KL and its target must be of one kind: Ziegler et al. take the mean over
sequences of the *sum* over tokens, and so do the agents of this package; verl takes the mean of
the token *mean*, so a target from there is smaller by the length of the completions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

SelfController = TypeVar("SelfController", bound="KLController")


@dataclass
class KLController(ABC):
    """What all controllers share.

    Args:
        coef: β at the start; the attribute is its current value.
    """

    coef: float

    def __post_init__(self) -> None:
        _check("coef", self.coef, zero=True)

    @abstractmethod
    def update(self, kl: float, num_samples: int) -> None:
        """Sets `coef` after a rollout.

        Args:
            kl: KL of the rollout, in nats.
            num_samples: Samples in the rollout; for text, completions.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the controller is, ready for JSON."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Becomes what another controller of the same class was."""
        vars(self).update(vars(self.from_state_dict(state)))

    @classmethod
    def from_state_dict(cls: type[SelfController], state: dict[str, Any]) -> SelfController:
        """Returns a controller that goes on from `state`."""
        return cls(**state)


@dataclass
class FixedKL(KLController):
    """Keeps β as it is.

    Examples:
        >>> controller = FixedKL(0.05)
        >>> controller.update(kl=100.0, num_samples=64)
        >>> controller.coef
        0.05
    """

    def update(self, kl: float, num_samples: int) -> None:
        """Changes nothing."""


@dataclass
class AdaptiveKL(KLController):
    """Proportional control in the log of β (Ziegler et al. 2019, arXiv:1909.08593).

    With e = clip(KL / target − 1, −0.2, 0.2), β is multiplied by 1 + e · num_samples / horizon.

    Args:
        coef: β at the start, positive.
        target: KL that is aimed at, in nats per sequence.
        horizon: Samples over which β follows; several rollouts.

    Raises:
        ValueError: An argument is not positive and finite.

    Examples:
        >>> controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
        >>> controller.update(kl=12.0, num_samples=100)
        >>> round(controller.coef, 6)
        0.102
    """

    target: float
    horizon: int

    def __post_init__(self) -> None:
        _check("coef", self.coef)
        _check("target", self.target)
        _check("horizon", self.horizon)

    def update(self, kl: float, num_samples: int) -> None:
        """Moves β towards the target.

        Raises:
            ValueError: `kl` is not finite, or `num_samples` is so large against the horizon that
                β could become 0 or negative.
        """
        _check_kl(kl)
        if num_samples >= 5 * self.horizon:
            raise ValueError(
                f"A rollout has {num_samples} samples and horizon is {self.horizon}, so one update "
                "could turn the coefficient negative; make horizon larger than the rollout."
            )
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_samples / self.horizon


@dataclass
class TwoSidedKL(KLController):
    """The 1.5 rule (Schulman et al. 2017, arXiv:1707.06347, section 4).

    β is divided by `factor` where KL < target / 1.5, and multiplied by it where KL > 1.5 · target.

    Args:
        coef: β at the start, positive.
        target: KL that is aimed at, in nats.
        factor: 2 in the paper.

    Raises:
        ValueError: An argument is not positive and finite, or `factor` not above 1.

    Examples:
        >>> controller = TwoSidedKL(0.1, target=0.01)
        >>> controller.update(kl=0.02, num_samples=64)
        >>> controller.coef
        0.2
    """

    target: float
    factor: float = 2.0

    def __post_init__(self) -> None:
        _check("coef", self.coef)
        _check("target", self.target)
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor is {self.factor}; it must be finite and above 1.")

    def update(self, kl: float, num_samples: int) -> None:
        """Changes β where the KL is far from the target.

        Raises:
            ValueError: `kl` is not finite.
        """
        _check_kl(kl)
        if kl < self.target / 1.5:
            self.coef /= self.factor
        elif kl > 1.5 * self.target:
            self.coef *= self.factor


def _check(name: str, value: float, *, zero: bool = False) -> None:
    if not (0 < value < math.inf or (zero and value == 0)):
        raise ValueError(
            f"{name} is {value}; it must be finite and {'not negative' if zero else 'positive'}."
        )


def _check_kl(kl: float) -> None:
    # One NaN would stay in the coefficient for ever.
    if not math.isfinite(kl):
        raise ValueError(
            f"The measured KL is {kl}; look for log-probabilities that are not finite."
        )
