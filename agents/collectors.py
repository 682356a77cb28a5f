"""Collection of trajectories: whole completions from an engine, or any environment step by step.

Both fill the same `Trajectories`, and both call the callbacks once per environment step with the
variables that Stable-Baselines3's agents show them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecMonitor,
    VecTransposeImage,
)

from agents.fused import Actor
from agents.policies import LMPolicy
from agents.sampling import sample_tokens, sampling_uniforms
from agents.trajectories import Observations, Trajectories
from textrl_env.core import ScoredCompletions, TokenMDP
from textrl_env.logprobs import pad_left, pad_right
from textrl_env.sb3 import EpisodeInfos, GymVecEnv, step_without_copies
from textrl_env.vector_env import TextRLVectorEnv

if TYPE_CHECKING:
    from agents.agent import Agent

Collect = Callable[["Agent", BaseCallback], Trajectories | None]


def generate_completions(agent: Agent, callback: BaseCallback) -> Trajectories | None:
    """Generates one completion per slot with the engine and has the environment score them.

    Returns:
        The trajectories, or None where a callback stopped the training.
    """
    assert agent.mdp is not None
    assert agent.engine is not None
    mdp, start = agent.mdp, time.perf_counter()
    prompt_indices = agent.next_prompts()
    callback.on_rollout_start()
    prompts = mdp.encode_prompts(prompt_indices.tolist())
    completions = agent.engine.generate(
        prompts,
        mdp.termination,
        mdp.token_mask,
        mdp.config.temperature,
        sampling_uniforms(agent.run_seed, agent.rollout, prompt_indices, mdp.max_new_tokens),
    )
    scored = mdp.score_completions(
        prompt_indices.tolist(), completions.tokens, completions.logprobs
    )
    tokens, mask = pad_right(completions.tokens)
    logprobs, _ = pad_right(completions.logprobs, dtype=np.float64)
    rewards = _shaped_rewards(agent, scored.field("rewards"), logprobs, mdp.kl_coef)
    agent.rollout_seconds = time.perf_counter() - start
    if not _replay(agent, callback, scored, prompt_indices, tokens, logprobs, rewards):
        return None
    prompt_ids, prompt_mask = pad_left([prompt.ids for prompt in prompts])
    return _text_trajectories(
        agent,
        prompt_ids,
        prompt_mask,
        tokens,
        mask,
        logprobs,
        rewards,
        prompt_indices,
        task_rewards=scored.field("task_rewards"),
        ref_logprobs=scored.field("ref_logprobs"),
        terminated=scored.field("terminated"),
        truncated=scored.field("truncated"),
        masked=np.array([ending.masked for ending in scored.endings]),
    )


def _shaped_rewards(
    agent: Agent,
    rewards: NDArray[np.float64],
    logprobs: NDArray[np.float64],
    kl_coef: float | NDArray[np.float64],
) -> NDArray[np.float32]:
    """The environment's rewards, less β·log π_old where the mode leaves that to the agent."""
    if agent.subtracts_kl:
        rewards = rewards - kl_coef * logprobs
    return rewards.astype(np.float32)


def _charged(infos: list[dict[str, Any]]) -> NDArray[np.float64]:
    """β as each environment charged it in this step, (n,)."""
    return np.array([info.get("kl_coef", 0.0) for info in infos])


def _replay(
    agent: Agent,
    callback: BaseCallback,
    scored: ScoredCompletions,
    prompt_indices: NDArray[np.int64],
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    rewards: NDArray[np.float32],
) -> bool:
    """Shows the callbacks each step as if it had been taken now; False where they stop."""
    assert agent.mdp is not None
    mdp, n = agent.mdp, len(tokens)
    prompts = mdp.encode_prompts(prompt_indices.tolist())
    prompt_lengths = np.array([len(prompt.ids) for prompt in prompts])
    observations: dict[str, NDArray[Any]] = {
        "input_ids": np.full((n, mdp.max_tokens), mdp.pad_token_id, dtype=np.int64),
        "attention_mask": np.zeros((n, mdp.max_tokens), dtype=np.int8),
    }
    for i, prompt in enumerate(prompts):
        observations["input_ids"][i, : len(prompt.ids)] = prompt.ids
        observations["attention_mask"][i, : len(prompt.ids)] = 1
    episodes = EpisodeInfos(n)
    for t, (step, rows) in enumerate(zip(scored.steps, scored.rows, strict=True)):
        observations["input_ids"][rows, prompt_lengths[rows] + t] = tokens[rows, t]
        observations["attention_mask"][rows, prompt_lengths[rows] + t] = 1
        new_obs = {key: array.copy() for key, array in observations.items()}
        dones = np.zeros(n, dtype=np.bool_)
        dones[rows] = step.terminated | step.truncated
        infos: list[dict[str, Any]] = [{} for _ in range(n)]
        for i, row in enumerate(rows.tolist()):
            infos[row] = step.info(i)
            infos[row]["TimeLimit.truncated"] = bool(step.truncated[i])
            if dones[row]:
                infos[row]["terminal_observation"] = {k: v[row] for k, v in new_obs.items()}
        env_rewards = np.zeros(n, dtype=np.float32)
        env_rewards[rows] = step.rewards
        episodes.add(env_rewards, rows, dones, infos)
        shown = rewards[:, t].copy()
        if not _on_step(
            agent,
            callback,
            len(rows),
            t,
            actions=tokens[:, t],
            clipped_actions=tokens[:, t],
            log_probs=torch.from_numpy(logprobs[:, t].astype(np.float32)),
            values=None,
            new_obs=new_obs,
            rewards=shown,
            dones=dones,
            infos=infos,
        ):
            return False
        rewards[:, t] = shown
        agent._update_info_buffer(infos, dones)
    return True


def _on_step(
    agent: Agent, callback: BaseCallback, steps_taken: int, n_steps: int, **shown: Any
) -> bool:
    """Counts the step and calls the callbacks with Stable-Baselines3's local variables."""
    agent.num_timesteps += steps_taken
    check_finite("reward", shown["rewards"], agent.num_timesteps)
    check_finite("observation", shown["new_obs"], agent.num_timesteps)
    for i in np.flatnonzero(shown["dones"]).tolist():
        final = shown["infos"][i].get("terminal_observation")
        check_finite("last observation", final, agent.num_timesteps, slot=i)
    callback.update_locals(
        {
            "self": agent,
            "env": agent.env,
            "callback": callback,
            "n_steps": n_steps,
            "rollout_buffer": agent.rollout_buffer,
            **shown,
        }
    )
    return bool(callback.on_step())


def check_finite(name: str, values: Any, step: int, slot: int | None = None) -> None:
    """Names the step and the slot where an environment gave what is no finite number.

    Later it would show as a failure of the policy or the loss, far from its cause.

    Args:
        name: What the values are.
        values: An array of all slots, or a dictionary of such; or what one slot gave.
        step: Number of the step, for the message.
        slot: The one slot that the values are of.

    Raises:
        FloatingPointError: A value is NaN or infinite.
    """
    for array in values.values() if isinstance(values, Mapping) else (values,):
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            finite = np.isfinite(array)
            if not finite.all():
                where = int(np.argwhere(~finite)[0][0]) if slot is None else slot
                raise FloatingPointError(
                    f"The {name} of slot {where} holds {array[~finite][0]} at step "
                    f"{step}; an environment must give finite numbers, so look "
                    "for the cause there."
                )


def _text_trajectories(
    agent: Agent,
    prompt_ids: NDArray[np.int64],
    prompt_mask: NDArray[np.bool_],
    tokens: NDArray[np.int64],
    mask: NDArray[np.bool_],
    logprobs: NDArray[np.float64],
    rewards: NDArray[np.float32],
    prompt_indices: NDArray[np.int64],
    *,
    task_rewards: NDArray[np.float64],
    ref_logprobs: NDArray[np.float64],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    masked: NDArray[np.bool_],
) -> Trajectories:
    def tensor(array: NDArray[Any]) -> torch.Tensor:
        kind = {np.dtype(np.float64): np.float32}.get(array.dtype, array.dtype)
        return torch.from_numpy(np.ascontiguousarray(array, dtype=kind)).to(agent.device)

    assert agent.mdp is not None
    return Trajectories(
        observations={"prompt_ids": tensor(prompt_ids), "prompt_mask": tensor(prompt_mask)},
        actions=tensor(tokens),
        mask=tensor(mask),
        logprobs=tensor(logprobs),
        rewards=tensor(rewards),
        task_rewards=tensor(task_rewards),
        terminated=tensor(terminated),
        truncated=tensor(truncated),
        groups=tensor(np.arange(len(tokens)) // agent.group_size),
        valid=tensor(~masked),
        ref_logprobs=tensor(ref_logprobs) if agent.mdp.config.reference_name else None,
    )


def step_episodes(agent: Agent, callback: BaseCallback) -> Trajectories | None:
    """Steps each slot of the environment through one episode.

    Slots of a group start from the same state: the same prompt for text, the same reset seed
    elsewhere; without groups the environments go on drawing their starts. A slot that is done
    waits, its further steps left out, until all are.

    Returns:
        The trajectories, or None where a callback stopped the training.
    """
    env = agent.env
    assert env is not None
    text = isinstance(agent.policy, LMPolicy)
    start_of_rollout = time.perf_counter()
    starts = agent.next_prompts()
    uniforms = None
    if text:
        assert agent.mdp is not None
        env.set_options([{"prompt_index": int(i)} for i in starts])
        uniforms = torch.from_numpy(
            sampling_uniforms(agent.run_seed, agent.rollout, starts, agent.mdp.max_new_tokens)
        )
    elif agent.group_size > 1:
        # VecEnv.seed() would give each slot another seed; a group shares one.
        env.unwrapped._seeds = [int(i) for i in starts]
    obs = env.reset()
    check_finite("observation", obs, agent.num_timesteps)
    callback.on_rollout_start()
    n = env.num_envs
    active = np.ones(n, dtype=np.bool_)
    first_obs: Any = obs
    steps: list[tuple[Any, ...]] = []
    clip = _clipping(agent)
    actor = None if text else _silent_actor(agent, callback)
    step = _stepping(env, actor)
    log_probs, values = torch.zeros(n), None
    while active.any():
        if actor is None:
            _reset_noise(agent, len(steps), agent.policy.reset_noise)
            actions, log_probs, values = _act(agent, obs, uniforms, len(steps))
        else:
            _reset_noise(agent, len(steps), actor.reset_noise)
            actions = actor(obs)
        if text:
            assert agent.mdp is not None
            # Slots that wait go on in an episode of no account, by an action allowed everywhere.
            actions = np.where(active, actions, np.argmax(agent.mdp.token_mask(0)))
            if agent.mdp.config.kl_mode == "policy":
                _report_logprobs(env, log_probs.double().cpu().numpy())
        clipped_actions = clip(actions)
        new_obs, rewards, dones, infos = step(clipped_actions)
        for i in np.flatnonzero(~active | dones).tolist():
            if not active[i]:
                infos[i], rewards[i], dones[i] = {}, 0.0, False
            _set(new_obs, i, infos[i].get("terminal_observation", _get(obs, i)))
        log_probs_array = log_probs.double().cpu().numpy() * active
        shaped = _shaped_rewards(
            agent, rewards.astype(np.float64), log_probs_array, _charged(infos)
        )
        keep_going = _on_step(
            agent,
            callback,
            int(active.sum()),
            len(steps),
            actions=np.where(active, actions, 0) if actions.ndim == 1 else actions,
            clipped_actions=clipped_actions,
            log_probs=torch.from_numpy(log_probs_array.astype(np.float32)),
            values=values,
            new_obs=new_obs,
            rewards=shaped,
            dones=dones,
            infos=infos,
        )
        if not keep_going:
            return None
        agent._update_info_buffer(infos, dones)
        steps.append((obs, actions, log_probs_array, shaped, dones, infos, active.copy(), values))
        active &= ~dones
        obs = new_obs
    batch = _episode_trajectories(agent, first_obs, steps, starts, text)
    if actor is not None:
        logprobs, evaluated = actor.evaluate(batch.observations, batch.actions)
        batch.logprobs = torch.where(batch.mask, logprobs, 0.0)
        batch.values = evaluated
    agent.rollout_seconds = time.perf_counter() - start_of_rollout
    return batch


def _is_watched(callback: BaseCallback) -> bool:
    """Whether anybody looks at single steps."""
    return not (isinstance(callback, ConvertCallback) and callback.callback is None)


def _silent_actor(agent: Agent, callback: BaseCallback) -> Actor | None:
    """Gives actions alone; log-probabilities and values can wait where nobody looks at a step."""
    if agent.network is None or _is_watched(callback) or agent.subtracts_kl:
        return None
    return Actor(agent.network)


def _stepping(env: VecEnv, actor: Actor | None) -> Callable[[NDArray[Any]], Any]:
    """The environment's step, without copies where nobody could keep what it gives."""
    if actor is not None and type(env) is DummyVecEnv and env.keys == [None]:
        return partial(step_without_copies, env)

    def step(actions: NDArray[Any]) -> Any:
        # An environment may give the same arrays at each step, with other numbers in them.
        observations, rewards, dones, infos = env.step(actions)
        return _copied(observations), np.array(rewards, np.float32), np.array(dones), infos

    return step


def _copied(observations: Any) -> Any:
    if isinstance(observations, Mapping):
        return {key: np.array(value) for key, value in observations.items()}
    return np.array(observations)


def find_late(env: VecEnv) -> GymVecEnv | None:
    """Returns the vector whose restarts take a step of their own, or None where none does.

    Raises:
        ValueError: A wrapper around it would take the restarts for steps.
    """
    wrapper, inner = None, env
    while isinstance(inner, VecEnvWrapper):
        if not isinstance(inner, VecTransposeImage):
            wrapper = inner
        inner = inner.venv
    if not (isinstance(inner, GymVecEnv) and inner.restarts_late):
        return None
    if wrapper is not None:
        raise ValueError(
            f"{type(wrapper).__name__} would take the restarts of {inner.venv}, which need a step "
            "of their own, for steps; make the environment with gym.make_vec(..., "
            "vectorization_mode='sync')."
        )
    return inner


def _act(
    agent: Agent, obs: Any, uniforms: torch.Tensor | None, t: int
) -> tuple[NDArray[Any], torch.Tensor, torch.Tensor | None]:
    """Actions, log-probabilities (n,) and, without `uniforms`, values (n,) for observations."""
    with torch.no_grad():
        obs_tensor = obs_as_tensor(obs, agent.device)
        if uniforms is None:
            actions, values, log_probs = agent.policy(obs_tensor)
            return actions.cpu().numpy(), log_probs, values.flatten()
        assert isinstance(agent.policy, LMPolicy)
        log_dist = agent.policy.log_distribution(obs_tensor, num_tokens=t)
        tokens = sample_tokens(log_dist, uniforms[:, min(t, uniforms.shape[1] - 1)])
        return tokens.cpu().numpy(), log_dist.gather(1, tokens[:, None])[:, 0], None


def _report_logprobs(env: VecEnv, logprobs: NDArray[np.float64]) -> None:
    """Reports log π of the next actions, as ``kl_mode="policy"`` asks."""
    if gives_whole_completions(env):
        env.env_method("report_logprobs", logprobs)
    else:
        for i, logprob in enumerate(logprobs.tolist()):
            env.env_method("report_logprobs", logprob, indices=[i])


def _reset_noise(agent: Agent, n_steps: int, reset_noise: Callable[[int], None]) -> None:
    """Draws new noise for state-dependent exploration, as often as asked for."""
    if agent.use_sde and n_steps == 0:
        reset_noise(agent.n_envs)
    # At the first step once more, as Stable-Baselines3 does.
    if agent.use_sde and agent.sde_sample_freq > 0 and n_steps % agent.sde_sample_freq == 0:
        reset_noise(agent.n_envs)


def _clipping(agent: Agent) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Makes actions what the environment takes: unscaled or clipped, never what is stored."""
    if not isinstance(agent.action_space, spaces.Box):
        return lambda actions: actions
    if agent.policy.squash_output:
        return agent.policy.unscale_action
    low, high = agent.action_space.low, agent.action_space.high
    return lambda actions: np.minimum(np.maximum(actions, low), high)


def _episode_trajectories(
    agent: Agent, first_obs: Any, steps: list[Any], starts: NDArray[np.int64], text: bool
) -> Trajectories:
    obs, actions, logprobs, rewards, dones, infos, active, values = zip(*steps, strict=True)
    mask = np.stack(active, 1)
    masked = np.zeros(len(mask), dtype=np.bool_)
    fields = {name: np.zeros(mask.shape) for name in ("task_reward", "ref_logprob")}
    truncated = np.zeros(mask.shape, dtype=np.bool_)
    final_values = torch.zeros(mask.shape)
    for t, step_infos in enumerate(infos):
        for i, info in enumerate(step_infos):
            fields["task_reward"][i, t] = info.get("task_reward", rewards[t][i])
            fields["ref_logprob"][i, t] = info.get("ref_logprob", 0.0)
            truncated[i, t] = info.get("TimeLimit.truncated", False)
            masked[i] |= info.get("masked", False)
    done = np.stack(dones, 1)
    if text:
        prompt_ids, prompt_mask = pad_left(
            [ids[m.astype(bool)] for ids, m in zip(*map(first_obs.get, _TEXT_KEYS), strict=True)]
        )
        return _text_trajectories(
            agent,
            prompt_ids,
            prompt_mask,
            np.where(mask, np.stack(actions, 1), 0),
            mask,
            np.stack(logprobs, 1),
            np.stack(rewards, 1),
            starts,
            task_rewards=fields["task_reward"],
            ref_logprobs=fields["ref_logprob"],
            terminated=done & ~truncated,
            truncated=truncated,
            masked=masked,
        )
    if agent.uses_critic:
        for i, t in zip(*np.nonzero(truncated), strict=True):
            final = _batch_of_one(infos[t][i]["terminal_observation"])
            with torch.no_grad():
                final_values[i, t] = agent.policy.predict_values(
                    obs_as_tensor(final, agent.device)
                )[0, 0]
    device = agent.device
    return Trajectories(
        observations=_stack(obs, device),
        actions=torch.from_numpy(np.stack(actions, 1)).to(device),
        mask=torch.from_numpy(mask).to(device),
        logprobs=torch.from_numpy(np.stack(logprobs, 1)).float().to(device),
        rewards=torch.from_numpy(np.stack(rewards, 1) * mask).to(device),
        task_rewards=torch.from_numpy(fields["task_reward"]).float().to(device),
        terminated=torch.from_numpy(done & ~truncated).to(device),
        truncated=torch.from_numpy(truncated).to(device),
        groups=torch.from_numpy(np.arange(len(mask)) // agent.group_size).to(device),
        valid=torch.from_numpy(~masked).to(device),
        values=torch.stack(values, 1) if agent.uses_critic and values[0] is not None else None,
        final_values=final_values.to(device) if agent.uses_critic else None,
        last_values=torch.zeros(len(mask), device=device) if agent.uses_critic else None,
    )


_TEXT_KEYS = ("input_ids", "attention_mask")


def step_transitions(agent: Agent, callback: BaseCallback) -> Trajectories | None:
    """Takes `n_steps` steps in every slot, across the ends of episodes, as PPO does on control.

    A vector environment that restarts episodes one step late spends a step on it, which is left
    out of the mask.

    Returns:
        The trajectories, or None where a callback stopped the training.
    """
    env: VecEnv | None = agent.env
    assert env is not None
    assert agent._last_obs is not None
    assert agent.n_steps is not None
    start = time.perf_counter()
    callback.on_rollout_start()
    watched = _is_watched(callback)
    actor = _silent_actor(agent, callback)
    clip, step = _clipping(agent), _stepping(env, actor)
    late = find_late(env)
    everyone = np.ones(env.num_envs, dtype=np.bool_)
    log_probs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    steps = []
    finals: list[tuple[int, int, Any]] = []  # slot, step and last observation of each episode
    agent._last_obs = _copied(agent._last_obs)
    continuous = isinstance(agent.action_space, spaces.Box)
    for n_steps in range(agent.n_steps):
        obs: Any = agent._last_obs
        if actor is None:
            _reset_noise(agent, n_steps, agent.policy.reset_noise)
            actions, log_probs, values = _act(agent, obs, None, n_steps)
        else:
            _reset_noise(agent, n_steps, actor.reset_noise)
            actions = actor(obs)
            if continuous and not np.isfinite(actions).all():
                check_finite("observation", obs, agent.num_timesteps)
        clipped_actions = clip(actions)
        new_obs, rewards, dones, infos = step(clipped_actions)
        taken = everyone if late is None else ~late.restarted
        if agent.subtracts_kl:
            assert log_probs is not None
            rewards = _shaped_rewards(
                agent, rewards.astype(np.float64), log_probs.cpu().numpy(), _charged(infos)
            )
        if not watched:
            agent.num_timesteps += int(np.count_nonzero(taken))
        elif not _on_step(
            agent,
            callback,
            int(np.count_nonzero(taken)),
            n_steps,
            n_rollout_steps=agent.n_steps,
            obs_tensor=obs_as_tensor(obs, agent.device),
            actions=actions,
            clipped_actions=clipped_actions,
            log_probs=log_probs,
            values=values,
            new_obs=new_obs,
            rewards=rewards,
            dones=dones,
            infos=infos,
        ):
            return None
        agent._update_info_buffer(infos, dones)
        truncated = np.zeros(env.num_envs, dtype=np.bool_)
        if dones.any():
            for i in np.flatnonzero(dones).tolist():
                final = infos[i].get("terminal_observation")
                if final is not None:  # without one there is nothing to bootstrap from
                    truncated[i] = infos[i].get("TimeLimit.truncated", False)
                    finals.append((i, n_steps, final))
        steps.append((obs, actions, log_probs, values, rewards, dones, truncated, taken))
        agent._last_obs = new_obs
        agent._last_episode_starts = dones
    observations, all_actions, *evaluated, all_rewards, all_dones, cut, mask = zip(
        *steps, strict=True
    )
    if not watched:
        _check_rollout(agent, observations, all_rewards, mask, finals)
    device = agent.device
    done, truncated = np.stack(all_dones, 1), np.stack(cut, 1)
    reward_tensor = torch.from_numpy(np.stack(all_rewards, 1)).to(device)
    batch = Trajectories(
        observations=_stack(observations, device),
        actions=torch.from_numpy(np.stack(all_actions, 1)).to(device),
        mask=torch.from_numpy(np.stack(mask, 1)).to(device),
        logprobs=reward_tensor,
        rewards=reward_tensor,
        task_rewards=reward_tensor,
        terminated=torch.from_numpy(done & ~truncated).to(device),
        truncated=torch.from_numpy(truncated).to(device),
        groups=torch.arange(env.num_envs, device=device),
        valid=torch.ones(env.num_envs, dtype=torch.bool, device=device),
    )
    if actor is None:
        batch.logprobs, batch.values = (torch.stack(tensors, 1) for tensors in evaluated)
    else:
        batch.logprobs, batch.values = actor.evaluate(batch.observations, batch.actions)
    finals = [(i, t, observation) for i, t, observation in finals if truncated[i, t]]
    ends = _concatenate(
        [agent._last_obs, *(_batch_of_one(observation) for _, _, observation in finals)]
    )
    if actor is None:
        with torch.no_grad():
            end_values = agent.policy.predict_values(obs_as_tensor(ends, device))[:, 0]
    else:
        end_values = actor.values(ends)
    batch.last_values = end_values[: env.num_envs]
    batch.final_values = torch.zeros(done.shape, device=device)
    for (i, t, _), value in zip(finals, end_values[env.num_envs :], strict=True):
        batch.final_values[i, t] = value
    agent.rollout_seconds = time.perf_counter() - start
    return batch


def _check_rollout(
    agent: Agent, observations: Any, rewards: Any, mask: Any, finals: list[tuple[int, int, Any]]
) -> None:
    """Does for a whole rollout what `_on_step` does for a step, in few calls."""
    after = [*observations[1:], agent._last_obs]
    try:
        check_finite("reward", np.stack(rewards), 0)
        check_finite("observation", _concatenate(after), 0)
        for _, _, observation in finals:
            check_finite("observation", observation, 0)
    except FloatingPointError:
        steps = agent.num_timesteps + np.cumsum(np.sum(mask, 1)) - np.sum(mask)
        for t, step in enumerate(steps.tolist()):
            check_finite("reward", rewards[t], step)
            check_finite("observation", after[t], step)
            for i, end, observation in finals:
                if end == t:
                    check_finite("last observation", observation, step, slot=i)
        raise


def _stack(observations: Any, device: torch.device) -> Observations:
    """Per-step arrays (or dictionaries of them), each (n, ...), as tensors (n, T, ...)."""
    if isinstance(observations[0], Mapping):
        stacked = {key: np.stack([o[key] for o in observations], 1) for key in observations[0]}
        return {key: torch.from_numpy(array).to(device) for key, array in stacked.items()}
    return torch.from_numpy(np.stack(observations, 1)).to(device)


def _batch_of_one(observation: Any) -> Any:
    if isinstance(observation, Mapping):
        return {key: np.asarray(value)[None] for key, value in observation.items()}
    return np.asarray(observation)[None]


def _concatenate(observations: list[Any]) -> Any:
    if isinstance(observations[0], Mapping):
        return {key: np.concatenate([o[key] for o in observations]) for key in observations[0]}
    return np.concatenate(observations)


def _get(observations: Any, i: int) -> Any:
    if isinstance(observations, Mapping):
        return {key: value[i] for key, value in observations.items()}
    return observations[i]


def _set(observations: Any, i: int, value: Any) -> None:
    if isinstance(observations, Mapping):
        for key in observations:
            observations[key][i] = value[key]
    else:
        observations[i] = value


def gives_whole_completions(env: VecEnv) -> bool:
    """Whether completions may be scored whole: a native vector that no wrapper transforms."""
    while isinstance(env, VecMonitor):
        env = env.venv
    if not isinstance(env, GymVecEnv):
        return False
    venv = env.venv
    while isinstance(venv, RecordEpisodeStatistics):
        venv = venv.env
    return isinstance(venv, TextRLVectorEnv)


def find_mdp(env: VecEnv) -> TokenMDP | None:
    """Returns the token process inside a vector environment, or None where it is not text."""
    observations = env.observation_space
    if not (isinstance(observations, spaces.Dict) and set(observations.spaces) == set(_TEXT_KEYS)):
        return None  # asking an environment in another process for what it lacks would end it
    try:
        mdp = env.get_attr("mdp")[0]
    except AttributeError:
        return None
    except (EOFError, BrokenPipeError) as error:
        raise ValueError(
            "The environments in other processes could not hand over their options, most likely "
            "because a reward or task cannot be pickled; define it at the top of a module, or use "
            "gym.make_vec('TextRL-v0', ...), which needs no processes."
        ) from error
    return mdp if isinstance(mdp, TokenMDP) else None
