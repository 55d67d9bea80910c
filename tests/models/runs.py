"""Runs: which models are checked, how large, and which planted errors have to be found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Run:
    """One search."""

    model: str
    """The file in docs/model, without its suffix."""
    switches: tuple[str, ...] = ()
    """What it is told by -D."""
    finds: str = ""
    """Of a planted error: what is violated, as the model's own assertion says it."""
    gate: bool = False
    """Whether the gate makes it too, because it takes no more than a few seconds."""

    @property
    def name(self) -> str:
        """The model and its switches."""
        return " ".join([self.model, *self.switches])
