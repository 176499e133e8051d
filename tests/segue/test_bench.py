"""`segue bench`: finds the benchmarks beside the package, passes everything on, and knows nothing else of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from segue import bench
from segue.cli import app
from segue.errors import UserError

ECHO = """
import sys

def main() -> int:
    print(*sys.argv[1:], flush=True)
    return 3

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bench_marks"
    (folder / "whole").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "echo_all.py").write_text(ECHO)
    (folder / "figures.py").write_text("def main(): ...\n")
    (folder / "whole" / "__main__.py").write_text("")
    return folder


def test_names_are_modules_and_packages_with_a_command_line(folder: Path) -> None:
    assert bench.names(folder) == ["echo_all", "whole"]
    ours = bench.names()
    assert {"straggler", "env_latency", "async_vs_sync", "virtual"} <= set(ours)
    assert not {"figures", "arms", "weight_sync_peer"} & set(ours)


def test_an_unknown_name_is_one_sentence_that_lists_those_there(folder: Path) -> None:
    with pytest.raises(UserError) as error:
        bench.run("echo-al", [], folder)
    assert str(error.value) == "There is no benchmark echo-al (did you mean echo_all?): name one of echo_all, whole."
    with pytest.raises(UserError, match="run `segue bench` from a checkout of the repository"):
        bench.run("echo-all", [], folder / "none")


@pytest.mark.processes
def test_arguments_and_exit_code_pass_through(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.run("echo-all", ["--real", "--points", "1", "2"], folder) == 3
    assert capfd.readouterr().out == "--real --points 1 2\n"


def test_the_command_hands_options_on_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str]]] = []

    def run(name: str, arguments: list[str]) -> int:
        calls.append((name, arguments))
        return 0

    monkeypatch.setattr(bench, "run", run)
    arguments = ["straggler", "--virtual", "--points", "1", "5", "--set", "a=1", "--help"]
    assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 0
    assert calls == [("straggler", arguments[1:])]
    listed = CliRunner().invoke(app, ["bench"])
    assert listed.exit_code == 0 and "env_latency" in listed.stdout
    assert "benchmarks" not in {name.partition(".")[0] for name in sys.modules if name.startswith("segue.")}
