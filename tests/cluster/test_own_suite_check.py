"""A suite of the user's own is tried before anything starts: found beside its config, called rightly, whole."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from envpool.suites import load_suite
from segue.cluster.own_suite import try_suite
from segue.config import Config
from segue.config.root import resolve
from segue.errors import UserError
from segue.suite_path import VARIABLE, look_beside

GOOD = """
from segue.episode import Task

class Own:
    name = "own"
    def tasks(self, split, n, seed): return [Task(f"{split}-{i}", "own", i) for i in range(n)]
    def make(self, task, member, attempt=1): raise NotImplementedError

def suite(args): return Own()
"""
MUST_BE = "it must be a function of one dict, the [task.args] table, that returns a Suite (envpool/environment.py)."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the config file would be; the working directory is another."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)  # put back afterwards
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def config_of(name: str, warm: bool = False) -> Config:
    model = {"warmstart": {}} if warm else {"model": {"path": "x"}}
    return resolve({"steps": 1, "task": {"env": f"{name}:suite", "train_tasks": 4}, "eval": {"tasks": 2}, **model}, "a test")


def refusal(folder: Path, name: str, text: str) -> str:
    """What `load_suite` says of a module `name` with this text; the name is new in each test, as imports are remembered."""
    (folder / f"{name}.py").write_text(text)
    with pytest.raises(UserError) as error:
        load_suite(f"{name}:suite")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("own_noargs", "def suite(): pass", rf"task\.env = 'own_noargs:suite' takes the arguments \(\): {re.escape(MUST_BE)}"),
        ("own_none", "def suite(args): pass", rf"task\.env = 'own_none:suite' returned None: {re.escape(MUST_BE)}"),
        ("own_dict", "def suite(args): return {}", rf".* returned dict, which lacks tasks and make: {re.escape(MUST_BE)}"),
        ("own_number", "suite = 3", rf".*own_number\.py was found, but 'suite' in it is no function\): {re.escape(MUST_BE)}"),
        ("own_empty", "", rf".*own_empty\.py was found, but has no 'suite'\): {re.escape(MUST_BE)}"),
        (
            "own_raises",
            "def suite(args):\n    return args['n']",
            r".* could not be made \(KeyError: 'n' in own_raises\.py:2\): mend it\.",
        ),
        (
            "own_syntax",
            "def suite(args:",
            r".* cannot be imported \(SyntaxError: .* in own_syntax\.py:1\): check its name and mend it\.",
        ),
        (
            "own_needs",
            "\nimport not_there",
            r".*\(ModuleNotFoundError: .*'not_there' in own_needs\.py:2\): install what it needs\.",
        ),
    ],
)
def test_what_is_wrong_with_the_function_is_one_sentence(folder: Path, name: str, text: str, sentence: str) -> None:
    assert re.fullmatch(sentence, refusal(folder, name, text))


def test_a_module_is_found_beside_the_config_and_else_the_sentence_says_where_was_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv(VARIABLE, "")
    (tmp_path / "own_beside.py").write_text(GOOD)
    with pytest.raises(UserError, match="no module 'own_beside' in the installed packages"):
        load_suite("own_beside:suite")
    look_beside(tmp_path / "my.toml", ["/noted"])
    assert os.environ[VARIABLE].split(os.pathsep) == [str(Path.cwd()), str(tmp_path), "/noted"]
    with pytest.raises(UserError, match=re.escape(f"(no module 'own_nowhere' in {Path.cwd()}, {tmp_path}, /noted, the inst")):
        load_suite("own_nowhere:suite")
    assert load_suite("own_beside:suite").name == "own"


@pytest.mark.processes
def test_it_is_tried_in_a_process_of_its_own(folder: Path) -> None:
    (folder / "own_good.py").write_text("print('hello')\n" + GOOD)
    try_suite(config_of("own_good"))

    def refused(name: str, text: str, warm: bool = False) -> str:
        (folder / f"{name}.py").write_text(text)
        with pytest.raises(UserError) as error:
            try_suite(config_of(name, warm))
        return str(error.value)

    assert refused("own_good", GOOD, warm=True) == (
        "The suite task.env = 'own_good:suite' lacks demonstrate and vocabulary, which a warm start needs: "
        "give it one, or name a model in model.path and leave [warmstart] out."
    )
    assert "takes the arguments (): it must be a function of one dict" in refused("own_a", "def suite(): pass")
    assert "gave a str where task.train_tasks = 4 asks for tasks" in refused(
        "own_b", GOOD.replace('Task(f"', 'str(f"').replace(', "own", i)', ")")
    )
    assert "train tasks (ZeroDivisionError: integer division or modulo by zero in own_c.py:6)" in refused(
        "own_c", GOOD.replace("range(n)", "range(n // 0)")
    )
    assert "(exit code 3; bye): mend it." in refused(
        "own_d", "import os, sys\nprint('bye', file=sys.stderr, flush=True)\nos._exit(3)"
    )
