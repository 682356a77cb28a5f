"""What a policy answers to a task's prompts, and how well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.engines import TorchEngine
from agents.policies import LMPolicy
from agents.sampling import sampling_uniforms
from textrl_env.config import TextRLConfig
from textrl_env.core import Ending, TokenMDP
from textrl_env.tasks import Task


@dataclass(frozen=True)
class TaskEvaluation:
    """Completions of a task's prompts and their scores.

    Attributes:
        endings: Text, prompt, answer and whether it is correct, for each prompt.
        rewards: The task's reward of each, summed over its tokens.
        lengths: Number of tokens of each.
    """

    endings: list[Ending]
    rewards: list[float]
    lengths: list[int]

    @property
    def accuracy(self) -> float:
        """Share of correct completions."""
        return float(np.mean([ending.correct for ending in self.endings]))

    @property
    def mean_reward(self) -> float:
        """Mean reward."""
        return float(np.mean(self.rewards))


def evaluate_task(
    policy: LMPolicy,
    task: Task | str,
    prompt_indices: Sequence[int] | None = None,
    *,
    max_new_tokens: int | None = None,
    deterministic: bool = True,
    seed: int = 0,
) -> TaskEvaluation:
    """Completes prompts of a task and scores the completions.

    Args:
        policy: The policy.
        task: The task, or its name.
        prompt_indices: Prompts to complete; None takes all.
        max_new_tokens: Longest completion; None is the task's.
        deterministic: Takes the likeliest token, rather than sampling.
        seed: Seeds the sampling.

    Raises:
        ValueError: The task is unknown, or a prompt is empty or too long.
    """
    config = TextRLConfig(
        task=task,
        model=policy.model_name,
        kl_mode="none",
        temperature=policy.temperature,
        max_new_tokens=max_new_tokens,
    )
    mdp = TokenMDP(config, num_slots=1)
    indices = range(len(mdp.task)) if prompt_indices is None else prompt_indices
    uniforms = None
    if not deterministic:
        uniforms = sampling_uniforms(seed, 0, indices, mdp.max_new_tokens)
    try:
        completions = TorchEngine(policy.lm).generate(
            mdp.encode_prompts(indices),
            mdp.termination,
            policy.token_mask,
            policy.temperature,
            uniforms,
        )
        scored = mdp.score_completions(indices, completions.tokens)
    finally:
        mdp.close()
    return TaskEvaluation(
        endings=scored.endings,
        rewards=scored.field("task_rewards").sum(1).tolist(),
        lengths=scored.lengths.tolist(),
    )
