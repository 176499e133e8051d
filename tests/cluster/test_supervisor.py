"""The supervisor, with small scripts in the driver's place: what it makes of their reports, their deaths and their silence."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import textwrap
from collections.abc import Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from segue.cluster import supervisor
from segue.cluster.prepare import Prepared
from segue.cluster.processes import adopt_orphans, end_family
from segue.cluster.supervisor import watch
from segue.config import to_toml
from segue.config.root import resolve
from segue.errors import RunFailed, UserError
from segue.rundir import RunDir

pytestmark = pytest.mark.processes

HEAD = """
import json, os, signal, subprocess, sys, time
def report(**what): os.write(int(os.environ["SEGUE_REPORT_FD"]), json.dumps(what).encode() + b"\\n")
def sleeper(): return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setattr(supervisor, "GRACE_AFTER_DEATH", 0.2)
    config = resolve({"steps": 1, "task": {"env": "latency"}, "model": {"path": "x"}, "cluster": {"stop_seconds": 0.1}}, "a test")
    run = RunDir.create(tmp_path / "run", to_toml(config))
    return Prepared(config, run, "x", "", run.begin_attempt(datetime(2026, 1, 1)))


def under_watch(prepared: Prepared, script: str, monkeypatch: pytest.MonkeyPatch, *then: str) -> int:
    """Watch a script; whatever comes of it, nothing is left."""
    code = "\n".join([HEAD, *map(textwrap.dedent, (script, *then))])
    monkeypatch.setattr(supervisor, "_command", lambda *_: [sys.executable, "-c", code])
    before = {number: signal.getsignal(number) for number in supervisor.STOPS}
    try:
        return watch(prepared, serial=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        adopt_orphans(False)
        assert not [child for child in psutil.Process().children(recursive=True) if child.name() != "resource_tracker"]


RESULT = 'report(result={"exit": %d, "part": "%s", "sentence": "%s"})\n'


def test_the_result_is_the_exit_code(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    assert under_watch(prepared, "report(started=True)\n" + RESULT % (0, "", ""), monkeypatch) == 0


def test_a_reported_failure_is_raised_as_it_is(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match=r"^It broke\.$") as failed:
        under_watch(prepared, RESULT % (1, "learner-0", "It broke."), monkeypatch)
    assert failed.value.part == "learner-0"
    with pytest.raises(UserError, match=r"^Mend it\.$"):
        under_watch(prepared, RESULT % (2, "", "Mend it."), monkeypatch)


def test_the_first_result_counts(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is done; that stopping fails afterwards does not undo it."""
    assert under_watch(prepared, RESULT % (0, "", "") + RESULT % (1, "ray", "It would not stop."), monkeypatch) == 0


def test_a_driver_that_dies_is_named_with_its_signal_and_log(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match=r"The driver died \(signal SIGKILL\)"):
        under_watch(prepared, 'print("last words", file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)', monkeypatch)
    assert "last words" in prepared.run.log_of("driver-0").read_text(), "what it says on stderr is in its log"


def test_a_part_that_dies_is_named_though_the_driver_hangs(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
    part = sleeper()
    report(pid=part.pid, part="Ray's control store (gcs_server)", fatal=True)
    part.kill(); part.wait()
    time.sleep(600)
    """
    with pytest.raises(RunFailed, match=r"^Ray's control store \(gcs_server\) died and the run cannot go on without it"):
        under_watch(prepared, script, monkeypatch)


def test_the_first_death_is_the_cause_whatever_the_driver_saw_of_it(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
    first, second = sleeper(), sleeper()
    for process, name in ((first, "raylet"), (second, "learner-0")):
        report(pid=process.pid, part=name, fatal=True)
    first.kill(); first.wait(); time.sleep(0.05); second.kill(); second.wait()
    """
    with pytest.raises(RunFailed, match=r"^raylet died"):
        under_watch(prepared, script, monkeypatch, RESULT % (1, "learner-0", "learner-0 died."))


def test_a_driver_that_is_killed_is_the_cause_though_its_children_are_seen_to_end_before(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
    part = sleeper()
    report(pid=part.pid, part="raylet", fatal=True)
    part.kill(); part.wait()
    os.kill(os.getpid(), 9)
    """
    with pytest.raises(RunFailed, match=r"The driver died \(signal SIGKILL\)"):
        under_watch(prepared, script, monkeypatch)


def test_deaths_that_may_be_are_no_cause(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part that can be replaced, and of any while the run stops."""
    script = """
    pool, node = sleeper(), sleeper()
    report(pid=pool.pid, part="envpool-0", fatal=False)
    report(pid=node.pid, part="rollout-0", fatal=True)
    pool.kill(); pool.wait()
    report(stopping=True)
    time.sleep(0.05)
    node.kill(); node.wait()
    """
    assert under_watch(prepared, script, monkeypatch, RESULT % (0, "", "")) == 0


def test_a_start_that_is_stuck_ends(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = prepared.config.cluster.model_copy(update={"start_seconds": 0.1})
    stuck = Prepared(prepared.config.model_copy(update={"cluster": cluster}), prepared.run, "x", "", 1)
    with pytest.raises(RunFailed, match=r"did not start within twice cluster\.start_seconds = 0\.1"):
        under_watch(stuck, "time.sleep(600)", monkeypatch)


def test_a_stop_that_is_stuck_ends(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "report(started=True)\nreport(stopping=True)\ntime.sleep(600)"
    with pytest.raises(RunFailed, match="did not stop in time and was ended"):
        under_watch(prepared, script, monkeypatch)
    assert under_watch(prepared, RESULT % (0, "", "") + script, monkeypatch) == 0, "all was done before"


@pytest.mark.parametrize("last", ["", "os.kill(os.getpid(), 9)"])
def test_what_the_driver_leaves_behind_is_ended(prepared: Prepared, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Grandchildren in sessions of their own that ignore SIGTERM, with their parents gone."""
    script = f"""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    middle = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=1, start_new_session=True)"
    subprocess.run([sys.executable, "-c", middle, stubborn], stdout=subprocess.DEVNULL)
    report(result={{"exit": 0, "part": "", "sentence": ""}})
    {last}
    """
    assert under_watch(prepared, script, monkeypatch) == 0


def test_the_environment_is_ours(prepared: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's Ray, a token of this run's own, one thread; and a scratch folder that is gone afterwards."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://somebody:10001")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "environment.json"
    script = f"""
    open(os.environ["SEGUE_SCRATCH"] + "/file", "w").close()
    json.dump(dict(os.environ), open({str(path)!r}, "w"))
    """
    tokens = set()
    for _ in range(2):
        assert under_watch(prepared, script, monkeypatch, RESULT % (0, "", "")) == 0
        environment = json.loads(path.read_text())
        assert "RAY_ADDRESS" not in environment and environment["RAY_AUTH_MODE"] == "token"
        assert environment["OMP_NUM_THREADS"] == "1" and environment["SEGUE_SUPERVISOR"] == str(os.getpid())
        assert not Path(environment["SEGUE_SCRATCH"]).exists()
        tokens.add(environment["RAY_AUTH_TOKEN"])
    assert len(tokens) == 2


TOLD = """
    passed_on = []
    signal.signal(signal.SIGINT, lambda *_: passed_on.append(1))
    report(started=True)
    time.sleep(0.1)
    os.kill(%d, signal.SIGTERM)
    while not passed_on: time.sleep(0.01)"""
"""A driver that has started, whose supervisor gets SIGTERM, and who is told to stop."""


def test_an_interrupt_before_the_start_is_over_ends_at_once(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"os.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(600)"
    assert under_watch(prepared, script, monkeypatch) == 130


def test_an_interrupt_is_passed_on_and_the_second_ends_at_once(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""{TOLD % os.getpid()}
    report(stopping=True)
    """
    assert under_watch(prepared, script, monkeypatch, RESULT % (130, "", "")) == 128 + signal.SIGTERM
    assert under_watch(prepared, script, monkeypatch, f"os.kill({os.getpid()}, signal.SIGINT); time.sleep(600)") == 130


def test_sigterm_may_come_twice(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM sends it when the time of a job is over and again when it ends the job; the checkpoint is written all the same."""
    script = f"""{TOLD % os.getpid()}
    os.kill({os.getpid()}, signal.SIGTERM)
    report(stopping=True)
    time.sleep(0.1)
    """
    with pytest.raises(RunFailed, match="What came of it"):
        under_watch(prepared, script, monkeypatch, RESULT % (1, "disk", "What came of it."))


def test_no_signal_cuts_the_end_short_or_changes_its_code(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's second SIGTERM may come while what a driver left behind is ended; and also as the loop closes it is not deadly."""
    run = asyncio.run

    def signalled() -> None:
        assert [signal.getsignal(number) for number in supervisor.STOPS] == [signal.SIG_IGN] * 3
        for number in supervisor.STOPS:
            os.kill(os.getpid(), number)

    def to_the_end(work: Coroutine[Any, Any, int]) -> int:
        async def working() -> int:
            try:
                return await work
            finally:
                signalled()

        return run(working())

    def ending(grace_seconds: float) -> list[str]:
        signalled()
        return end_family(grace_seconds)

    monkeypatch.setattr(asyncio, "run", to_the_end)
    monkeypatch.setattr(supervisor, "end_family", ending)
    assert under_watch(prepared, RESULT % (3, "", ""), monkeypatch) == 3


def test_a_stop_that_fails_after_an_interrupt_says_so(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""
    signal.signal(signal.SIGINT, lambda *_: None)
    report(started=True)
    time.sleep(0.1)
    os.kill({os.getpid()}, signal.SIGINT)
    """
    with pytest.raises(RunFailed, match="No checkpoint"):
        under_watch(prepared, script, monkeypatch, RESULT % (1, "disk", "No checkpoint."))


@pytest.mark.parametrize("times", [1, 2])
def test_a_closed_terminal_stops_in_order(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], times: int
) -> None:
    """SIGHUP, by the kernel and then perhaps by the shell too; and the word of it can be written nowhere."""
    script = f"""
    passed_on = []
    signal.signal(signal.SIGINT, lambda *_: passed_on.append(1))
    report(started=True)
    time.sleep(0.1)
    for _ in range({times}): os.kill({os.getpid()}, signal.SIGHUP)
    while not passed_on: time.sleep(0.01)
    report(stopping=True)
    """
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.close(full)
    assert under_watch(prepared, script, monkeypatch, RESULT % (130, "", "")) == 128 + signal.SIGHUP
    assert "Traceback" not in capfd.readouterr().err


def test_a_driver_that_falls_silent_is_ended_and_named(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, or a loop that is stuck: the roles would train on, and nobody would see the end."""
    monkeypatch.setattr(supervisor, "DOUBT_SECONDS", 0.1)
    cluster = prepared.config.cluster.model_copy(update={"silence_seconds": 0.1})
    silent = dataclasses.replace(prepared, config=prepared.config.model_copy(update={"cluster": cluster}))
    script = """
    tied = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); time.sleep(600)"  # ends with the driver, and is seen to end first
    report(pid=subprocess.Popen([sys.executable, "-c", tied]).pid, part="raylet", fatal=True)
    time.sleep(0.5)
    report(started=True)
    report(alive=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    with pytest.raises(RunFailed, match=r"The driver has not answered for cluster.silence_seconds = 0.1: see .*driver-0.log"):
        under_watch(silent, script, monkeypatch)


def test_a_supervisor_that_was_stopped_itself_hears_first_what_was_said(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z and fg: its time is up, but the driver has spoken meanwhile; and after `stopping` other deadlines count."""
    cluster = prepared.config.cluster.model_copy(update={"silence_seconds": 0.3, "stop_seconds": 10.0})
    beating = dataclasses.replace(prepared, config=prepared.config.model_copy(update={"cluster": cluster}))
    script = f"""
    report(started=True)
    for n in range(20):
        report(alive=True)
        time.sleep(0.05)
        if n == 4: os.kill({os.getpid()}, signal.SIGSTOP)
        if n == 14: os.kill({os.getpid()}, signal.SIGCONT)
    report(stopping=True)
    time.sleep(0.5)
    """
    assert under_watch(beating, script, monkeypatch, RESULT % (0, "", "")) == 0


def test_an_interrupted_run_that_has_its_result_ends_though_ray_does_not(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner may take its time to write a checkpoint; once it has, what is left has the deadline of any stop."""
    script = f"""
    signal.signal(signal.SIGINT, lambda *_: None)
    report(started=True)
    time.sleep(0.1)
    os.kill({os.getpid()}, signal.SIGINT)
    """
    assert under_watch(prepared, script, monkeypatch, RESULT % (130, "", ""), "while True: time.sleep(600)") == 130


def test_nohup(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        script = f"report(started=True)\ntime.sleep(0.1)\nos.kill({os.getpid()}, signal.SIGHUP)\n"
        assert under_watch(prepared, script, monkeypatch, RESULT % (0, "", "")) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_it_needs_no_loop_of_the_callers(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    assert under_watch(prepared, RESULT % (0, "", ""), monkeypatch) == 0
