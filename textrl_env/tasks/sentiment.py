"""Finish a sentence so that it sounds pleased, as a word list judges it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from textrl_env.tasks.base import Sample, Task, check_index, is_finite_number, register_task

_SUBJECTS = (
    "film", "movie", "book", "story", "play", "song", "concert", "show", "game", "meal",
    "restaurant", "hotel", "trip", "lecture", "party", "phone", "garden", "weather",
)  # fmt: skip
_OPENINGS = ("The {} was", "The {} is", "I think this {} is", "My friend said the {} was")
SENTENCE_BEGINNINGS = tuple(
    opening.format(subject) for opening in _OPENINGS for subject in _SUBJECTS
)

POSITIVE_ADJECTIVES = (
    "good", "great", "lovely", "wonderful", "excellent", "superb", "fine", "nice", "pleasant",
    "delightful", "charming", "brilliant", "beautiful", "amazing", "fantastic", "marvellous",
    "splendid", "enjoyable", "fun", "funny", "clever", "fresh", "bright", "warm", "friendly",
    "kind", "gentle", "honest", "happy", "cheerful", "joyful", "exciting", "thrilling", "moving",
    "inspiring", "impressive", "perfect", "outstanding", "memorable", "elegant", "graceful",
    "generous", "relaxing", "refreshing", "touching", "witty",
)  # fmt: skip
POSITIVE_ADVERBS = (
    "beautifully", "brilliantly", "wonderfully", "perfectly", "happily", "nicely", "superbly",
)  # fmt: skip
POSITIVE_VERBS = (
    "loved", "enjoyed", "admired", "liked", "adored", "praised", "recommended", "delighted",
)  # fmt: skip
POSITIVE = POSITIVE_ADJECTIVES + POSITIVE_ADVERBS + POSITIVE_VERBS

NEGATIVE_ADJECTIVES = (
    "bad", "awful", "terrible", "horrible", "dreadful", "poor", "boring", "dull", "tedious",
    "bland", "ugly", "nasty", "unpleasant", "disappointing", "annoying", "irritating", "stupid",
    "silly", "weak", "stale", "dirty", "cold", "rude", "cruel", "dishonest", "sad", "gloomy",
    "miserable", "depressing", "tiresome", "pointless", "clumsy", "messy", "broken", "useless",
    "worthless", "forgettable", "confusing", "painful", "noisy", "shallow", "lifeless", "dreary",
    "grim", "ridiculous", "mediocre",
)  # fmt: skip
NEGATIVE_ADVERBS = (
    "badly", "terribly", "awfully", "poorly", "horribly", "sadly", "miserably",
)  # fmt: skip
NEGATIVE_VERBS = (
    "hated", "disliked", "regretted", "despised", "failed", "disappointed", "annoyed", "bored",
)  # fmt: skip
NEGATIVE = NEGATIVE_ADJECTIVES + NEGATIVE_ADVERBS + NEGATIVE_VERBS

INTENSIFIERS = ("very", "really", "quite", "rather", "so", "fairly")
NEGATIONS = ("not", "never", "no", "hardly", "neither", "nor", "without")
NEUTRAL_ADJECTIVES = (
    "long", "short", "new", "old", "big", "small", "usual", "ordinary", "quiet", "local",
    "simple", "common", "early", "late", "different", "similar",
)  # fmt: skip
NEUTRAL_ENDINGS = (
    "from start to end", "this time", "for me", "last night", "on the whole", "in many ways",
    "at the weekend", "as I remember it", "for the most part", "in the evening",
)  # fmt: skip

_LEXICON = dict.fromkeys(POSITIVE, 1.0) | dict.fromkeys(NEGATIVE, -1.0)
_NEGATION_REACH = 3  # words: "not a very good"
_NEGATED = -0.5  # "not bad" is fainter praise than "good"
_MIN_WORDS = 4  # a shorter completion is no better than one of this length


@register_task("sentiment")
class Sentiment(Task):
    """Sentence beginnings; the reward is how positive the completion is, from -1 to 1.

    The score is the sum of the weights of the completion's *different* lexicon words, divided by
    the number of its words (at least 4) and clipped to [-1, 1]. So repeating a word lowers the
    score, and one word alone earns 0.25 at most with the built-in weights of 1 and -1. A negation
    up to three words earlier in the same clause turns a word around at half its weight. There is
    no answer: a completion is correct when its score is at least ``threshold``.

    The stop string is the full stop, so that a completion is one sentence.

    Args:
        lexicon: The weight of each word, in place of the built-in lists.
        threshold: The score from which a completion counts as correct.

    Raises:
        ValueError: The lexicon is empty, holds a weight that is no finite number or a word that is
            not lower-case letters; or the threshold is no finite number.

    >>> task = Sentiment()
    >>> task[0].prompt, task.stop
    ('The film was', ('.',))
    >>> [
    ...     task.score(text, task[0])
    ...     for text in (" good and funny.", " good good good good.", " not very good.", " blue.")
    ... ]
    [0.5, 0.25, -0.125, 0.0]
    """

    max_new_tokens = 32
    stop = (".",)

    def __init__(self, lexicon: Mapping[str, float] | None = None, threshold: float = 0.2) -> None:
        self._lexicon = dict(_LEXICON if lexicon is None else lexicon)
        if not self._lexicon:
            raise ValueError("lexicon must map at least one word to a weight, got none")
        for word, weight in self._lexicon.items():
            if word != word.lower() or _WORD.fullmatch(word) is None:
                raise ValueError(f"a lexicon word must be lower-case letters, got {word!r}")
            if not is_finite_number(weight):
                raise ValueError(f"the weight of {word!r} must be a finite number, got {weight!r}")
        if not is_finite_number(threshold):
            raise ValueError(f"threshold must be a finite number, got {threshold!r}")
        self._threshold = threshold

    def __len__(self) -> int:
        return len(SENTENCE_BEGINNINGS)

    def __getitem__(self, index: int) -> Sample:
        index = check_index(index, len(self))
        return Sample(SENTENCE_BEGINNINGS[index], None, index)

    def score(self, completion: str, sample: Sample) -> float:
        """How positive the completion is, from -1 to 1."""
        seen: set[str] = set()
        words = 0
        total = 0.0
        for clause in _CLAUSE_END.split(completion.lower().replace("’", "'")):
            last_negation = -_NEGATION_REACH - 1
            for position, word in enumerate(_WORD.findall(clause)):
                words += 1
                if word in NEGATIONS or word.endswith("n't"):
                    last_negation = position
                if word in self._lexicon and word not in seen:
                    seen.add(word)
                    negated = 0 < position - last_negation <= _NEGATION_REACH
                    total += self._lexicon[word] * (_NEGATED if negated else 1.0)
        return min(max(total / max(words, _MIN_WORDS), -1.0), 1.0)

    def is_correct(self, completion: str, sample: Sample) -> bool:
        """Whether the score reaches the threshold."""
        return self.score(completion, sample) >= self._threshold


_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_CLAUSE_END = re.compile(r"[.,;:!?]|\bbut\b")
