"""The native vector environment gives what Gymnasium's vectors of single environments give."""

from __future__ import annotations

import copy
import warnings

import gymnasium as gym
import numpy as np
import pytest
from conftest import BOS, EOS, PAD, ids
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import textrl_env
from textrl_env.rewards import Reward
from textrl_env.tasks import FunctionTask

MODES = list(AutoresetMode)
TASK = FunctionTask(
    ["2+2=", "say b", "c?", "a longer prompt"],
    ["4", "b", None, "d"],
    score=lambda text, sample: len(text) / 3 - text.count("b"),
)
CASES = {
    "plain": {},
    "named task": {"task": "reverse", "task_kwargs": {"max_length": 4, "alphabet": "abc"}},
    "stop strings": {"stop": ["b", "aa"]},
    "limit of one": {"max_new_tokens": 1},
    "truncation": {"on_limit": "truncate"},
    "masks": {"allowed_tokens": ids("ab"), "min_new_tokens": 2},
    "per token": {"reward": Reward(lambda text, sample: len(text) / 7, per="token")},
    "failing": {"reward": lambda text, sample: 1 / text.count("a"), "on_error": "mask"},
    "reference": {"kl_mode": "reference", "kl_coef": 0.3},
    "sampled reference": {
        "kl_mode": "reference",
        "temperature": 0.7,
        "allowed_tokens": ids("ab"),
        "min_new_tokens": 1,
        "on_limit": "truncate",
    },
}
# log π_ref of one row and of a batch are summed in another order; in float64 that is far below
# this. Everything else, and everything where no reference is scored, is equal to the bit.
INEXACT = {"ref_logprob", "kl"}
TOLERANCE = 1e-9


def options_of(model, case):
    return {
        "task": TASK, "model": model, "kl_mode": "none", "max_new_tokens": 4, "device": "cpu",
        "dtype": "float64", **case,
    }  # fmt: skip


def native(model, n, mode, case):
    return gym.make_vec("TextRL-v0", num_envs=n, autoreset_mode=mode, **options_of(model, case))


def of_singles(kind, model, n, mode, case):
    return kind([lambda: gym.make("TextRL-v0", **options_of(model, case))] * n, autoreset_mode=mode)


def assert_same(mine, theirs, key=""):
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), key
        for name in mine:
            assert_same(mine[name], theirs[name], name)
    elif mine is None or isinstance(mine, str | bool):
        assert mine == theirs, key
    else:
        assert type(mine) is type(theirs), key
        assert mine.dtype == theirs.dtype, key
        if mine.dtype == object:
            for one, other in zip(mine, theirs, strict=True):
                assert_same(one, other, key)
        elif key in INEXACT:
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE, err_msg=key)
        else:
            np.testing.assert_array_equal(mine, theirs, err_msg=key)


def draw_actions(generator, masks):
    """Allowed tokens, the end of sequence often enough for episodes of every length."""
    actions = []
    for mask in masks:
        allowed = np.flatnonzero(mask)
        common = np.intersect1d(allowed, [EOS, *ids("ab")])
        actions.append(generator.choice(common if generator.random() < 0.8 else allowed))
    return np.array(actions)


def compare(one, other, mode, seed, steps=14, exact=True):
    """Steps two vectors with the same seeds and actions; all that they return must be equal."""
    generator = np.random.default_rng(seed)
    assert one.observation_space == other.observation_space
    assert one.action_space == other.action_space
    assert one.single_observation_space == other.single_observation_space
    assert one.metadata["autoreset_mode"] is other.metadata["autoreset_mode"] is mode
    for mine_part, their_part in zip(*(v.reset(seed=seed) for v in (one, other)), strict=True):
        assert_same(mine_part, their_part)
    for _ in range(steps):
        actions = draw_actions(generator, one.unwrapped.action_masks())
        mine, theirs = one.step(actions), other.step(actions)
        for i, name in ((0, "observations"), (2, "terminations"), (3, "truncations"), (4, "info")):
            assert_same(mine[i], theirs[i], name)
        assert mine[1].dtype == theirs[1].dtype == np.float64
        np.testing.assert_allclose(mine[1], theirs[1], rtol=0, atol=0 if exact else TOLERANCE)
        dones = mine[2] | mine[3]
        if mode == AutoresetMode.DISABLED and dones.any():
            # Gymnasium's take the mask out of the options: each gets its own.
            restart = [venv.reset(options={"reset_mask": dones.copy()}) for venv in (one, other)]
            for mine_part, their_part in zip(*restart, strict=True):
                assert_same(mine_part, their_part)


@pytest.mark.filterwarnings("ignore:reward .* raised:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_native_equals_sync(tiny_llama, mode, case):
    exact = CASES[case].get("kl_mode") != "reference"
    one = native(tiny_llama, 3, mode, CASES[case])
    other = of_singles(SyncVectorEnv, tiny_llama, 3, mode, CASES[case])
    for seed in (0, 1):
        compare(one, other, mode, seed, exact=exact)


@pytest.mark.parametrize("mode", MODES)
def test_native_equals_async(tiny_llama, mode):
    case = {**CASES["truncation"], **CASES["reference"], "stop": ["b"]}
    one = native(tiny_llama, 2, mode, case)
    other = of_singles(AsyncVectorEnv, tiny_llama, 2, mode, case)
    try:
        compare(one, other, mode, seed=0, exact=False)
    finally:
        other.close()


@pytest.mark.filterwarnings("ignore:reward .* raised:UserWarning")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    n=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 10**6),
    model=st.sampled_from(["tiny_llama", "tiny_gpt2", "pad_is_eos"]),
    names=st.lists(st.sampled_from(list(CASES)), max_size=3),
)
def test_native_equals_sync_for_any_combination(models, n, mode, seed, model, names):
    case = {}
    for name in names:
        case |= CASES[name]
    if case.get("max_new_tokens") == 1:
        case["min_new_tokens"] = 0
    one = native(models[model], n, mode, case)
    other = of_singles(SyncVectorEnv, models[model], n, mode, case)
    compare(one, other, mode, seed, steps=8, exact=case.get("kl_mode") != "reference")


@pytest.fixture(scope="module")
def models(tiny_llama, tiny_gpt2, pad_is_eos):
    return {"tiny_llama": tiny_llama, "tiny_gpt2": tiny_gpt2, "pad_is_eos": pad_is_eos}


def test_the_comparison_covers_all_that_it_should(tiny_llama):
    """The episodes of `compare` end in every way, at different times."""
    venv = native(tiny_llama, 3, AutoresetMode.SAME_STEP, {"stop": ["aa"], "on_limit": "truncate"})
    generator = np.random.default_rng(0)
    venv.reset(seed=0)
    reasons, lengths, dones = set(), set(), set()
    for _ in range(40):
        *_, infos = venv.step(draw_actions(generator, venv.unwrapped.action_masks()))
        if "final_info" in infos:
            ended = infos["_final_info"]
            reasons |= set(infos["final_info"]["finish_reason"][ended])
            lengths |= set(infos["final_info"]["num_tokens"][ended].tolist())
            dones.add(int(ended.sum()))
    assert reasons == {"eos", "stop", "length"}
    assert lengths == {1, 2, 3, 4}
    assert dones >= {1, 2}


# Autoreset, in words


def start(model, mode, **options):
    venv = native(model, 2, mode, options)
    venv.reset(seed=0, options={"prompt_index": np.array([0, 2])})
    return venv


def test_next_step_ignores_the_action_after_the_end(tiny_llama):
    venv = start(tiny_llama, AutoresetMode.NEXT_STEP)
    observations, rewards, terminations, _, infos = venv.step(np.array([EOS, *ids("a")]))
    assert terminations.tolist() == [True, False]
    assert observations["input_ids"][0, 5] == EOS  # the last observation of the episode
    assert infos["text"][0] == ""
    assert infos["_text"].tolist() == [True, False]
    observations, rewards, terminations, _, infos = venv.step(np.array([-7, EOS]))
    assert (rewards[0], terminations[0]) == (0.0, False)
    assert infos["_prompt_index"].tolist() == [True, False]
    assert infos["_num_tokens"].tolist() == [False, True]
    assert infos["num_tokens"].tolist() == [0, 2]
    start_of_next = [BOS, *ids(infos["prompt"][0])]
    row = observations["input_ids"][0]
    assert row[: len(start_of_next)].tolist() == start_of_next
    assert set(row[len(start_of_next) :].tolist()) == {PAD}


def test_same_step_keeps_the_last_observation_and_info(tiny_llama):
    venv = start(tiny_llama, AutoresetMode.SAME_STEP)
    observations, _, terminations, _, infos = venv.step(np.array([EOS, *ids("a")]))
    assert terminations.tolist() == [True, False]
    final = infos["final_obs"][0]
    assert final["input_ids"][:6].tolist() == [BOS, *ids("2+2="), EOS]
    assert venv.single_observation_space.contains(final)
    assert infos["final_obs"][1] is None
    assert infos["final_info"]["prompt"][0] == "2+2="
    assert infos["final_info"]["num_tokens"].tolist() == [1, 0]
    assert infos["_final_info"].tolist() == infos["_final_obs"].tolist() == [True, False]
    assert infos["_prompt_index"].tolist() == [True, False]  # of the new episode
    assert observations["attention_mask"][0].sum() == 1 + len(ids(infos["prompt"][0]))
    before = final["input_ids"].copy()
    venv.step(np.array(ids("ab")))
    np.testing.assert_array_equal(final["input_ids"], before)


def test_disabled_leaves_the_restart_to_the_caller(tiny_llama):
    venv = start(tiny_llama, AutoresetMode.DISABLED)
    venv.step(np.array([EOS, *ids("a")]))
    with pytest.raises(RuntimeError, match=r"step\(\) was called on slot 0.*call reset\(\) first"):
        venv.step(np.array(ids("ab")))
    observations, infos = venv.reset(
        options={"reset_mask": np.array([True, False]), "prompt_index": 1}
    )
    assert infos["prompt"].tolist() == ["say b", None]
    assert infos["_prompt"].tolist() == [True, False]
    assert observations["attention_mask"].sum(1).tolist() == [6, 4]  # the other went on
    *_, infos = venv.step(np.array(ids("ab")))
    assert infos["num_tokens"].tolist() == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_reset_in_the_middle(tiny_llama, mode):
    """In every mode, and log π_ref follows the slot."""
    venv = start(tiny_llama, mode, kl_mode="reference")
    venv.step(np.array(ids("ab")))
    venv.reset(options={"reset_mask": np.array([False, True]), "prompt_index": 0})
    *_, infos = venv.step(np.array(ids("bb")))
    single = gym.make("TextRL-v0", **options_of(tiny_llama, {"kl_mode": "reference"}))
    single.reset(options={"prompt_index": 0})
    expected = single.step(*ids("b"))[-1]["ref_logprob"]
    assert infos["ref_logprob"][1] == pytest.approx(expected, abs=TOLERANCE)
    assert infos["num_tokens"].tolist() == [2, 1]


# Seeds and options


def test_seeds(tiny_llama):
    venv = native(tiny_llama, 3, AutoresetMode.NEXT_STEP, {"task": "addition"})
    by_int = venv.reset(seed=5)[1]["prompt_index"].tolist()
    assert venv.reset(seed=[5, 6, 7])[1]["prompt_index"].tolist() == by_int
    assert venv.reset(seed=np.int64(5))[1]["prompt_index"].tolist() == by_int
    assert venv.reset(seed=[7, None, 5])[1]["prompt_index"].tolist()[::2] == by_int[::-2]
    singles = [
        gym.make("TextRL-v0", **options_of(tiny_llama, {"task": "addition"})) for _ in range(3)
    ]
    assert [env.reset(seed=5 + i)[1]["prompt_index"] for i, env in enumerate(singles)] == by_int
    with pytest.raises(ValueError, match="Got 2 seeds for 3 slots; pass one each"):
        venv.reset(seed=[1, 2])


def test_an_episode_does_not_depend_on_its_neighbours(tiny_llama):
    """Slot 0 draws the same prompts whatever slot 1 does."""

    def prompts(actions):
        venv = native(tiny_llama, 2, AutoresetMode.SAME_STEP, {"task": "addition"})
        venv.reset(seed=0)
        return [
            int(venv.step(np.array([EOS, action]))[-1]["prompt_index"][0]) for action in actions
        ]

    assert prompts([EOS] * 6) == prompts([9] * 6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reset_masks": 1}, ValueError, "no option 'reset_masks'; did you mean 'reset_mask'"),
        ({"reset_mask": [True, False]}, ValueError, r"reset_mask is \[True, False\]; pass a bool"),
        ({"reset_mask": np.array([1, 0])}, ValueError, r"reset_mask is array\(\[1, 0\]\)"),
        ({"reset_mask": np.zeros(2, dtype=bool)}, ValueError, "with at least one True"),
        ({"reset_mask": np.ones(3, dtype=bool)}, ValueError, r"of shape \(2,\)"),
        ({"prompt_index": [0, 1, 2]}, ValueError, "one index, or one for each of the 2 slots"),
        ({"prompt_index": 0.5}, ValueError, "prompt_index is 0.5; pass one index"),
        (
            {"prompt_index": 4},
            IndexError,
            "prompt_index is 4, but task 'function' has prompts 0 to",
        ),
    ],
)
def test_unusable_reset_options(tiny_llama, options, error, message):
    with pytest.raises(error, match=message):
        native(tiny_llama, 2, AutoresetMode.DISABLED, {}).reset(options=options)


def test_reset_leaves_the_callers_options_alone(tiny_llama):
    options = {"reset_mask": np.array([True, False]), "prompt_index": 1}
    before = copy.deepcopy(options)
    start(tiny_llama, AutoresetMode.DISABLED).reset(options=options)
    assert_same(options["reset_mask"], before["reset_mask"])
    assert options.keys() == before.keys()


@pytest.mark.parametrize("seed", [None, 0])
def test_only_the_slots_of_the_mask_are_seeded(tiny_llama, seed):
    venv = native(tiny_llama, 2, AutoresetMode.DISABLED, {"task": "addition"})
    venv.reset(seed=0)
    first = venv.reset(seed=seed, options={"reset_mask": np.array([True, False])})[1]
    other = venv.reset(options={"reset_mask": np.array([False, True])})[1]
    venv.reset(seed=0)
    both = venv.reset(seed=None)[1]
    assert other["prompt_index"][1] == both["prompt_index"][1]
    if seed is None:
        assert first["prompt_index"][0] == both["prompt_index"][0]


# Actions


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.array([3]), r"Got actions of shape \(1,\) and dtype int64; pass one token id for each"),
        (np.array([3.0, 4.0]), r"shape \(2,\) and dtype float64"),
        (np.array([3, 259]), "Action 259 is outside the vocabulary"),
        (np.array([-1, 3]), "Action -1 is outside the vocabulary"),
    ],
)
def test_unusable_actions_change_nothing(tiny_llama, actions, message):
    venv = start(tiny_llama, AutoresetMode.NEXT_STEP, kl_mode="reference")
    with pytest.raises(ValueError, match=message):
        venv.step(actions)
    *_, infos = venv.step([3, 4])  # a list is fine
    assert infos["num_tokens"].tolist() == [1, 1]


def test_masked_actions(tiny_llama):
    venv = start(tiny_llama, AutoresetMode.NEXT_STEP, allowed_tokens=ids("ab"), min_new_tokens=1)
    masks = venv.unwrapped.action_masks()
    assert masks.shape == (2, 259)
    with pytest.raises(ValueError, match=r"Action 2 \('<eos>'\) is masked after 0 tokens"):
        venv.step(np.array([3 + ord("a"), EOS]))


@pytest.mark.parametrize("mode", MODES)
def test_step_before_reset(tiny_llama, mode):
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
        native(tiny_llama, 2, mode, {}).step(np.array([3, 4]))


# Making, wrapping, rendering


def test_make_vec_takes_the_native_class_without_a_warning(tiny_llama):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        venv = gym.make_vec("textrl_env:TextRL-v0", num_envs=3, model=tiny_llama, kl_mode="none")
    assert isinstance(venv.unwrapped, textrl_env.TextRLVectorEnv)
    assert venv.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert venv.num_envs == 3
    assert venv.unwrapped.eos_token_id == venv.unwrapped.tokenizer.eos_token_id == EOS
    assert venv.unwrapped.task.name == "addition"
    venv.action_space.seed(0)
    assert venv.observation_space.contains(venv.reset(seed=0)[0])
    assert venv.observation_space.contains(venv.step(venv.action_space.sample())[0])
    venv.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_make_vec_over_single_environments(tiny_llama, kind):
    venv = gym.make_vec(
        "TextRL-v0", num_envs=2, vectorization_mode=kind, model=tiny_llama, kl_mode="none"
    )
    assert venv.reset(seed=0)[0]["input_ids"].shape[0] == 2
    venv.close()


@pytest.mark.parametrize("mode", [*AutoresetMode, "NextStep"])
def test_the_mode_of_one_vector_is_not_that_of_another(tiny_llama, mode):
    venv = native(tiny_llama, 1, mode, {})
    assert venv.metadata["autoreset_mode"] is AutoresetMode(mode)
    assert "autoreset_mode" not in textrl_env.TextRLVectorEnv.metadata


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0; it must be a whole number of at least 1"),
        ({"num_envs": "4"}, "num_envs is '4'; it must be a whole number of at least 1"),
        ({"autoreset_mode": "never"}, "autoreset_mode is 'never'; use one of "),
        ({"render_mode": "gif"}, "render_mode is 'gif'"),
        ({"kl_mode": "x"}, "kl_mode is 'x'"),
    ],
)
def test_unusable_options(tiny_llama, options, message):
    with pytest.raises(ValueError, match=message):
        textrl_env.TextRLVectorEnv(**{"model": tiny_llama, "task": TASK, **options})


@pytest.mark.parametrize("mode", MODES)
def test_record_episode_statistics(tiny_llama, mode):
    venv = RecordEpisodeStatistics(native(tiny_llama, 2, mode, {"kl_mode": "none"}))
    venv.reset(seed=0)
    returns, lengths = [], []
    for actions in ([9, EOS], [EOS, 9], [9, 9], [EOS, EOS], [9, 9], [EOS, 9], [9, EOS]):
        _, _, terminations, truncations, infos = venv.step(np.array(actions))
        dones = terminations | truncations
        if dones.any():
            assert infos["_episode"].tolist() == dones.tolist()
            final = infos.get("final_info", infos)
            returns += infos["episode"]["r"][dones].tolist()
            lengths += infos["episode"]["l"][dones].tolist()
            # The statistics' length is the environment's own count of tokens.
            assert infos["episode"]["l"][dones].tolist() == final["num_tokens"][dones].tolist()
            assert infos["episode"]["r"][dones] == pytest.approx(final["task_reward"][dones])
            if mode == AutoresetMode.DISABLED:
                venv.reset(options={"reset_mask": dones})
    assert list(venv.return_queue) == pytest.approx(returns)
    assert len(lengths) >= 5


def test_rendering(tiny_llama):
    venv = gym.make_vec(
        "TextRL-v0", num_envs=2, render_mode="ansi", **options_of(tiny_llama, {})
    ).unwrapped
    with pytest.raises(RuntimeError, match=r"render\(\) was called before reset"):
        venv.render()
    venv.reset(seed=0, options={"prompt_index": np.array([0, 1])})
    venv.step(np.array([EOS, *ids("a")]))
    first, second = venv.render()
    assert "2+2=" in first
    assert "eos" in first
    assert "say" in second
    assert "tokens 1" in second
    venv.step(np.array([EOS, *ids("a")]))
    first, second = venv.render()
    assert "tokens 0" in first
    assert "tokens 2" in second

    images = gym.make_vec(
        "TextRL-v0", num_envs=2, render_mode="rgb_array", **options_of(tiny_llama, {})
    ).unwrapped
    images.reset(seed=0)
    assert [image.dtype for image in images.render()] == [np.uint8] * 2

    plain = native(tiny_llama, 2, AutoresetMode.NEXT_STEP, {}).unwrapped
    plain.reset(seed=0)
    with pytest.warns(UserWarning, match="without a render mode"):
        assert plain.render() is None
