"""Learning curves of every agent on control, beside Stable-Baselines3's PPO and sb3-contrib's TRPO.

``python -m benchmarks.control --envs CartPole-v1 Pendulum-v1 --agents ppo sb3-ppo --seeds 10``
trains each agent with each seed at the settings of `benchmarks.zoo`, in parallel processes, and
writes ``results/control/<environment>/<agent>.json`` after every run. What is recorded there with
the same configuration is not run again, so an interruption loses only the runs in flight.

A policy is evaluated deterministically on environments of its own, and what is reported is the
environment's return, without normalisation. Over the seeds we give the interquartile mean with a
95 % bootstrap interval, see `benchmarks.statistics`.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sb3_contrib
import stable_baselines3
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, sync_envs_normalization

from agents import GRPO, PPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from benchmarks import record
from benchmarks.statistics import (
    bootstrap_interval,
    interquartile_mean,
    probability_of_improvement,
)
from benchmarks.zoo import AgentName, Settings, entry

AGENTS: dict[AgentName, type[BaseAlgorithm]] = {
    "ppo": PPO,
    "sb3-ppo": stable_baselines3.PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "reinforce++": ReinforcePlusPlus,
    "reinforce++-baseline": ReinforcePlusPlusBaseline,
    "trpo": sb3_contrib.TRPO,
}
LABELS: dict[AgentName, str] = {
    "ppo": "PPO",
    "sb3-ppo": "PPO (Stable-Baselines3)",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce++": "REINFORCE++",
    "reinforce++-baseline": "REINFORCE++-baseline",
    "trpo": "TRPO (sb3-contrib)",
}
IMAGES = Path(__file__).parents[1] / "docs" / "images" / "control"
_PACKAGES = ("sb3-contrib", "mujoco", "box2d")
# Evaluation has seeds of its own, the same for every agent.
_EVALUATION_SEED = 1_000_000


@dataclass(frozen=True)
class Config:
    """Trains and evaluates agents on control.

    Attributes:
        envs: Gymnasium ids; those outside `benchmarks.zoo` get the libraries' defaults.
        agents: Agents to train.
        seeds: Number of seeds, counted from 0.
        workers: Runs at a time, each in a process with one thread.
        total_timesteps: Environment steps of each run; None is each environment's of
            `benchmarks.zoo`.
        evaluations: Evaluations of a run, one before training and the last one after it.
        eval_episodes: Episodes of each.
        final_episodes: Episodes of the last one.
        results: Folder of the results.
        images: Folder of the learning curves.
        plot: Trains nothing, and draws the curves of what is recorded.
        markdown: Trains nothing, and prints the table of what is recorded as Markdown.
    """

    envs: tuple[str, ...] = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1")
    agents: tuple[AgentName, ...] = tuple(AGENTS)
    seeds: int = 10
    workers: int = 2
    total_timesteps: int | None = None
    evaluations: int = 21
    eval_episodes: int = 10
    final_episodes: int = 20
    results: Path = record.RESULTS
    images: Path = IMAGES
    plot: bool = False
    markdown: bool = False


@dataclass(frozen=True)
class Run:
    """One training run; what a worker is sent.

    Attributes:
        env_id: Gymnasium id.
        agent: Name of the agent.
        seed: Of the agent and its environment.
        total_timesteps: Environment steps, at least.
        evaluations: See `Config`.
        eval_episodes: See `Config`.
        final_episodes: See `Config`.
    """

    env_id: str
    agent: AgentName
    seed: int
    total_timesteps: int
    evaluations: int
    eval_episodes: int
    final_episodes: int

    def __str__(self) -> str:
        return f"{self.env_id}, {self.agent}, seed {self.seed}"

    @property
    def name(self) -> str:
        """Name of the record, which all seeds share."""
        return f"control/{self.env_id}/{self.agent}"

    @property
    def configuration(self) -> dict[str, Any]:
        """Everything but the seed, as it comes back from JSON."""
        configuration = dataclasses.asdict(self) | dataclasses.asdict(self.settings)
        del configuration["seed"]
        return json.loads(json.dumps(configuration))

    @property
    def settings(self) -> Settings:
        """Hyperparameters and normalisation."""
        return entry(self.env_id).settings(self.agent)


def normalized(env: VecEnv, settings: Settings, *, training: bool = True) -> VecEnv:
    """Returns the environment in the `VecNormalize` of the settings, if there is one."""
    if not (settings.norm_obs or settings.norm_reward):
        return env
    return VecNormalize(
        env,
        training=training,
        norm_obs=settings.norm_obs,
        norm_reward=settings.norm_reward and training,
        gamma=settings.arguments.get("gamma", 0.99),
    )


def make_agent(name: AgentName, env: VecEnv, settings: Settings, seed: int) -> BaseAlgorithm:
    """Returns an agent with the arguments of the settings, on the CPU."""
    arguments = settings.resolved_arguments()
    return AGENTS[name]("MlpPolicy", env, seed=seed, device="cpu", **arguments)


class CurveCallback(BaseCallback):
    """Evaluates the policy when the steps reach each of the given numbers, and times itself.

    Args:
        timesteps: Numbers of steps, increasing.
        eval_env: Environment of the evaluation; a `VecNormalize` takes the training one's
            statistics.
        episodes: Episodes of each evaluation.

    Attributes:
        returns: Mean return at each number that was reached.
        seconds: Time spent here.
    """

    def __init__(self, timesteps: Sequence[int], eval_env: VecEnv, episodes: int) -> None:
        super().__init__()
        self.timesteps = timesteps
        self.eval_env = eval_env
        self.episodes = episodes
        self.returns: list[float] = []
        self.seconds = 0.0

    def evaluate(self, episodes: int) -> list[float]:
        """Returns the return of each episode of the deterministic policy."""
        sync_envs_normalization(self.training_env, self.eval_env)
        returns, _ = evaluate_policy(
            self.model, self.eval_env, episodes, deterministic=True, return_episode_rewards=True
        )
        assert isinstance(returns, list)
        return returns

    def _on_training_start(self) -> None:
        self._on_step()

    def _on_step(self) -> bool:
        start = time.perf_counter()
        due = sum(self.num_timesteps >= t for t in self.timesteps) - len(self.returns)
        if due:
            self.returns += [float(np.mean(self.evaluate(self.episodes)))] * due
            self.seconds += time.perf_counter() - start
        return True


def train(run: Run) -> dict[str, Any]:
    """Trains and evaluates; returns the figures."""
    settings = run.settings
    env = normalized(make_vec_env(run.env_id, settings.n_envs, seed=run.seed), settings)
    eval_seed = _EVALUATION_SEED + run.seed
    eval_env = normalized(
        make_vec_env(run.env_id, run.eval_episodes, seed=eval_seed), settings, training=False
    )
    agent = make_agent(run.agent, env, settings, run.seed)
    timesteps = np.linspace(0, run.total_timesteps, run.evaluations).round().astype(int).tolist()
    curve = CurveCallback(timesteps[:-1], eval_env, run.eval_episodes)
    start = time.perf_counter()
    agent.learn(run.total_timesteps, callback=curve)
    seconds = time.perf_counter() - start - curve.seconds
    eval_env.seed(eval_seed)
    final_returns = curve.evaluate(run.final_episodes)
    env.close()
    eval_env.close()
    return {
        "seed": run.seed,
        "timesteps": timesteps,
        "returns": _rounded([*curve.returns, float(np.mean(final_returns))]),
        "final_returns": _rounded(final_returns),
        "num_timesteps": agent.num_timesteps,
        "training_seconds": round(seconds, 2),
        "steps_per_second": round(agent.num_timesteps / seconds),
    }


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 2) + 0.0 for value in values]  # + 0.0 makes -0.0 a 0.0


def recorded(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Returns the figures of all seeds that are recorded with the configuration of `run`.

    Raises:
        SystemExit: The record is of another configuration.
    """
    old = record.read(run.name, folder=folder)
    if old is None:
        return []
    now = run.configuration
    if old["configuration"] != now:
        names = [key for key in now if old["configuration"].get(key) != now[key]]
        raise SystemExit(
            f"{folder / run.name}.json was recorded with another {' and '.join(names)}; remove it, "
            "or write elsewhere with --results."
        )
    return old["results"]


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def train_all(config: Config, console: Console) -> str:
    """Trains what is not recorded yet, and records each run as it ends.

    Returns:
        How many failed, in words; empty where none did.
    """
    pending = []
    done: dict[str, list[dict[str, Any]]] = {}
    for env_id in config.envs:
        for seed in range(config.seeds):
            for agent in config.agents:
                run = Run(
                    env_id,
                    agent,
                    seed,
                    config.total_timesteps or entry(env_id).total_timesteps,
                    config.evaluations,
                    config.eval_episodes,
                    config.final_episodes,
                )
                if run.name not in done:
                    done[run.name] = recorded(run, config.results)
                if seed not in [result["seed"] for result in done[run.name]]:
                    pending.append(run)
    failures = 0
    pool = ProcessPoolExecutor(
        config.workers, multiprocessing.get_context("spawn"), initializer=_use_one_thread
    )
    try:
        futures = {pool.submit(train, run): run for run in pending}
        for number, future in enumerate(as_completed(futures), start=1):
            run = futures[future]
            progress = f"{number}/{len(pending)}: {run}"
            if error := future.exception():
                failures += 1
                reason = f"{type(error).__name__}: {error}"
                console.print(f"{progress} failed: {reason}", style="red", markup=False)
                console.print(str(error.__cause__ or ""), style="dim", markup=False)
                continue
            result = future.result()
            results = done[run.name]
            results.append(result)
            results.sort(key=lambda result: result["seed"])
            record.write(
                run.name,
                run.configuration,
                results,
                folder=config.results,
                packages=_PACKAGES,
                torch_threads=1,
            )
            console.print(
                f"{progress}: {result['returns'][-1]:.4g} after {result['num_timesteps']:,} steps "
                f"in {result['training_seconds']:.0f} s"
            )
    finally:
        pool.shutdown(cancel_futures=True)  # after an interruption, leave nothing to the workers
    return f"{failures} of {len(pending)} runs failed." if failures else ""


@dataclass(frozen=True)
class Curve:
    """What is recorded of an agent on an environment.

    Attributes:
        timesteps: Of the evaluations, (points,).
        returns: Of each seed, (seeds, points); the last point is the final evaluation.
        steps_per_second: Of each seed.
    """

    timesteps: NDArray[np.int64]
    returns: NDArray[np.float64]
    steps_per_second: NDArray[np.float64]

    def interval(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Returns the interquartile mean of each point and its interval, low and high."""
        scores = self.returns[:, None]  # one task
        return interquartile_mean(scores), *bootstrap_interval(interquartile_mean, scores)


Curves = dict[str, dict[AgentName, Curve]]


def load(envs: Iterable[str], agents: Iterable[AgentName], folder: Path) -> Curves:
    """Returns what is recorded, by environment and agent."""
    curves: Curves = {}
    agents = tuple(agents)
    for env_id in envs:
        for agent in agents:
            old = record.read(f"control/{env_id}/{agent}", folder=folder)
            if old is not None:
                runs = old["results"]
                curves.setdefault(env_id, {})[agent] = Curve(
                    np.array(runs[0]["timesteps"]),
                    np.array([run["returns"] for run in runs]),
                    np.array([run["steps_per_second"] for run in runs]),
                )
    return curves


def _final(curve: Curve) -> str:
    """The last point, such as ``"499.1 [497.2, 500]"``."""
    mean, low, high = (values[-1] for values in curve.interval())
    return f"{mean:.4g} [{low:.4g}, {high:.4g}]"


def print_table(curves: Curves, console: Console) -> None:
    """Prints the final returns and, where both PPOs are there, how they compare."""
    table = Table("environment", "agent", "seeds", "final return [95 %]", "training steps/s")
    table.title = "Interquartile mean of the final return, median of the training speed"
    for env_id, by_agent in curves.items():
        for agent, curve in by_agent.items():
            table.add_row(
                env_id,
                agent,
                str(len(curve.returns)),
                _final(curve),
                f"{np.median(curve.steps_per_second):,.0f}",
            )
        table.add_section()
    console.print(table)
    both = [by_agent for by_agent in curves.values() if {"ppo", "sb3-ppo"} <= set(by_agent)]
    if both:
        ours = _last_points([by_agent["ppo"] for by_agent in both])
        theirs = _last_points([by_agent["sb3-ppo"] for by_agent in both])
        probability = probability_of_improvement(ours, theirs)
        low, high = bootstrap_interval(probability_of_improvement, ours, theirs)
        console.print(
            f"A run of our PPO beats one of Stable-Baselines3's with probability {probability:.2f} "
            f"[{low:.2f}, {high:.2f}], over {len(both)} environments."
        )


def _last_points(curves: Sequence[Curve]) -> NDArray[np.float64]:
    """Final returns, (runs, environments), with the runs that every environment has."""
    runs = min(len(curve.returns) for curve in curves)
    return np.stack([curve.returns[:runs, -1] for curve in curves], 1)


def markdown_table(curves: Curves) -> str:
    """Returns the final returns as a Markdown table, an environment a row."""
    agents = [agent for agent in AGENTS if any(agent in row for row in curves.values())]
    lines = [
        ["environment", "steps", "seeds", *(LABELS[agent] for agent in agents)],
        ["---"] * (len(agents) + 3),
    ]
    for env_id, row in curves.items():
        seeds = {len(curve.returns) for curve in row.values()}
        steps = {int(curve.timesteps[-1]) for curve in row.values()}
        lines.append(
            [
                f"`{env_id}`",
                " or ".join(f"{n:,}" for n in sorted(steps)),
                " or ".join(str(n) for n in sorted(seeds)),
                *(_final(row[agent]) if agent in row else "–" for agent in agents),
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(env_id: str, curves: dict[AgentName, Curve], folder: Path) -> Path:
    """Draws the curves of an environment, ``<folder>/<environment>.png``, and returns the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for i, name in enumerate(AGENTS):
        if name not in curves:
            continue
        curve = curves[name]
        mean, low, high = curve.interval()
        style = "--" if name == "sb3-ppo" else "-"  # it lies on ours where all is well
        axes.plot(curve.timesteps, mean, style, color=f"C{i}", label=LABELS[name], linewidth=1.5)
        axes.fill_between(curve.timesteps, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
    axes.set(title=env_id, xlabel="environment steps", ylabel="return")
    axes.ticklabel_format(axis="x", scilimits=(0, 4), useMathText=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    path = folder / f"{env_id}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path), metadata={"Software": None})
    return path


def main(config: Config) -> None:
    """Runs the benchmark, or reports what is recorded."""
    console = Console()
    failed = "" if config.plot or config.markdown else train_all(config, console)
    curves = load(config.envs, config.agents, config.results)
    if config.markdown:
        print(markdown_table(curves))
    else:
        print_table(curves, console)
    if not config.markdown or config.plot:
        # Every agent that is recorded, whichever were asked for now.
        for env_id, by_agent in load(config.envs, AGENTS, config.results).items():
            console.print(f"Drew {plot(env_id, by_agent, config.images)}")
    if failed:
        raise SystemExit(failed)


if __name__ == "__main__":
    main(tyro.cli(Config))
