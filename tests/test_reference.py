"""log π_ref is that of a full forward pass, and whole completions score as their steps do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import EOS, ids, small_gpt2, small_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from textrl_env.config import TextRLConfig
from textrl_env.core import TokenMDP
from textrl_env.logprobs import completion_logprobs, pad_left, pad_right
from textrl_env.reference import Reference
from textrl_env.rewards import Reward, RewardError
from textrl_env.tasks import FunctionTask
from textrl_env.token_mask import TokenMask

MODELS = {"llama": small_llama(), "gpt2": small_gpt2()}
TRIVIAL = TokenMask(259, [EOS])
LETTERS = TokenMask(259, [EOS], ids("abcd"), min_new_tokens=2)


def expected_logprob(model, prompt, completion, t, temperature, mask):
    """log π_ref(completion[t]) from a full forward pass, renormalised by hand."""
    sequence = torch.tensor([[*prompt, *completion[:t]]])
    with torch.no_grad():
        logits = model(sequence).logits[0, -1].double() / temperature
    allowed = torch.from_numpy(mask(t))
    return float(logits[completion[t]] - logits[allowed].logsumexp(0))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mask", [TRIVIAL, LETTERS], ids=["all", "masked"])
def test_steps_score_as_a_full_forward_pass(name, temperature, mask):
    """Slots of different lengths, which restart at different times and are not all stepped."""
    model, generator = MODELS[name], np.random.default_rng(0)
    reference = Reference(model, 3, 40, temperature, mask)
    prompts, completions = [[]] * 3, [[]] * 3

    def restart(slots, lengths):
        for slot, length in zip(slots, lengths, strict=True):
            prompts[slot], completions[slot] = generator.integers(3, 259, length), []
        reference.restart(np.array(slots), [prompts[slot] for slot in slots])

    def score(slots):
        actions = np.array(
            [generator.choice(np.flatnonzero(mask(len(completions[slot])))) for slot in slots]
        )
        scores = reference.score(np.array(slots), actions)
        assert scores.dtype == np.float64
        for slot, action, logprob in zip(slots, actions, scores, strict=True):
            t = len(completions[slot])
            completions[slot] = [*completions[slot], action]
            expected = expected_logprob(
                model, prompts[slot], completions[slot], t, temperature, mask
            )
            assert logprob == pytest.approx(expected, abs=2e-5)

    restart([0, 1, 2], [1, 12, 5])
    for _ in range(4):
        score([0, 1, 2])
    restart([1], [2])  # one ends while the others go on
    score([0, 1, 2])
    score([2, 0])  # and a subset, in another order
    restart([2, 0], [7, 1])
    for _ in range(3):
        score([0, 1, 2])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_completions_score_as_a_full_forward_pass(name, max_tokens):
    model, generator = MODELS[name], np.random.default_rng(1)
    prompts = [generator.integers(3, 259, n) for n in (3, 17, 1, 8)]
    completions = [generator.integers(3, 259, n) for n in (6, 1, 4, 9)]
    scores = completion_logprobs(model, prompts, completions, 0.7, TRIVIAL, max_tokens)
    assert scores.shape == (4, 9)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for t in range(9):
            expected = 0.0
            if t < len(completion):
                expected = expected_logprob(model, prompt, completion, t, 0.7, TRIVIAL)
            assert scores[i, t] == pytest.approx(expected, abs=2e-5)


def test_a_step_costs_one_forward_pass_of_one_token():
    model = MODELS["llama"]
    widths = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _module, args: widths.append(args[0].shape)
    )
    try:
        reference = Reference(model, 4, 40, 1.0, TRIVIAL)
        reference.restart(np.arange(4), [np.arange(3, 3 + n) for n in (1, 5, 2, 9)])
        assert widths == []  # nothing is computed before it is needed
        for _ in range(5):
            reference.score(np.arange(4), np.full(4, 9))
    finally:
        hook.remove()
    # The prompts but for their last tokens, then a token of each.
    assert widths == [(3, 8), *[(4, 1)] * 5]


def test_padding():
    left, left_mask = pad_left([np.array([1, 2, 3]), np.array([4])], fill=9)
    assert left.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert left_mask.tolist() == [[True] * 3, [False, False, True]]
    right, right_mask = pad_right([np.array([0.5]), np.array([1.0, 2.0])], dtype=np.float64)
    assert right.tolist() == [[0.5, 0.0], [1.0, 2.0]]
    assert right_mask.tolist() == [[True, False], [True, True]]


# Whole completions and single steps


def letters(completion, sample):
    return completion.count("a") - 0.25 * len(completion)


TASK = FunctionTask(
    ["say a", "b?", "a longer prompt: c", "d"], ["aa", None, "c", "d"], score=letters, stop=["##"]
)
REWARDS = {
    "task": None,
    "per token": Reward(letters, per="token"),
    "batched": Reward(lambda texts, samples: [letters(t, None) for t in texts], batched=True),
    "failing": lambda text, sample: 1 / text.count("a"),
    "failing per token": Reward(lambda text, sample: 1 / text.count("a"), per="token"),
}


def step_by_step(mdp, prompt_indices, draws, logprobs):
    """Runs the episodes in the slots of `mdp`; returns what happened, by completion and step."""
    slots = np.arange(len(prompt_indices))
    mdp.restart(slots, prompt_indices)
    tokens = [[] for _ in slots]
    infos = [[] for _ in slots]
    ends = [None] * len(slots)
    for t in range(mdp.max_new_tokens):
        running = np.flatnonzero(~mdp.done)
        if not len(running):
            break
        actions = np.empty(len(running), dtype=np.int64)
        for i, slot in enumerate(running):
            allowed = np.flatnonzero(mdp.action_masks()[slot])
            actions[i] = allowed[draws[slot, t] % len(allowed)]
        if mdp.config.kl_mode == "policy":
            mdp.report_logprobs(running, logprobs[running, t])
        transition = mdp.step(running, actions)
        for i, slot in enumerate(running):
            tokens[slot].append(actions[i])
            infos[slot].append({"reward": float(transition.rewards[i]), **transition.info(i)})
            if transition.terminated[i] or transition.truncated[i]:
                ends[slot] = (bool(transition.terminated[i]), bool(transition.truncated[i]))
    return [np.array(t) for t in tokens], infos, ends


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 5),
    kl_mode=st.sampled_from(["policy", "reference", "none"]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3", "abs"]),
    on_limit=st.sampled_from(["terminate", "truncate"]),
    allowed=st.none() | st.just(tuple(ids("ab#"))),
    min_new_tokens=st.integers(0, 2),
    temperature=st.sampled_from([1.0, 0.6]),
    reward=st.sampled_from(list(REWARDS)),
    on_error=st.sampled_from(["mask", -1.0]),
)
@pytest.mark.filterwarnings("ignore:reward .* raised:UserWarning")
def test_completions_score_as_their_steps(tiny_llama, seed, n, reward, allowed, **options):
    """Equal to the bit but for log π_ref, which another order of summation rounds differently."""
    config = TextRLConfig(
        task=TASK,
        model=tiny_llama,
        reward=REWARDS[reward],
        allowed_tokens=allowed,
        max_new_tokens=6,
        kl_coef=0.3,
        device="cpu",
        dtype="float64",
        **options,
    )
    generator = np.random.default_rng(seed)
    mdp = TokenMDP(config, n)
    indices = generator.integers(0, len(TASK), n).tolist()
    draws = generator.integers(0, 10**6, (n, 6))
    logprobs = -generator.random((n, 6))
    tokens, infos, ends = step_by_step(mdp, indices, draws, logprobs)

    scored = mdp.score_completions(
        indices, tokens, [row[: len(t)] for row, t in zip(logprobs, tokens, strict=True)]
    )
    assert scored.lengths.tolist() == [len(t) for t in tokens]
    whole = [[] for _ in tokens]
    for step, rows in zip(scored.steps, scored.rows, strict=True):
        for position, row in enumerate(rows):
            info = step.info(position)
            whole[row].append({"reward": float(step.rewards[position]), **info})
            end = (bool(step.terminated[position]), bool(step.truncated[position]))
            assert end == (ends[row] if len(whole[row]) == len(tokens[row]) else (False, False))
    inexact = ("reward", "ref_logprob", "kl")
    for one, other in zip(infos, whole, strict=True):
        assert [info.keys() for info in one] == [info.keys() for info in other]
        for mine, theirs in zip(one, other, strict=True):
            for key, value in mine.items():
                if key in inexact:
                    assert value == pytest.approx(theirs[key], rel=1e-8, abs=1e-8)
                else:
                    assert value == theirs[key], key
            assert theirs["reward"] == theirs["task_reward"] - theirs["kl_coef"] * theirs["kl"]
    assert [ending.text for ending in scored.endings] == [info[-1]["text"] for info in infos]
    np.testing.assert_array_equal(
        scored.field("num_tokens").max(1), [info[-1]["num_tokens"] for info in infos]
    )


def mdp_of(model, **options):
    options = {"task": TASK, "model": model, "max_new_tokens": 4, "device": "cpu", **options}
    return TokenMDP(TextRLConfig(**options), 2)


def test_all_completions_are_scored_in_one_call(tiny_llama):
    calls = []

    def reward(completions, samples):
        calls.append(completions)
        return [0.0] * len(completions)

    mdp = mdp_of(tiny_llama, kl_mode="none", reward=Reward(reward, batched=True))
    mdp.score_completions([0, 1], [np.array([*ids("a"), EOS]), np.array([EOS])])
    assert [sorted(call) for call in calls] == [["", "a"]]


def test_a_failure_before_the_end_masks_the_episode(tiny_llama):
    reward = Reward(lambda text, sample: 1 / (len(text) - 1), per="token")
    mdp = mdp_of(tiny_llama, kl_mode="none", reward=reward, on_error="mask")
    slots = np.arange(2)
    mdp.restart(slots, [0, 1])
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        first = mdp.step(slots, np.array(ids("ab")))
    assert first.task_rewards.tolist() == [0.0, 0.0]
    assert first.endings == {}
    mdp.step(slots, np.array(ids("cd")))
    last = mdp.step(slots, np.array([EOS, EOS]))
    assert last.task_rewards.tolist() == [1.0, 1.0]
    assert last.info(0)["masked"]
    assert "ZeroDivisionError" in last.info(0)["reward_error"]

    mdp.restart(slots, [0, 1])
    fresh = mdp.step(slots, np.array([EOS, EOS]))
    assert "masked" not in fresh.info(0)


@pytest.mark.parametrize(
    ("indices", "completions", "message"),
    [
        ([0], [[]], "Completion 0 has no token"),
        (
            [0, 1],
            [[EOS], ids("a")],
            "Completion 1 has 1 tokens, but its episode does not end after 1",
        ),
        (
            [0],
            [[*ids("a"), EOS, *ids("b")]],
            "Completion 0 has 3 tokens, but its episode ends after 2",
        ),
        ([0], [ids("abcde")], "ends after 4"),
        ([0], [[259]], r"Action 259 is outside the vocabulary; use a token id in \[0, 258\]"),
        ([0, 1], [[EOS]], "Got 1 completions for 2 prompts"),
        ([], [], "Got 0 completions for 0 prompts"),
    ],
)
def test_unusable_completions(tiny_llama, indices, completions, message):
    arrays = [np.array(c, dtype=np.int64) for c in completions]
    with pytest.raises(ValueError, match=message):
        mdp_of(tiny_llama).score_completions(indices, arrays)


def test_masked_tokens_in_completions(tiny_llama):
    mdp = mdp_of(tiny_llama, allowed_tokens=ids("ab"))
    with pytest.raises(ValueError, match=r"Action 102 \('c'\) is masked after 1 tokens"):
        mdp.score_completions([0], [np.array([*ids("ac"), EOS])])


def test_completions_need_the_log_probabilities_of_mode_policy(tiny_llama):
    mdp = mdp_of(tiny_llama, kl_mode="policy")
    with pytest.raises(RuntimeError, match="hand logprobs over with the completions"):
        mdp.score_completions([0], [np.array([EOS])])
    with pytest.raises(ValueError, match="differ in length"):
        mdp.score_completions([0], [np.array([EOS])], [np.array([-1.0, -1.0])])
    with pytest.raises(ValueError, match="log-probability nan is not finite"):
        mdp.score_completions([0], [np.array([EOS])], [np.array([np.nan])])


def test_a_reward_that_raises_in_completions(tiny_llama):
    mdp = mdp_of(tiny_llama, reward=lambda text, sample: 1 / 0)
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        mdp.score_completions([0], [np.array([EOS])])


def test_a_reference_of_its_own(tiny_llama, save_model):
    other = small_llama(seed=7)
    mdp = mdp_of(tiny_llama, reference=save_model(other), kl_mode="none")
    mdp.restart(np.array([0]), [0])
    info = mdp.step(np.array([0]), np.array([EOS])).info(0)
    prompt = mdp.prompt(0).ids
    assert info["ref_logprob"] == pytest.approx(
        expected_logprob(other, prompt, [EOS], 0, 1.0, TRIVIAL), abs=2e-5
    )
    assert info["kl"] == 0.0


def test_without_kl_and_reference_no_model_is_loaded(tiny_llama):
    mdp = mdp_of(tiny_llama, kl_mode="none")
    mdp.restart(np.array([0]), [0])
    assert mdp.step(np.array([0]), np.array([EOS])).info(0)["ref_logprob"] == 0.0
    assert mdp.reference is None


def test_a_reference_of_another_vocabulary_is_refused_before_it_is_loaded(tiny_llama, save_model):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        other = save_model(LlamaForCausalLM(config))
    with pytest.raises(ValueError, match=r"has a vocabulary of 300 tokens and .* of 259"):
        mdp_of(tiny_llama, reference=other)


def test_an_unknown_reference_is_refused_at_once(tiny_llama):
    with pytest.raises(ValueError, match="Model 'no-such-model' could not be loaded"):
        mdp_of(tiny_llama, reference="no-such-model")
