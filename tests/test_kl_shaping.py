"""What KL shaping is the gradient of, by exact enumeration of a tabular instance in float64."""

import math

import pytest
import torch
from tabular import TabularText

from agents.advantages import discounted_returns, leave_one_out_advantages
from agents.aggregation import aggregate
from agents.objectives import clipped_objective, reinforce_objective
from textrl_env.kl import full_kl, kl_estimate

SEEDS = [0, 1, 2]


def expected_gradient(text, advantages, objective=reinforce_objective):
    """E_y of the gradient of Σ_t loss_t with given advantages, at π = π_old; the ascent direction.

    Each completion is weighted by its probability, which carries no gradient: what the mean of
    infinitely many samples would be.
    """
    old_logprobs = text.logprobs(text.initial_logits)
    weights = text.probabilities(text.initial_logits)

    def loss(logits):
        per_token, _ = objective(text.logprobs(logits), old_logprobs, advantages)
        return (weights[:, None] * torch.where(text.mask, per_token, 0.0)).sum()

    return -text.gradient(loss)


def expected_loss_gradient(text, per_token):
    """E_y of the gradient of Σ_t of a loss that is not weighted by an advantage."""
    weights = text.probabilities(text.initial_logits)[:, None]
    return text.gradient(lambda logits: (weights * per_token(logits)).sum())


def relative_error(gradient, expected):
    return float((gradient - expected).norm() / expected.norm())


@pytest.fixture(params=SEEDS)
def text(request):
    return TabularText(request.param)


def test_instance_enumerates_everything(text):
    # Completions that end at token 1, 2, 3, 4, and those cut at 4: 1 + 2 + 4 + 8 + 16.
    assert len(text.tokens) == 31
    assert len(text.ref_logits) == 15
    assert float(text.probabilities(text.initial_logits).sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("objective", [reinforce_objective, clipped_objective])
def test_per_token_shaping_with_reward_to_go_is_exact(text, objective):
    kl = kl_estimate(text.logprobs(text.initial_logits), text.ref_logprobs, "k1")
    rewards = text.task_rewards() - text.beta * kl
    reward_to_go = discounted_returns(rewards, text.mask, gamma=1.0)
    gradient = expected_gradient(text, reward_to_go, objective)
    assert torch.allclose(gradient, text.gradient(text.objective), rtol=0, atol=1e-8)


def test_reference_mode_with_the_agent_subtracting_is_exact(text):
    environment = text.task_rewards() + text.beta * text.ref_logprobs
    rewards = environment - text.beta * text.logprobs(text.initial_logits)
    reward_to_go = discounted_returns(rewards, text.mask, gamma=1.0)
    gradient = expected_gradient(text, reward_to_go)
    assert torch.allclose(gradient, text.gradient(text.objective), rtol=0, atol=1e-8)


def test_sequence_level_shaping_is_exact(text):
    kl = (text.logprobs(text.initial_logits) - text.ref_logprobs).sum(1)
    returns = text.rewards - text.beta * kl
    gradient = expected_gradient(text, returns[:, None].expand_as(text.mask))
    assert torch.allclose(gradient, text.gradient(text.objective), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
def test_other_estimators_in_the_reward_are_biased(text, kind):
    kl = kl_estimate(text.logprobs(text.initial_logits), text.ref_logprobs, kind)
    rewards = text.task_rewards() - text.beta * kl
    reward_to_go = discounted_returns(rewards, text.mask, gamma=1.0)
    error = relative_error(expected_gradient(text, reward_to_go), text.gradient(text.objective))
    assert error > 0.05


def test_reference_reward_alone_is_off(text):
    rewards = text.task_rewards() + text.beta * text.ref_logprobs
    reward_to_go = discounted_returns(rewards, text.mask, gamma=1.0)
    error = relative_error(expected_gradient(text, reward_to_go), text.gradient(text.objective))
    assert error > 0.3


def test_entropy_bonus_does_not_repair_it():
    errors = []
    for seed in range(20):
        text = TabularText(seed)
        rewards = text.task_rewards() + text.beta * text.ref_logprobs
        reward_to_go = discounted_returns(rewards, text.mask, gamma=1.0)

        def bonus(logits, text=text):
            log_p = torch.log_softmax(logits, -1)
            entropy = -(log_p.exp() * log_p).sum(-1)[text.states]
            return torch.where(text.mask, entropy, 0.0)

        gradient = expected_gradient(text, reward_to_go)
        gradient = gradient + text.beta * expected_loss_gradient(text, bonus)
        exact = text.gradient(text.objective)
        errors.append(relative_error(gradient, exact))
    # Off by about the size of the gradient itself: 0.18 at the least, 0.6 on average.
    assert min(errors) > 0.15
    assert sum(errors) / len(errors) > 0.5


def test_k1_as_a_loss_teaches_nothing(text):
    gradient = expected_loss_gradient(
        text, lambda logits: kl_estimate(text.logprobs(logits), text.ref_logprobs, "k1")
    )
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["k2", "k1+", "abs+", "k2+", "k3+"])
def test_k2_and_straight_through_as_a_loss_are_the_kl(text, kind):
    gradient = expected_loss_gradient(
        text, lambda logits: kl_estimate(text.logprobs(logits), text.ref_logprobs, kind)
    )
    exact = expected_loss_gradient(text, text.kl_per_state)
    assert torch.allclose(gradient, exact, rtol=0, atol=1e-12)


def test_k3_as_a_loss_is_the_other_kl(text):
    gradient = expected_loss_gradient(
        text, lambda logits: kl_estimate(text.logprobs(logits), text.ref_logprobs, "k3")
    )
    other = expected_loss_gradient(text, lambda logits: text.kl_per_state(logits, reverse=True))
    assert torch.allclose(gradient, other, rtol=0, atol=1e-12)
    assert relative_error(gradient, expected_loss_gradient(text, text.kl_per_state)) > 0.05


def test_abs_as_a_loss_is_neither_kl(text):
    gradient = expected_loss_gradient(
        text, lambda logits: kl_estimate(text.logprobs(logits), text.ref_logprobs, "abs")
    )
    for reverse in (False, True):
        exact = expected_loss_gradient(
            text, lambda logits, reverse=reverse: text.kl_per_state(logits, reverse)
        )
        assert relative_error(gradient, exact) > 0.05


def test_full_kl_as_a_loss_is_the_kl(text):
    def loss(logits):
        divergences = full_kl(logits, text.ref_logits, chunk_size=4)
        return torch.where(text.mask, divergences[text.states], 0.0)

    gradient = expected_loss_gradient(text, loss)
    exact = expected_loss_gradient(text, text.kl_per_state)
    assert torch.allclose(gradient, exact, rtol=0, atol=1e-12)


def test_exact_gradient_ascent_reaches_the_known_optimum(text):
    optimal, best = text.optimum()
    logits = text.initial_logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(3000):
        optimizer.zero_grad()
        (-text.objective(logits)).backward()
        optimizer.step()
    assert text.objective(logits).item() == pytest.approx(float(best), abs=1e-6)
    assert torch.allclose(text.probabilities(logits), optimal, atol=1e-3)


def test_no_policy_is_better_than_the_optimum(text):
    _, best = text.optimum()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = 2 * torch.randn(text.ref_logits.shape, generator=generator, dtype=torch.float64)
        assert text.objective(logits) < best


@pytest.mark.parametrize("sequence_level", [False, True])
def test_sampled_training_converges_to_the_known_optimum(sequence_level):
    text = TabularText(0)
    optimal, best = text.optimum()
    generator = torch.Generator().manual_seed(0)
    logits = text.initial_logits.clone().requires_grad_()
    steps, size = 400, 256
    optimizer = torch.optim.Adam([logits], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start = text.objective(logits).item()
    for _ in range(steps):
        rows = text.sample(logits, size, generator)
        mask, groups = text.mask[rows], torch.arange(size) // 64
        logprobs = text.logprobs(logits)[rows]
        old_logprobs = logprobs.detach()
        kl = kl_estimate(old_logprobs, text.ref_logprobs[rows])
        rewards = text.task_rewards()[rows] - text.beta * kl
        if sequence_level:
            advantages = leave_one_out_advantages(rewards.sum(1), groups)[:, None].expand_as(mask)
        else:
            # The same baseline for all tokens of a row, from its siblings: still without bias.
            baselines = rewards.sum(1) - leave_one_out_advantages(rewards.sum(1), groups)
            advantages = discounted_returns(rewards, mask, gamma=1.0) - baselines[:, None]
        per_token, _ = clipped_objective(logprobs, old_logprobs, advantages)
        optimizer.zero_grad()
        aggregate(per_token, mask, "seq-mean-token-sum").backward()
        optimizer.step()
        schedule.step()
    reached = text.probabilities(logits.detach())
    regret = (best - text.objective(logits)).item()
    # J* − J is β·KL(π‖π*), so it is never negative.
    divergence = float((reached * (reached / optimal).log()).sum())
    assert regret == pytest.approx(text.beta * divergence, abs=1e-9)
    assert 0 <= regret < 0.01 * (float(best) - start)
    assert math.isclose(float(reached.sum()), 1, abs_tol=1e-9)
