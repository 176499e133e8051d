"""How far training has come, in batches."""

from __future__ import annotations


class Progress:
    """`committed` ≤ `trained` ≤ `formed` ≤ `steps` (once training was opened); batches `committed` … `formed` − 1 are kept."""

    __slots__ = ("committed", "formed", "steps", "trained")

    def __init__(self) -> None:
        self.steps = 0
        self.formed = 0
        self.trained = 0
        self.committed = 0
