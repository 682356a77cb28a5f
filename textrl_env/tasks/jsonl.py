"""A task from a JSON Lines file."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from textrl_env.tasks.base import FunctionTask, Prompt, ScoreFn, check_prompt, register_task


@register_task("jsonl")
class JsonLines(FunctionTask):
    """One JSON object a line: a prompt, an answer and whatever else the scoring needs.

    The file is read once, here. A prompt is a text or a list of chat messages with ``role`` and
    ``content``; an answer is a text or a whole number. The other keys of a line become
    ``sample.metadata``. Blank lines are skipped.

    Args:
        path: The file, UTF-8 with or without a byte order mark.
        prompt_key: The key of the prompt.
        answer_key: The key of the answer; None where the lines have none, which needs ``score``.
        score: ``score(completion, sample) -> float``; exact match by default.
        max_new_tokens: The suggested limit on a completion.
        stop: Strings that end a completion.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is unusable (the message has the file and the line number), no line has
            a sample, or there is neither an answer nor a scoring function.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    ...     print('{"prompt": "6*7=", "answer": 42, "source": "book"}', file=file, flush=True)
    ...     task = JsonLines(file.name)
    >>> task[0].prompt, task[0].answer, dict(task[0].metadata), task.score(" 42", task[0])
    ('6*7=', '42', {'source': 'book'}, 1.0)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        prompt_key: str = "prompt",
        answer_key: str | None = "answer",
        score: ScoreFn | None = None,
        max_new_tokens: int = 32,
        stop: Sequence[str] = (),
    ) -> None:
        if answer_key is None and score is None:
            raise ValueError("answer_key=None leaves nothing to compare with: pass score=")
        path = Path(path).expanduser()
        prompts: list[Prompt] = []
        answers: list[str | None] = []
        metadata: list[dict[str, Any]] = []
        # Split at newlines only: JSON texts may hold the other line ends that str.splitlines takes.
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = _parse(line)
                prompts.append(check_prompt(_take(row, prompt_key)))
                answers.append(None if answer_key is None else _answer(row, answer_key))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            used = (prompt_key, answer_key)
            metadata.append({key: value for key, value in row.items() if key not in used})
        if not prompts:
            raise ValueError(f"{path} has no samples: write one JSON object a line")
        super().__init__(
            prompts,
            answers,
            score,
            metadata=metadata,
            name="jsonl",
            max_new_tokens=max_new_tokens,
            stop=stop,
        )


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error}); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"broken JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object, got {type(row).__name__}")
    return row


def _take(row: dict[str, Any], key: str) -> Any:
    if key not in row:
        raise ValueError(f"no key {key!r}, it has {', '.join(map(repr, row)) or 'none'}")
    return row[key]


def _answer(row: dict[str, Any], key: str) -> str:
    answer = _take(row, key)
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        raise ValueError(f"{key!r} must be a text or a whole number, got {answer!r}")
    return str(answer)
