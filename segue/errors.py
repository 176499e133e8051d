"""Errors with a meaning of their own. What users read is one sentence: what, where, what to do."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user's: the CLI prints the sentence alone, never a traceback, and exits with 2."""


class RunFailed(Exception):
    """The run cannot go on. `part` names what died or failed first; the CLI prints the sentence and exits with 1."""

    def __init__(self, part: str, sentence: str) -> None:
        super().__init__(sentence)
        self.part = part
        self.sentence = sentence


class DiskFailed(RunFailed):
    """A run cannot write. `place` is its sentence without the advice to resume, for commands that have nothing to resume."""

    def __init__(self, place: str, and_then: str) -> None:
        super().__init__("disk", f"{place}{and_then}.")
        self.place = f"{place}."
        self.args = (place, and_then)  # what it is made of again in another process

    def __str__(self) -> str:
        return self.sentence


class WireError(ValueError):
    """Bytes that are no message: see the subclasses in `segue.wire`."""
