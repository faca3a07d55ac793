"""The state of `skyctl top`, and what each key does to it. Pure.

table ── l ──► log of the selected replica ── l, Esc ──► table
  └── p ──► asks ── y ──► pause
              └── any other key ──► table
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Something to do to the fleet. `server` None means all of them."""

    verb: Literal["pause", "resume", "quit"]
    server: str | None = None


class TopScreen:
    """Selection, open log, question and message of one running `top`."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.selected: str | None = None
        self.log: str | None = None
        self.question: Action | None = None
        self.message = ""

    def see(self, names: Sequence[str]) -> None:
        """Update the list of replicas."""
        self.names = tuple(names)
        if self.selected not in self.names:
            self.selected = None
        if self.question is not None and self.question.server not in (None, *self.names):
            self.question = None

    def press(self, key: str) -> Action | None:
        """Handle a key; returns the action to take, if any."""
        if self.question is not None:
            asked, self.question = self.question, None
            if key == "y":
                return asked
            self.message = "nothing was paused"
            return None
        self.message = ""
        if key in ("q", "ctrl-c"):
            return Action("quit")
        if key in ("up", "down", "k", "j"):
            self._move(-1 if key in ("up", "k") else 1)
        elif key == "l":
            self._toggle_log()
        elif key == "escape":
            if self.log is None:
                self.selected = None
            self.log = None
        elif key == "p":
            self.question = Action("pause", self.selected)
        elif key == "r":
            return Action("resume", self.selected)
        return None

    def _move(self, step: int) -> None:
        if not self.names:
            return
        if self.selected is None:
            index = 0 if step > 0 else len(self.names) - 1
        else:
            index = max(0, min(self.names.index(self.selected) + step, len(self.names) - 1))
        self.selected = self.names[index]
        if self.log is not None:
            self.log = self.selected

    def _toggle_log(self) -> None:
        if self.log is not None:
            self.log = None
        elif self.selected is not None:
            self.log = self.selected
        elif self.names:
            self.selected = self.log = self.names[0]
