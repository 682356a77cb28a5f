"""Checkpoints that resume exactly, and that run no code when they are loaded.

A checkpoint is a zip file: ``agent.json`` (constructor arguments, spaces, counters),
``policy.safetensors`` (weights) and ``state.pt`` (optimiser and generator states, read with
``weights_only=True``).
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import zipfile
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from gymnasium import spaces
from stable_baselines3.common.utils import (
    ConstantSchedule,
    FloatSchedule,
    check_for_correct_spaces,
    get_system_info,
)

import agents
from agents import kl_control

if TYPE_CHECKING:
    from agents.agent import Agent

AnyAgent = TypeVar("AnyAgent", bound="Agent")

_FORMAT = 1
# Classes are stored by name, and a name is looked up in these packages only.
_TRUSTED_PACKAGES = ("agents", "textrl_env", "torch", "stable_baselines3", "sb3_contrib")
# Given anew when a checkpoint is loaded.
_NOT_STORED = {
    "self",
    "env",
    "device",
    "_init_setup_model",
    "rollout_buffer_class",
    "rollout_buffer_kwargs",
}
_COUNTERS = (
    "num_timesteps",
    "rollout",
    "_total_timesteps",
    "_num_timesteps_at_start",
    "_episode_num",
    "_n_updates",
    "_current_progress_remaining",
)
_EPISODES = ("ep_info_buffer", "ep_success_buffer")
# What a checkpoint can do without: a new run's own values stand in.
_OPTIONAL = {*_COUNTERS, *_EPISODES, "kl_controller"}


def counters(agent: Agent) -> dict[str, Any]:
    """Returns everything besides weights and optimiser that a resumed run needs.

    Taken before a rollout, it lets a checkpoint that is saved in the middle of one start that
    rollout again.
    """
    state = {name: getattr(agent, name) for name in _COUNTERS}
    state["shuffling"] = agent.shuffling.bit_generator.state
    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    state["prompt_position"] = agent.prompt_sampler.position
    if agent.kl_controller is not None:
        state["kl_controller"] = agent.kl_controller.state_dict()
    if agent.ep_info_buffer is not None and agent.ep_success_buffer is not None:
        state["ep_info_buffer"] = [dict(info) for info in agent.ep_info_buffer]
        state["ep_success_buffer"] = [bool(success) for success in agent.ep_success_buffer]
    return state


def save(
    agent: Agent, path: str | os.PathLike[str] | io.IOBase, exclude: Collection[str] = ()
) -> None:
    """Writes a checkpoint; an existing file is replaced only by a complete one.

    Args:
        agent: The agent.
        path: A file name, to which ``.zip`` is added where it has no suffix, or an open binary
            file.
        exclude: Constructor arguments and counters that are left out.

    Raises:
        TypeError: A constructor argument has no plain form, or `path` is no file.
    """
    _check_file(path, "writing")
    description = {
        "format": _FORMAT,
        "class": type(agent).__name__,
        "arguments": {
            name: {"missing": "left out"} if name in exclude else _encode(value, name)
            for name, value in _arguments(agent).items()
        },
        "observation_space": _encode_space(agent.observation_space),
        "action_space": _encode_space(agent.action_space),
        "n_envs": agent.n_envs,
        "run_seed": agent.run_seed,
        "system_info": get_system_info(print_info=False)[0],
    }
    stored = agent.resume_point or counters(agent)
    left_out = _OPTIONAL.intersection(exclude)
    state = {
        "counters": {name: value for name, value in stored.items() if name not in left_out},
        "optimizer": agent.policy.optimizer.state_dict(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("agent.json", json.dumps(description, indent=2))
        file.writestr("policy.safetensors", safetensors.torch.save(_weights(agent.policy)))
        file.writestr("state.pt", buffer.getvalue())
    _write(archive.getvalue(), path)


def load(
    cls: type[AnyAgent],
    path: str | os.PathLike[str] | io.IOBase,
    env: Any,
    device: torch.device | str,
    custom_objects: dict[str, Any],
    print_system_info: bool,
    force_reset: bool,
    **kwargs: Any,
) -> AnyAgent:
    """Returns the agent of a checkpoint; see `Agent.load`.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: `path` is no file.
        ValueError: The file is no checkpoint of this class, or does not fit the environment.
    """
    description, weights, state = _read(path)
    with _damage_as_value_error(path):
        named = description["class"]
        saved = cls if named == cls.__name__ else getattr(agents, named, None)
        fits = saved is not None and issubclass(saved, cls)
        arguments = {name: _decode(value, name) for name, value in description["arguments"].items()}
        if saved is not None and fits:
            inspect.signature(saved).bind(env=env, **arguments)
        observation_space = _decode_space(description["observation_space"])
        action_space = _decode_space(description["action_space"])
        n_envs, run_seed = int(description["n_envs"]), int(description["run_seed"])
        system_info = dict(description.get("system_info", {}))
    if saved is None or not fits:
        raise ValueError(
            f"{path} is a checkpoint of {named}, not of {cls.__name__}; load it with "
            f"{named}.load(...)."
        )
    if print_system_info:
        print("== SAVED MODEL SYSTEM INFO ==")
        for name, value in system_info.items():
            print(f"- {name}: {value}")
    arguments |= {name: value for name, value in custom_objects.items() if name in arguments}
    arguments |= kwargs
    for name, value in arguments.items():
        if isinstance(value, _Missing):
            raise ValueError(
                f"{name} was {value.description}, which a checkpoint does not hold; pass "
                f"{name}=... to load()."
            )
    agent: AnyAgent = saved(env=env, device=device, _init_setup_model=False, **arguments)
    if agent.env is None:
        agent.observation_space, agent.action_space = observation_space, action_space
        agent.n_envs = n_envs
    else:
        check_for_correct_spaces(agent.env, observation_space, action_space)
    agent.run_seed = run_seed
    agent._setup_model()
    with _damage_as_value_error(path):
        _restore_policy(agent, weights, state, path)
        _restore_counters(agent, state["counters"])
    if not force_reset and agent.env is not None:
        agent._last_obs = agent.env.reset()  # type: ignore[assignment]
        agent._last_episode_starts = np.ones((agent.n_envs,), dtype=np.bool_)
    return agent


def set_parameters(agent: Agent, path: str | os.PathLike[str] | io.IOBase) -> None:
    """Takes weights and optimiser from a checkpoint, and nothing else.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no checkpoint, or does not fit the policy.
    """
    _, weights, state = _read(path)
    with _damage_as_value_error(path):
        _restore_policy(agent, weights, state, path)


def _restore_policy(
    agent: Agent, weights: dict[str, torch.Tensor], state: dict[str, Any], path: Any
) -> None:
    _restore_weights(agent.policy, weights, path)
    agent.policy.optimizer.load_state_dict(state["optimizer"])


def _restore_counters(agent: Agent, state: dict[str, Any]) -> None:
    for name in _COUNTERS:
        setattr(agent, name, state.get(name, getattr(agent, name)))
    agent.shuffling.bit_generator.state = state["shuffling"]
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    agent.prompt_sampler.position = state["prompt_position"]
    if agent.kl_controller is not None and "kl_controller" in state:
        agent.kl_controller.load_state_dict(state["kl_controller"])
        if agent.mdp is not None:
            agent._set_kl_coef(agent.kl_controller.coef)
    for name in _EPISODES:
        if name in state:
            setattr(agent, name, deque(state[name], maxlen=agent._stats_window_size))


# Constructor arguments as JSON


def _arguments(agent: Agent) -> dict[str, Any]:
    """The constructor's arguments: an agent keeps each under the argument's name."""
    names = [n for n in inspect.signature(type(agent).__init__).parameters if n not in _NOT_STORED]
    renamed = {"policy": "policy_name", "stats_window_size": "_stats_window_size"}
    return {name: getattr(agent, renamed.get(name, name)) for name in names}


class _Missing:
    """Stands for a value that a checkpoint does not hold."""

    def __init__(self, description: str) -> None:
        self.description = description


def _encode(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FloatSchedule):
        value = value.value_schedule
        return _encode(value.val if isinstance(value, ConstantSchedule) else value, name)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple | range | np.ndarray):
        return [_encode(item, name) for item in value]
    if isinstance(value, dict):
        return {"dict": {key: _encode(item, name) for key, item in value.items()}}
    if (
        isinstance(value, type)
        and issubclass(value, (torch.nn.Module, torch.optim.Optimizer))
        and value.__module__.split(".")[0] in _TRUSTED_PACKAGES
    ):
        return {"type": f"{value.__module__}:{value.__qualname__}"}
    if isinstance(value, kl_control.KLController):
        return {"kl_controller": type(value).__name__, "state": value.state_dict()}
    if callable(value):  # a schedule, or a user's own class
        return {"missing": f"the function {getattr(value, '__name__', repr(value))}"}
    raise TypeError(
        f"{name} holds {value!r}, which has no plain form and cannot be stored; pass numbers, "
        "strings, lists, dictionaries or classes."
    )


def _decode(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        decoded = {key: _decode(item, name) for key, item in value["dict"].items()}
        # One missing item makes the whole argument one that must be given.
        return next((v for v in decoded.values() if isinstance(v, _Missing)), decoded)
    if "type" in value:
        return _find_class(value["type"])
    if "kl_controller" in value:
        controller_class = getattr(kl_control, value["kl_controller"])
        if not issubclass(controller_class, kl_control.KLController):
            raise ValueError(f"{name} names {value['kl_controller']}, which is no KL controller.")
        return controller_class.from_state_dict(value["state"])
    return _Missing(value["missing"])


def _find_class(path: str) -> type:
    module, _, qualname = path.partition(":")
    if module.split(".")[0] not in _TRUSTED_PACKAGES:
        raise ValueError(
            f"The checkpoint names the class {path}, which is of none of the packages "
            f"{_TRUSTED_PACKAGES}; it was not written by this package."
        )
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    # A module holds what it imports too, and a class of another package may run anything.
    if not (
        isinstance(found, type)
        and found.__module__ == module
        and issubclass(found, (torch.nn.Module, torch.optim.Optimizer))
    ):
        raise ValueError(
            f"The checkpoint names {path}, which is no network or optimiser class of that module; "
            "it was not written by this package."
        )
    return found


# Spaces as JSON


def _encode_space(space: Any) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        return {"Dict": {key: _encode_space(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Box):
        bounds = {"low": _encode_bound(space.low), "high": _encode_bound(space.high)}
        return {"Box": bounds | {"shape": list(space.shape), "dtype": str(space.dtype)}}
    if isinstance(space, spaces.Discrete):
        return {"Discrete": {"n": int(space.n), "start": int(space.start)}}
    if isinstance(space, spaces.MultiDiscrete):
        return {"MultiDiscrete": {"nvec": space.nvec.tolist()}}
    if isinstance(space, spaces.MultiBinary):
        return {"MultiBinary": {"n": space.n if isinstance(space.n, int) else list(space.n)}}
    raise TypeError(f"The space {space} cannot be stored; use Box, Discrete, Multi* or Dict.")


def _encode_bound(bound: Any) -> Any:
    # Uniform bounds, as of images and token ids, as one number.
    return bound.flat[0].item() if (bound == bound.flat[0]).all() else bound.tolist()


def _decode_space(encoded: dict[str, Any]) -> spaces.Space[Any]:
    [(name, arguments)] = encoded.items()
    if name == "Dict":
        return spaces.Dict({key: _decode_space(part) for key, part in arguments.items()})
    if name == "Box":
        dtype, shape = np.dtype(arguments["dtype"]), tuple(arguments["shape"])
        low, high = (np.broadcast_to(np.array(arguments[k], dtype), shape) for k in ("low", "high"))
        return spaces.Box(low.copy(), high.copy(), shape, dtype.type)
    kinds = {
        "Discrete": spaces.Discrete,
        "MultiDiscrete": spaces.MultiDiscrete,
        "MultiBinary": spaces.MultiBinary,
    }
    return kinds[name](**arguments)


# Weights and files


def _weights(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dictionary, with tensors that share memory (tied weights) once."""
    unique: dict[tuple[Any, ...], str] = {}
    state = policy.state_dict()
    for name, tensor in state.items():
        unique.setdefault((tensor.data_ptr() or name, tensor.shape, tensor.stride()), name)
    return {name: state[name].contiguous() for name in unique.values()}


def _restore_weights(policy: torch.nn.Module, weights: dict[str, torch.Tensor], path: Any) -> None:
    expected = _weights(policy)
    if {k: t.shape for k, t in expected.items()} != {k: t.shape for k, t in weights.items()}:
        raise ValueError(
            f"The weights in {path} do not fit the policy; load it with the model and "
            "policy_kwargs that it was saved with."
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(weights[name])


def _check_file(path: Any, purpose: str) -> None:
    if isinstance(path, str | os.PathLike):
        return
    able = getattr(path, {"writing": "writable", "reading": "readable"}[purpose], None)
    if able is None or isinstance(path, io.TextIOBase):
        raise TypeError(
            f"path is {path!r}; pass a file name, or a binary file that is open for {purpose}."
        )
    if not able():
        raise ValueError(f"{path!r} is not open for {purpose}; open it in the mode for that.")


@contextmanager
def _damage_as_value_error(path: Any) -> Iterator[None]:
    """One error for whatever fails on a file that is cut, altered or of another kind."""
    try:
        yield
    except Exception as error:
        if type(error) is ValueError:  # it says by itself what is wrong
            raise
        raise ValueError(
            f"{path} is damaged or not a checkpoint of this package ({error!r}); files of "
            "Stable-Baselines3 are loaded with its own classes."
        ) from error


def _with_suffix(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.suffix else path.with_name(path.name + ".zip")


def _write(content: bytes, path: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        path.write(content)
        return
    target = _with_suffix(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    _check_file(path, "reading")
    if isinstance(path, str | os.PathLike):
        exact = Path(path)
        path = exact if exact.is_file() else _with_suffix(exact)
        if not path.is_file():
            raise FileNotFoundError(f"There is no checkpoint at {path}.")
    with _damage_as_value_error(path), zipfile.ZipFile(path) as file:
        description = dict(json.loads(file.read("agent.json")))
        weights = safetensors.torch.load(file.read("policy.safetensors"))
        state = torch.load(io.BytesIO(file.read("state.pt")), "cpu", weights_only=True)
    if description.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has format {description.get('format')}, and this version reads {_FORMAT}; "
            "load it with the version of textrl-env that wrote it."
        )
    return description, weights, state
