"""The distribution: its version, what importing it costs, and the commands that it documents."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import textrl_env

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {".git", "runs", "build", "dist", "__pycache__", "shared"}


def repository_files() -> list[Path]:
    """The files that belong to the repository; without Git, those that look like it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        files = [ROOT / name for name in out.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in SKIPPED or part.startswith(".venv") or part.endswith("_cache")
                for part in path.relative_to(ROOT).parts
            )
        ]
    return [path for path in files if path.is_file()]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_version_is_that_of_the_distribution():
    assert textrl_env.__version__ == importlib.metadata.version("textrl-env")


@pytest.mark.parametrize("name", ["textrl_env", "agents"])
def test_packages_are_typed(name):
    assert (ROOT / name / "py.typed").is_file()


def test_importing_the_environment_loads_neither_torch_nor_transformers():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import textrl_env"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "textrl_env" in imported
    heavy = {name.split(".")[0] for name in imported} & {"torch", "transformers"}
    assert not heavy


def test_no_file_is_large():
    files = repository_files()
    assert files
    assert [str(path) for path in files if path.stat().st_size > 5_000_000] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_documented_make_commands_exist(page):
    text = (ROOT / page).read_text()
    # Commands only: after "make" at the start of a line of code, or in backquotes.
    commands = set(re.findall(r"(?:^\s*(?:\$ )?|`)make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert commands
    assert commands <= make_targets()


def test_every_dependency_has_a_tested_version():
    pins = re.findall(r"^([A-Za-z0-9._-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    required = set()
    for line in importlib.metadata.requires("textrl-env") or ():
        name = re.match(r"[A-Za-z0-9._-]+", line)
        assert name is not None
        required.add(name.group().lower().replace("_", "-"))
    assert required - {"textrl-env"} <= pinned
