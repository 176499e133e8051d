"""`segue train`: runs the driver as a child and watches it, so that whatever dies, this process can still name it.

Consumes: lines of JSON that the driver writes to a pipe (`Report`): the processes of the run, that it is stopping, its result.
Waits for: the driver's end, the death of any process of the run (a pidfd each), SIGINT and SIGTERM. Produces: the exit code.
It imports neither Ray nor torch: when Ray's control store dies, Ray ends the process that uses it, from C++.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from segue.cluster.prepare import Prepared, prepare
from segue.cluster.processes import adopt_orphans, describe_exit, end_family
from segue.errors import RunFailed, UserError

REPORT_FD = "SEGUE_REPORT_FD"
GRACE_AFTER_DEATH = 20.0
"""Seconds the driver gets to end by itself, naming the cause, after a part the run cannot do without has died."""


def supervise(config_path: Path, overrides: list[str], run: Path | None, resume: bool, serial: bool) -> int:
    """Train to the end and return the exit code: 0, or 130 after Ctrl-C.

    Raises `UserError` for what the user can mend, `RunFailed` with the first cause if a part died. Leaves no process behind.
    """
    return watch(prepare(config_path, overrides, run, resume), serial)


def watch(prepared: Prepared, serial: bool, quiet: bool = False) -> int:
    """Run a prepared run under watch; `quiet` moves what the driver prints to stderr. Errors as `supervise`."""
    adopt_orphans()
    try:
        return asyncio.run(_Watch(prepared, serial, quiet).run())
    finally:
        end_family(grace_seconds=2.0)


class _Watch:
    def __init__(self, prepared: Prepared, serial: bool, quiet: bool) -> None:
        self._config = prepared.config
        self._run = prepared.run
        module = "segue.cluster.serial" if serial else "segue.cluster.driver"
        arguments = [str(prepared.run.path), prepared.model, str(prepared.attempt)]
        if prepared.resume:
            arguments += ["--resume", prepared.resume]
        if prepared.only_eval:
            arguments += ["--only-eval"]
        self._output = sys.stderr if quiet else None
        self._command = [sys.executable, "-m", module, *arguments]
        self._stopping = False
        self._interrupted = 0
        self._signal = signal.SIGINT
        self._result: dict[str, Any] | None = None
        self._first_death: str | None = None
        self._fds: dict[int, str] = {}
        self._done = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        reading = self._start_driver()
        reader = asyncio.create_task(self._read_reports(reading))
        self._watch(self._driver.pid, "driver", fatal=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._done.wait()
        await asyncio.wait([reader], timeout=2.0)  # the pipe ends with the driver and whoever inherited it
        reader.cancel()
        for fd in list(self._fds):
            self._forget(fd)
        return self._exit_code()

    def _start_driver(self) -> int:
        """Start the driver; returns the reading end of its report pipe."""
        reading, writing = os.pipe()
        self._driver = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            pass_fds=(writing,),
            start_new_session=True,  # Ctrl-C reaches this process only, which passes it on in order
            env=_environment(writing),
        )
        os.close(writing)
        return reading

    async def _read_reports(self, fd: int) -> None:
        stream = asyncio.StreamReader()
        pipe = os.fdopen(fd, "rb")
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        async for line in stream:
            report = json.loads(line)
            if "pid" in report:
                self._watch(report["pid"], report["part"], report["fatal"])
            elif "stopping" in report:
                self._stopping = True
            elif "result" in report:
                self._result = report["result"]

    def _watch(self, pid: int, part: str, fatal: bool) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            if fatal:
                self._on_death(part)
            return
        self._fds[fd] = part
        asyncio.get_running_loop().add_reader(fd, self._on_exit, fd, part, fatal)

    def _forget(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        del self._fds[fd]
        os.close(fd)

    def _on_exit(self, fd: int, part: str, fatal: bool) -> None:
        self._forget(fd)
        if part == "driver":
            self._done.set()
        elif fatal:
            self._on_death(part)

    def _on_death(self, part: str) -> None:
        if self._stopping or self._interrupted or self._first_death is not None:
            return
        self._first_death = part
        asyncio.get_running_loop().call_later(GRACE_AFTER_DEATH, self._kill_driver)

    def _on_signal(self, number: int) -> None:
        self._interrupted += 1
        if self._interrupted > 1:
            self._kill_driver()
            return
        self._signal = signal.Signals(number)
        print("\nStopping: the learner finishes its step and writes a checkpoint (Ctrl-C again ends at once).", flush=True)
        self._driver.send_signal(signal.SIGINT)
        grace = self._config.cluster.stop_seconds + self._config.learner.batch_wait_seconds
        asyncio.get_running_loop().call_later(grace, self._kill_driver)

    def _kill_driver(self) -> None:
        if self._driver.poll() is None:
            self._driver.kill()

    def _exit_code(self) -> int:
        code = self._driver.wait()
        where = f"see {self._run.logs}"
        if self._interrupted:
            return 128 + self._signal
        if self._result is not None:
            if sentence := self._result.get("sentence"):
                raise RunFailed(self._result["part"], sentence) if self._result["exit"] == 1 else UserError(sentence)
            return int(self._result["exit"])
        if self._first_death is not None:
            raise RunFailed(self._first_death, f"{self._first_death} died and the run cannot go on without it: {where}.")
        raise RunFailed("driver", f"The driver died ({describe_exit(code)}) without naming a cause: {where}.")


def _environment(report_fd: int) -> dict[str, str]:
    """What the driver and everything below it inherits. Ray reads its authentication settings when it is imported."""
    environment = dict(os.environ)
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
        environment.pop(name, None)
    environment |= {
        REPORT_FD: str(report_fd),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


class Report:
    """The driver's end of the pipe to its supervisor; without a supervisor (a test, a debugger) it says nothing."""

    def __init__(self) -> None:
        fd = os.environ.pop(REPORT_FD, None)
        self._fd = int(fd) if fd else None
        if self._fd is not None:
            os.set_inheritable(self._fd, False)

    def process(self, pid: int, part: str, fatal: bool) -> None:
        """`pid` belongs to the run; if `fatal`, the run cannot go on without it."""
        self._send({"pid": pid, "part": part, "fatal": fatal})

    def stopping(self) -> None:
        """From now on processes end because they are meant to."""
        self._send({"stopping": True})

    def result(self, code: int, part: str = "", sentence: str = "") -> None:
        """The last word: the exit code, and what to print if the run failed."""
        self._send({"result": {"exit": code, "part": part, "sentence": sentence}})

    def _send(self, report: dict[str, Any]) -> None:
        if self._fd is not None:
            os.write(self._fd, json.dumps(report).encode() + b"\n")
