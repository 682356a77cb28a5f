"""What a task is, how tasks are registered and made, and how they split what they know."""

from __future__ import annotations

import difflib
import inspect
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from textrl_env.permutation import Permutation

Prompt = str | tuple[Mapping[str, str], ...]
ScoreFn = Callable[[str, "Sample"], float]
_Factory = TypeVar("_Factory", bound=Callable[..., Any])


@dataclass(frozen=True)
class Sample:
    """One prompt of a task.

    Attributes:
        prompt: Text, or chat messages (mappings with ``role`` and ``content``).
        answer: The expected completion, or None where the score alone decides.
        index: The position in the task: ``task[sample.index] == sample``.
        difficulty: The task's own measure, larger is harder.
        metadata: Whatever else the scoring needs.
    """

    prompt: Prompt
    answer: str | None = None
    index: int = 0
    difficulty: float = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Task(ABC):
    """Prompts and the scoring of completions.

    A task is a sequence of samples and draws nothing at random: ``task[i]`` depends on the
    constructor's arguments and on ``i`` only. A subclass defines ``__len__``, ``__getitem__``
    (raising IndexError beyond the end) and ``score``.

    Attributes:
        name: The name shown in messages and logs; ``register_task`` gives a class its own.
        max_new_tokens: The suggested limit on a completion.
        stop: Strings that end a completion.
    """

    name: str = "task"
    max_new_tokens: int = 32
    stop: tuple[str, ...] = ()

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """The sample at an index from 0 to ``len(self) - 1``; IndexError otherwise."""

    @abstractmethod
    def score(self, completion: str, sample: Sample) -> float:
        """The reward of a completion."""

    def is_correct(self, completion: str, sample: Sample) -> bool:
        """Whether a completion counts as solved: it equals the answer but for outer spaces."""
        return sample.answer is not None and completion.strip() == sample.answer

    def is_finished(self, completion: str, sample: Sample) -> bool:
        """Whether the task ends the episode here, before any end-of-sequence token."""
        return False


class FunctionTask(Task):
    """A task from prompts, answers and a scoring function.

    Args:
        prompts: Texts, or conversations as sequences of ``role``/``content`` mappings.
        answers: The expected completions, one for each prompt.
        score: ``score(completion, sample) -> float``; exact match with the answer by default.
        metadata: A mapping for each prompt, handed to ``score`` as ``sample.metadata``.
        name: The name shown in messages.
        max_new_tokens: The suggested limit on a completion.
        stop: Strings that end a completion.

    Raises:
        TypeError: ``prompts`` is a single text, or no sequence.
        ValueError: There are no prompts, a prompt is unusable, the lengths differ, or there is
            neither an answer nor a scoring function.

    >>> task = FunctionTask(["Say a: ", "Say b: "], score=lambda text, sample: text.count("a"))
    >>> len(task), task[1].prompt, task.score("banana", task[0])
    (2, 'Say b: ', 3)
    """

    def __init__(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, str]]],
        answers: Sequence[str | None] | None = None,
        score: ScoreFn | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        name: str = "function",
        max_new_tokens: int = 32,
        stop: Sequence[str] = (),
    ) -> None:
        if isinstance(prompts, str):
            raise TypeError(f"prompts must be a sequence of prompts, not the one text {prompts!r}")
        if not isinstance(prompts, Sequence):
            raise TypeError(f"prompts is {prompts!r}; pass a list of prompts, such as list(...)")
        if not prompts:
            raise ValueError("a task needs at least one prompt, got none")
        if answers is None and score is None:
            raise ValueError("a task needs answers or a scoring function: pass answers= or score=")
        if isinstance(stop, str):
            raise TypeError(f"stop must be a sequence of strings such as ({stop!r},), not a string")
        self._prompts: list[Prompt] = []
        for index, prompt in enumerate(prompts):
            try:
                self._prompts.append(check_prompt(prompt))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from None
        for label, column in (("answers", answers), ("metadata", metadata)):
            if column is not None and len(column) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts need as many {label}, got {len(column)}")
        for index, answer in enumerate(answers or ()):
            if not isinstance(answer, str | None):
                raise TypeError(
                    f"answer {index} is {answer!r}; pass texts, such as {str(answer)!r}"
                )
        if not all(isinstance(end, str) and end for end in stop):
            raise ValueError(f"stop is {list(stop)!r}; a stop string is a text that is not empty")
        self._answers = list(answers) if answers is not None else [None] * len(prompts)
        self._metadata = list(metadata) if metadata is not None else [{}] * len(prompts)
        self._score = score
        self.name = name
        self.max_new_tokens = max_new_tokens
        self.stop = tuple(stop)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Sample:
        index = check_index(index, len(self))
        return Sample(
            self._prompts[index], self._answers[index], index, metadata=self._metadata[index]
        )

    def score(self, completion: str, sample: Sample) -> float:
        """What the scoring function says; without one, 1.0 for the exact answer, else 0.0."""
        if self._score is None:
            return float(self.is_correct(completion, sample))
        return self._score(completion, sample)


_REGISTRY: dict[str, Callable[..., Task]] = {}


def register_task(name: str) -> Callable[[_Factory], _Factory]:
    """Registers a Task class, or a function that returns a Task, under a name.

    Raises:
        ValueError: The name is taken by something else. The same class or function may be
            registered again, so that a notebook cell can be run twice.

    >>> @register_task("shout")
    ... def shout(words=("hello",)):
    ...     return FunctionTask([f"{w} -> " for w in words], [w.upper() for w in words])
    >>> make_task("shout", words=["hi"])[0].answer
    'HI'
    """
    if not isinstance(name, str):
        raise TypeError(f"register_task takes a name: write @register_task('...') above {name!r}")

    def register(factory: _Factory) -> _Factory:
        known = _REGISTRY.get(name)
        if known is not None and _origin(known) != _origin(factory):
            raise ValueError(f"the task name {name!r} is taken by {known!r}; choose another name")
        if isinstance(factory, type) and "name" not in vars(factory):
            factory.name = name  # type: ignore[attr-defined]
        _REGISTRY[name] = factory
        return factory

    return register


def _origin(factory: Callable[..., Any]) -> tuple[object, object]:
    return getattr(factory, "__module__", None), getattr(factory, "__qualname__", factory)


@overload
def make_task(task: Task) -> Task: ...
@overload
def make_task(task: str, **kwargs: Any) -> Task: ...
def make_task(task: str | Task, **kwargs: Any) -> Task:
    """Makes a registered task; a Task goes through unchanged.

    Raises:
        ValueError: No task has that name.
        TypeError: A keyword is unknown or missing, or keywords come with a Task, or ``task`` is
            neither a name nor a Task.

    >>> make_task("addition", digits=1)[0].difficulty
    1
    """
    if isinstance(task, Task):
        if kwargs:
            raise TypeError(
                f"keywords go with the name of a task, but {', '.join(kwargs)} came with the Task "
                f"{task.name!r}; set them where it is constructed"
            )
        return task
    if not isinstance(task, str):
        raise TypeError(f"task must be a name or a Task, got {type(task).__name__}")
    if task not in _REGISTRY:
        close = difflib.get_close_matches(task, _REGISTRY)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(f"unknown task {task!r}: {hint}the tasks are {', '.join(task_names())}")
    factory = _REGISTRY[task]
    signature = inspect.signature(factory)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        valid = ", ".join(signature.parameters) or "none"
        raise TypeError(f"task {task!r} {error}; its keywords: {valid}") from None
    made = factory(**kwargs)
    if not isinstance(made, Task):
        raise TypeError(f"task {task!r} must give a Task, but {factory!r} returned {made!r}")
    return made


def task_names() -> list[str]:
    """The names of the registered tasks, sorted."""
    return sorted(_REGISTRY)


def check_index(index: int, length: int) -> int:
    """The index as an int.

    Raises:
        IndexError: It is not in ``range(length)``; negative ones do not count from the end, a
            prompt has one index.
    """
    index = operator.index(index)
    if not 0 <= index < length:
        raise IndexError(f"index {index} is outside the task's 0..{length - 1}")
    return index


def check_prompt(prompt: object) -> Prompt:
    """The prompt as text or as a tuple of chat messages.

    Raises:
        ValueError: It is empty or neither of the two.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty")
        return prompt
    if not isinstance(prompt, list | tuple):
        raise ValueError(
            f"the prompt must be a text or a list of chat messages, got {type(prompt).__name__}"
        )
    if not prompt:
        raise ValueError("the prompt is empty: a conversation needs a message")
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"chat message {number} must have the texts 'role' and 'content', got {message!r}"
            )
    return tuple(dict(message) for message in prompt)


class Split(Sequence[int]):
    """One side of ``range(size)``, split at random by a seed; in constant time and memory.

    The sides are disjoint and together hold every item once. Each has at least one.

    Args:
        size: The number of items, at least 2.
        split: ``"train"`` or ``"test"``.
        seed: Fixes both the split and the order; not negative.
        test_fraction: The share of ``"test"``, between 0 and 1.

    Raises:
        ValueError: An argument is outside its range.

    >>> train, test = (Split(10, side, seed=0, test_fraction=0.3) for side in ("train", "test"))
    >>> len(train), len(test), sorted([*train, *test]) == list(range(10))
    (7, 3, True)
    """

    def __init__(self, size: int, split: str, seed: int, test_fraction: float) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test', got {split!r}")
        if not 0 < test_fraction < 1:
            raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction!r}")
        if size < 2:
            raise ValueError(f"a split needs at least 2 items, got {size}")
        held_out = min(max(round(size * test_fraction), 1), size - 1)
        self._first, self._length = (
            (0, held_out) if split == "test" else (held_out, size - held_out)
        )
        self._order = Permutation(size, seed)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        return self._order[self._first + check_index(index, self._length)]


def interleave(index: int, lengths: Sequence[int]) -> tuple[int, int]:
    """The level and the position in it of an index, where levels take turns.

    Levels take turns so that each is drawn equally often however few samples it has; a shorter
    level starts over. All levels together have ``len(lengths) * max(lengths)`` indices.

    >>> [interleave(i, [1, 3]) for i in range(6)]
    [(0, 0), (1, 0), (0, 0), (1, 1), (0, 0), (1, 2)]
    """
    position, level = divmod(index, len(lengths))
    return level, position % lengths[level]


def is_finite_number(value: object) -> bool:
    """Whether a value is a finite real number (and not a bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
