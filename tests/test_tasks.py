import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textrl_env.permutation import Permutation
from textrl_env.tasks import (
    Addition,
    Copy,
    FunctionTask,
    Reverse,
    Sample,
    Sentiment,
    Sort,
    Subtraction,
    Task,
    base,
    make_task,
    register_task,
    sentiment,
    task_names,
)
from textrl_env.tasks.base import Split, interleave

FAMILIES = ("addition", "subtraction", "multiplication", "copy", "reverse", "sort", "sentiment")
seeds = st.integers(0, 2**70)
fractions = st.floats(0.01, 0.99)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


# Registry


def test_the_built_in_tasks_are_registered():
    assert {*FAMILIES, "jsonl"} <= set(task_names())
    assert task_names() == sorted(task_names())


@pytest.mark.parametrize("name", FAMILIES)
def test_names_indices_and_purity(name):
    task, again = make_task(name), make_task(name)
    assert task.name == name
    assert task.max_new_tokens >= 8
    indices = [0, 1, len(task) // 2, len(task) - 1]
    first = [task[i] for i in indices]
    assert [again[i] for i in reversed(indices)] == first[::-1]
    assert [task[np.int64(i)] for i in indices] == first
    assert [sample.index for sample in first] == indices
    assert [pickle.loads(pickle.dumps(task))[i] for i in indices] == first
    for index in (-1, len(task)):
        with pytest.raises(IndexError, match=str(index)):
            task[index]
    with pytest.raises(TypeError):
        task[0.5]


@pytest.mark.parametrize("name", FAMILIES)
def test_global_generators_are_untouched(name):
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    task = make_task(name)
    task.score("good", task[3])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_samples_do_not_depend_on_the_process():
    code = (
        "from textrl_env.tasks import make_task\n"
        f"print([make_task(n)[7].prompt for n in {FAMILIES}])\n"
        "import sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert out.stdout.strip() == str([make_task(name)[7].prompt for name in FAMILIES])


def test_make_task_errors():
    with pytest.raises(
        ValueError, match=r"unknown task 'adition': did you mean 'addition'\?.*sort"
    ):
        make_task("adition")
    with pytest.raises(ValueError, match="unknown task 'zzz': the tasks are addition, "):
        make_task("zzz")
    with pytest.raises(TypeError, match="'digit'; its keywords: digits, split, seed"):
        make_task("addition", digit=2)
    with pytest.raises(TypeError, match="digits came with the Task 'addition'"):
        make_task(Addition(), digits=2)
    with pytest.raises(TypeError, match="name or a Task, got int"):
        make_task(3)
    task = Addition()
    assert make_task(task) is task


@pytest.mark.usefixtures("registry")
def test_register_a_class_and_a_function():
    @register_task("mine")
    class Mine(Addition):
        pass

    @register_task("also_mine")
    def also_mine(word="x", **kwargs):
        return FunctionTask([word], [word], **kwargs)

    assert isinstance(make_task("mine", digits=1), Mine)
    assert make_task("mine").name == "mine"
    assert make_task("also_mine", word="y", max_new_tokens=3).max_new_tokens == 3
    register_task("mine")(Mine)  # a notebook cell run twice
    with pytest.raises(ValueError, match="'mine' is taken"):
        register_task("mine")(also_mine)
    register_task("broken")(lambda: 3)
    with pytest.raises(TypeError, match="must give a Task"):
        make_task("broken")


def test_defaults_of_a_task():
    class Minimal(Task):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return Sample("p", "a")

        def score(self, completion, sample):
            return 0.0

    task = Minimal()
    assert (task.max_new_tokens, task.stop) == (32, ())
    assert task.is_correct(" a ", task[0])
    assert not task.is_correct("", Sample("p"))
    assert not task.is_finished("a", task[0])


# FunctionTask


def test_function_task():
    chat = [{"role": "user", "content": "hi"}]
    task = FunctionTask(["a", chat], ["b", None], metadata=[{"k": 1}, {}], stop=["!"], name="n")
    assert (task.name, task.stop, len(task)) == ("n", ("!",), 2)
    assert task[0] == Sample("a", "b", 0, metadata={"k": 1})
    assert task[1].prompt == tuple(chat)
    assert (task.score("b ", task[0]), task.score("c", task[0])) == (1.0, 0.0)
    chat[0]["content"] = "changed"
    assert task[1].prompt[0]["content"] == "hi"


@pytest.mark.parametrize(("error", "args", "kwargs", "match"), [
    (TypeError, ["text"], {"answers": ["a"]}, "not the one text 'text'"),
    (TypeError, [["p"]], {"answers": ["a"], "stop": "."}, "sequence of strings"),
    (ValueError, [[]], {"answers": []}, "at least one prompt"),
    (ValueError, [["p"]], {}, "answers= or score="),
    (ValueError, [["p", ""]], {"answers": ["a", "b"]}, "prompt 1: the prompt is empty"),
    (ValueError, [["p", "q"]], {"answers": ["a"]}, "2 prompts need as many answers, got 1"),
    (ValueError, [["p"]], {"answers": ["a"], "metadata": []}, "as many metadata, got 0"),
    (ValueError, [[[{"role": "user"}]]], {"answers": ["a"]}, "chat message 0"),
])  # fmt: skip
def test_function_task_errors(error, args, kwargs, match):
    with pytest.raises(error, match=re.escape(match)):
        FunctionTask(*args, **kwargs)


# Splits


@given(st.integers(2, 700), seeds, fractions)
def test_a_split_is_a_partition(size, seed, fraction):
    train, test = (list(Split(size, side, seed, fraction)) for side in ("train", "test"))
    assert train
    assert test
    assert sorted(train + test) == list(range(size))
    assert len(test) == min(max(round(size * fraction), 1), size - 1)


@given(st.integers(2, 10**40), seeds, st.integers(0, 2**31))
def test_a_split_of_any_size_is_within_range(size, seed, index):
    split = Split(size, "test", seed, 0.5)
    if index < split._length:  # len() itself stops at sys.maxsize
        assert 0 <= split[index] < size


def test_a_split_looks_random_and_follows_its_seed():
    drawn = np.array(Split(10_000, "test", 0, 0.1)[:])
    assert len(drawn) == 1000
    assert np.histogram(drawn, bins=10, range=(0, 10_000))[0].min() > 60
    assert np.bincount(drawn % 10).min() > 60
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.1
    other = set(Split(10_000, "test", 1, 0.1))
    assert 50 < len(other & set(drawn.tolist())) < 160


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_interleave_reaches_every_sample(lengths):
    reached = [interleave(i, lengths) for i in range(len(lengths) * max(lengths))]
    assert set(reached) == {(k, i) for k, n in enumerate(lengths) for i in range(n)}
    levels = [level for level, _ in reached]
    assert {levels.count(k) for k in range(len(lengths))} == {max(lengths)}


@pytest.mark.parametrize("make", [Addition, Sort])
@pytest.mark.parametrize(("kwargs", "match"), [
    ({"split": "dev"}, "'train' or 'test', got 'dev'"),
    ({"seed": -1}, "seed must not be negative, got -1"),
    ({"test_fraction": 0}, "test_fraction must be between 0 and 1, got 0"),
    ({"test_fraction": 1.0}, "test_fraction must be between 0 and 1, got 1.0"),
    ({"test_fraction": float("nan")}, "test_fraction must be between 0 and 1, got nan"),
])  # fmt: skip
def test_split_errors(make, kwargs, match):
    with pytest.raises(ValueError, match=match):
        make(**kwargs)


# Arithmetic


def pairs(task, sign):
    return [tuple(map(int, s.prompt[:-1].split(sign))) for s in task]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2]), seeds, fractions)
def test_addition_partitions_the_pairs(digits, seed, fraction):
    train, test = (
        pairs(Addition(digits, split, seed, fraction), "+") for split in ("train", "test")
    )
    numbers = range(10) if digits == 1 else range(10, 100)
    assert sorted(train + test) == [(a, b) for a in numbers for b in numbers]
    assert not {(b, a) for a, b in test} & set(train)


def test_three_digits_hold_every_pair_and_enumerate_none(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(Permutation, "_mix")
        train, test = Addition(3), Addition(3, "test")
    assert len(train) + len(test) == 810_000
    assert {len(str(n)) for pair in pairs([train[i] for i in range(200)], "+") for n in pair} == {3}


@pytest.mark.parametrize(("name", "sign"), [
    ("addition", "+"), ("subtraction", "-"), ("multiplication", "*"),
])  # fmt: skip
def test_answers_are_right(name, sign):
    for sample in [*make_task(name, digits=1), make_task(name, digits=3)[9]]:
        assert re.fullmatch(rf"\d+\{sign}\d+=", sample.prompt)
        assert eval(sample.prompt[:-1]) == int(sample.answer)


def test_scores_of_arithmetic():
    task = Subtraction(digits=1)
    sample = Sample("3-4=", "-1")
    assert [task.score(c, sample) for c in ("-1", " -1\n", "1", "-1 ok", "", "-10")] == [
        1.0, 1.0, 0.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip
    assert task.is_correct("-1", sample)
    assert task.max_new_tokens == 8


def test_digits_take_turns():
    task = Addition(digits=(1, 3))
    assert [task[i].difficulty for i in range(4)] == [1, 3, 1, 3]
    first = pairs([Addition(digits=2)[i] for i in range(200)], "+")
    assert 60 < sum(a > b for a, b in first) < 140


@pytest.mark.parametrize("digits", [0, 4, (), (1, 1), (1, 4), "2", 1.5])
def test_digits_out_of_range(digits):
    with pytest.raises((ValueError, TypeError)):
        Addition(digits)


# Sequences


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2), seeds, fractions)
def test_sequences_partition_the_strings(low, more, seed, fraction):
    def texts(split):
        task = Copy(low, low + more, "abc", split, seed, fraction)
        assert [s.difficulty for s in task][: more + 1] == list(range(low, low + more + 1))
        return {s.answer for s in task}

    train, test = texts("train"), texts("test")
    assert not train & test
    assert len(train | test) == sum(3**n for n in range(low, low + more + 1))


@pytest.mark.parametrize(("name", "answer"), [
    ("copy", lambda t: t), ("reverse", lambda t: t[::-1]), ("sort", lambda t: "".join(sorted(t))),
])  # fmt: skip
def test_sequence_answers(name, answer):
    task = make_task(name)
    for index in range(40):
        sample = task[index]
        operation, text = sample.prompt[:-1].split(":")
        assert operation == name
        assert sample.prompt[-1] == "="
        assert re.fullmatch("[a-j]{3,6}", text)
        assert sample.answer == answer(text)
        assert task.max_new_tokens > len(sample.answer)


@pytest.mark.parametrize(("completion", "score"), [
    ("abcd", 1.0), (" abcd ", 1.0), ("abc", 0.75), ("abcde", 0.8), ("bcda", 0.0), ("", 0.0),
    ("a" * 8, 1 / 8),
])  # fmt: skip
def test_scores_of_sequences(completion, score):
    sample = Sample("reverse:dcba=", "abcd")
    assert Reverse().score(completion, sample) == score
    assert Reverse(dense=False).score(completion, sample) == float(score == 1.0)


def test_long_sequences_need_no_memory():
    task = Sort(min_length=12, max_length=12, alphabet="abcdefghijklmnopqrstuvwxyz")
    assert len(task[len(task) - 1].answer) == 12


@pytest.mark.parametrize(("kwargs", "match"), [
    ({"min_length": 0}, "min_length"),
    ({"min_length": 7}, "min_length"),
    ({"alphabet": "a"}, "two or more different"),
    ({"alphabet": "aba"}, "two or more different"),
    ({"alphabet": "ab="}, "two or more different"),
    ({"max_length": 30}, "too many strings of length 30"),
])  # fmt: skip
def test_sequence_errors(kwargs, match):
    with pytest.raises(ValueError, match=match):
        Copy(**kwargs)


# Sentiment


def test_sentiment_words():
    assert len(sentiment.POSITIVE) >= 60
    assert len(sentiment.NEGATIVE) >= 60
    assert not set(sentiment.POSITIVE) & set(sentiment.NEGATIVE)
    for words in (sentiment.POSITIVE, sentiment.NEGATIVE, sentiment.SENTENCE_BEGINNINGS):
        assert len(set(words)) == len(words)
    neutral = (*sentiment.NEUTRAL_ADJECTIVES, *sentiment.NEUTRAL_ENDINGS, *sentiment.INTENSIFIERS)
    task = Sentiment()
    assert all(task.score(text, s) == 0 for s in task for text in (s.prompt, *neutral))


@pytest.mark.parametrize(("completion", "score"), [
    ("", 0.0),
    ("blue and old", 0.0),
    ("good", 0.25),
    ("GOOD!", 0.25),
    ("bad", -0.25),
    ("good, great, nice, fine", 1.0),
    ("good good good good", 0.25),
    ("good good good good good good good good", 1 / 8),
    ("good and bad", 0.0),
    ("not good", -0.125),
    ("not a very good", -0.125),
    ("not bad", 0.125),
    ("wasn't good", -0.125),
    ("wasn\u2019t good", -0.125),
    ("not long, good", 0.25),
    ("not long but good", 0.25),
    ("not as long as it was good", 1 / 7),
    ("goodness", 0.0),
])  # fmt: skip
def test_sentiment_scores(completion, score):
    task = Sentiment()
    assert task.score(completion, task[0]) == pytest.approx(score)
    assert task.is_correct(completion, task[0]) == (score >= 0.2)


@given(st.text(max_size=60) | st.lists(st.sampled_from((*sentiment.POSITIVE, "not"))).map(" ".join))
def test_sentiment_is_bounded_and_repeating_never_pays(text):
    task = Sentiment()
    score = task.score(text, task[0])
    assert -1 <= score <= 1
    assert task.score(f"{text} . {text}", task[0]) <= max(score, 0) + 1e-12


def test_sentiment_options():
    task = Sentiment({"zap": 8, "zip": -0.5}, threshold=-1)
    assert (task.score("zap", task[0]), task.score("zip", task[0])) == (1.0, -0.125)
    assert task.score("good", task[0]) == 0
    assert task.is_correct("zip", task[0])
    assert task.stop == (".",)
    assert task[0].answer is None


@pytest.mark.parametrize(("kwargs", "match"), [
    ({"lexicon": {}}, "at least one word"),
    ({"lexicon": {"two words": 1}}, "lower-case letters, got 'two words'"),
    ({"lexicon": {"Good": 1}}, "lower-case letters, got 'Good'"),
    ({"lexicon": {"good": float("nan")}}, "weight of 'good' must be a finite number, got nan"),
    ({"lexicon": {"good": "1"}}, "weight of 'good' must be a finite number, got '1'"),
    ({"threshold": float("inf")}, "threshold must be a finite number, got inf"),
])  # fmt: skip
def test_sentiment_errors(kwargs, match):
    with pytest.raises(ValueError, match=match):
        Sentiment(**kwargs)


def test_mistakes_in_a_task_of_ones_own_are_said():
    with pytest.raises(TypeError, match="answer 0 is 2; pass texts"):
        FunctionTask(["1+1="], [2])
    with pytest.raises(ValueError, match="not empty"):
        FunctionTask(["1+1="], ["2"], stop=[""])
    with pytest.raises(TypeError, match="register_task takes a name"):

        @register_task
        class Nameless(Task):
            pass
