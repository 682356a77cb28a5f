"""How the losses of steps become one number.

=============================  ===================================================================
mode                           value, with l the losses and m the mask
=============================  ===================================================================
``"token-mean"``               Σ l·m / Σ m: every token counts the same (DAPO, arXiv:2503.14476)
``"seq-mean-token-sum"``       mean over sequences of Σ_t l·m
``"seq-mean-token-mean"``      mean over sequences of Σ_t l·m / Σ_t m (GRPO, arXiv:2402.03300)
``"seq-mean-token-sum-norm"``  seq-mean-token-sum divided by a constant length (Dr. GRPO,
                               arXiv:2503.20783)
=============================  ===================================================================

Sequences without a step in the mask are in no denominator.
"""

from __future__ import annotations

import torch

from agents.masked import masked_sum

_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def aggregation_weights(
    mask: torch.Tensor,
    mode: str,
    norm_length: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Returns a weight for each step; the weighted sum of the losses is their aggregate.

    The denominators are those of the whole `mask`. So the rows of the weights can be shared out
    over micro-batches, whose weighted sums then add up to the aggregate of the whole, and their
    gradients to its gradient.

    Args:
        mask: Steps that count, bool (B, T).
        mode: One of the modes in the table of the module.
        norm_length: The constant length of ``"seq-mean-token-sum-norm"``, such as the limit on
            new tokens; the other modes do not use it.
        dtype: Data type of the weights.

    Returns:
        (B, T), 0 outside the mask.

    Raises:
        ValueError: The mode is unknown, or it needs a `norm_length` and has none above 0.

    Examples:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> aggregation_weights(mask, "token-mean")
        tensor([[0.3333, 0.3333],
                [0.3333, 0.0000]])
        >>> aggregation_weights(mask, "seq-mean-token-mean")
        tensor([[0.2500, 0.2500],
                [0.5000, 0.0000]])
    """
    if mode not in _MODES:
        raise ValueError(f"The loss aggregation is {mode!r}; use one of {_MODES}.")
    lengths = mask.sum(1, keepdim=True)
    if mode == "token-mean":
        denominators = lengths.sum()
    else:
        denominators = (lengths > 0).sum()
    if mode == "seq-mean-token-mean":
        denominators = denominators * lengths
    elif mode == "seq-mean-token-sum-norm":
        # Not the width of the mask: that changes with the padding.
        if norm_length is None or norm_length < 1:
            raise ValueError(
                f"norm_length is {norm_length}, but 'seq-mean-token-sum-norm' divides by a "
                "constant length; pass one, such as max_new_tokens."
            )
        denominators = denominators * norm_length
    return mask.to(dtype) / denominators.clamp(min=1)


def aggregate(
    loss: torch.Tensor, mask: torch.Tensor, mode: str, norm_length: int | None = None
) -> torch.Tensor:
    """Returns the losses of a whole batch as one number; 0 where the mask is empty.

    Args:
        loss: Loss of each step, (B, T); what is outside the mask is never read.
        mask: Steps that count, bool (B, T).
        mode: One of the modes in the table of the module.
        norm_length: See `aggregation_weights`.

    Raises:
        ValueError: As `aggregation_weights`.

    Examples:
        >>> loss = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 0.0, 0.0]])
        >>> mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
        >>> aggregate(loss, mask, "token-mean"), aggregate(loss, mask, "seq-mean-token-sum")
        (tensor(1.4000), tensor(3.5000))
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    weights = aggregation_weights(mask, mode, norm_length, dtype=dtype)
    return masked_sum(loss * weights, mask)
