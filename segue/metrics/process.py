"""What the kernel and the driver know of this process: CPU time, memory, which start of its role it is; read at every scrape."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from segue.metrics.registry import Reading
from segue.metrics.vocabulary import RESTART_REASONS

_PAGE = os.sysconf("SC_PAGE_SIZE")


def read_process() -> Iterator[Reading]:
    """CPU seconds and resident bytes of this process."""
    yield "segue_process_cpu_seconds_total", {}, time.process_time()
    with open("/proc/self/statm", encoding="ascii") as file:
        yield "segue_process_resident_memory_bytes", {}, float(int(file.read().split()[1]) * _PAGE)


def read_starts(start: int, restarts: Mapping[str, int]) -> Iterator[Reading]:
    """That this process is the `start`-th of its role, and how often each reason took one before it."""
    yield "segue_process_starts", {}, float(start)
    for reason in RESTART_REASONS:
        yield "segue_process_restarts_total", {"reason": reason}, float(restarts.get(reason, 0))
