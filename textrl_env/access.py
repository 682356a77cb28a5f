"""What the single and the vector environment show of the core that is inside both."""

from __future__ import annotations

from typing import Any

from textrl_env.core import TokenMDP


class MDPAccess:
    """Properties of an environment over a `TokenMDP`.

    Attributes:
        mdp: The core.
    """

    mdp: TokenMDP

    @property
    def task(self) -> Any:
        """The task."""
        return self.mdp.task

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.mdp.tokenizer

    @property
    def eos_token_id(self) -> int:
        """The id of the tokenizer's end-of-sequence token."""
        return int(self.mdp.tokenizer.eos_token_id)

    @property
    def kl_coef(self) -> float:
        """β; a KL controller may change it between steps."""
        return self.mdp.kl_coef

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        self.mdp.kl_coef = float(value)

    def set_kl_coef(self, value: float) -> None:
        """Sets `kl_coef`; a method reaches through wrappers, where an attribute would not."""
        self.kl_coef = value

    def announce_kl_consumer(self) -> None:
        """Tells the environment that somebody subtracts β·log π_old from its rewards.

        Raises:
            ValueError: `kl_mode` is not ``"reference"``: the KL would be charged twice, or alone.
        """
        self.mdp.announce_kl_consumer()
