"""One instance: what environments return or raise, and what becomes of it."""

from __future__ import annotations

import pytest
from faulty_suite import FaultyArgs, FaultySuite

from envpool.instance import DETAIL_CHARACTERS, Instance
from envpool.messages import Act, Acted, Dispose, Disposed, Made, Make, Observed, Raised, Reset, RestoreTo
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
    assert isinstance(raised, Raised) and len(raised.detail) <= DETAIL_CHARACTERS
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
