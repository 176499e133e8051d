"""How `segue join` ends, and what it leaves: a real one, with a stand-in for Ray's node process."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from segue.cluster.hosts.facts import facts_here
from segue.cluster.hosts.head import Head
from segue.cluster.hosts.messages import Check, Join

pytestmark = pytest.mark.processes

SECONDS = 60.0
TOKEN = "the words"
NODE = """
import os, signal, subprocess, sys
folder = sys.argv[sys.argv.index("--temp-dir") + 1]
os.makedirs(folder)
below = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
blocked = int(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
with open(os.environ["TOLD"], "w") as told:
    told.write(f"{os.getpid()} {below.pid} {blocked} {os.path.dirname(folder)}")
signal.pause()
"""
"""Takes the place of `ray start --block`: a process, one below it in a session of its own, a folder."""


class Joined(NamedTuple):
    head: Head
    said: queue.Queue[str]
    process: subprocess.Popen[str]
    node: psutil.Process
    family: list[psutil.Process]
    folder: Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Joined]:
    """A member whose node process runs."""
    scripts = tmp_path / "stand-in" / "ray" / "scripts"
    scripts.mkdir(parents=True)
    for folder in (scripts.parent, scripts):
        (folder / "__init__.py").touch()
    (scripts / "scripts.py").write_text(NODE)
    told = tmp_path / "told"
    os.mkfifo(told)
    telling = os.open(told, os.O_RDONLY | os.O_NONBLOCK)
    said = queue.Queue[str]()
    port = free_port()
    head = Head(facts_here(0, "127.0.0.1"), port, 2, TOKEN, said.put)
    command = [sys.executable, "-m", "segue.cli", "join", "--address", "127.0.0.1", "--port", str(port), "--rank", "1"]
    environment = os.environ | {"SEGUE_TOKEN": TOKEN}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    family: list[psutil.Process] = []
    try:
        head.gather(SECONDS, "embedded")
        head.check(Check({}, str(tmp_path), (20000, 20999)), {})
        head.order_join(Join("127.0.0.1:1", {"PYTHONPATH": str(tmp_path / "stand-in"), "TOLD": str(told)}, 1, 0.0, str(tmp_path)))
        assert select.select([telling], [], [], SECONDS)[0], "the node process did not start"
        node, below, blocked, folder_name = os.read(telling, 4096).decode().split()
        assert blocked == "1", "a batch system's SIGTERM is for who stops in order"
        family = psutil.Process(process.pid).children(recursive=True)
        assert {int(node), int(below)} < {each.pid for each in family}, "there is one of ours between"
        yield Joined(head, said, process, psutil.Process(int(node)), family, Path(folder_name))
    finally:
        process.kill()
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()
        head.close(1)
        os.close(telling)


def ended(process: psutil.Process) -> bool:
    """Whether it ends in time, though it is no child of ours."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], SECONDS)[0])
    finally:
        os.close(pidfd)


def test_what_runs_on_a_host_ends_with_a_join_that_is_killed_and_its_folder_goes(joined: Joined) -> None:
    joined.process.kill()
    assert [each for each in joined.family if not ended(each)] == []
    assert not joined.folder.exists()


def test_how_the_node_process_ended_is_told(joined: Joined) -> None:
    joined.node.kill()
    while "lost its Ray" not in (line := joined.said.get(timeout=SECONDS)):
        pass
    assert line.endswith("its node process ended with signal SIGKILL")


def test_a_run_that_ends_leaves_nothing_on_the_host(joined: Joined) -> None:
    joined.head.close(1)
    assert joined.process.wait(SECONDS) == 0
    assert [each for each in joined.family if not ended(each)] == []
    assert not joined.folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_host_that_is_told_to_leaves_and_says_so(joined: Joined, number: signal.Signals) -> None:
    """The first host has no time to stop in order here, for which SIGTERM would wait."""
    joined.process.send_signal(number)
    while " leaves: " not in (line := joined.said.get(timeout=SECONDS)):
        pass
    assert line.endswith(f" leaves: it was told to ({number.name})")
    assert joined.process.wait(SECONDS) == 128 + number
    assert [each for each in joined.family if not ended(each)] == []
    assert not joined.folder.exists()
