"""Pre-trains the embedded model ``tiny``: ``python -m textrl_env.pretrain --output DIR``.

``tiny`` is a Llama of half a million parameters over bytes, pre-trained from scratch on lines such
as ``47+85=132<eos>``, ``copy:dbca=dbca<eos>``, ``reverse:dbca=acbd<eos>``, ``sort:dbca=abcd<eos>``
and ``The film was great and fun.<eos>``; its prompts are those of the tasks' train splits.

The corpus imitates pupils, so that the model is partly skilled and reinforcement learning has
something to learn: a part of the lines is *wrong in a systematic way* (see `MISTAKES`). In most
additions the pupil forgets to carry (``47+85=122``) or takes a 7 for a 1 (``47+85=126``). So the
model has learned the right procedure and the wrong ones; where they differ it answers wrongly when
it is decoded greedily, and rightly in a part of its samples.

The run is reproducible bit for bit on one kind of machine: seeds, threads and algorithms are
fixed, and no global random generator is read. Another processor or another version of torch may
round differently and so give another file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from textrl_env.tasks import Addition, Copy, Reverse, Sample, Sort, Task
from textrl_env.tasks.sentiment import (
    INTENSIFIERS,
    NEGATIVE_ADJECTIVES,
    NEUTRAL_ADJECTIVES,
    NEUTRAL_ENDINGS,
    POSITIVE_ADJECTIVES,
    SENTENCE_BEGINNINGS,
)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
SEED = 0
STEPS = 1200
LR = 3e-3
THREADS = 2

#: How often the pupils make each mistake.
MISTAKES = {
    "carry": 0.7,  # does not carry: 47+85=122
    "misread": 0.6,  # takes a 7 for a 1: 47+85=126
    "copy": 0.6,  # writes a letter that begins the string twice only once: aab -> ab
    "reverse": 0.5,  # does not turn the first two letters around: dbca -> acdb
    "sort": 0.5,  # leaves the last letter where it is: dbca -> bcda
}

#: Lines of each kind in a batch.
BATCH = {
    "addition": ((Addition(1), 8), (Addition(2), 120), (Addition(3), 32)),
    "sequences": ((Copy(), 24), (Reverse(), 40), (Sort(), 32)),
}
SENTENCES = 24


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte of UTF-8, so that every text has its tokens.

    The id of a byte is its value plus three, after ``<pad>``, ``<bos>`` and ``<eos>``. A text is
    preceded by ``<bos>``, and decoding gives back the exact text.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer("1+2=").input_ids, tokenizer.decode([52, 2])
    ([1, 52, 46, 53, 64], '1<eos>')
    """
    # Byte-level BPE writes a byte as a printable character: itself, or one from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    alphabet = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def new_model(seed: int) -> LlamaForCausalLM:
    """The untrained model; leaves the global random generator as it was."""
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 32
    return model


def add(prompt: str, carry: bool = True, misread: bool = False) -> str:
    """The answer to an addition, with a pupil's mistakes.

    Args:
        prompt: Such as ``"47+85="``.
        carry: Whether the pupil carries from one column to the next.
        misread: Whether the pupil takes a 7 for a 1.

    >>> add("47+85="), add("47+85=", carry=False), add("47+85=", misread=True)
    ('132', '122', '126')
    """
    if misread:
        prompt = prompt.replace("7", "1")
    a, b = prompt[:-1].split("+")
    if carry:
        return str(int(a) + int(b))
    columns = [int(x) + int(y) for x, y in zip(a, b, strict=True)]
    return str(columns[0]) + "".join(str(column % 10) for column in columns[1:])


def pupils_answer(sample: Sample, rng: random.Random) -> str:
    """A pupil's answer: right, or with the mistakes of `MISTAKES`.

    >>> {pupils_answer(Copy()[3], random.Random(i)) for i in range(9)} == {Copy()[3].answer}
    True
    """
    prompt, answer = str(sample.prompt), str(sample.answer)
    if "+" in prompt:
        carry = rng.random() >= MISTAKES["carry"]
        return add(prompt, carry, misread=rng.random() < MISTAKES["misread"])
    operation, letters = prompt[:-1].split(":")
    if rng.random() >= MISTAKES[operation]:
        return answer
    if operation == "copy":
        return letters[1:] if letters[0] == letters[1] else letters
    if operation == "reverse":
        return letters[:1:-1] + letters[:2]
    return "".join(sorted(letters[:-1])) + letters[-1]


def draw_line(task: Task, rng: random.Random) -> str:
    """A line of a task: a prompt of its train split and a pupil's answer."""
    sample = task[rng.randrange(len(task))]
    return str(sample.prompt) + pupils_answer(sample, rng)


def draw_sentence(rng: random.Random) -> str:
    """A sentence, positive, negative and neutral in equal parts.

    >>> draw_sentence(random.Random(0))
    'The show is long and big on the whole.'
    """
    words = rng.choice((POSITIVE_ADJECTIVES, NEGATIVE_ADJECTIVES, NEUTRAL_ADJECTIVES))
    first, second = rng.sample(words, 2)
    text = rng.choice(SENTENCE_BEGINNINGS)
    if rng.random() < 0.3:
        text += " " + rng.choice(INTENSIFIERS)
    text += " " + first
    if rng.random() < 0.5:
        text += " and " + second
    if rng.random() < 0.3:
        text += " " + rng.choice(NEUTRAL_ENDINGS)
    return text + "."


def draw_batch(rng: random.Random) -> list[list[str]]:
    """Lines of one step, grouped so that those of a group are of similar length."""
    groups = [
        [draw_line(task, rng) for task, lines in group for _ in range(lines)]
        for group in BATCH.values()
    ]
    return [*groups, [draw_sentence(rng) for _ in range(SENTENCES)]]


def encode(lines: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, padded on the right, and the labels: everything but the padding."""
    rows = [[1, *(byte + 3 for byte in line.encode()), 2] for line in lines]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, ids.masked_fill(ids == 0, -100)


def train(model: LlamaForCausalLM, steps: int, lr: float, seed: int) -> list[dict[str, float]]:
    """Trains in place and returns the loss curve."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    warmup = max(1, steps // 20)
    curve: list[dict[str, float]] = []
    total, started = 0.0, time.perf_counter()
    model.train()
    for step in range(1, steps + 1):
        share = step / steps
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / warmup, 0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)
        batch = [encode(lines) for lines in draw_batch(rng)]
        tokens = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batch)
        for ids, labels in batch:
            loss = model(ids, labels=labels, num_items_in_batch=tokens).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            n = step % 50 or 50
            curve.append({"step": step, "loss": round(total / n, 4)})
            print(f"{step:5d}  {total / n:.4f}  {time.perf_counter() - started:.0f} s", flush=True)
            total = 0.0
    return curve


@torch.inference_mode()
def complete(model: LlamaForCausalLM, prompts: list[str], max_new_tokens: int) -> list[str]:
    """Completes prompts greedily, up to the end of the sequence."""
    rows = [[1, *(byte + 3 for byte in prompt.encode())] for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = (ids != 0).long()
    output = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens
    )
    tokenizer = byte_tokenizer()
    return tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)


def accuracy(model: LlamaForCausalLM, task: Task, limit: int = 1000) -> float:
    """The part of a task's first prompts that greedy decoding completes rightly."""
    samples = [task[i] for i in range(min(limit, len(task)))]
    texts = complete(model, [str(sample.prompt) for sample in samples], task.max_new_tokens)
    right = sum(task.is_correct(t, s) for t, s in zip(texts, samples, strict=True))
    return round(right / len(samples), 4)


def held_out_tasks() -> dict[str, Task]:
    """The tasks on which the model is measured."""
    tasks: dict[str, Task] = {f"addition-{n}": Addition(n, split="test") for n in (1, 2, 3)}
    return tasks | {cls.name: cls(split="test") for cls in (Copy, Reverse, Sort)}


def save(model: LlamaForCausalLM, directory: Path) -> str:
    """Saves the model and its tokenizer, and returns the SHA-256 of the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    # This name of the tokenizer's class is known to every version of transformers.
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def pretrain(output: Path, steps: int = STEPS, lr: float = LR, seed: int = SEED) -> dict[str, Any]:
    """Pre-trains, writes the directory, and returns the log that goes with it.

    Args:
        output: Directory for the model, its tokenizer and ``pretraining.json``.
        steps: Updates.
        lr: The highest learning rate.
        seed: Of the initial weights and of the corpus.
    """
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    try:
        started = time.perf_counter()
        model = new_model(seed)
        curve = train(model, steps, lr, seed)
        seconds = time.perf_counter() - started
        model.eval()
        measured = {name: accuracy(model, task) for name, task in held_out_tasks().items()}
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    log = {
        "sha256": save(model, output),
        "held_out_greedy_accuracy": measured,
        "parameters": model.num_parameters(),
        "seed": seed,
        "steps": steps,
        "lr": lr,
        "mistakes": MISTAKES,
        "threads": THREADS,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "seconds": round(seconds, 1),
        "loss": curve,
    }
    (output / "pretraining.json").write_text(json.dumps(log, indent=1) + "\n")
    return log


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Pre-train the embedded model.")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--seed", type=int, default=SEED)
    log = pretrain(**vars(parser.parse_args()))
    print(json.dumps({key: value for key, value in log.items() if key != "loss"}, indent=2))


if __name__ == "__main__":
    main()
