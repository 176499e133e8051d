"""The command line: one sentence per mistake, exit codes, and nothing heavy imported before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from segue import __version__
from segue.cli import app
from segue.config import load_config
from segue.errors import RunFailed, UserError
from segue.files import write_json
from segue.report import EpisodeCounts, RunFacts, build_summary
from segue.rundir import RunDir

CONFIG = """
mode = "async"
steps = 5
[task]
env = "latency"
[warmstart]
"""
HEAVY = ("torch", "ray", "transformers", "torchdata", "vllm", "scheduler", "envpool", "rollout", "learner", "weightsync")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "demo.toml"
    path.write_text(CONFIG)
    return path


def segue(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


class Fake:
    """A stand-in for one function of `segue.cluster`, at the edge of the command: notes its arguments, answers or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, name: str, answer: Any) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._answer = answer
        fake = ModuleType(module)
        fake.__dict__[name] = self
        monkeypatch.setitem(sys.modules, module, fake)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


def supervisor(monkeypatch: pytest.MonkeyPatch, answer: Any) -> Fake:
    return Fake(monkeypatch, "segue.cluster.supervisor", "supervise", answer)


def test_config_prints_what_a_run_would_use(config: Path) -> None:
    code, out, err = segue("config", config, "--set", "learner.lr=1e-5", "--set", "mode=sync")
    assert (code, err) == (0, "")
    printed = tomllib.loads(out)
    assert printed["learner"]["lr"] == 1e-5 and printed["staleness"]["max_age"] == 0
    again = config.with_name("again.toml")
    again.write_text(out)
    assert load_config(again) == load_config(config, ["learner.lr=1e-5", "mode=sync"])


@pytest.mark.parametrize("command", ["config", "train", "warmstart"])
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "There is no config file"),
        (["--set", "nonsense"], "--set nonsense is not key=value"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Path, command: str, overrides: list[str], sentence: str
) -> None:
    def load(path: Path, given: list[str], *_: Any) -> int:
        load_config(path, given)
        return 0

    monkeypatch.setitem(sys.modules, "segue.cluster.supervisor", ModuleType("fake"))
    monkeypatch.setattr(sys.modules["segue.cluster.supervisor"], "supervise", load, raising=False)
    Fake(monkeypatch, "segue.cluster.warmstart", "warmstart", Path("/model"))
    path = config if overrides else tmp_path / "missing.toml"
    code, out, err = segue(command, path, *overrides)
    assert code == 2 and out == ""
    assert err.startswith(sentence) and err.count("\n") == 1 and err.endswith(".\n")


def test_train_hands_over_what_it_was_told(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    fake = supervisor(monkeypatch, 0)
    assert segue("train", config)[0] == 0
    arguments = ("--run", "runs/x", "--resume", "--serial", "--set", "steps=2", "--set", "seed=3")
    assert segue("train", config, *arguments)[0] == 0
    assert fake.calls == [
        ((config, [], None, False, False, None), {}),
        ((config, ["steps=2", "seed=3"], Path("runs/x"), True, True, None), {}),
    ]


@pytest.mark.parametrize(
    ("answer", "code", "sentence"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (130, 130, ""),
        (RunFailed("learner-0", "learner-0 died and the run cannot go on without it."), 1, "learner-0 died"),
        (UserError("The run directory x is already used: add --resume."), 2, "The run directory x is already used"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_exit_codes_of_train(monkeypatch: pytest.MonkeyPatch, config: Path, answer: Any, code: int, sentence: str) -> None:
    supervisor(monkeypatch, answer)
    found, _, err = segue("train", config)
    assert found == code and err.startswith(sentence) and err.count("\n") == bool(sentence)


def test_resume_needs_a_run(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    fake = supervisor(monkeypatch, 0)
    assert segue("train", config, "--resume") == (
        2, "", "--resume needs to know which run to go on with: add --run DIR.\n",
    )  # fmt: skip
    assert not fake.calls


def test_warmstart_prints_the_model_folder(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    fake = Fake(monkeypatch, "segue.cluster.warmstart", "warmstart", Path("/cache/model"))
    assert segue("warmstart", config, "--set", "warmstart.layers=2") == (0, "/cache/model\n", "")
    ((given,), options) = fake.calls[0]
    assert given.warmstart.layers == 2 and options == {"progress": True}


def test_eval_hands_over_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, "segue.cluster.evaluate", "evaluate", 0)
    assert segue("eval", "runs/x", "--step", 4, "--json", "--set", "eval.tasks=8")[0] == 0
    assert fake.calls == [((Path("runs/x"), ["eval.tasks=8"], 4, True), {})]


def test_report_shows_a_finished_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", CONFIG)
    summary = build_summary(RunFacts("async", 4, 12.0, [], EpisodeCounts(admitted=3)))
    write_json(run.summary, summary)
    code, out, err = segue("report", run.path, "--json")
    assert (code, json.loads(out), err) == (0, summary, "")
    code, out, err = segue("report", run.path)
    assert code == 0 and err == "" and "3 admitted" in out and "demo" in out


def test_report_of_a_run_that_is_not_complete_says_so_beside_the_figures(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", CONFIG)
    run.unlock()
    for arguments in ((), ("--json",)):
        code, out, err = segue("report", run.path, *arguments)
        assert code == 0 and err.startswith(f"The run in {run.path} is not complete: 0 of 5 steps are trained")
        assert err.count("\n") == 1
    assert json.loads(out)["incomplete"] is True


def test_report_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is no run directory"), (tmp_path / "nothing", "There is no run directory")):
        code, out, err = segue("report", path)
        assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_the_version() -> None:
    assert segue("--version") == (0, f"segue {__version__}\n", "")


def test_help_config_and_report_import_nothing_heavy(config: Path, tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", CONFIG).unlock()
    commands = [["--help"], ["train", "--help"], ["config", str(config)], ["report", str(tmp_path / "run"), "--json"]]
    code = (
        "import sys\n"
        "from segue.cli import main\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv = ['segue', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        f"    print('heavy:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert [line for line in result.stdout.splitlines() if line.startswith("heavy:")] == ["heavy: []"] * len(commands)
