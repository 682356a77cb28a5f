import json
import math

import pytest

from agents.kl_control import AdaptiveKL, FixedKL, KLController, TwoSidedKL

CONTROLLERS = [
    FixedKL(0.05),
    AdaptiveKL(0.05, target=6.0, horizon=1000),
    TwoSidedKL(0.05, target=0.01, factor=1.5),
]


def test_fixed_stays():
    controller = FixedKL(0.05)
    for kl in (0.0, 100.0, -1.0):
        controller.update(kl, 64)
    assert controller.coef == 0.05


@pytest.mark.parametrize(
    ("kl", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (100.0, 0.2), (0.0, -0.2), (-3.0, -0.2)],
)
def test_adaptive_is_the_formula(kl, error):
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.update(kl, 100)
    assert controller.coef == pytest.approx(0.1 * (1 + error * 100 / 1000))


def test_adaptive_compounds():
    controller = AdaptiveKL(1.0, target=1.0, horizon=100)
    for _ in range(10):
        controller.update(10.0, 10)
    assert controller.coef == pytest.approx(1.02**10)


def test_adaptive_holds_a_simulated_kl_at_its_target():
    # A policy whose KL is inverse to β.
    controller = AdaptiveKL(1.0, target=4.0, horizon=64)
    for _ in range(300):
        controller.update(1.0 / controller.coef, 64)
    assert 1.0 / controller.coef == pytest.approx(4.0, rel=0.01)


def test_adaptive_never_turns_negative():
    controller = AdaptiveKL(0.1, target=6.0, horizon=100)
    controller.update(0.0, 499)
    assert controller.coef > 0
    with pytest.raises(ValueError, match="500 samples and horizon is 100"):
        controller.update(0.0, 500)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.01, 0.1), (0.0149, 0.1), (0.0151, 0.2), (0.0067, 0.1), (0.0066, 0.05), (-1.0, 0.05)],
)
def test_two_sided_is_the_rule(kl, expected):
    controller = TwoSidedKL(0.1, target=0.01)
    controller.update(kl, 64)
    assert controller.coef == pytest.approx(expected)


def test_two_sided_with_another_factor():
    controller = TwoSidedKL(0.1, target=0.01, factor=1.5)
    controller.update(1.0, 64)
    assert controller.coef == pytest.approx(0.15)


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda c: type(c).__name__)
def test_resumed_equals_uninterrupted(controller):
    kls = [20.0, 0.001, 3.0, 0.01, 7.0]
    whole = controller.from_state_dict(controller.state_dict())
    first = controller.from_state_dict(controller.state_dict())
    for kl in kls:
        whole.update(kl, 8)
    for kl in kls[:2]:
        first.update(kl, 8)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = type(controller).from_state_dict(state)
    loaded = controller.from_state_dict(controller.state_dict())
    loaded.load_state_dict(state)
    assert resumed == loaded == first
    for kl in kls[2:]:
        resumed.update(kl, 8)
        loaded.update(kl, 8)
    assert resumed.coef == loaded.coef == whole.coef


@pytest.mark.parametrize("controller", CONTROLLERS[1:], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_kl_that_is_not_finite(controller, kl):
    coef = controller.coef
    with pytest.raises(ValueError, match=f"The measured KL is {kl}"):
        controller.update(kl, 8)
    assert controller.coef == coef


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedKL(-0.1), "coef is -0.1; it must be finite and not negative"),
        (lambda: FixedKL(math.nan), "coef is nan"),
        (lambda: AdaptiveKL(0.0, 6.0, 1000), "coef is 0.0; it must be finite and positive"),
        (lambda: AdaptiveKL(0.1, 0.0, 1000), "target is 0.0"),
        (lambda: AdaptiveKL(0.1, 6.0, 0), "horizon is 0"),
        (lambda: TwoSidedKL(0.1, -1.0), "target is -1.0"),
        (lambda: TwoSidedKL(0.1, 1.0, 1.0), "factor is 1.0; it must be finite and above 1"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_state_of_another_class_is_refused():
    with pytest.raises(TypeError):
        FixedKL(0.1).load_state_dict(AdaptiveKL(0.1, 6.0, 1000).state_dict())


def test_fixed_at_0_is_no_kl():
    assert FixedKL(0.0).coef == 0


def test_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        KLController(0.1)
