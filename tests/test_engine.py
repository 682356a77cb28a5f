"""The built-in engine against a loop that runs the whole sequence for every token."""

import copy

import numpy as np
import pytest
import torch

from agents.engines import TorchEngine
from agents.sampling import sample_tokens, sampling_uniforms
from textrl_env import models
from textrl_env.config import TextRLConfig
from textrl_env.core import TokenMDP
from textrl_env.logprobs import log_distribution
from textrl_env.termination import Finish
from textrl_env.token_mask import TokenMask


def make_mdp(model, **options):
    options = {"task": "addition", "max_new_tokens": 6, "kl_mode": "none", **options}
    return TokenMDP(TextRLConfig(model=model, **options), num_slots=1)


def complete_naively(model, mdp, prompt, temperature, uniforms):
    """One sequence, without cache or batch."""
    tokens, logprobs = [], []
    while True:
        ids = torch.tensor([[*prompt.ids, *tokens]])
        with torch.no_grad():
            logits = model(ids).logits[:, -1]
        t = len(tokens)
        log_dist = log_distribution(logits, torch.tensor([t]), temperature, mdp.token_mask)
        if uniforms is None:
            token = int(log_dist.argmax())
        else:
            token = int(sample_tokens(log_dist, torch.tensor([uniforms[t]]))[0])
        tokens.append(token)
        logprobs.append(float(log_dist[0, token]))
        reason = mdp.termination.reasons(
            lambda _: np.array(tokens), np.array([token]), np.array([t + 1]), [prompt.sample]
        )[0]
        if reason != Finish.RUNNING:
            return tokens, logprobs, reason


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_new_tokens": 3},
        {"allowed_tokens": range(50, 70)},
        {"stop": ["1", "7"]},
        {"task": "sort", "max_new_tokens": 9},
    ],
)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gpt2"])
def test_generation_equals_the_naive_loop(family, options, sampled, temperature, request):
    name = request.getfixturevalue(family)
    mdp, model = make_mdp(name, **options), models.load_causal_lm(name)
    indices = [0, 0, 3, 11, 3, 0]
    prompts = [mdp.prompt(i) for i in indices]
    uniforms = sampling_uniforms(0, 0, indices, mdp.max_new_tokens) if sampled else None
    completions = TorchEngine(model, max_slots=4).generate(
        prompts, mdp.termination, mdp.token_mask, temperature, uniforms
    )
    for i, prompt in enumerate(prompts):
        row = None if uniforms is None else uniforms[i]
        tokens, logprobs, reason = complete_naively(model, mdp, prompt, temperature, row)
        assert completions.tokens[i].tolist() == tokens
        np.testing.assert_allclose(completions.logprobs[i], logprobs, atol=2e-5)
        assert completions.reasons[i] == reason


def test_siblings_differ(tiny_llama):
    mdp = make_mdp(tiny_llama)
    uniforms = sampling_uniforms(0, 0, [2] * 8, mdp.max_new_tokens)
    completions = TorchEngine(models.load_causal_lm(tiny_llama)).generate(
        [mdp.prompt(2)] * 8, mdp.termination, mdp.token_mask, 1.0, uniforms
    )
    assert len({tuple(tokens) for tokens in completions.tokens}) > 4


def test_new_weights_are_used_at_once(tiny_llama):
    """No cache of an earlier call survives an update."""
    mdp, model = make_mdp(tiny_llama), models.load_causal_lm(tiny_llama)
    prompts = [mdp.prompt(i) for i in range(4)]
    warm = TorchEngine(model)
    before = warm.generate(prompts, mdp.termination, mdp.token_mask)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    after = warm.generate(prompts, mdp.termination, mdp.token_mask)
    cold = TorchEngine(copy.deepcopy(model)).generate(prompts, mdp.termination, mdp.token_mask)
    assert [t.tolist() for t in after.tokens] == [t.tolist() for t in cold.tokens]
    np.testing.assert_array_equal(np.concatenate(after.logprobs), np.concatenate(cold.logprobs))
    assert [t.tolist() for t in before.tokens] != [t.tolist() for t in after.tokens]


def test_only_the_end_of_sequence_may_come(tiny_llama):
    mdp, model = make_mdp(tiny_llama), models.load_causal_lm(tiny_llama)
    only_eos = TokenMask(mdp.vocab_size, mdp.termination.eos_ids, allowed_tokens=[])
    completions = TorchEngine(model).generate([mdp.prompt(0)], mdp.termination, only_eos)
    assert completions.tokens[0].tolist() == mdp.termination.eos_ids.tolist()
    assert completions.logprobs[0].tolist() == [0.0]
    assert completions.reasons.tolist() == [Finish.EOS]
