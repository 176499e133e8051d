"""Runs on several hosts that must not begin, as whole commands on this machine: one sentence on each host, and nothing is left."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_run import Command, segue

pytestmark = pytest.mark.processes
TOKEN = {"SEGUE_TOKEN": "the words"}
_NEW_MOUNTS, _PRIVATE = 0x00020000, 0x4000 | 0x40000
"""CLONE_NEWNS; MS_REC | MS_PRIVATE."""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def head(smoke: Path, run: Path, port: int, hosts: int, *more: object) -> tuple[object, ...]:
    return ("train", smoke, "--run", run, "--hosts", hosts, "--address", "127.0.0.1", "--port", port, *more)


def member(port: int, rank: int) -> tuple[object, ...]:
    return ("join", "--address", "127.0.0.1", "--port", port, "--rank", rank, "--seconds", 60)


def test_hosts_that_do_not_come_are_named(smoke: Path, tmp_path: Path, port: int) -> None:
    command = segue(*head(smoke, tmp_path / "run", port, 3, "--set", "cluster.join_seconds=0.5"), env=TOKEN)
    assert command.wait() == 1, command.tails()
    assert command.sentence() == (
        f"Host 1, 2 of 3 did not appear at 127.0.0.1:{port} within cluster.join_seconds = 0.5: start launch.sh there with "
        "NODE_RANK=1 and HEAD_ADDR=127.0.0.1."
    )
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_another_token_is_said_on_both_hosts(smoke: Path, tmp_path: Path, port: int) -> None:
    with Command(*head(smoke, tmp_path / "run", port, 2, "--set", "cluster.join_seconds=8"), env=TOKEN) as first:
        other = segue(*member(port, 1), env={"SEGUE_TOKEN": "other words"})
        assert other.wait() == 2, other.tails()
        assert other.sentence() == (
            f"The run at 127.0.0.1:{port} has another token: set SEGUE_TOKEN to the same words on all hosts, or share "
            "~/.segue/token."
        )
        assert first.wait() == 1, first.tails()
        assert "Host 1 of 2 did not appear" in first.sentence() and "(refused: one with another token)" in first.sentence()
        first.assert_nothing_left()
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_the_config_is_told_to_the_others_too(smoke: Path, tmp_path: Path, port: int) -> None:
    with Command(*head(smoke, tmp_path / "run", port, 2, "--set", "steps=0"), env=TOKEN) as first:
        other = segue(*member(port, 1), env=TOKEN)
        assert other.wait() == 2, other.tails()
        assert other.sentence() == "Host 0 has refused the run, and says there what is to be corrected."
        assert first.wait() == 2, first.tails()
        assert "steps = 0" in first.sentence()
    assert not (tmp_path / "run").exists()


def another_disk(path: Path) -> Callable[[], None]:
    """For a process about to start: it sees another, empty file system at `path`. Skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    libc = ctypes.CDLL(None, use_errno=True)

    def apart() -> None:
        if libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _PRIVATE, None):
            os._exit(77)
        if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, None):
            os._exit(77)

    if (pid := os.fork()) == 0:
        apart()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        pytest.skip("mounting is not allowed here")
    return apart


def test_storage_that_is_not_shared_is_said_and_the_run_taken_back(smoke: Path, tmp_path: Path, port: int) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    apart = another_disk(runs)
    for _ in range(2):  # the name is free again
        with Command(*head(smoke, runs / "run", port, 2), env=TOKEN) as first, Command(
            *member(port, 1), env=TOKEN, preexec=apart
        ) as other:
            assert first.wait() == 2, first.tails()
            assert f" does not see {runs}/run/.seen-by-all-" in first.sentence() and "on storage that all hosts share" in first.sentence()
            assert first.sentence().startswith("Host 1 (")
            assert other.wait() == 0, other.tails()
            assert "Segue: the run has ended with exit code 2." in other.out
        assert list(runs.iterdir()) == []
