"""Bridges to Stable-Baselines3: vector environments, and the KL consumer for its agents."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
    VectorWrapper,
)
from numpy.typing import NDArray
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, unwrap_vec_normalize

from textrl_env.vector_env import TextRLVectorEnv

# In NEXT_STEP too, these restart chosen slots; Gymnasium's native ones restart all of them.
_RESET_BY_MASK = (SyncVectorEnv, AsyncVectorEnv, TextRLVectorEnv)


class GymVecEnv(VecEnv):
    """A Gymnasium `VectorEnv` as a Stable-Baselines3 `VecEnv`.

    Episodes restart within the step, as `VecEnv` promises, whatever the autoreset mode: the last
    observation is in ``info["terminal_observation"]``, and ``info["TimeLimit.truncated"]`` tells
    truncation from termination. Put `VecMonitor` around it for episode statistics.

    Options that differ between the slots reach ``reset`` as arrays (N,), which ``TextRL-v0`` takes
    and Gymnasium's own vector environments do not.

    A native vector in mode ``NEXT_STEP``, such as Gymnasium's CartPole or those of EnvPool, cannot
    be told to do so. For a caller that knows (`allow_late`), its restarts take a step of their own:
    `restarted` says for which slots the last step was one, whose action was ignored and whose
    observation begins an episode.

    Args:
        venv: Vector environment in mode ``SAME_STEP``, or one whose ``reset`` heeds
            ``reset_mask``: ours, Gymnasium's `SyncVectorEnv` and `AsyncVectorEnv`, or any in mode
            ``DISABLED``. With `allow_late` any.
        allow_late: The caller leaves the steps in `restarted` out.

    Raises:
        ValueError: Episodes cannot be restarted within the step, and `allow_late` is not set.

    Examples:
        >>> import gymnasium as gym
        >>> venv = gym.make_vec("textrl_env:TextRL-v0", num_envs=2, kl_mode="none")
        >>> env = GymVecEnv(venv)
        >>> env.reset()["input_ids"].shape == (2, venv.unwrapped.mdp.max_tokens)
        True
    """

    def __init__(self, venv: VectorEnv[Any, Any, Any], *, allow_late: bool = False) -> None:
        mode = venv.metadata.get("autoreset_mode")
        self.restarts_late = mode == AutoresetMode.NEXT_STEP and not isinstance(
            venv.unwrapped, _RESET_BY_MASK
        )
        if self.restarts_late and not allow_late:
            raise ValueError(
                f"{venv} restarts an episode by itself one step late, and cannot be told to do so "
                "at once; make it with gym.make_vec(..., vectorization_mode='sync')."
            )
        self.venv = venv
        # With copy=False a vector writes its next observations into the same arrays.
        self._shared = getattr(venv.unwrapped, "copy", True) is False
        self._same_step = mode == AutoresetMode.SAME_STEP
        self._actions: Any = None
        self._restart()
        super().__init__(venv.num_envs, venv.single_observation_space, venv.single_action_space)

    def _restart(self) -> None:
        """No slot waits for a restart, and all episodes are new."""
        self.restarted = np.zeros(self.venv.num_envs, dtype=np.bool_)
        self._ended = self.restarted
        self._episodes = EpisodeInfos(self.venv.num_envs)

    def reset(self) -> Any:
        """Restarts every slot with the seeds and options that were set; returns observations."""
        self._restart()
        seed, options = self._merged_seeds(), self._merged_options()
        try:
            observations, infos = self.venv.reset(seed=seed, options=options)  # type: ignore[arg-type]
        except gym.error.Error as error:
            if not isinstance(seed, list):
                raise
            raise ValueError(
                f"{self.venv} does not take a seed for each slot ({error}), which episodes of a "
                'group need; make it with gym.make_vec(..., vectorization_mode="sync").'
            ) from error
        self.reset_infos = split_infos(infos, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return deepcopy(observations) if self._shared else observations

    def _merged_seeds(self) -> int | list[int | None] | None:
        """One integer where the seeds count up from it: some vectors take nothing else."""
        first = self._seeds[0]
        if first is not None and self._seeds == list(range(first, first + self.num_envs)):
            return first
        return None if all(seed is None for seed in self._seeds) else list(self._seeds)

    def _merged_options(self) -> dict[str, Any] | None:
        """One dictionary for all slots: values that differ become arrays."""
        first = self._options[0]
        if all(options == first for options in self._options):
            return first or None
        if any(options.keys() != first.keys() for options in self._options):
            raise ValueError(
                f"The options {self._options} have different keys; give every slot the same ones."
            )
        return {key: np.array([options[key] for options in self._options]) for key in first}

    def step_async(self, actions: NDArray[Any]) -> None:
        """Takes the actions of the next `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Steps every slot and restarts those whose episode ended."""
        if self.restarts_late:
            return self._step_late()
        observations, rewards, terminated, truncated, infos = self.venv.step(self._actions)
        dones = terminated | truncated
        final_infos = split_infos(infos.pop("final_info", {}), self.num_envs)
        final_observations = infos.pop("final_obs", None)
        split = split_infos(infos, self.num_envs)
        for i, info in enumerate(split):
            if dones[i] and self._same_step:
                # RecordEpisodeStatistics writes beside the info of the new episode.
                episode = {"episode": info.pop("episode")} if "episode" in info else {}
                self.reset_infos[i], split[i] = info, {**final_infos[i], **episode}
                split[i]["terminal_observation"] = final_observations[i]
            elif dones[i]:
                info["terminal_observation"] = _slot(observations, i)
            split[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
        if dones.any() and not self._same_step:
            observations, reset_infos = self.venv.reset(options={"reset_mask": dones.copy()})
            for i, info in enumerate(split_infos(reset_infos, self.num_envs)):
                if dones[i]:
                    self.reset_infos[i] = info
        if self._shared:
            observations = deepcopy(observations)
        return observations, rewards.astype(np.float32), dones, split

    def _step_late(
        self,
    ) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        observations, rewards, terminated, truncated, infos = self.venv.step(self._actions)
        dones = terminated | truncated
        split = split_infos(infos, self.num_envs)
        for i in np.flatnonzero(dones).tolist():
            split[i]["terminal_observation"] = _slot(observations, i)
            split[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
        self.restarted, self._ended = self._ended, dones
        rewards = rewards.astype(np.float32)
        # `VecMonitor` would count the restarts.
        self._episodes.add(rewards, ~self.restarted, dones, split)
        return observations, rewards, dones, split

    def close(self) -> None:
        """Closes the vector environment."""
        self.venv.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Returns an attribute of each environment; of a native one, its own for each slot."""
        if self._has_parts:
            values = self._parts.get_attr(attr_name)
        else:
            values = (self._find(attr_name),) * self.num_envs
        return [values[i] for i in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Sets an attribute of each environment; of a native one, its own for all slots."""
        if not self._has_parts:
            setattr(self.venv.unwrapped, attr_name, value)
        elif indices is None:
            self._parts.set_attr(attr_name, [value] * self.num_envs)
        else:
            values = self.get_attr(attr_name)
            for i in self._get_indices(indices):
                values[i] = value
            self._parts.set_attr(attr_name, values)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of each environment.

        A native vector environment's is called once; an array result is split by slot.
        """
        if self._has_parts:
            results = self._parts.call(method_name, *method_args, **method_kwargs)
            return [results[i] for i in self._get_indices(indices)]
        result = self._find(method_name)(*method_args, **method_kwargs)
        per_slot = isinstance(result, np.ndarray) and len(result) == self.num_envs
        return [result[i] if per_slot else result for i in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None
    ) -> list[bool]:
        """Returns whether each environment is wrapped, where it can be looked at from here."""
        envs = getattr(self.venv.unwrapped, "envs", None)
        return [
            envs is not None and is_wrapped(envs[i], wrapper_class)
            for i in self._get_indices(indices)
        ]

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """Returns the image of each environment."""
        images: Any = self.venv.render()
        return [None] * self.num_envs if images is None else list(images)

    def _find(self, name: str) -> Any:
        """An attribute of the outermost wrapper that has it; Gymnasium's forward none."""
        venv = self.venv
        while isinstance(venv, VectorWrapper) and not hasattr(venv, name):
            venv = venv.env
        return getattr(venv, name)

    @property
    def _parts(self) -> Any:
        return self.venv.unwrapped

    @property
    def _has_parts(self) -> bool:
        """Whether the vector environment is made of single ones."""
        return isinstance(self._parts, SyncVectorEnv | AsyncVectorEnv)


class EpisodeInfos:
    """Return and length of each slot's episode, for environments that nothing else monitors.

    Args:
        num_envs: Number of slots N.
    """

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs, dtype=np.float32)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.start = time.time()

    def add(
        self,
        rewards: NDArray[np.float32],
        rows: NDArray[Any],
        dones: NDArray[np.bool_],
        infos: list[dict[str, Any]],
    ) -> None:
        """Adds a step, and ``episode`` to the infos of the slots that are done.

        Args:
            rewards: (N,).
            rows: Slots that took the step, as indices or bool (N,).
            dones: bool (N,).
            infos: One for each slot; changed.
        """
        self.returns[rows] += rewards[rows]
        self.lengths[rows] += 1
        for i in np.flatnonzero(dones).tolist():
            infos[i].setdefault(
                "episode",
                {
                    "r": float(self.returns[i]),
                    "l": int(self.lengths[i]),
                    "t": round(time.time() - self.start, 6),
                },
            )
        self.returns[dones] = 0.0
        self.lengths[dones] = 0


def step_without_copies(
    env: DummyVecEnv, actions: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
    """Steps a `DummyVecEnv` as its own ``step`` does, without its deep copies.

    Args:
        env: Vector environment whose observations are arrays.
        actions: One for each slot.

    Returns:
        Observations, rewards, ends and infos; the infos are the environments' own.
    """
    space: Any = env.observation_space
    observations = np.empty((env.num_envs, *space.shape), dtype=space.dtype)
    rewards = np.empty(env.num_envs, dtype=np.float32)
    dones = np.zeros(env.num_envs, dtype=np.bool_)
    infos = []
    for i, single in enumerate(env.envs):
        observation, rewards[i], terminated, truncated, info = single.step(actions[i])
        info["TimeLimit.truncated"] = truncated and not terminated
        if terminated or truncated:
            dones[i] = True
            info["terminal_observation"] = observation
            observation, env.reset_infos[i] = single.reset()
        observations[i] = observation
        infos.append(info)
    return observations, rewards, dones, infos


def split_infos(
    infos: dict[str, Any], num_envs: int, present: NDArray[np.bool_] | None = None
) -> list[dict[str, Any]]:
    """Returns Gymnasium's dictionary of arrays as one dictionary of Python values per slot.

    Args:
        infos: Arrays and, under ``"_" + key``, which slots have the value; nested dictionaries.
        num_envs: Number of slots N.
        present: Which slots have the values without such a mask, bool (N,); None leaves them out.

    Examples:
        >>> infos = {"kl": np.array([0.5, 0.0]), "_kl": np.array([True, False])}
        >>> split_infos(infos, 2)
        [{'kl': 0.5}, {}]
    """
    split: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, values in infos.items():
        mask = infos.get("_" + key, present)
        if key.startswith("_") or mask is None:
            continue
        rows: Iterable[Any]
        if isinstance(values, dict):
            rows = split_infos(values, num_envs, mask)
        else:
            rows = values.tolist() if values.ndim == 1 else values
        for info, has_it, value in zip(split, mask.tolist(), rows, strict=True):
            if has_it:
                info[key] = value
    return split


def _slot(observations: Any, i: int) -> Any:
    if isinstance(observations, dict):
        return {key: value[i].copy() for key, value in observations.items()}
    return observations[i].copy()


def announce_kl_consumer(env: Any) -> None:
    """Tells the environment that β·log π_old is subtracted from the rewards it gives.

    Args:
        env: An `Env` or a `VecEnv`.

    Raises:
        ValueError: The environment's `kl_mode` is not ``"reference"``, or its rewards are
            normalised.

    Examples:
        >>> import gymnasium as gym
        >>> env = gym.make("textrl_env:TextRL-v0")
        >>> announce_kl_consumer(env)
        >>> env.unwrapped.mdp.kl_consumer
        True
    """
    if isinstance(env, VecEnv):
        normalize = unwrap_vec_normalize(env)
        if normalize is not None and normalize.norm_reward:
            raise ValueError(
                "VecNormalize rescales the rewards, and β·log π_ref in them, but not β·log π_old; "
                "use VecNormalize(..., norm_reward=False)."
            )
        env.env_method("announce_kl_consumer")
    else:
        env.unwrapped.announce_kl_consumer()


class KLCallback(BaseCallback):
    """Subtracts β·log π_old from the rewards of an agent of Stable-Baselines3 or sb3-contrib.

    With ``kl_mode="reference"`` the environment's reward holds +β·log π_ref; together they are the
    exact per-token KL penalty −β·(log π_old − log π_ref). Our own agents subtract by themselves,
    and the callback leaves them alone.

    Put it first in a list of callbacks, so that the others see the shaped reward.

    Raises:
        ValueError: The environment's `kl_mode` is not ``"reference"``, or its rewards are
            normalised.

    Examples:
        >>> import gymnasium as gym
        >>> from stable_baselines3 import PPO
        >>> env = gym.make("textrl_env:TextRL-v0", kl_coef=0.05)
        >>> model = PPO("MultiInputPolicy", env, n_steps=8, batch_size=8)
        >>> model = model.learn(8, callback=KLCallback())
    """

    def _on_training_start(self) -> None:
        if not getattr(self.model, "subtracts_kl", False):
            announce_kl_consumer(self.training_env)
            wanted = self.training_env.get_attr("mdp")[0].config.temperature
            used = getattr(self.model.policy, "temperature", 1.0)
            if used != wanted:
                raise ValueError(
                    f"The policy's temperature is {used} and the environment's {wanted}; the KL "
                    "needs both log-probabilities under the distribution that is sampled from, so "
                    "pass policy_kwargs={'temperature': ...} or make the environment anew."
                )

    def _on_step(self) -> bool:
        if not getattr(self.model, "subtracts_kl", False):
            kl_coef = np.array([info["kl_coef"] for info in self.locals["infos"]])
            self.locals["rewards"] -= _charge(kl_coef, self.locals["log_probs"])
        return True


def _charge(kl_coef: float | NDArray[np.float64], log_probs: torch.Tensor) -> NDArray[np.float32]:
    """Returns β·log π_old, (n,)."""
    log_probs_array = log_probs.detach().double().cpu().numpy().reshape(-1)
    return (kl_coef * log_probs_array).astype(np.float32)


class KLRolloutBuffer(DictRolloutBuffer):
    """A rollout buffer that subtracts β·log π_old from the rewards that it stores.

    The same as `KLCallback`, without a callback: pass ``rollout_buffer_class=KLRolloutBuffer`` and
    ``rollout_buffer_kwargs={"env": env}``, to `load` too. Use one of the two.

    Args:
        env: The training environment, an `Env` or a `VecEnv`. Its `kl_coef` is read when a step is
            stored, after the callbacks of the step: let it change between rollouts only.

    Raises:
        ValueError: The environment's `kl_mode` is not ``"reference"``, or its rewards are
            normalised.
    """

    def __init__(self, *args: Any, env: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        announce_kl_consumer(env)
        self.env = env.unwrapped

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        episode_start: Any,
        value: Any,
        log_prob: torch.Tensor,
    ) -> None:
        """Stores a step with its reward shaped, see `DictRolloutBuffer.add`."""
        if isinstance(self.env, VecEnv):
            kl_coef = self.env.get_attr("kl_coef")[0]
        else:
            kl_coef = self.env.kl_coef
        shaped = reward - _charge(kl_coef, log_prob)
        super().add(obs, action, shaped, episode_start, value, log_prob)
