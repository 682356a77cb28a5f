"""A run that is cut and resumed equals one that never was, and loading runs no code."""

import io
import json
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback

from agents import GRPO, PPO, RLOO, ReinforcePlusPlusBaseline
from agents.kl_control import AdaptiveKL


def make_env(model, num_envs=4, **options):
    return gym.make_vec(
        "textrl_env:TextRL-v0",
        **{"num_envs": num_envs, "task": "copy", "model": model, "max_new_tokens": 4, **options},
    )


def make_agent(agent_class, model, **kwargs):
    if agent_class is not PPO:
        kwargs.setdefault("group_size", 2)
    return agent_class(
        "LMPolicy", make_env(model), learning_rate=1e-3, batch_size=2, seed=0, **kwargs
    )


def weights(agent):
    return torch.cat([parameter.detach().flatten() for parameter in agent.policy.parameters()])


class SaveAt(BaseCallback):
    """Saves once, at a given moment, and goes on."""

    def __init__(self, path, event, after):
        super().__init__()
        self.path, self.event, self.after, self.seen = path, event, after, 0

    def _saw(self, event):
        if event == self.event:
            self.seen += 1
            if self.seen == self.after:
                self.model.save(self.path)

    def _on_step(self):
        self._saw("step")
        return True

    def _on_rollout_start(self):
        self._saw("rollout_start")

    def _on_rollout_end(self):
        self._saw("rollout_end")


@pytest.mark.parametrize("agent_class", [PPO, GRPO, RLOO, ReinforcePlusPlusBaseline])
@pytest.mark.parametrize(
    ("event", "after"),
    [("step", 2), ("step", 6), ("rollout_start", 3), ("rollout_end", 1), ("rollout_end", 4)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tiny_llama, tmp_path, agent_class, event, after):
    total = 90
    path = tmp_path / "run.zip"
    kwargs = {"kl_controller": AdaptiveKL(0.1, target=0.05, horizon=100)}
    whole = make_agent(agent_class, tiny_llama, **kwargs)
    whole.learn(total, callback=SaveAt(path, event, after))
    assert path.is_file()
    # Other draws in between must not matter.
    torch.manual_seed(99)
    np.random.seed(99)
    resumed = agent_class.load(path, env=make_env(tiny_llama))
    assert resumed.num_timesteps < whole.num_timesteps
    resumed.learn(total - resumed.num_timesteps, reset_num_timesteps=False)
    assert resumed.num_timesteps == whole.num_timesteps
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.kl_controller.coef == whole.kl_controller.coef != 0.1
    assert resumed.mdp.kl_coef == whole.mdp.kl_coef == whole.kl_controller.coef
    assert resumed._n_updates == whole._n_updates
    assert [e["r"] for e in resumed.ep_info_buffer] == [e["r"] for e in whole.ep_info_buffer]
    assert resumed.logger.name_to_value.get("train/loss") == whole.logger.name_to_value.get(
        "train/loss"
    )


def test_prompts_go_on_across_the_edge_of_an_epoch(tiny_llama, tmp_path):
    """Neither repeated nor skipped, wherever the run was cut."""
    from textrl_env.tasks import FunctionTask

    task = FunctionTask([f"{i}=" for i in range(5)], [str(i) for i in range(5)], max_new_tokens=2)

    class Prompts(BaseCallback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def _on_step(self):
            return True

        def _on_rollout_end(self):
            ids = self.model.rollout_buffer.observations["prompt_ids"]
            self.seen += self.model.mdp.decode(list(ids[::2].numpy()))

    def agent():
        env = make_env(tiny_llama, num_envs=4, task=task, max_new_tokens=2)
        return GRPO("LMPolicy", env, group_size=2, seed=0)

    whole, seen = agent(), Prompts()
    whole.learn(80, callback=seen)
    assert sorted(seen.seen[:5]) == sorted(seen.seen[5:10])
    for cut in (1, 2, 3):
        first, early = agent(), Prompts()
        while len(early.seen) < 2 * cut:
            first.learn(1, callback=early, reset_num_timesteps=False)
        first.save(tmp_path / "cut")
        second, late = GRPO.load(tmp_path / "cut", env=first.get_env()), Prompts()
        second.learn(80 - second.num_timesteps, callback=late, reset_num_timesteps=False)
        assert early.seen + late.seen == seen.seen


def test_parameters_and_arguments_survive(tiny_llama, tmp_path):
    agent = make_agent(
        GRPO, tiny_llama, clip_range=0.3, kl_controller=AdaptiveKL(0.2, target=1.0, horizon=50)
    )
    agent.learn(20)
    agent.save(tmp_path / "deep" / "folder" / "agent")
    loaded = GRPO.load(tmp_path / "deep" / "folder" / "agent", env=make_env(tiny_llama, 8))
    assert (loaded.clip_range, loaded.batch_size, loaded.n_envs) == (0.3, 2, 8)
    assert loaded.kl_controller == agent.kl_controller
    assert torch.equal(weights(loaded), weights(agent))
    overridden = GRPO.load(tmp_path / "deep" / "folder" / "agent.zip", clip_range=0.1)
    assert overridden.clip_range == 0.1
    assert overridden.env is None
    assert overridden.generate(["copy:ab="], 4) == agent.generate(["copy:ab="])


def test_control_agents_are_saved_too(tmp_path):
    agent = PPO(
        "MlpPolicy", "CartPole-v1", n_steps=64, seed=0,
        policy_kwargs={"net_arch": [16], "activation_fn": torch.nn.ReLU},
    )  # fmt: skip
    agent.learn(64)
    agent.save(tmp_path / "cartpole")
    loaded = PPO.load(tmp_path / "cartpole")
    observations = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        loaded.predict(observations, deterministic=True)[0],
        agent.predict(observations, deterministic=True)[0],
    )
    assert loaded.observation_space == agent.observation_space
    assert loaded.policy_kwargs == agent.policy_kwargs


def test_file_objects_and_callbacks(tiny_llama, tmp_path):
    agent = make_agent(GRPO, tiny_llama)
    agent.learn(40, callback=CheckpointCallback(4, str(tmp_path), "model"))
    files = sorted(tmp_path.glob("model_*_steps.zip"))
    assert files
    assert not list(tmp_path.glob(".*partial"))
    buffer = io.BytesIO()
    agent.save(buffer)
    buffer.seek(0)
    assert torch.equal(weights(GRPO.load(buffer)), weights(agent))


def test_nothing_in_the_file_is_run(tiny_llama, tmp_path):
    agent = make_agent(GRPO, tiny_llama)
    agent.save(tmp_path / "good.zip")
    with zipfile.ZipFile(tmp_path / "good.zip") as file:
        content = {name: file.read(name) for name in file.namelist()}
    assert set(content) == {"agent.json", "policy.safetensors", "state.pt"}

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    def write(name, **changed):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            for member, value in (content | changed).items():
                file.writestr(member, value)
        return tmp_path / name

    bomb = io.BytesIO()
    torch.save(Bomb(), bomb)
    with pytest.raises(ValueError, match="not a checkpoint"):
        GRPO.load(write("bomb.zip", **{"state.pt": bomb.getvalue()}))
    assert not (tmp_path / "exploded").exists()
    description = json.loads(content["agent.json"])
    description["arguments"]["policy_kwargs"] = {"dict": {"model": {"type": "os:system"}}}
    with pytest.raises(ValueError, match="os:system"):
        GRPO.load(write("module.zip", **{"agent.json": json.dumps(description)}))
    # A module holds what it imports too: this one would start a shell.
    popen = {"type": "torch.utils.cpp_extension:subprocess.Popen"}
    description["arguments"]["policy_kwargs"] = {"dict": {"features_extractor_class": popen}}
    with pytest.raises(ValueError, match="no network or optimiser class"):
        GRPO.load(write("popen.zip", **{"agent.json": json.dumps(description)}))
    with pytest.raises(ValueError, match="not a checkpoint"):
        agent.set_parameters(write("pickle.zip", **{"state.pt": bomb.getvalue()}))
    description["format"] = 99
    with pytest.raises(ValueError, match="format 99"):
        GRPO.load(write("new.zip", **{"agent.json": json.dumps(description)}))


def test_what_does_not_fit_is_said(tiny_llama, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        GRPO.load(tmp_path / "nowhere")
    (tmp_path / "broken.zip").write_bytes(b"not a zip")
    with pytest.raises(ValueError, match="not a checkpoint"):
        GRPO.load(tmp_path / "broken.zip")
    stable_baselines3.PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).save(
        tmp_path / "sb3.zip"
    )
    with pytest.raises(ValueError, match="Stable-Baselines3"):
        PPO.load(tmp_path / "sb3.zip")
    make_agent(GRPO, tiny_llama).save(tmp_path / "grpo")
    with pytest.raises(ValueError, match=r"GRPO\.load"):
        PPO.load(tmp_path / "grpo")
    with pytest.raises(ValueError, match="space"):
        GRPO.load(tmp_path / "grpo", env=make_env(tiny_llama, max_new_tokens=9))


def test_a_schedule_is_given_again(tiny_llama, tmp_path):
    agent = GRPO(
        "LMPolicy", make_env(tiny_llama), learning_rate=lambda progress: 1e-3 * progress,
        group_size=2,
    )  # fmt: skip
    agent.save(tmp_path / "schedule")
    with pytest.raises(ValueError, match="learning_rate was"):
        GRPO.load(tmp_path / "schedule")
    loaded = GRPO.load(tmp_path / "schedule", learning_rate=lambda progress: 2e-3 * progress)
    assert loaded.lr_schedule(0.5) == 1e-3


def test_a_failed_save_keeps_the_old_file(tiny_llama, tmp_path, monkeypatch):
    agent = make_agent(GRPO, tiny_llama)
    agent.save(tmp_path / "agent.zip")
    old = (tmp_path / "agent.zip").read_bytes()
    agent.policy_kwargs["optimizer_kwargs"] = {"weight_decay": object()}
    with pytest.raises(TypeError, match="policy_kwargs holds"):
        agent.save(tmp_path / "agent.zip")
    assert (tmp_path / "agent.zip").read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["agent.zip"]


class Own(GRPO):
    """An agent of a user's."""


def test_a_subclass_is_loaded_by_its_own_class(tiny_llama, tmp_path):
    agent = make_agent(Own, tiny_llama)
    agent.save(tmp_path / "own")
    assert type(Own.load(tmp_path / "own")) is Own
    with pytest.raises(ValueError, match=r"Own\.load"):
        GRPO.load(tmp_path / "own")


def test_set_parameters_and_set_env_keep_the_place(tiny_llama, tmp_path):
    agent = make_agent(GRPO, tiny_llama)
    agent.learn(40)
    agent.save(tmp_path / "agent")
    position = agent.prompt_sampler.position
    assert position > 0
    loaded = GRPO.load(tmp_path / "agent")
    loaded.save(tmp_path / "again")
    again = GRPO.load(tmp_path / "again")
    again.set_env(make_env(tiny_llama))
    assert again.prompt_sampler.position == position
    other = make_agent(GRPO, tiny_llama)
    other.set_parameters(tmp_path / "agent")
    assert torch.equal(weights(other), weights(agent))
    other.set_parameters(make_agent(GRPO, tiny_llama).get_parameters())
    assert not torch.equal(weights(other), weights(agent))
    custom = GRPO.load(tmp_path / "agent", custom_objects={"clip_range": 0.1})
    assert custom.clip_range == 0.1


def test_a_run_that_was_stopped_in_a_rollout_repeats_it(tiny_llama, tmp_path):
    class Stop(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < 30

    whole = make_agent(GRPO, tiny_llama)
    whole.learn(60)
    stopped = make_agent(GRPO, tiny_llama)
    stopped.learn(60, callback=Stop())
    stopped.save(tmp_path / "stopped")
    resumed = GRPO.load(tmp_path / "stopped", env=make_env(tiny_llama))
    resumed.learn(60 - resumed.num_timesteps, reset_num_timesteps=False)
    assert torch.equal(weights(resumed), weights(whole))


def control_agent(**kwargs):
    return PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, seed=0, **kwargs)


@pytest.mark.parametrize("kind", ["str", "path", "file", "buffer"])
def test_names_and_files(tmp_path, kind):
    agent = control_agent()
    if kind in ("str", "path"):
        target = tmp_path / "agent"
        target = str(target) if kind == "str" else target
        agent.save(target)
        loaded = PPO.load(target)
    elif kind == "file":
        with open(tmp_path / "file", "wb") as file:
            agent.save(file)
        with open(tmp_path / "file", "rb") as file:
            loaded = PPO.load(file)
    else:
        buffer = io.BytesIO()
        agent.save(buffer)
        loaded = PPO.load(buffer)
    assert torch.equal(weights(loaded), weights(agent))


def test_what_is_no_file_is_said(tmp_path):
    agent = control_agent()
    with open(tmp_path / "text", "w") as file:
        for path in (None, 3, file):
            with pytest.raises(TypeError, match="pass a file name, or a binary file"):
                agent.save(path)
    with pytest.raises(TypeError, match="pass a file name, or a binary file"):
        PPO.load(None)
    with open(tmp_path / "text", "rb") as file, pytest.raises(ValueError, match="not open for wri"):
        agent.save(file)


def test_exclude_and_include(tmp_path):
    agent = control_agent(ent_coef=0.5, tensorboard_log=str(tmp_path / "logs"))
    agent.learn(64)
    names = ["ent_coef", "tensorboard_log", "num_timesteps", "ep_info_buffer", "unknown"]
    agent.save(tmp_path / "part", exclude=names, include=["tensorboard_log"])
    with pytest.raises(ValueError, match=r"ent_coef was left out.*pass ent_coef=\.\.\. to load"):
        PPO.load(tmp_path / "part")
    loaded = PPO.load(tmp_path / "part", ent_coef=0.25)
    assert (loaded.ent_coef, loaded.num_timesteps, loaded.ep_info_buffer) == (0.25, 0, None)
    assert loaded.tensorboard_log == agent.tensorboard_log
    assert loaded._n_updates == agent._n_updates > 0
    assert torch.equal(weights(loaded), weights(agent))
    loaded.set_env(gym.make("CartPole-v1"))
    assert loaded.learn(16, reset_num_timesteps=False).num_timesteps == 16


def test_system_info_is_stored_and_printed(tmp_path, capsys):
    control_agent().save(tmp_path / "agent")
    with zipfile.ZipFile(tmp_path / "agent.zip") as file:
        saved = json.loads(file.read("agent.json"))["system_info"]
    assert saved["PyTorch"] == torch.__version__
    PPO.load(tmp_path / "agent")
    assert not capsys.readouterr().out
    PPO.load(tmp_path / "agent", print_system_info=True)
    current, of_file = capsys.readouterr().out.split("== SAVED MODEL SYSTEM INFO ==")
    assert current.startswith("== CURRENT SYSTEM INFO ==")
    for text in (current, of_file):
        assert f"- PyTorch: {torch.__version__}" in text


def test_damaged_files_are_a_value_error(tmp_path):
    agent = control_agent().learn(16)
    agent.save(tmp_path / "good.zip")
    whole = (tmp_path / "good.zip").read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ValueError, match="damaged"):
            PPO.load(io.BytesIO(whole[:length]))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    with pytest.raises(ValueError, match="damaged"):
        PPO.load(io.BytesIO(flipped))
    with zipfile.ZipFile(tmp_path / "good.zip") as file:
        content = {name: file.read(name) for name in file.namelist()}
    description = json.loads(content["agent.json"])
    state = torch.load(io.BytesIO(content["state.pt"]), weights_only=True)

    def refused(**changed):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for member, value in (content | changed).items():
                if value is not None:
                    file.writestr(member, value)
        for read in (PPO.load, agent.set_parameters):
            before = weights(agent)
            try:
                read(buffer)
            except ValueError:
                continue
            # What `set_parameters` does not read may be damaged.
            assert read == agent.set_parameters
            assert torch.equal(weights(agent), before)

    for member, value in content.items():
        for junk in (None, b"", b"junk", value[: len(value) // 2]):
            refused(**{member: junk})
    for key in set(description) - {"system_info"}:  # which is only printed
        without = {name: value for name, value in description.items() if name != key}
        refused(**{"agent.json": json.dumps(without)})
        for junk in (None, [1], {"a": 1}, "os:system"):
            refused(**{"agent.json": json.dumps(description | {key: junk})})
    for arguments in ({"policy": {"b": 1}}, {"gamma": {"kl_controller": "os"}}, {"nonsense": 1}):
        changed = description | {"arguments": description["arguments"] | arguments}
        refused(**{"agent.json": json.dumps(changed)})
    for broken in ([], {}, {"counters": {}, "optimizer": {}}, state | {"optimizer": [1]}):
        buffer = io.BytesIO()
        torch.save(broken, buffer)
        refused(**{"state.pt": buffer.getvalue()})
