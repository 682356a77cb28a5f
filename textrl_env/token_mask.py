"""Which tokens may be generated, as a function of how many have been."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import torch


class TokenMask:
    """The set of allowed actions at each position of a completion.

    The environment checks actions with it and renormalises the reference over it; the agent
    samples and scores with the same one, so that both log-probabilities are of the distribution
    that was sampled from.

    Args:
        vocab_size: Number of tokens V.
        eos_ids: End-of-sequence ids, always allowed once `min_new_tokens` have been generated.
        allowed_tokens: Ids that may be generated; None allows all.
        min_new_tokens: Number of tokens before which end-of-sequence is masked.

    Raises:
        ValueError: An id lies outside the vocabulary, or nothing would be allowed.

    Examples:
        >>> mask = TokenMask(4, [3], allowed_tokens=[0, 1], min_new_tokens=1)
        >>> mask(0).tolist(), mask(1).tolist()
        ([True, True, False, False], [True, True, False, True])
    """

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        allowed_tokens: Iterable[int] | None = None,
        min_new_tokens: int = 0,
    ) -> None:
        eos = np.asarray(sorted(eos_ids), dtype=np.int64)
        if allowed_tokens is None:
            late = np.ones(vocab_size, dtype=np.bool_)
        else:
            ids = _token_ids(allowed_tokens)
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if outside.size:
                raise ValueError(
                    f"allowed_tokens holds {int(outside[0])}, outside the vocabulary of "
                    f"{vocab_size} tokens; use ids in [0, {vocab_size - 1}]."
                )
            late = np.zeros(vocab_size, dtype=np.bool_)
            late[ids] = True
            late[eos] = True
        early = late.copy()
        early[eos] = False
        if min_new_tokens > 0 and not early.any():
            raise ValueError(
                "No token but end-of-sequence is allowed and min_new_tokens is "
                f"{min_new_tokens}; allow more tokens or set min_new_tokens=0."
            )
        self.min_new_tokens = min_new_tokens
        self._table = np.stack([early, late])

    @property
    def is_trivial(self) -> bool:
        """Whether every token is allowed everywhere."""
        return self.min_new_tokens == 0 and bool(self._table[1].all())

    def __call__(self, num_tokens: ArrayLike) -> NDArray[np.bool_]:
        """Returns the mask after `num_tokens` generated tokens, shape (*num_tokens.shape, V)."""
        return self._table[(np.asarray(num_tokens) >= self.min_new_tokens).astype(np.int64)]

    def allows(self, tokens: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether each of `tokens` is allowed after its `num_tokens`, same shape."""
        return self._table[(num_tokens >= self.min_new_tokens).astype(np.int64), tokens]

    def apply(self, logits: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Returns `logits` (..., V) with −inf where masked; `num_tokens` is (...)."""
        if self.is_trivial:
            return logits
        import torch

        table = torch.from_numpy(self._table).to(logits.device)
        allowed = table[(num_tokens >= self.min_new_tokens).long()]
        return logits.masked_fill(~allowed, float("-inf"))


def _token_ids(allowed_tokens: Any) -> NDArray[np.int64]:
    listed = list(allowed_tokens) if isinstance(allowed_tokens, Iterable) else allowed_tokens
    ids = np.asarray(listed)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"allowed_tokens is {allowed_tokens!r}; pass a list of token ids, or None."
        )
    return ids.astype(np.int64)
