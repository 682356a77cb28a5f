import json
import re

import pytest

from textrl_env.tasks import JsonLines, make_task

GOOD = '{"prompt": "1+1=", "answer": "2"}'


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "data.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def test_rows_become_samples(write):
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "a", "answer": "b", "level": 3},
        {"prompt": chat, "answer": 7},
    ]
    task = make_task("jsonl", path=write("\n".join(map(json.dumps, rows))))
    assert isinstance(task, JsonLines)
    assert [sample.index for sample in task] == [0, 1]
    assert (task[0].prompt, task[0].answer, task[0].metadata) == ("a", "b", {"level": 3})
    assert (task[1].prompt, task[1].answer, task[1].metadata) == (tuple(chat), "7", {})
    assert task.score(" b\n", task[0]) == 1.0
    assert task.score("c", task[0]) == 0.0
    with pytest.raises(IndexError):
        task[2]


@pytest.mark.parametrize("content", [
    f"\ufeff{GOOD}\n", f"{GOOD}\r\n", f"\n\n  \n{GOOD}\n\t\n", GOOD,
])  # fmt: skip
def test_byte_order_mark_line_ends_and_blank_lines(write, content):
    task = JsonLines(write(content))
    assert [(s.prompt, s.answer, s.index) for s in task] == [("1+1=", "2", 0)]


def test_only_newlines_end_a_line(write):
    row = {"prompt": "a\u2028b\x85c", "answer": "d"}
    assert JsonLines(write(json.dumps(row, ensure_ascii=False)))[0].prompt == row["prompt"]


def test_keys_and_score_are_options(write):
    path = write('{"q": "x", "a": "y", "prompt": "z"}')
    task = JsonLines(path, prompt_key="q", answer_key="a", max_new_tokens=5, stop=["\n"])
    assert (task[0].prompt, task[0].answer) == ("x", "y")
    assert (task.max_new_tokens, task.stop) == (5, ("\n",))
    scored = JsonLines(
        path, prompt_key="q", answer_key=None, score=lambda c, s: len(c) / len(s.metadata["a"])
    )
    assert scored[0].answer is None
    assert scored.score("abc", scored[0]) == 3
    assert not scored.is_correct("", scored[0])


def test_the_file_is_read_once(write, tmp_path):
    task = JsonLines(write(GOOD))
    (tmp_path / "data.jsonl").unlink()
    assert task[0].answer == "2"


@pytest.mark.parametrize(("line", "reason"), [
    ("{", "broken JSON"),
    ('{"prompt": "a" "answer"', "broken JSON"),
    ("[" * 100_000, "broken JSON"),
    ('["a", "b"]', "JSON object, got list"),
    ("3", "JSON object, got int"),
    ("null", "JSON object, got NoneType"),
    ('{"Prompt": "a", "answer": "b"}', "no key 'prompt', it has 'Prompt', 'answer'"),
    ('{"prompt": "a", "result": "b"}', "no key 'answer', it has 'prompt', 'result'"),
    ("{}", "no key 'prompt', it has none"),
    ('{"prompt": "", "answer": "b"}', "prompt is empty"),
    ('{"prompt": [], "answer": "b"}', "prompt is empty"),
    ('{"prompt": 3, "answer": "b"}', "text or a list of chat messages, got int"),
    ('{"prompt": null, "answer": "b"}', "text or a list of chat messages, got NoneType"),
    ('{"prompt": ["hi"], "answer": "b"}', "chat message 0"),
    ('{"prompt": [{"role": "user"}], "answer": "b"}', "chat message 0"),
    ('{"prompt": [{"role": "user", "content": 1}], "answer": "b"}', "chat message 0"),
    ('{"prompt": "a", "answer": null}', "'answer' must be a text or a whole number, got None"),
    ('{"prompt": "a", "answer": true}', "'answer' must be a text or a whole number, got True"),
    ('{"prompt": "a", "answer": 1.5}', "'answer' must be a text or a whole number, got 1.5"),
    ('{"prompt": "a", "answer": ["b"]}', "'answer' must be a text or a whole number"),
    (b'{"prompt": "\xff", "answer": "b"}', "not UTF-8"),
])  # fmt: skip
@pytest.mark.parametrize("position", [0, 1, 2])
def test_every_problem_names_file_and_line(write, line, reason, position):
    lines = [GOOD.encode()] * 3
    lines[position] = line if isinstance(line, bytes) else line.encode()
    # A blank line first: line numbers count as an editor does.
    path = write(b"\n" + b"\n".join(lines))
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        JsonLines(path)
    assert str(caught.value).startswith(f"{path}, line {position + 2}: ")


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_an_empty_file_is_an_error(write, content):
    path = write(content)
    with pytest.raises(ValueError, match=f"{re.escape(path)} has no samples"):
        JsonLines(path)


def test_arguments_that_cannot_work(write, tmp_path):
    with pytest.raises(ValueError, match="pass score="):
        JsonLines(write(GOOD), answer_key=None)
    with pytest.raises(FileNotFoundError):
        JsonLines(tmp_path / "missing.jsonl")
    with pytest.raises(TypeError, match="its keywords: path, prompt_key"):
        make_task("jsonl")
