"""`launch.sh` called as a user calls it, on hosts or under SLURM, and watched through what it prints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.1
SCRUB = ("SLURM_JOB_ID", "NODE_RANK", "NUM_NODES", "HEAD_ADDR", "HEAD_PORT", "NODE_ADDR", "SEGUE_TOKEN", "RAY_ADDRESS")
"""What the machine's own environment must not decide."""


class Launch:
    """One process whose output goes to a file. A context: leaving it ends the process, if it still runs."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        environment = {key: value for key, value in os.environ.items() if key not in SCRUB}
        self.began = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (env or {}),
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def line(self, pattern: str, within: float) -> re.Match[str]:
        """The first match in what it printed; it must come `within` seconds from now and before the end."""
        deadline = time.monotonic() + within
        while True:
            over = self.process.poll() is not None
            if found := re.search(pattern, self.text, re.MULTILINE):
                return found
            if over:
                self.fail(f"it ended before a line like {pattern!r}")
            if time.monotonic() > deadline:
                self.fail(f"no line like {pattern!r} within {within:g} s")
            time.sleep(POLL_SECONDS)

    def wait(self, within: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.fail(f"it did not end within {within:g} s")

    def fail(self, why: str) -> NoReturn:
        parts = [f"{' '.join(map(str, self.process.args))}: {why}", *self.text.splitlines()[-60:]]  # type: ignore[arg-type]
        for path in sorted(self.log.parent.glob("run/logs/*.log")):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-25:]]
        pytest.fail("\n".join(parts), pytrace=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30.0)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
