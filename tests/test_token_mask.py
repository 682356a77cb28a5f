"""The set of allowed tokens: its table, and how it renormalises a distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from textrl_env.logprobs import log_distribution
from textrl_env.token_mask import TokenMask


@given(
    vocab_size=st.integers(2, 12),
    min_new_tokens=st.integers(0, 3),
    num_tokens=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_table_apply_and_allows_agree(vocab_size, min_new_tokens, num_tokens, data):
    tokens = st.integers(0, vocab_size - 1)
    eos = data.draw(st.sets(tokens, min_size=1, max_size=2))
    allowed = data.draw(st.none() | st.sets(tokens))
    late = set(range(vocab_size)) if allowed is None else allowed | eos
    if min_new_tokens and not late - eos:
        with pytest.raises(ValueError, match="No token but end-of-sequence"):
            TokenMask(vocab_size, eos, allowed, min_new_tokens)
        return
    mask = TokenMask(vocab_size, eos, allowed, min_new_tokens)
    expected = np.array(
        [
            [token in (late if n >= min_new_tokens else late - eos) for token in range(vocab_size)]
            for n in num_tokens
        ]
    )
    counts = np.array(num_tokens)
    np.testing.assert_array_equal(mask(counts), expected)
    applied = mask.apply(torch.zeros(len(counts), vocab_size), torch.from_numpy(counts))
    np.testing.assert_array_equal(applied.numpy() == 0, expected)
    for token in range(vocab_size):
        column = mask.allows(np.full(len(counts), token), counts)
        np.testing.assert_array_equal(column, expected[:, token])
    assert mask.is_trivial == (min_new_tokens == 0 and len(late) == vocab_size)


def test_what_is_left_is_renormalised():
    mask = TokenMask(4, [3], allowed_tokens=[0, 1], min_new_tokens=1)
    logits = torch.tensor([[1.0, 2.0, 50.0, 3.0], [1.0, 2.0, 50.0, 3.0]])
    log_dist = log_distribution(logits, torch.tensor([0, 1]), 0.5, mask)
    torch.testing.assert_close(log_dist[0, :2], torch.tensor([2.0, 4.0]).log_softmax(0))
    torch.testing.assert_close(log_dist[1, [0, 1, 3]], torch.tensor([2.0, 4.0, 6.0]).log_softmax(0))
    assert log_dist[0, 2:].tolist() == [float("-inf")] * 2


def test_log_distribution_is_at_least_float32():
    assert log_distribution(torch.zeros(1, 3, dtype=torch.bfloat16), torch.zeros(1)).dtype == (
        torch.float32
    )
    wide = log_distribution(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1))
    assert wide.dtype == torch.float64


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (
            [1, 4],
            r"allowed_tokens holds 4, outside the vocabulary of 4 tokens; use ids in \[0, 3\]",
        ),
        ([-1], "allowed_tokens holds -1"),
        ([0.5], r"allowed_tokens is \[0.5\]; pass a list of token ids"),
        ("ab", "allowed_tokens is 'ab'; pass a list of token ids"),
        (7, "allowed_tokens is 7; pass a list of token ids"),
    ],
)
def test_unusable_tokens(allowed, message):
    with pytest.raises(ValueError, match=message):
        TokenMask(4, [3], allowed)
