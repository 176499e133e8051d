"""Standard output that is closed, full, stopped or missing: nothing that is written to it raises, waits, or goes elsewhere."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from segue import console
from segue.console import Console, surviving_stdout

F_SETPIPE_SZ = 1031
SMALL = 4 * 4096


@contextmanager
def small_pipe() -> Iterator[int]:
    """Puts a small pipe in the place of file descriptor 1 and gives its reading end; then the old one comes back.

    No fixture: pytest puts its own file there before it calls a test.
    """
    saved = os.dup(1)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, F_SETPIPE_SZ, SMALL)
    os.dup2(writing, 1)
    os.close(writing)
    try:
        yield reading
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(reading)


def break_pipe(reading: int) -> None:
    """The reader ends."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, reading)
    os.close(null)


def test_what_is_written_arrives() -> None:
    with small_pipe() as stdout:
        shown = Console()
        print("step 1", file=shown, flush=True)
        os.dup2(2, 1)  # a later redirection does not concern it
        print("Größe η", file=shown)
        assert os.read(stdout, 1000) == b"step 1\n" + "Größe η\n".encode(shown.encoding, "replace")
        assert not shown.isatty()


def test_a_reader_that_is_gone_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with small_pipe() as stdout:
        shown = Console()
        break_pipe(stdout)
        for _ in range(3):
            print("step", file=shown)
        shown.drain(0.0)
        assert [record.message for record in caplog.records] == ["the console is gone (Broken pipe): nothing more is shown there"]


def test_a_full_disk_is_no_reason_to_end(caplog: pytest.LogCaptureFixture) -> None:
    with small_pipe():
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.close(full)
        print("step", file=Console())
        assert "No space left on device" in caplog.text


def test_a_reader_that_pauses_is_not_waited_for_and_gets_everything_in_order() -> None:
    with small_pipe() as stdout:
        shown = Console()
        lines = [f"step {number} {'.' * 100}\n" for number in range(200)]
        for line in lines:
            shown.write(line)
        got = b""
        while len(got) < len("".join(lines)):
            got += os.read(stdout, SMALL)
            shown.drain(0.0)
        assert got.decode() == "".join(lines)


def test_a_reader_that_never_comes_costs_bounded_memory_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with small_pipe() as stdout:
        monkeypatch.setattr(console, "KEPT", 1000)
        shown = Console()
        for number in range(10_000):
            shown.write(f"step {number:6d}\n")
        shown.drain(0.0)
        left, lost = (record.message for record in caplog.records)
        assert left.startswith("nobody read the console's last ") and int(left.split()[-2]) <= 1000
        assert lost.startswith("the console's reader came too late for ")
        written = 10_000 * len("step      0\n") - int(left.split()[-2]) - int(lost.split()[-2])
        assert 0 < written <= SMALL, "every byte was shown, is kept, or counted as lost"
        os.read(stdout, SMALL)
        shown.drain(0.0)
        assert os.read(stdout, SMALL).endswith(b"step   9999\n"), "the newest lines are the ones that are kept"


def test_print_goes_through_it() -> None:
    with small_pipe() as stdout, surviving_stdout():
        print("plan", flush=True)
        break_pipe(stdout)
        print("step", flush=True)


@pytest.mark.processes
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lead_nowhere(closed: str) -> None:
    """The next pipe does not get the number of standard output; nor does it in a child."""
    script = (
        "from segue.console import open_missing_streams; open_missing_streams(); import os, subprocess, sys; "
        "subprocess.run([sys.executable, '-c', 'import os; [os.fstat(number) for number in range(3)]'], check=True); "
        "print('a word', flush=True); print('a word', file=sys.stderr, flush=True); sys.exit(40 + min(os.pipe()))"
    )
    ended = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, script], capture_output=True, check=False
    )
    assert ended.returncode >= 43
