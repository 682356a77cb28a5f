"""The single environment, ``gym.make("TextRL-v0")``: one slot of the transition core."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from textrl_env.access import MDPAccess
from textrl_env.config import TextRLConfig
from textrl_env.core import TokenMDP, check_options
from textrl_env.trace import RENDER_MODES, EpisodeTrace, check_render_mode

_SLOT = np.zeros(1, dtype=np.int64)


class TextRLEnv(MDPAccess, gym.Env[dict[str, NDArray[Any]], np.int64]):
    """Generating one completion, a token per step.

    The observation is a dictionary: ``input_ids``, int64 (L,), holds the prompt and the tokens so
    far, right-padded, and ``attention_mask``, int8 (L,), marks them. The action is a token id.
    The reward is ``task_reward − kl_coef · kl``, and both parts are in the info.

    An episode terminates on end-of-sequence, a stop string, the task's own end, or the limit of
    tokens (which truncates instead with ``on_limit="truncate"``).

    ``reset(options={"prompt_index": i})`` chooses the prompt; otherwise it is drawn uniformly with
    the environment's own generator.

    The info of every step holds ``task_reward``, ``ref_logprob`` (log π_ref of the action, 0 where
    no reference is scored), ``kl`` (the term as charged), ``kl_coef`` and ``num_tokens``. The info
    of the last step adds ``text``, ``prompt``, ``answer``, ``correct`` and ``finish_reason``
    (``"eos"``, ``"stop"``, ``"task"`` or ``"length"``) and, where a reward of the episode failed,
    ``reward_error`` and ``masked``.

    Args:
        render_mode: ``"ansi"``, ``"human"``, ``"rgb_array"`` or None.
        **options: The options of `TextRLConfig`.

    Raises:
        ValueError: An option is unusable; the message says which and what to do.

    Examples:
        >>> import gymnasium as gym
        >>> env = gym.make("textrl_env:TextRL-v0", task="addition", kl_mode="none")
        >>> observation, info = env.reset(seed=0, options={"prompt_index": 0})
        >>> _, reward, terminated, truncated, info = env.step(env.unwrapped.eos_token_id)
        >>> reward, terminated, info["text"], info["finish_reason"]
        (0.0, True, '', 'eos')
    """

    metadata = {"render_modes": RENDER_MODES, "render_fps": 4}  # noqa: RUF012 - Gymnasium's name

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = check_render_mode(render_mode)
        self.mdp = TokenMDP(TextRLConfig.from_options(options), num_slots=1)
        self.observation_space = self.mdp.observation_space  # type: ignore[assignment]
        self.action_space = self.mdp.action_space
        self._trace: EpisodeTrace | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Seeds the generator that draws prompts.
            options: ``{"prompt_index": i}`` chooses the prompt.

        Returns:
            The observation and an info with ``prompt`` and ``prompt_index``.
        """
        super().reset(seed=seed)
        index = check_options(options, ["prompt_index"]).get("prompt_index")
        if index is None:
            index = self.np_random.integers(len(self.mdp.task))
        index = _integer(index, "prompt_index")
        self.mdp.restart(_SLOT, [index])
        prompt = self.mdp.prompt(index)
        if self.render_mode is not None:
            self._trace = EpisodeTrace(prompt.text, prompt.sample.answer, self.kl_coef)
            self._show()
        return self._observation(), {"prompt": prompt.text, "prompt_index": index}

    def report_logprobs(self, logprob: float) -> None:
        """Reports log π(a|s) of the next action, for ``kl_mode="policy"``."""
        self.mdp.report_logprobs(_SLOT, np.array([logprob], dtype=np.float64))

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns which tokens may come next, bool (V,)."""
        return self.mdp.action_masks()[0]

    def step(
        self, action: int | np.integer[Any]
    ) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Appends a token.

        Raises:
            RuntimeError: The episode is over, or its log-probability was not reported.
            ValueError: The action is outside the vocabulary or masked.
            RewardError: The reward failed and ``on_error`` is ``"raise"``.
        """
        actions = np.array([_integer(action, "The action")], dtype=np.int64)
        transition = self.mdp.step(_SLOT, actions)
        info = transition.info(0)
        reward = float(transition.rewards[0])
        if self._trace is not None:
            self._trace.append(self.mdp.decode([actions])[0], reward, info)
            self._show()
        return (
            self._observation(),
            reward,
            bool(transition.terminated[0]),
            bool(transition.truncated[0]),
            info,
        )

    def render(self) -> Any:
        """Returns the episode so far as text or as an image, each token coloured by its KL."""
        if self._trace is None:
            if self.render_mode is not None:
                raise RuntimeError("render() was called before reset(); call reset() first.")
            gym.logger.warn(
                "render() was called without a render mode; pass "
                'gym.make("TextRL-v0", render_mode="ansi").'
            )
            return None
        return self._trace.render(self.render_mode)

    def close(self) -> None:
        """Ends the reward's worker process, if there is one."""
        self.mdp.close()

    def _observation(self) -> dict[str, NDArray[Any]]:
        return {
            "input_ids": self.mdp.input_ids[0].copy(),
            "attention_mask": self.mdp.attention_mask[0].copy(),
        }

    def _show(self) -> None:
        if self.render_mode == "human":
            self.render()


def _integer(value: Any, name: str) -> int:
    if isinstance(value, (int, np.integer)) or (
        isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu"
    ):
        return int(value)
    raise ValueError(f"{name} is {value!r}; pass one integer.")
