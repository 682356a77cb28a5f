"""The renderings of an episode: text that can be read back, images of a fixed size."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from textrl_env.rendering import (
    KL_SATURATION,
    Frame,
    kl_colour,
    render_ansi,
    render_human,
    render_rgb,
)

FRAME = Frame(
    prompt="What is 2+3?\nAnswer:",
    tokens=[" 5", "\n", ""],
    kl=[0.2, -1.0, 3.0],
    task_reward=1.0,
    reward=0.89,
    kl_coef=0.05,
    finish_reason="stop",
    answer="5",
    correct=True,
)

NASTY = [
    "",
    "naïve Ünïcödé",
    "中文 עברית العربية",
    "👩\u200d🔬 e\u0301",
    "\x1b[31mred\x1b[0m \x9b31m",
    "\x00\x07\r\t\n\x7f",
    "\u202eright to left",
    "\ud800 lone surrogate",
    "[bold]markup[/bold] [/]",
    "\ufffd\uffff\U0010ffff",
]


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def human(frame: Frame, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_human(frame, console)
    return console.file.getvalue()


def test_colour_direction():
    red, blue, neutral = kl_colour(2.0), kl_colour(-2.0), kl_colour(0.0)
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert max(neutral) - min(neutral) == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_colour_grows_with_kl_and_saturates(sign):
    neutral = np.array(kl_colour(0.0))
    distance = [
        np.abs(np.array(kl_colour(sign * kl)) - neutral).sum()
        for kl in (0.0, 0.1, 0.5, 1.0, 2.0, KL_SATURATION)
    ]
    assert distance == sorted(set(distance))
    full = kl_colour(sign * KL_SATURATION)
    assert kl_colour(sign * 100.0) == kl_colour(sign * float("inf")) == full


def test_colour_of_nan_is_no_colour_of_a_number():
    numbers = {kl_colour(kl) for kl in np.linspace(-6, 6, 1001)}
    assert kl_colour(float("nan")) not in numbers


def test_frame_refuses_lengths_that_differ():
    with pytest.raises(ValueError, match="3 tokens but 2 KL terms"):
        dataclasses.replace(FRAME, kl=[0.0, 0.0])


def test_ansi_contains_the_text_and_the_numbers():
    text, numbers = plain(render_ansi(FRAME)).split("\n")
    assert text == "What is 2+3?⏎Answer:·5⏎∅"
    for part in ("TextRL-v0", "tokens 3", "+1.000", "KL +2.200", "+0.890", "correct (stop)"):
        assert part in numbers


def test_ansi_paints_each_token_with_its_colour():
    painted = re.findall(r"48;2;(\d+);(\d+);(\d+)m([^\x1b]*)", render_ansi(FRAME))
    assert [tuple(map(int, p[:3])) for p in painted] == [kl_colour(kl) for kl in FRAME.kl]
    assert [p[3] for p in painted] == ["·5", "⏎", "∅"]


@pytest.mark.parametrize(
    ("finish_reason", "correct", "words"),
    [
        (None, None, "running"),
        ("length", False, "wrong (length)"),
        ("length", np.bool_(False), "wrong (length)"),
        ("stop", None, "stop"),
    ],
)
def test_outcome(finish_reason, correct, words):
    frame = dataclasses.replace(FRAME, finish_reason=finish_reason, correct=correct)
    assert plain(render_ansi(frame)).endswith(f"  {words}")


@pytest.mark.parametrize("text", NASTY)
def test_ansi_of_any_text_is_two_printable_lines(text):
    frame = dataclasses.replace(
        FRAME, prompt=text, tokens=[text] * 3, answer=text, finish_reason=text, title=text
    )
    lines = plain(render_ansi(frame)).split("\n")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    render_ansi(frame).encode("utf-8")  # no lone surrogate is left


def test_human_shows_the_same():
    out = human(FRAME)
    for part in ("TextRL-v0", "What is 2+3?⏎Answer:·5⏎∅", "+0.890", "correct (stop)"):
        assert part in out


@pytest.mark.parametrize("text", NASTY)
def test_human_of_any_text(text):
    frame = dataclasses.replace(FRAME, prompt=text, tokens=[text] * 3, answer=text, title=text)
    out = human(frame)
    assert all(line.isprintable() for line in out.splitlines())
    if "[bold]" in text:
        assert "[bold]markup[/bold]" in out


def test_human_prints_to_the_terminal_by_default(capsys):
    render_human(FRAME)
    assert "Answer:·5" in capsys.readouterr().out


RUNNING = dataclasses.replace(
    FRAME, tokens=[], kl=[], finish_reason=None, answer=None, correct=None
)
LONG = dataclasses.replace(
    FRAME,
    prompt="A long prompt. " * 200,
    tokens=[" word"] * 500 + ["x" * 400] + ["\n"] * 20,
    kl=[0.5] * 521,
    answer="long " * 50,
    title="T" * 200,
)


@pytest.mark.parametrize("size", [(640, 360), (400, 240), (1280, 720), (64, 64)])
@pytest.mark.parametrize("frame", [FRAME, RUNNING, LONG], ids=["short", "running", "long"])
def test_rgb_has_a_fixed_shape(frame, size):
    image = render_rgb(frame, *size)
    assert image.shape == (size[1], size[0], 3)
    assert image.dtype == np.uint8
    assert image.flags.writeable


def test_rgb_is_a_pure_function():
    np.testing.assert_array_equal(render_rgb(FRAME), render_rgb(FRAME))
    np.testing.assert_array_equal(render_rgb(RUNNING), render_rgb(RUNNING))


@pytest.mark.parametrize("text", NASTY)
def test_rgb_of_any_text(text):
    frame = dataclasses.replace(
        FRAME, prompt=text, tokens=[text] * 3, answer=text, finish_reason=text, title=text
    )
    assert render_rgb(frame).shape == (360, 640, 3)


@pytest.mark.parametrize("kl", [0.7, -0.7, float("inf"), float("-inf"), float("nan")])
def test_rgb_paints_tokens_with_their_colour(kl):
    frame = dataclasses.replace(FRAME, tokens=["wwww"], kl=[kl])
    # Only above the colour scale, which has every colour.
    above = render_rgb(frame)[:264].reshape(-1, 3)
    assert (above == kl_colour(kl)).all(axis=1).sum() > 300


def test_rgb_keeps_the_end_of_long_text_visible():
    tokens = [" word"] * 500
    before = dataclasses.replace(FRAME, tokens=[*tokens, " a"], kl=[0.0] * 501)
    painted = dataclasses.replace(before, kl=[0.0] * 500 + [5.0])
    changed = (render_rgb(before)[:264] != render_rgb(painted)[:264]).any(axis=2)
    assert changed.any()


@pytest.mark.parametrize("kl", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite(kl):
    frame = dataclasses.replace(
        FRAME, kl=[kl, float("inf"), 0.0], reward=kl, task_reward=kl, kl_coef=kl
    )
    assert "·5⏎∅" in plain(render_ansi(frame))
    assert "·5⏎∅" in human(frame)
    assert render_rgb(frame).shape == (360, 640, 3)


def test_numpy_numbers_are_numbers():
    frame = dataclasses.replace(
        FRAME,
        kl=np.array(FRAME.kl, dtype=np.float32),
        task_reward=np.float64(1.0),
        reward=np.float32(0.89),
    )
    assert plain(render_ansi(frame)) == plain(render_ansi(FRAME))


def test_importing_the_module_loads_no_drawing_library():
    code = (
        "import sys, importlib.util as u\n"
        f"s = u.spec_from_file_location('rendering', {sys.modules[Frame.__module__].__file__!r})\n"
        "m = u.module_from_spec(s); sys.modules['rendering'] = m; s.loader.exec_module(m)\n"
        "print([n for n in ('PIL', 'rich', 'torch') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
