"""The one batch type that runs from collection to update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

Observations = torch.Tensor | Mapping[str, torch.Tensor]


@dataclass
class Trajectories:
    """B trajectories of up to T steps.

    For text a row is one completion and a step one token. For other environments a row is one
    slot's rollout (or, where whole episodes are collected, one episode).

    Attributes:
        observations: What the policy conditions on. For text ``prompt_ids``, int64 (B, P),
            left-padded, and ``prompt_mask``, bool (B, P); otherwise one or several tensors
            (B, T, ...).
        actions: Tokens, int64 (B, T), or actions (B, T, ...).
        mask: True at steps that the policy took and is trained on, bool (B, T).
        logprobs: log π_old(a|s), natural, float32 (B, T).
        rewards: Shaped rewards, float32 (B, T).
        task_rewards: The task's rewards, float32 (B, T).
        terminated: bool (B, T).
        truncated: bool (B, T).
        groups: Rows with the same id started from the same state, int64 (B,).
        valid: False for rows that leave the loss, such as a reward that failed, bool (B,).
        ref_logprobs: log π_ref(a|s), float32 (B, T), or None where there is no reference.
        values: V_old(s), float32 (B, T), or None without a critic.
        final_values: Value of the final observation where truncated, float32 (B, T), or None.
        last_values: Value after the last step, float32 (B,), or None.
        advantages: Filled in before the update, float32 (B, T).
        returns: Targets of the values, float32 (B, T), or None without a critic.
    """

    observations: Observations
    actions: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor
    task_rewards: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    groups: torch.Tensor
    valid: torch.Tensor
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    final_values: torch.Tensor | None = None
    last_values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def loss_mask(self) -> torch.Tensor:
        """Steps that take part in the loss, bool (B, T)."""
        return self.mask & self.valid[:, None]

    @property
    def episode_returns(self) -> torch.Tensor:
        """Undiscounted sum of the shaped rewards of each row, (B,)."""
        return torch.where(self.mask, self.rewards, 0.0).sum(1)

    @property
    def reference_log_ratios(self) -> torch.Tensor:
        """The log-ratio log π_old − log π_ref at each step, 0 outside the mask, (B, T)."""
        assert self.ref_logprobs is not None
        return torch.where(self.mask, self.logprobs - self.ref_logprobs, 0.0)

    def select(self, rows: torch.Tensor) -> Trajectories:
        """Returns the given rows, int64 (n,), in that order."""
        chosen: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Mapping):
                chosen[field.name] = {key: tensor[rows] for key, tensor in value.items()}
            else:
                chosen[field.name] = value[rows] if value is not None else None
        return replace(self, **chosen)

    def as_transitions(self) -> Trajectories:
        """Returns the steps in the mask as rows of length 1, for environments other than text.

        Rows then are single transitions, (n, 1), and a mini-batch draws from all of them.
        """
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("groups", "valid"):
                changed[field.name] = value.repeat_interleave(self.mask.shape[1])
            elif field.name == "last_values" or value is None:
                changed[field.name] = None
            elif isinstance(value, Mapping):
                changed[field.name] = {key: _flatten(tensor) for key, tensor in value.items()}
            else:
                changed[field.name] = _flatten(value)
        flat = replace(self, **changed)
        if bool(self.mask.all()):
            return flat
        return flat.select(torch.nonzero(flat.mask[:, 0])[:, 0])


def merge_steps(observations: Observations) -> torch.Tensor | dict[str, torch.Tensor]:
    """Returns observations (B, T, ...) as one batch (B·T, ...)."""
    if isinstance(observations, Mapping):
        return {key: tensor.flatten(0, 1) for key, tensor in observations.items()}
    return observations.flatten(0, 1)


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0] * tensor.shape[1], 1, *tensor.shape[2:])
