"""Small models with random weights, so that the tests do not depend on the embedded one."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # an unknown model name must not go to the network

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from textrl_env.pretrain import byte_tokenizer

torch.set_num_threads(1)

PAD, BOS, EOS = 0, 1, 2
CONTEXT = 128  # tokens that the small models take


def ids(text: str) -> list[int]:
    """The tokens of a text: a byte's is its value plus three."""
    return [byte + 3 for byte in text.encode()]


def small_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,  # far from uniform: a wrong position or mask shows
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def small_gpt2(seed: int = 0) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=259,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="session", autouse=True)
def sb3_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every `learn` makes a folder for its logs; keep them with the other temporary files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SB3_LOGDIR", str(tmp_path_factory.mktemp("logs")))
        yield


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes a model, with the byte tokenizer unless another is given; returns the directory."""

    def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
        directory: Path = tmp_path_factory.mktemp("model")
        model.save_pretrained(directory)
        (tokenizer or byte_tokenizer()).save_pretrained(directory)
        return str(directory)

    return save


@pytest.fixture(scope="session")
def tiny_llama(save_model: Callable[..., str]) -> str:
    return save_model(small_llama())


@pytest.fixture(scope="session")
def tiny_gpt2(save_model: Callable[..., str]) -> str:
    return save_model(small_gpt2())


@pytest.fixture(scope="session")
def pad_is_eos(save_model: Callable[..., str]) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return save_model(small_llama(), tokenizer)


@pytest.fixture(scope="session")
def no_pad(save_model: Callable[..., str]) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    return save_model(small_llama(), tokenizer)
