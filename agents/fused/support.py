"""Which policies have their gradients written out.

The policy belongs to the user, who may freeze a layer, replace one, hang a hook on it or change the
optimiser between two rollouts. So the question is asked at each rollout and each update anew.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    DiagGaussianDistribution,
    StateDependentNoiseDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import (
    CombinedExtractor,
    FlattenExtractor,
    MlpExtractor,
)

from agents.fused.towers import ACTIVATIONS

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_supported(policy: Any) -> bool:
    """Whether this is Stable-Baselines3's own MLP as it comes, on a CPU, trained by plain Adam."""
    return (
        type(policy) in (ActorCriticPolicy, MultiInputActorCriticPolicy)
        and _flattens(policy.features_extractor)
        and policy.share_features_extractor
        and _is_mlp(policy.mlp_extractor)
        and type(policy.action_net) is type(policy.value_net) is torch.nn.Linear
        and _is_known(policy)
        and not any(getattr(module, name) for module in policy.modules() for name in _HOOKS)
        and all(_is_plain(parameter) for parameter in policy.parameters())
        and _is_plain_adam(policy.optimizer, policy)
    )


def _flattens(extractor: torch.nn.Module) -> bool:
    if type(extractor) is CombinedExtractor:
        return all(type(part) is torch.nn.Flatten for part in extractor.extractors.values())
    return type(extractor) is FlattenExtractor


def _is_mlp(extractor: torch.nn.Module) -> bool:
    if type(extractor) is not MlpExtractor:
        return False
    networks: Any = (extractor.policy_net, extractor.value_net)
    return all(
        len(network) > 0
        and all(type(layer) is torch.nn.Linear for layer in network[::2])
        and {type(layer) for layer in network[1::2]} == {type(networks[0][1])}
        and type(network[1]) in ACTIVATIONS
        for network in networks
    )


def _is_known(policy: ActorCriticPolicy) -> bool:
    """Whether we know the distribution of the actions."""
    if isinstance(policy.action_space, spaces.Box) and len(policy.action_space.shape) != 1:
        return False
    distribution = policy.action_dist
    if isinstance(distribution, StateDependentNoiseDistribution):
        return not (distribution.bijector or distribution.use_expln) and distribution.full_std
    return type(distribution) in (CategoricalDistribution, DiagGaussianDistribution)


def _is_plain(parameter: torch.nn.Parameter) -> bool:
    return (
        parameter.requires_grad
        and parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and not parameter.is_shared()
        and not any(getattr(parameter, name) for name in _PARAMETER_HOOKS)
    )


def _is_plain_adam(optimizer: torch.optim.Optimizer, policy: ActorCriticPolicy) -> bool:
    """Whether the optimiser is Adam on all parameters, with learning rate, betas and ε alone."""
    if type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) != 1:
        return False
    [group] = optimizer.param_groups
    return (
        not (group["weight_decay"] or group["amsgrad"] or group["maximize"])
        and not isinstance(group["lr"], torch.Tensor)
        and not any(getattr(optimizer, name) for name in _OPTIMIZER_HOOKS)
        and "step" not in vars(optimizer)  # a scheduler of torch puts its own there
        and {id(p) for p in policy.parameters()} == {id(p) for p in group["params"]}
    )
