"""Version ids are never reused, not even by a run that goes on from an older checkpoint: the highest one given out is on disk."""

from __future__ import annotations

import os
from pathlib import Path

from segue.errors import RunFailed


class VersionLedger:
    """One number in a file of the run directory: every version id below it may have been given out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def next_id(self) -> int:
        """The smallest id that no life of this run has given out. Raises `RunFailed` if the file is not a number."""
        try:
            return int(self._path.read_text(encoding="ascii"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise RunFailed(
                "scheduler", f"{self._path} does not hold the next weight version ({error}): restore it or use another --run."
            ) from error

    def reserve(self, next_id: int) -> None:
        """Note that ids below `next_id` are given out; before anybody hears of them."""
        aside = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(str(next_id), encoding="ascii")
            os.replace(aside, self._path)
        except OSError as error:
            raise RunFailed(
                "scheduler", f"{self._path} cannot be written ({error.strerror}): free space there, and go on with --resume."
            ) from error
