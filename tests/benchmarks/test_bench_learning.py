"""The staleness ablation: which cells there are, that ages are exact, what is kept and repeated, what intervals decide."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning as bench
from benchmarks import learning_plot
from benchmarks.learning_cells import (
    CORRECTIONS,
    CURVES,
    Cell,
    Outcome,
    base_overrides,
    cell_file,
    cell_overrides,
    cells_of,
    check_ages,
    load,
    outcome_of,
    read_grid,
    save,
    settings_of,
)
from benchmarks.learning_figures import interval, summarize, t_quantile, table, verdict
from benchmarks.watched import Watched
from segue.config import load_config
from segue.errors import RunFailed, UserError

SMOKE = bench.CONFIG.parent / "smoke.toml"


def outcome(seed: int, age: int, correction: str, success: float) -> Outcome:
    curves = {name: [0.5, success, None] for name in CURVES}
    return Outcome(
        seed=seed,
        age=age,
        correction=correction,
        steps=3,
        success=success,
        n=256,
        failed=0,
        success_before=0.1 if age == 0 else None,
        curves=curves,
        seconds=2.0,
    )


# --- the grid ---------------------------------------------------------------------------------------------------------------


def test_the_full_grid_has_every_age_with_every_correction_and_one_synchronous_cell_per_seed() -> None:
    cells = cells_of(read_grid(["full"]), [3, 4])
    assert len(cells) == len(set(cells)) == 2 * (1 + 5 * 5)
    assert [cell for cell in cells if cell.age == 0] == [Cell(3, 0, "sync"), Cell(4, 0, "sync")]
    assert cells[0] == Cell(3, 0, "sync") and {cell.seed for cell in cells[:26]} == {3}, (
        "a seed's pairs are whole before the next"
    )


def test_a_grid_is_thinned_by_items() -> None:
    assert read_grid(["4,8:none,tis", "4:tis", "16:loglinear"]) == [
        (4, "none"),
        (4, "tis"),
        (8, "none"),
        (8, "tis"),
        (16, "loglinear"),
    ]
    assert {correction for _, correction in read_grid(["2:all"])} == set(CORRECTIONS)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("4", "neither AGES:CORRECTIONS"),
        ("4:ppo", "'ppo': choose from none, decoupled"),
        ("0:none", "age 0"),
        ("x:none", "neither"),
    ],
)
def test_an_impossible_grid_is_one_sentence(item: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        read_grid([item])
    assert words in str(error.value) and item in str(error.value) and "\n" not in str(error.value)


def test_cells_differ_in_age_correction_and_seed_alone() -> None:
    own = load_config(bench.CONFIG)
    shared = base_overrides(own, 40, 0.003, 2, 256)
    cells = cells_of(read_grid(["full"]), [0, 1])
    configs = {cell: load_config(bench.CONFIG, [*shared, *cell_overrides(cell, own)]) for cell in cells}
    assert len({json.dumps(settings_of(config), sort_keys=True) for config in configs.values()}) == 1
    for cell, config in configs.items():
        assert (config.seed, config.staleness.max_age, config.learner.lr) == (cell.seed, cell.age, 0.003)
        assert config.learner.correction == {"sync": "decoupled", "loglinear": "decoupled"}.get(cell.correction, cell.correction)
        assert (config.learner.proximal == "loglinear") == (cell.correction == "loglinear")
        assert config.rollout.slots == config.batch.groups * config.group.size, "a batch is generated at once"


# --- exact ages -------------------------------------------------------------------------------------------------------------


def test_exact_ages_pass_and_any_other_is_refused() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "ages": [0] * min(step, 2) + [9]} for step in range(5)]
    cell = Cell(0, 2, "tis")
    check_ages(lines, cell)
    for step, ages in ((4, [0, 0, 8, 1]), (4, [0, 1, 8]), (4, []), (1, [9])):
        with pytest.raises(RunFailed, match=f"eta2-tis-seed0 trained tokens of the ages .* in step {step}"):
            check_ages([*lines[:step], {"step": step, "ages": ages}, *lines[step + 1 :]], cell)


def test_an_outcome_keeps_success_and_curves_but_not_of_a_run_with_another_age() -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "ages": [5], "reward_mean": 0.25}, {"step": 1, "ages": [0, 5], "entropy": 2.0}]
    summary = {"eval": {"before": None, "after": {"success": 0.75, "n": 8, "failed": 0}}, "wall_seconds": 3.0}
    told = outcome_of(Cell(7, 1, "mask"), Watched(lines, summary, {}))
    assert (told.cell, told.success, told.n, told.success_before) == (Cell(7, 1, "mask"), 0.75, 8, None)
    assert told.curves["reward_mean"] == [0.25, None] and told.curves["entropy"] == [None, 2.0]
    with pytest.raises(RunFailed):
        outcome_of(Cell(7, 0, "sync"), Watched(lines, summary, {}))


@pytest.mark.full
@pytest.mark.processes
def test_real_cells_train_every_token_at_the_exact_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole serial runs of a tiny model (`check_ages` judges them): one per correction, done once, and found again."""
    sizes = ["--steps", "4", "--seeds", "1", "--eval-tasks", "4", "--grid", "2:all", "3:none"]
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["learning", "--config", str(SMOKE), "--set", "warmstart.steps=10", *sizes, "--results", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    assert bench.main() == 0
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(r["age"], r["correction"]) for r in told["rows"]] == [(0, "sync"), *((2, c) for c in CORRECTIONS), (3, "none")]
    assert told["missing"] == [] and not told["full_grid"] and told["success_before"] is not None
    rewards = {r["correction"]: r["curves"]["reward_mean"] for r in told["rows"] if r["age"] == 2}
    assert len({tuple(curve[:3]) for curve in rewards.values()}) == 1, "the first η + 1 batches are the same in all"
    capsys.readouterr()
    assert bench.main() == 0
    assert "7 of 7 cells are done, 0 to run" in capsys.readouterr().out


# --- intervals and what they decide -------------------------------------------------------------------------------------------


def test_intervals_are_students() -> None:
    assert interval([0.5]) is None
    found = interval([0.1, 0.2, 0.3])
    assert found is not None
    half = 4.303 * 0.1 / 3**0.5
    assert found[0] == pytest.approx(0.2 - half) and found[1] == pytest.approx(0.2 + half)
    for freedom, value in ((1, 12.706), (30, 2.042), (31, 2.040), (60, 2.000), (120, 1.980)):
        assert t_quantile(freedom) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (None, "undecided"),
        ((-0.07, 0.08), "holds"),
        ((-0.09, 0.01), "undecided"),
        ((-0.3, -0.09), "differs"),
        ((0.09, 0.2), "differs"),
        ((-0.2, 0.2), "undecided"),
    ],
)
def test_the_decision_rule(bounds: tuple[float, float] | None, said: str) -> None:
    assert verdict(bounds) == said


def test_cells_are_compared_with_the_synchronous_one_of_their_own_seed() -> None:
    runs = [outcome(seed, 0, "sync", success) for seed, success in ((0, 0.5), (1, 0.9), (2, 0.7))]
    runs += [outcome(seed, 4, "tis", success) for seed, success in ((0, 0.49), (1, 0.91), (2, 0.70))]
    runs += [outcome(seed, 8, "none", success) for seed, success in ((0, 0.1), (1, 0.65), (3, 0.0))]
    figures = summarize(reversed(runs))
    rows = {(r["age"], r["correction"]): r for r in figures["rows"]}
    assert rows[4, "tis"]["difference"] == pytest.approx(0.0) and rows[4, "tis"]["verdict"] == "holds"
    assert rows[8, "none"]["seeds"] == [0, 1, 3] and rows[8, "none"]["difference"] == pytest.approx(-0.325), "seed 3 has no pair"
    assert figures["corrected_at_4"] == {"tis": "holds"} and figures["naive_worse_from_8"] == {"8": False}, "two pairs say little"
    assert rows[0, "sync"]["verdict"] is None and figures["success_before"] == pytest.approx(0.1)
    assert rows[4, "tis"]["curves"]["entropy"] == [0.5, pytest.approx(0.7), None]
    again = summarize([*runs, outcome(2, 8, "none", 0.29), outcome(4, 8, "none", 0.0), outcome(4, 0, "sync", 0.41)])
    assert again["naive_worse_from_8"] == {"8": True}
    assert table(again).count("\n") == 3 and "worse" in table(again)


# --- resuming ---------------------------------------------------------------------------------------------------------------


class Runs:
    """Stands in for training: notes what ran and how many at once; `fails` raise."""

    def __init__(self, fails: tuple[Cell, ...] = ()) -> None:
        self.ran: list[Cell] = []
        self.prepared: list[int] = []
        self.fails = fails
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def __call__(self, cell: Cell) -> Outcome:
        with self._lock:
            self.ran.append(cell)
            self._now += 1
            self.most = max(self.most, self._now)
        with self._lock:
            self._now -= 1
        if cell in self.fails:
            raise RunFailed("train", "The run failed.")
        return outcome(cell.seed, cell.age, cell.correction, 0.5)


def test_what_is_done_is_not_repeated_and_a_failed_cell_is(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    cells = cells_of(read_grid(["4:none,tis"]), [0, 1])
    first = Runs(fails=(cells[1],))
    done, failed = bench.run_missing(cells, tmp_path, first, 2, 1e9, first.prepared.append)
    assert sorted(first.ran) == sorted(cells) and first.prepared == [0, 1] and first.most <= 2
    assert set(done) == set(cells) - {cells[1]} and failed == {cells[1]: "The run failed."}
    second = Runs()
    more = cells_of(read_grid(["4:none,tis", "8:mask"]), [0, 1])
    done, failed = bench.run_missing(more, tmp_path, second, 1, 1e9, second.prepared.append)
    assert second.ran == [cells[1], Cell(0, 8, "mask"), Cell(1, 8, "mask")] and set(done) == set(more) and not failed
    assert not [path for path in (tmp_path / "cells").iterdir() if path.suffix != ".json"], "nothing half-written"


def test_a_budget_ends_before_the_next_cell_begins(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    runs = Runs()
    done, failed = bench.run_missing(cells_of([], [0, 1]), tmp_path, runs, 1, 0.0, runs.prepared.append)
    assert (done, failed, runs.ran, runs.prepared) == ({}, {}, [], [])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command with training scripted."""
    runs = Runs()
    monkeypatch.setattr(bench, "run_cell", lambda config, shared, cell, run: runs(cell))
    monkeypatch.setattr(bench.Plan, "warm_start", lambda plan, seed: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["learning", "--results", str(tmp_path / "out"), *arguments])
        return bench.main()

    return call


def test_the_command_writes_table_and_figures(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--grid", "4:decoupled", "8:none", "--seeds", "2") == 0
    said = capsys.readouterr().out
    assert "η = 4, decoupled: holds" in said and "η = 8, no correction: not clearly worse" in said and "grid is thinned" in said
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert told["benchmark"] == "learning" and told["seeds"] == [0, 1] and told["failed"] == {} and "machine" in told
    assert command("--budget-minutes", "1e-9", "--seeds", "2") == 0
    assert "Missing: 46 cells (eta1-none-seed0, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "16"], "--steps 16 leaves no step in which tokens have age 16: raise --steps above 16"),
        (["--grid", "4:ppo"], "choose from none"),
        (["--minibatches", "1"], "learner.minibatches = 1"),
        (["--lr", "0"], "learner.lr"),
        (["--config", "nowhere.toml"], "There is no config file nowhere.toml"),
        (["--set", "learner.mask_range=[2.0,3.0]"], "must hold 1"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert command(*arguments) == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "\n" not in said


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--jobs", "0"], ["--budget-minutes", "0"]])
def test_counts_below_one_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_folder_of_other_settings_is_refused(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--grid", "4:none", "--seeds", "1") == 0
    assert command("--grid", "4:none", "8:tis", "--seeds", "2") == 0, "more seeds and cells are the same settings"
    capsys.readouterr()
    assert command("--grid", "4:none", "--seeds", "1", "--lr", "0.5") == 2
    said = capsys.readouterr().err.strip()
    assert "holds cells with learner.lr = 0.0003, and now it is 0.5" in said and "\n" not in said


def test_a_folder_in_use_or_of_another_kind_is_refused(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "cells").mkdir(parents=True)
    with open(tmp_path / "out" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert command() == 2
    assert "is in use by another benchmark" in capsys.readouterr().err
    (tmp_path / "out" / "cells" / "eta0-sync-seed0.json").write_text("{}")
    assert command() == 2
    assert "holds cells without their settings.json" in capsys.readouterr().err
    (tmp_path / "out" / "settings.json").write_text("{")
    assert command() == 2
    assert "settings.json cannot be read" in capsys.readouterr().err


def test_a_results_folder_that_cannot_be_one(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    assert command() == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_damaged_or_misnamed_cell_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    cell = Cell(0, 4, "tis")
    assert load(tmp_path, cell) is None
    save(tmp_path, outcome(0, 4, "tis", 0.5))
    assert load(tmp_path, cell) == outcome(0, 4, "tis", 0.5)
    cell_file(tmp_path, cell).rename(cell_file(tmp_path, Cell(1, 4, "tis")))
    with pytest.raises(UserError, match="holds the cell eta4-tis-seed0: remove it"):
        load(tmp_path, Cell(1, 4, "tis"))
    cell_file(tmp_path, cell).write_text('{"seed": 0')
    with pytest.raises(UserError, match=r"cannot be read .* remove it"):
        load(tmp_path, cell)


# --- the picture ------------------------------------------------------------------------------------------------------------


def test_the_plot_shows_every_correction(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [outcome(seed, 0, "sync", 0.9) for seed in (0, 1)]
    runs += [outcome(seed, age, c, 0.8 - 0.1 * seed) for seed in (0, 1) for age in (4, 8) for c in CORRECTIONS]
    svg, png = learning_plot.plot(summarize(runs), tmp_path)
    assert svg.read_text().startswith("<?xml") and png.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert learning_plot.plot(summarize([outcome(0, 0, "sync", 0.9)]), tmp_path) == [] and not list(tmp_path.iterdir())
