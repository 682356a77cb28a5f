import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.aggregation import aggregate
from agents.objectives import (
    cispo_objective,
    clipped_objective,
    gspo_objective,
    kl_penalty_objective,
    reinforce_objective,
    value_loss,
)

SEED = st.integers(0, 2**31)
few = settings(max_examples=50, deadline=None)

ALL = {
    "clip": clipped_objective,
    "dual clip": lambda *args: clipped_objective(*args, clip_range_lower=3.0),
    "KL penalty": lambda *args: kl_penalty_objective(*args, kl_coef=0.5),
    "GSPO": lambda *args: gspo_objective(*args, torch.ones_like(args[0], dtype=torch.bool)),
    "CISPO": cispo_objective,
    "REINFORCE": reinforce_objective,
}


def draw(seed, shape=(4, 6), spread=0.5):
    """log π with a gradient, log π_old and advantages, float64."""
    generator = torch.Generator().manual_seed(seed)
    old, change, advantages = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    old = -old.abs()
    return (old + spread * change).requires_grad_(), old, advantages


def gradient(loss, logprobs):
    return torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)[0]


@given(seed=SEED, low=st.sampled_from([0.1, 0.2]), high=st.sampled_from([None, 0.28]))
@few
def test_clipped_is_the_formula(seed, low, high):
    logprobs, old, advantages = draw(seed)
    loss, statistics = clipped_objective(logprobs, old, advantages, low, high)
    top = low if high is None else high
    for i in range(4):
        for t in range(6):
            ratio = math.exp(logprobs[i, t].item() - old[i, t].item())
            a = advantages[i, t].item()
            clipped = min(max(ratio, 1 - low), 1 + top)
            assert loss[i, t].item() == pytest.approx(max(-a * ratio, -a * clipped))
            binds = -a * clipped > -a * ratio
            assert statistics["clip_fraction"][i, t].item() == binds


@given(seed=SEED)
@few
def test_clipped_gradient_is_0_where_it_binds_and_the_ratio_s_elsewhere(seed):
    logprobs, old, advantages = draw(seed)
    loss, statistics = clipped_objective(logprobs, old, advantages)
    ratio = (logprobs - old).exp().detach()
    expected = torch.where(statistics["clip_fraction"] > 0, 0.0, -advantages * ratio)
    assert torch.allclose(gradient(loss, logprobs), expected)


def test_clip_is_asymmetric():
    ratios = torch.tensor([[1.25, 1.25, 0.75, 0.85]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    _, statistics = clipped_objective(ratios.log(), torch.zeros(1, 4), advantages, 0.2, 0.28)
    assert statistics["clip_fraction"].tolist() == [[0.0, 0.0, 1.0, 0.0]]
    _, statistics = clipped_objective(ratios.log(), torch.zeros(1, 4), advantages, 0.2)
    assert statistics["clip_fraction"].tolist() == [[1.0, 0.0, 1.0, 0.0]]


@given(seed=SEED, c=st.sampled_from([1.5, 3.0]))
@few
def test_dual_clip_bounds_negative_advantages_only(seed, c):
    logprobs, old, advantages = draw(seed, spread=2.0)
    plain, _ = clipped_objective(logprobs, old, advantages)
    loss, statistics = clipped_objective(logprobs, old, advantages, clip_range_lower=c)
    negative = advantages < 0
    assert torch.equal(loss[~negative], plain[~negative])
    assert torch.equal(loss[negative], torch.minimum(plain, -advantages * c)[negative])
    binds = negative & (plain > -advantages * c)
    assert torch.equal(statistics["clip_fraction_lower"], binds.double())
    assert (gradient(loss, logprobs)[binds] == 0).all()
    assert "clip_fraction_lower" not in clipped_objective(logprobs, old, advantages)[1]


def test_infinite_dual_clip_is_none():
    logprobs, old, advantages = draw(0, spread=3.0)
    advantages[0, 0] = 0.0
    plain, _ = clipped_objective(logprobs, old, advantages)
    loss, statistics = clipped_objective(logprobs, old, advantages, clip_range_lower=math.inf)
    assert torch.equal(loss, plain)
    assert torch.equal(gradient(loss, logprobs), gradient(plain, logprobs))
    assert (statistics["clip_fraction_lower"] == 0).all()


@pytest.mark.parametrize("name", ALL)
@given(seed=SEED)
@few
def test_on_policy_all_have_the_gradient_of_reinforce(name, seed):
    """At π = π_old the ratio is 1, nothing is clipped, and the gradient is −A·∇log π."""
    logprobs, _, advantages = draw(seed)
    loss, statistics = ALL[name](logprobs, logprobs.detach(), advantages)
    assert torch.allclose(gradient(loss, logprobs), -advantages)
    assert loss.shape == logprobs.shape
    for values in statistics.values():
        assert values.shape == logprobs.shape
        assert (values == 0).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("log_ratio", [-800.0, -50.0, 50.0, 800.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_ratios_overflow_nowhere(name, log_ratio, advantage):
    old = torch.full((1, 2), -1.0)
    logprobs = (old + log_ratio).requires_grad_()
    loss, _ = ALL[name](logprobs, old, torch.full((1, 2), advantage))
    assert loss.isfinite().all()
    assert gradient(loss, logprobs).isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_statistics_carry_no_gradient(name):
    _, statistics = ALL[name](*draw(0))
    assert {"approx_kl", "ppo_kl"} <= set(statistics)
    assert not any(values.requires_grad for values in statistics.values())


def test_approx_kl_is_that_of_stable_baselines3_and_ppo_kl_that_of_verl():
    logprobs, old, advantages = draw(0)
    _, statistics = clipped_objective(logprobs, old, advantages)
    log_ratio = (logprobs - old).detach()
    assert torch.allclose(statistics["approx_kl"], log_ratio.exp() - 1 - log_ratio)
    assert torch.allclose(statistics["ppo_kl"], -log_ratio)


@pytest.mark.parametrize("padding", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["clip", "dual clip", "KL penalty", "CISPO", "REINFORCE"])
def test_padding_never_leaks(name, padding):
    logprobs, old, advantages = draw(0)
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 5])[:, None]

    def total(old, advantages):
        loss, _ = ALL[name](torch.where(mask, logprobs, 0.0), old, advantages)
        return aggregate(loss, mask, "token-mean")

    expected = total(old, advantages)
    spoilt = total(torch.where(mask, old, padding), torch.where(mask, advantages, padding))
    assert torch.equal(spoilt, expected)
    assert torch.equal(gradient(spoilt, logprobs), gradient(expected, logprobs))


@given(seed=SEED)
@few
def test_kl_penalty_gradient_is_that_of_the_kl_of_old_and_new(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, old_logits = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_old = torch.log_softmax(logits, 0), torch.log_softmax(old_logits, 0)
    loss, _ = kl_penalty_objective(log_p, log_old, torch.zeros(5), kl_coef=0.7)
    expected = (log_old.exp() * (log_old - log_p)).sum()
    sampled = (log_old.exp() * loss).sum()
    assert sampled.item() == pytest.approx(0.7 * expected.item())
    assert torch.allclose(gradient(sampled, logits), 0.7 * gradient(expected, logits))


# GSPO


def gspo_inputs(seed, spread=0.01):
    logprobs, old, _ = draw(seed, spread=spread)
    advantages = torch.randn(4, 1, generator=torch.Generator().manual_seed(seed + 1)).double()
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 5])[:, None]
    return logprobs, old, advantages.expand(4, 6), mask


@given(seed=SEED, spread=st.sampled_from([1e-4, 0.01, 1.0]))
@few
def test_gspo_token_form_has_value_and_gradient_of_the_sequence_form(seed, spread):
    logprobs, old, advantages, mask = gspo_inputs(seed, spread)
    low, high = 3e-4, 4e-4
    lengths = mask.sum(1)
    log_ratio = torch.where(mask, logprobs - old, 0.0).sum(1) / lengths
    ratio, a = log_ratio.exp(), advantages[:, 0]
    sequence = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high)).mean()
    loss, statistics = gspo_objective(logprobs, old, advantages, mask, low, high)
    token = aggregate(loss, mask, "seq-mean-token-mean")
    assert token.item() == pytest.approx(sequence.item())
    assert torch.allclose(gradient(token, logprobs), gradient(sequence, logprobs), atol=1e-12)
    # A sequence is clipped as a whole.
    clipped = statistics["clip_fraction"]
    assert torch.equal(clipped, clipped[:, :1].expand_as(clipped))


def test_gspo_reads_nothing_that_is_masked():
    logprobs, old, advantages, mask = gspo_inputs(0)

    def total(old, advantages):
        loss, _ = gspo_objective(torch.where(mask, logprobs, 0.0), old, advantages, mask)
        return aggregate(loss, mask, "seq-mean-token-mean")

    expected = total(old, advantages)
    nan = torch.where(mask, 0.0, math.nan)
    spoilt = total(old + nan, advantages + nan)
    assert torch.equal(spoilt, expected)
    assert torch.equal(gradient(spoilt, logprobs), gradient(expected, logprobs))


def test_gspo_ratio_is_clamped_above_at_10():
    old = torch.full((1, 2), -50.0)
    loss, _ = gspo_objective(old + 30, old, -torch.ones(1, 2), torch.ones(1, 2).bool())
    assert loss[0, 0].item() == pytest.approx(math.exp(10))


# CISPO


@given(seed=SEED)
@few
def test_cispo_gradient_is_the_clipped_weight_times_that_of_reinforce(seed):
    logprobs, old, advantages = draw(seed)
    loss, statistics = cispo_objective(logprobs, old, advantages, 0.2, 0.28)
    ratio = (logprobs - old).detach().exp()
    expected = -ratio.clamp(0.8, 1.28) * advantages
    assert torch.allclose(gradient(loss, logprobs), expected)
    outside = (ratio < 0.8) | (ratio > 1.28)
    assert torch.equal(statistics["clip_fraction"], outside.double())


def test_cispo_keeps_the_gradient_that_ppo_drops():
    logprobs = torch.tensor([[math.log(2.0)]], requires_grad=True)
    old, advantages = torch.zeros(1, 1), torch.ones(1, 1)
    assert gradient(clipped_objective(logprobs, old, advantages)[0], logprobs).item() == 0
    kept = gradient(cispo_objective(logprobs, old, advantages)[0], logprobs).item()
    assert kept == pytest.approx(-1.2)


# The critic


@given(seed=SEED)
@few
def test_value_loss_is_that_of_stable_baselines3_and_verl(seed):
    values, old, returns = draw(seed, spread=1.0)
    plain = value_loss(values, returns)
    assert torch.allclose(plain, (values - returns) ** 2)
    held = old + torch.clamp(values - old, -0.2, 0.2)
    sb3 = torch.nn.functional.mse_loss(returns, held)
    assert value_loss(values, returns, old, 0.2).mean().item() == pytest.approx(sb3.item())
    in_range = values.clamp(old - 0.2, old + 0.2)
    verl = 0.5 * torch.maximum((values - returns) ** 2, (in_range - returns) ** 2)
    ours = value_loss(values, returns, old, 0.2, pessimistic=True)
    assert torch.allclose(0.5 * ours, verl)
    assert torch.allclose(gradient(0.5 * ours, values), gradient(verl, values))


def test_value_clip_stops_the_gradient_outside_its_range():
    values = torch.tensor([0.1, 0.5], requires_grad=True)
    loss = value_loss(values, torch.ones(2), torch.zeros(2), 0.2)
    assert gradient(loss, values).tolist() == pytest.approx([-1.8, 0.0])
    loss = value_loss(values, torch.ones(2), torch.zeros(2), math.inf)
    assert gradient(loss, values).tolist() == pytest.approx([-1.8, -1.0])


def test_wrong_arguments():
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"clip_range_lower is 0.5; .* more than 1"):
        clipped_objective(zeros, zeros, zeros, clip_range_lower=0.5)
    for function in (clipped_objective, cispo_objective):
        with pytest.raises(ValueError, match=r"clip ranges are -0.1 and -0.1"):
            function(zeros, zeros, zeros, -0.1)
    with pytest.raises(ValueError, match=r"clip ranges are 0.2 and nan"):
        gspo_objective(zeros, zeros, zeros, zeros == 0, 0.2, math.nan)
    with pytest.raises(ValueError, match=r"values is -0.1; it must not be negative"):
        value_loss(zeros, zeros, zeros, -0.1)
    with pytest.raises(ValueError, match="needs old_values"):
        value_loss(zeros, zeros, clip_range=0.2)
