"""`segue monitor`: what it says when it cannot start; that it runs is in tests/e2e/test_live_monitoring.py."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from segue.cli import app
from segue.errors import RunFailed, UserError
from segue.monitoring import binaries, serve
from segue.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", 'mode = "async"\n')


def program(folder: Path, text: str) -> Path:
    """A stand-in for Prometheus, at the edge: a script of its name."""
    path = folder / "prometheus"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((serve.HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["monitor", str(tmp_path)])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "is no run directory" in result.stderr


def test_without_prometheus_it_says_how_to_get_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "prefix", str(run.path))
    assert binaries.find("prometheus") is None
    with pytest.raises(UserError, match=r"^There is no Prometheus here: .*SEGUE_PROMETHEUS=1 ./launch.sh --install-only.*\.$"):
        serve.monitor(run.path, free_port(), 5.0, print)


def test_it_is_found_in_path_first_and_then_where_launch_sh_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = tmp_path / "opt" / "prometheus" / "usr" / "bin"
    unpacked.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    there = program(unpacked, "")
    assert binaries.find("prometheus") == there
    first = program(tmp_path / "bin", "")
    assert binaries.find("prometheus") == first


def test_a_port_taken_is_one_sentence(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find", lambda name: program(tmp_path, "exit 0"))
    with socket.socket() as taken:
        taken.bind((serve.HOST, 0))
        taken.listen()
        with pytest.raises(UserError, match=r"stop what uses it, or name another with --port\.$"):
            serve.monitor(run.path, taken.getsockname()[1], 5.0, print)


def test_a_prometheus_that_ends_by_itself_is_quoted(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find", lambda name: program(tmp_path, "echo the data is locked; exit 3"))
    with pytest.raises(
        RunFailed, match=r"^Prometheus ended by itself \(code 3\); it said: the data is locked\. See .*prometheus.log\.$"
    ):
        serve.monitor(run.path, free_port(), 5.0, print)
    config = (run.path / "metrics" / "prometheus" / "prometheus.yml").read_text()
    assert f"{run.path}/metrics/targets/*.json" in config and 'scrape_interval: "5s"' in config


def test_a_run_directory_that_cannot_be_written_is_one_sentence(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "find", lambda name: program(tmp_path, "exit 3"))
    shutil.rmtree(run.logs)
    with pytest.raises(RunFailed, match=r"ended by itself"):
        serve.monitor(run.path, free_port(), 5.0, print)
    shutil.rmtree(run.path / "metrics")
    (run.path / "metrics").touch()
    with pytest.raises(UserError, match=r"metrics/prometheus\S* cannot be written \(Not a directory\): make it"):
        serve.monitor(run.path, free_port(), 5.0, print)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_takes_its_address_back(
    number: int, code: int, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds the address would ask a Prometheus that is there no more."""
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    started: list[subprocess.Popen[bytes]] = []

    def ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        started.append(process)

    def say(line: str) -> None:
        assert serve.address_file(run).is_file()
        os.kill(os.getpid(), number)

    def stop(process: subprocess.Popen[bytes]) -> None:
        os.kill(os.getpid(), signal.SIGHUP)  # a terminal that closes says so more than once: it is not cut short
        process.kill()
        process.wait()

    monkeypatch.setattr(serve, "find", lambda name: program(tmp_path, "exec sleep 600"))
    monkeypatch.setattr(serve, "until_ready", ready)
    if number != signal.SIGINT:
        monkeypatch.setattr(serve, "stop", stop)
    monkeypatch.setattr("builtins.print", lambda line, **_: say(line) if str(line).startswith("Prometheus of") else None)
    result = CliRunner().invoke(app, ["monitor", str(run.path), "--port", str(free_port())])
    assert (result.exit_code, serve.address_file(run).exists()) == (code, False)
    assert started[0].poll() is not None
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == handlers
