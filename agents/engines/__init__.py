"""Engines that generate completions."""

from agents.engines.torch import Completions, TorchEngine

__all__ = ["Completions", "TorchEngine"]
