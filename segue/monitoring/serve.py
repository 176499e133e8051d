"""`segue monitor RUN`: a Prometheus for one run, on this machine, that ends with the command.

What it gathers stays in `RUN/metrics/prometheus`, so a finished run can be looked at again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from segue.errors import DiskFailed, RunFailed, UserError
from segue.files import write_atomic
from segue.metrics.scrape import get
from segue.monitoring.binaries import HOW_TO_GET, find
from segue.monitoring.generate import rule_files
from segue.monitoring.prometheus import RAY_TARGETS, prometheus_config
from segue.monitoring.yaml_text import yaml_text
from segue.rundir import RunDir

START_SECONDS, STOP_SECONDS, LOOK_SECONDS = 60.0, 30.0, 0.1
HOST = "127.0.0.1"


def monitor(
    path: Path, port: int, interval: float, say: Callable[[str], None], tie: Callable[[int], None] = lambda parent: None
) -> int:
    """Run Prometheus for the run in `path` on `port`, scraping every `interval` seconds, until it ends or a signal ends this.

    `tie` is called in the new process with the number of this one: it ties the one's life to the other's. Raises `UserError`
    where there is no such run, no Prometheus, the port is taken, or the run directory cannot be written; `RunFailed`
    where Prometheus ends of itself.
    """
    run = RunDir.open(path)
    program = find("prometheus")
    if program is None:
        raise UserError(f"There is no Prometheus here: {HOW_TO_GET}.")
    check_port(port)
    folder = folder_of(run)
    log = run.log_of("prometheus")
    try:
        write_files(run, folder, interval)
        log.parent.mkdir(exist_ok=True)
        output = open(log, "ab")  # noqa: SIM115 - closed below
    except DiskFailed as error:
        raise UserError(error.place) from error
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error.strerror}): make it a place that can be.") from None
    with _unwound_by_signals():
        with output:
            process = start(program, folder, port, output, tie)
        try:
            until_ready(process, port, log)
            try:
                write_atomic(address_file(run), f"http://{HOST}:{port}\n".encode())
                say(f"Prometheus of {run.name}: http://{HOST}:{port} (Ctrl-C ends it; Grafana: docs/monitoring.md)")
                process.wait()
                raise RunFailed("prometheus", _ended(process, log))
            finally:
                address_file(run).unlink(missing_ok=True)  # here only: it may be that of another Prometheus of this run
        finally:
            stop(process)


@contextlib.contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the block as Ctrl-C does; the exit code is 128 + signal."""

    def unwind(number: int, frame: FrameType | None) -> None:
        for each in before:  # what is cleaned up is not to be cut short: a terminal that closes may say so twice
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def folder_of(run: RunDir) -> Path:
    """Where a run's Prometheus has its configuration and its data."""
    return run.path.resolve() / "metrics" / "prometheus"


def address_file(run: RunDir) -> Path:
    """Says where the run's Prometheus answers, while it runs: `segue top` asks it for alerts."""
    return folder_of(run) / "address"


def check_port(port: int) -> None:
    """Raises `UserError` if something listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"Prometheus cannot listen on port {port} of {HOST} ({error.strerror}): "
                "stop what uses it, or name another with --port."
            ) from None


def write_files(run: RunDir, folder: Path, interval: float) -> None:
    """Configuration and rules of this run. Raises `DiskFailed` on a full disk."""
    for name in ("data", "vllm"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    config = prometheus_config(run.path.resolve(), folder, folder, interval, interval)
    if not Path(RAY_TARGETS).parent.is_dir():  # no Ray of a cluster here; Prometheus would complain about the folder
        config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] != "ray"]
    for name, text in {"prometheus.yml": yaml_text(config), **rule_files()}.items():
        write_atomic(folder / name, text.encode())


def start(program: Path, folder: Path, port: int, output: IO[bytes], tie: Callable[[int], None]) -> subprocess.Popen[bytes]:
    """Prometheus, in a session of its own: Ctrl-C reaches this process, which ends it in order."""
    me = os.getpid()
    return subprocess.Popen(
        [
            str(program),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=10y",
            f"--web.listen-address={HOST}:{port}",
            "--log.level=warn",
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: tie(me),
    )


def until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until it answers. Raises `RunFailed` if it ends first or takes over `START_SECONDS`."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            get(f"http://{HOST}:{port}/-/ready", well=True)  # 503 while it starts
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LOOK_SECONDS)
            raise RunFailed("prometheus", _ended(process, log))
    raise RunFailed("prometheus", f"Prometheus did not answer within {START_SECONDS:g} s: look into {log}.")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it: by request, and after `STOP_SECONDS` by force."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ended(process: subprocess.Popen[bytes], log: Path) -> str:
    """One sentence on its end, with the last thing it said."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = f"; it said: {lines[-1][-300:]}" if lines else ""
    return f"Prometheus ended by itself (code {process.returncode}){said}. See {log}."
