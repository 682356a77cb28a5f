"""The built-in engine: batched generation in PyTorch with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from agents.sampling import sample_tokens
from textrl_env.core import Prompt
from textrl_env.decoding import SlotDecoder
from textrl_env.logprobs import log_distribution
from textrl_env.termination import Finish, Termination
from textrl_env.token_mask import TokenMask


@dataclass
class Completions:
    """Generated completions.

    Attributes:
        tokens: Token ids of each, up to and including the one that ended it.
        logprobs: log π of each token under the distribution sampled from, float64, natural.
        reasons: Why each ended.
    """

    tokens: list[NDArray[np.int64]]
    logprobs: list[NDArray[np.float64]]
    reasons: NDArray[np.int8]


class TorchEngine:
    """Generates with the trainer's own weights, so that nothing has to be synchronised.

    Equal prompts are prefilled once and their cache is copied to the siblings. Finished sequences
    leave the batch.

    Args:
        model: The policy's causal language model.
        max_slots: Sequences that are generated at a time.
    """

    def __init__(self, model: PreTrainedModel, max_slots: int = 1024) -> None:
        self.model = model
        self.max_slots = max_slots

    def generate(
        self,
        prompts: Sequence[Prompt],
        termination: Termination,
        token_mask: TokenMask,
        temperature: float = 1.0,
        uniforms: NDArray[np.float64] | None = None,
    ) -> Completions:
        """Generates one completion for each prompt.

        Args:
            prompts: Prompts; equal objects are siblings and share their prefill.
            termination: Ends a completion.
            token_mask: Tokens that may be generated.
            temperature: Divides the logits.
            uniforms: Numbers that the tokens are drawn at, (n, max_new_tokens), see
                `agents.sampling`; None takes the likeliest token instead.

        Returns:
            The completions, in the order of the prompts.
        """
        parts = []
        for start in range(0, len(prompts), self.max_slots):
            rows = slice(start, start + self.max_slots)
            part_uniforms = None if uniforms is None else uniforms[rows]
            parts.append(
                self._generate(prompts[rows], termination, token_mask, temperature, part_uniforms)
            )
        return Completions(
            [tokens for part in parts for tokens in part.tokens],
            [logprobs for part in parts for logprobs in part.logprobs],
            np.concatenate([part.reasons for part in parts]),
        )

    @torch.inference_mode()
    def _generate(
        self,
        prompts: Sequence[Prompt],
        termination: Termination,
        token_mask: TokenMask,
        temperature: float,
        uniforms: NDArray[np.float64] | None,
    ) -> Completions:
        n, limit = len(prompts), termination.max_new_tokens
        longest = max(len(prompt.ids) for prompt in prompts)
        decoder = SlotDecoder(self.model, n, longest + limit)
        logits = self._prefill(decoder, prompts)
        draws = None if uniforms is None else torch.from_numpy(uniforms)

        tokens = np.zeros((n, limit), dtype=np.int64)
        logprobs = np.zeros((n, limit))
        reasons = np.zeros(n, dtype=np.int8)
        active = np.arange(n)
        for t in range(limit):
            generated = torch.full((len(active),), t, device=logits.device)
            log_dist = log_distribution(logits, generated, temperature, token_mask)
            if draws is None:
                chosen = log_dist.argmax(-1)
            else:
                chosen = sample_tokens(log_dist, draws[active, t])
            tokens[active, t] = chosen.cpu().numpy()
            logprobs[active, t] = log_dist.gather(1, chosen[:, None])[:, 0].double().cpu().numpy()
            reasons[active] = termination.reasons(
                lambda i, rows=active, t=t: tokens[rows[i], : t + 1],  # type: ignore[misc]
                tokens[active, t],
                np.full(len(active), t + 1),
                [prompts[i].sample for i in active.tolist()],
            )
            active = active[reasons[active] == Finish.RUNNING]
            if not len(active):
                break
            logits = decoder.advance(active, tokens[active, t : t + 1])
        lengths = decoder.lengths - [len(prompt.ids) for prompt in prompts] + 1
        return Completions(
            [row[:length] for row, length in zip(tokens, lengths, strict=True)],
            [row[:length] for row, length in zip(logprobs, lengths, strict=True)],
            reasons,
        )

    @staticmethod
    def _prefill(decoder: SlotDecoder, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Fills each distinct prompt once; returns the logits after every prompt, (n, V)."""
        first: dict[int, int] = {}
        leaders = np.array([first.setdefault(id(p), i) for i, p in enumerate(prompts)])
        distinct = np.unique(leaders)
        logits = decoder.advance(distinct, [prompts[i].ids for i in distinct.tolist()])
        siblings = np.flatnonzero(leaders != np.arange(len(prompts)))
        if len(siblings):
            decoder.copy(leaders[siblings], siblings)
        return logits[torch.from_numpy(np.searchsorted(distinct, leaders)).to(logits.device)]
