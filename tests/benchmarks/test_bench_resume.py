"""A sweep that was cut short goes on: nobody else's folder, the same settings, points that are there are kept to the last bit."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import tomli_w
from virtual_world import TINY

from benchmarks import paper, result, straggler, sweep, sweep_virtual
from benchmarks.command import sentence
from benchmarks.jobs import each
from benchmarks.paper_rows import play_arm as really_play
from benchmarks.results_folder import Kept, claimed, earlier, first_difference, flat, left
from benchmarks.sweep_figures import Point, Seeded
from benchmarks.sweep_plan import Plan
from benchmarks.virtual.measure import generation_ceiling
from benchmarks.virtual.measure import measure as really_measure
from benchmarks.virtual.scenario import World
from segue.errors import DiskFailed, RunFailed, UserError

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 300.0
"""Nothing here takes long; the machine may be busy."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for all calls of a test: somebody may commit while tests run."""
    monkeypatch.setattr(result, "git_sha", lambda: "0123456789ab")


# --- folders ----------------------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "deep"
    for _ in range(2):
        with claimed(out):
            pass  # what was claimed and never filled is nobody's
    with claimed(out), pytest.raises(UserError, match="is in use by another benchmark: wait for it, or give --out another name"):
        claimed(out).__enter__()
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not an empty folder: give --out another name, or remove it\."):
        claimed(out).__enter__()
    (out / "results.json").write_text("{}")
    with claimed(out):
        assert (out / "notes.txt").read_text() == "mine"
    for path in (out / "results.json", out / "results.json" / "more"):
        with pytest.raises(UserError, match=r"is not a folder|cannot be made"):
            claimed(path).__enter__()


def test_a_folder_that_another_process_fills_is_in_use(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is in use by another benchmark"):
            claimed(tmp_path).__enter__()


def test_settings_are_compared_as_a_file_has_them() -> None:
    known = {"steps": 3, "config": {"a": {"b": [1, 2]}, "none": None}}
    assert flat(known) == {"steps": 3, "config.a.b": [1, 2], "config.none": None}
    assert first_difference(known, {"steps": 3, "config": {"a": {"b": (1, 2)}, "none": float("inf")}}) is None
    assert first_difference(known, {"steps": 3, "config": {"a": {"b": [2, 1]}, "none": None}}) == "config.a.b"
    assert first_difference(known, {"steps": 3, "config": {"a": {"b": [1, 2]}}}) == "config.none"


def test_results_of_other_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    assert earlier(tmp_path, "straggler", {}, sweep._look) is None
    file = tmp_path / "results.json"
    whole = {
        "benchmark": "straggler",
        "settings": {"commit": "abc", "scenario": {"unit": 1}},
        "points": [],
        "machine": {"quiet": True},
    }
    file.write_text(json.dumps(whole))
    assert earlier(tmp_path, "straggler", {"commit": "abc", "scenario": {"unit": 1}}, sweep._look) is not None
    with pytest.raises(UserError, match=r"was measured with scenario.unit = 1, and now it is 2: go back to that, or give --out"):
        earlier(tmp_path, "straggler", {"commit": "abc", "scenario": {"unit": 2}}, sweep._look)
    with pytest.raises(UserError, match="is of the benchmark straggler"):
        earlier(tmp_path, "env_latency", {}, sweep._look)
    point: dict[str, Any] = {"x": 1.0, "spread": None, "arms": {}}
    broken: list[dict[str, Any]] = [
        {"points": None},
        {"points": [{}]},
        {"points": [point | {"x": "one"}]},
        {"points": [point | {"arms": None}]},
        {"machine": {}},
        {"settings": "mine"},
    ]
    for text in ("{", "[]", '{"benchmark": "straggler"}', *(json.dumps(whole | damage) for damage in broken)):
        file.write_text(text)
        with pytest.raises(UserError, match="cannot be read"):
            earlier(tmp_path, "straggler", {"commit": "abc", "scenario": {"unit": 1}}, sweep._look)


def test_a_folder_made_for_what_is_then_refused_goes_again(tmp_path: Path) -> None:
    for out, there in ((tmp_path / "new", False), (tmp_path, True)):
        with pytest.raises(UserError, match="refused"), claimed(out):
            raise UserError("refused")
        assert out.exists() == there
    with claimed(tmp_path / "kept"):
        (tmp_path / "kept" / "results.json").write_text("{}")
    assert (tmp_path / "kept" / "results.json").exists()
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match="runs is a file, where runs are kept: remove it"):
        Kept(tmp_path).of("x", float, lambda: pytest.fail("nothing is measured that cannot be kept"))


class Thing(msgspec.Struct, frozen=True):
    share: float
    limit: float
    seeds: dict[str, int]


def test_what_is_kept_is_read_to_the_last_bit_and_measured_once(tmp_path: Path) -> None:
    thing = Thing(0.1 + 0.2, math.inf, {"a": 3})
    kept = Kept(tmp_path)
    assert kept.of("x1.0-seed0-a", Thing, lambda: thing) == thing
    assert Kept(tmp_path).of("x1.0-seed0-a", Thing, lambda: pytest.fail("it is there")) == thing
    assert kept.of("seconds", float, lambda: 0.1) == 0.1
    with pytest.raises(RunFailed):
        kept.of("x1.0-seed0-b", Thing, failing)
    assert kept.names("*-seed*") == ["x1.0-seed0-a"]
    for text in ("{", "[]", '{"share": 1}'):
        (tmp_path / "runs" / "x1.0-seed0-a.json").write_text(text)
        with pytest.raises(UserError, match=r"x1.0-seed0-a.json cannot be read \(.*\): remove it, and it is measured again"):
            kept.of("x1.0-seed0-a", Thing, lambda: thing)
    kept.drop("x1.0-seed*")
    assert kept.names("*") == ["seconds"]


def failing() -> Thing:
    raise RunFailed("part", "it failed")


def test_what_is_left_is_said_as_it_is(tmp_path: Path) -> None:
    assert left(tmp_path, 0, "point", 0, "run") == "Nothing was measured yet."
    goes_on = f": the same command with --out {tmp_path} goes on."
    assert left(tmp_path, 1, "point", 0, "run") == f"{tmp_path} has 1 point in results.json and index.html{goes_on}"
    assert left(tmp_path, 0, "point", 2, "run") == f"{tmp_path} has 2 runs in runs/{goes_on}"
    both = f"{tmp_path} has 2 points in results.json and index.html and 1 run of other points in runs/{goes_on}"
    assert left(tmp_path, 2, "point", 1, "run") == both


def test_points_have_names_of_their_own() -> None:
    points = [Point(x, spread) for x in (1.0, 1.5, 1.0000001) for spread in (None, 0.0, 1.0)]
    assert len({point.name for point in points}) == len(points)
    assert not any(b.name.startswith(f"{a.name}-seed") for a in points for b in points)


# --- jobs -------------------------------------------------------------------------------------------------------------------


def square(number: int) -> int:
    """Where it is played must be able to find it."""
    if number == 13:
        raise RunFailed("part", "thirteen")
    if number == 14:
        raise UserError("fourteen")
    if number == 15:
        raise DiskFailed("The disk of X is full", ": free some, and go on with --resume")
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
    with pytest.raises(DiskFailed) as full:
        list(each(square, [(15,)], jobs))
    assert sentence(full.value) == "The disk of X is full."  # a benchmark has no --resume
    assert str(full.value) == "The disk of X is full: free some, and go on with --resume."


def work_on(number: int, folder: Path) -> int:
    """Item 0 ends at once, item 1 is killed, and others work until they are told to end, and clean up."""
    if number == 0:
        return os.getpid()
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        (folder / f"{number}-begun").write_text(str(os.getpid()))
        signal.pause()
    finally:
        (folder / f"{number}-clean").touch()
    return number


@pytest.mark.processes
def test_whoever_stops_listening_ends_the_work_and_no_other_begins(tmp_path: Path) -> None:
    work = each(work_on, [(0, tmp_path), (2, tmp_path), (3, tmp_path), (4, tmp_path)], 2)
    assert next(work)[0] == 0
    until(lambda: len(list(tmp_path.glob("*-begun"))) == 2)  # the third waits for a process
    work.close()
    begun = {path.name.partition("-")[0] for path in tmp_path.glob("*-begun")}
    assert begun == {path.name.partition("-")[0] for path in tmp_path.glob("*-clean")} and len(begun) == 2
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.glob("*-begun"))


@pytest.mark.processes
def test_a_process_that_is_killed_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"was killed, perhaps for want of memory: give the command again with fewer --jobs"):
        list(each(work_on, [(1, tmp_path)], 2))


def until(there: Callable[[], bool]) -> None:
    """Another process tells of itself by files alone."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- a sweep ----------------------------------------------------------------------------------------------------------------

POINTS = ("1", "2", "3")


class Cut:
    """Measures seeds of points until `ends` comes, and notes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: dict[float, BaseException]) -> None:
        self.measured: list[float] = []
        real = sweep.measure_seed

        def measure_seed(asked: Plan, point: Point, seed: int, out: Path) -> Seeded:
            if point.x in ends:
                raise ends[point.x]
            self.measured.append(point.x)
            return real(asked, point, seed, out)

        monkeypatch.setattr(sweep, "measure_seed", measure_seed)


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
@pytest.mark.parametrize(
    ("end", "code"), [pytest.param(KeyboardInterrupt(), 130, marks=pytest.mark.full), (RunFailed("rollout", "A node died."), 1)]
)
def test_what_was_cut_short_goes_on_and_comes_to_the_same_as_two_jobs(
    end: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        first = Cut(patched, {2.0: end})
        assert call(tmp_path, "a") == code and first.measured == [1.0]
    assert f"{tmp_path}/a has 1 point in results.json and index.html: the same command with" in capsys.readouterr().err
    half = told(tmp_path, "a")
    assert [point["x"] for point in half["points"]] == [1.0] and [point["x"] for point in half["missing"]] == [2.0, 3.0]
    page = (tmp_path / "a" / "index.html").read_text()
    assert "Not complete: 2 of 3 points are missing (longest/mean 2, longest/mean 3)." in page and "<svg" in page

    with monkeypatch.context() as patched:
        second = Cut(patched, {1.0: AssertionError("it is there")})
        assert call(tmp_path, "a") == 0 and second.measured == [2.0, 3.0]
    assert "Not complete" not in (tmp_path / "a" / "index.html").read_text()
    # Processes of their own have other hash seeds, and so would tell of any order that depends on them.
    assert call(tmp_path, "b", "--jobs", "2") == 0
    assert figures(told(tmp_path, "a")) == figures(told(tmp_path, "b"))
    assert Kept(tmp_path / "b").names("*") == []
    capsys.readouterr()
    assert call(tmp_path, "a") == 2
    said = capsys.readouterr().err
    assert "exists already and has all that is asked for: give --out another name, or remove it." in said
    assert said.count("\n") == 1 and figures(told(tmp_path, "a")) == figures(told(tmp_path, "b"))


@pytest.mark.processes
@pytest.mark.full
def test_arms_of_a_point_that_was_cut_short_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played: list[str] = []

    def measure(world: World, **how: Any) -> Any:
        if world.config.mode == cut:
            raise KeyboardInterrupt
        played.append(world.config.mode)
        return really_measure(world, **how)

    monkeypatch.setattr(sweep_virtual, "measure", measure)
    both, cut = ["--points", "2", "--repeats", "2"], "async"
    assert call(tmp_path, "a", *both) == 130 and played == ["sync"]
    assert "has 2 runs in runs/: the same command" in capsys.readouterr().err  # generation alone is one
    assert told(tmp_path, "a")["points"] == [] and not (tmp_path / "a" / "index.html").exists()
    monkeypatch.setattr(sweep_virtual, "generation_ceiling", once)
    cut = ""
    assert call(tmp_path, "a", *both) == 0 and played == ["sync", "async", "sync", "async"]
    assert call(tmp_path, "b", *both, "--jobs", "2") == 0
    assert figures(told(tmp_path, "a")) == figures(told(tmp_path, "b"))


def once(world: World) -> float:
    """For the second seed alone: the first one's is kept."""
    assert world.config.seed == 1
    return generation_ceiling(world)


@pytest.mark.processes
def test_more_points_may_join_and_other_settings_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "a", "--points", "2") == 0
    joined = Cut(monkeypatch, {2.0: AssertionError("it is there")})
    assert call(tmp_path, "a", "--points", "1") == 0 and joined.measured == [1.0]
    assert [point["x"] for point in told(tmp_path, "a")["points"]] == [1.0, 2.0]
    capsys.readouterr()
    for arguments, words in (
        (["--steps", "11"], "scenario.config.steps = 10, and now it is 11"),
        (["--repeats", "2"], "seeds = [0], and now it is [0, 1]"),
        (["--learner", "given"], "learner = 'sized for each point', and now it is 'as given'"),
        (["--set", "env.error=0.1"], "scenario.env.error = 0.0, and now it is 0.1"),
    ):
        assert call(tmp_path, "a", *arguments) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    monkeypatch.setattr("benchmarks.result.versions", lambda packages=(): {"git_sha": "another"})
    assert call(tmp_path, "a") == 2 and "was measured with versions.git_sha = " in capsys.readouterr().err
    assert len(told(tmp_path, "a")["points"]) == 2


@pytest.mark.processes
def test_sigterm_in_the_midst_of_a_sweep_ends_all_of_it_in_order(tmp_path: Path) -> None:
    """As a user starts it: the module is a program, its processes are its own, and what was measured is there."""
    file = tmp_path / "tiny.toml"
    file.write_text(tomli_w.dumps(TINY))
    points = ["--points", "1", "2", "--spreads", "0", "--jobs", "2", "--steps", "400"]
    given = ["--scenario", str(file), "--out", str(tmp_path / "out"), *points]
    command = [sys.executable, "-m", "segue.cli", "bench", "env-latency", *given]
    program = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: program.poll() is not None or len(Kept(tmp_path / "out").names("*-generation")) == 2)
        family = psutil.Process(program.pid).children(recursive=True)
        program.terminate()
        _, said = program.communicate(timeout=WAIT_SECONDS)
    finally:
        program.kill()
    assert program.returncode == 128 + signal.SIGTERM, said
    there = r"has \d+ runs in runs/: the same command with --out .* goes on\."
    assert re.fullmatch(rf"Interrupted\. .*/out {there}\n", said)
    assert len(family) >= 2 and not psutil.wait_procs(family, timeout=WAIT_SECONDS)[1]


@pytest.mark.processes
def test_published_rows_that_are_there_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out"), "--set", "config.steps=12", "--set", "config.batch.groups=2"]
    played: list[str] = []

    def play_arm(row: Any, arm: Any) -> Any:
        played.append(arm.name)
        if len(played) == 2:
            raise KeyboardInterrupt
        return really_play(row, arm)

    monkeypatch.setattr(paper, "play_arm", play_arm)
    assert paper.main(["--only", "staleness_queue_3", *out]) == 130
    assert "1 arm in runs/: the same command" in capsys.readouterr().err
    first, second = played
    assert paper.main(["--only", "staleness_queue_3", *out]) == 0
    assert played[2] == second and first not in played[2:]
    before = told(tmp_path, "out")
    assert before["missing"] == [] and len(before["rows"]) == 1
    capsys.readouterr()
    assert paper.main(["--only", "staleness_queue_3", *out]) == 2
    assert "has all that is asked for" in capsys.readouterr().err
    assert paper.main(["--only", "staleness_queue_3", *out[:-1], "config.batch.groups=3"]) == 2
    assert "was measured with set = ['config.steps=12', 'config.batch.groups=2']" in capsys.readouterr().err
    assert told(tmp_path, "out") == before
