"""Sampling that depends on the run and the prompt, and on nothing else.

Tokens are drawn by inverting the cumulative distribution at uniform numbers that are fixed before
generation begins. So a token does not depend on which other sequences share the batch, siblings
of a group differ, two runs with one seed agree, and global generators are untouched.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from textrl_env.permutation import Permutation

# Streams of one run's seed that must not meet.
_SAMPLING, _SHUFFLING = 0, 1


def shuffling_seed(seed: int) -> np.random.SeedSequence:
    """Returns the seed of a run's mini-batches, apart from those of its sampling."""
    return np.random.SeedSequence(seed, spawn_key=(_SHUFFLING,))


def sampling_uniforms(
    seed: int, rollout: int, prompt_indices: ArrayLike, num_tokens: int
) -> NDArray[np.float64]:
    """Returns uniform numbers in [0, 1) for each completion's tokens, (n, num_tokens).

    Args:
        seed: The run's seed.
        rollout: Counts the rollouts of the run.
        prompt_indices: The prompt of each completion. The k-th completion of a prompt is sibling
            k, and siblings draw from the prompt's generator one after the other.
        num_tokens: Longest completion.

    Examples:
        >>> u = sampling_uniforms(0, 0, [7, 7, 9], 4)
        >>> bool((u[0] == u[1]).any()), bool((u[2] == sampling_uniforms(0, 0, [9], 4)[0]).all())
        (False, True)
    """
    indices = np.asarray(prompt_indices, dtype=np.int64)
    uniforms = np.empty((len(indices), num_tokens))
    for prompt in np.unique(indices).tolist():
        rows = np.flatnonzero(indices == prompt)
        generator = np.random.default_rng(
            np.random.SeedSequence(seed, spawn_key=(_SAMPLING, rollout, prompt))
        )
        uniforms[rows] = generator.random((len(rows), num_tokens))
    return uniforms


def sample_tokens(log_dist: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns the token of each row at which the cumulative distribution passes its number.

    Args:
        log_dist: Normalised log-probabilities, −inf where masked, (n, V).
        uniforms: Numbers in [0, 1), float64 (n,).

    Returns:
        Tokens, int64 (n,); a token of probability 0 is never chosen.

    Examples:
        >>> p = torch.tensor([[0.5, 0.0, 0.5]]).log().expand(3, 3)
        >>> sample_tokens(p, torch.tensor([0.0, 0.4999, 0.5], dtype=torch.float64)).tolist()
        [0, 0, 2]
    """
    # In float64 the last step of the cumulative sum is not lost to rounding.
    cumulative = log_dist.double().exp().cumsum(-1)
    targets = uniforms.to(log_dist.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(
        max=log_dist.shape[-1] - 1
    )


class PromptSampler:
    """Prompts in a new random order each epoch, resumable from one number.

    Args:
        size: Number of prompts.
        seed: The run's seed, not negative.

    Attributes:
        position: Prompts handed out so far; setting it resumes there.

    Examples:
        >>> sampler = PromptSampler(3, seed=0)
        >>> sorted(sampler.next(3).tolist()), sampler.position
        ([0, 1, 2], 3)
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.position = 0
        self._epoch = -1
        self._permutation = Permutation(size, seed)

    def next(self, count: int) -> NDArray[np.int64]:
        """Returns the next `count` prompt indices, int64, across the edges of epochs."""
        positions = range(self.position, self.position + count)
        self.position += count
        return np.array([self._order(p // self.size)[p % self.size] for p in positions])

    def _order(self, epoch: int) -> Permutation:
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, Permutation(self.size, self.seed << 32 | epoch)
        return self._permutation
