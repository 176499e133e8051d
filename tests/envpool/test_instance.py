"""One instance: what environments return or raise, and what becomes of it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_suite import FaultyArgs, FaultySuite

from envpool.instance import Instance
from envpool.messages import Act, Acted, Dispose, Disposed, Made, Make, Observed, Raised, Reset, RestoreTo
from envpool.raised import MOST_KINDS, RaisedLog
from segue.episode import Task

TASK = Task("t", "faulty", 0)


def instance(snapshot_bytes: int = 1 << 18, **args: str) -> Instance:
    made = Instance(FaultySuite(FaultyArgs(**args)), Make(1, 1, TASK, 0, 1), snapshot_bytes)
    made.perform(Make(1, 1, TASK, 0, 1))
    return made


def test_make_reset_act_dispose() -> None:
    one = Instance(FaultySuite(FaultyArgs()), Make(1, 1, TASK, 0, 1), 1 << 18)
    assert one.perform(Make(1, 1, TASK, 0, 1)) == Made(1, 1, "snapshot")
    observed = one.perform(Reset(1, 2))
    assert isinstance(observed, Observed) and observed.snapshot is not None
    acted = one.perform(Act(1, 3, "a"))
    assert isinstance(acted, Acted) and acted.call == 3 and acted.snapshot is not None
    assert one.perform(Act(1, 4, "a", snapshot=False)).snapshot is None  # type: ignore[union-attr]
    assert one.perform(Dispose(1, 5)) == Disposed(1, 5)
    assert one.perform(Dispose(1, 6)) == Disposed(1, 6)


@pytest.mark.parametrize(
    ("action", "failure", "part"),
    [
        ("raise", "env", "RuntimeError: as asked"),
        ("data", "data", "DataError: as asked"),
        ("sysexit", "env", "SystemExit: 3"),
        ("garbage", "env", "step() returned str"),
        ("both", "env", "terminated and truncated together"),
        ("nan", "env", "numbers must be finite"),
        ("nested", "env", "messages"),
        ("surrogate", "env", "UnicodeEncodeError"),
    ],
)
def test_what_an_environment_raises_or_returns_wrongly_is_typed(action: str, failure: str, part: str) -> None:
    one = instance()
    one.perform(Reset(1, 2))
    raised = one.perform(Act(1, 3, action))
    assert isinstance(raised, Raised) and raised.failure == failure and part in raised.detail


def test_scalars_of_array_libraries_are_numbers() -> None:
    """Environments that compute with NumPy return its scalars; an array is none."""
    one = instance()
    one.perform(Reset(1, 2))
    acted = one.perform(Act(1, 3, "scalars"))
    assert isinstance(acted, Acted), acted
    result = acted.result
    assert (result.reward, result.terminated, result.info) == (0.5, False, {"success": 1.0})
    assert (type(result.reward), type(result.terminated), type(result.info["success"])) == (float, bool, float)
    raised = one.perform(Act(1, 4, "arrays"))
    assert isinstance(raised, Raised) and "ndarray inside of its result" in raised.detail


def test_details_are_bounded_and_encodable() -> None:
    one = instance()
    one.perform(Reset(1, 2))
    raised = one.perform(Act(1, 3, "raise \ud800" + "x" * 10_000))
    assert isinstance(raised, Raised) and len(raised.detail) <= 500
    raised.detail.encode()


def test_failures_of_make_reset_restore_and_close() -> None:
    assert isinstance(instance(make="raise").perform(Dispose(1, 2)), Disposed)
    assert isinstance(instance(reset="raise").perform(Reset(1, 2)), Raised)
    assert isinstance(instance().perform(RestoreTo(1, 2, b"\xc1 no snapshot")), Raised)
    closed = instance(close="raise").perform(Dispose(1, 2))
    assert isinstance(closed, Disposed) and "as asked" in closed.error


def test_environments_that_cannot_snapshot_are_not_asked_to() -> None:
    one = instance(resume="replay")
    observed = one.perform(Reset(1, 2))
    assert isinstance(observed, Observed) and observed.snapshot is None
    one = Instance(FaultySuite(FaultyArgs(resume="nonsense")), Make(1, 1, TASK, 0, 1), 1 << 18)
    assert isinstance(one.perform(Make(1, 1, TASK, 0, 1)), Raised)


def users_module(tmp_path: Path, body: str) -> Any:
    """A module of the user's with an environment `Bugs`, whose class begins in its line 4."""
    path = tmp_path / "bugs.py"
    path.write_text(f"from segue.ports.envpool import *\n\n\nclass Bugs:\n    resume = 'snapshot'\n{body}")
    spec = importlib.util.spec_from_file_location("bugs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bugs"] = module  # inspect looks there
    spec.loader.exec_module(module)
    return module


RESET = "    def reset(self, task, seed): return Observation([])\n"


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("    def step(self, action):\n        return {}['oops']\n", "KeyError: 'oops' in bugs.py:9"),
        ("    def step(self, action):\n        import json; json.loads('{')\n", "JSONDecodeError: Expecting .* in bugs.py:9"),
        ("    def step(self, action): return (1, 2)\n", "TypeError: step\\(\\) returned tuple, not StepResult in bugs.py:4"),
        ("", "AttributeError: 'Bugs' object has no attribute 'step' in bugs.py:4"),
    ],
)
def test_an_error_names_its_line_in_the_users_module(tmp_path: Path, body: str, detail: str) -> None:
    module = users_module(tmp_path, "    def snapshot(self): return b''\n" + RESET + body)
    one = Instance(SimpleNamespace(make=lambda *_: module.Bugs()), Make(1, 1, TASK, 0, 1), 1 << 18)
    one.perform(Make(1, 1, TASK, 0, 1))
    assert isinstance(one.perform(Reset(1, 2)), Observed)
    raised = one.perform(Act(1, 3, "a"))
    assert isinstance(raised, Raised)
    assert re.fullmatch(detail, raised.detail), raised.detail
    assert raised.kind == f"{detail.partition(':')[0]} in {detail.rpartition(' in ')[2]}"
    assert raised.traceback.startswith("Traceback (most recent call last)")


def test_a_snapshot_that_is_no_method_is_said_to_be_none(tmp_path: Path) -> None:
    module = users_module(tmp_path, "    snapshot = None\n" + RESET)
    one = Instance(SimpleNamespace(make=lambda *_: module.Bugs()), Make(1, 1, TASK, 0, 1), 1 << 18)
    one.perform(Make(1, 1, TASK, 0, 1))
    raised = one.perform(Reset(1, 2))
    assert isinstance(raised, Raised)
    assert raised.detail == ("TypeError: the environment's resume is 'snapshot', but it has no method snapshot in bugs.py:4")


def test_each_error_has_its_traceback_in_the_log_once_and_then_a_count(caplog: pytest.LogCaptureFixture) -> None:
    seen = RaisedLog("envpool-0")
    for number in range(120):
        seen.add(Raised(1, number, "env", f"KeyError: 'task-{number}' in bugs.py:9", "KeyError in bugs.py:9", "Traceback …"))
    seen.add(Raised(1, 0, "env", "ValueError in bugs.py:9", "ValueError in bugs.py:9", "Traceback …"))
    first, tenth, hundredth, other = [record.getMessage() for record in caplog.records]
    assert first == "envpool-0: an environment raised KeyError: 'task-0' in bugs.py:9\nTraceback …"
    assert tenth.startswith("envpool-0: 10 times so far: KeyError in bugs.py:9 (the last: ")
    assert hundredth.startswith("envpool-0: 100 times so far: ") and "ValueError in bugs.py:9\nTraceback" in other
    for number in range(MOST_KINDS + 10):
        seen.add(Raised(1, number, "env", "E", f"E in bugs.py:{number}", ""))
    assert len(caplog.records) < 4 + MOST_KINDS + 2, "a log of many different errors is bounded too"
