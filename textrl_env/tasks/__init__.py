"""Tasks: prompts, answers and the scoring of completions."""

from textrl_env.tasks.arithmetic import Addition, Arithmetic, Multiplication, Subtraction
from textrl_env.tasks.base import (
    FunctionTask,
    Sample,
    Task,
    make_task,
    register_task,
    task_names,
)
from textrl_env.tasks.jsonl import JsonLines
from textrl_env.tasks.sentiment import Sentiment
from textrl_env.tasks.sequences import Copy, Reverse, Sequences, Sort

__all__ = [
    "Addition",
    "Arithmetic",
    "Copy",
    "FunctionTask",
    "JsonLines",
    "Multiplication",
    "Reverse",
    "Sample",
    "Sentiment",
    "Sequences",
    "Sort",
    "Subtraction",
    "Task",
    "make_task",
    "register_task",
    "task_names",
]
