"""Runs the benchmarks: ``python -m benchmarks [environment] [addition]``.

``control`` and ``control_speed`` take hours, and run when they are named only.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

Benchmark = Literal["environment", "addition", "control", "control_speed"]


@dataclass(frozen=True)
class BenchmarksConfig:
    """Runs benchmarks with their default configuration.

    Attributes:
        names: Which ones, in this order; each also has a command line of its own, such as
            ``python -m benchmarks.addition --help``.
    """

    names: Annotated[tuple[Benchmark, ...], tyro.conf.Positional] = ("environment", "addition")


def main(config: BenchmarksConfig) -> None:
    """Runs each benchmark."""
    for name in config.names:
        module = importlib.import_module(f"benchmarks.{name}")
        module.main(module.Config())


if __name__ == "__main__":
    main(tyro.cli(BenchmarksConfig))
