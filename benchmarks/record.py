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


def write(name: str, configuration: dict[str, Any], results: Any) -> Path:
    """Writes ``results/<name>.json`` and returns its path.

    Args:
        name: Name of the benchmark.
        configuration: Everything that was chosen: seeds, sizes, hyperparameters.
        results: The figures.
    """
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "python": platform.python_version(),
        },
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
        "configuration": configuration,
        "results": results,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
