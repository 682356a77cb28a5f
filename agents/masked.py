"""Statistics over the steps of a mask.

What is outside the mask is never read: it is selected away, not multiplied by 0, so a NaN there
stays there.
"""

from __future__ import annotations

import torch


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Returns the sum over the mask, of everything or along `dim`.

    Args:
        values: Any shape.
        mask: bool, the same shape.
        dim: Dimension to sum over; None is all.

    Examples:
        >>> values = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
        >>> masked_sum(values, values.isfinite(), dim=1)
        tensor([3., 3.])
    """
    return torch.where(mask, values, 0.0).sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Returns the mean over the mask, of everything or along `dim`; 0 where the mask is empty.

    Args:
        values: Any shape.
        mask: bool, the same shape.
        dim: Dimension to average over; None is all.

    Examples:
        >>> values = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
        >>> masked_mean(values, values.isfinite())
        tensor(2.)
    """
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)


def masked_var(values: torch.Tensor, mask: torch.Tensor, ddof: int = 1) -> torch.Tensor:
    """Returns the variance of everything inside the mask, a scalar.

    Args:
        values: Any shape.
        mask: bool, the same shape.
        ddof: 1 divides the squares by n − 1 (unbiased), 0 by n.

    Raises:
        ValueError: The mask has too few steps for a variance.

    Examples:
        >>> values = torch.tensor([1.0, 3.0, float("nan")])
        >>> masked_var(values, values.isfinite())
        tensor(2.)
    """
    count = int(mask.sum())
    if count <= ddof:
        raise ValueError(
            f"The mask has {count} steps, and a variance with ddof={ddof} needs {ddof + 1}; "
            "use a larger batch, or leave the batch out."
        )
    values = torch.where(mask, values, 0.0)
    deviations = values - masked_mean(values, mask)
    return masked_sum(deviations.square(), mask) / (count - ddof)


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    ddof: int = 1,
) -> torch.Tensor:
    """Returns (x − mean) / sqrt(var + eps) inside the mask, and 0 outside.

    Args:
        values: Any shape.
        mask: bool, the same shape.
        shift_mean: False adds the mean back, so that only the scale changes.
        eps: Added to the variance.
        ddof: See `masked_var`.

    Raises:
        ValueError: The mask has too few steps for a variance.

    Examples:
        >>> values = torch.tensor([1.0, 3.0, float("nan")])
        >>> masked_whiten(values, values.isfinite())
        tensor([-0.7071,  0.7071,  0.0000])
    """
    # Selected first: the gradient of NaN · 0 would be NaN everywhere.
    values = torch.where(mask, values, 0.0)
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask, ddof) + eps)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)
