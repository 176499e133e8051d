"""Some trajectories are kept in the run directory for people to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from segue.files import write_json


class SampledTrajectories:
    """Keeps the newest `keep` trajectories of one process for reading, as `<prefix>-<number>.json`, numbered from 0."""

    def __init__(self, folder: Path, prefix: str, keep: int) -> None:
        self._folder = folder
        self._prefix = prefix
        self._keep = keep
        numbers = sorted(self._numbers())
        self._next = numbers[-1] + 1 if numbers else 0

    def _numbers(self) -> Iterator[int]:
        for path in self._folder.glob(f"{self._prefix}-*.json"):
            tail = path.stem.removeprefix(f"{self._prefix}-")
            if tail.isdigit():
                yield int(tail)

    def save(self, record: Callable[[], dict[str, Any]]) -> Path | None:
        """Write `record()` (asked for only if any are kept) and delete the oldest beyond `keep`."""
        if self._keep == 0:
            return None
        path = self._folder / f"{self._prefix}-{self._next:06d}.json"
        write_json(path, record())
        stale = self._next - self._keep
        self._next += 1
        for number in [n for n in self._numbers() if n <= stale]:
            (self._folder / f"{self._prefix}-{number:06d}.json").unlink(missing_ok=True)
        return path
