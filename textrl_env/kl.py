"""The KL divergence of the policy to the reference: per-token estimators, and the exact value.

With ℓ = log π(a|s) − log π_ref(a|s) and a drawn from π, the estimators of KL(π‖π_ref) are
(Schulman, "Approximating KL divergence", 2020):

==========================  =====================  =====================================
kind                        value                  gradient in expectation, as a loss
==========================  =====================  =====================================
``"k1"``, ``"kl"``          ℓ                      0: it teaches nothing
``"abs"``                   |ℓ|                    of neither KL
``"k2"``, ``"mse"``         ℓ² / 2                 ∇KL(π‖π_ref)
``"k3"``, ``"low_var_kl"``  exp(−ℓ) + ℓ − 1        ∇KL(π_ref‖π), the other direction
any of them with ``"+"``    that of its name       that of k2
==========================  =====================  =====================================

In a reward, where no gradient is taken, k1 is the exact one. Hence the defaults: k1 in the reward,
k2 or a ``"+"`` as a loss.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
# exp(20) is about 5e8: far from the overflow of float32.
_MAX_LOG_RATIO = 20.0


def kl_estimate(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kind: str = "k1",
    *,
    clamp: float | None = None,
) -> torch.Tensor:
    """Returns an estimate of KL(π‖π_ref) at each sampled token.

    Both log-probabilities must be of the distribution that was sampled from (temperature, masks).

    Args:
        logprobs: log π(a|s), any shape; gradients flow through it.
        ref_logprobs: log π_ref(a|s), the same shape.
        kind: ``"k1"`` or ``"kl"``, ``"abs"``, ``"k2"`` or ``"mse"``, ``"k3"`` or ``"low_var_kl"``;
            each with ``"+"`` at the end for the gradient of k2 (straight through).
        clamp: Bounds the value to ±clamp, and −ℓ to ±20 before the exponential of k3. Without a
            ``"+"`` the gradient is 0 where that binds: for k3 with the 10 of verl from −ℓ = 2.6
            on, the very tokens that are furthest off. None leaves the estimate as it is.

    Raises:
        ValueError: `kind` is unknown, or `clamp` is not positive.

    Examples:
        >>> ratio = torch.tensor([0.5, 2.0])  # π / π_ref
        >>> kl_estimate(ratio.log(), torch.zeros(2))
        tensor([-0.6931,  0.6931])
        >>> kl_estimate(ratio.log(), torch.zeros(2), "k3")
        tensor([0.3069, 0.1931])
    """
    name = kind.removesuffix("+")
    if name not in _KINDS:
        raise ValueError(
            f"The KL estimator is {kind!r}; use one of {_KINDS}, each with or without a '+'."
        )
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp is {clamp}; it must be positive, or None for no bound.")
    name = _ALIASES.get(name, name)
    log_ratio = logprobs - ref_logprobs
    squared = log_ratio.square() / 2
    if name == "k1":
        value = log_ratio
    elif name == "abs":
        value = log_ratio.abs()
    elif name == "k2":
        value = squared
    else:
        bounded = log_ratio if clamp is None else log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        # expm1: the two terms nearly cancel at small ratios.
        value = torch.expm1(-bounded) + bounded
    if clamp is not None:
        value = value.clamp(-clamp, clamp)
    if kind.endswith("+"):
        value = value.detach() + (squared - squared.detach())
    return value


def full_kl(logits: torch.Tensor, ref_logits: torch.Tensor, chunk_size: int = 256) -> torch.Tensor:
    """Returns KL(π‖π_ref) = Σ_a π(a)·(log π(a) − log π_ref(a)) over the whole vocabulary.

    Besides its arguments and their gradients it holds `chunk_size` rows of the vocabulary at a
    time, in the backward pass too, where a chunk is computed anew.

    Args:
        logits: Logits or log-probabilities of π, (..., V). −inf excludes a token.
        ref_logits: Those of π_ref, the same shape.
        chunk_size: Positions that are worked on at a time.

    Returns:
        Non-negative, (...), float32 or wider; infinite where π takes a token that π_ref excludes.

    Raises:
        ValueError: The shapes differ, or `chunk_size` is below 1.

    Examples:
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.75, 0.0])
        >>> full_kl(p.log(), q.log())
        tensor(0.1438)
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(
            f"logits have the shape {tuple(logits.shape)} and ref_logits "
            f"{tuple(ref_logits.shape)}; they must be of the same positions and vocabulary."
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1.")
    vocab_size = logits.shape[-1]
    chunks = zip(
        logits.reshape(-1, vocab_size).split(chunk_size),
        ref_logits.reshape(-1, vocab_size).split(chunk_size),
        strict=True,
    )
    divergences = [
        checkpoint(_full_kl, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    return torch.cat(divergences).view(logits.shape[:-1])


def _full_kl(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits, -1, dtype=dtype)
    log_q = torch.log_softmax(ref_logits, -1, dtype=dtype)
    p = log_p.exp()
    # 0·log 0 is 0, and −inf − −inf would be NaN.
    return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(-1)
