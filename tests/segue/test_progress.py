"""How far a preparation is: bars in a terminal, and where there is none lines that come while it goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from segue.cluster.progress import EVERY_SECONDS, Bars, Lines, shown

TOTALS = {"Tasks": 40, "Training": 200}


def test_without_a_terminal_a_line_begins_each_part_and_one_follows_now_and_then() -> None:
    said: list[str] = []
    now = 100.0
    lines = Lines(TOTALS, said.append, lambda: now)
    lines.begin("Tasks")
    assert said == ["Tasks: 0 of 40"]
    for count in range(1, 31):
        now += 1.0
        lines.done(count)
    assert EVERY_SECONDS == 20.0 and said[1:] == ["Tasks: 20 of 40 (50%), 20 s"]
    lines.begin("Training")
    now += 19.0
    lines.done(1, "loss 3.00")
    now += 30.0
    lines.done(50, "loss 1.25")
    lines.say("It is made.")
    assert said[2:] == ["Training: 0 of 200", "Training: 50 of 200 (25%), loss 1.25, 49 s", "It is made."]


def test_it_is_a_terminal_that_decides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours may be wanted in a file, bars never are
    monkeypatch.setenv("TERM", "xterm")
    for quiet, kind, words in ((False, Lines, "Tasks: 0 of 40\n"), (True, Lines, "")):
        with shown(TOTALS, quiet) as told:
            told.begin("Tasks")
        assert type(told) is kind and capsys.readouterr().err == words
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with shown(TOTALS) as told:
        told.begin("Tasks")
    assert type(told) is Bars
    monkeypatch.setenv("TERM", "dumb")
    with shown(TOTALS) as told:
        assert type(told) is Lines


def test_bars_are_all_there_from_the_beginning() -> None:
    out = io.StringIO()
    bars = Bars(TOTALS, Console(file=out, force_terminal=True, width=120))
    with bars.progress:
        bars.begin("Tasks")
        bars.done(10)
        bars.begin("Training")
        bars.done(7, "loss 0.50")
    bars.say("It is made.")
    text = out.getvalue()
    assert "10/40" in text and "7/200" in text and "loss 0.50" in text and text.endswith("It is made.\n")


def test_a_reader_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def gone(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    Lines(TOTALS).begin("Tasks")
