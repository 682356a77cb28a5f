"""The same seed gives the same trajectories, in any process, and no global generator moves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

import textrl_env  # noqa: F401 - registers

SCRIPT = """
import hashlib, json, sys
import gymnasium as gym, numpy as np, torch
torch.set_num_threads(1)
venv = gym.make_vec("textrl_env:TextRL-v0", num_envs=3, **json.loads(sys.argv[1]))

def add(value):
    if isinstance(value, dict):
        for key in sorted(value):
            digest.update(key.encode())
            add(value[key])
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(value.tobytes())
    else:
        digest.update(repr(value).encode())

for seed in (0, 1):
    digest = hashlib.sha256()
    venv.action_space.seed(seed)
    for part in venv.reset(seed=seed):
        add(part)
    for _ in range(20):
        for part in venv.step(venv.action_space.sample()):
            add(part)
    print(digest.hexdigest())
"""


def test_two_processes(tiny_llama):
    options = {"task": "addition", "model": tiny_llama, "device": "cpu", "on_limit": "truncate"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        for hash_seed in ("1", "2")
    ]
    first, second = (process.communicate()[0].split() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert first == second
    assert len(set(first)) == 2  # another seed gives another trajectory


def state():
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


def assert_untouched(before):
    after = state()
    assert after[0] == before[0]
    assert str(after[1]) == str(before[1])
    assert torch.equal(after[2], before[2])


@pytest.mark.parametrize("kl_mode", ["reference", "policy", "none"])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("task", ["addition", "sort", "sentiment"])
def test_global_generators_are_untouched(save_model, kl_mode, vector, task):
    from conftest import small_llama

    # A model that no test has loaded yet, so that loading is covered.
    model = save_model(small_llama())
    options = {"task": task, "model": model, "kl_mode": kl_mode, "device": "cpu"}
    before = state()
    if vector:
        env = gym.make_vec("TextRL-v0", num_envs=2, **options).unwrapped
        action, logprobs = np.array([9, 9]), np.array([-1.0, -1.0])
    else:
        env = gym.make("TextRL-v0", **options).unwrapped
        action, logprobs = 9, -1.0
    assert_untouched(before)
    env.reset(seed=0)
    env.reset()
    assert_untouched(before)
    for _ in range(5):
        env.report_logprobs(logprobs)
        env.step(action)
    assert_untouched(before)


def test_the_global_generators_do_not_matter(tiny_llama):
    def trajectory():
        env = gym.make("TextRL-v0", model=tiny_llama, device="cpu")
        env.action_space.seed(0)
        _, info = env.reset(seed=0)
        steps = [env.step(env.action_space.sample()) for _ in range(5)]
        return info, [(reward, info) for _, reward, _, _, info in steps]

    first = trajectory()
    random.random()
    np.random.random()
    torch.rand(1)
    assert trajectory() == first
