"""The command lines of benchmarks: a mistake is one sentence, found before anything is measured."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.command import Parser, ended, install, json_file, sentence
from segue.bench import FOLDER, commands
from segue.errors import DiskFailed, RunFailed


def test_a_mistake_is_one_sentence_without_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("some-thing", "What it is.\n\n    as written")
    parser.add_argument("--points", nargs="*", type=float)
    for arguments, words in ((["--points", "five"], "invalid float value: 'five'"), (["--point", "5"], "unrecognized arguments")):
        with pytest.raises(SystemExit) as error:
            parser.parse_args(arguments)
        said = capsys.readouterr().err
        assert error.value.code == 2 and words in said and said.count("\n") == 1
        assert said.startswith("segue bench some-thing: error: ") and "segue bench some-thing --help" in said
    assert "usage: segue bench some-thing" in parser.format_help() and "\n    as written\n" in parser.format_help()


@pytest.mark.parametrize(
    ("name", "sentence"), [("", "is a folder: name a file"), ("none/x.json", "there is no folder"), ("file/x.json", "no folder")]
)
def test_figures_with_nowhere_to_go_are_refused_before_the_measurement(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    parser = Parser("it", None)
    parser.add_argument("--json", type=json_file)
    assert parser.parse_args(["--json", str(tmp_path / "x.json")]).json == tmp_path / "x.json"
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path / name)])
    assert sentence in capsys.readouterr().err


def test_what_is_no_plain_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a plain file, and would be replaced by one: name another"):
            json_file(str(path))


@pytest.mark.usefixtures("signals")
def test_figures_that_cannot_be_written_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> int:
        raise DiskFailed("The disk of X is full", ": free some, and go on with --resume")

    assert ended(full) == 1 and capsys.readouterr().err == "The disk of X is full.\n"


def test_every_json_option_of_ours_is_checked_so() -> None:
    for file in FOLDER.rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert '"--json"' not in line or "type=json_file" in line, f"{file}: {line}"


@pytest.fixture
def signals() -> Iterator[None]:
    """A benchmark keeps its handlers to the end of its process; other tests interrupt this one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_ctrl_c_is_a_sentence_and_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert ended(interrupted) == 130 and capsys.readouterr().err == "Interrupted: nothing was written.\n"
    assert ended(lambda: 3) == 3


def test_an_extra_is_installed_from_the_repository() -> None:
    told = install("plots")
    assert told.endswith(f"-m pip install -e '{FOLDER.parent}[plots]'") and (FOLDER.parent / "pyproject.toml").is_file()


ELSEWHERE = {"env-latency", "straggler", "virtual"}
"""Whose parser is not in the file of the name: the sweeps share one, `virtual` is a package."""


def source_of(name: str) -> str:
    return (FOLDER / f"{name.replace('-', '_').replace('.', '/')}.py").read_text(encoding="utf-8")


def test_parsers_are_ours_and_named_as_the_command_names_them() -> None:
    for name in commands().keys() - ELSEWHERE:
        assert f'Parser("{name}", __doc__)' in source_of(name) and "ArgumentParser(" not in source_of(name), name


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("scheduler-core", ["--event", "5"], "unrecognized arguments: --event 5"),
        ("scheduler-core", ["--events", "0"], "argument --events: 0 is not 1 or more"),
        ("scheduler-core", ["--live", "1", "10"], "--live must be 2 or more"),
        ("engine", ["--pairs", "0"], "argument --pairs: 0 is not 1 or more"),
        ("weight-sync", ["--receivers", "1", "-2"], "argument --receivers: -2 is not 1 or more"),
        ("metrics-cost", ["--steps", "9"], "--steps must be 10 or more"),
        ("reprefill", ["--workloads", "none"], "argument --workloads: invalid choice: 'none'"),
        ("routing", ["--repeats", "x"], "argument --repeats: x is not 1 or more"),
    ],
)
def test_a_mistake_is_found_before_anything_is_measured(
    name: str, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"benchmarks.{name.replace('-', '_')}").main
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.count("\n") == 1 and said.startswith(f"segue bench {name}: error: {words}")


def test_a_full_disk_is_not_answered_with_an_option_that_benchmarks_do_not_have() -> None:
    full = DiskFailed("out could not be written because the disk is full: free some space there", " and go on with --resume")
    assert sentence(full) == "out could not be written because the disk is full: free some space there."
    assert sentence(RunFailed("rollout", "A node died.")) == "A node died."
