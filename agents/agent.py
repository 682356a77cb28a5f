"""What all agents share: collection, the loop, the update, logging and checkpoints."""

from __future__ import annotations

import math
import sys
import time
import warnings
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import (
    explained_variance,
    get_system_info,
    safe_mean,
    update_learning_rate,
)
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

from agents import checkpoint
from agents.aggregation import aggregation_weights
from agents.collectors import (
    Collect,
    check_finite,
    find_late,
    find_mdp,
    generate_completions,
    gives_whole_completions,
    step_episodes,
    step_transitions,
)
from agents.engines import TorchEngine
from agents.evaluation import evaluate_task
from agents.fused import (
    FusedActorCritic,
    FusedUpdate,
    as_many_threads_as_pay,
    is_supported,
)
from agents.kl_control import KLController
from agents.objectives import Objective, value_loss
from agents.policies import Evaluation, LMPolicy
from agents.progress import ProgressCallback
from agents.sampling import PromptSampler, shuffling_seed
from agents.trajectories import Trajectories, merge_steps
from agents.updates import AutogradUpdate
from textrl_env.core import TokenMDP
from textrl_env.kl import kl_estimate
from textrl_env.sb3 import GymVecEnv, announce_kl_consumer
from textrl_env.tasks import FunctionTask

SelfAgent = TypeVar("SelfAgent", bound="Agent")

_READABLE = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
# Prompts are numbered without end where the environment is seeded instead.
_RESET_SEEDS = 2**31 - 1


def is_language_policy(policy: str | type[BasePolicy]) -> bool:
    """Returns whether a policy, by name or class, is a language model."""
    return policy == "LMPolicy" or (isinstance(policy, type) and issubclass(policy, LMPolicy))


class Agent(BaseAlgorithm):
    """A policy-gradient agent for any environment, text or not.

    A subclass says which advantages it uses (`compute_advantages`) and which objective
    (`policy_objective`); the rest is here. The loop is: collect, shape rewards, advantages,
    mini-batches, one optimiser step each.

    Args:
        policy: ``"LMPolicy"`` for text; ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"``
            or a policy class otherwise.
        env: Gymnasium id, `Env`, Gymnasium `VectorEnv` or Stable-Baselines3 `VecEnv`.
        learning_rate: A number, or a function of the remaining progress (1 to 0). None is 3e-4,
            and 1e-5 for a language model.
        n_steps: Steps per slot and rollout; None collects one whole episode per slot.
        batch_size: Rows of a mini-batch: completions for text, transitions elsewhere. None takes
            the whole rollout.
        micro_batch_size: Rows that are run at a time. It bounds memory and changes nothing else.
        n_epochs: Passes over a rollout.
        group_size: Episodes that start from the same state: the same prompt, or the same reset
            seed. It must divide the number of slots.
        ent_coef: Weight of the entropy bonus.
        vf_coef: Weight of the value loss.
        max_grad_norm: Gradients are clipped to this norm.
        loss_aggregation: How token losses become one number, see `agents.aggregation`. Elsewhere
            than on text a mini-batch is transitions, and its loss their mean.
        kl_loss_coef: Weight of the KL to the reference as a loss.
        kl_loss: Its estimator, see `textrl_env.kl`; or ``"full"``.
        kl_controller: Sets the environment's `kl_coef`, anew after each rollout; None keeps it.
        target_kl: Stops the epochs when the KL to the rollout's policy exceeds 1.5 times this.
        collector: ``"generate"`` (whole completions from the engine), ``"step"``, or ``"auto"``:
            generate where the environment is a native ``TextRL-v0`` vector, step elsewhere.
        stats_window_size: Episodes that the logged means cover.
        tensorboard_log: Folder for TensorBoard, or None.
        policy_kwargs: Arguments of the policy, such as ``{"model": "tiny"}``.
        verbose: 0 silent, 1 logs to the terminal.
        seed: Seeds everything that the agent draws.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``.

    Raises:
        ValueError: `group_size` does not divide the number of slots, or options contradict.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "LMPolicy": LMPolicy,
        "MlpPolicy": ActorCriticPolicy,
        "CnnPolicy": ActorCriticCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticPolicy,
    }
    uses_critic: ClassVar[bool] = False
    # False goes the plain path everywhere: the same numbers, for comparison.
    fuses: ClassVar[bool] = True
    normalize_advantage: bool = False
    policy: ActorCriticPolicy

    def __init__(
        self,
        policy: str | type[BasePolicy],
        env: GymEnv | VectorEnv[Any, Any, Any] | str | None,
        *,
        learning_rate: float | Schedule | None,
        n_steps: int | None,
        batch_size: int | None,
        micro_batch_size: int | None,
        n_epochs: int,
        group_size: int,
        ent_coef: float,
        vf_coef: float,
        max_grad_norm: float,
        loss_aggregation: str,
        kl_loss_coef: float,
        kl_loss: str,
        kl_controller: KLController | None,
        target_kl: float | None,
        collector: str,
        stats_window_size: int,
        tensorboard_log: str | None,
        policy_kwargs: dict[str, Any] | None,
        verbose: int,
        seed: int | None,
        device: torch.device | str,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        _init_setup_model: bool = True,
    ) -> None:
        self.policy_name = policy
        seed = _checked_seed(seed)
        if learning_rate is None:
            learning_rate = 1e-5 if is_language_policy(policy) else 3e-4
        super().__init__(
            policy,
            env,  # type: ignore[arg-type]
            learning_rate=learning_rate,
            policy_kwargs=policy_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            support_multi_env=True,
            seed=seed,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            supported_action_spaces=_READABLE,
        )
        self.n_steps = n_steps
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.n_epochs = n_epochs
        self.group_size = group_size
        self.ent_coef = ent_coef
        self.vf_coef = vf_coef
        self.max_grad_norm = max_grad_norm
        self.loss_aggregation = loss_aggregation
        self.kl_loss_coef = kl_loss_coef
        self.kl_loss = kl_loss
        self.kl_controller = kl_controller
        self.target_kl = target_kl
        self.collector = collector
        self.run_seed = int(np.random.default_rng().integers(2**32)) if seed is None else seed
        self.rollout = 0
        self.prompt_sampler = PromptSampler(1, self.run_seed)
        self.rollout_seconds = 0.0
        self.rollout_buffer: Trajectories | None = None
        # Where a checkpoint that is saved during a rollout or update takes up the run again.
        self.resume_point: dict[str, Any] | None = None
        self.mdp: TokenMDP | None = None
        self.engine: TorchEngine | None = None
        self._check_options()
        if _init_setup_model:
            self._setup_model()

    # Set-up

    def _check_options(self) -> None:
        """Says what is wrong before anything is collected."""
        for name in ("n_steps", "batch_size", "micro_batch_size", "n_epochs", "group_size"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Integral) and int(value) >= 1):
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 on.")
        self._check_schedule("learning_rate")
        for name in ("max_grad_norm", "ent_coef", "vf_coef", "kl_loss_coef"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and float(value) >= 0):
                raise ValueError(f"{name} is {value!r}; it must be a number and not negative.")
        if self.target_kl is not None and not self.target_kl > 0:
            raise ValueError(f"target_kl is {self.target_kl}; it must be positive, or None.")
        if not isinstance(self.kl_controller, KLController | None):
            raise TypeError(
                f"kl_controller is {self.kl_controller!r}; pass one of agents.kl_control, such as "
                "FixedKL(0.1)."
            )
        one = torch.ones(1, 1)
        aggregation_weights(one > 0, self.loss_aggregation, norm_length=1)
        if self.kl_loss != "full":
            kl_estimate(one, one, self.kl_loss)

    def _check_schedule(self, name: str) -> None:
        value = getattr(self, name)
        assert isinstance(value, int | float) or callable(value), (
            f"{name} is {value!r}; pass a number, or a function of the remaining progress."
        )

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        if isinstance(env, VectorEnv):
            env = GymVecEnv(env, allow_late=True)
            env = VecMonitor(env) if monitor_wrapper and not env.restarts_late else env
        for space in ("observation_space", "action_space"):
            _check_space(getattr(env, space, None), space)
        return BaseAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        self.shuffling = np.random.default_rng(shuffling_seed(self.run_seed))
        self.mdp = find_mdp(self.env) if self.env is not None else None
        if getattr(self, "observation_space", None) is None:
            raise ValueError("env is None; a new agent needs an environment for its spaces.")
        policy_kwargs = dict(self.policy_kwargs)
        if issubclass(self.policy_class, LMPolicy):
            if self.mdp is None and self.env is not None:
                raise ValueError(
                    f"LMPolicy generates text, but {self.env} is not TextRL-v0; use 'MlpPolicy' "
                    "or gym.make_vec('TextRL-v0', ...)."
                )
            if self.mdp is not None:
                policy_kwargs.setdefault("model", self.mdp.config.model)
                policy_kwargs.setdefault("temperature", self.mdp.config.temperature)
                policy_kwargs.setdefault("allowed_tokens", self.mdp.config.allowed_tokens)
                self.policy_kwargs = policy_kwargs
        policy = self.policy_class(
            self.observation_space,
            self.action_space,
            self.lr_schedule,
            use_sde=self.use_sde,
            **policy_kwargs,
        )
        assert isinstance(policy, ActorCriticPolicy)
        self.policy = policy.to(self.device)
        self.network: FusedActorCritic | None = None
        if isinstance(self.policy, LMPolicy):
            self.engine = TorchEngine(self.policy.lm)
        self._refresh_network()
        self._use_env()

    def _refresh_network(self) -> None:
        """Takes up what was done to the policy since; None is the plain path."""
        if not (self.fuses and is_supported(self.policy)):
            self.network = None
        elif self.network is None or not self.network.fits(self.policy):
            self.network = FusedActorCritic(self.policy, self.uses_critic)

    def _use_env(self) -> None:
        """Everything that depends on the environment at hand."""
        if self.env is None:
            return
        text = isinstance(self.policy, LMPolicy)
        if isinstance(self.policy, LMPolicy) and self.mdp is not None:
            self.policy.set_token_mask(self.mdp.token_mask)
            if self.policy.temperature != self.mdp.config.temperature:
                raise ValueError(
                    f"The policy's temperature is {self.policy.temperature} and the environment's "
                    f"{self.mdp.config.temperature}; the KL needs both log-probabilities under "
                    "the distribution that is sampled from, so set one."
                )
        if self.subtracts_kl:
            announce_kl_consumer(self.env)
        if self.kl_controller is not None and self.mdp is not None:
            self._set_kl_coef(self.kl_controller.coef)
        if self.kl_loss_coef and (self.mdp is None or self.mdp.config.reference_name is None):
            raise ValueError(
                f"kl_loss_coef is {self.kl_loss_coef}, but the environment scores no reference; "
                "make it with reference=..., or leave the loss out."
            )
        if self.kl_controller is not None and (
            self.mdp is None or self.mdp.config.kl_mode == "none"
        ):
            raise ValueError(
                "kl_controller sets the environment's kl_coef, but the environment charges no KL; "
                "make it with kl_mode='reference', or leave the controller out."
            )
        if self.n_envs % self.group_size:
            raise ValueError(
                f"group_size is {self.group_size}, which does not divide the {self.n_envs} slots "
                f"of the environment; choose num_envs as a multiple of group_size."
            )
        find_late(self.env)  # refuses wrappers that would count its restarts
        self._collect = self._choose_collector(text)
        num_starts = len(self.mdp.task) if self.mdp is not None else _RESET_SEEDS
        position = self.prompt_sampler.position  # another environment goes on where this one was
        self.prompt_sampler = PromptSampler(num_starts, self.run_seed)
        self.prompt_sampler.position = position

    def _choose_collector(self, text: bool) -> Collect:
        assert self.env is not None
        native = text and gives_whole_completions(self.env)
        if self.collector not in ("auto", "generate", "step"):
            raise ValueError(f"collector is {self.collector!r}; use 'auto', 'generate' or 'step'.")
        if self.collector == "generate" and not native:
            raise ValueError(
                "collector='generate' needs LMPolicy and gym.make_vec('TextRL-v0', ...) without "
                "wrappers that change what it gives; use collector='step' with others."
            )
        if self.n_steps is not None:
            if text:
                raise ValueError(
                    f"n_steps is {self.n_steps}, but text is collected in whole completions, "
                    "num_envs at a time; leave n_steps=None."
                )
            return step_transitions
        if native and self.collector != "step":
            return generate_completions
        if text and self.collector == "auto":
            warnings.warn(
                f"{self.env} is not gym.make_vec('TextRL-v0', ...) itself, or a wrapper changes "
                "what it gives, so completions are collected token by token, which is slower; pass "
                "collector='step' to say that this is meant.",
                UserWarning,
                stacklevel=2,
            )
        return step_episodes

    @property
    def subtracts_kl(self) -> bool:
        """Whether this agent subtracts β·log π_old, as ``kl_mode="reference"`` asks."""
        return self.mdp is not None and self.mdp.config.kl_mode == "reference"

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Replaces the environment, see `BaseAlgorithm.set_env`."""
        super().set_env(env, force_reset)
        assert self.env is not None
        self.mdp = find_mdp(self.env)
        self._use_env()

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        if isinstance(callback, list):
            callback = CallbackList(callback)
        if not isinstance(callback, BaseCallback):
            callback = ConvertCallback(callback)
        if progress_bar:
            callback = CallbackList([callback, ProgressCallback()])
        callback.init_callback(self)
        return callback

    # The loop

    def learn(
        self: SelfAgent,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfAgent:
        """Trains for at least `total_timesteps` environment steps (for text, generated tokens).

        Args:
            total_timesteps: Lower bound on the steps; a rollout is never cut.
            callback: Stable-Baselines3 callbacks; they are called once per environment step.
            log_interval: Rollouts between logs; None writes none.
            tb_log_name: Name of the TensorBoard run; None is the algorithm's name.
            reset_num_timesteps: False continues the count of an earlier call.
            progress_bar: Shows reward, KL, entropy, length and speed.

        Returns:
            The agent.
        """
        if self.env is None:
            raise ValueError(
                "learn() needs an environment and this agent has none; pass env=... to load(), or "
                "call set_env(...)."
            )
        if not (log_interval is None or log_interval >= 1):
            raise ValueError(
                f"log_interval is {log_interval}; it must be a number of rollouts from 1 on, or "
                "None for no logs."
            )
        iteration = 0
        total_timesteps, callback = self._setup_learn(
            total_timesteps,
            callback,
            reset_num_timesteps,
            tb_log_name or type(self).__name__,
            progress_bar,
        )
        callback.on_training_start(locals(), globals())
        work = math.inf
        if self.network is not None and self.batch_size is not None:
            work = self.network.operations(self.batch_size)
        try:
            with as_many_threads_as_pay(work):
                while self.num_timesteps < total_timesteps:
                    self.resume_point = checkpoint.counters(self)
                    if not self.collect_rollouts(callback):
                        break
                    iteration += 1
                    self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
                    if log_interval is not None and iteration % log_interval == 0:
                        self.dump_logs(iteration)
                    self.train()
                    self.resume_point = None
        finally:
            # Also after an exception: a progress bar must be closed, a file flushed.
            callback.on_training_end()
        return self

    def collect_rollouts(self, callback: BaseCallback) -> bool:
        """Fills `rollout_buffer`; False where a callback stopped the training."""
        self._refresh_network()
        if self.network is None:  # the layers of a network behave alike in both modes
            self.policy.set_training_mode(False)
        check_finite("observation", self._last_obs, self.num_timesteps)
        collected = self._collect(self, callback)
        if collected is None:
            return False
        self.rollout += 1
        if self.uses_critic and collected.values is None:
            self._add_values(collected)
        elif isinstance(self.policy, LMPolicy):
            # Nothing stands for what a truncated completion, which is not scored, would have got.
            collected.valid &= ~collected.truncated.any(1)
        self.rollout_buffer = collected
        self._log_rollout(collected)
        callback.update_locals({"rollout_buffer": collected, "self": self, "callback": callback})
        callback.on_rollout_end()
        return True

    def next_prompts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the start of each slot's episode: groups of a prompt index or reset seed."""
        starts = self.prompt_sampler.next(self.n_envs // self.group_size)
        return np.repeat(starts, self.group_size)

    def _add_values(self, trajectories: Trajectories) -> None:
        """Values of every token, and of the state after a truncated completion."""
        truncated = bool(trajectories.truncated.any())
        extended = trajectories
        if truncated:
            # One more column: its position is the state after the last token.
            pad = torch.nn.functional.pad
            lengths = trajectories.mask.sum(1)
            steps = torch.arange(trajectories.mask.shape[1] + 1, device=lengths.device)
            extended = trajectories.select(torch.arange(len(lengths), device=lengths.device))
            extended.actions = pad(trajectories.actions, (0, 1))
            extended.mask = steps <= lengths[:, None]
        rows = torch.arange(len(trajectories), device=self.device)
        with torch.no_grad():
            values = torch.cat(
                [
                    self.evaluate(extended.select(part), values=True).values  # type: ignore[misc]
                    for part in rows.split(self.micro_batch_size or len(rows))
                ]
            )
        shape = trajectories.mask.shape
        trajectories.values = torch.where(trajectories.mask, values[:, : shape[1]], 0.0)
        trajectories.final_values = torch.zeros(shape, device=self.device)
        trajectories.last_values = torch.zeros(shape[0], device=self.device)
        if truncated:
            trajectories.final_values = torch.where(trajectories.truncated, values[:, 1:], 0.0)

    # The update

    @abstractmethod
    def compute_advantages(self, trajectories: Trajectories) -> None:
        """Fills `advantages` and, with a critic, `returns` of the trajectories."""

    @abstractmethod
    def policy_objective(self) -> Objective:
        """Returns the objective of the policy with its present coefficients."""

    def policy_loss(
        self, logprobs: torch.Tensor, batch: Trajectories
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss of each step (B, T) and statistics of each step to log."""
        assert batch.advantages is not None
        return self.policy_objective().loss(logprobs, batch.logprobs, batch.advantages)

    def value_clip_range(self) -> float | None:
        """Returns how far a value may move from its old one in the loss; None is any way."""
        return None

    def value_loss(self, values: torch.Tensor, batch: Trajectories) -> torch.Tensor:
        """Returns the value loss of each step, (B, T)."""
        assert batch.returns is not None
        return value_loss(values, batch.returns, batch.values, self.value_clip_range())

    def evaluate(self, batch: Trajectories, *, values: bool | None = None) -> Evaluation:
        """Returns log-probabilities, entropies and values of the batch's actions, (B, T)."""
        values = self.uses_critic if values is None else values
        if isinstance(self.policy, LMPolicy):
            full_kl = self.kl_loss_coef != 0 and self.kl_loss == "full"
            return self.policy.evaluate_completions(
                batch,
                entropy=self.ent_coef != 0,
                values=values,
                reference=self.mdp.reference.model if full_kl else None,  # type: ignore[union-attr]
            )
        shape = batch.mask.shape
        observations = merge_steps(batch.observations)
        actions = batch.actions.flatten(0, 1)
        if isinstance(self.action_space, spaces.Discrete):
            actions = actions.long()
        elif isinstance(self.action_space, spaces.Box):
            actions = actions.flatten(1)
        state_values, logprobs, entropy = self.policy.evaluate_actions(observations, actions)
        if entropy is None:  # no closed form
            entropy = -logprobs
        return Evaluation(
            logprobs.view(shape),
            entropy.view(shape),
            state_values.view(shape) if values else None,
            None,
        )

    def train(self) -> None:
        """Updates the policy on the last rollout."""
        assert self.rollout_buffer is not None
        start = time.perf_counter()
        self._refresh_network()
        if not self.policy.training:
            self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        batch = self.rollout_buffer
        if not bool(batch.loss_mask.any()):
            return  # every reward failed
        self.compute_advantages(batch)
        if not isinstance(self.policy, LMPolicy):
            batch = batch.as_transitions()
        update = self._choose_update(batch)
        statistics: dict[str, list[float]] = defaultdict(list)
        try:
            for _ in range(self.n_epochs):
                rows = self.shuffling.permutation(len(batch))
                keep_going = all(
                    self._train_mini_batch(update, mini_batch, statistics)
                    for mini_batch in update.mini_batches(rows, self.batch_size or len(rows))
                )
                self._n_updates += 1
                if not keep_going:
                    break
        finally:
            update.finish()
        for name, values in statistics.items():
            self.logger.record(f"train/{name}", sum(values) / len(values))
        if self.uses_critic and batch.values is not None and batch.returns is not None:
            mask = batch.mask.cpu().numpy()
            self.logger.record(
                "train/explained_variance",
                explained_variance(
                    batch.values.cpu().numpy()[mask], batch.returns.cpu().numpy()[mask]
                ),
            )
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", float(self.policy.log_std.detach().exp().mean()))
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("time/update_seconds", time.perf_counter() - start)
        self._control_kl(self.rollout_buffer)

    def _choose_update(self, batch: Trajectories) -> AutogradUpdate | FusedUpdate:
        """Gradients that are written out, where network, loss and batch are those they are for."""
        network = self.network
        if (
            network is not None
            and network.flat.steps_agree()
            and type(self).policy_loss is Agent.policy_loss
            and type(self).value_loss is Agent.value_loss
            and type(self).evaluate is Agent.evaluate
            and self.loss_aggregation != "seq-mean-token-sum-norm"
            and not self.kl_loss_coef
            and self.micro_batch_size is None
            and bool(batch.valid.all())
        ):
            return FusedUpdate(self, network, batch)
        return AutogradUpdate(self, batch)

    def _train_mini_batch(
        self,
        update: AutogradUpdate | FusedUpdate,
        mini_batch: Any,
        statistics: dict[str, list[float]],
    ) -> bool:
        """One optimiser step; False where `target_kl` ends the epochs before it."""
        means = update.gradients(mini_batch)
        for name, value in means.items():
            statistics[name].append(value)
        if not math.isfinite(means["loss"]):
            raise FloatingPointError(
                f"The loss is {means['loss']} after {self.num_timesteps} steps, and no optimiser "
                "step was made; lower learning_rate, or look for a reward or observation that is "
                "not finite."
            )
        if self.target_kl is not None and means["approx_kl"] > 1.5 * self.target_kl:
            return False
        statistics["grad_norm"].append(update.step())
        return True

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # A rollout is never cut, and the last one may go far beyond the total.
        self._current_progress_remaining = max(0.0, 1.0 - num_timesteps / total_timesteps)

    def _update_learning_rate(self, optimizers: Any) -> None:
        rate = self.lr_schedule(self._current_progress_remaining)
        self.logger.record("train/learning_rate", rate)
        update_learning_rate(optimizers, rate)

    # Logging and KL control

    def _log_rollout(self, batch: Trajectories) -> None:
        tokens = int(batch.mask.sum())
        record = self.logger.record
        if self.n_steps is None:  # a row is an episode
            task_returns = torch.where(batch.mask, batch.task_rewards, 0.0).sum(1)
            if bool(batch.valid.any()):
                record("rollout/reward", float(batch.episode_returns[batch.valid].mean()))
                record("rollout/task_reward", float(task_returns[batch.valid].mean()))
            record("rollout/length", tokens / len(batch))
        if tokens:
            # The mean of −log π over what was sampled estimates the entropy without bias.
            record("rollout/entropy", -float(batch.logprobs[batch.mask].mean()))
        record("time/rollout_seconds", self.rollout_seconds)
        record("time/rollout_tokens_per_second", tokens / max(self.rollout_seconds, 1e-9))
        if not bool(batch.valid.all()):
            record("rollout/masked_fraction", float((~batch.valid).float().mean()))
        if batch.ref_logprobs is not None:
            kl = batch.reference_log_ratios
            record("rollout/kl", float(kl.sum()) / tokens)
            record("rollout/kl_sum", float(kl.sum(1).mean()))
        if self.mdp is not None:
            record("rollout/kl_coef", self.mdp.kl_coef)
            for kind, count in self.mdp.scorer.errors.items():
                record(f"rollout/reward_errors/{kind}", count)

    def _control_kl(self, batch: Trajectories) -> None:
        if self.kl_controller is None or batch.ref_logprobs is None:
            return
        assert self.mdp is not None
        kl = batch.reference_log_ratios.sum(1).mean()
        self.kl_controller.update(float(kl), len(batch))
        self._set_kl_coef(self.kl_controller.coef)

    def _set_kl_coef(self, kl_coef: float) -> None:
        assert self.env is not None
        assert self.mdp is not None
        self.mdp.kl_coef = kl_coef  # a copy where the environments run in other processes
        self.env.env_method("set_kl_coef", kl_coef)

    def dump_logs(self, iteration: int = 0) -> None:
        """Writes the logs of the last rollout and update."""
        assert self.ep_info_buffer is not None
        assert self.ep_success_buffer is not None
        if iteration > 0:
            self.logger.record("time/iterations", iteration, exclude="tensorboard")
        if len(self.ep_info_buffer) > 0:
            for key in ("r", "l"):
                name = {"r": "rew", "l": "len"}[key]
                mean = safe_mean([info[key] for info in self.ep_info_buffer])
                self.logger.record(f"rollout/ep_{name}_mean", mean)
        elapsed = (time.time_ns() - self.start_time) / 1e9
        self.logger.record("time/fps", int(self.steps_per_second()))
        self.logger.record("time/time_elapsed", int(elapsed), exclude="tensorboard")
        self.logger.record("time/total_timesteps", self.num_timesteps, exclude="tensorboard")
        if len(self.ep_success_buffer) > 0:
            self.logger.record("rollout/success_rate", safe_mean(self.ep_success_buffer))
        self.logger.dump(step=self.num_timesteps)

    def steps_per_second(self) -> float:
        """Returns the environment steps (for text, tokens) per second since `learn` began."""
        elapsed = max((time.time_ns() - self.start_time) / 1e9, sys.float_info.epsilon)
        return (self.num_timesteps - self._num_timesteps_at_start) / elapsed

    # Language

    def generate(
        self,
        prompts: list[str],
        max_new_tokens: int | None = None,
        deterministic: bool = True,
        seed: int = 0,
    ) -> list[str]:
        """Returns a completion of each prompt.

        Args:
            prompts: Texts.
            max_new_tokens: Longest completion; None is the environment's, or 32 without one.
            deterministic: Takes the likeliest token, rather than sampling.
            seed: Seeds the sampling.

        Raises:
            ValueError: The policy is not a language model, or a prompt is empty.
        """
        if not isinstance(self.policy, LMPolicy):
            raise ValueError("generate() needs an agent with LMPolicy; use predict() elsewhere.")
        stop: Sequence[str] = ()
        if self.mdp is not None:
            if max_new_tokens is None:
                max_new_tokens = self.mdp.max_new_tokens
            stop = self.mdp.termination.stop
        evaluation = evaluate_task(
            self.policy,
            FunctionTask(prompts, score=lambda text, sample: 0.0, stop=stop),
            max_new_tokens=max_new_tokens,
            deterministic=deterministic,
            seed=seed,
        )
        return [ending.text for ending in evaluation.endings]

    def save_pretrained(self, directory: str) -> None:
        """Writes the language model and tokenizer as a directory that transformers loads."""
        if not isinstance(self.policy, LMPolicy):
            raise ValueError("save_pretrained() needs an agent with LMPolicy; use save().")
        self.policy.save_pretrained(directory)

    # Checkpoints

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.optimizer"], []

    def save(
        self,
        path: Any,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """Writes a checkpoint of JSON, safetensors and plain tensors; see `agents.checkpoint`.

        In the middle of a rollout, and after a callback or an exception ended one there, it holds
        the start of that rollout: a resumed run repeats it, and equals one that went through.

        Args:
            path: A file name, to which ``.zip`` is added where it has no suffix, or a binary file
                that is open for writing.
            exclude: Names that are left out: constructor arguments, which `load` must then be
                given, and counters such as ``"num_timesteps"`` or ``"ep_info_buffer"``, which then
                begin anew. Other names are ignored, and weights are always stored.
            include: Names that are stored although `exclude` holds them.
        """
        checkpoint.save(self, path, set(exclude or ()) - set(include or ()))

    def set_parameters(
        self,
        load_path_or_dict: Any,
        exact_match: bool = True,
        device: torch.device | str = "auto",
    ) -> None:
        """Sets weights and optimiser, see `BaseAlgorithm.set_parameters`.

        Args:
            load_path_or_dict: What `get_parameters` returned, or a checkpoint of this package.
            exact_match: Whether the dictionary must hold everything.
            device: There for Stable-Baselines3's call; the policy stays where it is.

        Raises:
            ValueError: A name is unknown or missing, or the checkpoint does not fit.
        """
        if isinstance(load_path_or_dict, dict):
            names, _ = self._get_torch_save_params()
            unknown = sorted(set(load_path_or_dict) - set(names))
            if unknown:
                raise ValueError(f"There are no parameters {unknown}; the names are {names}.")
            super().set_parameters(load_path_or_dict, exact_match, device)
        else:
            checkpoint.set_parameters(self, load_path_or_dict)

    @classmethod
    def load(
        cls: type[SelfAgent],
        path: Any,
        env: Any = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfAgent:
        """Returns the agent of a checkpoint; loading never runs code from the file.

        Args:
            path: The file, by name or open for reading.
            env: Environment to go on with.
            device: Device of the policy.
            custom_objects: Like `kwargs`, but names that the checkpoint does not have are ignored.
            print_system_info: Prints the versions of this machine, and of the one that saved.
            force_reset: Resets the environment at the next `learn`.
            **kwargs: Constructor arguments that replace the saved ones.
        """
        if print_system_info:
            print("== CURRENT SYSTEM INFO ==")
            get_system_info()
        return checkpoint.load(
            cls, path, env, device, custom_objects or {}, print_system_info, force_reset, **kwargs
        )


def _checked_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    whole = isinstance(seed, int | np.integer)
    if not (whole and 0 <= seed < 2**32):
        kind = ValueError if whole else TypeError
        raise kind(f"seed is {seed!r}; it must be a whole number from 0 to 2**32 - 1, or None.")
    return int(seed)


def _check_space(space: Any, name: str) -> None:
    """Refuses what the policies cannot read, and numbers that do not count from 0."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            if not isinstance(part, spaces.Dict | spaces.Tuple):  # Stable-Baselines3 refuses these
                _check_space(part, f"{name}[{key!r}]")
    elif (
        name.startswith("observation")
        and isinstance(space, spaces.Space)
        and not isinstance(space, _READABLE)
    ):
        raise NotImplementedError(
            f"{name} is {space}, which is not supported; use Box, Discrete, MultiDiscrete, "
            "MultiBinary, or a Dict of these."
        )
    elif np.any(getattr(space, "start", 0)):
        wrapper = "TransformAction" if name.startswith("action") else "TransformObservation"
        raise ValueError(
            f"{name} is {space}, but the policies count from 0; wrap the environment in "
            f"gymnasium.wrappers.{wrapper}, which adds or takes off the start."
        )
