"""The options of ``TextRL-v0``, shared by the single and the vector environment."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from textrl_env.rewards import Reward
from textrl_env.tasks import Task

KLMode = Literal["policy", "reference", "none"]
KLEstimator = Literal["k1", "k2", "k3", "abs"]
OnLimit = Literal["terminate", "truncate"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]

_CHOICES = {
    "kl_mode": get_args(KLMode),
    "kl_estimator": get_args(KLEstimator),
    "on_limit": get_args(OnLimit),
    "dtype": get_args(DType),
}


@dataclass(frozen=True)
class TextRLConfig:
    """What ``gym.make("TextRL-v0", ...)`` and ``gym.make_vec("TextRL-v0", ...)`` accept.

    Attributes:
        task: Name of a registered task, or a `Task`.
        task_kwargs: Arguments for the named task, such as ``{"digits": 2, "split": "test"}``.
        model: ``"tiny"``, a local directory or a hub id. It gives the tokenizer, and the weights
            of the reference unless `reference` names another.
        reference: Model that log π_ref comes from; None is `model` itself, the initial policy.
            With ``kl_mode="none"`` nothing is scored unless a reference is named here.
        reward: Callable that replaces the task's score, see `textrl_env.rewards.Reward`.
        reward_timeout: Seconds that one reward may take. Setting it moves the scoring to a worker
            process, so that the limit holds for code that never yields.
        on_error: What a reward that fails becomes: ``"raise"``, ``"mask"`` (the episode leaves the
            loss) or a number.
        kl_mode: ``"reference"`` adds β·log π_ref(a|s) to the reward, and the agent must subtract
            β·log π_old(a|s). ``"policy"`` subtracts β·k(log π − log π_ref) and needs
            ``report_logprobs`` before each step. ``"none"`` adds nothing.
        kl_coef: β, in units of reward per nat.
        kl_estimator: Estimator k of mode ``"policy"``: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        max_prompt_tokens: Longest prompt, in tokens; None measures the task's prompts.
        max_new_tokens: Longest completion, in tokens; None is the task's suggestion.
        min_new_tokens: End-of-sequence is masked before this many tokens.
        allowed_tokens: Token ids that may be generated; end-of-sequence is always among them.
            None allows the whole vocabulary.
        stop: Strings that end the completion; None is the task's own. The text that is scored
            ends before the stop string.
        on_limit: Whether reaching `max_new_tokens` terminates the episode (the length is part of
            the task, and the completion is scored) or truncates it (the completion is not scored,
            the agent bootstraps).
        temperature: Divides the logits of the reference, as the agent divides the policy's.
        device: Device of the reference; ``"auto"`` takes a GPU where there is one.
        dtype: Data type of the reference; ``"auto"`` is float32 on a CPU, bfloat16 on a GPU.

    Raises:
        ValueError: An option is outside its range. The message names the option and the value.

    Examples:
        >>> TextRLConfig(task="reverse", kl_mode="none").reference_name is None
        True
        >>> TextRLConfig(kl_coef=-1)
        Traceback (most recent call last):
        ValueError: kl_coef is -1; it must be finite and not negative.
    """

    task: str | Task = "addition"
    task_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str | os.PathLike[str] = "tiny"
    reference: str | os.PathLike[str] | None = None
    reward: Callable[..., Any] | Reward | None = None
    reward_timeout: float | None = None
    on_error: Literal["raise", "mask"] | float = "raise"
    kl_mode: KLMode = "reference"
    kl_coef: float = 0.05
    kl_estimator: KLEstimator = "k1"
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    allowed_tokens: Sequence[int] | None = None
    stop: Sequence[str] | None = None
    on_limit: OnLimit = "terminate"
    temperature: float = 1.0
    device: str = "auto"
    dtype: DType = "auto"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            self._check(name, "one of " + ", ".join(choices), choices.__contains__)
        self._check("kl_coef", "finite and not negative", lambda v: _is_number(v) and v >= 0)
        self._check(
            "temperature",
            "positive and finite (for greedy decoding predict with deterministic=True)",
            lambda v: _is_number(v) and v > 0,
        )
        self._check(
            "reward_timeout",
            "a positive number of seconds, or None",
            lambda v: v is None or (_is_number(v) and v > 0),
        )
        self._check("model", "a name or directory", lambda v: isinstance(v, str | os.PathLike))
        self._check(
            "reference",
            "a name or directory, or None",
            lambda v: v is None or isinstance(v, str | os.PathLike),
        )
        for name in ("max_prompt_tokens", "max_new_tokens"):
            self._check(
                name,
                "a whole number of at least 1, or None",
                lambda v: v is None or (_is_whole(v) and v >= 1),
            )
        self._check(
            "min_new_tokens",
            "a whole number and not negative",
            lambda v: _is_whole(v) and v >= 0,
        )
        self._check(
            "stop",
            "a list of strings that are not empty, or None",
            lambda v: (
                v is None
                or (isinstance(v, Iterable) and not isinstance(v, str) and all(map(_is_text, v)))
            ),
        )
        self._check(
            "task_kwargs", "a mapping of keyword arguments", lambda v: isinstance(v, Mapping)
        )

    def _check(self, name: str, expected: str, accepts: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        if not accepts(value):
            raise ValueError(f"{name} is {value!r}; it must be {expected}.")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> TextRLConfig:
        """Returns the configuration of keyword arguments.

        Raises:
            TypeError: A keyword is unknown.
            ValueError: An option is outside its range.

        Examples:
            >>> TextRLConfig.from_options({"kl_coeff": 0.1})
            Traceback (most recent call last):
            TypeError: TextRL-v0 has no option 'kl_coeff'; did you mean 'kl_coef'?
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"use {', '.join(known)}."
                raise TypeError(f"TextRL-v0 has no option {name!r}; {hint}")
        return cls(**options)

    @property
    def reference_name(self) -> str | os.PathLike[str] | None:
        """Name of the model that is scored, or None where no reference is needed."""
        if self.reference is not None:
            return self.reference
        return None if self.kl_mode == "none" else self.model


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
