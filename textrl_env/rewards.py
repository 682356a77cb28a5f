"""Guarded scoring: a reward that fails is counted, reported and handled, and stops nothing.

Three layers: `_Caller` calls a function on a batch and turns whatever happens into outcomes;
`_Worker` has that done by a process that can be killed; `Scorer` counts, reports and handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import multiprocessing
import numbers
import os
import pickle
import reprlib
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np

from textrl_env.tasks.base import Sample, Task, is_finite_number


class RewardError(RuntimeError):
    """A reward failed and ``on_error="raise"``, or it cannot be run at all."""


@dataclass(frozen=True)
class Reward:
    """A scoring function and how it wants to be called; a plain callable is ``Reward(fn)``.

    Attributes:
        fn: ``fn(completion, sample) -> float``, or with ``batched`` ``fn(completions, samples)``
            returning a number for each. Plain or ``async def``; async calls of a batch run at the
            same time.
        per: ``"sequence"`` scores finished completions, ``"token"`` the text so far, after every
            token.
        batched: Whether `fn` takes a whole batch.

    Raises:
        TypeError: `fn` is not callable.
        ValueError: `per` is neither of the two.

    >>> Reward(lambda completion, sample: len(completion)).per
    'sequence'
    """

    fn: Callable[..., Any]
    per: Literal["sequence", "token"] = "sequence"
    batched: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"a reward must be a callable, got {reprlib.repr(self.fn)}")
        if self.per not in ("sequence", "token"):
            raise ValueError(f"per must be 'sequence' or 'token', got {self.per!r}")

    @property
    def name(self) -> str:
        """The name of the function, as errors report it."""
        fn = self.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        if inspect.ismethod(fn) and not inspect.isclass(fn.__self__):
            return f"{type(fn.__self__).__qualname__}.{fn.__name__}"
        return str(getattr(fn, "__qualname__", type(fn).__qualname__))

    @property
    def is_async(self) -> bool:
        """Whether a call gives an awaitable."""
        return inspect.iscoroutinefunction(self.fn) or inspect.iscoroutinefunction(
            type(self.fn).__call__
        )


class Scores(NamedTuple):
    """What `Scorer.score` gives for a batch.

    Attributes:
        values: The rewards, always finite.
        masked: Where the reward failed and the sample must leave the loss.
        errors: The report of each failure, None where there was none.
    """

    values: np.ndarray
    masked: np.ndarray
    errors: list[str | None]


class Scorer:
    """Scores completions with a function that may do anything.

    A call fails that raises (kind ``"exception"``), exceeds the time limit (``"timeout"``), ends
    its process (``"exit"``), or returns NaN or an infinity (``"nan"``), None (``"none"``), an array
    of another size than one or a batch of another length (``"shape"``), or anything else that is
    not a real number (``"type"``). Each failed sample is counted; the first of a kind is reported
    by a warning, with the function's name and the sample. KeyboardInterrupt always passes, and so
    does SystemExit in this process, where a signal handler may have raised it.

    Without a time limit the function is called in this process. With one it is called in a worker
    process, to which it must be picklable (by cloudpickle): on reaching the limit the worker is
    killed, which stops any code, and a fresh one scores the rest of the batch.

    Args:
        task: Where the samples come from.
        reward: What scores them, in place of ``task.score``.
        timeout: Seconds for a sample, or for the batch of a batched reward.
        on_error: ``"raise"`` raises RewardError; ``"mask"`` gives 0 and marks the sample as masked;
            a number is given as the reward.

    Attributes:
        errors: How many samples failed, by kind.

    Raises:
        TypeError: `reward` is not a callable.
        ValueError: `timeout` or `on_error` is outside its range.
        RewardError: There is a time limit, and the function cannot be pickled.

    >>> from textrl_env.tasks import make_task
    >>> task = make_task("addition")
    >>> scorer = Scorer(task)
    >>> samples = [task[0], task[0]]
    >>> scorer.score([task[0].answer, "?"], samples).values
    array([1., 0.])
    >>> with warnings.catch_warnings(record=True):
    ...     scorer = Scorer(task, lambda completion, sample: 1 / len(completion), on_error="mask")
    ...     scores = scorer.score(["ab", ""], samples)
    >>> scores.values, scores.masked, dict(scorer.errors)
    (array([0.5, 0. ]), array([False,  True]), {'exception': 1})
    """

    def __init__(
        self,
        task: Task,
        reward: Callable[..., Any] | Reward | None = None,
        *,
        timeout: float | None = None,
        on_error: Literal["raise", "mask"] | float = "raise",
    ) -> None:
        if timeout is not None and not (is_finite_number(timeout) and timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        if on_error not in ("raise", "mask") and not is_finite_number(on_error):
            raise ValueError(f"on_error must be 'raise', 'mask' or a number, got {on_error!r}")
        if not isinstance(reward, Reward):
            reward = Reward(task.score if reward is None else reward)
        self.errors: Counter[str] = Counter()
        self._on_error = on_error
        self._rewards = {"score": reward, "is_correct": Reward(task.is_correct)}
        self._worker = None if timeout is None else _Worker(self._rewards, timeout)
        self._callers = {
            name: _Caller(reward, catch=Exception) for name, reward in self._rewards.items()
        }

    @property
    def per(self) -> Literal["sequence", "token"]:
        """Whether finished completions are scored or the text after every token."""
        return self._rewards["score"].per

    def score(self, completions: Sequence[str], samples: Sequence[Sample]) -> Scores:
        """The rewards of the completions.

        Raises:
            RewardError: A reward failed and ``on_error="raise"``, or the worker cannot start.
            ValueError: There are not as many completions as samples.
        """
        outcomes = self._outcomes("score", completions, samples)
        instead = self._on_error if is_finite_number(self._on_error) else 0.0
        return Scores(
            np.array([instead if o.kind else o.value for o in outcomes], dtype=np.float64),
            np.array([self._on_error == "mask" and bool(o.kind) for o in outcomes], dtype=bool),
            [o.problem for o in outcomes],
        )

    def is_correct(self, completions: Sequence[str], samples: Sequence[Sample]) -> np.ndarray:
        """Which completions are correct by ``task.is_correct``; one where it fails is not.

        Raises:
            RewardError: As `score`.
            ValueError: As `score`.
        """
        outcomes = self._outcomes("is_correct", completions, samples)
        return np.array([not o.kind and o.value != 0 for o in outcomes], dtype=bool)

    def close(self) -> None:
        """Ends the worker process and the event loop; a later call starts them again."""
        if self._worker is not None:
            self._worker.stop()
        for caller in self._callers.values():
            caller.close()

    def _outcomes(
        self, what: str, completions: Sequence[str], samples: Sequence[Sample]
    ) -> list[_Outcome]:
        completions, samples = list(completions), list(samples)
        if len(completions) != len(samples):
            raise ValueError(f"{len(completions)} completions came with {len(samples)} samples")
        if not samples:
            return []
        if self._worker is None:
            running = self._callers[what].run(completions, samples, None)
        else:
            running = self._worker.run(what, completions, samples)
        outcomes = []
        with contextlib.closing(running):
            for completion, sample, outcome in zip(completions, samples, running, strict=True):
                if outcome.kind:
                    report = self._report(what, outcome, completion, sample)
                    outcome = outcome._replace(problem=report)
                outcomes.append(outcome)
        return outcomes

    def _report(self, what: str, outcome: _Outcome, completion: str, sample: Sample) -> str:
        report = (
            f"reward {self._rewards[what].name} {outcome.problem}, for sample {sample.index} with "
            f"prompt {_shorten(repr(sample.prompt))} and completion {_shorten(repr(completion))}"
        )
        kind = str(outcome.kind)
        self.errors[kind] += 1
        if self._on_error == "raise":
            raise RewardError(
                f"{report}; repair it, or go on with on_error='mask' or a number"
            ) from outcome.cause
        if self.errors[kind] == 1:
            warnings.warn(
                f"{report}; further errors of kind {kind!r} are only counted", stacklevel=4
            )
        return report


class _Outcome(NamedTuple):
    """A number, or what is wrong and its kind."""

    value: float
    kind: str | None = None
    problem: str | None = None
    cause: BaseException | None = None


def _failure(kind: str, problem: str, cause: BaseException | None = None) -> _Outcome:
    return _Outcome(math.nan, kind, problem, cause)


def _raised(error: BaseException) -> _Outcome:
    # The traceback module survives a __str__ that raises.
    described = traceback.format_exception_only(type(error), error)[-1].strip()
    return _failure("exception", f"raised {_shorten(described, 300)}", error)


def _overdue(timeout: float) -> _Outcome:
    return _failure("timeout", f"took longer than the limit of {timeout:g} s")


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]}...{text[-17:]}"


def _describe(value: Any) -> str:
    return f"{_shorten(reprlib.repr(value))} of type {type(value).__name__}"


def _number(value: Any) -> _Outcome:
    """The outcome of a call that returned a value."""
    if value is None:
        return _failure("none", "returned None instead of a number")
    if inspect.iscoroutine(value):
        value.close()
        return _failure("type", "returned a coroutine: write the reward itself as 'async def'")
    try:
        if hasattr(value, "shape") and hasattr(value, "item"):  # NumPy, torch and their like
            if math.prod(value.shape) != 1:
                shape = tuple(value.shape)
                return _failure("shape", f"returned an array of shape {shape}, not one number")
            value = value.item()
        if not isinstance(value, numbers.Real):
            return _failure("type", f"returned {_describe(value)}, not a real number")
        number = float(value)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    except Exception as error:
        return _failure("type", f"returned {_describe(value)}, which gives no number", error)
    if not math.isfinite(number):
        return _failure("nan", f"returned {number}, not a finite number")
    return _Outcome(number)


def _numbers(values: Any, n: int) -> list[_Outcome]:
    """The outcomes of a batched call that returned values for n samples."""
    if values is None:
        return [_failure("none", f"returned None instead of {n} numbers")] * n
    if inspect.iscoroutine(values):
        return [_number(values)] * n
    if isinstance(values, str | bytes | Mapping | Set):
        problem = f"returned {_describe(values)}, not a sequence of {n} numbers"
        return [_failure("type", problem)] * n
    try:
        values = list(values)
    except Exception as error:
        kind = "shape" if hasattr(values, "shape") else "type"
        problem = f"returned {_describe(values)}, not a sequence of {n} numbers"
        return [_failure(kind, problem, error)] * n
    if len(values) != n:
        return [_failure("shape", f"returned {len(values)} values for {n} samples")] * n
    return [_number(value) for value in values]


class _Caller:
    """Calls a reward on batches, in whichever process it lives.

    Args:
        reward: What to call.
        catch: The exceptions that make an outcome; others pass.
    """

    def __init__(self, reward: Reward, catch: type[BaseException]) -> None:
        self._reward = reward
        self._catch = catch
        self._loop: _Loop | None = None

    def run(
        self, completions: list[str], samples: list[Sample], timeout: float | None
    ) -> Generator[_Outcome, None, None]:
        """Gives the outcomes in order, each as soon as it is known.

        The time limit is for async calls; others are limited by whoever can kill the process.
        """
        if self._reward.batched:
            calls: list[tuple[Any, Any]] = [(completions, samples)]
        else:
            calls = list(zip(completions, samples, strict=True))
        for result in self._results(calls, timeout):
            if isinstance(result, _Outcome):
                if result.cause is not None and not isinstance(result.cause, self._catch):
                    raise result.cause
                yield from [result] * (len(samples) if self._reward.batched else 1)
            elif self._reward.batched:
                yield from _numbers(result, len(samples))
            else:
                yield _number(result)

    def close(self) -> None:
        """Ends the event loop, if there is one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _results(
        self, calls: list[tuple[Any, Any]], timeout: float | None
    ) -> Generator[Any, None, None]:
        """What the calls return, or the outcomes of those that do not."""
        if self._reward.is_async:
            if self._loop is None:
                self._loop = _Loop()
            yield from self._loop.run(self._gather(calls, timeout))
            return
        for call in calls:
            try:
                result = self._reward.fn(*call)
            except BaseException as error:
                result = _raised(error)
            yield result

    async def _gather(self, calls: list[tuple[Any, Any]], timeout: float | None) -> list[Any]:
        return await asyncio.gather(*(self._await(call, timeout) for call in calls))

    async def _await(self, call: tuple[Any, Any], timeout: float | None) -> Any:
        async def attempt() -> Any:
            try:
                return await self._reward.fn(*call)
            except asyncio.CancelledError:  # by the time limit
                raise
            except BaseException as error:  # must not reach the loop, which some would end
                return _raised(error)

        try:
            return await asyncio.wait_for(attempt(), timeout)
        except asyncio.TimeoutError:
            return _overdue(timeout or math.nan)
        except asyncio.CancelledError as error:  # by the reward itself
            return _failure("exception", "cancelled itself", RuntimeError(repr(error)))


class _Loop:
    """An event loop in a thread of its own, so that it works within a running loop too.

    It stays for the next batch, because clients (HTTP sessions and the like) belong to a loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="textrl-rewards", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, self._end, self._loop, thread)

    def run(self, coroutine: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """The result of a coroutine."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @staticmethod
    def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=1)
        if not thread.is_alive():  # else a reward blocks it, and the daemon thread stays behind
            loop.close()


class _Worker:
    """A process that runs rewards and is killed when one exceeds its time.

    A plain subprocess rather than a `multiprocessing` one: that would import the user's main script
    again (with torch, and without end where the script has no ``__main__`` guard), and cannot be
    started by the daemonic processes of `gymnasium.vector.AsyncVectorEnv`.

    Args:
        rewards: What to run, by name.
        timeout: Seconds for one call.

    Raises:
        RewardError: The rewards cannot be pickled.
    """

    _START_LIMIT = 300.0  # seconds, for imports on a slow file system
    _GRACE = 1.0  # seconds that the worker has to cancel async calls by itself

    def __init__(self, rewards: Mapping[str, Reward], timeout: float) -> None:
        self._rewards = rewards
        self._timeout = timeout
        self._payload = self._dumps(rewards, "the reward")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._end: Callable[[], int | None] = lambda: None
        self._owner = os.getpid()

    def run(
        self, what: str, completions: list[str], samples: list[Sample]
    ) -> Generator[_Outcome, None, None]:
        """Gives the outcomes in order; a call that is lost costs only its own samples."""
        reward = self._rewards[what]
        concurrent = reward.is_async and not reward.batched
        one_by_one = False
        limit = self._timeout + (self._GRACE if reward.is_async else 0.0)
        n = len(samples)
        done = 0
        try:
            while done < n:
                end = done + 1 if one_by_one else n
                self._send((what, completions[done:end], samples[done:end], self._timeout))
                while done < end:
                    outcome = self._receive(limit)
                    lost = self._process is None
                    if lost and reward.batched:
                        yield from [outcome] * (n - done)
                        return
                    if lost and concurrent and end - done > 1:
                        one_by_one = True  # any of the concurrent calls may be the one that blocked
                        break
                    done += 1
                    yield outcome
                    if lost:
                        break
        finally:
            if done < n:  # whoever asked has gone, and the worker may still be busy
                self.stop()

    def stop(self) -> int | None:
        """Kills the process, if there is one, and gives its exit code."""
        self._process = self._connection = None
        return self._end()

    def _receive(self, limit: float) -> _Outcome:
        """The next outcome; when there is none the process has been stopped."""
        assert self._connection is not None
        assert self._process is not None
        if not self._connection.poll(limit):
            self.stop()
            return _overdue(self._timeout)
        try:
            value, kind, problem, cause = self._connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            return _failure("exit", f"ended its process with exit code {self.stop()}")
        return _Outcome(value, kind, problem, cause and RuntimeError(f"in the worker:\n{cause}"))

    def _send(self, request: tuple[Any, ...]) -> None:
        message = self._dumps(request, "a sample")
        self._start()
        assert self._connection is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _receive will tell
            self._connection.send_bytes(message)

    def _start(self) -> None:
        """Starts the process, unless it is there."""
        if self._owner != os.getpid():  # a fork of the process that started it
            self._process = None
            self._owner = os.getpid()
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        ours, theirs = multiprocessing.Pipe()
        boot = (
            f"import sys; sys.path[:] = {sys.path!r}; from textrl_env.rewards import _serve; "
            f"_serve({theirs.fileno()}, {os.getpid()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt from the keyboard is ours to handle
        )
        theirs.close()
        self._connection = ours
        self._end = weakref.finalize(self, _end_process, self._process, ours, self._owner)
        name = self._rewards["score"].name
        problem = f"no sign of life within {self._START_LIMIT:g} s"
        try:
            ours.send_bytes(self._payload)
            if ours.poll(self._START_LIMIT):
                problem = ours.recv()
        except (EOFError, OSError):
            problem = "it ended while it started, its own traceback says why"
        except BaseException:
            self.stop()
            raise
        if problem:
            self.stop()
            raise RewardError(f"the worker process for reward {name} cannot start: {problem}")

    def _dumps(self, thing: Any, label: str) -> bytes:
        import cloudpickle

        try:
            return bytes(cloudpickle.dumps(thing))
        except Exception as error:
            raise RewardError(
                f"a time limit needs {label} to be picklable, to run reward "
                f"{self._rewards['score'].name} in a worker process, but {_shorten(repr(error))}; "
                "create what cannot be pickled inside the function, or set no timeout"
            ) from error


def _end_process(
    process: subprocess.Popen[bytes], connection: Connection, owner: int
) -> int | None:
    if os.getpid() != owner:  # in a fork: not ours to end
        return None
    connection.close()
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group: with what the reward started
    return process.wait()


def _serve(descriptor: int, parent: int) -> None:
    """The worker process: runs what the connection asks for until it closes."""
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        rewards = pickle.loads(connection.recv_bytes())
        callers = {name: _Caller(reward, BaseException) for name, reward in rewards.items()}
    except BaseException as error:
        connection.send(_raised(error).problem)
        return
    connection.send(None)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        what, completions, samples, timeout = pickle.loads(message)
        for value, kind, problem, cause in callers[what].run(completions, samples, timeout):
            text = cause and "".join(
                traceback.format_exception(type(cause), cause, cause.__traceback__)
            )
            connection.send((value, kind, problem, text))


def _leave_with(parent: int) -> None:
    """Ends this process when its parent was killed while a reward runs for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
