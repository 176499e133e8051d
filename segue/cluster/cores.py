"""Pins the processes of a run to CPU cores: which, from the config; and by the kernel, for all of a process's threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from segue.config import Config
from segue.errors import UserError

COUNTS = {"rollout": "nodes", "learner": "ranks", "envpool": "pools"}
"""The keys that say how many processes a role has."""


def cores_of(config: Config, role: str, rank: int) -> list[int]:
    """The cores of one role process; [] for all of its machine."""
    if role == "scheduler":
        return config.scheduler.cores or config.cluster.cores
    lists: Sequence[list[int]] = getattr(config, role).cores
    return lists[rank % len(lists)] if lists else config.cluster.cores


def key_of(config: Config, role: str) -> str:
    """The key that `cores_of` read."""
    return f"{role}.cores" if getattr(config, role).cores else "cluster.cores"


def pin(pid: int, cores: Sequence[int], key: str) -> None:
    """Let a process run on these cores only, all of its threads, and what they start from now on. Nothing is done for no cores.

    Raises `UserError`, which blames `key`, for a core that this machine has not, or must not be used.
    """
    if not cores:
        return
    done: set[int] = set()
    while new := set(_threads(pid)) - done:  # a thread that is started meanwhile may have inherited the old ones
        for thread in new:
            with contextlib.suppress(ProcessLookupError):
                _pin_thread(thread, cores, key)
        done |= new


def check_cores(config: Config) -> None:
    """Raises `UserError` if the config names a core that this process may not use."""
    have = os.sched_getaffinity(0)
    for key, cores in _named(config):
        missing = sorted(set(cores) - have)
        if missing:
            raise UserError(f"{_wrong(key, missing[0])}, and this process may use {_listed(sorted(have))}: change it.")


def cores_text(config: Config) -> str:
    """Which process is pinned where, for the plan; "" if none is."""
    if not _named(config):
        return ""
    parts = [f"driver {_listed(config.cluster.cores)}", f"scheduler {_listed(cores_of(config, 'scheduler', 0))}"]
    for role, count in COUNTS.items():
        lists = [cores_of(config, role, rank) for rank in range(getattr(getattr(config, role), count))]
        same = all(cores == lists[0] for cores in lists)
        parts.append(f"{role} {' | '.join(_listed(cores) for cores in (lists[:1] if same else lists))}")
    return ", ".join(parts)


def _named(config: Config) -> list[tuple[str, list[int]]]:
    single = [("cluster.cores", config.cluster.cores), ("scheduler.cores", config.scheduler.cores)]
    each = [(f"{role}.cores", cores) for role in COUNTS for cores in getattr(config, role).cores]
    return [(key, cores) for key, cores in (*single, *each) if cores]


def _threads(pid: int) -> Iterator[int]:
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return
    yield from map(int, names)


def _pin_thread(thread: int, cores: Sequence[int], key: str) -> None:
    missing = list(cores)
    try:
        os.sched_setaffinity(thread, cores)
        missing = sorted(set(cores) - os.sched_getaffinity(thread))  # the kernel leaves out cores that it has not, unless all are
    except OSError as error:
        if isinstance(error, ProcessLookupError):
            raise
    if missing:
        raise UserError(f"{_wrong(key, missing[0])}, which {os.uname().nodename} has not, or must not use: change it.")


def _wrong(key: str, core: int) -> str:
    return f"{key} names core {core}"


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores)) or "all"
