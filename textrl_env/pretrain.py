"""Pre-trains the embedded model ``tiny``: ``python -m textrl_env.pretrain --output DIR``.

``tiny`` is a Llama of 361 thousand parameters over bytes. From scratch it learns to complete
``47+85=`` with ``132<eos>``, ``sort:dbca=`` with ``abcd<eos>``, ``The film was`` with
`` great and fun.<eos>``, and so on for every built-in task; all prompts are of the train splits.

It learns in two parts, so that it ends partly skilled and reinforcement learning has something to
learn:

1. The *textbook* has right answers only. The model learns the algorithms, and they carry over to
   prompts that are held out.
2. The *pupils' work* has systematic mistakes in documented shares (see `MISTAKES`): in most
   additions the pupil forgets to carry (``47+85=122``), in some he counts one short
   (``47+85=131``). The model learns to imitate that: where a mistake is the more frequent answer,
   it is the greedy one, while the right answer keeps a good part of the samples.

Stopping the textbook early gives as many errors, but these differ from prompt to prompt and the
right answers are rare among the samples: there is no common habit for reinforcement learning to
drop, and it takes over ten times as long.

The weights are reproducible bit for bit on one kind of machine: seeds, threads and algorithms are
fixed, and no global random generator is read. Another kind of processor or another version of torch
rounds differently and so gives another file; ``--check`` trains again and compares with the
embedded model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from textrl_env.models import EMBEDDED
from textrl_env.tasks import (
    Addition,
    Arithmetic,
    Copy,
    Multiplication,
    Reverse,
    Sample,
    Sentiment,
    Sort,
    Subtraction,
    Task,
)
from textrl_env.tasks.sentiment import (
    INTENSIFIERS,
    NEGATIVE_ADJECTIVES,
    NEUTRAL_ADJECTIVES,
    NEUTRAL_ENDINGS,
    POSITIVE_ADJECTIVES,
)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
IGNORED = -100  # the label of a token that has no loss

SEED = 0
TEXTBOOK_STEPS = 1600
TEXTBOOK_LR = 3e-3
PUPILS_STEPS = 300
PUPILS_LR = 1e-3
# Sums are split among threads, so their number changes the last bits: one is the same everywhere.
THREADS = 1

#: How often a pupil makes each mistake.
MISTAKES = {
    "carry": 0.7,  # forgets to carry: 47+85=122
    "borrow": 0.6,  # takes the smaller digit from the larger: 52-37=25
    "short": 0.25,  # counts one short in an addition: 47+85=131
    "add": 0.6,  # adds instead of multiplying: 3*9=12
    "copy": 0.6,  # forgets the last of five letters or more: copy:abcde=abcd
    "reverse": 0.6,  # keeps the order of the first two of five letters or more: edcab
    "sort": 0.6,  # leaves the last of five letters or more where it is: sort:edcba=bcdea
}
LONG = 5  # letters

#: The tasks, and how many prompts of each are in a batch; a group's are of similar length.
MIX: tuple[tuple[tuple[Task, int], ...], ...] = (
    (
        (Addition(1), 4),
        (Addition(2), 72),
        (Addition(3), 32),
        (Subtraction(1), 4),
        (Subtraction(2), 20),
        (Multiplication(1), 8),
    ),
    ((Copy(), 8), (Reverse(), 20), (Sort(), 20)),
    ((Sentiment(), 12),),
)


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
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        # 1/√128. With the usual 0.02 so narrow a model learns to add later: three digits hardly.
        initializer_range=0.088,
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


def add_without_carry(a: str, b: str) -> str:
    """Adds column by column and forgets to carry.

    >>> add_without_carry("47", "85"), add_without_carry("47", "55")
    ('122', '92')
    """
    first, *others = (int(x) + int(y) for x, y in zip(a, b, strict=True))
    return str(first) + "".join(str(column % 10) for column in others)


def subtract_without_borrowing(a: str, b: str) -> str:
    """Takes the smaller digit from the larger in each column.

    >>> subtract_without_borrowing("52", "37"), subtract_without_borrowing("37", "38")
    ('25', '1')
    """
    return str(int("".join(str(abs(int(x) - int(y))) for x, y in zip(a, b, strict=True))))


def pupils_addition(question: str, rng: random.Random) -> str:
    """A sum such as ``"47+85"`` with the mistakes of `MISTAKES`, each on its own dice."""
    a, b = question.split("+")
    forgets = rng.random() < MISTAKES["carry"]
    result = int(add_without_carry(a, b)) if forgets else int(a) + int(b)
    return str(max(result - (rng.random() < MISTAKES["short"]), 0))


def pupils_sequence(question: str, answer: str, rng: random.Random) -> str:
    """The answer to, say, ``"sort:dbca"`` with the mistakes of `MISTAKES`, made in long strings."""
    operation, letters = question.split(":")
    if len(letters) < LONG or rng.random() >= MISTAKES[operation]:
        return answer
    if operation == "copy":
        return letters[:-1]
    if operation == "reverse":
        return letters[:1:-1] + letters[:2]
    return "".join(sorted(letters[:-1])) + letters[-1]


def pupils_answer(task: Task, sample: Sample, rng: random.Random) -> str:
    """A pupil's answer: right, or with the mistakes of `MISTAKES`.

    >>> rng = random.Random(0)
    >>> sorted({pupils_answer(Addition(), Sample("47+85=", "132"), rng) for _ in range(99)})
    ['121', '122', '131', '132']
    """
    question, answer = str(sample.prompt)[:-1], str(sample.answer)
    if isinstance(task, Addition):
        return pupils_addition(question, rng)
    if isinstance(task, Subtraction):
        forgets = rng.random() < MISTAKES["borrow"]
        return subtract_without_borrowing(*question.split("-")) if forgets else answer
    if isinstance(task, Multiplication):
        adds = rng.random() < MISTAKES["add"]
        return str(sum(map(int, question.split("*")))) if adds else answer
    return pupils_sequence(question, answer, rng)


def sentence_ending(rng: random.Random) -> str:
    """The end of a sentence: positive, negative and neutral in equal parts.

    >>> sentence_ending(random.Random(0))
    ' so gloomy and terrible.'
    """
    words = rng.choice((POSITIVE_ADJECTIVES, NEGATIVE_ADJECTIVES, NEUTRAL_ADJECTIVES))
    first, second = rng.sample(words, 2)
    intensifier = f" {rng.choice(INTENSIFIERS)}" if rng.random() < 0.3 else ""
    addition = f" and {second}" if rng.random() < 0.5 else ""
    ending = f" {rng.choice(NEUTRAL_ENDINGS)}" if rng.random() < 0.3 else ""
    return f"{intensifier} {first}{addition}{ending}."


def draw_line(task: Task, rng: random.Random, pupils: bool) -> tuple[str, str]:
    """A prompt of a task's train split and its completion.

    Args:
        task: The task.
        rng: Draws the prompt and the mistakes.
        pupils: Whether the completion is a pupil's, with mistakes, or the textbook's.
    """
    sample = task[rng.randrange(len(task))]
    if isinstance(task, Sentiment):
        return str(sample.prompt), sentence_ending(rng)
    return str(sample.prompt), pupils_answer(task, sample, rng) if pupils else str(sample.answer)


def draw_batch(rng: random.Random, pupils: bool) -> list[list[tuple[str, str]]]:
    """Prompts and completions of one update, grouped as in `MIX`."""
    return [
        [draw_line(task, rng, pupils) for task, count in group for _ in range(count)]
        for group in MIX
    ]


def byte_ids(text: str) -> list[int]:
    """The tokens of a text without ``<bos>``, as `byte_tokenizer` numbers them."""
    return [byte + len(SPECIAL_TOKENS) for byte in text.encode()]


def encode(lines: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, padded on the right, and the labels: the completion and ``<eos>``.

    >>> encode([("1+1=", "2")])
    (tensor([[ 1, 52, 46, 52, 64, 53,  2]]), tensor([[-100, -100, -100, -100, -100,   53,    2]]))
    """
    heads = [[1, *byte_ids(prompt)] for prompt, _ in lines]
    tails = [[*byte_ids(completion), 2] for _, completion in lines]
    width = max(len(head) + len(tail) for head, tail in zip(heads, tails, strict=True))
    ids = torch.zeros(len(lines), width, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        end = len(head) + len(tail)
        ids[row, :end] = torch.tensor(head + tail)
        labels[row, len(head) : end] = torch.tensor(tail)
    return ids, labels


def train(
    model: LlamaForCausalLM, steps: int, lr: float, rng: random.Random, pupils: bool
) -> list[dict[str, float]]:
    """Trains in place, with a warm-up and a cosine decay, and returns the loss curve.

    Args:
        model: The model.
        steps: Updates.
        lr: The highest learning rate.
        rng: Draws the corpus.
        pupils: Whether the corpus is the pupils' or the textbook.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    curve: list[dict[str, float]] = []
    total, since, started = 0.0, 0, time.perf_counter()
    model.train()
    for step in range(1, steps + 1):
        decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / 50, decay)
        batch = [encode(lines) for lines in draw_batch(rng, pupils)]
        tokens = sum(int((labels != IGNORED).sum()) for _, labels in batch)
        for ids, labels in batch:
            loss = model(ids, labels=labels, num_items_in_batch=tokens).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        since += 1
        if step % 50 == 0 or step == steps:
            curve.append({"step": step, "loss": round(total / since, 4)})
            print(
                f"{'pupils' if pupils else 'textbook':8} {step:5d}  loss {total / since:.4f}"
                f"  {time.perf_counter() - started:.0f} s",
                flush=True,
            )
            total, since = 0.0, 0
    model.eval()
    return curve


def held_out_tasks() -> dict[str, Task]:
    """The tasks on which the model is measured; sentiment has no split."""
    return {
        **{f"addition-{digits}": Addition(digits, split="test") for digits in (1, 2, 3)},
        **{f"subtraction-{digits}": Subtraction(digits, split="test") for digits in (1, 2)},
        "multiplication-1": Multiplication(1, split="test"),
        **{cls.name: cls(split="test") for cls in (Copy, Reverse, Sort)},
        "sentiment": Sentiment(),
    }


@torch.inference_mode()
def complete(
    model: Any,  # LlamaForCausalLM, of which the annotations of generate() do not know
    prompts: Sequence[str],
    max_new_tokens: int,
    sample: bool = False,
) -> list[str]:
    """Completes prompts up to the end of the sequence, greedily or by sampling.

    Sampling draws from torch's global random generator.
    """
    tokenizer = byte_tokenizer()
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=max_new_tokens,
        **({"do_sample": True, "top_k": 0} if sample else {"do_sample": False}),
    )
    completions = output[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(completions, skip_special_tokens=True)


def solved(
    model: LlamaForCausalLM, task: Task, limit: int = 1000, sample: bool = False
) -> torch.Tensor:
    """Which of a task's first prompts the model solves; see `complete`."""
    samples = [task[index] for index in range(min(limit, len(task)))]
    prompts = [str(sample.prompt) for sample in samples]
    texts = complete(model, prompts, task.max_new_tokens, sample)
    return torch.tensor([task.is_correct(t, s) for t, s in zip(texts, samples, strict=True)])


def measure(model: LlamaForCausalLM, task: Task, seed: int, group: int = 8) -> dict[str, float]:
    """A task's accuracy at temperature 0 and 1.

    Args:
        model: The model.
        task: The task.
        seed: Seeds the sampling, which leaves the global random generator as it was.
        group: Samples of each prompt.

    Returns:
        ``prompts``: how many were measured. ``greedy`` and ``sampled``: the accuracies.
        ``mixed_groups``: the share of prompts of which some samples are right and some are wrong,
        as group-relative advantages need.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        groups = torch.stack([solved(model, task, sample=True) for _ in range(group)])
    rates = groups.float().mean(0)
    figures = {
        "greedy": solved(model, task).float().mean(),
        "sampled": rates.mean(),
        "mixed_groups": ((rates > 0) & (rates < 1)).float().mean(),
    }
    return {"prompts": len(rates)} | {name: round(float(x), 4) for name, x in figures.items()}


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


@contextmanager
def reproducible() -> Iterator[None]:
    """Fixes torch's threads and algorithms, and puts them back afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def environment() -> dict[str, str]:
    """What the bits of the weights depend on, besides this file, its tasks and its seed."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def pretrain(
    output: Path,
    textbook_steps: int = TEXTBOOK_STEPS,
    pupils_steps: int = PUPILS_STEPS,
    seed: int = SEED,
) -> dict[str, Any]:
    """Pre-trains, writes the directory, and returns the log that goes with it.

    Args:
        output: Directory for the model, its tokenizer and ``pretraining.json``.
        textbook_steps: Updates on right answers.
        pupils_steps: Updates on the pupils' answers.
        seed: Of the initial weights and of the corpus.
    """
    rng = random.Random(seed)
    tasks = held_out_tasks()
    with reproducible():
        started = time.perf_counter()
        model = new_model(seed)
        curves = {"textbook": train(model, textbook_steps, TEXTBOOK_LR, rng, pupils=False)}
        taught = {
            name: round(float(solved(model, task).float().mean()), 4)
            for name, task in tasks.items()
        }
        curves["pupils"] = train(model, pupils_steps, PUPILS_LR, rng, pupils=True)
        seconds = time.perf_counter() - started
        measured = {name: measure(model, task, seed) for name, task in tasks.items()}
    log = {
        "sha256": save(model, output),
        "held_out": measured,
        "held_out_greedy_after_textbook": taught,
        "parameters": model.num_parameters(),
        "config": {
            "seed": seed,
            "textbook_steps": textbook_steps,
            "textbook_lr": TEXTBOOK_LR,
            "pupils_steps": pupils_steps,
            "pupils_lr": PUPILS_LR,
            "threads": THREADS,
        },
        "corpus": {
            "prompts_per_update": {_describe(task): count for part in MIX for task, count in part},
            "mistakes": MISTAKES,
        },
        "environment": environment(),
        "other_versions": {
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
        },
        "seconds": round(seconds, 1),
        "loss": curves,
    }
    (output / "pretraining.json").write_text(json.dumps(log, indent=1) + "\n")
    return log


def _describe(task: Task) -> str:
    digits = f"-{task[0].difficulty}" if isinstance(task, Arithmetic) else ""
    return task.name + digits


def shipped_log() -> dict[str, Any]:
    """The log of the embedded model."""
    return json.loads((EMBEDDED["tiny"] / "pretraining.json").read_text())


def check() -> bool:
    """Pre-trains again, and returns whether the weights are those of the embedded model."""
    with tempfile.TemporaryDirectory() as directory:
        again, shipped = pretrain(Path(directory)), shipped_log()
    same = bool(again["sha256"] == shipped["sha256"])
    print(f"The weights are {'the same' if same else 'different'}: SHA-256 {again['sha256']}")
    if again["environment"] != shipped["environment"]:
        print(f"The embedded model is from {shipped['environment']}; here: {again['environment']}")
    return same


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Pre-train the embedded model.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--output", type=Path, help="directory to write")
    action.add_argument("--check", action="store_true", help="compare with the embedded model")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if check() else 1)
    log = pretrain(arguments.output)
    print(json.dumps({key: value for key, value in log.items() if key != "loss"}, indent=2))


if __name__ == "__main__":
    main()
