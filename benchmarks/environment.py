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
from rich.console import Console

import textrl_env  # noqa: F401 (registers TextRL-v0)
from benchmarks import record

_EOS = 2  # of the embedded tokenizer


@dataclass(frozen=True)
class Config:
    """Measures the environment.

    Attributes:
        num_envs: Slots of the vector environments.
        steps: Steps of one timing without a model.
        pairs: Paired timings.
        reference_envs: Slots of the timing with the reference.
        reference_tokens: Tokens of its episodes.
        repeats: Episodes that its time per step is the median of.
    """

    num_envs: int = 256
    steps: int = 200
    pairs: int = 7
    reference_envs: int = 32
    reference_tokens: int = 272
    repeats: int = 5


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


def reference_growth(config: Config) -> dict[str, Any]:
    """Returns the time per step with the reference, early and late in an episode."""
    venv = gym.make_vec(
        "TextRL-v0",
        num_envs=config.reference_envs,
        task="sentiment",
        stop=(),
        max_new_tokens=config.reference_tokens,
        kl_coef=0.0,
    )
    generator = np.random.default_rng(0)
    times = np.zeros((config.repeats, config.reference_tokens))
    for repeat in range(config.repeats):
        venv.reset(seed=repeat)
        for t in range(config.reference_tokens - 1):
            actions = generator.integers(97, 123, size=config.reference_envs)
            start = time.perf_counter()
            venv.step(actions)
            times[repeat, t] = time.perf_counter() - start

    def around(token: int) -> float:
        window = times[:, token - 8 : token + 8]
        return float(np.median(window))

    return {
        "seconds_at_token_16": around(16),
        "seconds_at_token_256": around(256),
        "growth": around(256) / around(16) - 1,
    }


def main(config: Config) -> None:
    """Runs the benchmark."""
    console = Console()
    results: dict[str, Any] = {}
    for task in ("addition", "sort"):
        results[f"vector_{task}"] = compare_vectors(config, task)
        console.print(task, results[f"vector_{task}"])
    results["reference"] = reference_growth(config)
    console.print("reference", results["reference"])
    console.print(f"Wrote {record.write('environment', dataclasses.asdict(config), results)}")


if __name__ == "__main__":
    main(tyro.cli(Config))
