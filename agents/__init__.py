"""Agents with Stable-Baselines3's interface, for language models and for control."""

from agents.gaussian import StateDependentStdPolicy
from agents.grpo import GRPO
from agents.policies import LMPolicy
from agents.ppo import PPO
from agents.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from agents.rloo import RLOO

__all__ = [
    "GRPO",
    "PPO",
    "RLOO",
    "LMPolicy",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "StateDependentStdPolicy",
]
