"""Token generation as a Gymnasium environment.

Importing the package registers ``TextRL-v0``; ``gym.make("textrl_env:TextRL-v0")`` imports it for
you. Neither torch nor transformers is imported until an environment is made.
"""

from __future__ import annotations

import importlib
from typing import Any

from gymnasium.envs.registration import register, registry

__version__ = "0.1.0"

if "TextRL-v0" not in registry:
    register(
        id="TextRL-v0",
        entry_point="textrl_env.env:TextRLEnv",
        vector_entry_point="textrl_env.vector_env:TextRLVectorEnv",
    )

_LAZY = {
    "TextRLConfig": "textrl_env.config",
    "TextRLEnv": "textrl_env.env",
    "TextRLVectorEnv": "textrl_env.vector_env",
    "Reward": "textrl_env.rewards",
    "RewardError": "textrl_env.rewards",
    "Sample": "textrl_env.tasks",
    "Task": "textrl_env.tasks",
    "FunctionTask": "textrl_env.tasks",
    "make_task": "textrl_env.tasks",
    "register_task": "textrl_env.tasks",
    "task_names": "textrl_env.tasks",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
