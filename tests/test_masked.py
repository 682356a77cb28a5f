import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.masked import masked_mean, masked_sum, masked_var, masked_whiten

NON_FINITE = [math.nan, math.inf, -math.inf]


def draw(seed, shape=(4, 6)):
    """Values and a mask with at least two steps."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[0, :2] = True
    return values, mask


@given(seed=st.integers(0, 2**31), ddof=st.sampled_from([0, 1]))
@settings(max_examples=50, deadline=None)
def test_equal_those_of_the_selected_values(seed, ddof):
    values, mask = draw(seed)
    inside = values[mask]
    assert torch.allclose(masked_sum(values, mask), inside.sum())
    assert torch.allclose(masked_mean(values, mask), inside.mean())
    assert torch.allclose(masked_var(values, mask, ddof), inside.var(correction=ddof))
    whitened = masked_whiten(values, mask, ddof=ddof)
    expected = (inside - inside.mean()) / (inside.var(correction=ddof) + 1e-8).sqrt()
    assert torch.allclose(whitened[mask], expected)
    assert (whitened[~mask] == 0).all()
    scaled = masked_whiten(values, mask, ddof=ddof, shift_mean=False)
    assert torch.allclose(scaled[mask], expected + inside.mean())


@given(seed=st.integers(0, 2**31), junk=st.sampled_from(NON_FINITE))
@settings(max_examples=50, deadline=None)
def test_what_is_masked_is_never_read(seed, junk):
    values, mask = draw(seed)
    spoilt = torch.where(mask, values, junk)
    for function in (masked_sum, masked_mean, masked_var, masked_whiten):
        assert torch.equal(function(values, mask), function(spoilt, mask))
    assert torch.equal(masked_sum(values, mask, 1), masked_sum(spoilt, mask, 1))


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_whiten])
def test_gradients_pass_by_what_is_masked(function):
    values, mask = draw(0)
    values = torch.where(mask, values, math.nan).requires_grad_()
    function(values, mask).square().sum().backward()
    assert values.grad.isfinite().all()
    assert (values.grad[~mask] == 0).all()


def test_along_a_dimension_with_an_empty_row():
    values = torch.tensor([[1.0, 3.0], [math.nan, math.nan]])
    mask = torch.tensor([[True, True], [False, False]])
    assert masked_sum(values, mask, 1).tolist() == [4.0, 0.0]
    assert masked_mean(values, mask, 1).tolist() == [2.0, 0.0]
    assert masked_mean(values, torch.zeros_like(mask)).item() == 0


def test_whitened_has_mean_0_and_variance_1():
    values, mask = draw(3)
    whitened = masked_whiten(1000 + 7 * values, mask)
    assert masked_mean(whitened, mask).item() == pytest.approx(0, abs=1e-9)
    assert masked_var(whitened, mask).item() == pytest.approx(1, abs=1e-6)


def test_whitening_equal_values_gives_0():
    assert masked_whiten(torch.full((3,), 2.0), torch.ones(3).bool()).tolist() == [0, 0, 0]


def test_eps_is_inside_the_square_root():
    values = torch.tensor([-1e-4, 1e-4], dtype=torch.float64)
    whitened = masked_whiten(values, torch.ones(2).bool())
    assert whitened[1].item() == pytest.approx(1e-4 / math.sqrt(2e-8 + 1e-8))


@pytest.mark.parametrize(("count", "ddof"), [(0, 1), (1, 1), (0, 0)])
@pytest.mark.parametrize("function", [masked_var, masked_whiten])
def test_too_few_steps_are_an_error(function, count, ddof):
    mask = torch.arange(4) < count
    with pytest.raises(ValueError, match=f"{count} steps.*ddof={ddof} needs {ddof + 1}"):
        function(torch.ones(4), mask, ddof=ddof)


def test_one_step_has_variance_0_with_ddof_0():
    assert masked_var(torch.ones(4), torch.arange(4) < 1, ddof=0).item() == 0
