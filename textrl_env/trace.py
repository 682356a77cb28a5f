"""What an episode has produced so far, for rendering."""

from __future__ import annotations

from typing import Any

from textrl_env.rendering import Frame, render_ansi, render_human, render_rgb

RENDER_MODES = ["ansi", "human", "rgb_array"]


def check_render_mode(render_mode: str | None) -> str | None:
    """Returns `render_mode`; raises ValueError where it is unknown."""
    if render_mode is not None and render_mode not in RENDER_MODES:
        raise ValueError(f"render_mode is {render_mode!r}; use one of {RENDER_MODES} or None.")
    return render_mode


class EpisodeTrace:
    """The tokens, KL terms and rewards of one episode."""

    def __init__(self, prompt: str, answer: str | None, kl_coef: float) -> None:
        self.prompt = prompt
        self.answer = answer
        self.kl_coef = kl_coef
        self.tokens: list[str] = []
        self.kl: list[float] = []
        self.task_reward = 0.0
        self.reward = 0.0
        self.finish_reason: str | None = None
        self.correct: bool | None = None

    def append(self, token: str, reward: float, info: dict[str, Any]) -> None:
        """Adds a step: the token's text, the shaped reward and the step's info."""
        self.tokens.append(token)
        self.kl.append(info["kl"])
        self.task_reward += info["task_reward"]
        self.reward += reward
        self.kl_coef = info["kl_coef"]
        self.finish_reason = info.get("finish_reason")
        self.correct = info.get("correct")

    def render(self, mode: str | None) -> Any:
        """Returns a string (``"ansi"``) or an image (``"rgb_array"``), or prints (``"human"``)."""
        frame = Frame(
            prompt=self.prompt,
            tokens=self.tokens,
            kl=self.kl,
            task_reward=self.task_reward,
            reward=self.reward,
            kl_coef=self.kl_coef,
            finish_reason=self.finish_reason,
            answer=self.answer,
            correct=self.correct,
        )
        if mode == "human":
            return render_human(frame)
        return render_rgb(frame) if mode == "rgb_array" else render_ansi(frame)
