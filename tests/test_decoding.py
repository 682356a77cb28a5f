"""`SlotDecoder` gives the logits of a full forward pass, whatever happens to the other slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import CONTEXT, small_gpt2, small_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from textrl_env.decoding import SlotDecoder

MODELS = {
    "llama": small_llama(),
    "llama-eager": small_llama(attn_implementation="eager"),
    "gpt2": small_gpt2(),  # learned positions: a wrong one changes the logits
}


def full_forward(model, sequence):
    with torch.no_grad():
        return model(torch.tensor([sequence])).logits[0, -1]


def random_tokens(generator, count):
    return generator.integers(3, 259, count)


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


class Checked:
    """A decoder beside the sequences that it should hold."""

    def __init__(self, model, num_slots=4, capacity=40):
        self.model = model
        self.decoder = SlotDecoder(model, num_slots, capacity)
        self.sequences = [[] for _ in range(num_slots)]

    def restart(self, slots):
        self.decoder.restart(np.array(slots))
        for slot in slots:
            self.sequences[slot] = []

    def advance(self, slots, tokens):
        logits = self.decoder.advance(np.array(slots), tokens)
        for slot, new, row in zip(slots, tokens, logits, strict=True):
            self.sequences[slot] = [*self.sequences[slot], *map(int, new)]
            expected = full_forward(self.model, self.sequences[slot])
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
        assert self.decoder.lengths.tolist() == [len(s) for s in self.sequences]

    def copy(self, sources, targets):
        self.decoder.copy(np.array(sources), np.array(targets))
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target] = self.sequences[source]


def test_ragged_prefill_then_single_tokens(model):
    generator = np.random.default_rng(0)
    checked = Checked(model)
    checked.advance([0, 1, 2, 3], [random_tokens(generator, n) for n in (1, 9, 4, 17)])
    for _ in range(5):
        checked.advance([0, 1, 2, 3], generator.integers(3, 259, (4, 1)))


def test_subsets_in_any_order(model):
    generator = np.random.default_rng(1)
    checked = Checked(model)
    checked.advance([2, 0], [random_tokens(generator, 3), random_tokens(generator, 6)])
    checked.advance([3, 0, 1], [random_tokens(generator, n) for n in (5, 2, 1)])
    checked.advance([1, 0, 3, 2], generator.integers(3, 259, (4, 1)))


def test_restart_leaves_no_trace_of_the_longer_sequence_before(model):
    generator = np.random.default_rng(2)
    checked = Checked(model)
    checked.advance([0, 1, 2, 3], [random_tokens(generator, 20) for _ in range(4)])
    checked.restart([1, 3])
    checked.advance([1, 3], [random_tokens(generator, 2), random_tokens(generator, 7)])
    checked.advance([0, 1, 2, 3], generator.integers(3, 259, (4, 1)))


def test_copies_go_their_own_way(model):
    generator = np.random.default_rng(3)
    checked = Checked(model)
    checked.advance([0, 1], [random_tokens(generator, 8), random_tokens(generator, 3)])
    checked.copy([0, 1], [2, 3])
    checked.advance([0, 1, 2, 3], generator.integers(3, 259, (4, 1)))
    checked.copy([2], [0])
    checked.advance([0, 2], generator.integers(3, 259, (2, 1)))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_history(data):
    checked = Checked(MODELS[data.draw(st.sampled_from(["llama", "gpt2"]))], 3, capacity=24)
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(data.draw(st.integers(1, 6))):
        slots = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        action = data.draw(st.sampled_from(["advance", "advance", "restart"]))
        if action == "restart":
            checked.restart(slots)
            continue
        counts = [data.draw(st.integers(1, 6)) for _ in slots]
        fits = [len(checked.sequences[s]) + c <= 24 for s, c in zip(slots, counts, strict=True)]
        if all(fits):
            checked.advance(slots, [random_tokens(generator, c) for c in counts])


def test_capacity_is_the_last_token_that_fits(model):
    checked = Checked(model, 1, capacity=5)
    checked.advance([0], [np.arange(3, 8)])
    with pytest.raises(ValueError, match=r"then hold \[6\].*room for 5"):
        checked.decoder.advance(np.array([0]), [np.array([9])])
    assert checked.decoder.lengths.tolist() == [5]


def test_every_slot_gets_a_token(model):
    decoder = SlotDecoder(model, 2, 5)
    with pytest.raises(ValueError, match="at least one"):
        decoder.advance(np.array([0, 1]), [np.array([3]), np.array([], dtype=np.int64)])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_context_of_the_model_is_the_limit(name):
    SlotDecoder(MODELS[name], 1, CONTEXT)
    with pytest.raises(ValueError, match=rf"up to {CONTEXT + 1} tokens.*context has {CONTEXT}"):
        SlotDecoder(MODELS[name], 1, CONTEXT + 1)


def test_attention_that_needs_another_cache_is_refused():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MistralForCausalLM(config).eval()
    checked = Checked(model, 1, capacity=8)  # within the window nothing slides
    checked.advance([0], [np.arange(3, 11)])
    with pytest.raises(ValueError, match="window of 8 tokens, and up to 9 are needed"):
        SlotDecoder(model, 1, 9)


def test_a_step_computes_one_token_however_long_the_sequence(model):
    """The cost per token does not grow: the forward pass sees the new tokens only."""
    widths = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _module, args: widths.append(args[0].shape[-1])
    )
    try:
        decoder = SlotDecoder(model, 2, 40)
        decoder.advance(np.arange(2), [np.arange(3, 13), np.arange(3, 8)])
        for _ in range(5):
            decoder.advance(np.arange(2), np.array([[3], [4]]))
    finally:
        hook.remove()
    assert widths == [10, 1, 1, 1, 1, 1]
