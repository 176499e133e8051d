"""What the scheduler may import: `segue`, nothing of the other roles, no Ray, and torch only where the task stream is made."""

from __future__ import annotations

import ast
from pathlib import Path

ROOM = Path(__file__).resolve().parents[2] / "scheduler"
IO = {"asyncio", "threading", "time", "socket", "subprocess", "os", "random"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.split(".")[0])
    return names


def test_no_file_imports_another_role_or_ray() -> None:
    for path in ROOM.rglob("*.py"):
        assert not imported(path) & {"ray", "rollout", "learner", "envpool", "weightsync"}, path


def test_torch_is_imported_by_the_task_stream_alone() -> None:
    with_torch = [path.name for path in ROOM.rglob("*.py") if imported(path) & {"torch", "torchdata", "transformers"}]
    assert with_torch == ["tasks.py"]
    module = ast.parse((ROOM / "tasks.py").read_text(encoding="utf-8"))
    assert not any(isinstance(node, ast.ImportFrom) and "torch" in str(node.module) for node in module.body), "and lazily"


def test_the_core_has_no_io_no_clock_and_no_chance() -> None:
    for path in (ROOM / "core").rglob("*.py"):
        assert not imported(path) & IO, path
