import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.aggregation import aggregate, aggregation_weights
from agents.objectives import clipped_objective

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
NORM_LENGTH = 8


def draw(seed, rows=5, width=6):
    """Losses, (B, T), and a mask of rows of uneven lengths, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < lengths
    mask &= torch.rand(rows, width, generator=generator) < 0.8  # gaps
    mask[0, 0] = True
    return loss, mask


@pytest.mark.parametrize(
    ("mode", "expected"), list(zip(MODES, [1.4, 3.5, 2.0, 0.875], strict=True))
)
def test_checked_values(mode, expected):
    loss = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, math.nan, math.nan, math.nan]])
    mask = loss.isfinite()
    assert aggregate(loss, mask, mode, norm_length=4).item() == pytest.approx(expected)


def test_mean_of_micro_batch_means_would_be_wrong():
    loss = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
    mask = loss > 0
    means = [aggregate(loss[[i]], mask[[i]], "token-mean").item() for i in range(2)]
    assert sum(means) / 2 == pytest.approx(2.0)
    weights = aggregation_weights(mask, "token-mean")
    sums = [(loss[i] * weights[i]).sum().item() for i in range(2)]
    assert sum(sums) == pytest.approx(1.4)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_equal_the_definitions(seed):
    loss, mask = draw(seed)
    sums = [row[m].sum() for row, m in zip(loss, mask, strict=True) if m.any()]
    means = [row[m].mean() for row, m in zip(loss, mask, strict=True) if m.any()]
    expected = {
        "token-mean": loss[mask].mean(),
        "seq-mean-token-sum": torch.stack(sums).mean(),
        "seq-mean-token-mean": torch.stack(means).mean(),
        "seq-mean-token-sum-norm": torch.stack(sums).mean() / NORM_LENGTH,
    }
    for mode, value in expected.items():
        assert aggregate(loss, mask, mode, NORM_LENGTH).item() == pytest.approx(value.item())


@given(seed=st.integers(0, 2**31), mode=st.sampled_from(MODES))
@settings(max_examples=50, deadline=None)
def test_weighted_sum_is_the_aggregate(seed, mode):
    loss, mask = draw(seed)
    weights = aggregation_weights(mask, mode, NORM_LENGTH, dtype=torch.float64)
    expected = aggregate(loss, mask, mode, NORM_LENGTH).item()
    assert (loss * weights).sum().item() == pytest.approx(expected)
    assert (weights[~mask] == 0).all()
    assert weights.dtype == torch.float64


@given(seed=st.integers(0, 2**31), mode=st.sampled_from(MODES), columns=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_padding_changes_nothing(seed, mode, columns):
    loss, mask = draw(seed)
    expected = aggregate(loss, mask, mode, NORM_LENGTH).item()
    junk, none = loss.new_full((5, columns), math.nan), mask.new_zeros((5, columns))
    right = aggregate(torch.cat([loss, junk], 1), torch.cat([mask, none], 1), mode, NORM_LENGTH)
    left = aggregate(torch.cat([junk, loss], 1), torch.cat([none, mask], 1), mode, NORM_LENGTH)
    assert right.item() == pytest.approx(expected)
    assert left.item() == pytest.approx(expected)
    rows = torch.full((2, 6), math.nan, dtype=torch.float64)
    empty = torch.zeros(2, 6, dtype=torch.bool)
    more = aggregate(torch.cat([loss, rows]), torch.cat([mask, empty]), mode, NORM_LENGTH)
    assert more.item() == pytest.approx(expected)


@given(seed=st.integers(0, 2**31), mode=st.sampled_from(MODES))
@settings(max_examples=50, deadline=None)
def test_order_of_the_rows_changes_nothing(seed, mode):
    loss, mask = draw(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    expected = aggregate(loss, mask, mode, NORM_LENGTH).item()
    shuffled = aggregate(loss[order], mask[order], mode, NORM_LENGTH).item()
    assert shuffled == pytest.approx(expected)


@given(seed=st.integers(0, 2**31), mode=st.sampled_from(MODES), micro_batch_size=st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_micro_batches_add_up_to_the_gradient_of_the_batch(seed, mode, micro_batch_size):
    rows, width, vocab_size = 7, 5, 3
    _, mask = draw(seed, rows, width)
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = torch.randn(rows, width, 4, generator=generator, dtype=torch.float64)
    actions = torch.randint(0, vocab_size, (rows, width, 1), generator=generator)
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    old_logprobs = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, vocab_size, generator=generator, dtype=torch.float64)
    weight.requires_grad_()

    def loss(part):
        log_dist = torch.log_softmax(inputs[part] @ weight, -1)
        logprobs = log_dist.gather(-1, actions[part])[..., 0]
        return clipped_objective(logprobs, old_logprobs[part], advantages[part])[0]

    everything = torch.arange(rows)
    aggregate(loss(everything), mask, mode, NORM_LENGTH).backward()
    expected, weight.grad = weight.grad, None
    weights = aggregation_weights(mask, mode, NORM_LENGTH, dtype=torch.float64)
    for part in everything.split(micro_batch_size):
        (loss(part) * weights[part]).sum().backward()
    assert torch.allclose(weight.grad, expected, rtol=0, atol=1e-12)


def test_halves_of_two_processes_add_up_too():
    loss, mask = draw(3, rows=6)
    for mode in MODES:
        weights = aggregation_weights(mask, mode, NORM_LENGTH, dtype=torch.float64)
        halves = [(loss[rows] * weights[rows]).sum() for rows in (slice(0, 1), slice(1, 6))]
        expected = aggregate(loss, mask, mode, NORM_LENGTH).item()
        assert sum(halves).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_masked_in_is_0_with_a_gradient_of_0(mode):
    loss = torch.full((2, 3), math.nan, requires_grad=True)
    value = aggregate(loss, torch.zeros(2, 3, dtype=torch.bool), mode, NORM_LENGTH)
    value.backward()
    assert value.item() == 0
    assert (loss.grad == 0).all()


def test_unknown_mode():
    with pytest.raises(ValueError, match="'mean'; use one of") as error:
        aggregation_weights(torch.ones(1, 1).bool(), "mean")
    assert all(mode in str(error.value) for mode in MODES)


@pytest.mark.parametrize("norm_length", [None, 0, -1])
def test_norm_needs_a_length(norm_length):
    with pytest.raises(ValueError, match=f"norm_length is {norm_length}"):
        aggregation_weights(torch.ones(1, 1).bool(), "seq-mean-token-sum-norm", norm_length)
