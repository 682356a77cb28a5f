"""reward = task_reward − kl_coef · kl, to the bit, in every mode; and who subtracts what."""

from __future__ import annotations

import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
from conftest import EOS, ids

from textrl_env.rewards import Reward
from textrl_env.tasks import FunctionTask

TASK = FunctionTask(["p", "q"], score=lambda text, sample: 0.1 * len(text))
ESTIMATORS = {
    "k1": lambda ratio: ratio,
    "k2": lambda ratio: ratio**2 / 2,
    "k3": lambda ratio: math.exp(-ratio) - 1 + ratio,
    "abs": abs,
}


def make(model, **options):
    options = {"task": TASK, "model": model, "max_new_tokens": 6, "device": "cpu", **options}
    return gym.make("TextRL-v0", **options)


def episode(env, seed=0, report=None):
    """Yields (reward, info) of a random episode."""
    generator = np.random.default_rng(seed)
    env.reset(seed=seed)
    done = False
    while not done:
        if report is not None:
            env.unwrapped.report_logprobs(report)
        _, reward, terminated, truncated, info = env.step(generator.integers(3, 259))
        done = terminated or truncated
        yield reward, info


@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("kl_mode", ["policy", "reference", "none"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_reward_is_the_sum_of_its_parts_to_the_bit(tiny_llama, kl_mode, kl_coef, per):
    reward = Reward(lambda text, sample: len(text) / 7, per=per)
    env = make(tiny_llama, kl_mode=kl_mode, kl_coef=kl_coef, reward=reward)
    steps = list(episode(env, report=-1.5 if kl_mode == "policy" else None))
    assert len(steps) == 6
    for shaped, info in steps:
        assert type(shaped) is float
        assert shaped == info["task_reward"] - info["kl_coef"] * info["kl"]
        assert info["kl_coef"] == kl_coef
        assert (info["ref_logprob"] == 0.0) == (kl_mode == "none")
    earned = [info["task_reward"] != 0.0 for _, info in steps]
    assert earned == [per == "token"] * 5 + [True]


def test_mode_reference_adds_the_log_probability_of_the_reference(tiny_llama):
    for shaped, info in episode(make(tiny_llama, kl_coef=0.3)):
        assert info["ref_logprob"] < 0
        assert info["kl"] == -info["ref_logprob"]
        assert shaped == info["task_reward"] + 0.3 * info["ref_logprob"]


def test_mode_none_adds_nothing(tiny_llama):
    for shaped, info in episode(make(tiny_llama, kl_mode="none", kl_coef=0.3)):
        assert info["kl"] == 0.0
        assert shaped == info["task_reward"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_mode_policy_charges_the_estimator_of_what_was_reported(tiny_llama, estimator):
    env = make(tiny_llama, kl_mode="policy", kl_coef=0.3, kl_estimator=estimator)
    for _, info in episode(env, report=-2.5):
        expected = ESTIMATORS[estimator](-2.5 - info["ref_logprob"])
        assert info["kl"] == pytest.approx(expected, rel=1e-12)
        if estimator in ("k1", "abs"):
            assert info["kl"] == expected


def test_modes_reference_and_policy_are_equal_once_the_agent_subtracts(tiny_llama):
    logprob = -1.25
    by_policy = list(episode(make(tiny_llama, kl_mode="policy"), report=logprob))
    by_reference = list(episode(make(tiny_llama, kl_mode="reference")))
    for (shaped, info), (half, _) in zip(by_policy, by_reference, strict=True):
        assert shaped == pytest.approx(half - info["kl_coef"] * logprob, abs=1e-12)


def test_a_step_without_a_report_is_an_error_and_changes_nothing(tiny_llama):
    env = make(tiny_llama, kl_mode="policy").unwrapped
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"log π of this step was not reported.*report_logprobs"):
        env.step(EOS)
    env.report_logprobs(-1.0)
    env.step(*ids("a"))
    with pytest.raises(RuntimeError, match="was not reported"):  # a report is for one step
        env.step(EOS)
    env.report_logprobs(-1.0)
    *_, info = env.step(EOS)
    assert (info["text"], info["num_tokens"]) == ("a", 2)


def test_a_report_does_not_outlive_its_episode(tiny_llama):
    env = make(tiny_llama, kl_mode="policy").unwrapped
    env.reset(seed=0)
    env.report_logprobs(-1.0)
    env.reset()
    with pytest.raises(RuntimeError, match="was not reported"):
        env.step(EOS)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 0.5])
def test_impossible_reports(tiny_llama, logprob):
    env = make(tiny_llama, kl_mode="policy").unwrapped
    env.reset(seed=0)
    with pytest.raises(ValueError, match=f"log-probability {logprob} is not finite and at most 0"):
        env.report_logprobs(logprob)


def test_reports_of_a_vector(tiny_llama):
    venv = gym.make_vec(
        "TextRL-v0", num_envs=2, task=TASK, model=tiny_llama, kl_mode="policy", device="cpu"
    ).unwrapped
    venv.reset(seed=0)
    with pytest.raises(ValueError, match=r"shape \(3,\); pass one a slot"):
        venv.report_logprobs(np.zeros(3))
    venv.report_logprobs(np.array([-1.0, -2.0]))
    *_, infos = venv.step(np.array([EOS, *ids("a")]))
    np.testing.assert_array_equal(infos["kl"], [-1.0, -2.0] - infos["ref_logprob"])
    # The first slot waits for its next episode: its report is ignored, whatever it is.
    venv.report_logprobs(np.array([np.nan, -2.0]))
    *_, infos = venv.step(np.array([EOS, EOS]))
    assert infos["_kl"].tolist() == [False, True]
    with pytest.raises(RuntimeError, match="was not reported"):
        venv.step(np.array([EOS, EOS]))


def test_the_coefficient_may_change_between_steps(tiny_llama):
    env = make(tiny_llama).unwrapped
    env.reset(seed=0)
    for kl_coef in (0.05, 0.5, 0.0):
        env.kl_coef = kl_coef
        _, shaped, *_, info = env.step(9)
        assert info["kl_coef"] == kl_coef
        assert shaped == -kl_coef * info["kl"]


@pytest.mark.parametrize("vector", [False, True])
def test_nobody_subtracting_is_noticed_once(tiny_llama, vector, monkeypatch):
    monkeypatch.setattr("textrl_env.core._CONSUMER_PATIENCE", 100)
    options = {"task": TASK, "model": tiny_llama, "max_new_tokens": 100, "device": "cpu"}
    if vector:
        env = gym.make_vec("TextRL-v0", num_envs=25, **options).unwrapped
        action, calls = np.full(25, 9), 12
    else:
        env = gym.make("TextRL-v0", **options).unwrapped
        action, calls = 9, 250
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.reset(seed=0)
        for _ in range(calls):
            end = env.step(action)[2]
            if not vector and end:
                env.reset()
    assert ["nobody has announced to subtract" in str(w.message) for w in caught] == [True]
    assert not env.mdp.kl_consumer  # a warning is no announcement


@pytest.mark.parametrize(
    "options", [{}, {"kl_coef": 0.0}, {"kl_mode": "none"}, {"kl_mode": "policy"}]
)
def test_no_warning_where_there_is_a_consumer_or_no_need(tiny_llama, options):
    env = gym.make_vec(
        "TextRL-v0", num_envs=50, task=TASK, model=tiny_llama, max_new_tokens=50, device="cpu",
        **options,
    ).unwrapped  # fmt: skip
    if not options:
        env.announce_kl_consumer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset(seed=0)
        for _ in range(30):
            env.report_logprobs(np.full(50, -1.0))
            env.step(np.full(50, 9))


@pytest.mark.parametrize("kl_mode", ["none", "policy"])
def test_a_consumer_in_another_mode_is_an_error(tiny_llama, kl_mode):
    env = make(tiny_llama, kl_mode=kl_mode).unwrapped
    with pytest.raises(
        ValueError, match=f"kl_mode is '{kl_mode}', whose rewards need no log π_old"
    ):
        env.announce_kl_consumer()


def test_temperature_and_mask_reach_the_reference(tiny_llama):
    """Over the allowed tokens the reported probabilities sum to one."""
    env = make(tiny_llama, temperature=0.5, allowed_tokens=ids("abc"), min_new_tokens=1).unwrapped
    for start, allowed in ((None, ids("abc")), (*ids("a"), [*ids("abc"), EOS])):
        total = 0.0
        for token in allowed:
            env.reset(options={"prompt_index": 0})
            if start is not None:
                env.step(start)
            total += math.exp(env.step(token)[-1]["ref_logprob"])
        assert total == pytest.approx(1.0, abs=1e-5)
