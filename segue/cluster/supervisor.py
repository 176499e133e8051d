"""`segue train`: runs the driver as a child and watches it, so that whatever dies, this process can still name it.

Consumes: lines of JSON that the driver writes to a pipe (`Report`): the processes of the run, that it has started, that it is
stopping, its result. Waits for: the driver's end, the death of any process of the run (a pidfd each), SIGINT, SIGTERM and SIGHUP.
Produces: the exit code. It imports neither Ray nor torch: when Ray's control store dies, Ray ends the process that uses it, from
C++, with its messages on stderr: those go to the driver's log.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from segue.cluster.child import REPORT_FD, SCRATCH, SUPERVISOR, command_line
from segue.cluster.hosts.attached import Attached
from segue.cluster.hosts.gathered import Gathered
from segue.cluster.hosts.several import Several
from segue.cluster.hosts.where import Where
from segue.cluster.prepare import Prepared, prepare
from segue.cluster.processes import adopt_orphans, describe_exit, end_family
from segue.cluster.stopped import as_it_can_be, tell_failed, tell_stopped
from segue.config import load_config
from segue.console import surviving_stdout
from segue.errors import RunFailed, UserError

GRACE_AFTER_DEATH = 20.0
"""Seconds the driver gets to end by itself, naming the cause, after a part the run cannot do without has died."""

DOUBT_SECONDS = 2.0
"""How long a driver that seems silent has to prove otherwise."""

RAY_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(
    config_path: Path, overrides: list[str], run: Path | None, resume: bool, serial: bool, where: Where | None = None
) -> int:
    """Train to the end and return the exit code: 0, or 130 after Ctrl-C.

    `where`: this is the first of several hosts. Raises `UserError` for what the user can mend, `RunFailed` with the first
    cause if a part died. Leaves no process behind.
    """
    with surviving_stdout():
        several = _several(config_path, overrides, serial, where)
        if several is None:
            return _train(prepare(config_path, overrides, run, resume, serial), serial)
        with several:
            prepared = prepare(config_path, overrides, run, resume, serial, several.hosts, several.ray)
            several.check(prepared)
            several.code = _train(prepared, serial, several)
            return several.code


def _several(config_path: Path, overrides: list[str], serial: bool, where: Where | None) -> Several | None:
    """The hosts of a run on several; None where this machine is all of it."""
    if where is not None:
        return Gathered(config_path, overrides, where)
    config = load_config(config_path, overrides)
    return Attached(config) if config.cluster.ray and not serial else None


def _train(prepared: Prepared, serial: bool, several: Several | None = None) -> int:
    try:
        code = watch(prepared, serial, several=several)
    except RunFailed as failure:
        with surviving_stdout():
            tell_failed(prepared.run, prepared.go_on)
        raise RunFailed(failure.part, as_it_can_be(failure.sentence, prepared.run)) from failure
    if code > 128:
        with surviving_stdout():
            tell_stopped(prepared.run, prepared.config, prepared.go_on)
    return code


def watch(prepared: Prepared, serial: bool, quiet: bool = False, several: Several | None = None) -> int:
    """Run a prepared run under watch; `quiet` moves what the driver prints to stderr. Errors as `supervise`."""
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="segue-", dir=_short_folder(), ignore_cleanup_errors=True) as scratch:
        watching = _Watch(prepared, serial, quiet, scratch, several)
        try:
            with surviving_stdout():
                return asyncio.run(watching.run())
        finally:
            end_family(grace_seconds=0.0 if watching.in_haste else 2.0)


def _short_folder() -> str | None:
    """Where temporary files go, unless it is too deep for Ray's sockets, whose paths may have 107 bytes."""
    return None if len(os.fsencode(tempfile.gettempdir())) <= 16 else "/tmp"


def _command(prepared: Prepared, child: str) -> list[str]:
    arguments = command_line(prepared.run, prepared.model, prepared.attempt, prepared.resume, prepared.only_eval)
    return [sys.executable, "-m", f"segue.cluster.{child}", *arguments]


class _Watch:
    """One run under watch. `in_haste`: the user wants it to end at once."""

    def __init__(self, prepared: Prepared, serial: bool, quiet: bool, scratch: str, several: Several | None) -> None:
        self._several = several
        self._token = secrets.token_hex(16)
        self._config = prepared.config
        self._run = prepared.run
        self._attempt = prepared.attempt
        self._child = "serial" if serial else "driver"
        self._scratch = scratch
        self._output = sys.stderr if quiet else None
        self._command = _command(prepared, self._child)
        self.in_haste = False
        self._started = False
        self._stopping = False
        self._interrupted = 0
        self._late = self._stuck = self._silent = self._killed = False
        self._silence: asyncio.TimerHandle | None = None
        self._signal = signal.SIGINT
        self._result: dict[str, Any] | None = None
        self._first_death: str | None = None
        self._fds: dict[int, str] = {}
        self._done = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        reading = self._start_driver()
        try:
            for number in STOPS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    # Not by `add_signal_handler`: a loop that closes puts back what ends the process.
                    signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._on_signal, number))
            reader = asyncio.create_task(self._read_reports(reading))
            self._watch(self._driver.pid, "driver", fatal=True)
            loop.call_later(2.0 * self._config.cluster.start_seconds + GRACE_AFTER_DEATH, self._look_whether_started)
            await self._done.wait()
        finally:
            for number in STOPS:  # this is the end already, and it must be whole; nothing is started any more that inherits it
                signal.signal(number, signal.SIG_IGN)
        await asyncio.wait([reader], timeout=2.0)  # the pipe ends with the driver and whoever inherited it
        reader.cancel()
        for fd in list(self._fds):
            self._forget(fd)
        return self._exit_code()

    def _start_driver(self) -> int:
        """Start the driver; returns the reading end of its report pipe."""
        reading, writing = os.pipe()
        with open(self._run.log_of(f"{self._child}-0", self._attempt), "ab") as log:
            self._driver = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=log,
                pass_fds=(writing,),
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on in order
                env=_environment(self._token, attached=self._several is not None and bool(self._several.ray))
                | {
                    REPORT_FD: str(writing),
                    SUPERVISOR: str(os.getpid()),
                    SCRATCH: self._scratch,
                    "TMPDIR": self._scratch,  # what libraries leave behind in it, those that were killed above all, goes with it
                },
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
            elif "ray" in report:
                self._order_join(report["ray"])
            elif "started" in report:
                self._started = True
            elif "alive" in report:
                self._on_alive()
            elif "stopping" in report:
                self._on_stopping()
            elif "result" in report and self._result is None:
                self._result = report["result"]
                self._expect_end()

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
        if self._stopping or self._interrupted or self._killed or self._first_death is not None:
            return
        self._first_death = part
        asyncio.get_running_loop().call_later(GRACE_AFTER_DEATH, self._kill_driver)

    def _on_signal(self, number: int) -> None:
        if self._interrupted and (number == signal.SIGHUP or number == signal.SIGTERM == self._signal):
            return  # a terminal that closes may say so twice, and so does SLURM at the end of a job's time
        self._interrupted += 1
        self._signal = signal.Signals(number)
        if self._interrupted > 1 or not self._started:
            self.in_haste = True
            self._kill_driver()
            return
        self._driver.send_signal(signal.SIGINT)
        asyncio.get_running_loop().call_later(self._grace(), self._give_up)
        print("\nStopping: the learner finishes its step and writes a checkpoint (Ctrl-C again ends at once).", flush=True)

    def _on_stopping(self) -> None:
        self._stopping = True
        self._hear()
        if not self._interrupted:  # an interrupt has a deadline of its own
            self._expect_end()

    def _expect_end(self) -> None:
        """All that is left to do is to stop the roles and Ray."""
        asyncio.get_running_loop().call_later(3 * self._config.cluster.stop_seconds + GRACE_AFTER_DEATH, self._give_up)

    def _on_alive(self) -> None:
        self._hear()
        if not self._stopping:  # from then on there are deadlines for the stop
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(self._config.cluster.silence_seconds, self._doubt)

    def _hear(self) -> None:
        if self._silence is not None:
            self._silence.cancel()

    def _doubt(self) -> None:
        """It may be this process that was stopped (Ctrl-Z): what the driver said meanwhile is read first."""
        self._silence = asyncio.get_running_loop().call_later(DOUBT_SECONDS, self._on_silence)

    def _on_silence(self) -> None:
        self._silent = True
        self._kill_driver()

    def _look_whether_started(self) -> None:
        """The driver has a deadline of its own, from when Ray runs; this is for one that is stuck, in Ray's start say."""
        if not self._started and not self._stopping:
            self._stuck = True
            self._kill_driver()

    def _order_join(self, address: str) -> None:
        assert self._several is not None
        environment = ray_environment(self._token)
        for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
            if value := os.environ.get(name):
                environment[name] = value
        self._several.order_join(address, environment, self._grace() + 3 * self._config.cluster.stop_seconds)

    def _grace(self) -> float:
        """How long a stop may take."""
        return self._config.cluster.stop_seconds + self._config.learner.batch_wait_seconds

    def _give_up(self) -> None:
        self._late = True
        self._kill_driver()

    def _kill_driver(self) -> None:
        if self._driver.poll() is None:
            self._killed = True
            self._driver.kill()

    def _exit_code(self) -> int:
        code = self._driver.wait()
        # A driver that is killed takes its children with it, and their ends may be seen first; a child takes no driver along so.
        killed_first = code == -signal.SIGKILL and not self._killed
        if self._first_death is not None and not killed_first:  # the driver may know only what came of it
            raise died(self._first_death, self._run.log_of(self._first_death, self._attempt))
        if self._result is not None:
            if sentence := self._result["sentence"]:
                raise RunFailed(self._result["part"], sentence) if self._result["exit"] == 1 else UserError(sentence)
            return int(self._result["exit"]) if self._result["exit"] != 130 else 128 + self._signal
        log = self._run.log_of(f"{self._child}-0", self._attempt)
        if self._stuck:
            seconds = self._config.cluster.start_seconds
            raise RunFailed("start", f"The run did not start within twice cluster.start_seconds = {seconds:g}: see {log}.")
        if self._silent:
            seconds = self._config.cluster.silence_seconds
            raise RunFailed("driver", f"The driver has not answered for cluster.silence_seconds = {seconds:g}: see {log}.")
        if self._late:
            raise RunFailed("driver", f"The run did not stop in time and was ended: see {self._run.logs}.")
        if self._interrupted:
            return 128 + self._signal
        raise RunFailed("driver", f"The {self._child} died ({describe_exit(code)}) and the run with it: see {log}.")


def died(part: str, log: Path) -> RunFailed:
    """The end of a run by the death of a part that it cannot go on without."""
    return RunFailed(part, f"{part} died and the run cannot go on without it: see {log if log.exists() else log.parent}.")


def _environment(token: str, attached: bool) -> dict[str, str]:
    """What the driver and everything below it inherits. Ray reads its authentication settings when it is imported.

    A Ray that the run is `attached` to has settings of its own, which whoever starts the run was given.
    """
    environment = dict(os.environ)
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
        environment.pop(name, None)
    environment |= {name: value for name, value in ray_environment(token).items() if not (attached and name in RAY_AUTH)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Compiled kernels are worth more than one run.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"))
    # Ray would start one worker process after another, because we give it no CPUs to count.
    environment.setdefault("RAY_worker_maximum_startup_concurrency", str(os.cpu_count() or 1))
    return environment


def ray_environment(token: str) -> dict[str, str]:
    """What must be the same on all hosts of a run."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's default lets every other process of the machine go first
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
    }
