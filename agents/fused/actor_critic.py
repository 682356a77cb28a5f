"""Stable-Baselines3's actor-critic MLP: values and actions, forward and backward by hand."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.distributions import StateDependentNoiseDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from agents.fused.heads import Array, CategoricalHead, GaussianHead, Head, StateDependentHead
from agents.fused.parameters import FlatParameters
from agents.fused.towers import Towers
from agents.trajectories import Observations, merge_steps

_CHUNK = 2048


class FusedActorCritic:
    """The networks of an `ActorCriticPolicy` that `is_supported` accepts.

    Args:
        policy: The `ActorCriticPolicy`; its parameters become views of one tensor.
        critic: Whether the value network is trained, too.
    """

    def __init__(self, policy: Any, critic: bool) -> None:
        self.policy, self.critic = policy, critic
        space = policy.observation_space
        self._vectors = isinstance(space, spaces.Box) and len(space.shape) == 1
        actor_layers = _linear_layers(policy.mlp_extractor.policy_net)
        critic_layers = _linear_layers(policy.mlp_extractor.value_net) if critic else []
        self._parameters = _trained_parameters(policy, critic)
        activation = type(policy.mlp_extractor.policy_net[1])
        if [layer.weight.shape for layer in actor_layers] == [
            layer.weight.shape for layer in critic_layers
        ]:
            self.towers = [Towers([actor_layers, critic_layers], activation)]
        else:
            self.towers = [
                Towers([layers], activation) for layers in (actor_layers, critic_layers) if layers
            ]
        parameters = [parameter for tower in self.towers for parameter in tower.parameters()]
        starts = np.cumsum([0] + [len(tower.parameters()) for tower in self.towers])
        first = len(parameters)
        parameters += [policy.action_net.weight, policy.action_net.bias]
        if critic:
            parameters += [policy.value_net.weight, policy.value_net.bias]
        if has_log_std := isinstance(getattr(policy, "log_std", None), torch.nn.Parameter):
            parameters.append(policy.log_std)
        self.flat = flat = FlatParameters(parameters, policy.optimizer)
        # Arrays do not follow a tensor whose memory moves, as into another process or a copy.
        self._addresses = flat.addresses()
        for tower, start in zip(self.towers, starts, strict=False):
            tower.attach(flat, int(start))

        def views(index: int) -> tuple[Array, Array]:
            return flat.view(flat.values, index).numpy(), flat.view(flat.gradients, index).numpy()

        self.action_weight, self.action_weight_gradient = views(first)
        self.action_bias, self.action_bias_gradient = views(first + 1)
        if critic:
            self.value_weight, self.value_weight_gradient = (v[0] for v in views(first + 2))
            self.value_bias, self.value_bias_gradient = views(first + 3)
        self.head: Head
        if not has_log_std:
            self.head = CategoricalHead(policy.action_net.out_features)
        else:
            log_std, gradient = views(len(parameters) - 1)
            if isinstance(policy.action_dist, StateDependentNoiseDistribution):
                self.head = StateDependentHead(log_std, gradient, policy.action_dist)
            else:
                self.head = GaussianHead(log_std, gradient)

    def fits(self, policy: ActorCriticPolicy) -> bool:
        """Whether this is the policy as it was, its layers, its optimiser and its memory."""
        return (
            policy is self.policy
            and policy.optimizer is self.flat.optimizer
            and self._addresses == self.flat.addresses()
            and all(map(operator.is_, self._parameters, _trained_parameters(policy, self.critic)))
        )

    def operations(self, rows: int) -> float:
        """Returns the floating-point operations of a mini-batch, forward and backward."""
        return 6.0 * len(self.flat.values) * rows

    def features(self, observations: Any) -> torch.Tensor:
        """Returns what the first layer takes, float32 (B, D), of tensors."""
        if self._vectors:
            return observations.float()
        with torch.no_grad():
            return self.policy.extract_features(observations)

    def array_features(self, observations: Any) -> Array:
        """The same of arrays; vectors pass as they are."""
        if self._vectors:
            return np.asarray(observations, dtype=np.float32)
        return self.features(obs_as_tensor(observations, torch.device("cpu"))).numpy()

    def evaluate(
        self, features: torch.Tensor, actions: NDArray[Any]
    ) -> tuple[Array, Any, Array | None]:
        """Returns log-probabilities (B,), entropies (B,) or a number, and values (B,).

        Args:
            features: (B, D).
            actions: (B,) or (B, A).
        """
        self._forward(features)
        outputs = np.dot(self.action_weight, self._actor_latent.T)
        outputs += self.action_bias[:, None]
        logprobs, entropies = self.head.evaluate(outputs, self._actor_latent, actions)
        return logprobs, entropies, self._values() if self.critic else None

    def values(self, features: torch.Tensor) -> Array:
        """Returns values (B,) of features (B, D)."""
        self._forward(features)
        return self._values()

    def _forward(self, features: torch.Tensor) -> None:
        hidden = [layer for tower in self.towers for layer in tower.forward(features)]
        self._actor_latent, self._critic_latent = hidden[0], hidden[-1]

    def _values(self) -> Array:
        values: Array = np.dot(self._critic_latent, self.value_weight)
        values += self.value_bias
        return values

    def backward(
        self, logprob_gradient: Array, entropy_gradient: float, value_gradient: Array | None
    ) -> None:
        """Writes the gradient of the last `evaluate` into the flat tensor.

        Args:
            logprob_gradient: ∂loss/∂log π of each row, (B,).
            entropy_gradient: ∂loss/∂entropy of each row.
            value_gradient: ∂loss/∂V of each row, (B,); None without a critic.
        """
        outputs = self.head.backward(logprob_gradient, entropy_gradient)
        outputs.sum(1, out=self.action_bias_gradient)
        np.dot(outputs, self._actor_latent, out=self.action_weight_gradient)
        np.dot(outputs.T, self.action_weight, out=self.towers[0].output_gradient[0])
        if value_gradient is not None:
            value_gradient.sum(keepdims=True, out=self.value_bias_gradient)
            np.dot(value_gradient, self._critic_latent, out=self.value_weight_gradient)
            target = self.towers[-1].output_gradient[-1]
            np.multiply(value_gradient[:, None], self.value_weight, out=target)
        for tower in self.towers:
            tower.backward()


class Actor:
    """Samples actions for a rollout, during which the weights do not change.

    Args:
        network: The network.
    """

    def __init__(self, network: FusedActorCritic) -> None:
        self._network = network
        network.flat.attach()
        tower = network.towers[0]
        self._layers = [
            (weight[0].numpy().T, bias[0].numpy())
            for weight, bias in zip(tower.weights, tower.biases, strict=True)
        ]
        self._activation = np.tanh if tower.activate is torch.tanh_ else _relu
        self._action_weight = network.action_weight.T
        self._action_bias = network.action_bias
        self.reset_noise = network.head.reset_noise

    def __call__(self, observations: Any) -> NDArray[Any]:
        """Returns an action for each observation of a batch (n, ...)."""
        hidden = self._network.array_features(observations)
        with np.errstate(invalid="ignore"):  # the collector names what is not finite
            for weight, bias in self._layers:
                hidden = np.dot(hidden, weight)
                hidden += bias
                hidden = self._activation(hidden, out=hidden)
            outputs = np.dot(hidden, self._action_weight)
            outputs += self._action_bias
            return self._network.head.sample(outputs, hidden)

    def values(self, observations: Any) -> torch.Tensor:
        """Returns values (n,) of a batch of observations."""
        features = torch.from_numpy(self._network.array_features(observations))
        return torch.from_numpy(self._network.values(features))

    def evaluate(
        self, observations: Observations, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns log-probabilities and values of steps, (n, T), in pieces that bound memory."""
        shape = actions.shape[:2]
        features = self._network.features(merge_steps(observations))
        rows = actions.flatten(0, 1).numpy()
        parts = [
            self._network.evaluate(features[start : start + _CHUNK], rows[start : start + _CHUNK])
            for start in range(0, len(rows), _CHUNK)
        ]
        logprobs = torch.from_numpy(np.concatenate([part[0] for part in parts]).reshape(shape))
        values = [part[2] for part in parts if part[2] is not None]
        if not values:
            return logprobs, None
        return logprobs, torch.from_numpy(np.concatenate(values).reshape(shape))


def _relu(values: Array, out: Array) -> Array:
    return np.maximum(values, 0, out=out)


def _linear_layers(network: torch.nn.Sequential) -> list[torch.nn.Linear]:
    return [layer for layer in network if isinstance(layer, torch.nn.Linear)]


def _trained_parameters(policy: Any, critic: bool) -> list[Any]:
    """The parameters that are trained, in the order of the layers."""
    layers = [*_linear_layers(policy.mlp_extractor.policy_net), policy.action_net]
    if critic:
        layers += [*_linear_layers(policy.mlp_extractor.value_net), policy.value_net]
    found = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    return [*found, getattr(policy, "log_std", None)]
