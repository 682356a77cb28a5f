"""The vector environment, ``gym.make_vec("TextRL-v0", num_envs=N)``: N slots of the core."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from textrl_env.access import MDPAccess
from textrl_env.config import TextRLConfig
from textrl_env.core import Prompt, TokenMDP, Transition, check_options, ending_info
from textrl_env.trace import RENDER_MODES, EpisodeTrace, check_render_mode

_NUMERIC = {float: np.float64, int: np.int64, bool: np.bool_}


class TextRLVectorEnv(
    MDPAccess, VectorEnv[dict[str, NDArray[Any]], NDArray[np.int64], NDArray[Any]]
):
    """N completions at a time, a token of each per step.

    The same seeds and actions give the same observations, rewards and infos as
    `gymnasium.vector.SyncVectorEnv` and `AsyncVectorEnv` over `TextRLEnv`: slot i has a generator
    of its own, seeded with ``seed + i``. The reference is scored once for all slots.

    ``reset(options=...)`` takes ``prompt_index``, one index for all slots or an array (N,), and
    ``reset_mask``, bool (N,), which restarts only some.

    Args:
        num_envs: Number of slots N.
        render_mode: ``"ansi"``, ``"human"``, ``"rgb_array"`` or None; `render` returns a tuple.
        autoreset_mode: What follows the end of an episode. ``NEXT_STEP``: the next step ignores
            the slot's action and returns the first observation of a new episode. ``SAME_STEP``:
            the step returns it, and the last observation and info are in ``final_obs`` and
            ``final_info``. ``DISABLED``: the caller resets with ``reset_mask``.
        **options: The options of `TextRLConfig`.

    Examples:
        >>> import gymnasium as gym
        >>> venv = gym.make_vec("textrl_env:TextRL-v0", num_envs=3, kl_mode="none")
        >>> observations, infos = venv.reset(seed=0)
        >>> observations["input_ids"].shape == (3, venv.unwrapped.mdp.max_tokens)
        True
        >>> _, rewards, *_ = venv.step(venv.action_space.sample())
        >>> rewards.shape
        (3,)
    """

    metadata: dict[str, Any] = {"render_modes": RENDER_MODES, "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        **options: Any,
    ) -> None:
        if not (isinstance(num_envs, int | np.integer) and num_envs >= 1):
            raise ValueError(f"num_envs is {num_envs!r}; it must be a whole number of at least 1.")
        self.num_envs = num_envs
        self.render_mode = check_render_mode(render_mode)
        self.autoreset_mode = _autoreset_mode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.mdp = TokenMDP(TextRLConfig.from_options(options), num_slots=num_envs)
        self.single_observation_space = self.mdp.observation_space
        self.single_action_space = self.mdp.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._slots = np.arange(num_envs)
        self._generators: list[np.random.Generator | None] = [None] * num_envs
        self._ended = np.zeros(num_envs, dtype=np.bool_)
        self._traces: list[EpisodeTrace] | None = None

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Starts episodes in all slots, or in those of ``options["reset_mask"]``.

        Args:
            seed: An integer seeds slot i with ``seed + i``; a list gives one seed per slot.
            options: ``prompt_index`` and ``reset_mask``.

        Returns:
            The observations, and infos with ``prompt`` and ``prompt_index``.
        """
        if seed is None:
            seeds: Sequence[int | None] = [None] * self.num_envs
        elif isinstance(seed, int | np.integer):
            seeds = [int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = seed
        if len(seeds) != self.num_envs:
            raise ValueError(f"Got {len(seeds)} seeds for {self.num_envs} slots; pass one each.")
        checked = check_options(options, ["prompt_index", "reset_mask"])
        slots = self._slots[self._reset_mask(checked.get("reset_mask"))]
        for slot in slots.tolist():
            if seeds[slot] is not None or self._generators[slot] is None:
                self._generators[slot], _ = seeding.np_random(seeds[slot])
        infos: dict[str, Any] = {}
        self._restart(slots, infos, checked.get("prompt_index"))
        return self._observations(), infos

    def report_logprobs(self, logprobs: NDArray[np.float64]) -> None:
        """Reports log π(a|s) of the next action of each slot, (N,), for ``kl_mode="policy"``."""
        logprobs = np.asarray(logprobs, dtype=np.float64)
        if logprobs.shape != (self.num_envs,):
            raise ValueError(f"Got log-probabilities of shape {logprobs.shape}; pass one a slot.")
        running = self._slots[~self.mdp.done]
        self.mdp.report_logprobs(running, logprobs[running])

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns which tokens may come next, bool (N, V)."""
        return self.mdp.action_masks()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[
        dict[str, NDArray[Any]],
        NDArray[np.float64],
        NDArray[np.bool_],
        NDArray[np.bool_],
        dict[str, Any],
    ]:
        """Appends a token in each slot; `actions` is int64 (N,).

        Raises:
            RuntimeError: An episode is over (``DISABLED``), or a log-probability is missing.
            ValueError: An action is outside the vocabulary or masked.
            RewardError: A reward failed and ``on_error`` is ``"raise"``.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(
                f"Got actions of shape {actions.shape} and dtype {actions.dtype}; pass one token "
                f"id for each of the {self.num_envs} slots."
            )
        actions = actions.astype(np.int64, copy=False)
        rewards = np.zeros(self.num_envs)
        terminations = np.zeros(self.num_envs, dtype=np.bool_)
        truncations = np.zeros(self.num_envs, dtype=np.bool_)
        infos: dict[str, Any] = {}

        waiting = self._ended if self.autoreset_mode == AutoresetMode.NEXT_STEP else None
        if waiting is not None and waiting.any():
            stepping = self._slots[~waiting]
            restarting = self._slots[waiting]
        else:
            stepping, restarting = self._slots, None
        if len(stepping):
            transition = self.mdp.step(stepping, actions[stepping])
            rewards[stepping] = transition.rewards
            terminations[stepping] = transition.terminated
            truncations[stepping] = transition.truncated
            self._record(stepping, actions, transition)
            self._step_infos(infos, stepping, transition)
        if restarting is not None:
            self._restart(restarting, infos)
        self._ended = terminations | truncations
        if self.autoreset_mode == AutoresetMode.SAME_STEP and self._ended.any():
            self._restart(self._slots[self._ended], infos)
        return self._observations(), rewards, terminations, truncations, infos

    def render(self) -> tuple[Any, ...] | None:
        """Returns each slot's episode as text or image, its tokens coloured by their KL."""
        if self.render_mode is None:
            gym.logger.warn(
                "render() was called without a render mode; pass "
                'gym.make_vec("TextRL-v0", num_envs=..., render_mode="ansi").'
            )
            return None
        if self._traces is None:
            raise RuntimeError("render() was called before reset(); call reset() first.")
        return tuple(trace.render(self.render_mode) for trace in self._traces)

    def close_extras(self, **kwargs: Any) -> None:
        """Ends the reward's worker process, if there is one."""
        self.mdp.close()

    # Helpers

    def _reset_mask(self, mask: Any) -> NDArray[np.bool_]:
        if mask is None:
            return np.ones(self.num_envs, dtype=np.bool_)
        if (
            not isinstance(mask, np.ndarray)
            or mask.dtype != np.bool_
            or mask.shape != (self.num_envs,)
            or not mask.any()
        ):
            raise ValueError(
                f"reset_mask is {mask!r}; pass a boolean numpy array of shape ({self.num_envs},) "
                "with at least one True."
            )
        return mask

    def _restart(
        self, slots: NDArray[np.int64], infos: dict[str, Any], prompt_index: Any = None
    ) -> None:
        """Starts episodes in `slots` and adds their infos."""
        if prompt_index is None:
            size = len(self.mdp.task)
            indices = np.array([int(self._generator(s).integers(size)) for s in slots.tolist()])
        else:
            every = np.asarray(prompt_index)
            if every.dtype.kind not in "iu" or every.shape not in ((), (self.num_envs,)):
                raise ValueError(
                    f"prompt_index is {prompt_index!r}; pass one index, or one for each of the "
                    f"{self.num_envs} slots."
                )
            indices = np.broadcast_to(every, (self.num_envs,))[slots]
        self.mdp.restart(slots, indices.tolist())
        self._ended[slots] = False
        prompts = self._prompts(slots)
        _put(infos, "prompt", slots, [prompt.text for prompt in prompts], self.num_envs, object)
        _put(infos, "prompt_index", slots, indices, self.num_envs, np.int64)
        if self.render_mode is not None:
            if self._traces is None:
                self._traces = [EpisodeTrace("", None, self.kl_coef)] * self.num_envs
            for slot, prompt in zip(slots.tolist(), prompts, strict=True):
                self._traces[slot] = EpisodeTrace(prompt.text, prompt.sample.answer, self.kl_coef)

    def _generator(self, slot: int) -> np.random.Generator:
        generator = self._generators[slot]
        if generator is None:
            raise RuntimeError("step() was called before reset(); call reset() first.")
        return generator

    def _prompts(self, slots: NDArray[np.int64]) -> list[Prompt]:
        return [p for s in slots.tolist() if (p := self.mdp.prompts[s]) is not None]

    def _step_infos(
        self, infos: dict[str, Any], slots: NDArray[np.int64], transition: Transition
    ) -> None:
        """Adds a transition's infos; in ``SAME_STEP`` those of the last step are `final_info`."""
        final = np.array(sorted(transition.endings), dtype=np.int64)
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            running = np.setdiff1d(np.arange(len(slots)), final, assume_unique=True)
            self._put_numbers(infos, slots, running, transition)
            if len(final):
                ended = slots[final]
                final_info = infos["final_info"] = {}
                _put(infos, "final_obs", ended, self._single_observations(ended), self.num_envs)
                infos["_final_info"] = infos["_final_obs"].copy()
                self._put_numbers(final_info, slots, final, transition)
                self._put_endings(final_info, slots, transition)
        else:
            self._put_numbers(infos, slots, np.arange(len(slots)), transition)
            self._put_endings(infos, slots, transition)

    def _put_numbers(
        self,
        infos: dict[str, Any],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        transition: Transition,
    ) -> None:
        if not len(positions):
            return
        rows = slots[positions]
        for key, values, dtype in (
            ("task_reward", transition.task_rewards, np.float64),
            ("ref_logprob", transition.ref_logprobs, np.float64),
            ("kl", transition.kl, np.float64),
            ("kl_coef", np.full(len(slots), transition.kl_coef), np.float64),
            ("num_tokens", transition.num_tokens, np.int64),
        ):
            _put(infos, key, rows, values[positions], self.num_envs, dtype)

    def _put_endings(
        self, infos: dict[str, Any], slots: NDArray[np.int64], transition: Transition
    ) -> None:
        columns: dict[str, tuple[list[int], list[Any]]] = defaultdict(lambda: ([], []))
        for position, ending in sorted(transition.endings.items()):
            for key, value in ending_info(ending).items():
                columns[key][0].append(position)
                columns[key][1].append(value)
        for key, (positions, values) in columns.items():
            dtype = _NUMERIC.get(type(values[0]), object)
            _put(infos, key, slots[positions], values, self.num_envs, dtype)

    def _observations(self) -> dict[str, NDArray[Any]]:
        return {
            "input_ids": self.mdp.input_ids.copy(),
            "attention_mask": self.mdp.attention_mask.copy(),
        }

    def _single_observations(self, slots: NDArray[np.int64]) -> list[dict[str, NDArray[Any]]]:
        return [
            {
                "input_ids": self.mdp.input_ids[slot].copy(),
                "attention_mask": self.mdp.attention_mask[slot].copy(),
            }
            for slot in slots
        ]

    def _record(
        self, slots: NDArray[np.int64], actions: NDArray[np.int64], transition: Transition
    ) -> None:
        if self._traces is None:
            return
        texts = self.mdp.decode(list(actions[slots][:, None]))
        for i, slot in enumerate(slots.tolist()):
            self._traces[slot].append(texts[i], float(transition.rewards[i]), transition.info(i))


def _autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    modes = [m.value for m in AutoresetMode]
    if mode not in [*AutoresetMode, *modes]:
        raise ValueError(f"autoreset_mode is {mode!r}; use one of {modes}.")
    return AutoresetMode(mode)


def _put(
    infos: dict[str, Any],
    key: str,
    slots: NDArray[np.int64],
    values: Any,
    num_envs: int,
    dtype: Any = object,
) -> None:
    """Writes `values` at `slots` of ``infos[key]`` and marks them in ``infos["_" + key]``."""
    if key not in infos:
        infos[key] = np.full(num_envs, None if dtype is object else 0, dtype)
        infos["_" + key] = np.zeros(num_envs, dtype=np.bool_)
    if dtype is object:
        for slot, value in zip(slots.tolist(), values, strict=True):
            infos[key][slot] = value
    else:
        infos[key][slots] = values
    infos["_" + key][slots] = True
