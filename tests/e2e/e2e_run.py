"""Runs a `segue` command as a user would, and watches it: its lines, its processes, its end, and what it leaves behind.

Every wait is for an event (a line, an exit) and has a deadline; when it passes, the test fails and shows the tails of all logs.
This process adopts the orphans of what it runs, so that a process of a command cannot hide behind the death of its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

import psutil
import pytest

from segue.cluster.processes import adopt_orphans
from segue.files import read_jsonl
from segue.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0
"""From the command to its first step, with much else going on on two cores (idle: some 20 s)."""
END_SECONDS = 60.0
"""So long after a death the run goes on or has ended, with a word on what died."""
LONG = ("--set", "steps=100000", "--set", "eval.tasks=0", "--set", "checkpoint.every=1", "--set", "rollout.nodes=1")
"""Overrides of a run that goes on until something ends it."""
STEP_LINE = r"^step +(\d+)/"


def ports_of_this_worker(arguments: list[str]) -> list[str]:
    """A port range of its own for each of the processes that share the tests: one test must not take what another counts on."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if arguments[0] != "train" or not worker or any("cluster.ports" in argument for argument in arguments):
        return []
    low = 20000 + 1000 * int(worker)
    return ["--set", f"cluster.ports=[{low}, {low + 999}]"]


class Command:
    """One `segue` command, run in the folder `cwd`; a context manager that ends what is left of it."""

    def __init__(
        self,
        *arguments: object,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self.arguments += ports_of_this_worker(self.arguments)
        self.out: list[str] = []
        self.err: list[str] = []
        self._changed = threading.Condition()
        self.began = time.monotonic()
        self._console_closed = False
        self._known: set[psutil.Process] = set()
        self._before = set(psutil.Process().children())
        adopt_orphans()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "segue.cli", *self.arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(env or {}),
            start_new_session=True,
            preexec_fn=preexec,
            text=True,
        )
        self.pid = self._process.pid
        _RUNNING.add(self.pid)
        assert self._process.stdout is not None and self._process.stderr is not None
        streams = ((self._process.stdout, self.out), (self._process.stderr, self.err))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._await_exit, daemon=True).start()

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self._changed.notify_all()
            if self._console_closed and lines is self.out:
                stream.close()
                return

    def close_console(self) -> None:
        """Like a terminal that is closed, or a `| head` that has enough: from the next line on nobody reads."""
        self._console_closed = True

    def _await_exit(self) -> None:
        self._process.wait()
        with self._changed:
            self._changed.notify_all()

    # --- waiting ------------------------------------------------------------------------------------------------------

    def line(self, pattern: str, within: float = START_SECONDS, after: int = 0) -> re.Match[str]:
        """The first line of stdout from number `after` on that matches."""
        expression = re.compile(pattern)

        def found() -> re.Match[str] | None:
            return next((match for line in self.out[after:] if (match := expression.search(line))), None)

        self._until(lambda: bool(found()) or self._process.returncode is not None, within, f"no line like {pattern!r}")
        match = found()
        if match is None:
            self.fail(f"it ended before a line like {pattern!r}")
        return match

    def steps(self, count: int, within: float = START_SECONDS) -> None:
        """Until `count` steps are trained."""
        self._until(lambda: self.trained() >= count or self._process.returncode is not None, within, f"step {count} did not come")
        if self.trained() < count:
            self.fail(f"it ended before step {count}")

    def trained(self) -> int:
        """The number in the newest step line."""
        return max((int(match[1]) for line in self.out if (match := re.search(STEP_LINE, line))), default=0)

    def wait(self, within: float = START_SECONDS) -> int:
        """The exit code."""
        self._until(lambda: self._process.returncode is not None, within, "it did not end")
        for reader in self._readers:
            reader.join(timeout=5.0)  # all that it said; a process left behind would keep the pipe open
        code: int = self._process.returncode
        return code

    def _until(self, ready: Callable[[], bool], within: float, otherwise: str) -> None:
        with self._changed:
            if not self._changed.wait_for(ready, within):
                self.fail(f"{otherwise} within {within:g} s")

    # --- processes ----------------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """To the command itself, as a terminal's Ctrl-C reaches it (its children are in sessions of their own)."""
        self._process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """To every process of the command, as fast as can be: as a batch system signals a job."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def family(self) -> list[psutil.Process]:
        """All living processes that descend from the command, itself included, and those seen before that still live.

        Orphans that this process has adopted belong to the command that looks for them.
        """
        roots = [child for child in psutil.Process().children() if child not in self._before]
        for root in roots:
            if root.pid == self.pid or root.pid not in _RUNNING:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._known |= {root, *root.children(recursive=True)}
        self._known = {process for process in self._known if _lives(process)}
        return sorted(self._known, key=lambda process: process.pid)

    def pid_of(self, name: str, within: float = 0.0) -> int:
        """One process of the family by its process name (`gcs_server`) or a word of its command line (`segue.cluster.driver`).

        Waits for it up to `within` seconds; there is no event for the start of a process that is nobody's child here.
        """
        deadline = time.monotonic() + within
        while True:
            for process in self.family():
                with contextlib.suppress(psutil.Error):
                    if process.name() == name or name in process.cmdline():
                        return process.pid
            if time.monotonic() >= deadline or self._process.returncode is not None:
                self.fail(f"there is no process {name}")
            time.sleep(0.05)

    def role_pid(self, target: str) -> int:
        """The process of a role, from its /health."""
        pid = health(self.targets()[target])["pid"]
        assert isinstance(pid, int)
        return pid

    def env_workers(self) -> list[tuple[int, int]]:
        """(guard, host) of every env worker."""
        pairs = []
        for guard in psutil.Process(self.role_pid("envpool-0")).children():
            pairs += [(guard.pid, host.pid) for host in guard.children()]
        return pairs

    def assert_nothing_left(self, within: float = 0.0) -> None:
        """No process, `within` seconds from now, and none of the files that need not last."""
        family = self.family()
        if within:
            _, family = psutil.wait_procs(family, timeout=within)
            family = self.family()
        if family:
            self.fail("left behind: " + ", ".join(f"{p.pid} {' '.join(p.cmdline())[:120]}" for p in family))

    # --- the run's files ----------------------------------------------------------------------------------------------

    @property
    def run(self) -> Path:
        """The directory given with --run."""
        return Path(self.arguments[self.arguments.index("--run") + 1])

    def targets(self) -> dict[str, str]:
        """Addresses by target name."""
        return {
            path.stem: json.loads(path.read_text())[0]["targets"][0] for path in (self.run / "metrics" / "targets").glob("*.json")
        }

    def sentence(self) -> str:
        """What the command said on stderr: one line, no traceback."""
        err = [line for line in self.err if line.strip()]
        if len(err) != 1:
            self.fail("stderr is not one sentence")
        return err[0]

    def fail(self, why: str) -> NoReturn:
        pytest.fail(f"segue {' '.join(self.arguments)}: {why}\n{self.tails()}", pytrace=False)

    def tails(self, lines: int = 40) -> str:
        parts = [f"code {self._process.poll()} after {time.monotonic() - self.began:.0f} s"]
        parts += ["--- stdout", *self.out[-lines:], "--- stderr", *self.err[-lines:]]
        if "--run" in self.arguments:
            for path in sorted(self.run.glob("logs/*.log")):
                parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End by pid what a failed test has left running."""
        for _ in range(5):
            family = self.family()
            if not family:
                break
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=5.0)
        _RUNNING.discard(self.pid)
        if not _RUNNING:
            adopt_orphans(False)


_RUNNING: set[int] = set()
"""The commands under watch."""


def _lives(process: psutil.Process) -> bool:
    """Not dead; adopted dead are buried."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.is_running()
    except psutil.NoSuchProcess:
        return False
    if process.pid not in _RUNNING:  # those are waited for by their `Popen`
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return False


def segue(*arguments: object, within: float = START_SECONDS, **options: Any) -> Command:
    """A command run to its end, with nothing left behind."""
    with Command(*arguments, **options) as command:
        command.wait(within)
        command.assert_nothing_left()
    return command


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(address: str, path: str) -> tuple[int, str, str]:
    """(status, content type, body) of one GET."""
    try:
        with _DIRECT.open(f"http://{address}{path}", timeout=20.0) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def health(address: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(fetch(address, "/health")[2])
    return body


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "metrics.jsonl")


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def assert_whole(run: Path, steps: int) -> None:
    """What every finished run must satisfy: all steps once and in order, versions that only grow, counts that add up."""
    lines, summary = lines_of(run), summary_of(run)
    assert [line["step"] for line in lines] == list(range(steps))
    versions = [line["version"] for line in lines]
    assert versions == sorted(versions) and len(set(versions)) == len(versions), versions
    assert summary["steps"] == steps
    episodes = summary["episodes"]
    assert episodes["admitted"] == sum(episodes["states"].values())
    assert episodes["states"]["dropped"] == sum(episodes["dropped"].values())
    assert episodes["states"]["failed"] == sum(episodes["failed"].values())
    assert episodes["trained"] == episodes["states"]["trained"] > 0
    prefill = dict(summary["prefill"])
    total, cached = prefill.pop("engine_total"), prefill.pop("cached")
    assert total == sum(prefill.values()) > 0 and cached > 0
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert sum(sum(line["ages"]) for line in lines) == summary["tokens"]["trained"] > 0
    assert summary["notes"] == [] or all("contradict" not in note for note in summary["notes"])
    assert not list((run / "metrics" / "targets").iterdir()), "a clean end withdraws all targets"
    newest = RunDir.open(run).latest_checkpoint()
    assert newest.step == steps
    assert not [path for path in (run / "checkpoints").iterdir() if not (path / "COMPLETE").is_file()]
