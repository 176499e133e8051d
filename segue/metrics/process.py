"""What the kernel knows of this process: CPU time and memory, read at every scrape."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from segue.metrics.registry import Reading

_PAGE = os.sysconf("SC_PAGE_SIZE")


def read_process() -> Iterator[Reading]:
    """CPU seconds and resident bytes of this process."""
    yield "segue_process_cpu_seconds_total", {}, time.process_time()
    with open("/proc/self/statm", encoding="ascii") as file:
        yield "segue_process_resident_memory_bytes", {}, float(int(file.read().split()[1]) * _PAGE)
