"""Trains the embedded model on two-digit addition: ``python -m agents.demo --output runs/demo``."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from stable_baselines3.common.logger import configure

import textrl_env  # noqa: F401 (registers TextRL-v0)
from agents import (
    GRPO,
    PPO,
    RLOO,
    LMPolicy,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from agents.agent import Agent
from agents.evaluation import TaskEvaluation, evaluate_task
from textrl_env.tasks import make_task

Algorithm = Literal["grpo", "rloo", "ppo", "reinforce++", "reinforce++-baseline"]

# Found by hand on two-digit addition; `benchmarks/addition.py` measures them on three seeds.
RECIPES: Mapping[Algorithm, tuple[type[Agent], dict[str, Any]]] = {
    "grpo": (GRPO, {"learning_rate": 2e-4, "group_size": 8, "batch_size": 128}),
    "rloo": (RLOO, {"learning_rate": 2e-4, "group_size": 8, "batch_size": 128}),
    "ppo": (PPO, {"learning_rate": 2e-4, "batch_size": 128, "n_epochs": 2}),
    "reinforce++": (ReinforcePlusPlus, {"learning_rate": 2e-4, "batch_size": 128}),
    "reinforce++-baseline": (
        ReinforcePlusPlusBaseline,
        {"learning_rate": 2e-4, "group_size": 8, "batch_size": 128},
    ),
}


@dataclass(frozen=True)
class DemoConfig:
    """Trains a language model on a task and shows what it learned.

    Attributes:
        output: Folder for the TensorBoard events, configuration, checkpoint and curves.
        algorithm: grpo, rloo, ppo, reinforce++ or reinforce++-baseline.
        digits: Digits of the operands.
        model: The model to start from: tiny, a directory or a hub id.
        total_timesteps: Tokens to train for, at least.
        num_envs: Completions per rollout.
        kl_coef: Weight β of the KL to the model at the start.
        learning_rate: Of the optimiser; None is the recipe's.
        seed: Seeds the training.
        show: Sample completions to print.
    """

    output: Path = Path("runs/demo")
    algorithm: Algorithm = "grpo"
    digits: int = 2
    model: str = "tiny"
    total_timesteps: int = 100_000
    num_envs: int = 256
    kl_coef: float = 0.005
    learning_rate: float | None = None
    seed: int = 0
    show: int = 5


def make_agent(config: DemoConfig) -> Agent:
    """Returns the agent of a configuration, on the training prompts."""
    env = gym.make_vec(
        "TextRL-v0",
        num_envs=config.num_envs,
        task="addition",
        task_kwargs={"digits": config.digits},
        model=config.model,
        kl_coef=config.kl_coef,
    )
    agent_class, recipe = RECIPES[config.algorithm]
    if config.learning_rate is not None:
        recipe = {**recipe, "learning_rate": config.learning_rate}
    return agent_class("LMPolicy", env, seed=config.seed, **recipe)


def evaluate(agent: Agent, digits: int) -> TaskEvaluation:
    """Returns the greedy completions of all held-out prompts."""
    assert isinstance(agent.policy, LMPolicy)
    return evaluate_task(agent.policy, make_task("addition", digits=digits, split="test"))


def run(config: DemoConfig, console: Console | None = None) -> dict[str, Any]:
    """Trains, evaluates before and after, and writes everything to ``config.output``.

    Returns:
        Held-out accuracy before and after, seconds of training, and tokens.
    """
    console = console or Console()
    output = config.output
    output.mkdir(parents=True, exist_ok=True)
    settings = asdict(config) | {"output": str(output)}
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    agent = make_agent(config)
    agent.set_logger(configure(str(output), ["csv", "tensorboard"]))

    before = evaluate(agent, config.digits)
    console.print(f"Held-out accuracy before training: [bold]{before.accuracy:.1%}[/bold]")
    start = time.perf_counter()
    agent.learn(config.total_timesteps, progress_bar=True)
    seconds = time.perf_counter() - start
    after = evaluate(agent, config.digits)

    console.print(_samples(before, after, config.show))
    console.print(
        f"Held-out accuracy: {before.accuracy:.1%} before, [bold]{after.accuracy:.1%}[/bold] after "
        f"{seconds:.0f} s of training ({len(after.endings)} prompts, greedy)."
    )
    summary = {
        "accuracy_before": before.accuracy,
        "accuracy_after": after.accuracy,
        "heldout_prompts": len(after.endings),
        "training_seconds": round(seconds, 1),
        "tokens": agent.num_timesteps,
        "torch_threads": torch.get_num_threads(),
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    agent.save(output / "checkpoint.zip")
    agent.save_pretrained(str(output / "model"))
    agent.logger.close()
    plot_curves(output / "progress.csv", output / "curves.png")
    console.print(f"Wrote checkpoint, model, TensorBoard events and curves.png to {output}/")
    assert agent.env is not None
    agent.env.close()
    return summary


def _samples(before: TaskEvaluation, after: TaskEvaluation, count: int) -> Table:
    table = Table("prompt", "before", "after", "answer", title="Held-out prompts")
    # Spread over the prompts, which are sorted.
    step = max(1, len(before.endings) // max(count, 1))
    for old, new in list(zip(before.endings, after.endings, strict=True))[::step][:count]:
        table.add_row(escape(new.prompt), _coloured(old), _coloured(new), escape(str(new.answer)))
    return table


def _coloured(ending: Any) -> str:
    return f"[{'green' if ending.correct else 'red'}]{escape(repr(ending.text))}[/]"


def plot_curves(progress: Path, image: Path) -> None:
    """Draws the logged reward, KL, entropy and length over the tokens.

    Args:
        progress: The CSV file of Stable-Baselines3's logger.
        image: The PNG file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with progress.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {
        "rollout/task_reward": "task reward",
        "rollout/kl": "KL to the reference (nats per token)",
        "rollout/entropy": "entropy (nats per token)",
        "rollout/length": "tokens per completion",
    }
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, label) in zip(figure.subplots(2, 2).flat, names.items(), strict=True):
        points = [(row["time/total_timesteps"], row[name]) for row in rows if row.get(name)]
        axes.plot([float(x) for x, _ in points], [float(y) for _, y in points])
        axes.set(title=label, xlabel="tokens")
        axes.grid(alpha=0.3)
    figure.savefig(image, dpi=120)


def main() -> None:
    """Reads the command line and runs the demonstration."""
    import tyro

    run(tyro.cli(DemoConfig, prog="python -m agents.demo"))


if __name__ == "__main__":
    main()
