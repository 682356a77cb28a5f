"""A pseudo-random order of any number of items, without a list of them."""

from __future__ import annotations

import operator
import random


class Permutation:
    """A permutation of ``range(size)``, fixed by a seed, that takes no memory.

    Args:
        size: Number of items, at least 1.
        seed: Not negative.

    Raises:
        ValueError: An argument is outside its range.

    Examples:
        >>> order = Permutation(5, seed=1)
        >>> sorted(order[i] for i in range(5)), [order[i] for i in range(5)] != list(range(5))
        ([0, 1, 2, 3, 4], True)
        >>> len(Permutation(10**15, seed=1))
        1000000000000000
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; a permutation needs at least one item.")
        if operator.index(seed) < 0:
            raise ValueError(f"seed must not be negative, got {seed!r}")
        self._size = size
        self._half_bits = ((size - 1).bit_length() + 1) // 2
        draw = random.Random(operator.index(seed) << 64 | size)
        self._keys = [draw.getrandbits(64) for _ in range(6)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} is outside a permutation of {self._size} items")
        # The network permutes the next power of four; walking its cycle until the item is in
        # range again permutes the range itself.
        while (index := self._mix(index)) >= self._size:
            pass
        return index

    def _mix(self, item: int) -> int:
        """A Feistel network: a permutation whatever the round function is."""
        mask = (1 << self._half_bits) - 1
        left, right = item >> self._half_bits, item & mask
        for key in self._keys:
            mixed = (right ^ key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed >> 32) & mask)
        return left << self._half_bits | right
