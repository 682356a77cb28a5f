"""The frozen reference model π_ref: log π_ref(a|s), one token at a time or of whole completions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from textrl_env.decoding import SlotDecoder
from textrl_env.logprobs import completion_logprobs, log_distribution
from textrl_env.token_mask import TokenMask


class Reference:
    """Scores actions under a frozen model, with a key-value cache per slot.

    A step costs one forward pass of one token per slot, whatever has been generated. The pass is
    made when an action is scored, for the token *before* it, so no distribution over the
    vocabulary outlives the call and the last token of an episode costs nothing.

    Args:
        model: The frozen model.
        num_slots: Number of sequences.
        capacity: Longest prompt plus completion, in tokens.
        temperature: Divides the logits.
        token_mask: Tokens that may be generated.

    Examples:
        >>> from textrl_env.models import load_frozen
        >>> everything = TokenMask(259, eos_ids=[2])
        >>> reference = Reference(load_frozen("tiny", "cpu"), 1, 8, 1.0, everything)
        >>> slot, prompt, tokens = np.array([0]), np.array([1, 52]), np.array([55, 2])
        >>> reference.restart(slot, [prompt])
        >>> steps = [reference.score(slot, tokens[t : t + 1])[0] for t in range(2)]
        >>> np.allclose(steps, reference.score_completions([prompt], [tokens])[0], atol=1e-4)
        True
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        capacity: int,
        temperature: float,
        token_mask: TokenMask,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.token_mask = token_mask
        self._decoder = SlotDecoder(model, num_slots, capacity)
        self._pending: list[NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * num_slots
        self._num_tokens = np.zeros(num_slots, dtype=np.int64)

    def restart(self, slots: NDArray[np.int64], prompts: Sequence[NDArray[np.int64]]) -> None:
        """Starts new episodes in `slots`, int64 (n,), from the token ids of their prompts."""
        self._decoder.restart(slots)
        self._num_tokens[slots] = 0
        for slot, prompt in zip(slots, prompts, strict=True):
            self._pending[slot] = prompt

    def score(self, slots: NDArray[np.int64], actions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns log π_ref(action|state) for each of `slots`, (n,), and moves on to the action."""
        long = np.fromiter((len(self._pending[s]) > 1 for s in slots), dtype=bool, count=len(slots))
        # New prompts go first, all but their last token: the others do not wait on padding.
        if long.any():
            self._decoder.advance(slots[long], [self._pending[s][:-1] for s in slots[long]])
        last = np.array([self._pending[s][-1:] for s in slots])
        logits = self._decoder.advance(slots, last)
        log_dist = log_distribution(
            logits, torch.from_numpy(self._num_tokens[slots]), self.temperature, self.token_mask
        )
        chosen = torch.from_numpy(actions).to(log_dist.device)[:, None]
        for slot, action in zip(slots, actions, strict=True):
            self._pending[slot] = np.array([action])
        self._num_tokens[slots] += 1
        return log_dist.gather(1, chosen)[:, 0].double().cpu().numpy()

    def score_completions(
        self, prompts: Sequence[NDArray[np.int64]], completions: Sequence[NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        """Returns log π_ref of every completion token in one pass, right-padded with 0, (n, T)."""
        return completion_logprobs(
            self.model, prompts, completions, self.temperature, self.token_mask
        )
