"""The gradient of an agent's loss, mini-batch by mini-batch, by autograd."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from agents.aggregation import aggregation_weights
from agents.masked import masked_mean, masked_var
from agents.trajectories import Trajectories
from textrl_env.kl import kl_estimate

if TYPE_CHECKING:
    from agents.agent import Agent


class AutogradUpdate:
    """Gradients of an agent's loss on the mini-batches of a rollout, for any policy.

    Args:
        agent: Whose policy, objective and coefficients are taken.
        batch: The rollout, with its advantages.
    """

    def __init__(self, agent: Agent, batch: Trajectories) -> None:
        self.agent, self.batch = agent, batch

    def mini_batches(self, rows: NDArray[np.int64], size: int) -> Iterator[Trajectories]:
        """Yields the rows in this order, `size` at a time, where any has a part in the loss."""
        for part in torch.from_numpy(rows).to(self.agent.device).split(size):
            mini_batch = self.batch.select(part)
            if bool(mini_batch.loss_mask.any()):
                yield mini_batch

    def gradients(self, mini_batch: Trajectories) -> dict[str, float]:
        """Computes the gradients of a mini-batch, and returns the means of its loss's terms.

        The gradient is summed over micro-batches; the denominators are those of the mini-batch, so
        that they add up to it exactly.
        """
        agent = self.agent
        if agent.normalize_advantage:
            mini_batch = _normalize_advantages(mini_batch)
        norm_length = agent.mdp.max_new_tokens if agent.mdp is not None else None
        weights = aggregation_weights(mini_batch.loss_mask, agent.loss_aggregation, norm_length)
        mean = aggregation_weights(mini_batch.loss_mask, "token-mean")
        agent.policy.optimizer.zero_grad()
        means: dict[str, float] = defaultdict(float)
        rows = torch.arange(len(mini_batch), device=agent.device)
        for part in rows.split(agent.micro_batch_size or len(rows)):
            micro_batch = mini_batch.select(part)
            loss, terms = self._loss(micro_batch, weights[part])
            loss.backward()
            for name, values in terms.items():
                selected = torch.where(micro_batch.loss_mask, values.detach(), 0.0)
                means[name] += float((selected * mean[part]).sum())
            means["loss"] += float(loss.detach())
        return means

    def step(self) -> float:
        """Takes an optimiser step and returns the norm of the gradient before it was clipped."""
        policy = self.agent.policy
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), self.agent.max_grad_norm)
        policy.optimizer.step()
        return float(norm)

    def finish(self) -> None:
        """Does nothing: policy and optimiser are as they should be."""

    def _loss(
        self, batch: Trajectories, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a micro-batch under the mini-batch's weights, and its terms per step."""
        agent = self.agent
        evaluation = agent.evaluate(batch)

        def total(values: torch.Tensor) -> torch.Tensor:
            return (torch.where(batch.loss_mask, values, 0.0) * weights).sum()

        per_step, terms = agent.policy_loss(evaluation.logprobs, batch)
        terms = {"policy_gradient_loss": per_step, "entropy_loss": -evaluation.entropy, **terms}
        loss = total(per_step)
        if agent.ent_coef:
            loss = loss - agent.ent_coef * total(evaluation.entropy)
        if evaluation.values is not None:
            terms["value_loss"] = agent.value_loss(evaluation.values, batch)
            loss = loss + agent.vf_coef * total(terms["value_loss"])
        if agent.kl_loss_coef:
            kl = evaluation.reference_kl
            if kl is None:
                assert batch.ref_logprobs is not None
                kl = kl_estimate(evaluation.logprobs, batch.ref_logprobs, agent.kl_loss)
            terms["kl_loss"] = kl
            loss = loss + agent.kl_loss_coef * total(kl)
        return loss, terms


def _normalize_advantages(batch: Trajectories) -> Trajectories:
    """Normalises the advantages over the mini-batch, as Stable-Baselines3 does."""
    if int(batch.loss_mask.sum()) < 2:
        return batch
    assert batch.advantages is not None
    mean = masked_mean(batch.advantages, batch.loss_mask)
    std = masked_var(batch.advantages, batch.loss_mask).sqrt()
    return replace(batch, advantages=(batch.advantages - mean) / (std + 1e-8))
