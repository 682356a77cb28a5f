"""Arithmetic: ``47+85=`` and the like, with operand pairs held out for the test."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from textrl_env.tasks.base import Sample, Split, Task, check_index, interleave, register_task


class Arithmetic(Task):
    """Two numbers of equally many digits, and the result as the answer; the base of the family.

    The operands are all numbers of ``digits`` digits without leading zeros (0 to 9 for one).
    Train and test share no pair of operands in either order, and together hold every pair. With
    several ``digits`` these take turns from index to index, and the fewer pairs of the short ones
    come round again.

    Args:
        digits: A number from 1 to 3, or several.
        split: ``"train"`` or ``"test"``.
        seed: Fixes which pairs are held out, and the order.
        test_fraction: The share of pairs that is held out.

    Raises:
        ValueError: An argument is outside its range.
    """

    sign: str
    max_new_tokens = 8

    def __init__(
        self,
        digits: int | Sequence[int] = 2,
        split: str = "train",
        seed: int = 0,
        test_fraction: float = 0.1,
    ) -> None:
        levels = (digits,) if isinstance(digits, int) else tuple(digits)
        if not levels or len(set(levels)) < len(levels) or not set(levels) <= {1, 2, 3}:
            raise ValueError(f"digits must be 1, 2 or 3, or several of these, got {digits!r}")
        self._levels = [_Pairs(level, split, seed, test_fraction) for level in levels]
        self._lengths = [len(pairs) for pairs in self._levels]

    @staticmethod
    @abstractmethod
    def compute(a: int, b: int) -> int:
        """The result for two operands."""

    def __len__(self) -> int:
        return len(self._lengths) * max(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        index = check_index(index, len(self))
        level, position = interleave(index, self._lengths)
        pairs = self._levels[level]
        a, b = pairs[position]
        return Sample(f"{a}{self.sign}{b}=", str(self.compute(a, b)), index, pairs.digits)

    def score(self, completion: str, sample: Sample) -> float:
        """1.0 for the exact result, else 0.0."""
        return float(self.is_correct(completion, sample))


class _Pairs:
    """The ordered pairs of d-digit numbers on one side of a split of the unordered pairs."""

    def __init__(self, digits: int, split: str, seed: int, test_fraction: float) -> None:
        self.digits = digits
        self._low = 0 if digits == 1 else 10 ** (digits - 1)
        n = 10**digits - self._low
        # Pairs of different numbers come in two orders, doubles in one: split apart, each
        # ordered pair has exactly one index.
        self._different = Split(n * (n - 1) // 2, split, seed, test_fraction)
        self._doubles = Split(n, split, seed, test_fraction)

    def __len__(self) -> int:
        return 2 * len(self._different) + len(self._doubles)

    def __getitem__(self, index: int) -> tuple[int, int]:
        half, position = divmod(index, len(self._different))
        if half > 1:
            double = self._low + self._doubles[index - 2 * len(self._different)]
            return double, double
        item = self._different[position]
        # Pairs larger > smaller >= 0 are numbered 10, 20, 21, 30, 31, 32, ...
        larger = (1 + math.isqrt(1 + 8 * item)) // 2
        smaller = item - larger * (larger - 1) // 2
        pair = (self._low + larger, self._low + smaller)
        # Every other pair is turned around, and the second half has the opposite orders: the first
        # k samples are then as mixed as any others.
        return pair if (half + position) % 2 else pair[::-1]


@register_task("addition")
class Addition(Arithmetic):
    """Sums; see `Arithmetic` for the arguments.

    >>> task = Addition(digits=2)
    >>> len(task), task[0].prompt, task[0].answer, task[0].difficulty
    (7291, '14+75=', '89', 2)
    >>> task.score(" 89", task[0]), task.score("8", task[0])
    (1.0, 0.0)
    """

    sign = "+"

    @staticmethod
    def compute(a: int, b: int) -> int:
        """The sum."""
        return a + b


@register_task("subtraction")
class Subtraction(Arithmetic):
    """Differences, which may be negative; see `Arithmetic` for the arguments.

    >>> task = Subtraction(digits=1)
    >>> task[2].prompt, task[2].answer
    ('3-4=', '-1')
    """

    sign = "-"

    @staticmethod
    def compute(a: int, b: int) -> int:
        """The difference."""
        return a - b


@register_task("multiplication")
class Multiplication(Arithmetic):
    """Products; see `Arithmetic` for the arguments.

    >>> Multiplication(digits=1)[0].prompt
    '3*9='
    """

    sign = "*"

    @staticmethod
    def compute(a: int, b: int) -> int:
        """The product."""
        return a * b
