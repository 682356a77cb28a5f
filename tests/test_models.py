"""Loading by name: what is found, what is shared, and what is said where nothing is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import CONTEXT, EOS, ids, small_llama
from transformers import LlamaConfig

from textrl_env import models
from textrl_env.pretrain import byte_tokenizer


def test_a_model_is_shared_whichever_way_it_is_named(tiny_llama):
    assert models.load_frozen(tiny_llama, "cpu") is models.load_frozen(Path(tiny_llama), "cpu")
    assert models.load_tokenizer(tiny_llama) is models.load_tokenizer(Path(tiny_llama))


def test_a_frozen_model_has_nothing_to_train(tiny_llama):
    model = models.load_frozen(tiny_llama, "cpu")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_trainable_model_is_a_copy(tiny_llama):
    model = models.load_causal_lm(tiny_llama, "cpu")
    assert model is not models.load_causal_lm(tiny_llama, "cpu")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtype(tiny_llama, dtype):
    assert models.load_causal_lm(tiny_llama, "cpu", dtype).dtype == getattr(torch, dtype)


def test_auto_dtype_is_float32_on_a_cpu():
    assert models.choose_dtype("auto", "cpu") == torch.float32
    assert models.choose_dtype("auto", "cuda:1") == torch.bfloat16


@pytest.mark.parametrize(
    "load", [models.load_tokenizer, models.load_config, models.load_causal_lm, models.load_frozen]
)
@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model", "/no/such/folder"])
def test_unknown_model(load, name):
    with pytest.raises(ValueError, match=f"Model '{name}' could not be loaded.*'tiny'"):
        load(name)


def test_unknown_device(tiny_llama):
    with pytest.raises(ValueError, match="device is 'nonsense', which torch cannot use here"):
        models.load_causal_lm(tiny_llama, "nonsense")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_absent_device(tiny_llama):
    with pytest.raises(ValueError, match="device is 'cuda', which torch cannot use here"):
        models.load_causal_lm(tiny_llama, "cuda")
    assert models.choose_device("auto") == "cpu"


def test_unknown_dtype(tiny_llama):
    with pytest.raises(ValueError, match="dtype is 'float7'; use 'auto'"):
        models.load_causal_lm(tiny_llama, "cpu", "float7")


def test_a_tokenizer_needs_an_end(save_model):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    name = save_model(small_llama(), tokenizer)
    with pytest.raises(ValueError, match=r"has no end-of-sequence token.*set `eos_token`"):
        models.load_tokenizer(name)


def test_end_tokens_of_tokenizer_and_configuration_together(save_model):
    model = small_llama()
    model.config.eos_token_id = [EOS, *ids("z")]
    assert models.eos_token_ids(save_model(model)) == [EOS, *ids("z")]
    model.config.eos_token_id = None
    assert models.eos_token_ids(save_model(model)) == [EOS]


def test_context():
    config = LlamaConfig(max_position_embeddings=CONTEXT)
    models.check_context(config, CONTEXT)
    with pytest.raises(ValueError, match=r"lower max_prompt_tokens or max_new_tokens"):
        models.check_context(config, CONTEXT + 1)


def test_a_model_that_is_written_again_is_loaded_again(tiny_llama, tmp_path):
    directory = shutil.copytree(tiny_llama, tmp_path / "model")
    first = models.load_frozen(directory)
    assert models.load_frozen(directory) is first
    changed = models.load_causal_lm(directory)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(2)
    changed.save_pretrained(directory)
    second = models.load_frozen(directory)
    assert torch.equal(second.lm_head.weight, changed.lm_head.weight)
    assert not torch.equal(second.lm_head.weight, first.lm_head.weight)


def test_loading_a_local_model_is_quiet(tiny_llama, capfd):
    models.load_causal_lm(tiny_llama)
    assert capfd.readouterr().err == ""


def test_a_typing_error_is_found_without_the_network():
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        models.load_tokenizer("tinny")
