"""What every benchmark records beside its figures."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "gymnasium", "stable-baselines3", "numpy", "textrl-env")


def write(
    name: str,
    configuration: dict[str, Any],
    results: Any,
    *,
    folder: Path = RESULTS,
    packages: tuple[str, ...] = (),
    torch_threads: int | None = None,
) -> Path:
    """Writes ``<folder>/<name>.json`` and returns its path.

    The file is replaced as a whole, so that an interruption leaves the old one.

    Args:
        name: Name of the benchmark; with slashes, of its part.
        configuration: Everything that was chosen: seeds, sizes, hyperparameters.
        results: The figures.
        folder: Where the results are.
        packages: More packages whose versions matter; those not installed are left out.
        torch_threads: Threads of torch, where the figures are of other processes.
    """
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "torch_threads": torch_threads or torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "python": platform.python_version(),
        },
        "versions": _versions((*_PACKAGES, *packages)),
        "configuration": configuration,
        "results": results,
    }
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(_dumps(record) + "\n")
    unfinished.replace(path)
    return path


def read(name: str, *, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Returns what `write` wrote, or None where there is nothing."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _dumps(value: Any, indent: str = "") -> str:
    """JSON that is indented, with a list of numbers or strings on one line."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{json.dumps(key)}: {_dumps(item, inner)}" for key, item in value.items()]
        brackets = "{}"
    elif isinstance(value, list | tuple) and any(
        isinstance(item, dict | list | tuple) for item in value
    ):
        lines = [_dumps(item, inner) for item in value]
        brackets = "[]"
    else:
        return json.dumps(value)
    body = f",\n{inner}".join(lines)
    return f"{brackets[0]}\n{inner}{body}\n{indent}{brackets[1]}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
