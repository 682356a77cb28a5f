"""Log-probabilities of given completions under a causal language model, in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from textrl_env.token_mask import TokenMask


def pad_left(
    sequences: Sequence[NDArray[np.int64]], fill: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the sequences right-aligned, (n, longest), and the mask of real tokens.

    Examples:
        >>> pad_left([np.array([1, 2]), np.array([3])])[0].tolist()
        [[1, 2], [0, 3]]
    """
    ids, mask = pad_right([s[::-1] for s in sequences], fill)
    return ids[:, ::-1].copy(), mask[:, ::-1].copy()


def pad_right(
    sequences: Sequence[NDArray[Any]], fill: int = 0, dtype: Any = np.int64
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Returns the sequences left-aligned, (n, longest), and the mask of real tokens.

    Examples:
        >>> pad_right([np.array([1, 2]), np.array([3])], fill=9)[0].tolist()
        [[1, 2], [3, 9]]
    """
    lengths = np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    ids = np.full(mask.shape, fill, dtype=dtype)
    ids[mask] = np.concatenate(sequences)
    return ids, mask


def completion_logits(
    model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_ids: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the model over prompts and completions.

    Args:
        model: A causal language model.
        prompt_ids: Prompts, left-padded, int64 (n, P).
        prompt_mask: True at prompt tokens, bool (n, P).
        completion_ids: Completions, right-padded, int64 (n, T).
        mask: True at completion tokens, bool (n, T).

    Returns:
        The logits that each completion token was drawn from, (n, T, V), and the hidden states
        that they were computed from, (n, T, H).
    """
    hidden: list[torch.Tensor] = []
    # The head's input is the one hidden state that every architecture has, final norm included.
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _module, args: hidden.append(args[0])
    )
    attention_mask = torch.cat([prompt_mask, mask], dim=1).long()
    try:
        logits = model(
            # The last token predicts nothing that is asked for.
            input_ids=torch.cat([prompt_ids, completion_ids], dim=1)[:, :-1],
            attention_mask=attention_mask[:, :-1],
            # Padding has position 0: it is attended by nobody, and stays inside the table.
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0)[:, :-1],
            use_cache=False,
            logits_to_keep=completion_ids.shape[1],
        ).logits
    finally:
        hook.remove()
    return logits, hidden[0]


def log_distribution(
    logits: torch.Tensor,
    num_tokens: torch.Tensor,
    temperature: float = 1.0,
    token_mask: TokenMask | None = None,
) -> torch.Tensor:
    """Returns the log-probabilities that are sampled from, float32 or wider, (..., V).

    Temperature divides the logits, never the log-probabilities; masked tokens get −inf, so what
    is left is renormalised.

    Args:
        logits: (..., V).
        num_tokens: Number of tokens generated before each position, (...).
        temperature: Divides the logits.
        token_mask: Tokens that may be generated.

    Examples:
        >>> log_distribution(torch.tensor([1.0, 3.0]), torch.tensor(0), temperature=2.0).exp()
        tensor([0.2689, 0.7311])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if token_mask is not None:
        logits = token_mask.apply(logits, num_tokens)
    return torch.log_softmax(logits, dim=-1)


@torch.inference_mode()
def completion_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[NDArray[np.int64]],
    completions: Sequence[NDArray[np.int64]],
    temperature: float = 1.0,
    token_mask: TokenMask | None = None,
    max_tokens: int = 16_384,
) -> NDArray[np.float64]:
    """Returns log π(token) of each completion token, right-padded with 0, (n, T).

    Args:
        model: A causal language model.
        prompts: Token ids of each prompt.
        completions: Token ids of each completion, at least one token each.
        temperature: Divides the logits.
        token_mask: Tokens that may be generated.
        max_tokens: Bounds one forward pass, padding included; the result does not depend on it.
    """
    completion_ids, mask = pad_right(completions)
    logprobs = np.zeros(completion_ids.shape, dtype=np.float64)
    total = np.fromiter((len(p) + len(c) for p, c in zip(prompts, completions, strict=True)), int)
    order = np.argsort(total, kind="stable")
    start = 0
    while start < len(order):
        # Sorted by length, so the last row of a micro-batch is its longest.
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * total[order[stop]] <= max_tokens:
            stop += 1
        rows = order[start:stop]
        t = int(mask[rows].sum(1).max())
        prompt_ids, prompt_mask = pad_left([prompts[i] for i in rows])
        tensors = [
            torch.from_numpy(x).to(model.device)
            for x in (prompt_ids, prompt_mask, completion_ids[rows, :t], mask[rows, :t])
        ]
        logits, _ = completion_logits(model, *tensors)
        positions = torch.arange(t, device=model.device).expand(len(rows), t)
        log_dist = log_distribution(logits, positions, temperature, token_mask)
        selected = log_dist.gather(-1, tensors[2][..., None])[..., 0]
        logprobs[rows, :t] = np.where(mask[rows, :t], selected.double().cpu().numpy(), 0.0)
        start = stop
    return logprobs
