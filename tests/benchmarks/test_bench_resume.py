"""A sweep that was cut short goes on: nobody else's folder, the same settings, points that are there are kept to the last bit."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from virtual_world import TINY

from benchmarks import paper, straggler, sweep
from benchmarks.jobs import each
from benchmarks.results_folder import claimed, earlier, first_difference, flat
from benchmarks.sweep_figures import Point
from segue.errors import RunFailed, UserError


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for all calls of a test: somebody may commit while tests run."""
    for benchmark in (sweep, paper):
        monkeypatch.setattr(benchmark, "git_sha", lambda: "0123456789ab")


# --- folders ----------------------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "deep"
    for _ in range(2):
        with claimed(out):
            pass  # what was claimed and never filled is nobody's
    with claimed(out), pytest.raises(UserError, match="is in use by another benchmark: wait for it, or give --out another name"):
        claimed(out).__enter__()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not an empty folder: give --out another name, or remove it\."):
        claimed(out).__enter__()
    with pytest.raises(UserError, match=r"has no results.json to go on with: name a folder of results"):
        claimed(out, resume=True).__enter__()
    (out / "results.json").write_text("{}")
    with pytest.raises(UserError, match=r"give --out another name, or go on with what is there: --resume\."):
        claimed(out).__enter__()
    with claimed(out, resume=True):
        assert (out / "notes.txt").read_text() == "mine"
    for path in (out / "results.json", out / "results.json" / "more"):
        with pytest.raises(UserError, match=r"is not a folder|cannot be made"):
            claimed(path).__enter__()


def test_a_folder_that_another_process_fills_is_in_use(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is in use by another benchmark"):
            claimed(tmp_path, resume=True).__enter__()


def test_settings_are_compared_as_a_file_has_them() -> None:
    known = {"steps": 3, "config": {"a": {"b": [1, 2]}, "none": None}}
    assert flat(known) == {"steps": 3, "config.a.b": [1, 2], "config.none": None}
    assert first_difference(known, {"steps": 3, "config": {"a": {"b": (1, 2)}, "none": float("inf")}}) is None
    assert first_difference(known, {"steps": 3, "config": {"a": {"b": [2, 1]}, "none": None}}) == "config.a.b"
    assert first_difference(known, {"steps": 3, "config": {"a": {"b": [1, 2]}}}) == "config.none"


def test_results_of_other_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    assert earlier(tmp_path, "straggler", {}) is None
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"benchmark": "straggler", "settings": {"commit": "abc", "scenario": {"unit": 1}}, "points": []}))
    assert earlier(tmp_path, "straggler", {"commit": "abc", "scenario": {"unit": 1}}) is not None
    with pytest.raises(UserError, match=r"was measured with scenario.unit = 1, and now it is 2: go back to that, or give --out"):
        earlier(tmp_path, "straggler", {"commit": "abc", "scenario": {"unit": 2}})
    with pytest.raises(UserError, match="is of the benchmark straggler"):
        earlier(tmp_path, "env_latency", {})
    for text in ("{", "[]", '{"benchmark": "straggler"}'):
        file.write_text(text)
        with pytest.raises(UserError, match="cannot be read"):
            earlier(tmp_path, "straggler", {})


# --- jobs -------------------------------------------------------------------------------------------------------------------


def square(number: int) -> int:
    """Where it is played must be able to find it."""
    if number == 13:
        raise RunFailed("part", "thirteen")
    if number == 14:
        raise UserError("fourteen")
    return number * number


@pytest.mark.processes
@pytest.mark.parametrize("jobs", [1, 2])
def test_work_comes_back_with_its_place_and_failures_as_themselves(jobs: int) -> None:
    assert sorted(each(square, [(3,), (1,), (2,)], jobs)) == [(0, 9), (1, 1), (2, 4)]
    assert list(each(square, [], jobs)) == []
    with pytest.raises(RunFailed, match="thirteen") as failed:
        list(each(square, [(1,), (13,)], jobs))
    assert failed.value.part == "part"
    with pytest.raises(UserError, match="fourteen"):
        list(each(square, [(14,)], jobs))


# --- a sweep ----------------------------------------------------------------------------------------------------------------

POINTS = ("1", "2", "3")


class Cut:
    """Measures points until `ends` comes, and notes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: dict[float, BaseException]) -> None:
        self.measured: list[float] = []
        real = sweep.measure_point

        def measure_point(asked: sweep.Plan, point: Point) -> dict[str, Any]:
            if point.x in ends:
                raise ends[point.x]
            self.measured.append(point.x)
            return real(asked, point)

        monkeypatch.setattr(sweep, "measure_point", measure_point)


def call(tmp_path: Path, out: str, *arguments: str) -> int:
    file = tmp_path / "tiny.toml"
    file.write_text(tomli_w.dumps(TINY))
    given = ["--scenario", str(file), "--out", str(tmp_path / out), "--arms", "sync", "async_keep"]
    return straggler.main([*given, *(() if "--points" in arguments else ("--points", *POINTS)), *arguments])


def told(tmp_path: Path, out: str) -> dict[str, Any]:
    return dict(json.loads((tmp_path / out / "results.json").read_text()))


def figures(results: Mapping[str, Any]) -> dict[str, Any]:
    return {key: results[key] for key in ("points", "settings", "setup", "arms", "missing", "seeds")}


@pytest.mark.processes
@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (RunFailed("rollout", "A node died."), 1)])
def test_what_was_cut_short_goes_on_and_comes_to_the_same_as_two_jobs(
    end: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        first = Cut(patched, {2.0: end})
        assert call(tmp_path, "a") == code and first.measured == [1.0]
    said = capsys.readouterr().err
    assert f"{tmp_path}/a has the 1 point that was done: the same command with --out {tmp_path}/a --resume goes on." in said
    half = told(tmp_path, "a")
    assert [point["x"] for point in half["points"]] == [1.0] and [point["x"] for point in half["missing"]] == [2.0, 3.0]
    page = (tmp_path / "a" / "index.html").read_text()
    assert "Not complete: 2 of 3 points are missing (longest/mean 2, longest/mean 3)." in page and "<svg" in page

    assert call(tmp_path, "a") == 2 and "--resume" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        second = Cut(patched, {1.0: AssertionError("it is there")})
        assert call(tmp_path, "a", "--resume") == 0 and second.measured == [2.0, 3.0]
    assert "Not complete" not in (tmp_path / "a" / "index.html").read_text()
    # Processes of their own have other hash seeds, and so would tell of any order that depends on them.
    assert call(tmp_path, "b", "--jobs", "2") == 0
    assert figures(told(tmp_path, "a")) == figures(told(tmp_path, "b"))


@pytest.mark.processes
def test_more_points_may_join_and_other_settings_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "a", "--points", "2") == 0
    joined = Cut(monkeypatch, {2.0: AssertionError("it is there")})
    assert call(tmp_path, "a", "--points", "1", "--resume") == 0 and joined.measured == [1.0]
    assert [point["x"] for point in told(tmp_path, "a")["points"]] == [1.0, 2.0]
    capsys.readouterr()
    for arguments, words in (
        (["--steps", "11"], "scenario.config.steps = 10, and now it is 11"),
        (["--repeats", "2"], "seeds = [0], and now it is [0, 1]"),
        (["--learner", "given"], "learner = 'sized for each point', and now it is 'as given'"),
        (["--set", "env.error=0.1"], "scenario.env.error = 0.0, and now it is 0.1"),
    ):
        assert call(tmp_path, "a", "--resume", *arguments) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert len(told(tmp_path, "a")["points"]) == 2


def test_resuming_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (straggler.main, paper.main):
        assert main(["--resume"]) == 2
        assert capsys.readouterr().err == "--resume goes on in a folder: name it with --out.\n"


@pytest.mark.processes
def test_published_rows_that_are_there_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out"), "--set", "config.steps=12", "--set", "config.batch.groups=2"]
    assert paper.main(["--only", "staleness_queue_3", *out]) == 0
    before = told(tmp_path, "out")
    monkeypatch.setattr(paper, "play_arm", lambda row, arm: pytest.fail("it is there"))
    assert paper.main(["--only", "staleness_queue_3", *out, "--resume"]) == 0
    assert told(tmp_path, "out")["rows"] == before["rows"] and before["missing"] == []
    capsys.readouterr()
    assert paper.main(["--only", "staleness_queue_3", *out[:-1], "config.batch.groups=3", "--resume"]) == 2
    assert "was measured with set = ['config.steps=12', 'config.batch.groups=2']" in capsys.readouterr().err
