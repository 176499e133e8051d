"""A program that a benchmark runs: it ends by itself, by its deadline, or with the benchmark, and never outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks import children

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def test_lines_of_both_streams_come_in_order_and_the_code_with_them() -> None:
    heard: list[str] = []
    code = "import os, sys; os.write(1, b'one\\n'); os.write(2, b'two \\xff\\n'); sys.exit(7)"
    ended = children.run(python(code), 60.0, lambda pid, line: heard.append(line))
    assert heard == ["one\n", "two \ufffd\n"]
    assert (ended.code, ended.late, ended.last) == (7, False, ["one", "two \ufffd"])
    assert ended.why(60.0) == "failed with exit code 7"


def test_a_late_one_is_asked_and_one_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = children.run(python("import time; time.sleep(600)"), 0.2)
    assert ended.late and ended.code == -signal.SIGTERM
    assert ended.why(0.2) == "took longer than 0.2 s and was stopped"
    monkeypatch.setattr(children, "STOP_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    ended = children.run(python(deaf), 1.0)
    assert ended.late and ended.code in (-signal.SIGKILL, -signal.SIGTERM)


def test_one_that_closes_its_output_and_goes_on_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "STOP_SECONDS", 0.2)
    closed = "import os, sys, time; os.close(1); os.close(2); time.sleep(float(sys.argv[1])); os._exit(7)"
    assert children.run([*python(closed), "0.5"], 60.0) == children.Ended(7, False, [])
    ended = children.run([*python(closed), "600"], 0.5)
    assert ended.late and ended.code in (-signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.parametrize(("then", "deadline", "code"), [("os._exit(7)", 60.0, 7), ("time.sleep(600)", 1.0, -signal.SIGTERM)])
def test_what_a_program_leaves_behind_with_its_output_is_not_waited_for(then: str, deadline: float, code: int) -> None:
    left = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])"
    heard: list[str] = []
    ended = children.run(
        python(f"{left}\nimport os, time; print(child.pid); os.write(1, b'the rest'); {then}"),
        deadline,
        lambda pid, line: heard.append(line),
    )
    behind = psutil.Process(int(heard[0]))
    assert behind.status() != psutil.STATUS_ZOMBIE
    behind.kill()
    assert (ended.code, ended.late, heard[1:]) == (code, code < 0, ["the rest"])


def test_what_the_listener_raises_ends_the_program() -> None:
    pids: list[int] = []

    def listen(pid: int, line: str) -> None:
        pids.append(pid)
        raise ValueError(line)

    with pytest.raises(ValueError, match="ready"):
        children.run(python("import time; print('ready'); time.sleep(600)"), 60.0, listen)
    assert not psutil.pid_exists(pids[0])


def test_all_that_run_are_told_to_stop_at_once() -> None:
    """By two signals: a run that has heard one writes a checkpoint first."""
    polite = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    heard: list[str] = []
    both = threading.Barrier(2, timeout=60.0)

    def listen(pid: int, line: str) -> None:
        heard.append(line.strip())
        if line == "ready\n" and both.wait() == 0:
            children.stop()

    with ThreadPoolExecutor(2) as threads:
        codes = [ended.code for ended in threads.map(lambda _: children.run(python(polite), 60.0, listen), range(2))]
    assert codes == [5, 5] and heard.count("ready") == 2
    children.stop()  # none is left to be told


BENCHMARK = """
import sys
from benchmarks import children
from benchmarks.command import ended

def main():
    children.run([sys.executable, "-u", "-c", {program!r}], 600.0, lambda pid, line: print(line, end="", flush=True))

sys.exit(ended(main))
"""
CLEANING = """
import os, signal, sys, time
def clean(*_):
    print("cleaned up")
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, clean)
print(os.getpid())
while True: time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_benchmark_waits_for_it(number: int) -> None:
    """The signal reaches the benchmark alone, as from `kill`."""
    command = python(BENCHMARK.format(program=CLEANING))
    benchmark = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert benchmark.stdout is not None
    program = psutil.Process(int(benchmark.stdout.readline()))
    os.kill(benchmark.pid, number)
    _, said = benchmark.communicate(timeout=60.0)
    assert (benchmark.returncode, said) == (128 + number, "Interrupted: nothing was written.\n")
    assert not program.is_running()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_dies_with_the_benchmark(number: int) -> None:
    inner = "import os, time; print(os.getpid()); time.sleep(600)"
    code = f"from benchmarks import children; children.run({python(inner)!r}, 600.0, lambda pid, line: print(line, end=''))"
    benchmark = subprocess.Popen(python(code), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert benchmark.stdout is not None
    program = psutil.Process(int(benchmark.stdout.readline()))
    os.kill(benchmark.pid, number)
    benchmark.wait(30.0)
    gone, _ = psutil.wait_procs([program], timeout=30.0)
    assert gone or program.status() == psutil.STATUS_ZOMBIE
    benchmark.stdout.close()
