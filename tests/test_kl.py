import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from textrl_env.kl import full_kl, kl_estimate

KINDS = ["k1", "abs", "k2", "k3"]
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def four_actions(seed=0):
    """Logits of a policy and log-probabilities of a reference over four actions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, generator=generator, dtype=torch.float64)
    reference = torch.randn(4, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.log_softmax(reference, 0)


def gradient(function, logits):
    (result,) = torch.autograd.grad(function(torch.log_softmax(logits, 0)), logits)
    return result


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", -0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 0.5 - 1)],
)
def test_values(kind, expected):
    logprobs, ref = torch.tensor([-2.0], dtype=torch.float64), torch.tensor([-1.5]).double()
    assert kl_estimate(logprobs, ref, kind).item() == pytest.approx(expected)
    assert kl_estimate(logprobs, ref, kind + "+").item() == pytest.approx(expected)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("suffix", ["", "+"])
def test_aliases(alias, suffix):
    logprobs = torch.linspace(-3, 0, 7, requires_grad=True)
    ref = torch.full((7,), -1.0)
    results = []
    for kind in (alias, ALIASES[alias]):
        value = kl_estimate(logprobs, ref, kind + suffix)
        (grad,) = torch.autograd.grad(value.sum(), logprobs)
        results.append((value, grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_default_is_k1():
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-3.0])
    assert kl_estimate(logprobs, ref).tolist() == [2.0]


@given(seed=st.integers(0, 2**31), kind=st.sampled_from(KINDS))
@settings(max_examples=50, deadline=None)
def test_straight_through_has_the_value_of_its_name_and_the_gradient_of_k2(seed, kind):
    generator = torch.Generator().manual_seed(seed)
    logprobs = (3 * torch.randn(8, generator=generator)).requires_grad_()
    ref = 3 * torch.randn(8, generator=generator)
    through = kl_estimate(logprobs, ref, kind + "+")
    assert torch.equal(through, kl_estimate(logprobs, ref, kind))
    (grad,) = torch.autograd.grad(through.sum(), logprobs)
    assert torch.allclose(grad, (logprobs - ref).detach())


@given(seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_k1_and_k3_estimate_the_kl_without_bias(seed):
    logits, ref = four_actions(seed)
    log_p = torch.log_softmax(logits, 0).detach()
    exact = (log_p.exp() * (log_p - ref)).sum().item()
    for kind in ("k1", "k3"):
        expected = (log_p.exp() * kl_estimate(log_p, ref, kind)).sum().item()
        assert expected == pytest.approx(exact, abs=1e-12)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_all_but_k1_are_never_negative(seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref = 5 * torch.randn(2, 16, generator=generator)
    for kind in ("abs", "k2", "k3"):
        assert (kl_estimate(logprobs, ref, kind) >= 0).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "exact"),
    [(kind, kind == "k2") for kind in KINDS] + [(f"{kind}+", True) for kind in KINDS],
)
def test_as_a_loss_over_four_actions(kind, exact, seed):
    logits, ref = four_actions(seed)
    p = torch.softmax(logits, 0).detach()
    loss = gradient(lambda log_p: (p * kl_estimate(log_p, ref, kind)).sum(), logits)
    expected = gradient(lambda log_p: (log_p.exp() * (log_p - ref)).sum(), logits)
    error = float((loss - expected).norm() / expected.norm())
    assert error < 1e-12 if exact else error > 0.05
    if kind == "k1":
        assert loss.abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "exact"), [("k1", True), ("k2", False), ("k3", False), ("abs", False)]
)
def test_as_a_reward_over_four_actions(kind, exact, seed):
    logits, ref = four_actions(seed)
    log_p = torch.log_softmax(logits, 0).detach()
    cost = kl_estimate(log_p, ref, kind)
    reward = gradient(lambda log_pi: (log_p.exp() * cost * log_pi).sum(), logits)
    expected = gradient(lambda log_pi: (log_pi.exp() * (log_pi - ref)).sum(), logits)
    error = float((reward - expected).norm() / expected.norm())
    assert error < 1e-12 if exact else error > 0.05


def test_k3_of_nearly_equal_probabilities_keeps_its_digits():
    logprobs = torch.tensor([1e-4])
    value = kl_estimate(logprobs, torch.zeros(1), "k3").item()
    assert value == pytest.approx(5e-9, rel=0.05)


def test_clamp_is_that_of_verl():
    # −ℓ to ±20, the result to ±10.
    logprobs, ref = torch.tensor([-100.0, -2.0, 100.0]), torch.zeros(3)
    value = kl_estimate(logprobs, ref, "k3", clamp=10.0)
    assert value.tolist() == pytest.approx([10.0, math.exp(2) - 3, 10.0], abs=1e-5)
    # ℓ = 5 gives 4.0067, inside.
    assert kl_estimate(torch.tensor([5.0]), torch.zeros(1), "k3", clamp=10.0).item() < 10
    assert kl_estimate(torch.tensor([-30.0]), torch.zeros(1), "k1", clamp=10.0).item() == -10


@pytest.mark.parametrize(("kind", "clamp"), [("k3", 10.0), ("k3+", 10.0), ("k3", None)])
def test_dead_zone_of_the_clamp_starts_at_2_6(kind, clamp):
    for distance, dead in ((2.5, False), (2.7, kind == "k3" and clamp is not None)):
        logprobs = torch.tensor([-distance], requires_grad=True)
        kl_estimate(logprobs, torch.zeros(1), kind, clamp=clamp).sum().backward()
        assert (logprobs.grad == 0).all() == dead


def test_clamp_keeps_the_gradient_finite_far_out():
    logprobs = torch.tensor([-500.0, 500.0], requires_grad=True)
    kl_estimate(logprobs, torch.zeros(2), "k3", clamp=10.0).sum().backward()
    assert torch.equal(logprobs.grad, torch.zeros(2))


@pytest.mark.parametrize("kind", ["k4", "", "+", "k1++", "full", "KL"])
def test_unknown_kind(kind):
    with pytest.raises(ValueError, match="use one of") as error:
        kl_estimate(torch.zeros(1), torch.zeros(1), kind)
    assert repr(kind) in str(error.value)
    assert "low_var_kl" in str(error.value)


@pytest.mark.parametrize("clamp", [0.0, -1.0, math.nan])
def test_clamp_must_be_positive(clamp):
    with pytest.raises(ValueError, match=r"clamp is .* positive"):
        kl_estimate(torch.zeros(1), torch.zeros(1), clamp=clamp)


def test_masked_positions_do_not_leak_into_gradients():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ref = torch.tensor([-1.5, math.nan])
    mask = torch.tensor([True, False])
    for kind in ("k1", "abs", "k2", "k3", "k3+"):
        # As callers do: what is masked was selected away before it got here.
        chosen = torch.where(mask, logprobs, 0.0)
        value = torch.where(mask, kl_estimate(chosen, ref, kind), 0.0).sum()
        (grad,) = torch.autograd.grad(value, logprobs)
        assert value.isfinite()
        assert grad[1] == 0


@given(
    seed=st.integers(0, 2**31),
    positions=st.integers(0, 7),
    chunk_size=st.integers(1, 9),
    vocab_size=st.integers(1, 6),
)
@settings(max_examples=50, deadline=None)
def test_full_kl_equals_torch_for_every_chunk_size(seed, positions, chunk_size, vocab_size):
    generator = torch.Generator().manual_seed(seed)
    shape = (positions, 2, vocab_size)
    logits = (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    ref = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(shape[:-1], generator=generator, dtype=torch.float64)
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(ref, -1)
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    value = full_kl(logits, ref, chunk_size)
    assert value.shape == shape[:-1]
    assert torch.allclose(value, expected, atol=1e-12)
    (grad,) = torch.autograd.grad((weights * value).sum(), logits)
    (expected_grad,) = torch.autograd.grad((weights * expected).sum(), logits)
    assert torch.allclose(grad, expected_grad, atol=1e-12)
    assert (value > -1e-12).all()


def test_full_kl_gradient_is_the_closed_form():
    logits, ref = four_actions()
    log_p = torch.log_softmax(logits, 0).detach()
    kl = (log_p.exp() * (log_p - ref)).sum()
    full_kl(logits, ref).backward()
    assert torch.allclose(logits.grad, log_p.exp() * (log_p - ref - kl), atol=1e-12)


def test_full_kl_of_log_probabilities_is_that_of_logits():
    logits, ref = four_actions()
    assert torch.allclose(full_kl(torch.log_softmax(logits, 0), ref + 7), full_kl(logits, ref))


def test_full_kl_with_excluded_tokens():
    inf = math.inf
    logits = torch.tensor([[0.0, 0.0, -inf], [0.0, -inf, -inf]], requires_grad=True)
    ref = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, -inf]])
    value = full_kl(logits, ref)
    assert value.tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
    value.sum().backward()
    assert logits.grad.isfinite().all()
    assert full_kl(ref[:1], torch.tensor([[0.0, -inf, -inf]])).item() == inf


def test_full_kl_is_float32_for_half_precision():
    logits = torch.randn(3, 5, dtype=torch.bfloat16)
    value = full_kl(logits, torch.zeros(3, 5, dtype=torch.bfloat16))
    assert value.dtype == torch.float32
    assert torch.allclose(value, full_kl(logits.float(), torch.zeros(3, 5)))


class Storages(TorchDispatchMode):
    """Sizes, in elements, of the storages that operations return."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return result


def test_full_kl_holds_no_more_than_a_chunk():
    logits, ref = torch.randn(64, 10, requires_grad=True), torch.randn(64, 10)
    arguments = {tensor.untyped_storage().data_ptr() for tensor in (logits, ref)}
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with Storages() as storages, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = full_kl(logits, ref, chunk_size=4)
    made = {pointer: size for pointer, size in storages.sizes.items() if pointer not in arguments}
    # Chunks of 4 × 10, and the 64 results.
    assert max(made.values()) <= 64
    # What is kept for the backward pass is the arguments alone.
    assert set(saved) <= arguments
    value.sum().backward()
    assert logits.grad.isfinite().all()


def test_full_kl_draws_nothing_from_the_global_generator():
    state = torch.get_rng_state()
    full_kl(torch.randn(2, 3, generator=torch.Generator()), torch.zeros(2, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_full_kl_of_different_shapes():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) and ref_logits \(2, 4\)"):
        full_kl(torch.zeros(2, 3), torch.zeros(2, 4))


def test_full_kl_chunk_size_must_be_positive():
    with pytest.raises(ValueError, match="chunk_size is 0"):
        full_kl(torch.zeros(2, 3), torch.zeros(2, 3), chunk_size=0)


def test_package_does_not_import_torch():
    code = "import sys, textrl_env; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
