"""`segue bench`: finds the benchmarks beside the package, becomes one of them, and knows nothing else of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from segue import bench
from segue.cli import app
from segue.errors import UserError

ECHO = '''
"""Says what it is told.

More about it."""
import os
import sys

def main() -> int:
    print(os.getpid(), *sys.argv[1:], flush=True)
    return 3

if __name__ == "__main__":
    sys.exit(main())
'''
BECOME = "import sys; from pathlib import Path; from segue import bench; bench.run(sys.argv[1], sys.argv[3:], Path(sys.argv[2]))"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bench_marks"
    (folder / "whole").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "echo_all.py").write_text(ECHO)
    (folder / "figures.py").write_text("def main(): ...\n")
    (folder / "whole" / "__init__.py").write_text("")
    (folder / "whole" / "__main__.py").write_text('"""All of it."""\n')
    (folder / "whole" / "part_two.py").write_text(ECHO)
    return folder


def test_names_are_modules_and_packages_with_a_command_line_and_what_they_say_of_themselves(folder: Path) -> None:
    assert bench.commands(folder) == {
        "echo-all": "Says what it is told.",
        "whole": "All of it.",
        "whole.part-two": "Says what it is told.",
    }
    ours = bench.commands()
    assert {"straggler", "env-latency", "async-vs-sync", "paper", "learning", "virtual", "virtual.calibrate"} <= set(ours)
    assert not {"figures", "arms", "trl-worker", "weight-sync-peer"} & set(ours)
    assert all(20 < len(about) < 130 for about in ours.values()), ours


def test_an_unknown_name_is_one_sentence_that_lists_those_there(folder: Path) -> None:
    with pytest.raises(UserError) as error:
        bench.run("echo-al", [], folder)
    assert str(error.value) == (
        "There is no benchmark echo-al (did you mean echo-all?): name one of echo-all, whole, whole.part-two."
    )
    with pytest.raises(UserError, match="run `segue bench` from a checkout of the repository"):
        bench.run("echo-all", [], folder / "none")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["echo-all", "echo_all", "whole.part-two"])
def test_the_process_becomes_the_benchmark(folder: Path, name: str) -> None:
    """Not its parent: Ctrl-C and SIGTERM reach it, it ends in its own time, and its exit code is the command's."""
    command = [sys.executable, "-c", BECOME, name, str(folder), "--real", "--points", "1", "2"]
    became = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(bench.__file__).parents[1])
    said, _ = became.communicate(timeout=60.0)
    assert said == f"{became.pid} --real --points 1 2\n" and became.returncode == 3


def test_the_command_hands_options_on_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str]]] = []

    def run(name: str, arguments: list[str]) -> NoReturn:
        calls.append((name, arguments))
        raise SystemExit(0)

    monkeypatch.setattr(bench, "run", run)
    arguments = ["straggler", "--virtual", "--points", "1", "5", "--set", "a=1", "--help"]
    assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 0
    assert calls == [("straggler", arguments[1:])]
    listed = CliRunner().invoke(app, ["bench"])
    assert listed.exit_code == 0 and "  env-latency        What environment latency costs: a sweep" in listed.stdout
    assert "benchmarks" not in {name.partition(".")[0] for name in sys.modules if name.startswith("segue.")}
