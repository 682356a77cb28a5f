"""A causal language model as an actor-critic policy in Stable-Baselines3's sense."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import CategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from agents.trajectories import Trajectories
from textrl_env import models
from textrl_env.kl import full_kl
from textrl_env.logprobs import completion_logits, log_distribution
from textrl_env.token_mask import TokenMask


class Evaluation(NamedTuple):
    """What an update needs of the policy at given actions; all (B, T)."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None
    reference_kl: torch.Tensor | None


class LMPolicy(ActorCriticPolicy):
    """A Hugging Face causal language model with a linear value head on its last hidden state.

    It serves the agents of this package and, unchanged, ``stable_baselines3.PPO`` and
    ``sb3_contrib.TRPO``. The value head starts at zero, so the first updates of a fresh critic
    do not disturb the shared trunk. Dropout stays off, so that log-probabilities of the same
    tokens are the same during the rollout and the update.

    Args:
        observation_space: The environment's: ``input_ids`` and ``attention_mask``.
        action_space: ``Discrete(vocab_size)``.
        lr_schedule: Learning rate as a function of the remaining progress.
        model: ``"tiny"``, a local directory or a hub id.
        temperature: Divides the logits; as the environment's `temperature`.
        allowed_tokens: As the environment's `allowed_tokens`.
        dtype: Data type of the weights; ``"auto"`` is float32, which small updates need.
        optimizer_class: Optimiser over all parameters.
        optimizer_kwargs: Its arguments besides the learning rate; no weight decay by default.
        use_sde: Must be False; there for Stable-Baselines3's call.

    Raises:
        ValueError: The spaces are not those of ``TextRL-v0``, or not those of the model.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        model: str | os.PathLike[str] = "tiny",
        temperature: float = 1.0,
        allowed_tokens: Sequence[int] | None = None,
        dtype: str = "auto",
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        optimizer_kwargs: dict[str, Any] | None = None,
        use_sde: bool = False,
    ) -> None:
        # ActorCriticPolicy's own constructor would build a multi-layer perceptron.
        super(ActorCriticPolicy, self).__init__(
            observation_space,
            action_space,
            optimizer_class=optimizer_class,
            optimizer_kwargs={"weight_decay": 0.0} | (optimizer_kwargs or {}),
            squash_output=False,
        )
        _check_spaces(observation_space, action_space)
        assert isinstance(action_space, spaces.Discrete)
        if use_sde:
            raise ValueError("use_sde is True, but tokens are discrete; leave it False.")
        self.model_name = model
        self.temperature = temperature
        self.allowed_tokens = allowed_tokens
        self.use_sde = False
        self.log_std_init = 0.0
        self.tokenizer = models.load_tokenizer(model)
        self.lm = models.load_causal_lm(model, "cpu", dtype if dtype != "auto" else "float32")
        if self.lm.config.vocab_size != action_space.n:
            raise ValueError(
                f"Model {str(model)!r} has a vocabulary of {self.lm.config.vocab_size} tokens, "
                f"but the environment has {action_space.n} actions; make the environment with "
                f"model={str(model)!r}."
            )
        self.token_mask = TokenMask(
            int(action_space.n), models.eos_token_ids(model), allowed_tokens
        )
        hidden_size = self.lm.get_output_embeddings().in_features
        self.value_net = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.value_net.weight)
        nn.init.zeros_(self.value_net.bias)
        self.action_dist = CategoricalDistribution(int(action_space.n))
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    def set_token_mask(self, token_mask: TokenMask) -> None:
        """Takes the environment's mask, which may also ask for a least number of tokens."""
        self.token_mask = token_mask

    # Stable-Baselines3's interface

    def set_training_mode(self, mode: bool) -> None:
        """Keeps dropout off in either mode."""
        self.training = mode

    def forward(
        self, obs: PyTorchObs, deterministic: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns actions (n,), values (n, 1) and log-probabilities (n,)."""
        log_dist, values = self._next_token(obs)
        distribution = self.action_dist.proba_distribution(log_dist)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(
        self, obs: PyTorchObs, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns values (n, 1), log-probabilities (n,) and entropies (n,) of given actions."""
        log_dist, values = self._next_token(obs)
        distribution = self.action_dist.proba_distribution(log_dist)
        return values, distribution.log_prob(actions.long().flatten()), distribution.entropy()

    def get_distribution(self, obs: PyTorchObs) -> CategoricalDistribution:
        """Returns the distribution of the next token."""
        # A new object: TRPO holds the old distribution beside the new one.
        distribution = CategoricalDistribution(int(self.action_space.n))  # type: ignore[attr-defined]
        return distribution.proba_distribution(self._next_token(obs)[0])

    def predict(
        self,
        observation: Any,
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Returns the next token of observations, see `BasePolicy.predict`.

        Raises:
            ValueError: It is no observation, such as a text.
        """
        if not isinstance(observation, Mapping | tuple):  # a tuple is explained there
            raise ValueError(
                f"observation is {observation!r}; pass a dictionary with input_ids and "
                "attention_mask as TextRL-v0 gives it, or a text to the agent's generate()."
            )
        return super().predict(observation, state, episode_start, deterministic)  # type: ignore[arg-type]

    def predict_values(self, obs: PyTorchObs) -> torch.Tensor:
        """Returns values (n, 1)."""
        return self._next_token(obs)[1]

    def _predict(self, observation: Any, deterministic: bool = False) -> torch.Tensor:
        return self.get_distribution(observation).get_actions(deterministic=deterministic)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "model": self.model_name,
            "temperature": self.temperature,
            "allowed_tokens": self.allowed_tokens,
            "optimizer_class": self.optimizer_class,
            "optimizer_kwargs": self.optimizer_kwargs,
        }

    def log_distribution(self, obs: PyTorchObs, num_tokens: int | None = None) -> torch.Tensor:
        """Returns the log-probabilities that the next token is sampled from, (n, V).

        Args:
            obs: Observations.
            num_tokens: Number of tokens generated so far, needed with `min_new_tokens`.
        """
        return self._next_token(obs, num_tokens)[0]

    def _next_token(
        self, obs: PyTorchObs, num_tokens: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (n, V) and values (n, 1) of the next token."""
        assert isinstance(obs, Mapping)
        if self.token_mask.min_new_tokens and num_tokens is None:
            raise ValueError(
                f"min_new_tokens is {self.token_mask.min_new_tokens}, but an observation does not "
                "tell where the prompt ends; generate with an agent of this package."
            )
        mask = obs["attention_mask"].bool()
        lengths = mask.sum(1)
        width = int(lengths.max())
        # From right-padded to left-padded: the last column is everyone's last token, and a dummy
        # completion token makes it the position that is asked for.
        columns = torch.arange(width, device=mask.device) - (width - lengths)[:, None]
        ids = obs["input_ids"].long().gather(1, columns.clamp(min=0))
        # Trust-region methods differentiate twice, which only the plain attention allows.
        with sdpa_kernel(SDPBackend.MATH) if torch.is_grad_enabled() else nullcontext():
            logits, hidden = completion_logits(
                self.lm, ids, columns >= 0, ids[:, -1:], mask.new_ones((len(ids), 1))
            )
        log_dist = log_distribution(
            logits[:, 0],
            torch.full_like(lengths, num_tokens or 0),
            self.temperature,
            self.token_mask,
        )
        return log_dist, self.value_net(hidden[:, 0].to(self.value_net.weight.dtype))

    # Whole completions

    def evaluate_completions(
        self,
        trajectories: Trajectories,
        *,
        entropy: bool,
        values: bool,
        reference: PreTrainedModel | None = None,
    ) -> Evaluation:
        """Returns log-probabilities, entropies and values at every token, in one pass.

        Args:
            trajectories: Text trajectories.
            entropy: Whether the entropies need a gradient; they are computed either way.
            values: Whether values are asked for.
            reference: Model that the KL over the whole vocabulary is taken to, if any.
        """
        assert isinstance(trajectories.observations, Mapping)
        prompt_mask = trajectories.observations["prompt_mask"]
        prompts = int(prompt_mask.sum(1).max())
        steps = int(trajectories.mask.sum(1).max())
        actions, mask = trajectories.actions[:, :steps], trajectories.mask[:, :steps]
        inputs = (
            trajectories.observations["prompt_ids"][:, -prompts:],
            prompt_mask[:, -prompts:],
            actions,
            mask,
        )
        logits, hidden = completion_logits(self.lm, *inputs)
        positions = torch.arange(steps, device=actions.device).expand_as(actions)
        log_dist = log_distribution(logits, positions, self.temperature, self.token_mask)
        with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
            dist = log_dist if entropy else log_dist.detach()
            # Masked tokens have −inf, and 0·(−inf) is NaN.
            entropies = -(dist.exp() * dist.masked_fill(dist == float("-inf"), 0.0)).sum(-1)
        selected = log_dist.gather(-1, actions[..., None])[..., 0]
        reference_kl = None
        if reference is not None:
            with torch.no_grad():
                ref_logits, _ = completion_logits(reference, *inputs)
                ref_log_dist = log_distribution(
                    ref_logits, positions, self.temperature, self.token_mask
                )
            reference_kl = _pad_to(full_kl(log_dist, ref_log_dist), trajectories.mask)
        state_values = None
        if values:
            state_values = self.value_net(hidden.to(self.value_net.weight.dtype))[..., 0]
            state_values = _pad_to(state_values, trajectories.mask)
        return Evaluation(
            _pad_to(selected, trajectories.mask),
            _pad_to(entropies, trajectories.mask),
            state_values,
            reference_kl,
        )

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes model and tokenizer as a directory that transformers and vLLM load.

        Raises:
            NotADirectoryError: There is a file of that name.
        """
        if Path(directory).is_file():
            raise NotADirectoryError(f"{directory} is a file; a model is written to a directory.")
        self.lm.save_pretrained(directory)
        self.tokenizer.save_pretrained(Path(directory))


def _pad_to(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Widens (n, t) to the mask's (n, T), with 0 wherever the mask is False."""
    values = nn.functional.pad(values, (0, mask.shape[1] - values.shape[1]))
    return torch.where(mask, values, 0.0)


def _check_spaces(observation_space: Any, action_space: Any) -> None:
    expected = {"input_ids", "attention_mask"}
    if not (
        isinstance(observation_space, spaces.Dict)
        and expected <= set(observation_space.spaces)
        and isinstance(action_space, spaces.Discrete)
        and np.issubdtype(observation_space["input_ids"].dtype, np.integer)
    ):
        raise ValueError(
            f"LMPolicy needs observations with {sorted(expected)} and discrete actions, but the "
            f"spaces are {observation_space} and {action_space}; use it with TextRL-v0."
        )
