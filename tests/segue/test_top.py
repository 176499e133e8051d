"""`segue top` as it is called: on a run whose processes answer, on what is left of one, and on what is none."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from exported_run import Exported, config_of, line_of, write_run
from rich.console import Console
from typer.testing import CliRunner

from segue.cli import app
from segue.config import to_toml
from segue.errors import RunFailed, UserError
from segue.files import JsonLines, write_atomic, write_json
from segue.metrics.exporter import Exporter
from segue.metrics.heartbeat import Heartbeat
from segue.metrics.scrape import Scraper, Target, hosts_of, targets
from segue.monitoring.firing import Firing, alerts_of, read_alerts
from segue.monitoring.serve import address_file
from segue.report.console import step_fields
from segue.report.read import read_report
from segue.rundir import RunDir
from segue.top.draw import bar, draw, figures
from segue.top.model import Look, Process, live
from segue.top.shell import top
from segue.top.steps_seen import StepsSeen

SECONDS = 60.0
"""Until a command that does not do its part fails its test."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `segue top`."""
    result = CliRunner().invoke(app, ["top", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run that this process owns, with exporters of its own, after three of nine steps; one target was left by a crash. Its
    processes work for four seconds of their clock from one look to the next."""
    run = RunDir.create(tmp_path / "run", to_toml(config_of(9)))
    exported = Exported()
    monkeypatch.setattr("segue.top.shell.sleep", lambda seconds: exported.work(4.0))
    exporters = []
    for metrics in exported.targets().values():
        heartbeat = Heartbeat(metrics)
        heartbeat.beat()
        place = {"targets": run.targets, "run": run.name, "node": "here", "interface": "127.0.0.1", "ports": (21000, 21999)}
        exporters.append(Exporter(metrics, heartbeat, **place, stale_after=60.0))  # type: ignore[arg-type]
    with JsonLines(run.metrics) as lines:
        for step in range(3):
            lines.append(line_of(step))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        write_json(run.targets / "rollout-7.json", [{"targets": [f"127.0.0.1:{nobody.getsockname()[1]}"], "labels": {}}])
        yield run
    for exporter in exporters:
        exporter.close()
    run.unlock()


def test_a_run_that_goes_on(going_on: RunDir) -> None:
    code, out, err = shown(going_on.path, "--once", "--interval", 0.1)
    assert (code, err) == (0, "")
    assert out.startswith("Run run  It goes on: 3 of 9 steps are trained.") and "step 3/9" in out
    for name in ("scheduler-0", "rollout-0", "rollout-1", "envpool-0", "learner-0"):
        assert re.search(rf"^{name} .*\d%", out, re.M), name
    assert re.search(r"^rollout-7 .* does not answer: Connection refused", out, re.M)
    assert re.search(r"^staleness +last step mean 0.83, max 2; .*bound 4 steps$", out, re.M)
    assert re.search(r"^alerts +not watched: `segue monitor .*` starts a Prometheus", out, re.M)


def test_a_target_whose_port_another_run_has_taken_is_not_believed(going_on: RunDir, tmp_path: Path) -> None:
    """A crash leaves targets, and ports are few."""
    other = RunDir.create(tmp_path / "other", to_toml(config_of(9)))
    (other.targets / "learner-0.json").write_text((going_on.targets / "learner-0.json").read_text())
    assert Scraper(other, 2.0).ask() == ({}, {"learner-0": "learner-0 of run run answers there"})
    (going_on.targets / "rollout-7.json").write_text((going_on.targets / "rollout-0.json").read_text())
    answered, silent = Scraper(going_on, 2.0).ask()
    assert silent == {"rollout-7": "rollout-0 of run run answers there"} and "rollout-0" in answered
    other.unlock()


@pytest.mark.parametrize(
    "words", [b"220 mail.example ESMTP\r\n", b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000], ids=["mail", "deep"]
)
def test_what_answers_but_is_no_process_of_ours_is_no_traceback(words: bytes, going_on: RunDir) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(words)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_json(going_on.targets / "rollout-7.json", [{"targets": [f"127.0.0.1:{server.server_address[1]}"], "labels": {}}])
        assert Scraper(going_on, 2.0).ask()[1].keys() == {"rollout-7"}
        server.shutdown()


def test_a_file_that_is_no_target_is_one_sentence(going_on: RunDir) -> None:
    (going_on.targets / "rollout-7.json").write_text("[{}]")
    code, out, err = shown(going_on.path, "--once")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "rollout-7.json cannot be read as a target" in err


def test_a_run_that_is_done(tmp_path: Path) -> None:
    code, out, err = shown(write_run(tmp_path / "run", 3, 3, done=True).path)
    assert (code, err) == (0, "")
    assert out.startswith("Run run  It is done: 3 of 3 steps in 6 s.")
    assert re.search(r"^rollout +█+░+ +75%  generate 75%, wait_env 25%$", out, re.M)
    assert re.search(r"^success +before training 0.250, after training 0.750$", out, re.M)
    assert "alerts" not in out and out == "\n".join(line.rstrip() for line in out.splitlines()) + "\n"


def test_a_run_that_died_is_said_to_have(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, 9)
    write_json(run.targets / "learner-0.json", [{"targets": ["127.0.0.1:1"], "labels": {}}])
    code, out, err = shown(run.path)
    assert (code, err) == (0, "")
    assert "It ended early, stopped or failed: 2 of 9 steps are trained; it has no checkpoint" in out
    assert "Processes that ended without a word: learner-0." in out
    assert re.search(r"^env steps +p50 .* \(last step\)$", out, re.M)


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", to_toml(config_of(9)))
    code, out, _ = shown(run.path, "--interval", 0.1)
    assert code == 0 and "It goes on: 0 of 9 steps are trained. It prepares: makes its warm start, say, which" in out
    (run.logs / "driver-0.log").touch()
    assert "trained. Its processes start: none answers yet." in shown(run.path, "--interval", 0.1)[1]
    run.begin_attempt(datetime(2026, 1, 1))
    run.begin_attempt(datetime(2026, 1, 2))
    assert "trained. It prepares: " in shown(run.path, "--interval", 0.1)[1]
    (run.logs / "serial-0.log").touch()
    assert "In one process (--serial), which exports nothing" in shown(run.path, "--interval", 0.1)[1]
    run.unlock()


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    code, out, err = shown(tmp_path)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "is no run directory" in err
    assert "There is no run directory" in shown(tmp_path / "none")[2]
    assert shown(tmp_path, "--interval", 0)[0] == 2


def test_ctrl_c_ends_it_well(going_on: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("segue.top.shell.sleep", interrupted)
    assert top(going_on.path, 1.0, False, io.StringIO()) == 0


@pytest.mark.processes
def test_on_a_terminal_it_draws_until_ctrl_c(going_on: RunDir) -> None:
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "segue.cli", "top", str(going_on.path), "--interval", "0.1"]
    child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"})
    os.close(its)
    seen = b""

    def more() -> bytes:
        """What it draws next. Raises OSError at the end of a terminal that nobody has open any more."""
        assert select.select([ours], [], [], SECONDS)[0], "it draws nothing"
        return os.read(ours, 65536)

    try:
        while b"learner-0" not in seen:
            seen += more()
        child.send_signal(signal.SIGINT)
        with pytest.raises(OSError):
            while True:
                seen += more()
        assert child.wait(SECONDS) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert b"Traceback" not in seen and b"\x1b[?1049h" in seen and b"\x1b[?1049l" in seen, "its own screen, and back"


def test_a_run_whose_lock_is_not_seen_goes_on_as_long_as_it_answers(going_on: RunDir) -> None:
    """As from another host than the run's."""
    going_on.unlock()
    assert read_report(going_on.path)[1].startswith(f"The run in {going_on.path} goes on: 3 of 9 steps")
    assert "It goes on: 3 of 9 steps are trained." in shown(going_on.path, "--once", "--interval", 0.1)[1]
    (going_on.targets / "rollout-7.json").write_text("{")
    assert "is not complete" in read_report(going_on.path)[1]


@pytest.mark.parametrize("once", [True, False])
def test_a_run_directory_that_is_deleted_meanwhile_is_one_sentence(
    once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "run", to_toml(config_of(9)))

    def delete(seconds: float) -> None:
        run.unlock()
        shutil.rmtree(run.path)

    monkeypatch.setattr("segue.top.shell.sleep", delete)
    with pytest.raises(RunFailed, match="run is gone: deleted or moved"):
        top(run.path, 1.0, once, io.StringIO() if once else Terminal())


def test_a_picture_waits_for_a_run_that_is_only_being_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[RunDir] = []

    def start(seconds: float) -> None:
        if runs:
            raise KeyboardInterrupt
        runs.append(RunDir.create(tmp_path / "run", to_toml(config_of(9))))

    monkeypatch.setattr("segue.top.shell.sleep", start)
    out = Terminal()
    assert top(tmp_path / "run", 1.0, False, out) == 0
    assert "There is no run directory" in out.getvalue() and "It goes on: 0 of 9 steps" in out.getvalue()
    runs[0].unlock()
    with pytest.raises(UserError, match="There is no run directory"):
        top(tmp_path / "other", 1.0, True, Terminal())
    monkeypatch.setattr("segue.top.shell.APPEAR_SECONDS", 0.0)
    with pytest.raises(UserError, match="There is no run directory"):
        top(tmp_path / "other", 1.0, False, Terminal())


# --- parts --------------------------------------------------------------------------------------------------------------------


def test_targets_are_read_from_the_run(going_on: RunDir) -> None:
    found = targets(going_on)
    assert [target.name for target in found] == sorted(target.name for target in found) and len(found) == 6
    assert all(isinstance(target, Target) and target.address.startswith("127.0.0.1:") for target in found)
    (going_on.targets / "rollout-7.json").write_text("{")
    with pytest.raises(UserError, match="rollout-7"):
        targets(going_on)


def test_hosts_are_told_where_there_are_several() -> None:
    def of(*there: tuple[str, str]) -> dict[str, str]:
        return hosts_of([Target(f"rollout-{rank}", address, node) for rank, (address, node) in enumerate(there)])

    assert of(("10.0.0.1:5", "a"), ("10.0.0.1:6", "a")) == {}
    assert of(("10.0.0.1:5", "a"), ("10.0.0.2:5", "b")) == {"rollout-0": "a", "rollout-1": "b"}
    same = {"rollout-0": "10.0.0.1", "rollout-1": "[fd00::2]"}
    assert of(("10.0.0.1:5", "c"), ("[fd00::2]:5", "c")) == same, "names that do not tell them apart"
    assert of(("10.0.0.1:5", ""), ("[fd00::2]:5", "b")) == same


def test_a_process_is_shown_with_its_host(going_on: RunDir) -> None:
    (entry,) = json.loads((going_on.targets / "rollout-1.json").read_text())
    port = entry["targets"][0].rpartition(":")[2]
    write_json(going_on.targets / "rollout-1.json", [{"targets": [f"localhost:{port}"], "labels": {"node": "there"}}])
    out = shown(going_on.path, "--once", "--interval", 0.1)[1]
    assert re.search(r"^rollout-1 .*  on there\b", out, re.M) and re.search(r"^rollout-7 .*  on here\b", out, re.M)


def test_steps_are_followed_as_the_file_grows_and_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    seen = StepsSeen(path)
    seen.read()
    assert (seen.newest, seen.ages) == (None, [])
    path.write_text('{"step": 0, "ages": [5]}\n{"step": 1, "ages": [1, 4]}\n{"step": 2, "ag')
    seen.read()
    assert (seen.newest, seen.ages) == ({"step": 1, "ages": [1, 4]}, [6, 4])
    with open(path, "a") as file:
        file.write('es": [0, 0, 7]}\n')
    seen.read()
    seen.read()
    assert (seen.newest, seen.ages) == ({"step": 2, "ages": [0, 0, 7]}, [6, 4, 7])
    write_atomic(path, b'{"step": 0, "ages": [5]}\nnonsense\n[1]\n')  # a resume goes back, and may write as much again
    seen.read()
    assert (seen.newest, seen.ages) == ({"step": 0, "ages": [5]}, [5])
    path.unlink()
    seen.read()
    assert seen.newest is None


def test_bars_are_full_and_as_long_as_their_shares() -> None:
    assert bar(Process("rollout-0", {"generate": 0.75, "wait_env": 0.25}), 8).plain == "██████░░"
    assert bar(Process("rollout × 40", {"generate": 1.0}), 8).plain == "████████"
    thirds = {"wait_batch": 1 / 3, "compute": 1 / 3, "other": 1 / 3}
    assert bar(Process("learner-0", thirds), 8).plain in (
        "███▒▒▒░░",
        "███▒▒░░░",
        "██▒▒▒░░░",
    )
    assert bar(Process("learner-0", {}), 8).plain == "········"
    assert len(bar(Process("learner-0", {"wait_batch": 0.999, "compute": 0.001}), 8).plain) == 8


def test_everything_fits_on_a_screen_of_eighty_columns() -> None:
    exported = Exported(nodes=40)
    for node in exported.nodes:
        node.set("segue_policy_version", 3)
    before = Look(exported.time, 5000.0, exported.scrape())
    exported.work(4.0)
    picture = live(before, Look(exported.time, 5000.0, exported.scrape(), line=line_of(2)), 4)
    console = Console(file=io.StringIO(), width=80, height=50)
    with console.capture() as text:
        console.print(draw("Run x", "It goes on.", picture, ([], "not watched"), 9, 5000.0))
    lines = text.get().splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 80
    assert re.search(r"^rollout × 40 +█{18}░{6}  75%  generate 75%, wait", text.get(), re.M), "words are cut, figures are not"
    assert dict(figures(picture))["tokens/s"] == "sampled 4,000, prefilled 1,600, trained in the last step 150"


@pytest.mark.parametrize("width", [40, 77, 80, 100, 160])
def test_no_field_of_the_newest_step_is_torn_apart(width: int) -> None:
    exported = Exported()
    line = line_of(2)
    console = Console(file=io.StringIO(), width=width, height=50)
    with console.capture() as text:
        console.print(draw("Run x", "It goes on.", live(None, Look(exported.time, 5000.0, line=line), 4), None, 100_000, 5000.0))
    lines = [line.rstrip() for line in text.get().splitlines()]
    assert max(map(len, lines)) <= width
    first, end = lines.index("") + 1, lines.index("", lines.index("") + 1)
    shown = "  ".join(lines[first:end])
    for field in step_fields(line, 100_000):
        assert field in shown


# --- alerts -------------------------------------------------------------------------------------------------------------------


def alert(name: str, run: str, since: str, state: str = "firing") -> dict[str, Any]:
    texts = {"description": f"Run {run}: {name}.", "runbook_url": "docs/runbook.md#x", "summary": "Short."}
    return {
        "labels": {"alertname": name, "run": run, "severity": "warning"},
        "annotations": texts,
        "state": state,
        "activeAt": since,
    }


ANSWER = {
    "status": "success",
    "data": {
        "alerts": [
            alert("SegueRoleIdle", "run", "2026-11-30T08:00:00.123456789Z"),
            alert("SegueQueueFull", "other", "2026-11-30T08:09:00Z"),
            alert("SegueGradSpike", "run", "2026-11-30T08:05:00Z", "pending"),
        ]
    },
}


def test_alerts_are_those_of_the_run_and_newest_first() -> None:
    found = read_alerts(ANSWER, "run")
    assert [(one.name, one.state) for one in found] == [("SegueGradSpike", "pending"), ("SegueRoleIdle", "firing")]
    assert found[0].since - found[1].since == pytest.approx(300.0 - 0.123456)
    assert isinstance(found[0], Firing) and found[0].runbook == "docs/runbook.md#x"


def test_alerts_come_from_the_prometheus_that_watches_the_run(going_on: RunDir) -> None:
    class Prometheus(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/api/v1/alerts"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(ANSWER).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    address_file(going_on).parent.mkdir(parents=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Prometheus) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address_file(going_on).write_text(f"http://127.0.0.1:{server.server_address[1]}\n")
        out = shown(going_on.path, "--once", "--interval", 0.1)[1]
        server.shutdown()
    newest, older = re.findall(r"^(?:alerts)? +(Segue\w+ (?:firing|pending)) for \d+ s: Run run: ", out, re.M)
    assert (newest, older) == ("SegueGradSpike pending", "SegueRoleIdle firing") and "SegueQueueFull" not in out
    found, unknown = alerts_of(going_on)
    assert found == [] and "does not answer" in unknown
