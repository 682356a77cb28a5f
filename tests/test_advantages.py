import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer

from agents.advantages import (
    discounted_returns,
    gae,
    group_advantages,
    leave_one_out_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
)
from agents.masked import masked_mean, masked_var

SEED = st.integers(0, 2**31)
few = settings(max_examples=50, deadline=None)


def boolean(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def draw_rollout(seed, rows=2, width=9):
    """A rollout with random ends of episodes and gaps, two slots by default; float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, width)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def chance(probability):
        return torch.rand(shape, generator=generator) < probability

    return {
        "rewards": normal(*shape),
        "values": normal(*shape),
        "mask": chance(0.7),
        "terminated": chance(0.2),
        "truncated": chance(0.2),
        "final_values": normal(*shape),
        "last_values": normal(rows),
    }


def quadratic_gae(rollout, gamma, gae_lambda):
    """Σ_k (γλ)^k δ_{t+k} up to the end of the episode, written out for each step: O(T²)."""
    advantages = torch.zeros_like(rollout["values"])
    for row in range(len(advantages)):
        steps = torch.nonzero(rollout["mask"][row])[:, 0].tolist()
        field = {name: tensor[row] for name, tensor in rollout.items()}
        deltas = []
        for i, t in enumerate(steps):
            if field["terminated"][t]:
                after = 0.0
            elif field["truncated"][t]:
                after = field["final_values"][t]
            elif i + 1 < len(steps):
                after = field["values"][steps[i + 1]]
            else:
                after = field["last_values"]
            deltas.append(field["rewards"][t] + gamma * after - field["values"][t])
        for i, t in enumerate(steps):
            for k, later in enumerate(steps[i:]):
                advantages[row, t] += (gamma * gae_lambda) ** k * deltas[i + k]
                if field["terminated"][later] or field["truncated"][later]:
                    break
    return advantages


@given(seed=SEED, gamma=st.sampled_from([1.0, 0.9]), gae_lambda=st.sampled_from([0.0, 0.6, 1.0]))
@few
def test_gae_equals_the_quadratic_reference(seed, gamma, gae_lambda):
    rollout = draw_rollout(seed)
    advantages, returns = gae(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    expected = quadratic_gae(rollout, gamma, gae_lambda)
    assert torch.allclose(advantages, expected, atol=1e-12)
    mask = rollout["mask"]
    assert torch.allclose(returns[mask], (expected + rollout["values"])[mask])
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


@given(seed=SEED, gamma=st.sampled_from([1.0, 0.97]), gae_lambda=st.sampled_from([0.0, 0.9, 1.0]))
@few
def test_gae_equals_stable_baselines3(seed, gamma, gae_lambda):
    num_envs, num_steps = 3, 11
    rollout = draw_rollout(seed, num_envs, num_steps)
    rollout["mask"] = torch.ones_like(rollout["mask"])
    rollout["truncated"] &= ~rollout["terminated"]
    done = (rollout["terminated"] | rollout["truncated"]).numpy()
    buffer = RolloutBuffer(
        num_steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2),
        gamma=gamma, gae_lambda=gae_lambda, n_envs=num_envs,
    )  # fmt: skip
    bootstrap = torch.where(rollout["truncated"], gamma * rollout["final_values"], 0.0)
    for t in range(num_steps):
        buffer.add(
            np.zeros((num_envs, 1)),
            np.zeros(num_envs),
            (rollout["rewards"] + bootstrap)[:, t].numpy(),
            done[:, t - 1] if t else np.ones(num_envs),
            rollout["values"][:, t],
            torch.zeros(num_envs),
        )
    buffer.compute_returns_and_advantage(rollout["last_values"], done[:, -1])
    advantages, returns = gae(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(advantages.T.numpy(), buffer.advantages, atol=2e-5)
    np.testing.assert_allclose(returns.T.numpy(), buffer.returns, atol=2e-5)


@given(seed=SEED, junk=st.sampled_from([math.nan, math.inf]))
@few
def test_gae_reads_nothing_that_is_masked_or_not_needed(seed, junk):
    rollout = draw_rollout(seed)
    expected = gae(**rollout, gamma=0.9, gae_lambda=0.8)
    mask = rollout["mask"]
    for name in ("rewards", "values", "final_values"):
        rollout[name] = torch.where(mask, rollout[name], junk)
    for name in ("terminated", "truncated"):
        rollout[name] = rollout[name] | ~mask
    used = mask & rollout["truncated"] & ~rollout["terminated"]
    rollout["final_values"] = torch.where(used, rollout["final_values"], junk)
    for result, before in zip(gae(**rollout, gamma=0.9, gae_lambda=0.8), expected, strict=True):
        assert torch.equal(result, before)


@given(seed=SEED, width=st.integers(1, 4), position=st.integers(0, 9))
@few
def test_a_masked_block_of_any_length_changes_nothing(seed, width, position):
    rollout = draw_rollout(seed)
    last_values = rollout.pop("last_values")
    blocks = {
        name: torch.full((2, width), math.nan, dtype=tensor.dtype)
        if tensor.is_floating_point()
        else torch.zeros(2, width, dtype=torch.bool)
        for name, tensor in rollout.items()
    }
    longer = {
        name: torch.cat([tensor[:, :position], blocks[name], tensor[:, position:]], 1)
        for name, tensor in rollout.items()
    }
    arguments = {"last_values": last_values, "gamma": 0.9, "gae_lambda": 0.5}
    expected = gae(**rollout, **arguments)
    for result, before in zip(gae(**longer, **arguments), expected, strict=True):
        kept = torch.cat([result[:, :position], result[:, position + width :]], 1)
        assert torch.equal(kept, before)


def test_gae_over_a_tool_gap():
    """Checked values: 0.25 skipped, 0.0625 with the gap's values zeroed, 0.4 without a mask."""
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    gap = boolean([False, True, True, False, False])
    end = boolean([False, False, False, False, True])
    values = torch.where(gap, 0.45, 0.0)
    arguments = {"gamma": 1.0, "gae_lambda": 0.5}

    def first(values, mask):
        return gae(rewards, values, mask, end, ~mask & False, **arguments)[0][0, 0].item()

    everywhere = torch.ones_like(gap)
    assert first(values, ~gap) == 0.25
    assert first(torch.zeros(1, 5), everywhere) == pytest.approx(0.0625)
    assert first(values, everywhere) == pytest.approx(0.4)


def test_lambda_0_is_the_td_error_and_lambda_1_the_return():
    rollout = draw_rollout(0)
    rollout["mask"] = torch.ones_like(rollout["mask"])
    never = torch.zeros_like(rollout["mask"])
    rollout["terminated"] = rollout["truncated"] = never
    values, last = rollout["values"], rollout["last_values"][:, None]
    td, _ = gae(**rollout, gamma=0.9, gae_lambda=0.0)
    after = torch.cat([values[:, 1:], last], 1)
    assert torch.allclose(td, rollout["rewards"] + 0.9 * after - values)
    _, returns = gae(**rollout, gamma=0.9, gae_lambda=1.0)
    discounts = 0.9 ** torch.arange(10, dtype=torch.float64)
    rewards = torch.cat([rollout["rewards"], last], 1)
    assert torch.allclose(returns[:, 0], (discounts * rewards).sum(1))


def test_returns_are_taken_before_any_whitening():
    rollout = draw_rollout(1)
    advantages, returns = gae(**rollout, gamma=1.0, gae_lambda=0.9)
    difference = returns - advantages - rollout["values"]
    assert difference[rollout["mask"]].abs().max() < 1e-12


def test_truncation_bootstraps_and_termination_does_not():
    rewards, values = torch.zeros(3, 2), torch.zeros(3, 2)
    mask = torch.ones(3, 2, dtype=torch.bool)
    terminated = boolean([False, True], [False, False], [False, True])
    truncated = boolean([False, False], [False, True], [False, True])  # both: it terminated
    final_values = torch.full((3, 2), 7.0)
    advantages, _ = gae(
        rewards, values, mask, terminated, truncated,
        gamma=0.5, gae_lambda=1.0, final_values=final_values,
    )  # fmt: skip
    assert advantages.tolist() == [[0.0, 0.0], [1.75, 3.5], [0.0, 0.0]]


def test_reward_1_forever_with_a_time_limit():
    """With the right critic, V = 1/(1 − γ), every advantage is 0 though all episodes are cut."""
    gamma, width = 0.9, 16
    values = torch.full((1, width), 1 / (1 - gamma), dtype=torch.float64)
    truncated = (torch.arange(width) % 8 == 7)[None]
    advantages, returns = gae(
        torch.ones_like(values), values, torch.ones_like(truncated),
        torch.zeros_like(truncated), truncated,
        gamma=gamma, gae_lambda=0.95, final_values=values, last_values=values[:, 0],
    )  # fmt: skip
    assert advantages.abs().max() < 1e-12
    assert torch.allclose(returns, values)


def test_nothing_crosses_the_end_of_an_episode():
    rollout = draw_rollout(2, width=6)
    rollout["mask"][:] = True
    rollout["terminated"][:, 2] = True
    before, _ = gae(**rollout, gamma=0.9, gae_lambda=0.9)
    rollout["rewards"][:, 3:] += 100
    after, _ = gae(**rollout, gamma=0.9, gae_lambda=0.9)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize("length", [1, 3, 4])
def test_score_lands_on_its_token(length):
    """T = 1, a response shorter than the limit, and one that fills it."""
    mask = (torch.arange(4) < length)[None]
    end = (torch.arange(4) == length - 1)[None]
    rewards = torch.where(end, 1.0, 0.0)
    advantages, returns = gae(
        rewards, torch.zeros(1, 4), mask, end, torch.zeros_like(end), gamma=0.5, gae_lambda=1.0
    )
    expected = [0.5 ** (length - 1 - t) if t < length else 0.0 for t in range(4)]
    assert advantages[0].tolist() == returns[0].tolist() == expected
    assert discounted_returns(rewards, mask, 0.5)[0].tolist() == expected


def test_missing_bootstrap_values_are_an_error():
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    never = torch.zeros_like(mask)
    end = boolean([False, False, True], [False, True, False])
    arguments = {"gamma": 1.0, "gae_lambda": 1.0}
    with pytest.raises(ValueError, match="truncated, but there are no final_values"):
        gae(zeros, zeros, mask, never, end, **arguments, last_values=torch.zeros(2))
    with pytest.raises(ValueError, match="no last_values"):
        gae(zeros, zeros, mask, end, never, **arguments)
    # Row 1 ends at its last step inside the mask, so nothing is missing.
    mask[1, 2] = False
    gae(zeros, zeros, mask, end, never, **arguments)
    # A row without any step needs nothing either.
    gae(zeros, zeros, never, never, never, **arguments)


def test_no_gradient_flows_through_advantages():
    rollout = draw_rollout(0)
    rollout["values"].requires_grad_()
    advantages, returns = gae(**rollout, gamma=1.0, gae_lambda=1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


@given(seed=SEED, gamma=st.sampled_from([1.0, 0.8]))
@few
def test_discounted_returns_are_sums_over_the_steps_that_follow(seed, gamma):
    rollout = draw_rollout(seed)
    rewards, mask = rollout["rewards"], rollout["mask"]
    result = discounted_returns(torch.where(mask, rewards, math.nan), mask, gamma)
    for row in range(2):
        inside = rewards[row][mask[row]]
        expected = [
            sum(gamma**k * reward for k, reward in enumerate(inside[i:].tolist()))
            for i in range(len(inside))
        ]
        assert result[row][mask[row]].tolist() == pytest.approx(expected)
    assert (result[~mask] == 0).all()


def test_reinforce_plus_plus_is_the_whitened_return():
    rollout = draw_rollout(5)
    rewards, mask = rollout["rewards"], rollout["mask"]
    advantages = reinforce_plus_plus_advantages(rewards, mask, gamma=0.9)
    returns = discounted_returns(rewards, mask, 0.9)[mask]
    assert torch.allclose(advantages[mask], (returns - returns.mean()) / returns.std())
    assert (advantages[~mask] == 0).all()


def test_reinforce_plus_plus_leaves_out_rows_that_failed():
    rollout = draw_rollout(6, rows=3)
    rewards, mask = rollout["rewards"], rollout["mask"]
    expected = reinforce_plus_plus_advantages(rewards[:2], mask[:2])
    rewards[2], mask[2] = math.nan, False
    assert torch.equal(reinforce_plus_plus_advantages(rewards, mask)[:2], expected)


def test_reinforce_plus_plus_baseline():
    returns = torch.tensor([1.0, 0.0, 3.0, math.nan], dtype=torch.float64)
    groups = torch.tensor([4, 4, 9, 9])
    mask = boolean([True, True], [True, False], [True, True], [False, False])
    advantages = reinforce_plus_plus_baseline_advantages(returns, groups, mask)
    # The third is what is left of its group, so it keeps its return.
    centred = torch.tensor([0.5, 0.5, -0.5, 3.0, 3.0], dtype=torch.float64)
    assert torch.allclose(advantages[mask], (centred - centred.mean()) / centred.std())
    assert masked_mean(advantages, mask).item() == pytest.approx(0, abs=1e-9)
    assert masked_var(advantages, mask).item() == pytest.approx(1)
    assert (advantages[~mask] == 0).all()


def test_remax():
    rewards = torch.tensor([[0.5, 0.0, 1.0], [2.0, math.nan, math.nan]])
    mask = boolean([True, True, True], [True, False, False])
    advantages = remax_advantages(rewards, mask, torch.tensor([1.0, 3.0]))
    assert advantages.tolist() == [[0.5, 0.0, 0.0], [-1.0, 0.0, 0.0]]


# Groups


@pytest.mark.parametrize(
    ("eps", "ddof", "expected"), [(1e-6, 1, 0.86602), (1e-4, 1, 0.86588), (1e-4, 0, 0.99980)]
)
def test_checked_group_values(eps, ddof, expected):
    returns = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    advantages = group_advantages(returns, torch.zeros(4).long(), eps=eps, ddof=ddof)
    assert [round(a, 5) for a in advantages.tolist()] == [expected, -expected] * 2


def naive_group_advantages(returns, groups, valid, scale, eps, ddof, singletons, leave_one_out):
    result = [0.0] * len(returns)
    chosen = [r for r, v in zip(returns, valid, strict=True) if v]
    for i in range(len(returns)):
        if not valid[i]:
            continue
        members = [j for j in range(len(returns)) if valid[j] and groups[j] == groups[i]]
        group = [returns[j] for j in members]
        if len(group) == 1:
            mean, std = (0.0, 1.0) if singletons == "keep" else (returns[i], 1.0)
        else:
            mean, std = np.mean(group), np.std(group, ddof=ddof)
        if leave_one_out and len(group) > 1:
            result[i] = returns[i] - np.mean([returns[j] for j in members if j != i])
            continue
        if scale == "batch":
            std = np.std(chosen, ddof=ddof) if len(chosen) > 1 else 1.0
        divisor = 1.0 if scale == "none" or leave_one_out else std + eps
        result[i] = (returns[i] - mean) / divisor
    return result


def draw_groups(seed, size=9):
    generator = torch.Generator().manual_seed(seed)
    returns = torch.randn(size, generator=generator, dtype=torch.float64)
    groups = torch.randint(-2, 2, (size,), generator=generator)
    valid = torch.rand(size, generator=generator) < 0.8
    return returns, groups, valid


@given(
    seed=SEED,
    scale=st.sampled_from(["group", "batch", "none"]),
    ddof=st.sampled_from([0, 1]),
    singletons=st.sampled_from(["keep", "zero"]),
)
@few
def test_groups_of_any_size_equal_the_definitions(seed, scale, ddof, singletons):
    returns, groups, valid = draw_groups(seed)
    lists = (returns.tolist(), groups.tolist(), valid.tolist())
    advantages = group_advantages(
        returns, groups, scale=scale, eps=1e-3, ddof=ddof, singletons=singletons, valid=valid
    )
    expected = naive_group_advantages(*lists, scale, 1e-3, ddof, singletons, False)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    advantages = leave_one_out_advantages(returns, groups, singletons=singletons, valid=valid)
    expected = naive_group_advantages(*lists, scale, 1e-3, ddof, singletons, True)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("function", [group_advantages, leave_one_out_advantages])
@given(seed=SEED)
@few
def test_order_and_names_of_the_groups_change_nothing(function, seed):
    returns, groups, valid = draw_groups(seed)
    order = torch.randperm(len(returns), generator=torch.Generator().manual_seed(seed))
    expected = function(returns, groups, valid=valid)
    shuffled = function(returns[order], groups[order], valid=valid[order])
    assert torch.allclose(shuffled, expected[order], atol=1e-9)
    assert torch.allclose(function(returns, 1000 - 7 * groups, valid=valid), expected, atol=1e-9)


@pytest.mark.parametrize("function", [group_advantages, leave_one_out_advantages])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
@pytest.mark.parametrize("position", range(6))
def test_a_failed_reward_in_any_position_leaves_the_statistics(function, junk, position):
    returns = torch.tensor([1.0, 0.0, 2.0, 5.0, 5.5, 7.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    valid = torch.arange(6) != position
    expected = function(returns[valid], groups[valid])
    returns[position] = junk
    advantages = function(returns, groups, valid=valid)
    assert torch.allclose(advantages[valid], expected)
    assert advantages[position] == 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -0.7])
def test_equal_returns_give_exactly_0(scale, value):
    returns = torch.tensor([value] * 7 + [1.0, 2.0])
    groups = torch.tensor([0] * 7 + [1, 1])
    assert (group_advantages(returns, groups, scale=scale)[:7] == 0).all()
    assert (leave_one_out_advantages(returns, groups)[:7] == 0).all()
    assert (group_advantages(returns[:7], groups[:7], scale=scale) == 0).all()


def test_statistics_are_of_the_group_not_of_the_batch():
    returns = torch.tensor([1.0, 0.0, 100.0, 0.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    advantages = group_advantages(returns, groups)
    assert advantages[2].item() == pytest.approx(advantages[0].item(), rel=1e-4)
    by_batch = group_advantages(returns, groups, scale="batch")
    assert by_batch[2].item() == pytest.approx(100 * by_batch[0].item())


@pytest.mark.parametrize("scale", ["group", "none"])
def test_group_of_one(scale):
    returns, groups = torch.tensor([3.0]), torch.tensor([0])
    kept = group_advantages(returns, groups, scale=scale).item()
    assert kept == pytest.approx(3.0, rel=1e-5)
    assert group_advantages(returns, groups, scale=scale, singletons="zero").item() == 0
    assert leave_one_out_advantages(returns, groups).item() == 3.0
    assert leave_one_out_advantages(returns, groups, singletons="zero").item() == 0


def test_batch_of_one_or_none_valid():
    returns, groups = torch.tensor([3.0, math.nan]), torch.tensor([0, 0])
    one = torch.tensor([True, False])
    advantages = group_advantages(returns, groups, scale="batch", valid=one)
    assert advantages.tolist() == pytest.approx([3.0, 0.0], rel=1e-5)
    for scale in ("group", "batch", "none"):
        nothing = group_advantages(returns, groups, scale=scale, valid=torch.zeros(2).bool())
        assert nothing.tolist() == [0.0, 0.0]


def test_leave_one_out_is_the_scaled_centred_return():
    returns = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.zeros(4).long()
    centred = group_advantages(returns, groups, scale="none")
    assert torch.allclose(leave_one_out_advantages(returns, groups), centred * 4 / 3)


def test_group_baseline_is_without_bias_where_it_leaves_one_out():
    """E[A·∇log π] over all outcomes of a group of 2 Bernoulli draws is ∇E[R], for RLOO alone."""
    p = 0.3
    gradients = {"leave one out": 0.0, "mean": 0.0}
    for first in (0, 1):
        for second in (0, 1):
            probability = math.prod(p if draw else 1 - p for draw in (first, second))
            returns = torch.tensor([first, second], dtype=torch.float64)
            score = torch.tensor([1 / p if draw else -1 / (1 - p) for draw in (first, second)])
            groups = torch.tensor([0, 0])
            for name, advantages in (
                ("leave one out", leave_one_out_advantages(returns, groups)),
                ("mean", group_advantages(returns, groups, scale="none")),
            ):
                gradients[name] += probability * (advantages * score).mean().item()
    assert gradients["leave one out"] == pytest.approx(1.0, rel=1e-6)
    assert gradients["mean"] == pytest.approx(0.5, rel=1e-6)  # (G − 1) / G


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "sample"}, "scale is 'sample'; use one of"),
        ({"ddof": 2}, "ddof is 2; use 1"),
        ({"singletons": "mean"}, "singletons is 'mean'; use one of"),
    ],
)
def test_unknown_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.ones(2), torch.zeros(2).long(), **arguments)
