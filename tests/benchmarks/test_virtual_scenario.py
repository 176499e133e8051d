"""Scenario files: what is wrong with one is a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from virtual_world import SMALL

from benchmarks.tails import heaviness
from benchmarks.virtual.distributions import Draws
from benchmarks.virtual.scenario import build_world, load_world, merged
from segue.errors import UserError

SCENARIOS = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "scenarios").glob("*.toml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_of_ours_loads(path: Path) -> None:
    world = load_world(path)
    assert world.scenario.name == path.stem and world.scenario.about


def test_the_config_is_segues_own_with_lengths_in_units() -> None:
    world = build_world(merged(SMALL, {"unit": 8}), "it")
    assert world.config.rollout.max_tokens == 250 and world.config.rollout.max_turn_tokens == 13
    assert world.config.envpool.workers * world.config.envpool.instances >= 24
    assert world.config.queue.groups == 6 and world.config.eval.tasks == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"engine": {"decode_second": 1.0}}, "unknown key engine.decode_second: did you mean engine.decode_seconds?"),
        ({"env": {"step_seconds": {"kin": "constant"}}}, "unknown key env.step_seconds.kin: did you mean"),
        ({"weather": "fine"}, "unknown key weather: remove it"),
        ({"engine": {"decode_seconds": "fast"}}, "sets engine.decode_seconds (Expected float, got str): correct it"),
        ({"env": {"step_seconds": {"kind": "cauchy"}}}, "sets env.step_seconds.kind"),
        ({"engine": {"decode_seconds": -1.0}}, "engine.decode_seconds = -1.0: set it to 0 or more"),
        ({"env": {"error": 1.5}}, "env.error = 1.5, which is a probability"),
        ({"engine": {"kv_tokens": 100}}, "engine.kv_tokens = 100, but an episode may have 2000 tokens"),
        ({"env": {"step_seconds": {"kind": "pareto", "spread": 0.9}}}, "which has no mean: set the tail index above 1"),
        ({"env": {"step_seconds": {"kind": "empirical"}}}, "is empirical and names no file"),
        ({"env": {"step_seconds": {"kind": "empirical", "file": "none.txt"}}}, "cannot be read from"),
        ({"workload": {"turns": {"group_share": 0.8, "episode_share": 0.4}}}, "shares of the variance 0.8 and 0.4"),
        ({"config": {"batch": {"groups": 0}}}, "[config] sets batch.groups = 0"),
        ({"config": {"batch": {"group": 4}}}, "did you mean batch.groups?"),
        ({"config": {"task": {"env": "x"}}}, "sets config.task, which virtual time has no use for"),
        ({"config": {"queue": {"groups": 1}}}, "sets queue.groups = 1, but staleness.max_age = 2"),
        ({"unit": 0}, "sets unit = 0: set it to 1 or more"),
        (
            {"engine": {"decode_seconds": 0.0, "decode_seconds_per_request": 0.0, "decode_seconds_per_kv_token": 0.0}},
            "gives decoding no cost",
        ),
    ],
)
def test_a_mistake_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        build_world(merged(SMALL, change), "small.toml")
    told = str(error.value)
    assert told.startswith("small.toml") and sentence in told and told[-1] in ".?" and "\n" not in told


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no scenario file"):
        load_world(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(UserError, match="not a readable TOML file"):
        load_world(tmp_path / "bad.toml")
    (tmp_path / "short.toml").write_text('name = "short"\n')
    with pytest.raises(UserError, match=r"is incomplete \(Object missing required field config\)"):
        load_world(tmp_path / "short.toml")


def test_empirical_values_are_read_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "latencies.txt").write_text("1.0\n2.5\n0.5\n")
    data = merged(SMALL, {"env": {"step_seconds": {"kind": "empirical", "file": "latencies.txt", "mean": 0.0, "spread": 0.0}}})
    world = build_world(data, "it", tmp_path)
    assert world.values == {"env.step_seconds": (1.0, 2.5, 0.5)}
    (tmp_path / "latencies.txt").write_text("1.0\n-2\n")
    with pytest.raises(UserError, match="none of them negative"):
        build_world(data, "it", tmp_path)


def test_a_thousand_gpus_are_as_many_and_train_ten_thousand_episodes_of_ten_turns_with_a_heavy_tail() -> None:
    world = load_world(next(path for path in SCENARIOS if path.stem == "thousand_gpus"))
    config, turns = world.config, world.scenario.workload.turns
    assert config.rollout.nodes * world.scenario.engine.gpus == 1000
    assert config.steps * config.batch.groups * config.group.size >= 10_000
    drawn = Draws(turns, 0)
    assert drawn.mean() >= 10.0 and heaviness(turns, config.batch.groups * config.group.size) >= 5.0


def test_scenarios_of_ours_are_found_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.virtual.__main__ import parse

    monkeypatch.chdir(tmp_path)
    assert parse(["thousand_gpus"]).scenario in SCENARIOS and parse(["mine.toml"]).scenario == Path("mine.toml")
