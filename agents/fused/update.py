"""The update of a rollout by gradients that are written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.fused.actor_critic import FusedActorCritic
from agents.fused.heads import Array
from agents.objectives import value_loss_derivative
from agents.trajectories import Trajectories, merge_steps

if TYPE_CHECKING:
    from agents.agent import Agent


class FusedUpdate:
    """Gradients of an agent's loss on the mini-batches of a rollout.

    The same as `agents.updates.AutogradUpdate`, for transitions and a `FusedActorCritic`.

    Args:
        agent: Whose objective and coefficients are taken.
        network: The network.
        batch: The rollout as transitions, every one of them trained on.
    """

    def __init__(self, agent: Agent, network: FusedActorCritic, batch: Trajectories) -> None:
        self.agent, self.network = agent, network
        self.objective = agent.policy_objective()
        self.clip_range_vf = agent.value_clip_range()
        network.flat.attach()
        network.flat.attach_optimizer()
        assert batch.advantages is not None
        self._features = network.features(merge_steps(batch.observations))
        self._columns: list[NDArray[Any]] = [
            batch.actions.squeeze(1).numpy(),
            batch.logprobs[:, 0].numpy(),
            batch.advantages[:, 0].numpy(),
        ]
        if network.critic:
            assert batch.returns is not None
            assert batch.values is not None
            self._columns += [batch.returns[:, 0].numpy(), batch.values[:, 0].numpy()]

    def mini_batches(self, rows: NDArray[np.int64], size: int) -> Iterator[Any]:
        """Yields the rows in this order, `size` at a time."""
        features, columns = self._features, self._columns
        if size < len(rows):  # all at once they need no order
            features = features[torch.from_numpy(rows)]
            columns = [column[rows] for column in columns]
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            yield features[part], *(column[part] for column in columns)

    def gradients(self, mini_batch: Any) -> dict[str, float]:
        """Computes the gradients of a mini-batch, and returns the means of its loss's terms."""
        features, actions, old_logprobs, advantages, *critic = mini_batch
        agent, size = self.agent, len(actions)
        mean = np.full(size, 1 / size, dtype=np.float32)
        if agent.normalize_advantage and size > 1:
            advantages = advantages - float(advantages.sum()) / size
            std = (float(advantages.dot(advantages)) / (size - 1)) ** 0.5
            advantages /= std + 1e-8
        logprobs, entropies, values = self.network.evaluate(features, actions)
        log_ratio = logprobs - old_logprobs
        losses, gradient, statistics = self.objective.derivative(log_ratio, advantages)
        gradient *= mean
        means = {"policy_gradient_loss": float(losses.dot(mean))}
        means["entropy_loss"] = -float(
            entropies.dot(mean) if isinstance(entropies, np.ndarray) else entropies
        )
        loss = means["policy_gradient_loss"] + agent.ent_coef * means["entropy_loss"]
        value_gradient: Array | None = None
        if values is not None:
            returns, old_values = critic
            errors, value_gradient = value_loss_derivative(
                values, returns, old_values, self.clip_range_vf
            )
            means["value_loss"] = float(errors.dot(mean))
            value_gradient *= agent.vf_coef / size
            loss += agent.vf_coef * means["value_loss"]
        for name, term in statistics.items():
            means[name] = float(term.dot(mean))
        self.network.backward(gradient, -agent.ent_coef / size, value_gradient)
        return {**means, "loss": loss}

    def step(self) -> float:
        """Takes an optimiser step and returns the norm of the gradient before it was clipped."""
        return self.network.flat.step(self.agent.max_grad_norm)

    def finish(self) -> None:
        """Leaves policy and optimiser as if the plain path had trained them."""
        self.network.flat.detach_optimizer()
