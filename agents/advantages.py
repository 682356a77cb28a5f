"""Advantages: how much better what happened was than what was to be expected.

Two families. Per step, from rewards in time: `gae` and what follows from its recursion. Per
episode, from the returns of a group of episodes that start from the same state.

Steps outside a mask are never read, and get 0. No gradient flows through advantages.
"""

from __future__ import annotations

import numpy as np
import torch

from agents.masked import masked_var, masked_whiten

_SCALES = ("group", "batch", "none")
_SINGLETONS = ("keep", "zero")


@torch.no_grad()
def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    final_values: torch.Tensor | None = None,
    last_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns generalised advantage estimates and returns (Schulman et al. 2015, arXiv:1506.02438).

    Equation 16 of the paper, backwards in time::

        δ_t = r_t + γ·V(s_{t+1}) − V(s_t)
        A_t = δ_t + γλ·A_{t+1}

    At the end of an episode nothing is carried over, and V(s_{t+1}) is 0 where it terminated, the
    value of the final observation where it was truncated. Steps outside the mask, such as tokens
    that a tool wrote, are as if they were not there: they neither discount nor leak.

    Args:
        rewards: (B, T).
        values: V(s_t), (B, T).
        mask: Steps that the policy took, bool (B, T).
        terminated: The step ended its episode, bool (B, T).
        truncated: A limit from outside cut the episode after this step, bool (B, T). Where both
            are set, the episode terminated.
        gamma: Discount γ.
        gae_lambda: λ.
        final_values: Value of the final observation, read where truncated, (B, T); None where
            nothing is.
        last_values: Value of the state after the row, (B,); read where the last step of a row
            ends no episode. None where every row ends its episode.

    Returns:
        Advantages and returns A + V, the targets of the critic, both (B, T).

    Raises:
        ValueError: A value that an unfinished or truncated episode goes on with is missing.

    Examples:
        >>> rewards = torch.tensor([[0.0, 0.0, 1.0]])
        >>> mask = torch.tensor([[True, True, True]])
        >>> end = torch.tensor([[False, False, True]])
        >>> gae(rewards, torch.zeros(1, 3), mask, end, ~mask, gamma=1.0, gae_lambda=0.5)[0]
        tensor([[0.2500, 0.5000, 1.0000]])
    """
    truncated = truncated & ~terminated
    ended = terminated | truncated
    if final_values is None:
        if bool((truncated & mask).any()):
            raise ValueError(
                "An episode was truncated, but there are no final_values; pass the value of each "
                "final observation, or set terminated where the limit is part of the task."
            )
        final_values = torch.zeros_like(values)
    if last_values is None:
        # A step is its row's last where no step of the mask follows.
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        if bool((last & ~ended).any()):
            raise ValueError(
                "A row ends in the middle of an episode, but there are no last_values; pass the "
                "value of the state after each row."
            )
        last_values = torch.zeros_like(values[:, 0])
    following = torch.cat([values, last_values[:, None]], 1)[:, 1:]
    if not bool(mask.all()):
        # The value of the next step that is in the mask.
        columns = torch.arange(values.shape[1] + 1, device=mask.device)
        extended = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        nearest = torch.where(extended, columns, len(columns)).flip(1).cummin(1).values.flip(1)
        following = torch.cat([values, last_values[:, None]], 1).gather(1, nearest[:, 1:])
    after = torch.where(ended, torch.where(truncated, final_values, 0.0), following)
    deltas = torch.where(mask, rewards + gamma * after - values, 0.0)
    decays = torch.full_like(values, gamma * gae_lambda).masked_fill(ended, 0.0)
    decays = decays.masked_fill(~mask, 1.0)
    advantages = torch.where(mask, _backward_sums(deltas, decays), 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def _backward_sums(terms: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """The recursion s_t = x_t + d_t·s_{t+1} along each row, (B, T)."""
    # In numpy, with time in front: a step costs little more than its arithmetic.
    steps = terms.T.cpu().numpy().copy()
    factors = np.ascontiguousarray(decays.T.cpu().numpy())
    for t in range(len(steps) - 2, -1, -1):
        steps[t] += factors[t] * steps[t + 1]
    return torch.from_numpy(steps).T.to(terms.device)


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Returns the reward-to-go G_t = r_t + γ·G_{t+1} of each step; each row is one episode.

    Args:
        rewards: (B, T).
        mask: Steps that the policy took, bool (B, T); others are skipped.
        gamma: Discount γ.

    Examples:
        >>> discounted_returns(torch.tensor([[1.0, 0.0, 4.0]]), torch.ones(1, 3).bool(), 0.5)
        tensor([[2., 2., 4.]])
    """
    # GAE with λ = 1 and no critic.
    zeros, never = torch.zeros_like(rewards), torch.zeros_like(mask)
    return gae(
        rewards, zeros, mask, never, never, gamma=gamma, gae_lambda=1.0, last_values=zeros[:, 0]
    )[0]


def reinforce_plus_plus_advantages(
    rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Returns the reward-to-go, whitened over the batch (REINFORCE++, arXiv:2501.03262).

    Args:
        rewards: Rewards of each step, the KL term among them, (B, T).
        mask: Steps that are trained on, bool (B, T). Rows whose reward failed are left out by
            leaving out all of their steps.
        gamma: Discount γ.

    Returns:
        (B, T).

    Raises:
        ValueError: The batch has fewer than two steps.

    Examples:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> reinforce_plus_plus_advantages(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), mask)
        tensor([[ 0.5774,  0.5774],
                [-1.1547,  0.0000]])
    """
    return masked_whiten(discounted_returns(rewards, mask, gamma), mask)


def reinforce_plus_plus_baseline_advantages(
    returns: torch.Tensor, groups: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Returns R − mean_group(R) at each step, whitened over the batch (arXiv:2501.03262).

    Args:
        returns: Return of each episode, (B,).
        groups: Episodes with the same id are a group, int64 (B,).
        mask: Steps that are trained on, bool (B, T). A row without any is in no statistic.

    Returns:
        (B, T).

    Raises:
        ValueError: The batch has fewer than two steps.

    Examples:
        >>> mask = torch.tensor([[True, True], [True, True]])
        >>> reinforce_plus_plus_baseline_advantages(
        ...     torch.tensor([1.0, 0.0]), torch.tensor([5, 5]), mask
        ... )
        tensor([[ 0.8660,  0.8660],
                [-0.8660, -0.8660]])
    """
    centred = group_advantages(returns, groups, scale="none", valid=mask.any(1))
    return masked_whiten(centred[:, None].expand_as(mask), mask)


def remax_advantages(
    rewards: torch.Tensor, mask: torch.Tensor, baselines: torch.Tensor
) -> torch.Tensor:
    """Returns the reward-to-go minus the return of the greedy completion (arXiv:2310.10505).

    Args:
        rewards: (B, T).
        mask: Steps that are trained on, bool (B, T).
        baselines: Return of the greedy completion of each row's prompt, (B,).

    Returns:
        (B, T).

    Examples:
        >>> mask = torch.tensor([[True, True]])
        >>> remax_advantages(torch.tensor([[0.0, 1.0]]), mask, torch.tensor([0.25]))
        tensor([[0.7500, 0.7500]])
    """
    returns = discounted_returns(rewards, mask, gamma=1.0)
    return torch.where(mask, returns - baselines[:, None], 0.0)


def group_advantages(
    returns: torch.Tensor,
    groups: torch.Tensor,
    *,
    scale: str = "group",
    eps: float = 1e-6,
    ddof: int = 1,
    singletons: str = "keep",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns (R − mean_group) / (std + eps), the advantage of GRPO (arXiv:2402.03300, 4.1.2).

    Groups may have any size and their members any order. A group whose returns are all equal gets
    exactly 0. The defaults are verl's; `agents.presets` has those of others.

    Args:
        returns: Return of each episode, (B,).
        groups: Episodes with the same id are a group, int64 (B,).
        scale: std of the ``"group"``, of the whole ``"batch"``, or ``"none"``: no division (Dr.
            GRPO, arXiv:2503.20783).
        eps: Added to the standard deviation.
        ddof: 1 is the unbiased standard deviation, 0 divides by the group's size.
        singletons: Advantage of a group of one: ``"keep"`` is its return (mean 0, std 1, as in
            verl), ``"zero"`` is 0 (as in TRL).
        valid: False leaves an episode out of all statistics, and gives it 0; bool (B,).

    Returns:
        (B,).

    Raises:
        ValueError: `scale`, `ddof` or `singletons` is none of the above.

    Examples:
        >>> groups = torch.tensor([0, 1, 0, 1])
        >>> group_advantages(torch.tensor([1.0, 5.0, 0.0, 5.0]), groups)
        tensor([ 0.7071,  0.0000, -0.7071,  0.0000])
        >>> group_advantages(torch.tensor([1.0, 5.0, 0.0, 5.0]), groups, scale="none")
        tensor([ 0.5000,  0.0000, -0.5000,  0.0000])
    """
    if scale not in _SCALES:
        raise ValueError(f"scale is {scale!r}; use one of {_SCALES}.")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}; use 1 (unbiased) or 0.")
    valid = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    index = groups.unique(return_inverse=True)[1]
    centred, sizes = _centre(returns, index, valid, singletons)
    if scale == "none":
        return centred
    if scale == "batch":
        std = masked_var(returns, valid, ddof).sqrt() if int(valid.sum()) > 1 else 1.0
    else:
        variance = _group_sum(centred.square(), index) / (sizes - ddof).clamp(min=1)
        std = torch.where(sizes > 1, variance.sqrt(), 1.0)
    return centred / (std + eps)


def leave_one_out_advantages(
    returns: torch.Tensor,
    groups: torch.Tensor,
    *,
    singletons: str = "keep",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns R minus the mean return of the others of the group (RLOO, arXiv:2402.14740).

    It is (R − mean_group) · G / (G − 1) for a group of G.

    Args:
        returns: Return of each episode, (B,).
        groups: Episodes with the same id are a group, int64 (B,).
        singletons: Advantage of a group of one: ``"keep"`` is its return, ``"zero"`` is 0.
        valid: False leaves an episode out of all statistics, and gives it 0; bool (B,).

    Returns:
        (B,).

    Raises:
        ValueError: `singletons` is none of the above.

    Examples:
        >>> leave_one_out_advantages(torch.tensor([3.0, 0.0, 0.0]), torch.tensor([7, 7, 7]))
        tensor([ 3.0000, -1.5000, -1.5000])
    """
    valid = torch.ones_like(groups, dtype=torch.bool) if valid is None else valid
    index = groups.unique(return_inverse=True)[1]
    centred, sizes = _centre(returns, index, valid, singletons)
    return centred * sizes / (sizes - 1).clamp(min=1)


def _centre(
    returns: torch.Tensor, index: torch.Tensor, valid: torch.Tensor, singletons: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns without the mean of their group, 0 where not valid, and the size of that group."""
    if singletons not in _SINGLETONS:
        raise ValueError(f"singletons is {singletons!r}; use one of {_SINGLETONS}.")
    sizes = _group_sum(valid.to(returns.dtype), index)
    # Relative to the group's lowest, equal returns are exactly 0, and so is their mean.
    candidates = torch.where(valid, returns, torch.inf)
    lowest = torch.full_like(returns, torch.inf).scatter_reduce(0, index, candidates, "amin")
    shifted = torch.where(valid, returns - lowest[index], 0.0)
    centred = torch.where(valid, shifted - _group_sum(shifted, index) / sizes.clamp(min=1), 0.0)
    if singletons == "keep":
        centred = torch.where(valid & (sizes == 1), returns, centred)
    return centred, sizes


def _group_sum(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Sum over each episode's group, (B,)."""
    return torch.zeros_like(values).index_add(0, index, values)[index]
