"""Rendering of an episode: each generated token on the colour of its KL term.

Pure functions from a :class:`Frame` to a string (`ansi`), a terminal (`human`) or an image
(`rgb_array`). A red token costs reward (KL term > 0): the policy likes it more than the reference
does or, in `kl_mode="reference"`, the reference finds it surprising. A blue one adds reward.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["KL_SATURATION", "Frame", "kl_colour", "render_ansi", "render_human", "render_rgb"]

RGB = tuple[int, int, int]

KL_SATURATION = 5.0
"""The size of a KL term, in nats, from which the colour gets no stronger."""

_NEUTRAL: RGB = (240, 240, 240)
_RED: RGB = (235, 95, 85)
_BLUE: RGB = (85, 140, 235)
_UNKNOWN: RGB = (170, 170, 170)

_INK: RGB = (30, 30, 34)
_MUTED: RGB = (112, 112, 120)
_RULE: RGB = (218, 218, 224)
_PAPER: RGB = (255, 255, 255)
_GREEN: RGB = (34, 130, 70)
_DARK_RED: RGB = (178, 45, 40)


@dataclass(frozen=True)
class Frame:
    """The state of one episode, as far as it is drawn.

    Attributes:
        prompt: The text of the prompt.
        tokens: The decoded text of each generated token.
        kl: The KL term charged for each token, in nats; as long as `tokens`.
        task_reward: The sum of the task's rewards so far.
        reward: The sum of the shaped rewards so far.
        kl_coef: The coefficient of the KL term.
        finish_reason: Why the episode ended; None while it runs.
        answer: The answer that the task expects, if it has one.
        correct: Whether the completion is correct; None if that is not known.
        title: The name of the environment.

    Example:
        >>> frame = Frame("2+3=", ["5"], [0.2], 1.0, 0.99, 0.05, None, "5", None)
        >>> frame.title
        'TextRL-v0'
    """

    prompt: str
    tokens: Sequence[str]
    kl: Sequence[float]
    task_reward: float
    reward: float
    kl_coef: float
    finish_reason: str | None
    answer: str | None
    correct: bool | None
    title: str = "TextRL-v0"

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.kl):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.kl)} KL terms")


def kl_colour(kl: float) -> RGB:
    """Returns the background colour of a token whose KL term is `kl` nats.

    The colour goes from a neutral grey at 0 to red (kl > 0) or blue (kl < 0), the same distance
    for `kl` and `-kl`. It moves with the square root of |kl|, so that the small terms of ordinary
    tokens can be told apart, and is full from `KL_SATURATION` on. NaN is a darker grey.

    Example:
        >>> kl_colour(0.0), kl_colour(5.0), kl_colour(float("-inf"))
        ((240, 240, 240), (235, 95, 85), (85, 140, 235))
    """
    kl = float(kl)
    if math.isnan(kl):
        return _UNKNOWN
    strength = math.sqrt(min(abs(kl) / KL_SATURATION, 1.0))
    end = _RED if kl > 0 else _BLUE
    red, green, blue = (round(n + strength * (e - n)) for n, e in zip(_NEUTRAL, end, strict=True))
    return red, green, blue


def _visible(text: str, *, spaces: bool = True) -> str:
    """Returns `text` on one line, with whitespace shown and nothing that steers a terminal.

    A token that decodes to nothing (an end-of-sequence token, say) is shown as ∅.
    """
    if spaces and not text:
        return "∅"
    return "".join(_visible_char(char, spaces) for char in text)


def _visible_char(char: str, spaces: bool) -> str:
    if char == " ":
        return "·" if spaces else " "
    if char == "\n":
        return "⏎"
    if char == "\t":
        return "⇥"
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's pictures of the control characters
    if not char.isprintable():  # C1 controls, directional overrides, lone surrogates, …
        return f"\\u{{{code:x}}}"
    return char


def _outcome(frame: Frame) -> str:
    """Returns how the episode stands, in words."""
    if frame.finish_reason is None:
        return "running"
    verdict = {True: "correct", False: "wrong", None: ""}[
        None if frame.correct is None else bool(frame.correct)
    ]
    reason = _visible(frame.finish_reason, spaces=False)
    return f"{verdict} ({reason})" if verdict else reason


def _numbers(frame: Frame) -> list[tuple[str, str]]:
    """Returns the names and values that every mode shows, in order."""
    rows = [
        ("tokens", str(len(frame.tokens))),
        ("task reward", f"{frame.task_reward:+.3f}"),
        ("KL", f"{sum(float(kl) for kl in frame.kl):+.3f}"),
        ("kl_coef", f"{frame.kl_coef:g}"),
        ("reward", f"{frame.reward:+.3f}"),
    ]
    if frame.answer is not None:
        rows.append(("answer", _visible(str(frame.answer), spaces=False)))
    return rows


def render_ansi(frame: Frame) -> str:
    r"""Returns two lines for a terminal: the prompt with the coloured tokens, and the numbers.

    Example:
        >>> frame = Frame("2+3=", ["5", "\n"], [0.2, -1.0], 1.0, 0.99, 0.05, "stop", "5", True)
        >>> import re
        >>> print(re.sub(r"\x1b\[[0-9;]*m", "", render_ansi(frame)))
        2+3=5⏎
        TextRL-v0  tokens 2  task reward +1.000  KL -0.800  ...  answer 5  correct (stop)
    """
    ink = ";".join(map(str, _INK))
    text = [f"\x1b[2m{_visible(frame.prompt, spaces=False)}\x1b[0m"]
    for token, kl in zip(frame.tokens, frame.kl, strict=True):
        paper = ";".join(map(str, kl_colour(kl)))
        text.append(f"\x1b[38;2;{ink};48;2;{paper}m{_visible(token)}\x1b[0m")
    numbers = "  ".join(f"{name} {value}" for name, value in _numbers(frame))
    title = _visible(frame.title, spaces=False)
    return f"{''.join(text)}\n\x1b[1m{title}\x1b[0m  {numbers}  {_outcome(frame)}"


def render_human(frame: Frame, console: Console | None = None) -> None:
    """Prints the episode as a panel.

    Args:
        frame: The episode.
        console: Where to print; the terminal by default.

    Example:
        >>> from rich.console import Console
        >>> frame = Frame("2+3=", ["5"], [0.2], 1.0, 0.99, 0.05, None, "5", None)
        >>> render_human(frame, Console(width=60, color_system=None))
        ╭─... TextRL-v0 ─...
        │ 2+3=5 ...
        ...
        ╰─... running ─...
    """
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    # Text objects, not strings: brackets in a prompt are not markup.
    text = Text()
    text.append(_visible(frame.prompt, spaces=False), style="dim")
    for token, kl in zip(frame.tokens, frame.kl, strict=True):
        text.append(_visible(token), style=f"{_hex(_INK)} on {_hex(kl_colour(kl))}")
    numbers = Text()
    for name, value in _numbers(frame):
        numbers.append(f"{name} ", style="dim")
        numbers.append(f"{value}  ")
    legend = Text()
    legend.append("KL  ", style="dim")
    for kl in (-KL_SATURATION, -1.0, 0.0, 1.0, KL_SATURATION):
        legend.append(f" {kl:+g} ", style=f"{_hex(_INK)} on {_hex(kl_colour(kl))}")
    panel = Panel(
        Group(text, Text(), numbers, legend),
        title=Text(_visible(frame.title, spaces=False)),
        subtitle=Text(_outcome(frame)),
    )
    (console or Console()).print(panel)


def _hex(colour: RGB) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def render_rgb(frame: Frame, width: int = 640, height: int = 360) -> npt.NDArray[np.uint8]:
    """Draws the episode; the size depends on `width` and `height` alone.

    Text that does not fit is cut at its beginning: the end is what just happened. Pillow's own
    font knows little beyond ASCII; accents are dropped and other characters drawn as a box. The
    `ansi` and `human` modes show them.

    Args:
        frame: The episode.
        width: Width in pixels; 400 or more leaves room for everything.
        height: Height in pixels; 240 or more leaves room for everything.

    Returns:
        An array of shape `(height, width, 3)`.

    Example:
        >>> frame = Frame("2+3=", ["5"], [0.2], 1.0, 0.99, 0.05, None, "5", None)
        >>> render_rgb(frame).shape
        (360, 640, 3)
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), _PAPER)
    canvas = _Canvas(ImageDraw.Draw(image), width)
    margin, footer = 16, height - 96

    # Header: the title, and how the episode stands.
    outcome = _outcome(frame)
    known = frame.finish_reason is not None and frame.correct is not None
    colour = (_GREEN if frame.correct else _DARK_RED) if known else _MUTED
    room = width - 2 * margin
    outcome = canvas.fit(outcome, 14, room // 2)
    canvas.text(margin, 12, canvas.fit(frame.title, 17, room // 2 - 8), 17, _INK)
    canvas.text(width - margin - canvas.length(outcome, 14), 14, outcome, 14, colour)
    canvas.rule(margin, 40)

    # Prompt: at most a third of the space for text. Completion: the rest.
    line_height, size = 24, 15
    lines = max((footer - 40 - 50) // line_height, 2)
    prompt = canvas.wrap([(_visible(frame.prompt, spaces=False), None)], size, room)
    prompt_lines = min(len(prompt), max(lines // 3, 1))
    y = _draw_block(canvas, "prompt", prompt, prompt_lines, margin, 46, size, line_height)
    pieces = [
        (_visible(token), kl_colour(kl)) for token, kl in zip(frame.tokens, frame.kl, strict=True)
    ]
    completion = canvas.wrap(pieces, size, room)
    rest = max((footer - y - 20) // line_height, 1)
    _draw_block(canvas, "completion", completion, rest, margin, y, size, line_height)

    # Footer, on paper of its own in case that the image is too low for all of the above.
    canvas.draw.rectangle((0, footer, width, height), fill=_PAPER)
    canvas.rule(margin, footer)
    x = float(margin)
    for name, value in _numbers(frame):
        value = canvas.fit(value, 15, width - margin - x)
        canvas.text(x, footer + 8, name, 11, _MUTED)
        canvas.text(x, footer + 22, value, 15, _INK)
        x += max(canvas.length(name, 11), canvas.length(value, 15)) + 24
        if x > width - margin - 24:
            break
    _draw_legend(canvas, margin, footer + 54, room)
    return np.array(image, dtype=np.uint8)


Piece = tuple[str, RGB | None]


def _draw_block(
    canvas: _Canvas,
    label: str,
    lines: list[list[Piece]],
    most: int,
    x: int,
    y: int,
    size: int,
    line_height: int,
) -> int:
    """Draws a label and the last `most` lines below it; returns where the next block begins."""
    hidden = max(len(lines) - most, 0)
    note = f"{label} (… {hidden} more line{'s' * (hidden > 1)} above)" if hidden else label
    canvas.text(x, y, note, 11, _MUTED)
    y += 17
    for line in lines[hidden:]:
        left = float(x)
        for text, paper in line:
            right = left + canvas.length(text, size)
            if paper is not None:
                # A pixel of white between tokens shows where one ends.
                canvas.draw.rectangle((left, y, right - 1, y + line_height - 4), fill=paper)
            canvas.text(left, y + 2, text, size, _INK)
            left = right + 1 if paper is not None else right
        y += line_height
    return y + 4


def _draw_legend(canvas: _Canvas, x: int, y: int, room: int) -> None:
    """Draws the colour scale, with what its ends mean."""
    low, high = "adds reward", "costs reward"
    bar = max(room - 20 - canvas.length(low, 11) - canvas.length(high, 11), 40)
    left = x + canvas.length(low, 11) + 10
    for i in range(int(bar)):
        kl = KL_SATURATION * (2 * i / (bar - 1) - 1)
        canvas.draw.line((left + i, y, left + i, y + 12), fill=kl_colour(kl))
    canvas.text(x, y, low, 11, _MUTED)
    canvas.text(left + bar + 10, y, high, 11, _MUTED)
    for kl in (-KL_SATURATION, -KL_SATURATION / 2, 0.0, KL_SATURATION / 2, KL_SATURATION):
        label = f"{kl:+g}" if kl else "KL 0"
        at = left + bar * (kl / KL_SATURATION + 1) / 2
        canvas.text(at - canvas.length(label, 11) / 2, y + 16, label, 11, _MUTED)


class _Canvas:
    """Pillow's drawing context with its default font in several sizes."""

    def __init__(self, draw: Any, width: int) -> None:
        self.draw = draw
        self.width = width
        self._fonts: dict[int, Any] = {}
        self._drawable: dict[str, str] = {"⏎": "\\n", "⇥": "\\t", "∅": "<>", "−": "-"}
        self._missing = bytes(self._font(15).getmask("\uffff"))

    def _font(self, size: int) -> Any:
        from PIL import ImageFont

        if size not in self._fonts:
            self._fonts[size] = ImageFont.load_default(size=size)
        return self._fonts[size]

    def drawable(self, text: str) -> str:
        """Returns `text` with what the font lacks replaced."""
        return "".join(self._drawable_char(char) for char in text)

    def _drawable_char(self, char: str) -> str:
        if char not in self._drawable:
            # The letter under an accent if there is one, else the font's box for missing glyphs.
            candidates = (char, unicodedata.normalize("NFKD", char)[0])
            self._drawable[char] = next((c for c in candidates if self._has(c)), "\uffff")
        return self._drawable[char]

    def _has(self, char: str) -> bool:
        return char.isprintable() and bytes(self._font(15).getmask(char)) != self._missing

    def length(self, text: str, size: int) -> float:
        """Returns the width of `text` in pixels."""
        return float(self._font(size).getlength(self.drawable(text)))

    def text(self, x: float, y: float, text: str, size: int, colour: RGB) -> None:
        """Draws one line of text."""
        self.draw.text((x, y), self.drawable(text), font=self._font(size), fill=colour)

    def rule(self, margin: int, y: int) -> None:
        """Draws a horizontal line."""
        self.draw.line((margin, y, self.width - margin, y), fill=_RULE)

    def fit(self, text: str, size: int, room: float) -> str:
        """Returns `text` if it fits in `room` pixels, otherwise its end after an ellipsis."""
        if self.length(text, size) <= room:
            return text
        while text and self.length("…" + text, size) > room:
            text = text[1:]
        return "…" + text

    def wrap(self, pieces: Sequence[Piece], size: int, room: float) -> list[list[Piece]]:
        """Breaks pieces into lines: after newlines, between pieces or words, or within them."""
        lines: list[list[Piece]] = [[]]
        used = 0.0
        for text, paper in pieces:
            for part in self._parts(text, size, room, words=paper is None):
                length = self.length(part, size) + (paper is not None)
                if used + length > room and lines[-1]:
                    lines.append([])
                    used = 0.0
                lines[-1].append((part, paper))
                used += length
                if part.endswith("⏎"):
                    lines.append([])
                    used = 0.0
        return lines if lines[-1] or len(lines) == 1 else lines[:-1]

    def _parts(self, text: str, size: int, room: float, *, words: bool) -> Iterator[str]:
        """Splits text where a line may or must break."""
        part = ""
        for char in text:
            if part and self.length(part + char, size) > room - 1:
                yield part
                part = ""
            part += char
            if char == "⏎" or (words and char == " "):
                yield part
                part = ""
        if part:
            yield part
