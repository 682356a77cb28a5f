"""Statistics over few runs: interquartile mean and stratified bootstrap (arXiv:2108.13264).

Scores are arrays (runs, tasks, ...): a run is a seed, and what follows the tasks, such as the
points of a learning curve, is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]


def interquartile_mean(scores: Scores) -> NDArray[Any]:
    """Returns the mean of the middle half of all scores of all tasks.

    A quarter of the number of scores, rounded down, leaves at each end, as in the paper's code.

    Args:
        scores: Of the runs and tasks, (runs, tasks, ...).

    Examples:
        >>> scores = np.array([[0.0], [1.0], [3.0], [100.0]])
        >>> float(interquartile_mean(scores))
        2.0
    """
    flat = np.sort(scores.reshape(-1, *scores.shape[2:]), axis=0)
    cut = len(flat) // 4
    return flat[cut : len(flat) - cut].mean(0)


def probability_of_improvement(scores: Scores, others: Scores) -> NDArray[Any]:
    """Returns how likely a run of the first beats one of the second, averaged over the tasks.

    A tie counts half.

    Args:
        scores: Of one algorithm, (runs, tasks).
        others: Of another on the same tasks, (runs, tasks); the number of runs may differ.

    Examples:
        >>> x, y = np.array([[1.0], [3.0]]), np.array([[1.0], [2.0]])
        >>> float(probability_of_improvement(x, y))
        0.625
    """
    differences = scores[:, None] - others[None]
    return ((differences > 0) + 0.5 * (differences == 0)).mean()


def bootstrap_interval(
    statistic: Callable[..., NDArray[Any]],
    *scores: Scores,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the percentile bootstrap interval of a statistic.

    The runs are drawn with replacement for each task by itself (stratified), and independently for
    each array of scores.

    Args:
        statistic: Function of the arrays, such as `interquartile_mean`.
        *scores: Arrays (runs, tasks, ...).
        confidence: Part of the resamples between the two ends.
        resamples: Number of resamples.
        seed: Seeds them.

    Examples:
        >>> low, high = bootstrap_interval(interquartile_mean, np.full((5, 1), 7.0))
        >>> float(low), float(high)
        (7.0, 7.0)
    """
    generator = np.random.default_rng(seed)

    def resampled(array: Scores) -> Scores:
        runs = generator.integers(len(array), size=array.shape[:2])
        return array[runs, np.arange(array.shape[1])]

    draws = [statistic(*map(resampled, scores)) for _ in range(resamples)]
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high
