"""`segue top` and `segue report` on run directories with files that are damaged, half written, empty or gone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
from exported_run import write_run
from typer.testing import CliRunner

from segue.cli import app
from segue.monitoring.firing import alerts_of, read_alerts
from segue.monitoring.serve import address_file
from segue.report.steps import is_step
from segue.rundir import RunDir

COMMANDS = (("top",), ("top", "--once"), ("report",), ("report", "--json"), ("report", "--html"))
LINES = COMMANDS[:2] + COMMANDS[4:]
"""Those that read config and metrics.jsonl also where there is a summary."""


def called(command: tuple[str, ...], run: Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    result = CliRunner().invoke(app, [*command, str(run)])
    assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
    return result.exit_code, result.stdout, result.stderr


def halved(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def told(name: str, text: str) -> Callable[[RunDir], None]:
    """Writes `text` into a file of the run."""

    def damage(run: RunDir) -> None:
        path = run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return damage


def folder(name: str) -> Callable[[RunDir], None]:
    """A folder where a file should be."""

    def damage(run: RunDir) -> None:
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).mkdir()

    return damage


TARGET = "metrics/targets/rollout-0.json"
TOLERATED: dict[str, Callable[[RunDir], object]] = {
    "the last line is torn": lambda run: halved(run.metrics),
    "a power cut left zeros": lambda run: run.metrics.write_bytes(run.metrics.read_bytes() + bytes(512)),
    "no line yet": told("metrics.jsonl", ""),
    "no metrics.jsonl": lambda run: run.metrics.unlink(),
    "no evaluations": lambda run: run.evals.unlink(),
    "no attempts.jsonl": lambda run: (run.path / "attempts.jsonl").unlink(),
    "a torn attempts.jsonl": lambda run: halved(run.path / "attempts.jsonl"),
    "no targets' folder": lambda run: run.targets.rmdir(),
    "a target that nobody serves": told(TARGET, '[{"targets": ["127.0.0.1:1"], "labels": {}}]'),
    "no lock": lambda run: (run.path / ".lock").unlink(),
    "a Prometheus whose address is none": told("metrics/prometheus/address", "\0\0"),
}


@pytest.mark.parametrize("done", [True, False], ids=["done", "ended early"])
@pytest.mark.parametrize("what", TOLERATED)
def test_what_is_torn_or_missing_costs_no_more_than_its_figures(what: str, done: bool, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, 3 if done else 9, done=done)
    TOLERATED[what](run)
    for command in COMMANDS:
        code, out, err = called(command, run.path)
        assert (code, err.count("\n")) == (0, 0 if done or command in LINES else 1), (command, err)
        assert out


DEEP = "[" * 100_000
STEP = '{"step": 0, "version": 0, "ages": [5]}'
REFUSED: dict[str, tuple[Callable[[RunDir], object], tuple[tuple[str, ...], ...], str]] = {
    "half a summary": (lambda run: halved(run.summary), COMMANDS, "summary.json cannot be read"),
    "an empty summary": (told("summary.json", ""), COMMANDS, "summary.json cannot be read"),
    "a summary of nothing": (told("summary.json", "{}"), COMMANDS, "summary.json is no summary of this version"),
    "a summary of other things": (
        told("summary.json", '{"mode": 1, "steps": "many", "roles": {"learner": []}}'),
        COMMANDS,
        "summary.json is no summary of this version",
    ),
    "a summary that is a list": (told("summary.json", "[]"), COMMANDS, "summary.json holds no figures"),
    "no config": (lambda run: run.config.unlink(), COMMANDS, "is no run directory (it holds no config.toml)"),
    "half a config": (told("config.toml", "steps = "), LINES, "config.toml is not valid TOML"),
    "an empty config": (told("config.toml", ""), LINES, "config.toml"),
    "a config of bytes": (
        lambda run: run.config.write_bytes(b"\xff\xfe\0"),
        LINES,
        "config.toml is not valid TOML",
    ),
    "a line in the middle is torn": (told("metrics.jsonl", STEP[:9] + "\n" + STEP + "\n"), LINES, "Line 1 of"),
    "a line is no step": (told("metrics.jsonl", STEP + "\n{}\n"), LINES, "Line 2 of"),
    "a line has other things in it": (
        told("metrics.jsonl", '{"step": 0, "ages": 5, "state_seconds": {"learner": "all"}}\n'),
        LINES,
        "is not the line of a step",
    ),
    "metrics.jsonl is a folder": (folder("metrics.jsonl"), LINES, "metrics.jsonl cannot be read (Is a directory)"),
    "half of the evaluations": (lambda run: halved(run.evals), COMMANDS[4:], "evals.json cannot be read"),
    "evaluations of nothing": (told("evals.json", '{"before": 3}'), COMMANDS[4:], "evals.json holds no evaluations"),
    "an empty target": (told(TARGET, ""), COMMANDS[:2], "rollout-0.json cannot be read as a target"),
    "half a target": (told(TARGET, '[{"targets": ["127.'), COMMANDS[:2], "rollout-0.json cannot be read as a target"),
    "a target on no port": (
        told(TARGET, '[{"targets": ["127.0.0.1:99999"], "labels": {}}]'),
        COMMANDS[:2],
        "'127.0.0.1:99999' is no host:port",
    ),
    "a target without end": (told(TARGET, DEEP), COMMANDS[:2], "rollout-0.json cannot be read as a target"),
    "a summary without end": (told("summary.json", DEEP), COMMANDS, "summary.json cannot be read"),
    "evaluations without end": (told("evals.json", DEEP), COMMANDS[4:], "evals.json cannot be read"),
    "a line without end": (told("metrics.jsonl", DEEP + "\n" + STEP + "\n"), LINES, "Line 1 of"),
    "a target that is a number": (told(TARGET, '[{"targets": [7], "labels": {}}]'), COMMANDS[:2], "cannot be read as a target"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_one_sentence(what: str, tmp_path: Path) -> None:
    damage, commands, sentence = REFUSED[what]
    run = write_run(tmp_path / "run", 3, 3, done=True)
    damage(run)
    for command in COMMANDS:
        code, out, err = called(command, run.path)
        if command in commands:
            assert (code, out, err.count("\n")) == (2, "", 1) and sentence in err, (command, code, out, err)
        else:
            assert (code, err) == (0, "") and out, command


def test_an_unfinished_run_with_lines_that_are_none_is_one_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, 9)
    run.metrics.write_text(STEP + '\n{"step": 1, "state_seconds": [1]}\n')
    for command in COMMANDS:
        code, out, err = called(command, run.path)
        assert (code, out, err.count("\n")) == (2, "", 1) and "Line 2 of" in err, (command, err)


def test_states_and_figures_of_another_version_are_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, 3, done=True)
    summary = json.loads(run.summary.read_text())
    summary["roles"]["learner"]["states"]["dancing"] = 5.0
    run.summary.write_text(json.dumps(summary))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        line |= {"version": "newest", "step_seconds": "long", "reward_mean": [1]}
        line["state_seconds"]["learner"]["dancing"] = 1.0
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for command in COMMANDS:
        code, out, err = called(command, run.path)
        assert (code, err) == (0, "") and out, command


def test_a_line_is_a_steps_if_it_has_one_and_nothing_that_readers_trip_over() -> None:
    assert is_step({"step": 3}) and is_step({"step": 0, "ages": [], "state_seconds": None, "prefill_tokens": {"turn": 5}})
    for wrong in ({}, {"step": -1}, {"step": 1.5}, {"step": 0, "ages": [1, "2"]}, {"step": 0, "prefill_tokens": [1]}):
        assert not is_step(wrong), wrong


def test_an_address_of_prometheus_that_is_none_is_told_as_not_known(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, 9)
    address_file(run).parent.mkdir(parents=True)
    for text in (b"", b"\xff\0", b"http://127.0.0.1:1", b"nonsense"):
        address_file(run).write_bytes(text)
        alerts, why = alerts_of(run)
        assert alerts == [] and "does not answer" in why, text
    answers: list[dict[str, Any]] = [{}, {"data": []}, {"data": {"alerts": [[]]}}, {"data": {"alerts": [{"labels": []}]}}]
    for answer in answers:
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            read_alerts(answer, "run")


WHOLE = (*COMMANDS, ("config",))


def into(out: IO[str], command: tuple[str, ...], run: RunDir, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a command whose standard output is `out`, which is flushed once more, as when Python ends."""
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as ended:
        app([*command, str(run.config if command == ("config",) else run.path)])
    sys.stdout.flush()
    return ended.value.code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", WHOLE, ids=" ".join)
def test_a_full_disk_under_standard_output_is_one_sentence(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 3, 3, done=True)
    with open("/dev/full", "w") as full:
        assert into(full, command, run, monkeypatch) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Standard output could not be written (No space left on device): free" in err


@pytest.mark.parametrize("command", WHOLE, ids=" ".join)
def test_a_reader_who_has_seen_enough_is_told_nothing(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 3, 3, done=True)
    reading, writing = os.pipe()
    os.close(reading)
    out = open(writing, "w")  # noqa: SIM115 - closing it fails: see below
    assert into(out, command, run, monkeypatch) == 1
    assert capsys.readouterr().err == ""
    with suppress(BrokenPipeError):
        out.close()
