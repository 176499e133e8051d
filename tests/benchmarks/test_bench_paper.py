"""Published rows: a tiny version of every scenario file plays with all of its arms; the table; what is refused."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from benchmarks import paper, paper_figures
from benchmarks.paper_figures import ENOUGH, NOT_PLAYED, best, reasons, row_document, table, unexplained
from benchmarks.paper_rows import FOLDER, Played, Row, load_row, load_rows, play_arm, window
from benchmarks.virtual.scenario import merged
from segue.errors import UserError

NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
TINY: dict[str, Any] = {
    "config": {
        "steps": 6,
        "batch": {"groups": 2},
        "group": {"size": 2},
        "rollout": {"nodes": 2, "max_episodes": 8, "slots": 8, "slice_tokens": 0},
    },
    "workload": {"turns": {"mean": 2.0}},
}
"""Over every row: long enough for a window under a bound of 1. `LONGER` is for a bound of 3."""
LONGER: dict[str, Any] = {"config": {"steps": 10}}


def arms(row: Row) -> dict[str, Played]:
    return {arm.name: play_arm(row, arm) for arm in row.paper.arms}


# --- the files --------------------------------------------------------------------------------------------------------------


def test_every_published_table_that_can_be_played_has_its_rows() -> None:
    rows = load_rows(None, {})
    assert [row.paper.table for row in rows] == ["P1", "P1", "P2", "P2", "P3", "P5", "P5", "P5"]
    for row in rows:
        scenario = row.world.scenario
        assert scenario.source and len(scenario.assumptions) >= 4, row.name
        assert row.paper.scale == 1.0 or row.paper.scale_why
        for arm in row.paper.arms:
            config = row.arm_world(arm).config
            assert config.batch.groups == row.world.config.batch.groups and config.group.size == row.world.config.group.size
            assert arm.kind == "beyond" or config.staleness.max_age <= row.paper.bound
    tolerances = {(row.paper.table, claim.tolerance, claim.absolute) for row in rows for claim in row.paper.claims}
    assert {("P1", 0.15, False), ("P2", 0.15, False), ("P5", 0.3, True)} <= tolerances


PUBLISHED: dict[str, tuple[float, ...]] = {
    "rollart_sigma_1": (1.23,),
    "rollart_sigma_10": (2.27,),
    "roll_flash_swe": (10.22 / 8.32, 8.32 / 7.66, 8.32 / 6.09, 6.09 / 5.65, 10.22 / 5.65),
    "roll_flash_alfworld": (13.37 / 8.44, 8.44 / 7.85, 8.44 / 5.87, 5.87 / 4.91, 13.37 / 4.91),
    "seer_moonlight": (22_386.0, 65_536.0),
    "staleness_queue_1": (1.26,),
    "staleness_queue_2": (3.09,),
    "staleness_queue_3": (1.92,),
}
"""What the papers say: ratios; hours of training over hours; tokens; versions."""


@pytest.mark.parametrize("name", NAMES)
def test_the_published_figures_are_those_of_the_papers_and_no_tolerance_is_wide(name: str) -> None:
    claims = load_row(FOLDER / f"{name}.toml").paper.claims
    assert [claim.published for claim in claims] == pytest.approx(PUBLISHED[name], rel=2e-3)
    assert all(claim.tolerance <= (0.3 if claim.absolute else 0.15) for claim in claims)
    assert all(claim.absolute == (claim.measure == "start_age") for claim in claims)


def test_one_choice_serves_both_end_points_of_p1() -> None:
    files = [tomllib.loads((FOLDER / f"rollart_sigma_{sigma}.toml").read_text()) for sigma in (1, 10)]
    for file in files:
        for key in ("name", "about"):
            del file[key]
        del file["paper"]["row"], file["paper"]["claims"][0]["published"], file["env"]["step_seconds"]["spread"]
    assert files[0] == files[1]


def test_asynchronous_arms_train_on_the_gpus_that_do_not_generate() -> None:
    for name in ("roll_flash_swe", "roll_flash_alfworld"):
        row = load_row(FOLDER / f"{name}.toml")
        whole = row.world
        for arm in row.paper.arms:
            world = row.arm_world(arm)
            generating, training = world.config.rollout.nodes, world.scenario.learner.gpus
            if world.config.mode == "async":
                assert generating + training == 16
            expected = whole.scenario.learner.step_seconds * 16 / training
            assert world.scenario.learner.step_seconds == pytest.approx(expected, rel=1e-3)


# --- playing ----------------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_version_of_a_row_plays_with_all_of_its_arms(name: str) -> None:
    row = load_row(FOLDER / f"{name}.toml", merged(TINY, LONGER) if name.startswith("staleness") else TINY)
    played = arms(row)
    told = row_document(row, played)
    assert set(told["arms"]) == {arm.name for arm in row.paper.arms}
    for arm in row.paper.arms:
        figures = told["arms"][arm.name]
        bound = row.arm_world(arm).config.staleness
        assert figures["step_seconds"] > 0.0 and figures["tokens_per_second"] > 0.0
        assert figures["training_share"] <= 1.0 + 1e-9, "no step is shorter than its training"
        assert bound.over_age == "train" or figures["staleness_max"] <= bound.max_age
        assert figures["mean_length"] <= figures["longest_length"]
    for claim in told["claims"]:
        assert claim["reproduced"] > 0.0 and claim["within"] == (abs(claim["error"]) <= claim["tolerance"])
    lines = table([told])
    assert lines[0][:2] == [row.paper.table, row.paper.row] and lines[0][6] in played
    assert len(lines) == len(row.paper.claims) + bool(row.paper.order)


@pytest.mark.processes
def test_interaction_by_batch_is_slower_than_by_trajectory_even_in_a_tiny_version() -> None:
    row = load_row(FOLDER / "rollart_sigma_10.toml", merged(TINY, {"config": {"steps": 3}, "workload": {"turns": {"mean": 6.0}}}))
    played = {name: play_arm(row, row.arm(name)) for name in row.paper.order}
    assert played["batch_level"].step_seconds > 1.1 * played["trajectory_level"].step_seconds


@pytest.mark.processes
def test_the_command_writes_results_plots_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    sets = ["--set", "config.steps=12", "--set", "config.batch.groups=2"]
    assert paper.main(["--only", "staleness_queue_3", "--out", str(out), "--jobs", "2", *sets]) == 0
    told = json.loads((out / "results.json").read_text())
    assert told["benchmark"] == "paper" and [row["name"] for row in told["rows"]] == ["staleness_queue_3"]
    (row,) = told["rows"]
    assert set(row["arms"]) == {"queue", "segue_keep", "segue_tighter"} and row["claims"][0]["published"] == 1.92
    text = (out / "index.html").read_text()
    assert text.count("<svg role='img'") == 2 and "Applied Compute" in text and "within tolerance" in text
    assert not re.search(r"""\b(src|href)\s*=\s*(?!["']?#)|url\((?!#)|@import|<script|<link|<img""", text)
    for name in ("claims", "arms"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "mean staleness, versions" in printed and "published  reproduced" in printed


@pytest.mark.full
def test_a_published_row_is_within_its_tolerance() -> None:
    row = load_row(FOLDER / "staleness_queue_3.toml")
    told = row_document(row, arms(row))
    assert [claim["within"] for claim in told["claims"]] == [True]


@pytest.mark.full
@pytest.mark.parametrize("name", ["rollart_sigma_1", "rollart_sigma_10"])
def test_the_trajectory_level_gain_is_within_its_tolerance(name: str) -> None:
    row = load_row(FOLDER / f"{name}.toml")
    played = {name: play_arm(row, row.arm(name)) for name in row.paper.order}
    assert row.paper.claims[0].within(paper_figures.reproduced(row.paper.claims[0], played))


@pytest.mark.full
@pytest.mark.parametrize("name", ["roll_flash_swe", "roll_flash_alfworld"])
def test_roll_flashs_arms_keep_their_order(name: str) -> None:
    row = load_row(FOLDER / f"{name}.toml")
    told = row_document(row, arms(row))
    assert told["order"]["holds"] and len(told["order"]["from_slow_to_fast"]) == 5
    assert not unexplained([told])


# --- the table --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def queue() -> tuple[Row, dict[str, Played]]:
    """A row that is cheap to play, and its arms."""
    row = load_row(FOLDER / "staleness_queue_3.toml", merged(TINY, {"config": {"steps": 12}}))
    return row, arms(row)


def faster(played: Played, factor: float, training: float) -> Played:
    return msgspec.structs.replace(played, step_seconds=played.step_seconds / factor, training_step_seconds=training)


def test_the_best_arm_is_enough_or_says_why_not(queue: tuple[Row, dict[str, Played]]) -> None:
    row, played = queue
    base = msgspec.structs.replace(played["queue"], step_seconds=100.0, training_step_seconds=50.0)
    slow = {name: msgspec.structs.replace(base, arm=name) for name in played}
    told = best(row, slow)
    assert told["ratio"] == 1.0 and not told["enough"] and told["room"] == 2.0 and row.paper.if_slower in told["reason"]
    told = best(row, slow | {"segue_keep": faster(slow["segue_keep"], 1.2, 50.0)})
    assert (told["arm"], told["enough"], told["reason"]) == ("segue_keep", True, "") and told["ratio"] >= ENOUGH
    bound = slow | {"queue": msgspec.structs.replace(base, training_step_seconds=95.0)}
    assert "Training alone takes 95% of the step of queue" in best(row, bound)["reason"]


def test_a_row_that_is_not_matched_stays_with_its_reason(queue: tuple[Row, dict[str, Played]]) -> None:
    row, played = queue
    off = played | {"queue": msgspec.structs.replace(played["queue"], start_age=1.92 + 0.31)}
    told = row_document(row, off)
    assert not told["claims"][0]["within"] and "NO (+0.31)" in table([told])[0][5]
    assert unexplained([told]) and "no reason is known" in reasons(told)[0]
    told["claims"][0]["reason"] = "because"
    assert not unexplained([told]) and reasons(told)[0] == "mean staleness, versions: because"
    near = row_document(row, played | {"queue": msgspec.structs.replace(played["queue"], start_age=1.92 - 0.29)})
    assert near["claims"][0]["within"] and not unexplained([near])


@pytest.mark.parametrize(
    ("seconds", "holds"), [((103.0, 102.0, 102.5), True), ((100.0, 100.9, 101.8), False), ((100.0, 101.5, 90.0), False)]
)
def test_an_order_that_creeps_upwards_does_not_hold(
    seconds: tuple[float, ...], holds: bool, queue: tuple[Row, dict[str, Played]]
) -> None:
    base = queue[1]["queue"]
    played = {str(i): msgspec.structs.replace(base, step_seconds=value) for i, value in enumerate(seconds)}
    order = paper_figures._order(list(played), played)
    assert order["holds"] is holds
    assert unexplained([{"claims": [], "order": order}]) is not holds


def test_what_is_not_simulated_stands_in_the_table() -> None:
    assert table([NOT_PLAYED])[0][5] == "no: not simulated" and "benchmarks.learning" in reasons(NOT_PLAYED)[0]


# --- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--only", "rollart_sigma_11"],
            "There is no published row rollart_sigma_11 (did you mean rollart_sigma_1?): name some of",
        ),
        (["--only"], "--only names no row: name some of"),
        (["--jobs", "0"], "--jobs 0 is too low: give 1 or more."),
        (["--set", "config.steps=4"], "4 steps leave no steady state with staleness.max_age = 3: use 10 or more."),
        (["--set", "config.batch.group=4"], "did you mean batch.groups?"),
        (["--set", "env.step_second=4"], "did you mean env.step_seconds?"),
        (["--set", "config.staleness.max_age=9"], "sets staleness.max_age = 9 above paper.bound = 3"),
    ],
)
def test_an_impossible_setting_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = [] if "--only" in arguments else ["--only", "staleness_queue_1"]
    assert paper.main([*only, "--out", str(tmp_path / "out"), *arguments]) == 2
    told = capsys.readouterr().err.strip()
    assert sentence in told and "\n" not in told
    assert not (tmp_path / "out").exists()


def test_a_results_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert paper.main(["--only", "staleness_queue_1", "--out", str(tmp_path)]) == 2
    assert "exists already and is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tabel": "P9"}, "unknown field `tabel`"),
        ({"order": ["queue", "other"]}, "names an arm 'other' that it does not have: known are queue"),
        ({"scale": 0.5}, "sets paper.scale = 0.5 without paper.scale_why: say why the figures do not depend on it."),
        ({"scale": 2.0}, "sets paper.scale = 2: set it above 0 and to at most 1."),
        ({"claims": []}, "has no [[paper.claims]]: add what was published."),
        ({"arms": []}, "needs a [[paper.arms]] of kind 'published' and one of kind 'segue'"),
        ({"bound": -1}, "sets paper.bound = -1: set it to 0 or more."),
    ],
)
def test_a_mistake_in_a_paper_table_is_one_sentence(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    data = tomllib.loads((FOLDER / "staleness_queue_1.toml").read_text())
    data["paper"] |= change
    path = tmp_path / "row.toml"
    path.write_text(tomli_w.dumps(data))
    with pytest.raises(UserError) as caught:
        load_row(path)
    assert sentence.replace("`", "") in str(caught.value).replace("`", "") and "\n" not in str(caught.value)


def test_a_scenario_without_a_paper_table_and_a_barrier_out_of_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no \[paper\] table: add what was published"):
        load_row(FOLDER.parent / "straggler.toml")
    data = tomllib.loads((FOLDER / "rollart_sigma_1.toml").read_text())
    data["config"]["rollout"]["max_episodes"] = 4
    path = tmp_path / "row.toml"
    path.write_text(tomli_w.dumps(data))
    with pytest.raises(UserError, match="needs mode = 'sync' and a place for each of its 512 episodes, not 256 in mode 'sync'"):
        load_row(path)


def test_the_first_step_of_a_synchronous_run_is_not_measured() -> None:
    row = load_row(FOLDER / "rollart_sigma_1.toml")
    steps = window(row.world)
    assert (steps.warm, steps.last) == (1, 2)
