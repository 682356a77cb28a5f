"""How many threads small matrix products run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Between two products lies Python, long enough for the other threads to fall asleep. Measured with
# 2 threads: waking them costs more than they give up to some 50 million operations.
_WORTH_A_SECOND_THREAD = 1e8


@contextmanager
def as_many_threads_as_pay(operations: float) -> Iterator[None]:
    """Runs torch on one thread while mini-batches are small.

    Args:
        operations: Floating-point operations of a mini-batch.
    """
    threads = torch.get_num_threads()
    if operations < _WORTH_A_SECOND_THREAD:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
