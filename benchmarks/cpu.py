"""CPU seconds of all processes of a run, by what they are, read from outside.

What costs CPU is what counts where all processes share a few cores: whatever one of them saves, the others get.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

from segue.errors import RunFailed
from segue.metrics.scrape import get, targets
from segue.rundir import RunDir

POLL_SECONDS = 0.5
"""How often the family is looked at: what a process uses between the last look and its end is not seen."""
OTHER_RAY = "Ray, other processes"
SUPERVISOR, DRIVER, PREPARATION = "supervisor", "driver", "preparation"

Process = tuple[int, float]
"""Pid and start: pids are used again."""


class CpuWatch:
    """The family of one process: itself and all its descendants, whether they live or have ended.

    `read()` is called at moments that matter; a thread looks in between, so that whoever ends is in the sums.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[Process, float] = {}
        self._kind: dict[Process, str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="cpu", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.read()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def read(self) -> dict[Process, float]:
        """CPU seconds (user and system) of every member so far."""
        with self._lock:
            try:
                family = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                family = []
            for process in family:
                try:
                    key = process.pid, process.create_time()
                    times = process.cpu_times()
                    if self._kind.get(key, "") in ("", OTHER_RAY, PREPARATION):  # a Ray process is named after its actor later
                        self._kind[key] = self._kind_of(process)
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                self._seconds[key] = times.user + times.system
            return dict(self._seconds)

    def _kind_of(self, process: psutil.Process) -> str:
        if process.pid == self._root.pid:
            return SUPERVISOR
        command = " ".join(process.cmdline())
        if "segue.cluster.driver" in command:
            return DRIVER
        if process.name() in ("gcs_server", "raylet"):
            return f"Ray, {process.name()}"
        if "envpool.worker" in command:
            return "env workers"
        return OTHER_RAY if "ray" in command else PREPARATION

    def name_targets(self, run: Path) -> None:
        """Ask the run's targets which process each of them is in. Raises `RunFailed` where one does not answer."""
        for target in targets(RunDir.open(run)):
            try:
                body = json.loads(get(f"http://{target.address}/health"))
                role, name, pid = body["role"], f"{body['role']}-{body['rank']}", int(body["pid"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise RunFailed("train", f"{target.name} of the run in {run} did not say what process it is: {error}.") from error
            if role != "weightsync":  # it is in another role's process
                self._name(pid, name)

    def _name(self, pid: int, name: str) -> None:
        with self._lock:
            for key in self._kind:
                if key[0] == pid:
                    self._kind[key] = name

    def between(self, before: Mapping[Process, float], after: Mapping[Process, float]) -> dict[str, float]:
        """Seconds between two readings, by what the processes are."""
        spent: dict[str, float] = {}
        for key, seconds in after.items():
            name = self._kind.get(key, PREPARATION)
            spent[name] = spent.get(name, 0.0) + seconds - before.get(key, 0.0)
        return spent
