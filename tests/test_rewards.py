import asyncio
import contextlib
import functools
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from textrl_env.rewards import Reward, RewardError, Scorer
from textrl_env.tasks import FunctionTask, Sample

TASK = FunctionTask([f"prompt {i}" for i in range(4)], ["a", "b", "c", "d"], name="letters")
SAMPLES = list(TASK)
OK = ["a", "b", "x", "d"]

pytestmark = pytest.mark.filterwarnings("ignore:reward .* are only counted:UserWarning")


def no_process(pid):
    """Whether a process is gone, zombies included."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


@pytest.fixture
def closing():
    scorers = []

    def closing(*args, **kwargs):
        scorers.append(Scorer(*args, **kwargs))
        return scorers[-1]

    yield closing
    for scorer in scorers:
        scorer.close()


# What the completion asks for happens; nested, so that the worker gets it by value.


def make_misbehaving():
    def misbehave(completion, sample):
        if completion == "exception":
            raise ValueError("bad sample")
        if completion == "system exit":
            raise SystemExit(3)
        if completion == "exit":
            os._exit(3)
        if completion == "sleep":
            time.sleep(1000)
        if completion == "loop":
            while True:
                pass
        if completion == "hold the GIL":
            sum(range(10**13))
        if completion == "backtrack":
            re.match("(a+)+$", "a" * 60 + "b")
        if completion == "pid":
            return os.getpid()
        if completion == "torch":
            return "torch" in sys.modules
        return {
            "none": None,
            "nan": math.nan,
            "inf": -math.inf,
            "huge": 10**400,
            "str": "1.0",
            "complex": 1j,
            "list": [1.0],
            "object": object(),
            "array": np.zeros(2),
            "empty": np.zeros(0),
            "text array": np.array("1.0"),
        }.get(completion, 0.5)

    return misbehave


IN_PROCESS = [
    ("exception", "exception", "raised ValueError: bad sample"),
    ("none", "none", "returned None instead of a number"),
    ("nan", "nan", "returned nan, not a finite number"),
    ("inf", "nan", "returned -inf, not a finite number"),
    ("huge", "nan", "returned inf, not a finite number"),
    ("str", "type", "returned '1.0' of type str, not a real number"),
    ("complex", "type", "returned 1j of type complex, not a real number"),
    ("list", "type", "returned [1.0] of type list, not a real number"),
    ("object", "type", "of type object, not a real number"),
    ("array", "shape", "returned an array of shape (2,), not one number"),
    ("empty", "shape", "returned an array of shape (0,), not one number"),
    ("text array", "type", "not a real number"),
]


def as_batched(fn):
    return Reward(lambda completions, samples: list(map(fn, completions, samples)), batched=True)


def as_async(fn):
    async def call(completion, sample):
        await asyncio.sleep(0)
        return fn(completion, sample)

    call.__qualname__ = fn.__qualname__
    return call


def check_failure(scorer, position, what, kind, problem):
    completions = ["fine"] * 4
    completions[position] = what
    before = scorer.errors[kind]
    scores = scorer.score(completions, SAMPLES)
    assert scores.values.dtype == np.float64
    assert scores.values.tolist() == [0.0 if i == position else 0.5 for i in range(4)]
    assert scores.masked.tolist() == [i == position for i in range(4)]
    assert [error is not None for error in scores.errors] == [i == position for i in range(4)]
    for part in (problem, "misbehave", f"sample {position}", f"'prompt {position}'", repr(what)):
        assert part in scores.errors[position]
    assert scorer.errors[kind] == before + 1


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize(("what", "kind", "problem"), IN_PROCESS)
@pytest.mark.parametrize("wrap", [lambda fn: fn, as_async])
def test_a_failure_costs_its_own_sample(closing, wrap, what, kind, problem, position):
    scorer = closing(TASK, wrap(make_misbehaving()), on_error="mask")
    check_failure(scorer, position, what, kind, problem)
    assert scorer.errors.total() == 1


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize(("what", "kind", "problem"), IN_PROCESS[1:])
def test_one_bad_entry_of_a_batch_costs_its_own_sample(what, kind, problem, position):
    reward = as_batched(make_misbehaving())
    completions = ["fine"] * 4
    completions[position] = what
    scorer = Scorer(TASK, reward, on_error="mask")
    scores = scorer.score(completions, SAMPLES)
    assert scores.masked.tolist() == [i == position for i in range(4)]
    assert problem in scores.errors[position]
    assert scorer.errors == {kind: 1}


@pytest.mark.parametrize(("fn", "kind", "problem"), [
    (lambda c, s: 1 / 0, "exception", "ZeroDivisionError"),
    (lambda c, s: None, "none", "returned None instead of 4 numbers"),
    (lambda c, s: [1.0] * 3, "shape", "returned 3 values for 4 samples"),
    (lambda c, s: [], "shape", "returned 0 values for 4 samples"),
    (lambda c, s: np.zeros((5, 1)), "shape", "returned 5 values for 4 samples"),
    (lambda c, s: np.zeros(()), "shape", "not a sequence of 4 numbers"),
    (lambda c, s: np.zeros((4, 2)), "shape", "an array of shape (2,)"),
    (lambda c, s: 1.0, "type", "returned 1.0 of type float, not a sequence of 4 numbers"),
    (lambda c, s: "1111", "type", "of type str, not a sequence"),
    (lambda c, s: dict.fromkeys(range(4), 1.0), "type", "of type dict, not a sequence"),
])  # fmt: skip
def test_a_batch_that_fails_as_a_whole_fails_every_sample(fn, kind, problem):
    scorer = Scorer(TASK, Reward(fn, batched=True), on_error="mask")
    scores = scorer.score(OK, SAMPLES)
    assert scores.masked.all()
    assert all(problem in error for error in scores.errors)
    assert scorer.errors == {kind: 4}


class FakeTensor:
    """What a 0-d tensor looks like to those who do not import torch."""

    shape = ()

    def item(self):
        return 0.25


class Unhelpful:
    shape = ()

    def item(self):
        raise RuntimeError("on the meta device")

    def __repr__(self):
        raise RuntimeError("no repr either")


class BadError(Exception):
    def __str__(self):
        raise RuntimeError("no message")


@pytest.mark.parametrize("value", [
    0.25, 1, True, False, np.float32(0.25), np.int8(3), np.bool_(True), np.array(0.25),
    np.array([0.25]), np.array([[1]]), FakeTensor(), Fraction(1, 4),
])  # fmt: skip
def test_what_counts_as_a_number(value):
    expected = float(value.item() if hasattr(value, "item") else value)
    scores = Scorer(TASK, lambda c, s: value).score(["x"], SAMPLES[:1])
    assert scores.values.tolist() == [expected]
    assert scores.errors == [None]
    assert not scores.masked.any()


@pytest.mark.parametrize("values", [
    [0, 1.5, True, np.float32(3)], (0, 1.5, 1, 3), np.array([0, 1.5, 1, 3], dtype=np.float32),
    np.array([[0], [1.5], [1], [3]]), (x for x in (0, 1.5, 1, 3)),
])  # fmt: skip
def test_what_counts_as_numbers(values):
    scores = Scorer(TASK, Reward(lambda c, s: values, batched=True)).score(OK, SAMPLES)
    assert scores.values.tolist() == [0, 1.5, 1, 3]


def test_a_torch_tensor_is_a_number():
    torch = pytest.importorskip("torch")
    scorer = Scorer(TASK, lambda c, s: torch.tensor(0.5, requires_grad=True))
    assert scorer.score(["x"], SAMPLES[:1]).values.tolist() == [0.5]
    scorer = Scorer(TASK, Reward(lambda c, s: torch.arange(4), batched=True))
    assert scorer.score(OK, SAMPLES).values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [Unhelpful(), BadError()])
def test_failures_that_cannot_be_described_are_reported_too(value):
    def reward(completion, sample):
        if isinstance(value, Exception):
            raise value
        return value

    scores = Scorer(TASK, reward, on_error="mask").score(["x"], SAMPLES[:1])
    assert type(value).__name__ in scores.errors[0]


# on_error


def test_raise_is_the_default_and_chains():
    scorer = Scorer(TASK, make_misbehaving())
    with pytest.raises(
        RewardError,
        match=r"misbehave raised ValueError: bad sample, for sample 1 "
        r"with prompt 'prompt 1' and completion 'exception'; repair it",
    ) as caught:
        scorer.score(["x", "exception"], SAMPLES[:2])  # fmt: skip
    assert isinstance(caught.value.__cause__, ValueError)
    assert scorer.errors == {"exception": 1}
    assert scorer.score(["x"], SAMPLES[:1]).values.tolist() == [0.5]


def test_a_number_stands_in_unmasked():
    scorer = Scorer(TASK, make_misbehaving(), on_error=-1)
    scores = scorer.score(["x", "nan"], SAMPLES[:2])
    assert scores.values.tolist() == [0.5, -1.0]
    assert not scores.masked.any()
    assert "returned nan" in scores.errors[1]


def test_the_first_of_a_kind_warns_and_all_count():
    scorer = Scorer(TASK, make_misbehaving(), on_error="mask")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scorer.score(["exception", "nan", "exception", "x"], SAMPLES)
        scorer.score(["exception", "inf", "x", "x"], SAMPLES)
    assert [re.search("'(exception|nan)' are only counted", str(w.message))[1] for w in caught] == [
        "exception",
        "nan",
    ]
    assert {w.filename for w in caught} == {__file__}
    assert scorer.errors == {"exception": 3, "nan": 2}


def test_long_texts_are_shortened():
    task = FunctionTask(["p" * 10_000], ["a"])
    scorer = Scorer(task, lambda c, s: "r" * 10_000, on_error="mask")
    assert len(scorer.score(["c" * 10_000], [task[0]]).errors[0]) < 500


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("wrap", [lambda fn: fn, as_async, as_batched])
def test_requests_to_stop_pass(closing, error, wrap):
    def reward(completion, sample):
        raise error

    scorer = closing(TASK, wrap(reward), on_error="mask")
    with pytest.raises(error):
        scorer.score(OK, SAMPLES)


# The task's own score and is_correct


def test_the_task_scores_by_default():
    scorer = Scorer(TASK)
    assert scorer.score(OK, SAMPLES).values.tolist() == [1, 1, 0, 1]
    assert scorer.is_correct(OK, SAMPLES).tolist() == [True, True, False, True]
    assert scorer.is_correct(OK, SAMPLES).dtype == bool
    assert scorer.per == "sequence"
    assert Scorer(TASK, Reward(len, per="token")).per == "token"


@pytest.mark.parametrize("on_error", ["mask", 1.0, "raise"])
def test_is_correct_is_guarded(on_error):
    class Broken(FunctionTask):
        def is_correct(self, completion, sample):
            return None if completion == "x" else True

    scorer = Scorer(Broken(["p"], ["a"]), lambda c, s: 0.0, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(RewardError, match=r"Broken.is_correct returned None"):
            scorer.is_correct(OK, SAMPLES)
    else:
        assert scorer.is_correct(OK, SAMPLES).tolist() == [True, True, False, True]
        assert scorer.errors == {"none": 1}


def test_an_empty_batch_calls_nothing():
    scores = Scorer(TASK, Reward(lambda c, s: 1 / 0, batched=True), timeout=1).score([], [])
    assert (scores.values.shape, scores.masked.shape, scores.errors) == ((0,), (0,), [])


@given(st.lists(st.floats(), min_size=1, max_size=8), st.booleans())
def test_values_are_finite_and_in_order(values, batched):
    task = FunctionTask(["p"] * len(values), ["a"] * len(values))
    if batched:
        reward = Reward(lambda c, s: values, batched=True)
    else:
        reward = Reward(lambda c, s: values[s.index])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = Scorer(task, reward, on_error="mask").score(["c"] * len(values), list(task))
    bad = ~np.isfinite(values)
    assert scores.masked.tolist() == bad.tolist()
    assert scores.values.tolist() == np.where(bad, 0.0, values).tolist()


def test_global_generators_are_untouched():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    Scorer(TASK).score(OK, SAMPLES)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


# Names and arguments


class Judge:
    def __call__(self, completion, sample):
        return None

    def judge(self, completion, sample):
        return None

    @classmethod
    def by_class(cls, completion, sample):
        return None


@pytest.mark.parametrize(("fn", "name"), [
    (Judge(), "Judge"),
    (Judge().judge, "Judge.judge"),
    (Judge.by_class, "Judge.by_class"),
    (functools.partial(Judge().judge), "Judge.judge"),
    (TASK.score, "FunctionTask.score"),
    (len, "len"),
])  # fmt: skip
def test_names(fn, name):
    assert Reward(fn).name == name


@pytest.mark.parametrize(("error", "make", "match"), [
    (TypeError, lambda: Reward(3), "must be a callable, got 3"),
    (TypeError, lambda: Scorer(TASK, "score"), "must be a callable, got 'score'"),
    (ValueError, lambda: Reward(len, per="word"), "'sequence' or 'token', got 'word'"),
    (ValueError, lambda: Scorer(TASK, timeout=0), "timeout must be a positive number"),
    (ValueError, lambda: Scorer(TASK, timeout=math.inf), "timeout must be a positive number"),
    (ValueError, lambda: Scorer(TASK, timeout="1"), "timeout must be a positive number"),
    (ValueError, lambda: Scorer(TASK, on_error="skip"), "on_error must be .* got 'skip'"),
    (ValueError, lambda: Scorer(TASK, on_error=math.nan), "on_error must be .* got nan"),
    (ValueError, lambda: Scorer(TASK, on_error=True), "on_error must be .* got True"),
    (ValueError, lambda: Scorer(TASK).score(["a"], SAMPLES), "1 completions came with 4 samples"),
])  # fmt: skip
def test_argument_errors(error, make, match):
    with pytest.raises(error, match=match):
        make()


# Async


def test_async_calls_run_at_the_same_time(closing):
    waiting = 0

    async def reward(completion, sample):
        nonlocal waiting
        waiting += 1
        while waiting < 4:
            await asyncio.sleep(0.001)
        return sample.index

    assert closing(TASK, reward).score(OK, SAMPLES).values.tolist() == [0, 1, 2, 3]


def test_async_within_a_running_loop_and_one_loop_for_all_batches(closing):
    loops = set()

    async def reward(completions, samples):
        loops.add(asyncio.get_running_loop())
        return [1.0] * len(samples)

    scorer = closing(TASK, Reward(reward, batched=True))

    async def notebook_cell():
        return scorer.score(OK, SAMPLES).values.sum()

    assert asyncio.run(notebook_cell()) == 4
    assert scorer.score(OK, SAMPLES).values.sum() == 4
    assert len(loops) == 1


def test_an_async_callable_object_and_a_self_cancelling_one(closing):
    class Client:
        async def __call__(self, completion, sample):
            if completion == "x":
                raise asyncio.CancelledError
            return 1.0

    scorer = closing(TASK, Client(), on_error="mask")
    assert scorer.score(OK, SAMPLES).masked.tolist() == [False, False, True, False]
    assert scorer.errors == {"exception": 1}


def test_a_coroutine_from_a_plain_function_is_explained():
    async def reward(completion, sample):
        return 1.0

    with pytest.raises(RewardError, match="write the reward itself as 'async def'"):
        Scorer(TASK, lambda c, s: reward(c, s)).score(OK, SAMPLES)
    with pytest.raises(RewardError, match="write the reward itself as 'async def'"):
        Scorer(TASK, Reward(lambda c, s: reward(c, s), batched=True)).score(OK, SAMPLES)


def test_closing_ends_the_loop_and_it_starts_again(closing):
    async def reward(completion, sample):
        return 1.0

    scorer = closing(TASK, reward)
    for _ in range(2):
        assert scorer.score(OK, SAMPLES).values.sum() == 4
        scorer.close()


# Time limits: a worker process. Starting one takes a while, so the tests share it.


@pytest.fixture(scope="module")
def worker():
    scorer = Scorer(TASK, make_misbehaving(), timeout=0.5, on_error="mask")
    yield scorer
    scorer.close()


def pid_of(scorer):
    return int(scorer.score(["pid"], SAMPLES[:1]).values[0])


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize(
    ("what", "kind", "problem"),
    [*IN_PROCESS, ("system exit", "exception", "raised SystemExit: 3")],
)
def test_a_failure_in_the_worker_costs_its_own_sample(worker, what, kind, problem, position):
    pid = pid_of(worker)
    check_failure(worker, position, what, kind, problem)
    assert pid_of(worker) == pid


HANGING = [
    ("loop", 0, "timeout", "took longer than the limit of 0.5 s"),
    ("sleep", 1, "timeout", "took longer than the limit of 0.5 s"),
    ("hold the GIL", 2, "timeout", "took longer than the limit of 0.5 s"),
    ("backtrack", 3, "timeout", "took longer than the limit of 0.5 s"),
    ("exit", 0, "exit", "ended its process with exit code 3"),
    ("exit", 3, "exit", "ended its process with exit code 3"),
]


@pytest.mark.parametrize(("what", "position", "kind", "problem"), HANGING)
def test_a_hanging_sample_costs_only_itself(worker, what, position, kind, problem):
    pid = pid_of(worker)
    check_failure(worker, position, what, kind, problem)
    assert pid_of(worker) != pid
    assert no_process(pid)


def test_several_may_hang_in_a_batch(worker):
    scores = worker.score(["loop", "fine", "exit", "sleep"], SAMPLES)
    assert scores.masked.tolist() == [True, False, True, True]


def test_the_limit_is_for_each_sample_and_the_worker_stays(closing):
    def reward(completion, sample):
        time.sleep(0.3)
        return os.getpid()

    scorer = closing(TASK, reward, timeout=1.0)
    first, second = (scorer.score(OK, SAMPLES).values for _ in range(2))
    assert len({*first, *second, os.getpid()}) == 2
    assert scorer.errors == {}


def test_the_worker_does_not_import_torch(worker):
    assert worker.score(["torch"], SAMPLES[:1]).values.tolist() == [0.0]


def test_is_correct_and_the_task_in_the_worker(worker):
    assert worker.is_correct(OK, SAMPLES).tolist() == [True, True, False, True]


def test_raise_leaves_a_worker_that_works(closing):
    scorer = closing(TASK, make_misbehaving(), timeout=5)
    with pytest.raises(RewardError, match="bad sample") as caught:
        scorer.score(["exception", "x", "x", "x"], SAMPLES)
    assert "in the worker:" in str(caught.value.__cause__)
    assert "in misbehave" in str(caught.value.__cause__)
    # No answer of the abandoned batch comes up in the next.
    assert scorer.score(["x", "pid"], SAMPLES[:2]).values[0] == 0.5


def test_a_batch_that_hangs_fails_as_a_whole(closing):
    reward = as_batched(make_misbehaving())
    scorer = closing(TASK, reward, timeout=0.5, on_error="mask")
    assert scorer.score(["x", "loop", "x", "x"], SAMPLES).masked.all()
    assert scorer.errors == {"timeout": 4}
    assert not scorer.score(OK, SAMPLES).masked.any()


def test_async_under_a_time_limit(closing):
    def make():
        async def reward(completion, sample):
            if completion == "wait":
                await asyncio.sleep(1000)
            if completion == "block":
                time.sleep(1000)
            return os.getpid()

        return reward

    scorer = closing(TASK, make(), timeout=0.5, on_error="mask")
    scores = scorer.score(["x", "wait", "x", "wait"], SAMPLES)
    assert scores.masked.tolist() == [False, True, False, True]
    assert (
        len({scores.values[0], scores.values[2], scorer.score(["x"], SAMPLES[:1]).values[0]}) == 1
    )
    scores = scorer.score(["x", "block", "x", "x"], SAMPLES)
    assert scores.masked.tolist() == [False, True, False, False]
    assert scorer.errors == {"timeout": 3}


def test_what_cannot_be_pickled_is_explained(closing):
    lock = threading.Lock()
    with pytest.raises(RewardError, match=r"needs the reward to be picklable.*set no timeout"):
        Scorer(TASK, lambda c, s: lock.locked(), timeout=1)
    scorer = closing(TASK, timeout=5)
    with pytest.raises(RewardError, match="needs a sample to be picklable"):
        scorer.score(["a"], [Sample("p", "a", metadata={"lock": lock})])
    assert scorer.score(OK, SAMPLES).values.tolist() == [1, 1, 0, 1]


def test_a_reward_that_cannot_be_loaded_is_explained(closing):
    class Unloadable:
        def __reduce__(self):
            return int, ("not a number",)

        def __call__(self, completion, sample):
            return 0.0

    scorer = closing(TASK, Unloadable(), timeout=1)
    with pytest.raises(RewardError, match=r"Unloadable cannot start: raised ValueError"):
        scorer.score(OK, SAMPLES)


def test_close_leaves_no_process_and_a_later_call_starts_one(worker):
    pid = pid_of(worker)
    worker.close()
    worker.close()
    assert no_process(pid)
    assert pid_of(worker) != pid


def test_a_forgotten_scorer_leaves_no_process():
    scorer = Scorer(TASK, make_misbehaving(), timeout=5)
    pid = pid_of(scorer)
    del scorer
    assert no_process(pid)


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_a_script_without_main_guard_leaves_no_process(tmp_path, ending):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from textrl_env.rewards import Scorer\n"
        "from textrl_env.tasks import make_task\n"
        "task = make_task('addition')\n"
        "def reward(completion, sample): return os.getpid()\n"
        "scorer = Scorer(task, reward, timeout=5)\n"
        "print(int(scorer.score(['a'], [task[0]]).values[0]), flush=True)\n" + ending
    )
    root = str(Path(__file__).parents[1])
    out = subprocess.run(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
        check=not ending,
    )
    deadline = time.monotonic() + 10
    while not no_process(int(out.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert no_process(int(out.stdout))
