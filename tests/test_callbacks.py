"""Every callback of Stable-Baselines3, unmodified, on CartPole and on a language model."""

import re
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    ProgressBarCallback,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from agents import PPO
from textrl_env.sb3 import GymVecEnv


class Recorder(BaseCallback):
    """Keeps the order of the calls, and the steps and ends of episodes that each was shown."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at, self.events, self.steps, self.dones = stop_at, [], [], []

    def _init_callback(self):
        self.events.append("init")

    def _on_training_start(self):
        assert self.locals["total_timesteps"] > 0
        self.events.append("training_start")

    def _on_rollout_start(self):
        self.events.append("rollout_start")

    def _on_step(self):
        self.events.append("step")
        self.steps.append(self.num_timesteps)
        self.dones.append(int(np.sum(self.locals.get("dones", 0))))
        return self.n_calls != self.stop_at

    def _on_rollout_end(self):
        self.events.append("rollout_end")

    def _on_training_end(self):
        self.events.append("training_end")

    def triggers(self, n_steps):
        """The steps at which something that happens every `n_steps` timesteps is due."""
        due, last = [], 0
        for step in self.steps:
            if step - last >= n_steps:
                due.append(step)
                last = step
        return due


def constant(reward):
    """CartPole with the same reward at each step."""
    return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda _: reward)


def text_env(model, **options):
    options = {"num_envs": 8, "kl_coef": 0.01} | options
    return gym.make_vec(
        "textrl_env:TextRL-v0", task="addition", task_kwargs={"digits": 1}, model=model, **options
    )


@pytest.fixture(params=["cartpole", "text"])
def setting(request, tiny_llama):
    """An agent, an environment to evaluate it in, and a long enough training."""
    if request.param == "cartpole":
        env = make_vec_env("CartPole-v1", n_envs=2, seed=0)
        agent = PPO("MlpPolicy", env, n_steps=16, batch_size=32, n_epochs=1, seed=0)
        same = make_vec_env(lambda: constant(0.0))
        return SimpleNamespace(
            agent=agent, total=96, eval_env=make_vec_env("CartPole-v1"), same=same
        )
    agent = PPO("LMPolicy", text_env(tiny_llama), n_epochs=1, seed=0)

    def evaluation(**options):
        env = text_env(tiny_llama, num_envs=2, kl_mode="none", **options)
        return VecMonitor(GymVecEnv(env))

    same = evaluation(reward=lambda text, sample: 0.5)
    return SimpleNamespace(agent=agent, total=96, eval_env=evaluation(), same=same)


# The order of the calls


def test_the_calls_come_in_stable_baselines3_order(setting):
    recorder = Recorder()
    setting.agent.learn(setting.total, callback=recorder)
    rollout = "( rollout_start( step)+ rollout_end)"
    order = f"init training_start{rollout}{{2,}} training_end"
    assert re.fullmatch(order, " ".join(recorder.events))
    if isinstance(setting.agent.n_steps, int):
        one = ["rollout_start", *["step"] * 16, "rollout_end"]
        assert recorder.events == ["init", "training_start", *one * 3, "training_end"]
        assert recorder.steps == list(range(2, 97, 2))


@pytest.mark.parametrize("answer", [False, np.False_, 0])
def test_whatever_is_false_stops(setting, answer):
    """The rollout is not ended, the training is, and the other callbacks hear of the step."""
    recorder = Recorder()

    class Stop(BaseCallback):
        def _on_step(self):
            return answer if self.n_calls == 3 else True

    setting.agent.learn(setting.total, callback=[Stop(), recorder])
    expected = ["init", "training_start", "rollout_start", *["step"] * 3, "training_end"]
    assert recorder.events == expected
    assert setting.agent.num_timesteps == recorder.steps[-1]
    assert setting.agent.learn(1).num_timesteps > 0


def test_lists_and_functions(setting):
    first, second, calls = Recorder(), Recorder(), []

    def function(local_variables, global_variables):
        calls.append((local_variables["self"].num_timesteps, len(local_variables["infos"])))
        return True

    nested = CallbackList([first, CallbackList([second, ConvertCallback(function)])])
    setting.agent.learn(setting.total, callback=[nested])
    assert first.events == second.events
    assert calls == [(step, setting.agent.n_envs) for step in first.steps]


# What the stock callbacks do


def test_checkpoint(setting, tmp_path):
    recorder = Recorder()
    checkpoints = CheckpointCallback(5, str(tmp_path), "model", save_vecnormalize=True)
    setting.agent.learn(setting.total, callback=[recorder, checkpoints])
    expected = {f"model_{steps}_steps.zip" for steps in recorder.steps[4::5]}
    assert len(expected) > 1
    assert {path.name for path in tmp_path.iterdir()} == expected
    for name in expected:
        assert PPO.load(tmp_path / name).num_timesteps <= recorder.steps[-1]


def test_checkpoint_with_the_normaliser(tmp_path):
    env = VecNormalize(make_vec_env("CartPole-v1", n_envs=2, seed=0))
    agent = PPO("MlpPolicy", env, n_steps=16, batch_size=32, seed=0)
    agent.learn(32, callback=CheckpointCallback(16, str(tmp_path), save_vecnormalize=True))
    assert {path.name for path in tmp_path.iterdir()} == {
        "rl_model_32_steps.zip", "rl_model_vecnormalize_32_steps.pkl"
    }  # fmt: skip
    loaded = VecNormalize.load(
        str(tmp_path / "rl_model_vecnormalize_32_steps.pkl"), make_vec_env("CartPole-v1", n_envs=2)
    )
    np.testing.assert_array_equal(loaded.obs_rms.mean, env.obs_rms.mean)
    assert loaded.obs_rms.count == pytest.approx(2 + 32, abs=1e-3)  # the steps and the reset


@pytest.mark.filterwarnings("error::UserWarning")
def test_eval(setting, tmp_path):
    recorder = Recorder()
    evaluate = EvalCallback(
        setting.eval_env, eval_freq=4, n_eval_episodes=3, log_path=str(tmp_path),
        best_model_save_path=str(tmp_path), callback_after_eval=(after := Recorder()),
        callback_on_new_best=(best := Recorder()), verbose=0,
    )  # fmt: skip
    setting.agent.learn(setting.total, callback=[recorder, evaluate])
    evaluations = np.load(tmp_path / "evaluations.npz")
    assert evaluations["timesteps"].tolist() == recorder.steps[3::4] == after.steps
    assert evaluations["results"].shape == (len(after.steps), 3)
    means = evaluations["results"].mean(1)
    assert evaluate.best_mean_reward == pytest.approx(means.max())
    new_best = [mean > max(means[:i], default=-np.inf) for i, mean in enumerate(means)]
    assert len(best.events) - 1 == sum(new_best)  # it is initialised, and never started
    assert PPO.load(tmp_path / "best_model").num_timesteps <= best.num_timesteps


def test_eval_takes_the_statistics_of_the_training_normaliser():
    env = VecNormalize(make_vec_env("CartPole-v1", n_envs=2, seed=0))
    held_out = VecNormalize(make_vec_env("CartPole-v1"), training=False, norm_reward=False)
    agent = PPO("MlpPolicy", env, n_steps=16, batch_size=32, seed=0)
    assert agent.get_vec_normalize_env() is env
    agent.learn(32, callback=EvalCallback(held_out, eval_freq=16, n_eval_episodes=1, verbose=0))
    np.testing.assert_array_equal(held_out.obs_rms.mean, env.obs_rms.mean)
    assert held_out.obs_rms.count == env.obs_rms.count > 30


def test_stop_on_reward_threshold(setting):
    for threshold, calls in ((-1e9, 4), (1e9, None)):
        recorder = Recorder()
        evaluate = EvalCallback(
            setting.eval_env, eval_freq=4, n_eval_episodes=1, verbose=0,
            callback_on_new_best=StopTrainingOnRewardThreshold(threshold, verbose=1),
        )  # fmt: skip
        setting.agent.learn(setting.total, callback=[recorder, evaluate])
        assert (recorder.n_calls == calls) == (calls is not None)
        assert (setting.agent.num_timesteps < setting.total) == (calls is not None)


def test_stop_on_no_model_improvement(setting):
    """The first evaluation is the best, and the third after it is one too many."""
    recorder = Recorder()
    evaluate = EvalCallback(
        setting.same, eval_freq=2, n_eval_episodes=1, verbose=0,
        callback_after_eval=StopTrainingOnNoModelImprovement(2),
    )  # fmt: skip
    setting.agent.learn(setting.total, callback=[recorder, evaluate])
    assert recorder.n_calls == 2 * 4


def test_every_n_timesteps(setting):
    recorder, child = Recorder(), Recorder()
    setting.agent.learn(setting.total, callback=[recorder, EveryNTimesteps(20, child)])
    assert child.steps == recorder.triggers(20)
    assert len(child.steps) > 2
    assert child.dones == [recorder.dones[recorder.steps.index(step)] for step in child.steps]


def test_log_every_n_timesteps(setting):
    class Writer(KVWriter):
        steps = ()

        def write(self, key_values, key_excluded, step=0):
            self.steps = (*self.steps, step)

        def close(self):
            pass

    recorder, writer = Recorder(), Writer()
    setting.agent.set_logger(Logger(None, [writer]))
    setting.agent.learn(
        setting.total, callback=[recorder, LogEveryNTimesteps(20)], log_interval=None
    )
    assert list(writer.steps) == recorder.triggers(20)


def test_stop_on_max_episodes(setting, capsys):
    recorder = Recorder()
    setting.agent.learn(
        10_000, callback=[recorder, StopTrainingOnMaxEpisodes(2, verbose=1)], tb_log_name="named"
    )
    limit = 2 * setting.agent.n_envs
    assert sum(recorder.dones[:-1]) < limit <= sum(recorder.dones)
    assert "named model reached max_episodes=2" in capsys.readouterr().out


def test_stock_progress_bar(setting):
    recorder, bar = Recorder(), ProgressBarCallback()
    setting.agent.learn(setting.total, callback=[recorder, bar])
    assert bar.pbar.total == setting.total
    assert bar.pbar.n == recorder.n_calls * setting.agent.n_envs
    assert bar.pbar.disable  # closed
