"""The control benchmarks: their statistics, a tiny run of them, and the zoo's hyperparameters."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks import control, control_speed, record
from benchmarks.statistics import (
    bootstrap_interval,
    interquartile_mean,
    probability_of_improvement,
)
from benchmarks.zoo import ZOO, Entry, entry

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is out of date"),
    pytest.mark.filterwarnings("ignore:builtin type [sS]wig"),
    pytest.mark.filterwarnings("ignore:You have specified a mini-batch size"),
]


def test_interquartile_mean_is_that_of_the_middle_half():
    ramp = np.arange(8.0)[:, None]
    assert interquartile_mean(ramp) == (2 + 3 + 4 + 5) / 4
    assert interquartile_mean(ramp[::-1]) == 3.5
    assert interquartile_mean(np.array([[0.0], [1.0], [8.0]])) == 3  # too few to leave any out
    # Of all tasks together, and for each point of a curve by itself.
    assert interquartile_mean(np.arange(8.0).reshape(4, 2)) == 3.5
    curves = np.stack([ramp, -ramp, 0 * ramp], axis=-1)
    np.testing.assert_allclose(interquartile_mean(curves), [3.5, -3.5, 0])


def test_bootstrap_interval_of_a_mean_is_the_normal_one():
    """The bootstrap variance of a mean is the variance over n; strata add up like independents."""

    def mean(scores):
        return scores.mean()

    generator = np.random.default_rng(0)
    one = generator.normal(size=(200, 1))
    low, high = bootstrap_interval(mean, one, resamples=4000)
    half = 1.96 * one.std() / np.sqrt(200)
    np.testing.assert_allclose([low, high], [one.mean() - half, one.mean() + half], atol=0.01)
    # Tasks of different levels: their difference is no uncertainty, since each is resampled alone.
    two = np.concatenate([one, one + 100], axis=1)
    low, high = bootstrap_interval(mean, two, resamples=4000)
    half = 1.96 * one.std() / np.sqrt(400)
    centre = one.mean() + 50
    np.testing.assert_allclose([low, high], [centre - half, centre + half], atol=0.01)
    # Two scores: the resamples are (a, a), (a, b), (b, a), (b, b).
    low, high = bootstrap_interval(mean, np.array([[0.0], [1.0]]), confidence=0.4)
    assert (low, high) == (0.5, 0.5)
    assert bootstrap_interval(mean, two)[0] == bootstrap_interval(mean, two)[0]
    curve = bootstrap_interval(interquartile_mean, np.ones((5, 1, 3)))
    np.testing.assert_array_equal(curve, np.ones((2, 3)))


def test_probability_of_improvement():
    x = np.array([[1.0, 5.0], [3.0, 5.0]])
    y = np.array([[2.0, 5.0], [0.0, 5.0], [4.0, 5.0]])
    # First task: 1 beats 0, and 3 beats 2 and 0; second task: ties.
    assert probability_of_improvement(x, y) == pytest.approx((3 / 6 + 1 / 2) / 2)
    assert probability_of_improvement(y, x) == pytest.approx((3 / 6 + 1 / 2) / 2)
    assert probability_of_improvement(x + 10, y) == 1


def tiny(tmp_path, **changes):
    options = {
        "envs": ("CartPole-v1",),
        "agents": ("ppo", "sb3-ppo"),
        "seeds": 2,
        "workers": 1,
        "total_timesteps": 256,
        "evaluations": 3,
        "eval_episodes": 2,
        "final_episodes": 2,
        "results": tmp_path / "results",
        "images": tmp_path / "images",
    }
    return control.Config(**(options | changes))


def test_runs_are_recorded_resumed_and_reported(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "results"
    monkeypatch.setitem(ZOO, "Missing-v0", Entry())
    with pytest.raises(SystemExit, match="2 of 4 runs failed"):
        control.main(tiny(tmp_path, envs=("Missing-v0", "CartPole-v1"), seeds=1))
    assert "Missing-v0, ppo, seed 0 failed: NameNotFound" in capsys.readouterr().out
    assert record.read("control/Missing-v0/ppo", folder=folder) is None
    control.main(tiny(tmp_path))
    assert "2/2: CartPole-v1, sb3-ppo, seed 1" in capsys.readouterr().out  # none of seed 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}

    results = record.read("control/CartPole-v1/ppo", folder=folder)["results"]
    assert [run["seed"] for run in results] == [0, 1]
    for run in results:
        assert run["timesteps"] == [0, 128, 256]
        assert len(run["returns"]) == 3
        assert run["returns"][-1] == pytest.approx(np.mean(run["final_returns"]))
        assert run["num_timesteps"] == 256
    # Both agents start from the same policy, and are evaluated on the same episodes.
    peers = record.read("control/CartPole-v1/sb3-ppo", folder=folder)["results"]
    assert [run["returns"][0] for run in peers] == [run["returns"][0] for run in results]

    control.main(tiny(tmp_path))
    assert "seed" not in capsys.readouterr().out.partition("┏")[0]
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    image = (tmp_path / "images" / "CartPole-v1.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) < 100_000
    control.main(tiny(tmp_path, markdown=True))
    header, _, row = capsys.readouterr().out.strip().splitlines()
    assert header == "| environment | steps | seeds | PPO | PPO (Stable-Baselines3) |"
    assert row.startswith("| `CartPole-v1` | 256 | 2 |")
    with pytest.raises(SystemExit, match="recorded with another total_timesteps"):
        control.main(tiny(tmp_path, total_timesteps=512))


def test_evaluation_is_of_the_raw_return_with_the_statistics_of_training():
    settings = entry("MountainCar-v0").settings("ppo")
    assert settings.norm_obs
    assert settings.norm_reward
    env = control.normalized(make_vec_env("MountainCar-v0", 2, seed=0), settings)
    eval_env = control.normalized(make_vec_env("MountainCar-v0", 2), settings, training=False)
    agent = control.make_agent("ppo", env, settings, 0)
    curve = control.CurveCallback([], eval_env, 2)
    agent.learn(16, callback=CallbackList([curve]))
    assert curve.evaluate(2) == [-200, -200]
    assert isinstance(eval_env, VecNormalize)
    np.testing.assert_array_equal(eval_env.obs_rms.mean, env.obs_rms.mean)
    assert env.gamma == agent.gamma


@pytest.mark.parametrize("env_id", ZOO)
def test_every_agent_takes_its_settings(env_id, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a file
    try:
        gym.make(env_id).close()
    except gym.error.DependencyNotInstalled:
        pytest.skip("MuJoCo and Box2D come with the extra `control`")
    for name in control.AGENTS:
        settings = entry(env_id).settings(name)
        env = control.normalized(make_vec_env(env_id, settings.n_envs), settings)
        agent = control.make_agent(name, env, settings, 0)
        for option in ("gamma", "n_steps", "batch_size", "group_size", "target_kl"):
            if option in settings.arguments:
                assert getattr(agent, option) == settings.arguments[option]
        assert entry(env_id).settings("sb3-ppo") is entry(env_id).settings("ppo")


def test_schedules_and_classes_are_resolved():
    arguments = entry("CartPole-v1").settings("ppo").resolved_arguments()
    assert [arguments["learning_rate"](p) for p in (1.0, 0.5, 0.0)] == [1e-3, 5e-4, 0]
    arguments = entry("HalfCheetah-v4").settings("ppo").resolved_arguments()
    assert arguments["policy_kwargs"]["activation_fn"].__name__ == "ReLU"


def test_speed_is_timed_in_pairs(monkeypatch):
    times = iter([1.0, 5.0, *[4.0, 2.0] * 3])
    calls = []

    def fake(case, column, timesteps):
        calls.append((column, timesteps))
        return next(times), timesteps

    monkeypatch.setattr(control_speed, "time_in_fresh_process", fake)
    config = control_speed.Config(kinds=("vec",), pairs=3, seconds=5.0)
    result = control_speed.compare(control_speed.Case("CartPole-v1", True), config)
    assert calls[:2] == [("sb3", 256), ("sb3", 1280)]
    assert [column for column, _ in calls[2:]] == ["sb3", "vec", "vec", "sb3", "sb3", "vec"]
    assert result["vec_ratios"] == [2.0, 0.5, 2.0]
    assert result["vec_ratio_median"] == 2.0
    case = control_speed.Case("Pendulum-v1", False)
    assert case.rollout == 2048
    assert control_speed.has_native("CartPole-v1")
