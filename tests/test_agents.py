"""What all agents share, on text with a small random model, and on CartPole."""

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium.wrappers.vector import TransformReward
from sb3_contrib import TRPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents import (
    GRPO,
    PPO,
    RLOO,
    LMPolicy,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from agents.advantages import group_advantages
from agents.evaluation import evaluate_task
from agents.kl_control import AdaptiveKL, FixedKL
from agents.presets import PRESETS
from agents.updates import AutogradUpdate
from textrl_env.sb3 import GymVecEnv, KLCallback
from textrl_env.tasks import FunctionTask

AGENTS = [PPO, GRPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline]


def make_env(model, num_envs=8, **options):
    options = {"task": "copy", "max_new_tokens": 5, "kl_coef": 0.1, "model": model} | options
    return gym.make_vec("textrl_env:TextRL-v0", num_envs=num_envs, **options)


def make_agent(agent_class, env, **kwargs):
    if agent_class not in (PPO, ReinforcePlusPlus):
        kwargs.setdefault("group_size", 4)
    return agent_class("LMPolicy", env, **{"seed": 0, "learning_rate": 1e-3, **kwargs})


def collected(agent_class, model, env_options=None, **kwargs):
    """An agent with one rollout and its advantages, and no update yet."""
    agent = make_agent(agent_class, make_env(model, **(env_options or {})), n_epochs=1, **kwargs)
    agent._total_timesteps, callback = agent._setup_learn(1, None)
    assert agent.collect_rollouts(callback)
    agent.compute_advantages(agent.rollout_buffer)
    return agent


def gradients(agent, batch):
    """The gradient of one mini-batch, before clipping."""
    AutogradUpdate(agent, batch).gradients(batch)
    return torch.cat([p.grad.flatten() for p in agent.policy.parameters() if p.grad is not None])


def assert_same_gradient(actual, expected):
    assert expected.norm() > 1e-6
    assert (actual - expected).norm() < 1e-4 * expected.norm()


def mean_task_reward(agent):
    batch = agent.rollout_buffer
    return float(torch.where(batch.mask, batch.task_rewards, 0.0).sum(1).mean())


# The update


@pytest.mark.parametrize("agent_class", AGENTS)
@pytest.mark.parametrize("extra", [{}, {"kl_loss_coef": 0.1, "ent_coef": 0.01}])
@pytest.mark.parametrize(
    "aggregation",
    ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
)
def test_micro_batches_change_nothing(tiny_llama, agent_class, extra, aggregation):
    results = []
    for micro_batch_size in (None, 1, 3, 8):
        agent = collected(
            agent_class, tiny_llama, micro_batch_size=micro_batch_size, batch_size=8,
            loss_aggregation=aggregation, **extra,
        )  # fmt: skip
        results.append(gradients(agent, agent.rollout_buffer))
    for other in results[1:]:
        assert_same_gradient(other, results[0])


def test_padding_changes_nothing(tiny_llama):
    agent = collected(GRPO, tiny_llama)
    batch = agent.rollout_buffer
    plain = agent.evaluate(batch)
    wide = batch.select(torch.arange(len(batch)))
    pad = torch.nn.functional.pad
    prompts = wide.observations
    wide.observations = {
        "prompt_ids": pad(prompts["prompt_ids"], (7, 0), value=5),
        "prompt_mask": pad(prompts["prompt_mask"], (7, 0)),
    }
    wide.actions, wide.mask = pad(wide.actions, (0, 9), value=3), pad(wide.mask, (0, 9))
    padded = agent.evaluate(wide)
    steps = batch.mask.shape[1]
    torch.testing.assert_close(padded.logprobs[:, :steps], plain.logprobs)
    torch.testing.assert_close(padded.entropy[:, :steps], plain.entropy)
    assert not padded.logprobs[:, steps:].any()


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("agent_class", AGENTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"allowed_tokens": range(90, 120), "min_new_tokens": 2},
        {"task": "sentiment", "max_new_tokens": 12},
    ],
)
def test_the_first_ratio_is_one(family, agent_class, options, request):
    """The rollout and the update see the same distribution: cache, padding, temperature, masks."""
    agent = collected(agent_class, request.getfixturevalue(family), options)
    batch = agent.rollout_buffer
    evaluation = agent.evaluate(batch)
    assert (evaluation.logprobs - batch.logprobs)[batch.mask].abs().max() < 2e-5
    means = AutogradUpdate(agent, batch).gradients(batch)
    assert means["approx_kl"] < 1e-7
    assert means["clip_fraction"] == 0


@pytest.mark.parametrize("agent_class", AGENTS)
def test_a_failed_reward_leaves_the_loss(tiny_llama, agent_class):
    """The gradient is the one of the batch without the failed completions."""

    def make():
        def reward(text, sample):
            grade = sum(map(ord, text))
            if grade % 3 == 0:
                raise RuntimeError("no grade")
            return float(grade % 11)

        kwargs = {"normalize_advantage": False} if agent_class is PPO else {}
        return collected(
            agent_class, tiny_llama,
            {"reward": reward, "on_error": "mask", "kl_mode": "none"}, **kwargs,
        )  # fmt: skip

    with pytest.warns(UserWarning, match="no grade"):
        agent = make()
    batch = agent.rollout_buffer
    assert 0 < int(batch.valid.sum()) < len(batch)
    with_failures = gradients(agent, batch)
    with pytest.warns(UserWarning, match="no grade"):
        good = make()
    rows = good.rollout_buffer.select(torch.nonzero(good.rollout_buffer.valid)[:, 0])
    good.compute_advantages(rows)
    assert_same_gradient(gradients(good, rows), with_failures)
    name = agent.logger.name_to_value
    assert name["rollout/masked_fraction"] == pytest.approx(1 - float(batch.valid.float().mean()))


@pytest.mark.parametrize("agent_class", AGENTS)
def test_a_batch_of_failures_only_changes_nothing(tiny_llama, agent_class):
    def reward(text, sample):
        raise RuntimeError("no grade")

    agent = make_agent(agent_class, make_env(tiny_llama, reward=reward, on_error="mask"))
    before = [p.clone() for p in agent.policy.parameters()]
    with pytest.warns(UserWarning, match="no grade"):
        agent.learn(1)
    assert all(map(torch.equal, before, agent.policy.parameters()))


def test_a_truncated_completion_bootstraps(tiny_llama):
    """And only a truncated one: its return is the value of the state after its last token."""
    for on_limit in ("terminate", "truncate"):
        options = {
            "on_limit": on_limit, "max_new_tokens": 2, "kl_mode": "none", "min_new_tokens": 1,
            "reward": lambda text, sample: 0.0,
        }  # fmt: skip
        agent = make_agent(PPO, make_env(tiny_llama, **options), gae_lambda=0.5)
        with torch.no_grad():
            torch.nn.init.normal_(agent.policy.value_net.weight)
        _, callback = agent._setup_learn(1, None)
        agent.collect_rollouts(callback)
        batch = agent.rollout_buffer
        agent.compute_advantages(batch)
        cut = batch.truncated.any(1)
        assert bool(cut.any()) == (on_limit == "truncate")
        for i in torch.nonzero(batch.mask[:, 1])[:, 0].tolist():
            final = 0.0
            if bool(cut[i]):
                prompt = batch.observations["prompt_ids"][i][batch.observations["prompt_mask"][i]]
                ids = torch.cat([prompt, batch.actions[i]])[None]
                hidden = agent.policy.lm.model(ids).last_hidden_state[0, -1]
                final = float(agent.policy.value_net(hidden).detach())
                assert abs(final) > 1e-3
            assert float(batch.returns[i, 1]) == pytest.approx(final, abs=1e-4)


def test_group_ids_and_prompts_of_a_rollout(tiny_llama):
    agent = collected(GRPO, tiny_llama)
    batch = agent.rollout_buffer
    assert batch.groups.tolist() == [0] * 4 + [1] * 4
    prompts = batch.observations["prompt_ids"]
    assert (prompts[:4] == prompts[0]).all()
    assert (prompts[4:] == prompts[4]).all()
    assert not torch.equal(prompts[0], prompts[4])
    completions = {tuple(row) for row in batch.actions.tolist()}
    assert len(completions) > 4
    again = collected(GRPO, tiny_llama).rollout_buffer
    assert torch.equal(again.actions, batch.actions)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    shuffled = batch.select(order)
    agent.compute_advantages(shuffled)
    torch.testing.assert_close(shuffled.advantages[:, 0], batch.advantages[order, 0])


def test_kl_control_follows_the_measured_kl(tiny_llama):
    env = make_env(tiny_llama)
    agent = make_agent(
        GRPO, env, kl_controller=AdaptiveKL(0.1, target=1e-6, horizon=16), learning_rate=1e-2
    )
    agent.learn(200)
    assert env.unwrapped.kl_coef == agent.kl_controller.coef > 0.1
    steady = make_agent(GRPO, make_env(tiny_llama))
    steady.learn(100)
    assert steady.mdp.kl_coef == 0.1


def test_the_logged_kl_is_that_of_the_policy_to_the_reference(tiny_llama):
    """And positive once the policy has moved: per token, and summed over completions."""
    env = make_env(tiny_llama, reward=lambda text, sample: len(set(text)))
    agent = make_agent(GRPO, env, learning_rate=1e-2)
    agent.learn(200, log_interval=None)
    batch, logged = agent.rollout_buffer, agent.logger.name_to_value
    log_ratio = (batch.logprobs - batch.ref_logprobs)[batch.mask]
    assert logged["rollout/kl"] == pytest.approx(float(log_ratio.mean()), rel=1e-4)
    assert logged["rollout/kl_sum"] == pytest.approx(float(log_ratio.sum()) / 8, rel=1e-4)
    assert logged["rollout/entropy"] == pytest.approx(-float(batch.logprobs[batch.mask].mean()))
    assert logged["rollout/kl"] > 0.01


def test_target_kl_stops_the_epochs(tiny_llama):
    runs = {}
    for target_kl in (None, 1e-4):
        agent = make_agent(
            PPO, make_env(tiny_llama), n_epochs=20, batch_size=8, target_kl=target_kl,
            learning_rate=1e-2,
        )  # fmt: skip
        agent.learn(1)
        runs[target_kl] = agent._n_updates
    assert runs[None] == 20
    assert runs[1e-4] < 20


def test_full_kl_loss_pulls_to_the_reference(tiny_llama):
    distances = {}
    for kl_loss_coef in (0.0, 10.0):
        agent = make_agent(
            GRPO,
            make_env(
                tiny_llama, kl_mode="none", reference=tiny_llama,
                reward=lambda text, sample: len(set(text)),
            ),
            kl_loss="full", kl_loss_coef=kl_loss_coef, learning_rate=1e-2,
        )  # fmt: skip
        agent.learn(400)
        batch = agent.rollout_buffer
        distances[kl_loss_coef] = float((batch.logprobs - batch.ref_logprobs)[batch.mask].mean())
    assert distances[10.0] < 0.5 * distances[0.0]


def test_learning_a_token(tiny_llama):
    """A reward for one token makes it likely, with every agent."""

    def reward(text, sample):
        return text.count("e") / 3

    for agent_class in AGENTS:
        env = make_env(
            tiny_llama, num_envs=32, reward=reward, kl_coef=0.001, max_new_tokens=3,
            allowed_tokens=range(100, 110),
        )  # fmt: skip
        agent = make_agent(agent_class, env, learning_rate=1e-2, batch_size=32)
        agent.learn(2_500)
        assert mean_task_reward(agent) > 0.8, agent_class


def test_a_loss_that_is_not_finite_is_an_error_and_no_update(tiny_llama):
    class Spoil(BaseCallback):
        def _on_step(self):
            self.locals["rewards"][:] = np.inf
            return True

    agent = make_agent(RLOO, make_env(tiny_llama))
    before = [p.clone() for p in agent.policy.parameters()]
    with pytest.raises(FloatingPointError, match="no optimiser step"):
        agent.learn(1, callback=Spoil())
    assert all(map(torch.equal, before, agent.policy.parameters()))


def test_two_runs_agree_whatever_was_drawn_before(tiny_llama):
    results = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        np.random.seed(noise)
        agent = make_agent(PPO, make_env(tiny_llama), batch_size=4)
        agent.learn(100)
        results.append(torch.cat([p.detach().flatten() for p in agent.policy.parameters()]))
    assert torch.equal(*results)


# Bad input


def test_contradictions_are_said(tiny_llama):
    with pytest.raises(ValueError, match="group_size is 3, which does not divide the 8 slots"):
        make_agent(GRPO, make_env(tiny_llama), group_size=3)
    with pytest.raises(ValueError, match="temperature"):
        make_agent(GRPO, make_env(tiny_llama), policy_kwargs={"temperature": 0.5})
    with pytest.raises(ValueError, match="scores no reference"):
        make_agent(GRPO, make_env(tiny_llama, kl_mode="none"), kl_loss_coef=0.1)
    with pytest.raises(ValueError, match="collector is 'fast'"):
        make_agent(GRPO, make_env(tiny_llama), collector="fast")
    with pytest.raises(ValueError, match="n_steps is 16"):
        make_agent(PPO, make_env(tiny_llama), n_steps=16)
    with pytest.raises(ValueError, match="not TextRL-v0"):
        GRPO("LMPolicy", "CartPole-v1", group_size=1)
    with pytest.raises(ValueError, match="charges no KL"):
        make_agent(GRPO, make_env(tiny_llama, kl_mode="none"), kl_controller=FixedKL(0.1))
    for name, value in (
        ("loss_aggregation", "mean"), ("kl_loss", "k9"), ("scale_rewards", "grp"),
        ("n_epochs", 0), ("n_epochs", 1.5), ("target_kl", -1), ("batch_size", 0),
        ("micro_batch_size", -1), ("ent_coef", float("nan")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=str(value)):
            make_agent(GRPO, make_env(tiny_llama), **{name: value})
    with pytest.raises(ValueError, match="LMPolicy"):
        PPO("MlpPolicy", "CartPole-v1").generate(["a"])
    with pytest.raises(ValueError, match="empty"):
        make_agent(GRPO, make_env(tiny_llama)).generate([""])


# Language


def test_generate_and_save_pretrained(tiny_llama, tmp_path):
    agent = make_agent(GRPO, make_env(tiny_llama))
    agent.learn(50)
    texts = agent.generate(["copy:ab=", "1+1="], max_new_tokens=4)
    assert len(texts) == 2
    assert agent.generate(["1+1="], max_new_tokens=4) == texts[1:]
    sampled = agent.generate(["1+1="] * 6, max_new_tokens=4, deterministic=False, seed=1)
    assert len(set(sampled)) > 1
    assert sampled == agent.generate(["1+1="] * 6, max_new_tokens=4, deterministic=False, seed=1)
    agent.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("copy:ab=", return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert texts[0] == expected


def test_the_pad_token_may_be_the_end_of_sequence(pad_is_eos):
    """The end token keeps its log-probability and its place in the loss."""
    agent = collected(GRPO, pad_is_eos, {"allowed_tokens": range(97, 99)})
    batch = agent.rollout_buffer
    eos = agent.mdp.tokenizer.eos_token_id
    assert agent.mdp.tokenizer.pad_token_id == eos
    last = batch.mask.sum(1) - 1
    ended = batch.actions[torch.arange(len(batch)), last] == eos
    assert ended.any()
    logprobs = agent.evaluate(batch).logprobs[torch.arange(len(batch)), last]
    assert (logprobs[ended] < 0).all()
    torch.testing.assert_close(logprobs, batch.logprobs[torch.arange(len(batch)), last])


# Beside Stable-Baselines3


def test_evaluate_actions_equals_evaluate_completions(tiny_llama):
    """The two forms of the policy, a token at a time and a completion at a time."""
    agent = collected(PPO, tiny_llama, {"temperature": 0.8})
    batch, policy = agent.rollout_buffer, agent.policy
    with torch.no_grad():
        torch.nn.init.normal_(policy.value_net.weight)
    whole = agent.evaluate(batch)
    ids, mask = batch.observations["prompt_ids"], batch.observations["prompt_mask"]
    for i in range(len(batch)):
        for t in range(int(batch.mask[i].sum())):
            row = torch.cat([ids[i][mask[i]], batch.actions[i, :t]])
            obs = {
                "input_ids": torch.nn.functional.pad(row, (0, 6))[None],
                "attention_mask": (torch.arange(len(row) + 6) < len(row))[None].to(torch.int8),
            }
            values, logprobs, entropy = policy.evaluate_actions(obs, batch.actions[i, t : t + 1])
            torch.testing.assert_close(logprobs[0], whole.logprobs[i, t], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(entropy[0], whole.entropy[i, t], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(values[0, 0], whole.values[i, t], atol=1e-5, rtol=1e-4)


def test_stable_baselines3_ppo_trains_the_language_policy(tiny_llama):
    env = GymVecEnv(make_env(tiny_llama, num_envs=4))
    model = stable_baselines3.PPO(
        LMPolicy, env, n_steps=8, batch_size=8, n_epochs=2, seed=0, learning_rate=1e-3,
        policy_kwargs={"model": tiny_llama},
    )  # fmt: skip
    before = [p.clone() for p in model.policy.parameters()]
    model.learn(64, callback=KLCallback())
    assert not all(map(torch.equal, before, model.policy.parameters()))
    assert all(p.isfinite().all() for p in model.policy.parameters())


@pytest.mark.parametrize("text", [False, True])
def test_ppo_and_stable_baselines3_have_the_same_gradient(tiny_llama, text):
    """On the same mini-batch: clip, value loss, entropy bonus, normalised advantages."""
    settings = {
        "n_epochs": 1, "ent_coef": 0.01, "vf_coef": 0.7, "max_grad_norm": 1e9, "seed": 0,
        "learning_rate": 0.0,
    }  # fmt: skip
    if text:
        ours = collected(PPO, tiny_llama, ent_coef=0.01, vf_coef=0.7, clip_range_lower=float("inf"))
        batch, policy = ours.rollout_buffer, ours.policy
        rows = [(i, t) for i, t in torch.nonzero(batch.mask).tolist()]
        ids, mask = batch.observations["prompt_ids"], batch.observations["prompt_mask"]
        sequences = [torch.cat([ids[i][mask[i]], batch.actions[i, :t]]) for i, t in rows]
        width = max(map(len, sequences))
        pad = torch.nn.functional.pad
        observations = {
            "input_ids": torch.stack([pad(s, (0, width - len(s))) for s in sequences]),
            "attention_mask": torch.stack(
                [(torch.arange(width) < len(s)).to(torch.int8) for s in sequences]
            ),
        }
        flat = {
            name: getattr(batch, name)[batch.mask]
            for name in ("actions", "values", "logprobs", "advantages", "returns")
        }
    else:
        ours = PPO("MlpPolicy", "CartPole-v1", n_steps=128, **settings)
        _, callback = ours._setup_learn(128, None)
        ours.collect_rollouts(callback)
        ours.compute_advantages(ours.rollout_buffer)
        batch, policy = ours.rollout_buffer.as_transitions(), ours.policy
        observations = batch.observations[:, 0]
        flat = {
            name: getattr(batch, name)[:, 0]
            for name in ("actions", "values", "logprobs", "advantages", "returns")
        }
    with torch.no_grad():  # off-policy, so that the clip matters
        for parameter in policy.parameters():
            parameter.add_((0.02 if text else 0.3) * torch.randn_like(parameter))
    theirs = stable_baselines3.PPO(
        "MlpPolicy", "CartPole-v1", n_steps=128, batch_size=len(flat["actions"]), **settings
    )
    theirs.policy = policy
    theirs.set_logger(stable_baselines3.common.logger.Logger(None, []))

    class OneBatch:
        values = returns = np.zeros(2)

        def get(self, batch_size):
            yield stable_baselines3.common.buffers.RolloutBufferSamples(
                observations, flat["actions"], flat["values"], flat["logprobs"],
                flat["advantages"], flat["returns"],
            )  # fmt: skip

    theirs.rollout_buffer = OneBatch()
    theirs.rollout_buffer.values = flat["values"].numpy()
    theirs.rollout_buffer.returns = flat["returns"].numpy()
    if not text:
        theirs.action_space = ours.action_space
    policy.optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    theirs.train()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    actual = gradients(ours, batch)
    assert theirs.logger.name_to_value["train/clip_fraction"] > 0
    assert_same_gradient(actual, expected)


def test_stock_callbacks_on_text_and_control(tiny_llama, tmp_path):
    for policy, env, eval_env in (
        ("LMPolicy", make_env(tiny_llama), GymVecEnv(make_env(tiny_llama, num_envs=2))),
        ("MlpPolicy", gym.make("CartPole-v1"), gym.make("CartPole-v1")),
    ):
        kwargs = {"n_steps": 64} if policy == "MlpPolicy" else {}
        agent = PPO(policy, env, seed=0, **kwargs)
        folder = tmp_path / policy
        evaluate = EvalCallback(
            eval_env, eval_freq=8, n_eval_episodes=2, best_model_save_path=str(folder), verbose=0,
            warn=False,
        )  # fmt: skip
        counted = []

        class Count(BaseCallback):
            def __init__(self, counted):
                super().__init__()
                self.counted = counted

            def _on_step(self):
                self.counted.append(self.num_timesteps)
                return True

        agent.learn(
            10_000,
            callback=[
                evaluate,
                EveryNTimesteps(32, Count(counted)),
                StopTrainingOnMaxEpisodes(30),
            ],
        )
        assert agent.num_timesteps < 10_000
        assert (folder / "best_model.zip").is_file()
        assert counted
        mean, _ = evaluate_policy(agent, eval_env, n_eval_episodes=2, warn=False)
        assert np.isfinite(mean)
        type(agent).load(folder / "best_model")


def test_predict_on_observations(tiny_llama):
    env = make_env(tiny_llama, num_envs=3)
    agent = make_agent(PPO, env)
    observations, _ = env.reset(seed=0)
    actions, state = agent.predict(observations, deterministic=True)
    assert actions.shape == (3,)
    assert state is None
    single = {key: value[1] for key, value in observations.items()}
    assert agent.predict(single, deterministic=True)[0] == actions[1]


def test_a_task_of_ones_own(tiny_llama):
    task = FunctionTask(["a", "bb", "ccc", "dddd"], score=lambda text, sample: len(text))
    agent = make_agent(GRPO, make_env(tiny_llama, task=task))
    agent.learn(30)
    assert mean_task_reward(agent) > 0
    assert {info["l"] for info in agent.ep_info_buffer} <= set(range(1, 6))


def test_reward_to_go_differs_by_what_came_before(tiny_llama):
    """Same rows and baseline; a step no longer answers for the KL terms of earlier ones."""
    whole = collected(RLOO, tiny_llama)
    to_go = collected(RLOO, tiny_llama, reward_to_go=True)
    batch = to_go.rollout_buffer
    assert torch.equal(batch.rewards, whole.rollout_buffer.rewards)
    before = torch.where(batch.mask, batch.rewards.cumsum(1) - batch.rewards, 0.0)
    assert before.abs().max() > 0
    torch.testing.assert_close(
        batch.advantages, whole.rollout_buffer.advantages - before, atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["verl", "trl", "openrlhf"])
def test_presets_are_arguments_of_grpo(tiny_llama, name):
    preset = PRESETS[name]
    agent = make_agent(GRPO, make_env(tiny_llama), **preset.grpo_arguments)
    agent.learn(1)
    assert agent.epsilon == preset.group_eps
    assert agent.clip_range_lower == preset.clip_range_lower


def test_without_a_critic_truncated_completions_leave_the_loss(tiny_llama):
    """They are not scored, and nothing stands for what they would have got."""
    options = {
        "on_limit": "truncate", "max_new_tokens": 3, "kl_mode": "none",
        "reward": lambda text, sample: -1.0, "allowed_tokens": range(90, 94),
    }  # fmt: skip
    for agent_class in (GRPO, RLOO):
        batch = collected(agent_class, tiny_llama, options).rollout_buffer
        cut = batch.truncated.any(1)
        assert cut.any()
        assert torch.equal(batch.valid, ~cut)
    assert collected(PPO, tiny_llama, options).rollout_buffer.valid.all()


def test_wrappers_are_not_bypassed(tiny_llama):
    wrapped = TransformReward(make_env(tiny_llama, kl_mode="none", task="sort"), lambda r: 10 * r)
    plain = collected(RLOO, tiny_llama, {"kl_mode": "none", "task": "sort"})
    with pytest.warns(UserWarning, match="a wrapper changes"):
        agent = make_agent(RLOO, wrapped)
    _, callback = agent._setup_learn(1, None)
    agent.collect_rollouts(callback)
    torch.testing.assert_close(
        agent.rollout_buffer.rewards, 10 * plain.rollout_buffer.rewards, atol=1e-5, rtol=1e-5
    )
    with pytest.raises(ValueError, match="without wrappers"):
        make_agent(RLOO, wrapped, collector="generate")


def test_kl_coef_of_other_environments_is_read_at_every_step(tiny_llama):
    """A callback may change it there; the agent subtracts with the value that was charged."""

    class Change(BaseCallback):
        def _on_rollout_start(self):
            self.training_env.env_method("set_kl_coef", 0.5)

        def _on_step(self):
            for info, reward, logprob in zip(
                self.locals["infos"], self.locals["rewards"], self.locals["log_probs"], strict=True
            ):
                if info:
                    assert info["kl_coef"] == 0.5
                    shaped = info["task_reward"] + 0.5 * (info["ref_logprob"] - float(logprob))
                    assert float(reward) == pytest.approx(shaped, abs=1e-4)
            return True

    env = DummyVecEnv(
        [lambda: gym.make("textrl_env:TextRL-v0", task="copy", model=tiny_llama, kl_coef=0.1)] * 4
    )
    agent = make_agent(GRPO, env, collector="step", group_size=2)
    assert agent.learn(1, callback=Change()).num_timesteps > 0


def test_trpo_of_sb3_contrib_trains_the_language_policy(tiny_llama):
    env = GymVecEnv(make_env(tiny_llama, num_envs=4))
    model = TRPO(
        LMPolicy, env, n_steps=8, batch_size=8, seed=0, policy_kwargs={"model": tiny_llama}
    )
    before = [p.clone() for p in model.policy.parameters()]
    model.learn(32, callback=KLCallback())
    assert not all(map(torch.equal, before, model.policy.parameters()))


def test_temperatures_that_differ_are_refused_by_the_callback(tiny_llama):
    env = GymVecEnv(make_env(tiny_llama, num_envs=4, temperature=0.5))
    model = stable_baselines3.PPO(
        LMPolicy, env, n_steps=8, batch_size=8, policy_kwargs={"model": tiny_llama}
    )
    with pytest.raises(ValueError, match=r"temperature is 1\.0 and the environment's 0\.5"):
        model.learn(32, callback=KLCallback())


def test_schedules_end_at_zero(tiny_llama):
    """Also where the last rollout goes far beyond the total."""
    seen = []

    def schedule(progress):
        seen.append(progress)
        return 1e-4 * progress

    make_agent(GRPO, make_env(tiny_llama), learning_rate=schedule).learn(50)
    assert min(seen) == 0.0
    PPO("MlpPolicy", "CartPole-v1", n_steps=64, clip_range=lambda p: 0.2 * p, seed=0).learn(70)


def test_an_agent_without_an_environment_says_so(tiny_llama, tmp_path):
    make_agent(GRPO, make_env(tiny_llama)).save(tmp_path / "agent")
    with pytest.raises(ValueError, match="needs an environment"):
        GRPO.load(tmp_path / "agent").learn(10)
    with pytest.raises(ValueError, match="env is None"):
        GRPO("LMPolicy", None)
    with pytest.raises(NotADirectoryError, match="is a file"):
        make_agent(GRPO, make_env(tiny_llama)).save_pretrained(str(tmp_path / "agent.zip"))


def test_options_of_grpo_reach_the_advantages(tiny_llama):
    for options in ({}, {"scale_rewards": "none"}, {"scale_rewards": "batch", "epsilon": 0.5}):
        batch = collected(GRPO, tiny_llama, {"temperature": 2.0}, **options).rollout_buffer
        expected = group_advantages(
            batch.episode_returns, batch.groups,
            scale=options.get("scale_rewards", "group"), eps=options.get("epsilon", 1e-4),
        )  # fmt: skip
        assert expected.abs().max() > 0
        torch.testing.assert_close(batch.advantages[:, 0], expected)


@pytest.mark.parametrize("agent_class", [PPO, GRPO])
def test_clip_ranges_reach_the_loss(tiny_llama, agent_class):
    agent = collected(
        agent_class, tiny_llama, clip_range=0.1, clip_range_high=0.4, clip_range_lower=3.0
    )
    batch = agent.rollout_buffer
    for ratio, advantage, expected in ((1.5, 1.0, -1.4), (0.5, -1.0, 0.9), (4.0, -1.0, 3.0)):
        batch.advantages = torch.full(batch.mask.shape, advantage)
        loss, _ = agent.policy_loss(batch.logprobs + np.log(ratio), batch)
        torch.testing.assert_close(loss, torch.full_like(loss, expected))


def test_the_controller_is_told_the_sum_over_tokens(tiny_llama, monkeypatch):
    told = []
    monkeypatch.setattr(FixedKL, "update", lambda self, kl, n: told.append((kl, n)))
    agent = make_agent(
        GRPO, make_env(tiny_llama, reward=lambda text, sample: len(set(text))),
        kl_controller=FixedKL(0.1), learning_rate=1e-2,
    )  # fmt: skip
    agent.learn(100)
    batch = agent.rollout_buffer
    log_ratio = torch.where(batch.mask, batch.logprobs - batch.ref_logprobs, 0.0)
    assert told[-1] == (pytest.approx(float(log_ratio.sum(1).mean()), abs=1e-5), 8)
    assert told[-1][0] > 1e-3
    assert agent.mdp.kl_coef == 0.1


def test_generate_stops_where_the_environment_does(tiny_llama):
    free = make_agent(GRPO, make_env(tiny_llama, max_new_tokens=20))
    text = free.generate(["copy:abc="])[0]
    stop = text[3]
    agent = make_agent(GRPO, make_env(tiny_llama, max_new_tokens=20, stop=[stop]))
    assert agent.generate(["copy:abc="])[0] == text[: text.index(stop)]


def test_sampled_evaluations_depend_on_their_seed(tiny_llama):
    policy = make_agent(GRPO, make_env(tiny_llama)).policy
    task = FunctionTask(["a=", "b=", "c="], score=lambda text, sample: 0.0, max_new_tokens=6)
    runs = [
        [e.text for e in evaluate_task(policy, task, deterministic=False, seed=seed).endings]
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_the_value_head_starts_at_zero_and_dropout_stays_off(tiny_gpt2):
    agent = collected(PPO, tiny_gpt2)
    assert not agent.rollout_buffer.values.any()
    assert agent.policy.lm.config.resid_pdrop > 0
    agent.policy.set_training_mode(True)
    first, second = (agent.evaluate(agent.rollout_buffer).logprobs for _ in range(2))
    assert torch.equal(first, second)
