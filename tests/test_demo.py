"""The main job from the command line, shortened, and what it leaves behind."""

import csv
import json
import subprocess
import sys

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents import GRPO


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "rloo"])
def test_the_demo_leaves_what_it_promises(algorithm, tmp_path):
    output = tmp_path / "runs" / "demo"
    command = [
        sys.executable, "-m", "agents.demo", "--output", str(output), "--algorithm", algorithm,
        "--num-envs", "16", "--total-timesteps", "150",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Held-out accuracy before training" in result.stdout
    assert "Held-out prompts" in result.stdout

    config = json.loads((output / "config.json").read_text())
    assert config["algorithm"] == algorithm
    summary = json.loads((output / "summary.json").read_text())
    assert 0.3 <= summary["accuracy_before"] <= 0.6
    assert summary["tokens"] >= 150
    assert summary["heldout_prompts"] > 500
    with (output / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"rollout/task_reward", "rollout/kl", "rollout/entropy", "rollout/length"} <= set(
        rows[0]
    )
    events = EventAccumulator(str(output))
    events.Reload()
    assert len(events.Scalars("rollout/task_reward")) == len(rows)
    with Image.open(output / "curves.png") as image:
        assert image.size[0] > 500
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 10
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    assert model.num_parameters() > 100_000
    assert AutoTokenizer.from_pretrained(output / "model")("1+2=")["input_ids"][0] == 1
    if algorithm == "grpo":
        agent = GRPO.load(output / "checkpoint.zip")
        assert agent.num_timesteps == summary["tokens"]
        assert len(agent.generate(["12+34="])) == 1


def test_a_wrong_option_is_said(tmp_path):
    command = [sys.executable, "-m", "agents.demo", "--algorithm", "sarsa"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode != 0
    assert "grpo" in result.stderr + result.stdout
    assert not list(tmp_path.iterdir())
