"""Sampling depends on the run, the rollout and the prompt, and on nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.sampling import PromptSampler, sample_tokens, sampling_uniforms


def test_siblings_differ_and_runs_agree():
    prompts = [5, 5, 5, 8]
    first = sampling_uniforms(3, 1, prompts, 6)
    again = sampling_uniforms(3, 1, prompts, 6)
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first)) == first.size
    for seed, rollout in ((4, 1), (3, 2)):
        assert not np.isin(sampling_uniforms(seed, rollout, prompts, 6), first).any()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_prompts_numbers_do_not_depend_on_the_other_prompts(prompts, rollout):
    together = sampling_uniforms(0, rollout, prompts, 3)
    for prompt in set(prompts):
        rows = [i for i, p in enumerate(prompts) if p == prompt]
        alone = sampling_uniforms(0, rollout, [prompt] * len(rows), 3)
        np.testing.assert_array_equal(together[rows], alone)


def test_tokens_follow_the_distribution():
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    uniforms = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    tokens = sample_tokens(probabilities.log().expand(10_000, 4), uniforms)
    counts = torch.bincount(tokens, minlength=4)
    assert counts[1] == 0
    torch.testing.assert_close(counts / 10_000, probabilities.float(), atol=2e-4, rtol=0)


@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
@settings(max_examples=50, deadline=None)
def test_a_masked_token_is_never_drawn(seed, vocab):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator)
    allowed = torch.rand(vocab, generator=generator) < 0.5
    allowed[torch.randint(vocab, (1,), generator=generator)] = True
    log_dist = torch.log_softmax(logits.masked_fill(~allowed, float("-inf")), 0)
    edge = np.nextafter(1.0, 0.0)
    uniforms = torch.tensor([0.0, edge, 0.5], dtype=torch.float64)
    tokens = sample_tokens(log_dist.expand(3, vocab), uniforms)
    assert allowed[tokens].all()


@pytest.mark.parametrize("counts", [[3, 3, 3, 3], [5, 7], [1, 2, 9], [12], [30]])
def test_every_epoch_has_every_prompt_once(counts):
    sampler = PromptSampler(6, seed=1)
    drawn = np.concatenate([sampler.next(count) for count in counts])
    for epoch in range(len(drawn) // 6):
        assert sorted(drawn[6 * epoch : 6 * epoch + 6]) == list(range(6))
    if len(drawn) > 12:
        assert not np.array_equal(drawn[:6], drawn[6:12])


@pytest.mark.parametrize("cut", range(14))
def test_prompts_resume_at_every_position(cut):
    """Neither repeated nor skipped, in the middle of an epoch and at its edge."""
    whole = PromptSampler(6, seed=1).next(20)
    resumed = PromptSampler(6, seed=1)
    resumed.position = cut
    np.testing.assert_array_equal(resumed.next(20 - cut), whole[cut:])
