"""Follows a run's metrics.jsonl while it grows: its newest line and the ages of all, each line read once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from segue.report import steps


class StepsSeen:
    """What the lines say so far. Lines that are none of a step's are passed over: whoever writes them is not done, or `segue
    report` will complain."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self.newest: dict[str, Any] | None = None
        self.ages: list[int] = []

    def read(self) -> None:
        """Take in what was written since the last call; from the beginning where the file is another, as a resume makes it."""
        try:
            with open(self._path, "rb") as file:
                there = os.fstat(file.fileno())
                if self._file != (there.st_dev, there.st_ino) or there.st_size < self._offset:
                    self._forget()
                    self._file = there.st_dev, there.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            self._forget()  # not there yet, or not to be read: once the run is over that is told
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, text: bytes) -> None:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(line, dict) and steps.is_step(line):
            self.newest = line
            self.ages = steps.age_histogram([{"ages": self.ages}, line])
