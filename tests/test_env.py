"""The single environment: Gymnasium's rules, the episode, bad input, wrappers and rendering."""

from __future__ import annotations

import copy
import functools
import pickle
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from conftest import BOS, CONTEXT, EOS, PAD, ids
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import textrl_env
from textrl_env.config import TextRLConfig
from textrl_env.rewards import Reward, RewardError
from textrl_env.tasks import FunctionTask, Sample, Task

TASK = FunctionTask(["2+2=", "say b", "c?"], ["4", "b", None], score=lambda text, _: len(text))


def make(model, /, **options):
    options = {"task": TASK, "model": model, "kl_mode": "none", "device": "cpu", **options}
    return gym.make("TextRL-v0", **options)


def play(env, tokens, **reset):
    env.reset(**reset)
    for token in tokens:
        step = env.step(token)
    return step


# Checkers


@pytest.mark.parametrize("kl_mode", ["reference", "none"])
@pytest.mark.parametrize("limit", [1, 8])
def test_checkers_pass_without_a_warning(tiny_llama, kl_mode, limit, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make(tiny_llama, kl_mode=kl_mode, max_new_tokens=limit)
        check_env(env.unwrapped)
        sb3_check_env(env)
        sb3_check_env(env.unwrapped)


@pytest.mark.parametrize("on_limit", ["terminate", "truncate"])
@pytest.mark.parametrize("stop", [[], ["a"]])
def test_checkers_pass_with_other_rules(tiny_gpt2, on_limit, stop):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make(tiny_gpt2, on_limit=on_limit, stop=stop)
        check_env(env.unwrapped, skip_render_check=True)
        sb3_check_env(env)


def test_the_id_with_its_package_needs_no_import(tiny_llama):
    env = gym.make("textrl_env:TextRL-v0", task=TASK, model=tiny_llama)
    assert isinstance(env.unwrapped, textrl_env.TextRLEnv)
    assert env.unwrapped.task is TASK
    assert env.unwrapped.tokenizer.eos_token_id == env.unwrapped.eos_token_id == EOS


def test_public_names():
    for name in textrl_env.__all__:
        assert getattr(textrl_env, name) is not None
    assert set(textrl_env.__all__) <= set(dir(textrl_env))
    with pytest.raises(AttributeError, match="has no attribute 'TextRLEnvironment'"):
        textrl_env.TextRLEnvironment  # noqa: B018


def test_every_observation_is_in_the_space(tiny_llama):
    env = make(tiny_llama, task="reverse")
    env.action_space.seed(0)
    observation, _ = env.reset(seed=0)
    for _ in range(100):
        assert env.observation_space.contains(observation)
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            assert env.observation_space.contains(observation)
            observation, _ = env.reset()


# The episode


def test_observation_holds_prompt_and_tokens(tiny_llama):
    env = make(tiny_llama, max_prompt_tokens=8, max_new_tokens=3)
    observation, info = env.reset(options={"prompt_index": 0})
    prompt = [BOS, *ids("2+2=")]
    assert info == {"prompt": "2+2=", "prompt_index": 0}
    assert observation["input_ids"].tolist() == [*prompt, *[PAD] * 6]
    assert observation["attention_mask"].tolist() == [1] * 5 + [0] * 6
    assert observation["input_ids"].dtype == np.int64
    assert observation["attention_mask"].dtype == np.int8
    after = env.step(*ids("4"))[0]
    assert after["input_ids"].tolist() == [*prompt, *ids("4"), *[PAD] * 5]
    assert after["attention_mask"].tolist() == [1] * 6 + [0] * 5
    assert observation["input_ids"].tolist() == [*prompt, *[PAD] * 6]  # was not written to
    shorter, _ = env.reset(options={"prompt_index": 2})
    assert shorter["input_ids"].tolist() == [BOS, *ids("c?"), *[PAD] * 8]
    assert shorter["attention_mask"].tolist() == [1] * 3 + [0] * 8


def test_the_longest_prompt_is_measured(tiny_llama):
    env = make(tiny_llama, max_new_tokens=3)
    assert env.observation_space["input_ids"].shape == (len(ids("say b")) + 1 + 3,)


def test_infos_along_an_episode(tiny_llama):
    env = make(tiny_llama)
    env.reset(options={"prompt_index": 0})
    every_step = {"task_reward", "ref_logprob", "kl", "kl_coef", "num_tokens"}
    _, reward, terminated, truncated, info = env.step(*ids("4"))
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info.keys() == every_step
    assert info["num_tokens"] == 1
    _, reward, terminated, truncated, info = env.step(EOS)
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert {k: v for k, v in info.items() if k not in every_step} == {
        "text": "4",
        "prompt": "2+2=",
        "answer": "4",
        "correct": True,
        "finish_reason": "eos",
    }
    assert [type(v) for v in info.values()] == [float] * 4 + [int, str, str, str, bool, str]


@pytest.mark.parametrize(
    ("on_limit", "reward", "end"),
    [("terminate", 3.0, (True, False)), ("truncate", 0.0, (False, True))],
)
def test_limit(tiny_llama, on_limit, reward, end):
    env = make(tiny_llama, max_new_tokens=3, on_limit=on_limit)
    _, got, *ends, info = play(env, ids("abc"))
    assert (got, tuple(ends)) == (reward, end)
    assert info["finish_reason"] == "length"
    assert info["text"] == "abc"


@pytest.mark.parametrize("on_limit", ["terminate", "truncate"])
def test_a_reward_per_token_is_earned_up_to_the_limit(tiny_llama, on_limit):
    reward = Reward(lambda text, sample: len(text), per="token")
    env = make(tiny_llama, max_new_tokens=3, on_limit=on_limit, reward=reward)
    env.reset(seed=0)
    assert [env.step(token)[1] for token in ids("abc")] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("on_limit", ["terminate", "truncate"])
def test_end_of_sequence_at_the_limit_terminates(tiny_llama, on_limit):
    env = make(tiny_llama, max_new_tokens=3, on_limit=on_limit)
    _, reward, terminated, truncated, info = play(env, [*ids("ab"), EOS])
    assert (reward, terminated, truncated) == (2.0, True, False)
    assert info["finish_reason"] == "eos"


def test_stop_string(tiny_llama):
    env = make(tiny_llama, stop=["é!"])
    _, reward, terminated, _, info = play(env, ids("aé!"))
    assert (reward, terminated) == (1.0, True)
    assert (info["text"], info["finish_reason"]) == ("a", "stop")


def test_stop_of_the_task_unless_another_is_given(tiny_llama):
    task = FunctionTask(["p"], ["a"], stop=["#"])
    assert play(make(tiny_llama, task=task), ids("a#"))[-1]["finish_reason"] == "stop"
    assert not play(make(tiny_llama, task=task, stop=[]), ids("a#"))[2]


def test_end_by_the_task(tiny_llama):
    class Ends(FunctionTask):
        def is_finished(self, completion, sample):
            return completion == sample.answer

    env = make(tiny_llama, task=Ends(["p"], ["ok"]))
    _, reward, terminated, _, info = play(env, ids("ok"))
    assert (reward, terminated, info["finish_reason"]) == (1.0, True, "task")


def test_prompts_are_drawn_from_the_environments_own_generator(tiny_llama):
    env = make(tiny_llama, task="addition")
    first = [env.reset(seed=3)[1]["prompt_index"], *(env.reset()[1]["prompt_index"] for _ in "ab")]
    again = [env.reset(seed=3)[1]["prompt_index"], *(env.reset()[1]["prompt_index"] for _ in "ab")]
    assert first == again
    assert len(set(first)) > 1
    # A chosen prompt draws nothing.
    env.reset(seed=3, options={"prompt_index": 5})
    assert env.reset()[1]["prompt_index"] == first[0]


def test_chat_prompts_go_through_the_template(save_model):
    from conftest import small_llama

    from textrl_env.pretrain import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    task = FunctionTask([[{"role": "user", "content": "hi"}]], ["x"])
    env = make(save_model(small_llama(), tokenizer), task=task)
    observation, info = env.reset()
    assert info["prompt"] == "<u>hi<a>"
    # The template writes special tokens itself: none is added.
    assert observation["input_ids"][: len("<u>hi<a>")].tolist() == ids("<u>hi<a>")


# Tokenizers


@pytest.mark.parametrize("fixture", ["pad_is_eos", "no_pad"])
def test_padding_is_told_by_the_mask_not_by_the_token(fixture, request):
    env = make(request.getfixturevalue(fixture), kl_mode="reference", max_new_tokens=3)
    observation, _ = env.reset(options={"prompt_index": 2})
    assert observation["input_ids"].tolist() == [BOS, *ids("c?"), *[EOS] * 6]
    assert observation["attention_mask"].sum() == 3
    assert env.observation_space.contains(observation)
    observation, _, terminated, _, info = env.step(EOS)
    assert terminated
    assert observation["attention_mask"].sum() == 4
    assert info["finish_reason"] == "eos"


def test_the_padding_token_does_not_change_a_reward(tiny_llama, pad_is_eos, no_pad):
    """The three have the same weights."""
    rewards = [
        play(make(model, kl_mode="reference"), [*ids("ab"), EOS], seed=0)[1]
        for model in (tiny_llama, pad_is_eos, no_pad)
    ]
    assert rewards[0] == rewards[1] == rewards[2]


def test_a_vocabulary_wider_than_the_tokenizer(save_model):
    """Embeddings are often padded: such a token is no text."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=264, n_embd=8, n_layer=1, n_head=1, n_positions=64)
        )
    model.config.eos_token_id = model.config.bos_token_id = None
    env = make(save_model(model), kl_mode="reference", render_mode="ansi")
    assert env.action_space.n == 264
    assert play(env, [*ids("a"), 263, EOS])[-1]["text"] == "a"
    assert "a" in env.render()


def test_a_vocabulary_narrower_than_the_tokenizer(save_model):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=100, n_embd=8, n_layer=1, n_head=1, n_positions=64)
        )
    model.config.eos_token_id = model.config.bos_token_id = None
    with pytest.raises(ValueError, match="has 259 tokens, but the model's vocabulary has 100"):
        make(save_model(model))


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_mode": "ref"}, "kl_mode is 'ref'; it must be one of policy, reference, none"),
        ({"kl_estimator": "k4"}, "kl_estimator is 'k4'; it must be one of k1, k2, k3, abs"),
        ({"on_limit": "stop"}, "on_limit is 'stop'; it must be one of terminate, truncate"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of auto, float32"),
        ({"kl_coef": -0.1}, "kl_coef is -0.1; it must be finite and not negative"),
        ({"kl_coef": float("inf")}, "kl_coef is inf"),
        ({"kl_coef": "0.1"}, "kl_coef is '0.1'"),
        ({"temperature": 0}, "temperature is 0; it must be positive and finite .*deterministic"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens is -1"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1; it must be a whole number"),
        ({"min_new_tokens": None}, "min_new_tokens is None"),
        (
            {"min_new_tokens": 4, "max_new_tokens": 4},
            "min_new_tokens is 4 and max_new_tokens 4; the minimum must be smaller",
        ),
        ({"reward_timeout": 0}, "reward_timeout is 0; it must be a positive number of seconds"),
        ({"stop": "\n"}, r"stop is '\\n'; it must be a list of strings"),
        (
            {"stop": ["a", ""]},
            r"stop is \['a', ''\]; it must be a list of strings that are not emp",
        ),
        ({"task_kwargs": [1]}, r"task_kwargs is \[1\]; it must be a mapping"),
        ({"allowed_tokens": [999]}, "allowed_tokens holds 999, outside the vocabulary of 259"),
        ({"allowed_tokens": [], "min_new_tokens": 1}, "No token but end-of-sequence is allowed"),
        ({"on_error": "ignore"}, "on_error must be 'raise', 'mask' or a number, got 'ignore'"),
        ({"task": "additoin"}, "unknown task 'additoin': did you mean 'addition'"),
        ({"model": "no-such-model"}, "Model 'no-such-model' could not be loaded"),
        ({"reference": "no-such-model"}, "Model 'no-such-model' could not be loaded"),
        (
            {"render_mode": "gif"},
            r"render_mode is 'gif'; use one of \['ansi', 'human', 'rgb_array'",
        ),
        (
            {"max_new_tokens": CONTEXT},
            f"take up to {CONTEXT + 6} tokens, but the model's context has {CONTEXT}",
        ),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if type(value) is dict else "",
)
@pytest.mark.filterwarnings("ignore:.*render_mode='gif'")
def test_unusable_options(tiny_llama, options, message):
    with pytest.raises(ValueError, match=message):
        make(tiny_llama, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coeff": 0.1}, "TextRL-v0 has no option 'kl_coeff'; did you mean 'kl_coef'?"),
        ({"xyz": 0.1}, "TextRL-v0 has no option 'xyz'; use task, task_kwargs, model"),
        ({"task": 7}, "task must be a name or a Task, got int"),
        ({"task": "addition", "task_kwargs": {"digit": 1}}, "its keywords: digits, split, seed"),
        ({"reward": "len"}, "a reward must be a callable, got 'len'"),
    ],
)
@pytest.mark.parametrize("vector", [False, True])
def test_options_of_the_wrong_type(tiny_llama, options, message, vector):
    options = {"task": TASK, "model": tiny_llama, "kl_mode": "none", **options}
    make_either = functools.partial(gym.make_vec, num_envs=2) if vector else gym.make
    with pytest.raises(TypeError, match=message):
        make_either("TextRL-v0", **options)


def test_every_option_is_documented():
    import inspect
    from dataclasses import fields

    for field in fields(TextRLConfig):
        assert f"\n    {field.name}: " in inspect.getdoc(TextRLConfig)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (259, r"Action 259 is outside the vocabulary; use a token id in \[0, 258\]"),
        (-1, "Action -1 is outside the vocabulary"),
        (1.0, "The action is 1.0; pass one integer"),
        (None, "The action is None; pass one integer"),
        (np.array([3]), r"The action is array\(\[3\]\); pass one integer"),
        ("a", "The action is 'a'; pass one integer"),
    ],
)
def test_unusable_actions_change_nothing(tiny_llama, action, message):
    env = make(tiny_llama, kl_mode="reference").unwrapped
    env.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        env.step(action)
    assert env.step(EOS)[-1]["num_tokens"] == 1


@pytest.mark.parametrize("action", [9, np.int64(9), np.int32(9), np.array(9)])
def test_integers_of_any_kind_are_actions(tiny_llama, action):
    assert play(make(tiny_llama).unwrapped, [action])[-1]["num_tokens"] == 1


def test_masked_actions(tiny_llama):
    env = make(tiny_llama, allowed_tokens=ids("ab"), min_new_tokens=1).unwrapped
    env.reset(seed=0)
    assert np.flatnonzero(env.action_masks()).tolist() == ids("ab")
    with pytest.raises(
        ValueError, match=r"Action 2 \('<eos>'\) is masked after 0 tokens.*sample fr"
    ):
        env.step(EOS)
    with pytest.raises(ValueError, match=r"Action 102 \('c'\) is masked after 0 tokens"):
        env.step(*ids("c"))
    env.step(*ids("a"))
    assert np.flatnonzero(env.action_masks()).tolist() == [EOS, *ids("ab")]
    assert env.step(EOS)[2]


def test_step_outside_an_episode(tiny_llama):
    env = make(tiny_llama).unwrapped
    with pytest.raises(RuntimeError, match=r"over or has not begun; call reset\(\) first"):
        env.step(EOS)
    env.reset(seed=0)
    env.step(EOS)
    with pytest.raises(RuntimeError, match=r"over or has not begun; call reset\(\) first"):
        env.step(EOS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"prompt_indx": 1},
            ValueError,
            r"reset\(\) has no option 'prompt_indx'; did you mean 'pr",
        ),
        ({"reset_mask": 1}, ValueError, r"has no option 'reset_mask'; use prompt_index"),
        (
            {"prompt_index": 3},
            IndexError,
            "prompt_index is 3, but task 'function' has prompts 0 to 2",
        ),
        ({"prompt_index": -1}, IndexError, "prompt_index is -1"),
        ({"prompt_index": 0.5}, ValueError, "prompt_index is 0.5; pass one integer"),
    ],
)
def test_unusable_reset_options(tiny_llama, options, error, message):
    with pytest.raises(error, match=message):
        make(tiny_llama).reset(options=options)


def test_a_prompt_longer_than_the_limit(tiny_llama):
    env = make(tiny_llama, max_prompt_tokens=4)
    env.reset(options={"prompt_index": 2})
    with pytest.raises(ValueError, match=r"Prompt 1 .* has 6 tokens.*pass max_prompt_tokens=6"):
        env.reset(options={"prompt_index": 1})


class Broken(Task):
    """Prompts as a task of one's own might have them."""

    name = "broken"

    def __init__(self, *prompts):
        self.prompts = prompts

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, index):
        return Sample(self.prompts[index], "a", index)

    def score(self, completion, sample):
        return 0.0


def test_unusable_prompts(tiny_llama):
    with pytest.raises(ValueError, match="Prompt 1 of task 'broken' is empty"):
        make(tiny_llama, task=Broken("a", ""))
    with pytest.raises(ValueError, match="Task 'broken' has no prompts"):
        make(tiny_llama, task=Broken())
    with pytest.raises(ValueError, match="has no chat template; use text prompts or a model with"):
        make(tiny_llama, task=Broken(({"role": "user", "content": "hi"},)))


# Rewards that fail

FAULTS = {
    "raises": (lambda text, sample: 1 / 0, "ZeroDivisionError"),
    "NaN": (lambda text, sample: float("nan"), "returned nan, not a finite number"),
    "None": (lambda text, sample: None, "returned None instead of a number"),
    "hangs": (lambda text, sample: time.sleep(60), "took longer than the limit of 0.2 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("on_error", ["raise", "mask", -2.0])
def test_a_reward_that_fails(tiny_llama, fault, on_error):
    reward, message = FAULTS[fault]
    timeout = 0.2 if fault == "hangs" else None
    env = make(tiny_llama, reward=reward, on_error=on_error, reward_timeout=timeout)
    try:
        if on_error == "raise":
            with pytest.raises(RewardError, match=f"{message}.*completion 'a'"):
                play(env, [*ids("a"), EOS])
            return
        with pytest.warns(UserWarning, match=message):
            _, reward, terminated, _, info = play(env, [*ids("a"), EOS])
    finally:
        env.close()
    assert terminated
    assert reward == info["task_reward"] == (0.0 if on_error == "mask" else -2.0)
    assert info["masked"] == (on_error == "mask")
    assert message in info["reward_error"]


# Wrappers, copies and rendering


def test_wrappers(tiny_llama):
    env = RecordEpisodeStatistics(TimeLimit(make(tiny_llama), 2))
    env.reset(seed=0)
    assert env.unwrapped.action_masks().all()
    env.step(*ids("a"))
    _, _, terminated, truncated, info = env.step(*ids("b"))
    assert (terminated, truncated) == (False, True)
    assert info["episode"]["l"] == 2
    play(env, [*ids("a"), EOS])
    assert env.return_queue[-1] == 1.0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_has_the_options_and_no_episode(tiny_llama, duplicate):
    env = make(tiny_llama, task="addition", max_new_tokens=5).unwrapped
    env.reset(seed=0)
    twin = duplicate(env)
    with pytest.raises(RuntimeError, match="has not begun"):
        twin.step(EOS)
    one, other = env.reset(seed=1), twin.reset(seed=1)
    assert one[1] == other[1]
    np.testing.assert_array_equal(one[0]["input_ids"], other[0]["input_ids"])


def test_ansi(tiny_llama):
    env = make(tiny_llama, kl_mode="reference", render_mode="ansi")
    env.reset(options={"prompt_index": 0})
    assert "2+2=" in env.render()
    env.step(*ids("4"))
    assert "tokens 1" in env.render()
    env.step(EOS)
    assert "eos" in env.render()
    env.reset(options={"prompt_index": 1})
    assert "tokens 0" in env.render()


def test_rgb_array(tiny_llama):
    env = make(tiny_llama, kl_mode="reference", render_mode="rgb_array")
    env.reset(options={"prompt_index": 0})
    first = env.render()
    assert first.dtype == np.uint8
    assert first.ndim == 3
    env.step(*ids("4"))
    second = env.render()
    assert second.shape == first.shape
    assert (first != second).any()


def test_human_prints_every_step(tiny_llama, capsys):
    env = make(tiny_llama, render_mode="human")
    env.reset(options={"prompt_index": 0})
    assert "2+2=" in capsys.readouterr().out
    env.step(*ids("4"))
    assert "tokens 1" in capsys.readouterr().out
    assert env.render() is None


def test_rendering_at_the_wrong_time(tiny_llama):
    env = make(tiny_llama, render_mode="ansi").unwrapped
    with pytest.raises(RuntimeError, match=r"render\(\) was called before reset"):
        env.render()
    env = make(tiny_llama).unwrapped
    env.reset()
    with pytest.warns(UserWarning, match="without a render mode"):
        assert env.render() is None


def test_maskable_ppo_sees_the_masks(tiny_llama):
    sb3_contrib = pytest.importorskip("sb3_contrib")
    env = make(tiny_llama, allowed_tokens=ids("ab"), min_new_tokens=1, max_new_tokens=3)
    model = sb3_contrib.MaskablePPO(
        "MultiInputPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu"
    )
    model.learn(32)  # a masked action would raise
    assert model.num_timesteps == 32
