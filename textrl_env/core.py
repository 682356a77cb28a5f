"""Token generation as a batch of Markov decision processes: the one transition core.

A state is a prompt and the tokens generated so far, an action is the next token. The single
environment is this core with one slot, the vector environment with many, and whole completions
from an engine are scored by `TokenMDP.score_completions` with the same rules.
"""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from textrl_env import models
from textrl_env.config import TextRLConfig
from textrl_env.rewards import Scorer
from textrl_env.tasks import Sample, make_task
from textrl_env.termination import Finish, Termination
from textrl_env.token_mask import TokenMask

if TYPE_CHECKING:
    from textrl_env.reference import Reference

# Encoded prompts that are kept.
_CACHED_PROMPTS = 65_536
# Prompts that are measured where max_prompt_tokens is not given.
_MEASURED_PROMPTS = 10_000
# Steps without a consumer of kl_mode="reference" before the environment says so.
_CONSUMER_PATIENCE = 1_000


@dataclass(frozen=True)
class Prompt:
    """A prompt of the task as tokens."""

    sample: Sample
    ids: NDArray[np.int64]
    text: str


class Ending(NamedTuple):
    """What is known at the end of an episode."""

    text: str
    prompt: str
    answer: str | None
    correct: bool
    finish_reason: str
    reward_error: str | None
    masked: bool


class Failure(NamedTuple):
    """A reward that failed, and whether the episode must therefore leave the loss."""

    error: str
    masked: bool


@dataclass
class Transition:
    """One step of n slots. Arrays are (n,), float64 unless said otherwise.

    Attributes:
        rewards: task_rewards − kl_coef · kl, to the bit.
        task_rewards: The task's reward, before shaping.
        ref_logprobs: log π_ref(a|s), 0 where no reference is scored.
        kl: The KL term as charged.
        num_tokens: Tokens generated so far, int64.
        terminated: bool.
        truncated: bool.
        endings: Position in the batch → `Ending`, for the episodes that ended.
        kl_coef: β of this step.
    """

    rewards: NDArray[np.float64]
    task_rewards: NDArray[np.float64]
    ref_logprobs: NDArray[np.float64]
    kl: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    endings: dict[int, Ending]
    kl_coef: float

    def info(self, i: int) -> dict[str, Any]:
        """Returns the info dictionary of position `i`, in Python types."""
        info: dict[str, Any] = {
            "task_reward": float(self.task_rewards[i]),
            "ref_logprob": float(self.ref_logprobs[i]),
            "kl": float(self.kl[i]),
            "kl_coef": self.kl_coef,
            "num_tokens": int(self.num_tokens[i]),
        }
        ending = self.endings.get(i)
        if ending is not None:
            info |= ending_info(ending)
        return info


def ending_info(ending: Ending) -> dict[str, Any]:
    """Returns what the info holds at the end of an episode, besides the info of every step."""
    info = ending._asdict()
    if ending.reward_error is None:
        del info["reward_error"], info["masked"]
    return info


@dataclass
class ScoredCompletions:
    """Whole completions, scored as the steps would have been. Arrays are (n, T), right-padded.

    Attributes:
        steps: `Transition` of each time step t, over the completions longer than t.
        rows: For each time step the completions that it covers, int64.
        lengths: Number of tokens of each completion, int64 (n,).
    """

    steps: list[Transition]
    rows: list[NDArray[np.int64]]
    lengths: NDArray[np.int64]

    def field(self, name: str) -> NDArray[Any]:
        """Returns one field of the transitions as an array (n, T), 0 where there is no token."""
        dtype = getattr(self.steps[0], name).dtype
        array = np.zeros((len(self.lengths), len(self.steps)), dtype=dtype)
        for t, (step, rows) in enumerate(zip(self.steps, self.rows, strict=True)):
            array[rows, t] = getattr(step, name)
        return array

    @property
    def endings(self) -> list[Ending]:
        """Returns how each completion ended, in order."""
        found = {
            int(rows[i]): ending
            for step, rows in zip(self.steps, self.rows, strict=True)
            for i, ending in step.endings.items()
        }
        return [found[i] for i in range(len(self.lengths))]


@dataclass
class _Step:
    """One step of n completions, before it is scored. Arrays are (n,)."""

    rows: NDArray[np.int64]  # what the completions are known by: slots, or their positions
    prompts: Sequence[Prompt]
    completion: Callable[[int], NDArray[np.int64]]  # the tokens of position i so far
    num_tokens: NDArray[np.int64]
    ref_logprobs: NDArray[np.float64]
    kl: NDArray[np.float64]
    reasons: NDArray[np.int8]
    truncated: NDArray[np.bool_]

    @property
    def finished(self) -> NDArray[np.bool_]:
        return self.reasons != Finish.RUNNING


class TokenMDP:
    """N slots, each an episode of generating one completion.

    Args:
        config: The options.
        num_slots: Number of slots N.

    Attributes:
        input_ids: Prompt and completion of each slot, right-padded, int64 (N, L).
        attention_mask: 1 at tokens, int8 (N, L).
        prompt_lengths: int64 (N,).
        num_tokens: Tokens generated so far, int64 (N,).
        done: Slots whose episode is over or has not begun, bool (N,).
        kl_coef: β; a controller may change it between steps.
        kl_consumer: Set by whoever subtracts β·log π_old in mode ``"reference"``.

    Raises:
        ValueError: The task or model is unknown, or limits do not fit.

    Examples:
        >>> mdp = TokenMDP(TextRLConfig(task="addition", kl_mode="none"), num_slots=2)
        >>> mdp.restart(np.arange(2), [0, 1])
        >>> transition = mdp.step(np.arange(2), np.array([52, 2]))  # "1" and end-of-sequence
        >>> transition.terminated.tolist(), transition.info(1)["finish_reason"]
        ([False, True], 'eos')
        >>> whole = mdp.score_completions([0, 1], [np.array([52, 2]), np.array([2])])
        >>> whole.field("num_tokens").tolist(), [ending.text for ending in whole.endings]
        ([[1, 2], [1, 0]], ['1', ''])
    """

    def __init__(self, config: TextRLConfig, num_slots: int) -> None:
        self.config = config
        self.num_slots = num_slots
        self.task = make_task(config.task, **config.task_kwargs)
        if len(self.task) == 0:
            raise ValueError(f"Task {self.task.name!r} has no prompts; give it at least one.")
        self.tokenizer = models.load_tokenizer(config.model)
        model_config = models.load_config(config.model)
        self.vocab_size = int(model_config.vocab_size)
        if len(self.tokenizer) > self.vocab_size:
            raise ValueError(
                f"The tokenizer of {str(config.model)!r} has {len(self.tokenizer)} tokens, but the "
                f"model's vocabulary has {self.vocab_size}; they are not of the same model."
            )
        eos_ids = models.eos_token_ids(config.model)
        self.max_new_tokens = config.max_new_tokens or self.task.max_new_tokens
        if config.min_new_tokens >= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {config.min_new_tokens} and max_new_tokens "
                f"{self.max_new_tokens}; the minimum must be smaller."
            )
        self._encoded: dict[int, Prompt] = {}
        self.max_prompt_tokens = config.max_prompt_tokens or self._measure_prompts()
        self.max_tokens = self.max_prompt_tokens + self.max_new_tokens
        models.check_context(model_config, self.max_tokens)
        self._check_reference()
        self.token_mask = TokenMask(
            self.vocab_size, eos_ids, config.allowed_tokens, config.min_new_tokens
        )
        stop = self.task.stop if config.stop is None else config.stop
        self.termination = Termination(self.decode, eos_ids, stop, self.task, self.max_new_tokens)
        self.scorer = Scorer(
            self.task, config.reward, timeout=config.reward_timeout, on_error=config.on_error
        )

        self.kl_coef = float(config.kl_coef)
        self.kl_consumer = False
        self._patience = _CONSUMER_PATIENCE
        self._failures: dict[int, Failure] = {}
        self._reported = np.full(num_slots, np.nan)

        pad = self.tokenizer.pad_token_id
        self.pad_token_id = eos_ids[0] if pad is None else int(pad)
        self.input_ids = np.full((num_slots, self.max_tokens), self.pad_token_id, dtype=np.int64)
        self.attention_mask = np.zeros((num_slots, self.max_tokens), dtype=np.int8)
        self.prompt_lengths = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)
        self.done = np.ones(num_slots, dtype=np.bool_)
        self.prompts: list[Prompt | None] = [None] * num_slots
        self.observation_space = spaces.Dict(
            input_ids=spaces.Box(0, self.vocab_size - 1, (self.max_tokens,), np.int64),
            attention_mask=spaces.Box(0, 1, (self.max_tokens,), np.int8),
        )
        self.action_space = spaces.Discrete(self.vocab_size)

    # Prompts and texts

    def decode(self, sequences: Sequence[NDArray[np.int64]]) -> list[str]:
        """Returns the text of each token sequence, without special tokens."""
        if not sequences:
            return []  # batch_decode takes this for one empty sequence
        return self.tokenizer.batch_decode(
            [list(map(int, s)) for s in sequences],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def prompt(self, index: int) -> Prompt:
        """Returns prompt `index` of the task; raises as `encode_prompts`."""
        return self.encode_prompts([index])[0]

    def encode_prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """Returns prompts of the task; equal indices give the same object.

        Raises:
            IndexError: The task has no such prompt.
            ValueError: A prompt is empty or longer than `max_prompt_tokens`.
        """
        new = [i for i in dict.fromkeys(indices) if i not in self._encoded]
        if new:
            if len(self._encoded) > _CACHED_PROMPTS:
                new = list(dict.fromkeys(indices))
                self._encoded.clear()
            self._encoded |= zip(new, self._encode(new, self.max_prompt_tokens), strict=True)
        return [self._encoded[i] for i in indices]

    def _measure_prompts(self) -> int:
        """Number of tokens of the longest of the task's first prompts."""
        first = range(min(len(self.task), _MEASURED_PROMPTS))
        self._encoded |= zip(first, self._encode(first, limit=None), strict=True)
        return max(len(prompt.ids) for prompt in self._encoded.values())

    def _encode(self, indices: Sequence[int], limit: int | None) -> list[Prompt]:
        for index in indices:
            if not 0 <= index < len(self.task):
                raise IndexError(
                    f"prompt_index is {index}, but task {self.task.name!r} has prompts 0 to "
                    f"{len(self.task) - 1}."
                )
        samples = [self.task[int(index)] for index in indices]
        texts = [self._text(index, sample) for index, sample in zip(indices, samples, strict=True)]
        # A chat template writes the special tokens itself.
        ids = self._tokenize(texts, [isinstance(sample.prompt, str) for sample in samples])
        for index, text, tokens in zip(indices, texts, ids, strict=True):
            if not tokens:
                raise ValueError(
                    f"Prompt {index} of task {self.task.name!r} is empty; a completion needs at "
                    "least one token to start from."
                )
            if limit is not None and len(tokens) > limit:
                raise ValueError(
                    f"Prompt {index} of task {self.task.name!r} has {len(tokens)} tokens, and "
                    f"max_prompt_tokens is {limit}; pass "
                    f"max_prompt_tokens={len(tokens)} or shorten the prompt {_shorten(text)!r}."
                )
        return [
            Prompt(sample, np.asarray(tokens, dtype=np.int64), text)
            for sample, tokens, text in zip(samples, ids, texts, strict=True)
        ]

    def _text(self, index: int, sample: Sample) -> str:
        if isinstance(sample.prompt, str):
            return sample.prompt
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"Prompt {index} of task {self.task.name!r} is a list of chat messages, but the "
                f"tokenizer of {str(self.config.model)!r} has no chat template; use text prompts "
                "or a model with a template."
            )
        return str(
            self.tokenizer.apply_chat_template(
                [dict(m) for m in sample.prompt], tokenize=False, add_generation_prompt=True
            )
        )

    def _tokenize(self, texts: Sequence[str], special: Sequence[bool]) -> list[list[int]]:
        """Token ids of each text, with the tokenizer's special tokens where `special`."""
        ids: list[list[int]] = [[] for _ in texts]
        for with_special in set(special):
            # An empty text stays empty, rather than a beginning-of-sequence token alone.
            rows = [i for i, s in enumerate(special) if s == with_special and texts[i]]
            if rows:
                batch = self.tokenizer([texts[i] for i in rows], add_special_tokens=with_special)[
                    "input_ids"
                ]
                for i, tokens in zip(rows, batch, strict=True):
                    ids[i] = tokens
        return ids

    # Episodes

    def restart(self, slots: NDArray[np.int64], prompt_indices: Sequence[int]) -> None:
        """Starts an episode in each of `slots`, int64 (n,), from the prompt of the given index."""
        prompts = self.encode_prompts(prompt_indices)
        for slot, prompt in zip(slots.tolist(), prompts, strict=True):
            length = len(prompt.ids)
            self.input_ids[slot, :length] = prompt.ids
            self.input_ids[slot, length:] = self.pad_token_id
            self.attention_mask[slot, :length] = 1
            self.attention_mask[slot, length:] = 0
            self.prompt_lengths[slot] = length
            self.prompts[slot] = prompt
        self.num_tokens[slots] = 0
        self.done[slots] = False
        self._reported[slots] = np.nan
        for slot in slots.tolist():
            self._failures.pop(slot, None)
        if self.reference is not None:
            self.reference.restart(slots, [prompt.ids for prompt in prompts])

    def report_logprobs(self, slots: NDArray[np.int64], logprobs: NDArray[np.float64]) -> None:
        """Takes log π(a|s) of the next action of each slot, for mode ``"policy"``."""
        _check_logprobs(logprobs)
        self._reported[slots] = logprobs

    def announce_kl_consumer(self) -> None:
        """Notes that somebody subtracts β·log π_old; an error where the mode does not want it."""
        if self.config.kl_mode != "reference":
            raise ValueError(
                f"kl_mode is {self.config.kl_mode!r}, whose rewards need no log π_old subtracted; "
                'use kl_mode="reference", or leave the callback or buffer out.'
            )
        self.kl_consumer = True

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns which tokens may come next, bool (N, V)."""
        return self.token_mask(self.num_tokens)

    def step(self, slots: NDArray[np.int64], actions: NDArray[np.int64]) -> Transition:
        """Takes one action in each of `slots`.

        Args:
            slots: Distinct slots with a running episode, int64 (n,).
            actions: Token ids, int64 (n,).

        Raises:
            RuntimeError: An episode is over, or a log-probability was not reported.
            ValueError: An action is outside the vocabulary or masked.
            RewardError: A reward failed and `on_error` is ``"raise"``.
        """
        if self.done[slots].any():
            slot = int(slots[self.done[slots]][0])
            raise RuntimeError(
                f"step() was called on slot {slot}, whose episode is over or has not begun; call "
                "reset() first."
            )
        num_tokens = self.num_tokens[slots]
        self._check_actions(actions, num_tokens)
        reported = self._take_reports(slots)
        ref_logprobs = self._ref_logprobs(slots, actions)

        columns = self.prompt_lengths[slots] + num_tokens
        self.input_ids[slots, columns] = actions
        self.attention_mask[slots, columns] = 1
        num_tokens = num_tokens + 1
        self.num_tokens[slots] = num_tokens
        prompts = [p for slot in slots.tolist() if (p := self.prompts[slot]) is not None]

        def completion(i: int) -> NDArray[np.int64]:
            return self.input_ids[slots[i], columns[i] + 1 - num_tokens[i] : columns[i] + 1]

        step = self._step(slots, prompts, completion, actions, num_tokens, ref_logprobs, reported)
        self.done[slots] = step.finished
        return self._score([step], self._failures)[0]

    def score_completions(
        self,
        prompt_indices: Sequence[int],
        completions: Sequence[NDArray[np.int64]],
        logprobs: Sequence[NDArray[np.float64]] | None = None,
    ) -> ScoredCompletions:
        """Scores whole completions as `step` would have, the reference in one pass.

        Args:
            prompt_indices: The prompt of each completion.
            completions: Token ids of each, up to and including the token that ends it.
            logprobs: log π of each token, needed in mode ``"policy"``.

        Raises:
            RuntimeError: `logprobs` are needed and missing.
            ValueError: A completion is empty, does not end where the rules say, or holds an
                action that is outside the vocabulary or masked.
            RewardError: A reward failed and `on_error` is ``"raise"``.
        """
        prompts = self.encode_prompts(prompt_indices)
        lengths = np.fromiter(map(len, completions), dtype=np.int64, count=len(completions))
        if len(prompts) != len(completions) or not len(completions):
            raise ValueError(
                f"Got {len(completions)} completions for {len(prompts)} prompts; pass at least "
                "one, and as many of both."
            )
        if not lengths.all():
            raise ValueError(
                f"Completion {int(np.argmin(lengths))} has no token; even an empty text ends with "
                "an end-of-sequence token."
            )
        from textrl_env.logprobs import pad_right

        tokens, _ = pad_right(completions)
        reported = None
        if self.config.kl_mode == "policy":
            if logprobs is None:
                raise RuntimeError(_MISSING_REPORT)
            reported, _ = pad_right(logprobs, dtype=np.float64)
            if [len(row) for row in logprobs] != lengths.tolist():
                raise ValueError("The completions and their logprobs differ in length.")
            _check_logprobs(reported)
        for t in range(tokens.shape[1]):
            rows = np.flatnonzero(lengths > t)
            self._check_actions(tokens[rows, t], np.full(len(rows), t))
        ref_logprobs = np.zeros(tokens.shape)
        if self.reference is not None:
            ref_logprobs = self.reference.score_completions(
                [prompt.ids for prompt in prompts], completions
            )
        steps = []
        for t in range(tokens.shape[1]):
            rows = np.flatnonzero(lengths > t)
            step = self._step(
                rows,
                [prompts[i] for i in rows.tolist()],
                lambda i, rows=rows, t=t: tokens[rows[i], : t + 1],  # type: ignore[misc]
                tokens[rows, t],
                np.full(len(rows), t + 1),
                ref_logprobs[rows, t],
                None if reported is None else reported[rows, t],
            )
            wrong = step.finished != (lengths[rows] == t + 1)
            if wrong.any():
                i = int(rows[wrong][0])
                raise ValueError(
                    f"Completion {i} has {lengths[i]} tokens, but its episode "
                    + ("ends after" if lengths[i] > t + 1 else "does not end after")
                    + f" {t + 1}; pass the tokens up to the one that ends it."
                )
            steps.append(step)
        return ScoredCompletions(self._score(steps, {}), [step.rows for step in steps], lengths)

    # What both share

    def _step(
        self,
        rows: NDArray[np.int64],
        prompts: Sequence[Prompt],
        completion: Callable[[int], NDArray[np.int64]],
        actions: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        ref_logprobs: NDArray[np.float64],
        reported: NDArray[np.float64] | None,
    ) -> _Step:
        """Decides which completions end with this step, and charges the KL."""
        reasons = self.termination.reasons(
            completion, actions, num_tokens, [prompt.sample for prompt in prompts]
        )
        truncated = (reasons == Finish.LENGTH) & (self.config.on_limit == "truncate")
        kl = self._kl(ref_logprobs, reported)
        return _Step(rows, prompts, completion, num_tokens, ref_logprobs, kl, reasons, truncated)

    def _score(self, steps: Sequence[_Step], failures: dict[int, Failure]) -> list[Transition]:
        """Scores steps in one call and shapes their rewards.

        Args:
            steps: Steps in order.
            failures: Row → its first reward that failed; added to.
        """
        finished, earning = [], []
        for t, step in enumerate(steps):
            finished += [(t, i) for i in np.flatnonzero(step.finished).tolist()]
            # A truncated completion is unfinished: the agent's value stands for what would come.
            whole = step.finished & ~step.truncated
            earns = whole if self.scorer.per == "sequence" else np.ones_like(whole)
            earning += [(t, i) for i in np.flatnonzero(earns).tolist()]
        read = list({*finished, *earning})
        decoded = self.termination.texts(
            [steps[t].completion(i) for t, i in read], [steps[t].reasons[i] for t, i in read]
        )
        texts = dict(zip(read, decoded, strict=True))
        scores = self.scorer.score(
            [texts[key] for key in earning], [steps[t].prompts[i].sample for t, i in earning]
        )
        task_rewards = [np.zeros(len(step.rows)) for step in steps]
        for (t, i), value, error, masked in zip(
            earning, scores.values, scores.errors, scores.masked, strict=True
        ):
            task_rewards[t][i] = value
            if error is not None:
                failures.setdefault(int(steps[t].rows[i]), Failure(error, bool(masked)))
        correct = self.scorer.is_correct(
            [texts[key] for key in finished], [steps[t].prompts[i].sample for t, i in finished]
        )
        endings: list[dict[int, Ending]] = [{} for _ in steps]
        for (t, i), is_correct in zip(finished, correct.tolist(), strict=True):
            step = steps[t]
            failure = failures.get(int(step.rows[i]))
            endings[t][i] = Ending(
                text=texts[t, i],
                prompt=step.prompts[i].text,
                answer=step.prompts[i].sample.answer,
                correct=is_correct,
                finish_reason=Finish(step.reasons[i]).name.lower(),
                reward_error=failure.error if failure else None,
                masked=failure.masked if failure else False,
            )
        return [
            Transition(
                rewards=task_rewards[t] - self.kl_coef * step.kl,
                task_rewards=task_rewards[t],
                ref_logprobs=step.ref_logprobs,
                kl=step.kl,
                num_tokens=step.num_tokens,
                terminated=step.finished & ~step.truncated,
                truncated=step.truncated,
                endings=endings[t],
                kl_coef=self.kl_coef,
            )
            for t, step in enumerate(steps)
        ]

    def _kl(
        self, ref_logprobs: NDArray[np.float64], reported: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        if self.config.kl_mode == "none":
            return np.zeros(len(ref_logprobs))
        if self.config.kl_mode == "reference":
            return -ref_logprobs
        import torch

        from textrl_env.kl import kl_estimate

        estimate = kl_estimate(
            torch.as_tensor(reported), torch.as_tensor(ref_logprobs), self.config.kl_estimator
        )
        return estimate.numpy()

    @functools.cached_property
    def reference(self) -> Reference | None:
        """The reference model, loaded when the first episode begins; None where none is scored."""
        name = self.config.reference_name
        if name is None:
            return None
        from textrl_env.reference import Reference

        model = models.load_frozen(name, self.config.device, self.config.dtype)
        return Reference(
            model, self.num_slots, self.max_tokens, self.config.temperature, self.token_mask
        )

    def _check_reference(self) -> None:
        """Finds an unusable reference before its weights are loaded."""
        name = self.config.reference
        if name is None:
            return
        config = models.load_config(name)
        if config.vocab_size != self.vocab_size:
            raise ValueError(
                f"The reference {str(name)!r} has a vocabulary of {config.vocab_size} tokens and "
                f"{str(self.config.model)!r} of {self.vocab_size}; log-probabilities of the same "
                "tokens need the same vocabulary."
            )
        models.check_context(config, self.max_tokens)

    def _ref_logprobs(
        self, slots: NDArray[np.int64], actions: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        if self.reference is None:
            return np.zeros(len(slots))
        self._watch_for_consumer(len(slots))
        return self.reference.score(slots, actions)

    def _watch_for_consumer(self, steps: int) -> None:
        if self.kl_consumer or self.config.kl_mode != "reference" or self.kl_coef == 0:
            return
        warned = self._patience <= 0
        self._patience -= steps
        if self._patience <= 0 and not warned:
            warnings.warn(
                f'kl_mode="reference" adds {self.kl_coef}·log π_ref to every reward, and after '
                f"{_CONSUMER_PATIENCE} steps nobody has announced to subtract "
                f"{self.kl_coef}·log π: alone this is not a KL penalty, and completions get "
                "shorter and shorter. Use an agent of ours, textrl_env.sb3.KLCallback or "
                'KLRolloutBuffer with Stable-Baselines3, or kl_mode="policy" or "none".',
                UserWarning,
                stacklevel=4,
            )

    def _take_reports(self, slots: NDArray[np.int64]) -> NDArray[np.float64] | None:
        if self.config.kl_mode != "policy":
            return None
        reported = self._reported[slots]
        if np.isnan(reported).any():
            raise RuntimeError(_MISSING_REPORT)
        self._reported[slots] = np.nan
        return reported

    def _check_actions(self, actions: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
        outside = (actions < 0) | (actions >= self.vocab_size)
        if outside.any():
            raise ValueError(
                f"Action {actions[outside][0]} is outside the vocabulary; use a token id in "
                f"[0, {self.vocab_size - 1}]."
            )
        if self.token_mask.is_trivial:
            return
        allowed = self.token_mask.allows(actions, num_tokens)
        if not allowed.all():
            token = int(actions[~allowed][0])
            raise ValueError(
                f"Action {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}) is masked "
                f"after {int(num_tokens[~allowed][0])} tokens; sample from action_masks()."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has the options, not the episodes: models and worker processes are not for pickles.
        return TokenMDP, (self.config, self.num_slots)

    def close(self) -> None:
        """Ends the scorer's worker process, if there is one."""
        self.scorer.close()


_MISSING_REPORT = (
    'kl_mode="policy" charges β·k(log π − log π_ref), but log π of this step was not reported; '
    "call report_logprobs(...) before step(), hand logprobs over with the completions, or use "
    'kl_mode="reference".'
)


def _check_logprobs(logprobs: NDArray[np.float64]) -> None:
    wrong = ~np.isfinite(logprobs) | (logprobs > 1e-6)
    if wrong.any():
        raise ValueError(
            f"The reported log-probability {logprobs[wrong][0]} is not finite and at most 0; "
            "report log π of the action that is taken, under the distribution sampled from."
        )


def _shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def check_options(options: dict[str, Any] | None, known: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of `reset`'s options.

    Raises:
        ValueError: An option is not one of `known`.
    """
    for name in options or {}:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"use {' or '.join(known)}."
            raise ValueError(f"reset() has no option {name!r}; {hint}")
    return dict(options or {})
