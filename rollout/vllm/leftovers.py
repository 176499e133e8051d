"""What vLLM's processes leave in /dev/shm when they are ended by force, as they mostly are: rings of 160 MB and more each.

They are known by being mapped: names alone could be somebody else's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHARED = Path("/dev/shm")
_KINDS = ("psm_", "vllm_dist_")


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """The files of these kinds that processes have mapped; those that are gone have none."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SHARED and path.name.startswith(_KINDS):
                    found.add(path)
    return found


def remove(paths: Iterable[Path]) -> None:
    """Remove what is still there. Memory goes when the last process that has it mapped ends."""
    for path in paths:
        path.unlink(missing_ok=True)
