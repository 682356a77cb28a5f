import dataclasses

import pytest
import torch

from agents.advantages import group_advantages
from agents.aggregation import aggregation_weights
from agents.objectives import clipped_objective
from agents.presets import PRESETS
from textrl_env.kl import kl_estimate


@pytest.fixture(params=PRESETS)
def preset(request):
    return PRESETS[request.param]


def test_every_constant_is_accepted(preset):
    returns, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    assert group_advantages(returns, groups, **preset.group_arguments).isfinite().all()
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert aggregation_weights(mask, preset.loss_aggregation).sum().item() == pytest.approx(1)
    zeros = torch.zeros(1, 2)
    loss, _ = clipped_objective(
        zeros, zeros, zeros + 1, preset.clip_range, None, preset.clip_range_lower
    )
    assert loss.tolist() == [[-1, -1]]
    assert (kl_estimate(zeros, zeros, preset.kl_estimator) == 0).all()
    assert (kl_estimate(zeros, zeros, preset.kl_loss, clamp=preset.kl_clamp) == 0).all()


@pytest.mark.parametrize(
    ("name", "expected", "digits"), [("verl", 0.86602, 5), ("trl", 0.86588, 5)]
)
def test_checked_group_advantages(name, expected, digits):
    returns, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    advantages = group_advantages(returns.double(), groups, **PRESETS[name].group_arguments)
    assert round(advantages[0].item(), digits) == expected


def test_checked_dual_clip_and_dead_zone():
    assert PRESETS["verl"].clip_range_lower == 3.0
    assert PRESETS["trl"].clip_range_lower is None
    logprobs = torch.tensor([-2.7], requires_grad=True)
    verl = PRESETS["verl"]
    kl_estimate(logprobs, torch.zeros(1), verl.kl_loss, clamp=verl.kl_clamp).sum().backward()
    assert logprobs.grad.item() == 0


def test_presets_cannot_be_changed(preset):
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.clip_range = 0.3
    with pytest.raises(TypeError):
        PRESETS["mine"] = preset
