"""Action distributions: log-probability, entropy, their gradients, and samples.

The parameters of a distribution are rows and the batch runs along the columns, (A, B): sums over
actions then run along whole rows. Samples are those that Stable-Baselines3's distributions draw
from torch's generator.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float32]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Head(ABC):
    """A distribution over actions, whose parameters the actor's last layer gives."""

    @abstractmethod
    def evaluate(self, outputs: Array, latents: Array, actions: NDArray[Any]) -> tuple[Array, Any]:
        """Returns log-probabilities (B,) and entropies, (B,) or a number where all are equal.

        Args:
            outputs: Parameters of the distributions, (A, B); may be overwritten.
            latents: Last hidden layer of the actor, (B, H).
            actions: (B,) or (B, A).
        """

    @abstractmethod
    def backward(self, logprob_gradient: Array, entropy_gradient: float) -> Array:
        """Returns the gradient of the outputs of the last `evaluate`, (A, B).

        Args:
            logprob_gradient: ∂loss/∂log π of each row, (B,).
            entropy_gradient: ∂loss/∂entropy, the same for each row.
        """

    @abstractmethod
    def sample(self, outputs: Array, latents: Array) -> NDArray[Any]:
        """Returns an action for each row of outputs (n, A) and latents (n, H)."""

    def reset_noise(self, num_envs: int) -> None:
        """Draws the noise of state-dependent exploration.

        Raises:
            NotImplementedError: The noise does not depend on the state.
        """
        raise NotImplementedError("Only state-dependent exploration has noise that is reset.")


class CategoricalHead(Head):
    """A categorical distribution over A actions by its logits."""

    def __init__(self, num_actions: int) -> None:
        self._classes = np.arange(num_actions)[:, None]

    def evaluate(self, outputs: Array, latents: Array, actions: NDArray[Any]) -> tuple[Array, Any]:
        """Returns log-probabilities and entropies, see `Head`."""
        logits = outputs
        logits -= logits.max(0)
        self._probs = np.exp(logits)
        total = self._probs.sum(0)
        self._probs /= total
        logits -= np.log(total)
        self._logprobs = logits
        self._chosen = self._classes == actions
        self._entropies = -(self._probs * logits).sum(0)
        return (logits * self._chosen).sum(0), self._entropies

    def backward(self, logprob_gradient: Array, entropy_gradient: float) -> Array:
        """Returns the gradient of the logits, see `Head`."""
        gradient: Array = (self._chosen - self._probs) * logprob_gradient
        if entropy_gradient:
            # ∂H/∂logit = −p·(log p + H)
            gradient -= entropy_gradient * self._probs * (self._logprobs + self._entropies)
        return gradient

    def sample(self, outputs: Array, latents: Array) -> NDArray[np.int64]:
        """Returns sampled actions, (n,)."""
        # Of independent exponentials with rates p, the first to ring is drawn from p.
        exponentials = torch.empty(outputs.shape).exponential_().numpy()
        weights = np.exp(outputs - outputs.max(1, keepdims=True))
        return (weights / exponentials).argmax(1)


class GaussianHead(Head):
    """Independent Gaussians, by their means and a log standard deviation for all states.

    Args:
        log_std: (A,), a view of the parameter.
        log_std_gradient: (A,), where its gradient is written.
    """

    def __init__(self, log_std: Array, log_std_gradient: Array) -> None:
        self._log_std, self._log_std_gradient = log_std, log_std_gradient

    def evaluate(self, outputs: Array, latents: Array, actions: NDArray[Any]) -> tuple[Array, Any]:
        """Returns log-probabilities and the entropy, see `Head`."""
        self._std = np.exp(self._log_std)[:, None]
        self._noise = (actions.T - outputs) / self._std
        constant = float(self._log_std.sum()) + len(self._log_std) * _HALF_LOG_2PI
        logprobs: Array = -0.5 * np.square(self._noise).sum(0) - np.float32(constant)
        return logprobs, constant + 0.5 * len(self._log_std)

    def backward(self, logprob_gradient: Array, entropy_gradient: float) -> Array:
        """Returns the gradient of the means, see `Head`; writes that of the log deviation."""
        square: Array = np.square(self._noise)
        square -= np.float32(1)
        np.dot(square, logprob_gradient, out=self._log_std_gradient)
        self._log_std_gradient += np.float32(entropy_gradient * len(logprob_gradient))
        gradient: Array = np.divide(self._noise, self._std)
        gradient *= logprob_gradient
        return gradient

    def sample(self, outputs: Array, latents: Array) -> NDArray[np.float32]:
        """Returns sampled actions, (n, A)."""
        return outputs + np.exp(self._log_std) * torch.randn(outputs.shape).numpy()


class StateDependentHead(Head):
    """Gaussians whose noise is a function of the state (gSDE, Raffin et al., arXiv:2005.05719).

    The noise of an action is ``latentᵀ·E`` with E drawn now and then from N(0, exp(log_std)²), so
    its variance is ``latent²ᵀ·exp(log_std)²`` (eq. 8).

    Args:
        log_std: (H, A), a view of the parameter.
        log_std_gradient: (H, A), where its gradient is written.
        distribution: Stable-Baselines3's, which is told of the noise that is drawn.
    """

    def __init__(self, log_std: Array, log_std_gradient: Array, distribution: Any) -> None:
        self._log_std, self._log_std_gradient = log_std, log_std_gradient
        self._distribution = distribution
        self._epsilon = np.float32(distribution.epsilon)

    def evaluate(self, outputs: Array, latents: Array, actions: NDArray[Any]) -> tuple[Array, Any]:
        """Returns log-probabilities and entropies, see `Head`."""
        self._variance_weights = np.exp(2 * self._log_std)
        self._squares = np.square(latents)
        self._variance = np.dot(self._squares, self._variance_weights).T + self._epsilon
        self._difference = actions.T - outputs
        self._scaled = self._difference / self._variance
        half_log_variance = 0.5 * np.log(self._variance).sum(0)
        num_actions = len(outputs)
        logprobs: Array = -0.5 * (self._difference * self._scaled).sum(0)
        logprobs -= half_log_variance + np.float32(num_actions * _HALF_LOG_2PI)
        return logprobs, half_log_variance + np.float32(num_actions * (_HALF_LOG_2PI + 0.5))

    def backward(self, logprob_gradient: Array, entropy_gradient: float) -> Array:
        """Returns the gradient of the means, see `Head`; writes that of the log deviation."""
        gradient: Array = self._scaled * logprob_gradient
        # ∂log π/∂v = (d²/v² − 1/v)/2 and ∂H/∂v = 1/(2v); no gradient flows into the latents.
        inverse = np.reciprocal(self._variance)
        variance_gradient: Array = gradient * self._scaled
        variance_gradient -= inverse * (logprob_gradient - np.float32(entropy_gradient))
        # ∂v/∂log_std = 2·latent²·exp(2·log_std), and the 2 cancels the half.
        np.dot(self._squares.T, variance_gradient.T, out=self._log_std_gradient)
        self._log_std_gradient *= self._variance_weights
        return gradient

    def sample(self, outputs: Array, latents: Array) -> NDArray[np.float32]:
        """Returns sampled actions, (n, A)."""
        if len(latents) == 1:
            return outputs + latents @ self._shared
        return outputs + np.matmul(latents[:, None], self._per_slot)[:, 0]

    def reset_noise(self, num_envs: int) -> None:
        """Draws the noise matrices, one for each slot."""
        std = torch.from_numpy(np.exp(self._log_std))
        shared = std * torch.randn(std.shape)
        per_slot = std * torch.randn(num_envs, *std.shape)
        self._distribution.exploration_mat = shared
        self._distribution.exploration_matrices = per_slot
        self._shared, self._per_slot = shared.numpy(), per_slot.numpy()
