"""Manipulating a string of letters: copy it, reverse it, sort it."""

from __future__ import annotations

import sys
from abc import abstractmethod

from textrl_env.tasks.base import Sample, Split, Task, check_index, interleave, register_task


class Sequences(Task):
    """A string of letters, and what an operation makes of it as the answer; the family's base.

    Train and test share no string, and together hold every one. Lengths take turns from index to
    index, and the fewer strings of the short ones come round again.

    Args:
        min_length: The length of the shortest strings, at least 1.
        max_length: The length of the longest strings.
        alphabet: At least two different characters; letters may repeat in a string.
        split: ``"train"`` or ``"test"``.
        seed: Fixes which strings are held out, and the order.
        test_fraction: The share of strings that is held out.
        dense: Whether a part of the answer earns a part of the reward.

    Raises:
        ValueError: An argument is outside its range.
    """

    def __init__(
        self,
        min_length: int = 3,
        max_length: int = 6,
        alphabet: str = "abcdefghij",
        split: str = "train",
        seed: int = 0,
        test_fraction: float = 0.1,
        dense: bool = True,
    ) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(
                f"lengths need 1 <= min_length <= max_length, got {min_length} and {max_length}"
            )
        if len(set(alphabet)) < max(2, len(alphabet)) or set(alphabet) & set(":= \t\n"):
            raise ValueError(
                "alphabet must be two or more different characters without ':', '=' and spaces, "
                f"got {alphabet!r}"
            )
        lengths = range(min_length, max_length + 1)
        if len(lengths) * len(alphabet) ** max_length > sys.maxsize:
            raise ValueError(
                f"{len(alphabet)} letters have too many strings of length {max_length} to number; "
                "choose a smaller max_length or alphabet"
            )
        self.max_new_tokens = max_length + 2  # the end of the sequence, and room to overshoot
        self._alphabet = alphabet
        self._dense = dense
        self._min_length = min_length
        self._levels = [
            Split(len(alphabet) ** length, split, seed, test_fraction) for length in lengths
        ]
        self._sizes = [len(level) for level in self._levels]

    @staticmethod
    @abstractmethod
    def transform(text: str) -> str:
        """The answer for a string."""

    def __len__(self) -> int:
        return len(self._sizes) * max(self._sizes)

    def __getitem__(self, index: int) -> Sample:
        index = check_index(index, len(self))
        level, position = interleave(index, self._sizes)
        item, length = self._levels[level][position], self._min_length + level
        letters = []
        for _ in range(length):
            item, letter = divmod(item, len(self._alphabet))
            letters.append(self._alphabet[letter])
        text = "".join(letters)
        return Sample(f"{self.name}:{text}=", self.transform(text), index, length)

    def score(self, completion: str, sample: Sample) -> float:
        """The share of positions that are right, of the longer of completion and answer.

        With ``dense=False`` 1.0 for the exact answer, else 0.0.
        """
        if not self._dense:
            return float(self.is_correct(completion, sample))
        text, answer = completion.strip(), sample.answer or ""
        right = sum(mine == theirs for mine, theirs in zip(text, answer, strict=False))
        return right / max(len(text), len(answer), 1)


@register_task("copy")
class Copy(Sequences):
    """The string as it is; see `Sequences` for the arguments.

    >>> task = Copy(min_length=4, max_length=4)
    >>> task[0].prompt, task[0].answer
    ('copy:beif=', 'beif')
    """

    @staticmethod
    def transform(text: str) -> str:
        """The string as it is."""
        return text


@register_task("reverse")
class Reverse(Sequences):
    """The string backwards; see `Sequences` for the arguments.

    >>> task = Reverse(min_length=4, max_length=4)
    >>> task[0].prompt, task[0].answer
    ('reverse:beif=', 'fieb')
    >>> task.score("fieb", task[0]), task.score("fie", task[0]), task.score("beif", task[0])
    (1.0, 0.75, 0.0)
    """

    @staticmethod
    def transform(text: str) -> str:
        """The string backwards."""
        return text[::-1]


@register_task("sort")
class Sort(Sequences):
    """The letters in order; see `Sequences` for the arguments.

    >>> task = Sort(min_length=4, max_length=4)
    >>> task[0].prompt, task[0].answer
    ('sort:beif=', 'befi')
    """

    @staticmethod
    def transform(text: str) -> str:
        """The letters in order."""
        return "".join(sorted(text))
