"""When a completion ends, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from textrl_env.tasks import Sample, Task


class Finish(IntEnum):
    """Why a completion ended; `RUNNING` is 0."""

    RUNNING = 0
    EOS = 1
    STOP = 2
    TASK = 3
    LENGTH = 4


class Termination:
    r"""The one rule that ends a completion, for the environment and for the engines.

    End-of-sequence comes first, then a stop string, then the task's own end, then the limit.

    Args:
        decode: Maps a list of token id sequences to texts.
        eos_ids: End-of-sequence ids.
        stop: Stop strings.
        task: The task; its ``is_finished`` is asked only where it is overridden.
        max_new_tokens: Limit on the number of tokens.

    Examples:
        >>> from textrl_env.tasks import make_task
        >>> def decode(sequences):
        ...     return ["".join(chr(token) for token in tokens) for tokens in sequences]
        >>> task, tokens = make_task("addition"), np.array([52, 55, 10])
        >>> rule = Termination(decode, eos_ids=[0], stop=["\n"], task=task, max_new_tokens=8)
        >>> reason = rule.reasons(lambda i: tokens, tokens[-1:], np.array([3]), [task[0]])[0]
        >>> Finish(reason).name, rule.texts([tokens], [reason])[0]
        ('STOP', '47')
    """

    def __init__(
        self,
        decode: Callable[[Sequence[NDArray[np.int64]]], list[str]],
        eos_ids: Sequence[int],
        stop: Sequence[str],
        task: Task,
        max_new_tokens: int,
    ) -> None:
        self.decode = decode
        self.eos_ids = np.asarray(sorted(eos_ids), dtype=np.int64)
        self.stop = tuple(stop)
        self.task = task
        self.max_new_tokens = max_new_tokens
        self._task_ends = type(task).is_finished is not Task.is_finished
        self._reads_text = bool(self.stop) or self._task_ends

    def reasons(
        self,
        completion: Callable[[int], NDArray[np.int64]],
        last_tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
        samples: Sequence[Sample],
    ) -> NDArray[np.int8]:
        """Returns the `Finish` of each completion after its last token, int8 (n,).

        Args:
            completion: Gives the tokens of completion i so far, the last one included; called only
                where the rule needs text.
            last_tokens: The last token of each, int64 (n,).
            lengths: The number of tokens of each, int64 (n,).
            samples: The sample of each.
        """
        reasons = np.where(lengths >= self.max_new_tokens, Finish.LENGTH, Finish.RUNNING)
        if self._reads_text:
            texts = self.decode([completion(i) for i in range(len(lengths))])
            for i, text in enumerate(texts):
                if any(stop in text for stop in self.stop):
                    reasons[i] = Finish.STOP
                elif self._task_ends and self.task.is_finished(text, samples[i]):
                    reasons[i] = Finish.TASK
        if len(self.eos_ids) == 1:
            is_eos = last_tokens == self.eos_ids[0]
        else:
            is_eos = np.isin(last_tokens, self.eos_ids)
        return np.where(is_eos, Finish.EOS, reasons).astype(np.int8)

    def texts(self, completions: Sequence[NDArray[np.int64]], reasons: Sequence[int]) -> list[str]:
        """Returns the texts that are scored: without end-of-sequence, cut at the stop string."""
        eos, stop = int(Finish.EOS), int(Finish.STOP)  # looking a member up takes time
        texts = self.decode(
            [
                completion[:-1] if reason == eos else completion
                for completion, reason in zip(completions, reasons, strict=True)
            ]
        )
        return [
            text[: min(i for s in self.stop if (i := text.find(s)) >= 0)]
            if reason == stop
            else text
            for text, reason in zip(texts, reasons, strict=True)
        ]
