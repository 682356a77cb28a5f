"""Environment steps per second of our PPO beside Stable-Baselines3's.

``python -m benchmarks.control_speed`` times `learn` from start to end, everything included, and
writes ``results/control_speed.json``. Each timing has a fresh process with torch's own number of
threads; the timings of a round follow one another, in a rotating order, and each round gives one
ratio, so that a machine that slows down slows both.

Stable-Baselines3 has the environment as its users make it, with `make_vec_env`. Our agent is timed
on the same (``"vec"``) and on Gymnasium's native vector environment where there is one
(``"native"``).
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from benchmarks import record
from benchmarks.control import make_agent, normalized
from benchmarks.zoo import AgentName, Settings, entry
from textrl_env.sb3 import GymVecEnv

Kind = Literal["vec", "native"]
Column = Literal["sb3", "vec", "native"]
_SB3_N_STEPS = 2048  # default of both libraries
_PACKAGES = ("mujoco", "box2d")


@dataclass(frozen=True)
class Config:
    """Times PPO.

    Attributes:
        zoo: Environments at the settings of `benchmarks.zoo`.
        default: Environments with all defaults of PPO, one slot.
        kinds: Kinds of environment that our agent is timed on.
        pairs: Rounds.
        seconds: A run of Stable-Baselines3 takes at least this long.
    """

    zoo: tuple[str, ...] = ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v4")
    default: tuple[str, ...] = (
        "CartPole-v1",
        "Acrobot-v1",
        "MountainCar-v0",
        "MountainCarContinuous-v0",
        "Pendulum-v1",
        "LunarLander-v3",
        "HalfCheetah-v4",
    )
    kinds: tuple[Kind, ...] = ("vec", "native")
    pairs: int = 3
    seconds: float = 4.0


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        env_id: Gymnasium id.
        at_zoo_settings: Whether at those of the zoo, or with all defaults.
    """

    env_id: str
    at_zoo_settings: bool

    @property
    def settings(self) -> Settings:
        """Hyperparameters and normalisation."""
        return entry(self.env_id).settings("ppo") if self.at_zoo_settings else Settings()

    @property
    def rollout(self) -> int:
        """Environment steps of a rollout."""
        return self.settings.n_envs * self.settings.arguments.get("n_steps", _SB3_N_STEPS)


def has_native(env_id: str) -> bool:
    """Returns whether Gymnasium has a native vector of the environment."""
    return gym.spec(env_id).vector_entry_point is not None


def make_env(kind: Kind, env_id: str, n_envs: int) -> VecEnv:
    """Returns a vector environment with episode statistics.

    Args:
        kind: ``"vec"`` for `make_vec_env`, ``"native"`` for Gymnasium's native vector.
        env_id: Gymnasium id.
        n_envs: Slots.
    """
    if kind == "vec":
        return make_vec_env(env_id, n_envs, seed=0)
    # An agent does this itself where it is given the vector environment.
    return GymVecEnv(gym.make_vec(env_id, num_envs=n_envs), allow_late=True)


def time_learn(case: Case, column: Column, timesteps: int) -> tuple[float, int]:
    """Returns the seconds of `learn`, and the environment steps that it took."""
    agent_name: AgentName = "sb3-ppo" if column == "sb3" else "ppo"
    env = make_env("vec" if column == "sb3" else column, case.env_id, case.settings.n_envs)
    agent = make_agent(agent_name, normalized(env, case.settings), case.settings, seed=0)
    start = time.perf_counter()
    agent.learn(timesteps)
    return time.perf_counter() - start, agent.num_timesteps


def time_in_fresh_process(case: Case, column: Column, timesteps: int) -> tuple[float, int]:
    """Returns `time_learn` of a process that has done nothing before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(time_learn, case, column, timesteps).result()


def compare(case: Case, config: Config) -> dict[str, Any]:
    """Returns steps per second of each column and, for ours, the ratio of each round."""
    timesteps = case.rollout
    while (seconds := time_in_fresh_process(case, "sb3", timesteps)[0]) < config.seconds:
        timesteps *= max(2, math.ceil(config.seconds / seconds))
    kinds = [kind for kind in config.kinds if kind == "vec" or has_native(case.env_id)]
    columns: list[Column] = ["sb3", *kinds]
    rates: dict[Column, list[float]] = {column: [] for column in columns}
    for i in range(config.pairs):
        shift = i % len(columns)
        for column in columns[shift:] + columns[:shift]:
            seconds, steps = time_in_fresh_process(case, column, timesteps)
            rates[column].append(steps / seconds)
    result: dict[str, Any] = {"timesteps": timesteps}
    for column in columns:
        result[f"{column}_steps_per_second"] = [round(rate) for rate in rates[column]]
    for kind in kinds:
        ratios = np.divide(rates[kind], rates["sb3"])
        result[f"{kind}_ratios"] = ratios.round(3).tolist()
        result[f"{kind}_ratio_median"] = round(float(np.median(ratios)), 3)
    return result


def main(config: Config) -> None:
    """Runs the benchmark."""
    console = Console()
    cases = [Case(env_id, True) for env_id in config.zoo]
    cases += [Case(env_id, False) for env_id in config.default]
    table = Table("environment", "settings", "SB3 steps/s", *(f"{k} / SB3" for k in config.kinds))
    results: dict[str, dict[str, Any]] = {"zoo": {}, "default": {}}
    for case in cases:
        settings = "zoo" if case.at_zoo_settings else "default"
        result = results[settings][case.env_id] = compare(case, config)
        rate = f"{np.median(result['sb3_steps_per_second']):,.0f}"
        ratios = [str(result.get(f"{kind}_ratio_median", "–")) for kind in config.kinds]
        console.print(case.env_id, settings, result)
        table.add_row(case.env_id, settings, rate, *ratios)
        configuration = {
            **dataclasses.asdict(config),
            "settings": {
                env_id: dataclasses.asdict(Case(env_id, True).settings) for env_id in config.zoo
            },
        }
        path = record.write("control_speed", configuration, results, packages=_PACKAGES)
    console.print(table)
    console.print(f"Wrote {path}")


if __name__ == "__main__":
    main(tyro.cli(Config))
