"""docs/faults.md names tests that exist, and has every fault once. Read as text and syntax: nothing is imported."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/faults.md").read_text()
COVERED, LATER = PAGE.split("\n## Later\n")
FAULTS = range(1, 95)
"""The list that the page works off has the faults F01 to F94."""


def rows(text: str) -> dict[str, list[str]]:
    """The cells behind each fault's number, from all tables in `text`."""
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| F")
    ]
    found = {number: cells for number, *cells in lines}
    assert len(found) == len(lines), "a fault is listed twice"
    return found


def names_of(cell: str) -> list[str]:
    return re.findall(r"`(tests/[^`]+)`", cell)


NAMED = sorted({name for cells in rows(COVERED).values() for name in names_of(cells[-1])})


# --- tests by their syntax ----------------------------------------------------------------------------------------------


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def defined(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The function, class or assignment of that name."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            return node
    return None


def origin(path: Path, name: str) -> tuple[Path, ast.stmt] | None:
    """Where the module at `path` has `name` from: itself, or a neighbour that it imports it from."""
    found = defined(tree(path).body, name)
    if found is not None:
        return path, found
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            neighbour = path.with_name(f"{node.module}.py")
            return origin(neighbour, name) if neighbour.exists() else None
    return None


def is_machine(path: Path, node: ast.stmt) -> bool:
    """`TestX = X.TestCase`, where X is a state machine of that module: hypothesis makes it a test."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "TestCase"):
        return False
    machine = defined(tree(path).body, node.value.value.id) if isinstance(node.value.value, ast.Name) else None
    return isinstance(machine, ast.ClassDef) and any(ast.unparse(base).endswith("StateMachine") for base in machine.bases)


def method(path: Path, owner: ast.ClassDef, name: str) -> ast.stmt | None:
    """A method of the class, its own or inherited."""
    own = defined(owner.body, name)
    if own is not None:
        return own
    for base in owner.bases:
        found = origin(path, ast.unparse(base))
        if found is not None and isinstance(found[1], ast.ClassDef):
            inherited = method(found[0], found[1], name)
            if inherited is not None:
                return inherited
    return None


def problem(name: str) -> str:
    """Why pytest would not find, or not run, the test of this name; "" if it would."""
    file, *parts = name.split("::")
    path = ROOT / file
    if not path.exists():
        return "there is no such file"
    if not path.name.startswith("test_") or not 1 <= len(parts) <= 2 or not all(p.lower().startswith("test") for p in parts):
        return "pytest would not take it for a test"
    node = defined(tree(path).body, parts[0])
    if node is not None and len(parts) == 2:
        node = method(path, node, parts[1]) if isinstance(node, ast.ClassDef) else None
    if node is None:
        return "the file has no such test"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        late = "pytest.mark.full" in map(ast.unparse, node.decorator_list)
        return "it runs in make test-full only" if late else ""
    return "" if is_machine(path, node) else "it is neither a test function nor a state machine"


# --- the page -----------------------------------------------------------------------------------------------------------


def test_every_fault_is_listed_once() -> None:
    covered, later = rows(COVERED), rows(LATER)
    assert not covered.keys() & later.keys()
    assert sorted({*covered, *later}) == [f"F{number:02d}" for number in FAULTS]
    assert list(covered) == sorted(covered) and list(later) == sorted(later)


def test_every_row_is_whole() -> None:
    for number, cells in rows(COVERED).items():
        assert len(cells) == 3 and all(cells), number
        tests = names_of(cells[-1])
        assert tests and len(set(tests)) == len(tests), number
        assert cells[-1] == "<br>".join(f"`{name}`" for name in tests), number
    for number, cells in rows(LATER).items():
        assert len(cells) == 2 and all(cells) and not names_of(" ".join(cells)), number


@pytest.mark.parametrize("name", NAMED)
def test_every_named_test_exists(name: str) -> None:
    assert problem(name) == "", name


def test_what_does_not_exist_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail."""
    (tmp_path / "base.py").write_text("class Base:\n    def test_inherited(self): ...\n")
    (tmp_path / "test_some.py").write_text(
        "from base import Base\n"
        "class TestOwn(Base):\n    def test_own(self): ...\n"
        "class Machine(RuleBasedStateMachine): ...\n"
        "class Plain: ...\n"
        "TestMachine = Machine.TestCase\n"
        "TestPlain = Plain.TestCase\n"
        "@pytest.mark.full\ndef test_late(): ...\n"
        "async def test_here(): ...\n"
        "def helper(): ...\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    good = ["test_here", "TestOwn::test_own", "TestOwn::test_inherited", "TestMachine"]
    bad = ["test_gone", "TestOwn::test_gone", "TestPlain", "TestOwn", "test_late", "helper", "test_here::test_own"]
    assert [problem(f"test_some.py::{name}") for name in good] == [""] * len(good)
    assert all(problem(f"test_some.py::{name}") for name in bad)
    assert problem("test_none.py::test_here") and problem("base.py::test_inherited") and problem("test_some.py")
    with pytest.raises(AssertionError, match="twice"):
        rows("| F01 | a | b |\n| F01 | c | d |")
