"""The progress bar of `learn(progress_bar=True)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import safe_mean

if TYPE_CHECKING:
    from agents.agent import Agent

# What is shown, and the logged value that it is read from.
_SHOWN = {
    "reward": "rollout/task_reward",
    "KL": "rollout/kl",
    "entropy": "rollout/entropy",
    "length": "rollout/length",
}


class ProgressCallback(BaseCallback):
    """Shows reward, KL to the reference, entropy, episode length and steps (tokens) per second.

    The bar is drawn on a terminal only; elsewhere its last state is printed at the end.
    """

    model: Agent

    def _on_training_start(self) -> None:
        self._progress = Progress(
            TaskProgressColumn(),
            BarColumn(bar_width=10),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[values]}"),
        )
        total = self.locals["total_timesteps"]
        self._task = self._progress.add_task(
            "", total=total, completed=self.num_timesteps, values=""
        )
        self._progress.start()

    def _on_step(self) -> bool:
        self._progress.update(self._task, completed=self.model.num_timesteps)
        return True

    def _on_rollout_end(self) -> None:
        values = self.logger.name_to_value
        logged = {label: values[name] for label, name in _SHOWN.items() if name in values}
        episodes = self.model.ep_info_buffer
        if "reward" not in logged and episodes:  # a rollout is no episode
            logged |= {"reward": safe_mean([e["r"] for e in episodes])}
            logged |= {"length": safe_mean([e["l"] for e in episodes])}
        parts = [f"{label} {value:.2g}" for label, value in logged.items()]
        parts.append(f"{self.model.steps_per_second():.0f}/s")
        self._progress.update(self._task, values="  ".join(parts))

    def _on_training_end(self) -> None:
        self._progress.stop()
