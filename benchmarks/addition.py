"""Held-out accuracy on two-digit addition, before and after training, with every agent.

``python -m benchmarks.addition`` trains each algorithm with each seed by the recipes of
`agents.demo`, and writes ``results/addition.json`` after every run.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from agents.demo import RECIPES, Algorithm, DemoConfig, run
from benchmarks import record


@dataclass(frozen=True)
class Config:
    """Trains on two-digit addition.

    Attributes:
        algorithms: Algorithms to train with.
        seeds: Seeds of each.
        total_timesteps: Tokens of each run, at least.
    """

    algorithms: tuple[Algorithm, ...] = tuple(RECIPES)
    seeds: tuple[int, ...] = (0, 1, 2)
    total_timesteps: int = DemoConfig.total_timesteps


def main(config: Config) -> None:
    """Runs the benchmark."""
    console = Console()
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    configuration = {
        **dataclasses.asdict(config),
        "recipes": {name: RECIPES[name][1] for name in config.algorithms},
        "demo": dataclasses.asdict(DemoConfig()) | {"output": None},
    }
    for algorithm in config.algorithms:
        for seed in config.seeds:
            console.rule(f"{algorithm}, seed {seed}")
            with tempfile.TemporaryDirectory() as folder:
                demo = DemoConfig(
                    Path(folder),
                    algorithm=algorithm,
                    seed=seed,
                    total_timesteps=config.total_timesteps,
                )
                runs[algorithm].append({"seed": seed, **run(demo, console)})
            path = record.write("addition", configuration, runs)
    table = Table("algorithm", "before", "after (each seed)", "training seconds (median)")
    for name, results in runs.items():
        table.add_row(
            name,
            f"{results[0]['accuracy_before']:.1%}",
            ", ".join(f"{result['accuracy_after']:.1%}" for result in results),
            f"{np.median([result['training_seconds'] for result in results]):.0f}",
        )
    console.print(table)
    console.print(f"Wrote {path}")


if __name__ == "__main__":
    main(tyro.cli(Config))
