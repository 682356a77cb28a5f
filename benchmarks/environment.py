"""What the environment costs: the native vector against its peers, and the reference per token.

``python -m benchmarks.environment`` writes ``results/environment.json``:

- tokens per second of ``gym.make_vec("TextRL-v0")`` without a model, against Gymnasium's
  `SyncVectorEnv` over the single environment, in paired runs;
- time per step with the reference model at the 16th and at the 256th token.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.vector import SyncVectorEnv, VectorEnv
from numpy.typing import NDArray
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

import textrl_env  # noqa: F401 (registers TextRL-v0)
from benchmarks import record

_EOS = 2  # of the embedded tokenizer
_WINDOWS = (16, 256)  # tokens at which a step is timed


@dataclass(frozen=True)
class Config:
    """Measures the environment.

    Attributes:
        num_envs: Slots of the vector environments.
        steps: Steps of one timing without a model.
        pairs: Paired timings.
        reference_envs: Slots of the timings with the reference.
        reference_tokens: Tokens of its episodes.
        repeats: Episodes that its time per step is the median of.
    """

    num_envs: int = 256
    steps: int = 200
    pairs: int = 7
    reference_envs: tuple[int, ...] = (8, 16, 32, 64)
    reference_tokens: int = 272
    repeats: int = 15


def step_rate(venv: VectorEnv[Any, Any, Any], steps: int) -> float:
    """Returns tokens per second of stepping with the same kind of random tokens."""
    generator = np.random.default_rng(0)
    venv.reset(seed=0)
    # Printable characters, and an end of sequence every tenth token.
    actions = generator.integers(35, 129, size=(steps, venv.num_envs))
    actions[generator.random(actions.shape) < 0.1] = _EOS
    start = time.perf_counter()
    for row in actions:
        venv.step(row)
    return actions.size / (time.perf_counter() - start)


def compare_vectors(config: Config, task: str) -> dict[str, Any]:
    """Returns tokens per second of both vectors and the ratio of each pair."""
    options: dict[str, Any] = {"task": task, "kl_mode": "none", "max_new_tokens": 64}
    native = gym.make_vec("TextRL-v0", num_envs=config.num_envs, **options)
    sync = SyncVectorEnv([lambda: gym.make("TextRL-v0", **options)] * config.num_envs)
    step_rate(native, 10)
    step_rate(sync, 10)
    rates = [
        (step_rate(native, config.steps), step_rate(sync, config.steps))
        for _ in range(config.pairs)
    ]
    ratios = [a / b for a, b in rates]
    return {
        "native_tokens_per_second": [round(a) for a, _ in rates],
        "sync_tokens_per_second": [round(b) for _, b in rates],
        "ratio_median": float(np.median(ratios)),
        "ratio_min": min(ratios),
    }


def reference_growth(config: Config, num_envs: int) -> dict[str, Any]:
    """Returns the time per step with the reference, early and late in an episode.

    Attention reads all keys and values so far, so its share grows by its nature; the rest of the
    step must not.
    """
    venv = gym.make_vec(
        "TextRL-v0",
        num_envs=num_envs,
        task="sentiment",
        stop=(),
        max_new_tokens=config.reference_tokens,
        kl_coef=0.0,
    )
    generator = np.random.default_rng(0)
    seconds = np.zeros((config.repeats, config.reference_tokens - 1))
    attention = dict.fromkeys(_WINDOWS, 0.0)
    for repeat in range(config.repeats + 1):
        venv.reset(seed=repeat)
        for t in range(config.reference_tokens - 1):
            actions = generator.integers(97, 123, size=num_envs)  # lower-case letters
            start = time.perf_counter()
            if repeat == config.repeats and t in _WINDOWS:
                attention[t] = _attention_seconds(venv, actions)
            else:
                venv.step(actions)
            if repeat < config.repeats:
                seconds[repeat, t] = time.perf_counter() - start
    early, late = (float(np.median(seconds[:, t - 8 : t + 8])) for t in _WINDOWS)
    early_attention, late_attention = attention.values()
    return {
        "seconds_at_token_16": early,
        "seconds_at_token_256": late,
        "growth": late / early - 1,
        "attention_seconds_at_token_16": early_attention,
        "attention_seconds_at_token_256": late_attention,
        "growth_beyond_attention": (late - late_attention) / (early - early_attention) - 1,
    }


def _attention_seconds(venv: VectorEnv[Any, Any, Any], actions: NDArray[np.int64]) -> float:
    """Takes a step under the profiler, whose own cost stays out of the other timings."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        venv.step(actions)
    return sum(
        event.self_cpu_time_total / 1e6
        for event in profiler.key_averages()
        if "scaled_dot_product" in event.key
    )


def main(config: Config) -> None:
    """Runs the benchmark."""
    console = Console()
    results: dict[str, Any] = {}
    for task in ("addition", "sort"):
        results[f"vector_{task}"] = compare_vectors(config, task)
        console.print(task, results[f"vector_{task}"])
    for num_envs in config.reference_envs:
        results[f"reference_{num_envs}"] = reference_growth(config, num_envs)
        console.print(f"reference, {num_envs} slots", results[f"reference_{num_envs}"])
    console.print(f"Wrote {record.write('environment', dataclasses.asdict(config), results)}")


if __name__ == "__main__":
    main(tyro.cli(Config))
