"""Incremental decoding of many sequences, each at its own length, with one key-value cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from textrl_env.models import check_context


@dataclass
class _Write:
    """Where the next forward pass writes: shared by all layers of a cache."""

    num_slots: int
    capacity: int
    slots: torch.Tensor | None = None  # (n,), None for all slots in order
    positions: torch.Tensor | None = None  # (n, q); `capacity` is a column nobody reads
    width: int = 0  # number of columns that are read


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, (slots, heads, capacity + 1, head_dim)."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, write: _Write) -> None:
        super().__init__()
        self.write = write

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.write.num_slots, key_states.shape[1], self.write.capacity + 1)
        self.keys = key_states.new_zeros((*shape, key_states.shape[3]))
        self.values = value_states.new_zeros((*shape, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, positions, width = self.write.slots, self.write.positions, self.write.width
        assert positions is not None
        rows = torch.arange(len(positions), device=positions.device) if slots is None else slots
        self.keys[rows[:, None], :, positions] = key_states.transpose(1, 2)
        self.values[rows[:, None], :, positions] = value_states.transpose(1, 2)
        if slots is None:
            return self.keys[:, :, :width], self.values[:, :, :width]
        return self.keys[slots, :, :width], self.values[slots, :, :width]

    def get_seq_length(self) -> int:
        return self.write.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.write.width, 0

    def get_max_length(self) -> int:
        return self.write.capacity

    get_max_cache_shape = get_max_length


class SlotDecoder:
    """A causal language model with a key-value cache whose rows advance independently.

    A slot holds one sequence. Any subset of slots can be restarted or advanced by any number of
    tokens, so a finished sequence makes room for the next without touching the others.

    Args:
        model: A transformers causal language model.
        num_slots: Number of sequences N.
        capacity: Longest sequence, in tokens.

    Raises:
        ValueError: The model's context is shorter than `capacity`, or its attention is of a kind
            that needs another cache.

    Examples:
        >>> from textrl_env.models import load_frozen
        >>> decoder = SlotDecoder(load_frozen("tiny", "cpu"), num_slots=2, capacity=8)
        >>> logits = decoder.advance(np.arange(2), [np.array([1, 52, 46]), np.array([1, 64])])
        >>> logits = decoder.advance(np.array([1]), np.array([[55]]))
        >>> decoder.lengths.tolist(), tuple(logits.shape)
        ([3, 3], (1, 259))
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, capacity: int) -> None:
        check_context(model.config, capacity)
        _check_attention(model.config, capacity)
        self.model = model
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        self._write = _Write(num_slots, capacity)
        self._cache = Cache(layer_class_to_replicate=functools.partial(_SlotLayer, self._write))  # type: ignore[arg-type]
        self._float_mask = model.config._attn_implementation != "sdpa"

    def restart(self, slots: NDArray[np.int64]) -> None:
        """Empties `slots`, int64 (n,)."""
        self.lengths[slots] = 0

    @torch.inference_mode()
    def advance(
        self, slots: NDArray[np.int64], tokens: Sequence[NDArray[np.int64]] | NDArray[np.int64]
    ) -> torch.Tensor:
        """Appends tokens to `slots` and returns the logits after the last of them, (n, V).

        Args:
            slots: Distinct slots, int64 (n,).
            tokens: For each slot its new tokens: a list of arrays of any positive lengths, or an
                int64 array (n, q).

        Raises:
            ValueError: There is no token for a slot, or its sequence outgrows the capacity.
        """
        counts = np.fromiter((len(t) for t in tokens), dtype=np.int64, count=len(slots))
        lengths = self.lengths[slots] + counts
        if counts.min() < 1 or lengths.max() > self._write.capacity:
            raise ValueError(
                f"The slots get {counts.tolist()} tokens and then hold {lengths.tolist()}; each "
                f"must get at least one, and has room for {self._write.capacity}."
            )
        q = int(counts.max())
        # Left-padded, so that the last column is everyone's last token.
        if isinstance(tokens, np.ndarray):
            ids = tokens
        else:
            ids = np.zeros((len(slots), q), dtype=np.int64)
            for row, t in zip(ids, tokens, strict=True):
                row[q - len(t) :] = t
        offsets = np.arange(q) - (q - counts)[:, None]
        is_token = offsets >= 0
        positions = np.where(is_token, self.lengths[slots][:, None] + offsets, 0)
        self.lengths[slots] = lengths

        device = self.model.device
        write = self._write
        everyone = len(slots) == write.num_slots and bool((slots == np.arange(len(slots))).all())
        write.slots = None if everyone else torch.from_numpy(slots).to(device)
        write.positions = torch.from_numpy(np.where(is_token, positions, write.capacity)).to(device)
        write.width = int(lengths.max())
        position_ids = torch.from_numpy(positions).to(device)
        mask = torch.arange(write.width, device=device) <= position_ids[:, :, None]
        output = self.model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=self._attention_mask(mask[:, None]),
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    @torch.inference_mode()
    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copies the sequences of `sources` into `targets`, both int64 (n,)."""
        src = torch.from_numpy(sources).to(self.model.device)
        dst = torch.from_numpy(targets).to(self.model.device)
        width = int(self.lengths[sources].max(initial=0))
        for layer in self._cache.layers:
            assert isinstance(layer, _SlotLayer)
            layer.keys[dst, :, :width] = layer.keys[src, :, :width]
            layer.values[dst, :, :width] = layer.values[src, :, :width]
        self.lengths[targets] = self.lengths[sources]

    def _attention_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """SDPA takes the boolean mask; other implementations add a float one."""
        if not self._float_mask:
            return mask
        dtype = self.model.dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _check_attention(config: Any, capacity: int) -> None:
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"The attention implementation is {config._attn_implementation!r}; load the model "
            "with attn_implementation='sdpa'."
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not hasattr(config, "layer_types")
    if kinds - {"full_attention", "sliding_attention"} or (
        slides and window is not None and capacity > window
    ):
        raise ValueError(
            f"The model's layers are {sorted(kinds)} with a window of {window} tokens, and up to "
            f"{capacity} are needed; use a model with full attention, or shorter sequences."
        )
