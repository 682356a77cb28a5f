"""Loading tokenizers and causal language models by name, directory or hub id."""

from __future__ import annotations

import difflib
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = {"tiny": Path(__file__).parent / "tiny"}


def resolve_model(name: str | os.PathLike[str]) -> str:
    """Returns what ``from_pretrained`` loads: the directory of an embedded model, or `name`.

    Examples:
        >>> resolve_model("tiny").endswith("tiny")
        True

    Raises:
        ValueError: The name is almost that of an embedded model.
    """
    close = difflib.get_close_matches(str(name), EMBEDDED, n=1)
    if close and str(name) not in EMBEDDED and not Path(name).exists():
        raise ValueError(f"There is no model {str(name)!r}; did you mean {close[0]!r}?")
    return str(EMBEDDED.get(str(name), name))


def _load(loader: Any, name: str | os.PathLike[str], **kwargs: Any) -> Any:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if Path(resolve_model(name)).is_dir():
        logging.disable_progress_bar()  # it is of use for downloads
    try:
        return loader.from_pretrained(resolve_model(name), **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Model {str(name)!r} could not be loaded by {loader.__name__}: it is neither one of "
            f"the embedded models {sorted(EMBEDDED)}, nor a directory that transformers loads, nor "
            f"a hub id that can be reached from here ({_first_line(error)})."
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()


def _written(name: str) -> int:
    """When a local model was last written, so that the caches below do not keep an old one."""
    directory = Path(resolve_model(name))
    if not directory.is_dir():
        return 0
    return max((file.stat().st_mtime_ns for file in directory.iterdir()), default=0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_tokenizer(name: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model, shared between callers.

    Raises:
        ValueError: The model is unknown, or its tokenizer has no end-of-sequence token.

    Examples:
        >>> load_tokenizer("tiny").eos_token
        '<eos>'
    """
    return _tokenizer(os.fspath(name), _written(os.fspath(name)))


@functools.lru_cache(maxsize=8)
def _tokenizer(name: str, written: int) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer = _load(AutoTokenizer, name)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of {name!r} has no end-of-sequence token, so an episode could "
            "not end; set `eos_token` in its tokenizer_config.json."
        )
    return tokenizer


def load_config(name: str | os.PathLike[str]) -> Any:
    """Returns the transformers configuration of a model, of its text part where there are more.

    Raises:
        ValueError: The model is unknown.

    Examples:
        >>> load_config("tiny").vocab_size
        259
    """
    return _config(os.fspath(name), _written(os.fspath(name)))


@functools.lru_cache(maxsize=8)
def _config(name: str, written: int) -> Any:
    from transformers import AutoConfig

    return _load(AutoConfig, name).get_text_config()


def check_context(config: Any, num_tokens: int) -> None:
    """Raises ValueError where a model's context does not hold `num_tokens`.

    Examples:
        >>> check_context(load_config("tiny"), 10**6)
        Traceback (most recent call last):
        ValueError: Prompt and completion take up to 1000000 tokens, but the model's context has ...
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"Prompt and completion take up to {num_tokens} tokens, but the model's context has "
            f"{limit}; lower max_prompt_tokens or max_new_tokens."
        )


def eos_token_ids(name: str | os.PathLike[str]) -> list[int]:
    """Returns every id that ends a sequence: the tokenizer's and the model configuration's.

    Examples:
        >>> eos_token_ids("tiny")
        [2]
    """
    configured = load_config(name).eos_token_id
    ids = {load_tokenizer(name).eos_token_id}
    ids.update(configured if isinstance(configured, list | tuple) else [configured])
    return sorted(i for i in ids if i is not None)


def choose_device(device: str) -> str:
    """Returns `device`, with ``"auto"`` resolved to a GPU where there is one.

    Raises:
        ValueError: torch has no such device here.

    Examples:
        >>> choose_device("cpu")
        'cpu'
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device is {device!r}, which torch cannot use here ({_first_line(error)}); use 'cpu', "
            "'cuda' or 'auto'."
        ) from error
    return device


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """Returns the torch dtype; ``"auto"`` is bfloat16 on a GPU and float32 elsewhere.

    Examples:
        >>> choose_dtype("auto", "cpu")
        torch.float32
    """
    import torch

    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; use 'auto', 'float32', 'bfloat16' or 'float16'.")
    return resolved


def load_causal_lm(
    name: str | os.PathLike[str], device: str = "auto", dtype: str = "auto"
) -> PreTrainedModel:
    """Returns a causal language model in evaluation mode.

    Raises:
        ValueError: The model is unknown, or is not a causal language model.

    Examples:
        >>> load_causal_lm("tiny", "cpu").training
        False
    """
    from transformers import AutoModelForCausalLM

    device = choose_device(device)
    model = _load(AutoModelForCausalLM, name, dtype=choose_dtype(dtype, device))
    return model.to(device).eval()


def load_frozen(
    name: str | os.PathLike[str], device: str = "auto", dtype: str = "auto"
) -> PreTrainedModel:
    """Returns a frozen model, one copy per process however many environments ask.

    Examples:
        >>> load_frozen("tiny") is load_frozen("tiny")
        True
    """
    name = os.fspath(name)
    return _frozen(name, _written(name), choose_device(device), dtype)


@functools.lru_cache(maxsize=4)
def _frozen(name: str, written: int, device: str, dtype: str) -> PreTrainedModel:
    return load_causal_lm(name, device, dtype).requires_grad_(False)
