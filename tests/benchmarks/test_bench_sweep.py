"""Sweeps: what is refused, what a sweep in virtual time writes, and what arms must do to each other."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from virtual_world import TINY

from benchmarks import env_latency, page, plots, straggler, suite_latency, sweep_real, sweep_table, sweep_virtual
from benchmarks.arms import ARMS, chosen
from benchmarks.results_folder import Kept
from benchmarks.sweep import parser, plan
from benchmarks.sweep_figures import Point
from benchmarks.sweep_plan import Plan, Sweep
from benchmarks.sweep_real import _lines
from benchmarks.sweep_virtual import batch_tokens, learner_scale, measure_seed, setup, window_of
from benchmarks.tails import heaviness, with_heaviness
from benchmarks.virtual import measure
from benchmarks.virtual.distributions import Distribution, Draws
from benchmarks.virtual.learner import Work
from benchmarks.virtual.measure import generation_ceiling
from benchmarks.virtual.scenario import World, build_world, load_world, merged
from benchmarks.virtual.world import Ran, play
from envpool.suites.latency import LatencyArgs, draw_turns
from segue.config import Config, load_config
from segue.errors import UserError
from segue.metrics.samples import total

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "latency.toml"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(tomli_w.dumps(TINY))
    return path


def asked(sweep: Sweep, scenario: Path, *arguments: str) -> Plan:
    out = scenario.parent / "out"
    return plan(sweep, parser(sweep, None).parse_args(["--scenario", str(scenario), "--out", str(out), *arguments]))


# --- a whole sweep ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_sweep_writes_figures_plots_and_a_page_that_fetches_nothing(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = scenario.parent / "out"
    arguments = ["--scenario", str(scenario), "--out", str(out), "--points", "5", "--spreads", "1.5", "--steps", "10"]
    assert env_latency.main([*arguments, "--arms", "sync", "async_recompute"]) == 0
    told = json.loads((out / "results.json").read_text())
    assert told["benchmark"] == "env_latency" and told["time"] == "virtual" and told["seeds"] == [0]
    assert {"machine", "versions", "command", "date", "setup", "sweep", "arms"} <= set(told)
    assert set(told["arms"]) == {"sync", "async_recompute"} and told["setup"]["scenario"]["assumptions"] == ["A <small> world."]
    (point,) = told["points"]
    assert (point["x"], point["spread"]) == (5.0, 1.5)
    assert point["balanced"] == (0.8 <= point["balance"] <= 1.25)
    ours, theirs = point["arms"]["async_recompute"], point["arms"]["sync"]
    # Latencies of five times the generation, with a heavy tail: whoever waits for the slowest of a batch loses by a wide margin.
    assert ours["speedup"] == pytest.approx(ours["tokens_per_second"] / theirs["tokens_per_second"]) and ours["speedup"] > 1.5
    assert theirs["speedup"] == 1.0 and theirs["staleness_max"] == 0 and theirs["wasted_share"] == pytest.approx(0.0)
    assert theirs["reprefill_share"] < ours["reprefill_share"] and 0 < ours["staleness_max"] <= 2
    assert theirs["efficiency"] < ours["efficiency"]
    ceiling = min(point["generation_ceiling"], point["training_ceiling"])
    assert ours["efficiency"] == pytest.approx(ours["tokens_per_second"] / ceiling)

    text = (out / "index.html").read_text()
    names = ("speedup", "efficiency", "idle", "staleness")
    assert text.count("<svg role='img'") == len(names)
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.svg").read_text().startswith("<?xml")
    assert not re.search(r"""\b(src|href)\s*=\s*(?!["']?#)|url\((?!#)|@import|<script|<link|<img""", text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)"]+)\)', text)) and all(
        (a or b) in ids for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)"]+)\)', text)
    )
    assert (
        "A &lt;small&gt; world." in text and "async with partial rollouts" in text and "python -m benchmarks.env_latency" in text
    )
    assert "mean latency of a step ÷ generation time of a turn" in text  # an axis with its unit
    printed = capsys.readouterr().out
    assert "latency/generation 5, spread 1.5: generation alone" in printed and "async_recompute" in printed


@pytest.mark.processes
def test_partial_rollouts_win_over_whole_episodes_where_episodes_have_a_heavy_tail(scenario: Path, tmp_path: Path) -> None:
    """With episodes that finish before an update, nodes run empty for the longest one; a heavier tail costs sync more."""
    asks = asked(
        straggler.SWEEP, scenario, "--points", "1", "4", "--arms", "sync", "async_episode", "async_recompute", "--steps", "12"
    )
    shared = setup(asks)
    assert shared["batch_groups"] == 2 and shared["steps"] == 12 and shared["learner"] == "sized for each point"
    rates = {}
    for point in asks.points:
        found = measure_seed(asks, point, 0, Kept(tmp_path))
        rates[point.x] = {name: run.figures.tokens_per_second for name, run in found.runs.items()}
        assert found.settings["workload"]["turns"]["mean"] == pytest.approx(4.0, rel=0.1)
    assert rates[4.0]["async_recompute"] > 1.3 * rates[4.0]["sync"]
    assert rates[4.0]["async_recompute"] > rates[4.0]["async_episode"]
    gain = {x: rate["async_recompute"] / rate["sync"] for x, rate in rates.items()}
    assert gain[4.0] > gain[1.0]


# --- points -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [1.0, 2.0, 8.0, 20.0])
def test_a_tail_is_as_heavy_as_asked_and_keeps_the_mean(target: float) -> None:
    spec = Distribution(kind="lognormal", mean=6.0, spread=0.1, low=1.0, high=400.0)
    tail = with_heaviness(spec, target, 128, "it")
    assert heaviness(tail, 128) == pytest.approx(target, rel=1e-3)
    assert Draws(tail, 0).mean() == pytest.approx(6.0, rel=0.01)
    longest = []
    for batch in range(300):
        draws = Draws(tail, 7)
        longest.append(max(draws.draw(batch, member, 0) for member in range(128)))
    assert sum(longest) / len(longest) / 6.0 == pytest.approx(target, rel=0.1)


@pytest.mark.full
def test_the_base_points_are_balanced_by_the_files_themselves() -> None:
    """The learner's cost in a file is what sizing would set: its factor is 1 within the limits of a fair comparison."""
    small = {"config": {"batch": {"groups": 4}, "rollout": {"nodes": 1}}}  # a quarter of everything
    for sweep in (straggler.SWEEP, env_latency.SWEEP):
        world = load_world(sweep.scenario, merged(small, {"unit": 8}))
        learner = world.scenario.learner
        seconds = learner.step_seconds + learner.gather_seconds
        sampled, tokens = batch_tokens(world)
        training = 128 * sampled / (seconds + learner.seconds_per_token * 128 * tokens)
        assert 0.8 <= 4 * generation_ceiling(world) / training <= 1.25


def test_sizing_makes_training_as_fast_as_generation(scenario: Path) -> None:
    world = load_world(scenario)
    sampled, tokens = batch_tokens(world)
    learner = world.scenario.learner
    seconds = learner.step_seconds + learner.seconds_per_token * 8 * tokens + learner.gather_seconds
    assert learner_scale(world, 10.0) * seconds == pytest.approx(8 * sampled / 10.0)


@pytest.mark.parametrize("seed", range(3))
def test_every_loop_is_busy_to_the_end_of_the_ceiling_of_generation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heavy tail leaves many groups open, each with a straggler or two: admission must not end before the window does."""
    played: list[tuple[World, Ran]] = []

    def watched(world: World, marks: Collection[int], **how: Any) -> Ran:
        played.append((world, play(world, marks, **how)))
        return played[0][1]

    monkeypatch.setattr(measure, "play", watched)
    heavy = {"turns": {"kind": "lognormal", "mean": 4.0, "spread": 2.5, "low": 1.0, "high": 400.0}}
    rollout = {"max_turns": 400, "max_tokens": 40000, "max_episodes": 32, "slots": 32}
    more = {"config": {"seed": seed, "rollout": rollout}, "engine": {"kv_tokens": 1_000_000}}
    generation_ceiling(build_world(merged(merged(TINY, {"workload": heavy}), more), "the test's scenario"))
    [(world, ran)] = played
    last = max(ran.scrapes)
    assert len(ran.lines) == last < world.config.steps, "it ends with its window"
    assert total(ran.scrapes[last], "rollout", "segue_episodes_running") >= 30, "but for one that is being replaced"


def test_checkpoints_count_in_the_ceiling_of_training_as_in_an_arm() -> None:
    work = Work(tokens=100, ages=[], stats={"tokens_trained": 50}, starts=[], longest=50)
    never, third = (
        build_world(
            merged(TINY, {"config": {"checkpoint": {"every": every}}, "learner": {"checkpoint_seconds": 6.0}}),
            "the test's scenario",
        )
        for every in (0, 3)
    )
    seconds = 50 / measure.training_ceiling(never, [work])
    assert 50 / measure.training_ceiling(third, [work]) == pytest.approx(seconds + 2.0)


def test_a_latency_point_is_in_generation_times() -> None:
    world = load_world(env_latency.SWEEP.scenario)
    table = env_latency.virtual(world, Point(5.0, 1.0))["env"]["step_seconds"]
    assert table["kind"] == "lognormal" and table["spread"] == 1.0
    assert table["mean"] == pytest.approx(5 * 64 * (0.02 + 0.0002 * 32), rel=0.01)
    assert env_latency.virtual(world, Point(0.0, 1.0))["env"]["step_seconds"]["mean"] == 0.0


@pytest.mark.parametrize("sweep", [straggler.SWEEP, env_latency.SWEEP], ids=lambda sweep: sweep.name)
def test_the_defaults_are_possible_with_the_files_that_come_with_them(sweep: Sweep) -> None:
    """Every default point with every arm: `setup` refuses what cannot be run."""
    virtual, real = (plan(sweep, parser(sweep, None).parse_args(arguments)) for arguments in ([], ["--real"]))
    assert virtual.source == sweep.scenario and real.source.name == "balanced.toml"
    assert {point.x for point in virtual.points} == set(sweep.points) and max(sweep.points) == sweep.high
    assert virtual.arms == real.arms == list(ARMS.values())
    assert setup(virtual)["episodes_in_flight"] == 128
    assert sweep_real.setup(real)["batch_groups"] == 48


@pytest.mark.parametrize("sweep", [straggler.SWEEP, env_latency.SWEEP], ids=lambda sweep: sweep.name)
def test_real_points_are_overrides_of_the_config(sweep: Sweep) -> None:
    base = load_config(CONFIG)
    for x in sweep.points_real:
        for arm in ARMS.values():
            config = load_config(CONFIG, [*sweep.real(base, Point(x, 1.0), 0.05), *_lines(arm.tables(base, 1))])
            if sweep is env_latency.SWEEP:
                assert config.task.args["mean"] == pytest.approx(x * 0.05)
            else:
                assert config.task.args["mean"] == 0.3 and (config.task.args["spread"] > 0.0) == (x > 1.0)


# --- arms -------------------------------------------------------------------------------------------------------------------


def test_arms_share_all_but_what_they_are_about() -> None:
    base = load_config(CONFIG)
    configs: dict[str, Config] = {name: load_config(CONFIG, _lines(arm.tables(base, 2))) for name, arm in ARMS.items()}
    for config in configs.values():
        for table in ("task", "batch", "rollout", "envpool", "learner"):
            assert getattr(config, table).model_dump() == getattr(configs["sync"], table).model_dump()
        assert config.group.size == base.group.size and config.seed == base.seed
    assert {name: c.update.inflight for name, c in configs.items() if c.mode == "async" and "redundant" not in name} == {
        f"async_{way}": way for way in ("episode", "turn", "recompute", "keep")
    }
    assert {c.staleness.max_age for c in configs.values() if c.mode == "async"} == {4}
    assert configs["one_step_off"].staleness.max_age == 1 and configs["one_step_off"].update.inflight == "episode"
    assert configs["async_episode"].update.drain_seconds == base.rollout.wall_seconds


def test_redundant_arms_begin_with_more_members() -> None:
    assert [arm.name for arm in ARMS.values() if arm.redundant] == ["sync_redundant", "async_redundant"]
    base = load_config(CONFIG)
    assert ARMS["async_redundant"].tables(base, 3)["group"] == {"redundancy": 3} and "group" not in ARMS["sync"].tables(base, 3)
    with pytest.raises(UserError, match="There is no arm async_redundnt: known are sync"):
        chosen(["async_redundnt"])


# --- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--points", "30"], "--points 30 is out of range: give values between 1 and 20."),
        (["--points", "nan"], "--points nan is out of range: give values between 1 and 20."),
        (["--points"], "--points names no value: give some between 1 and 20, or leave it out."),
        (["--arms"], "A sweep without arms compares nothing: name some of sync"),
        (["--arms", "sync", "fast"], "There is no arm fast: known are sync"),
        (["--repeats", "0"], "--repeats 0 is too low: give 1 or more."),
        (["--steps", "0"], "--steps 0 is too low: give 1 or more."),
        (["--jobs", "0"], "--jobs 0 is too low: give 1 or more."),
        (["--no-ceilings"], "--no-ceilings is for sweeps with --real: add --real, or leave it out."),
        (["--config", "x.toml"], "--config is for sweeps with --real: add --real, or leave it out."),
        (["--real"], "--scenario is for sweeps in virtual time, not for --real: leave one of the two out."),
        (["--arms", "async_keep", "--steps", "5"], "5 steps leave no steady state with staleness.max_age = 2: use 8 or more."),
        (["--points", "20"], "--points 20: the longest of 8 cannot be 20 times the mean"),
        (["--set", "engine.decode_second=1"], "did you mean engine.decode_seconds?"),
        (["--set", "config.batch.group=1"], "did you mean batch.groups?"),
        (["--set", "staleness.max_age=2"], "--set staleness… goes into no part of a scenario"),
        (["--set", "workload.turns.spread=2"], "--set workload.turns.spread is what this sweep varies: choose --points"),
        (["--set", "workload.turns={ mean = 3 }"], "--set workload.turns is what this sweep varies: choose --points"),
        (["--set", "config.mode=sync"], "--set config.mode is what arms differ in: choose --arms"),
        (["--set", "config.seed=7"], "--set config.seed has an option of its own: give --seed in its place."),
        (["--set", "config.group.redundancy=3"], "give --redundancy in its place."),
        (["--set", "config.envpool.pools=0"], "envpool.pools"),
        (["--set", "config.rollout.nodes=many"], "rollout.nodes"),
        (["--scenario", "none.toml"], "There is no scenario file none.toml"),
    ],
)
def test_an_impossible_sweep_is_one_sentence(
    arguments: list[str], sentence: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standard = ["--scenario", str(scenario), "--out", str(scenario.parent / "out"), "--points", "2"]
    assert straggler.main([*standard, *arguments]) == 2
    told = capsys.readouterr().err.strip()
    assert sentence in told and "\n" not in told


def test_a_spread_out_of_range_and_a_config_of_another_suite_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert env_latency.main(["--out", str(tmp_path / "a"), "--spreads", "9"]) == 2
    assert "--spreads 9 is out of range: give values between 0 and 3." in capsys.readouterr().err
    arguments = ["--real", "--config", str(CONFIG.parent / "quickstart.toml"), "--out", str(tmp_path / "b")]
    assert straggler.main(arguments) == 2
    assert "sweep a config whose task.env is 'latency'." in capsys.readouterr().err


def test_what_points_decide_is_not_for_set_in_real_sweeps_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, words in (
        ("task.args.mean=3", "is what this sweep varies: choose --points and --spreads"),
        ("task.args={ mean = 3 }", "is what this sweep varies"),
        ("mode=sync", "is what arms differ in"),
        ("seed=3", "give --seed in its place"),
    ):
        assert env_latency.main(["--real", "--out", str(tmp_path / "a"), "--set", key]) == 2
        assert words in capsys.readouterr().err
    asks = plan(straggler.SWEEP, parser(straggler.SWEEP, None).parse_args(["--real", "--set", "task.args.mean=3"]))
    assert asks.overrides == ["task.args.mean=3"]  # whose tail is swept, its mean is given


def test_set_comes_before_a_point_and_before_the_learners_size(scenario: Path) -> None:
    """What a point makes of a file and --set stands."""
    sets = ["--set", "workload.turns.mean=3", "--set", "learner.step_seconds=30"]
    asks = asked(straggler.SWEEP, scenario, "--points", "2", *sets)
    base = sweep_virtual._world(asks, {}, 0)
    tables = straggler.virtual(base, asks.points[0])
    here = sweep_virtual._world(asks, merged(tables, {"learner": {"step_seconds": 7.0}}), 0)
    assert here.scenario.workload.turns == msgspec.convert(tables["workload"]["turns"], Distribution)
    assert (base.scenario.learner.step_seconds, here.scenario.learner.step_seconds) == (30.0, 7.0)


def test_without_latency_one_spread_stands_for_all(scenario: Path) -> None:
    asks = asked(env_latency.SWEEP, scenario, "--points", "0", "5", "--spreads", "0.5", "1")
    assert [(point.x, point.spread) for point in asks.points] == [(0.0, 0.5), (5.0, 0.5), (5.0, 1.0)]
    told = {"points": [{"x": point.x, "spread": point.spread} for point in asks.points]}
    panels = [plots.Panel("", "", spread, lambda arm: None) for spread in (0.5, 1.0)]
    assert [[point["x"] for point in plots._points(told, panel)] for panel in panels] == [[0.0, 5.0], [0.0, 5.0]]
    assert [point["spread"] for point in plots._points(told, panels[1])] == [0.5, 1.0]


def test_ceilings_of_another_engine_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--real", "--out", str(tmp_path / "a"), "--set", "rollout.engine=mine:build"]
    for sweep, more in ((straggler, []), (env_latency, ["--no-ceilings"])):
        assert sweep.main([*arguments, *more]) == 2
        assert "and generation alone is measured with the embedded engine" in capsys.readouterr().err


def test_no_draw_of_a_real_point_reaches_a_deadline_and_nothing_is_evaluated() -> None:
    asks = plan(env_latency.SWEEP, parser(env_latency.SWEEP, None).parse_args(["--real"]))
    base = sweep_real._config(asks, [])
    assert base.eval.tasks == 0
    for mean, spread in ((12.0, 1.0), (3.0, 2.0)):
        here = sweep_real._at(asks, base, Point(1.0, spread), mean)
        config = sweep_real._config(asks, here)
        args = suite_latency.suite_args(config)
        assert (args.mean, args.spread) == (mean, spread)
        one_in_a_million = mean * math.exp(4.75 * spread - spread**2 / 2)
        assert config.envpool.step_seconds > one_in_a_million
        assert config.rollout.wall_seconds > args.turns_max * one_in_a_million
    quick = sweep_real._config(asks, sweep_real._at(asks, base, Point(0.0, 0.0), 1.0))
    assert quick.envpool.step_seconds == base.envpool.step_seconds, "the config's own, where they are long enough"


@pytest.mark.parametrize("turns", [(2, 4, 0.0), (2, 9, 4.0), (1, 40, 12.0), (3, 5, 1.0)])
def test_mean_turns_are_those_that_the_suite_draws(turns: tuple[int, int, float]) -> None:
    args = LatencyArgs(turns_min=turns[0], turns_max=turns[1], turns_mean=turns[2])
    rng = random.Random(0)
    drawn = [draw_turns(args, rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(suite_latency.mean_turns(args), rel=0.02)


def test_without_matplotlib_a_sweep_says_so_before_it_runs(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.plots.find_spec", lambda name: None)
    out = scenario.parent / "out"
    assert straggler.main(["--scenario", str(scenario), "--points", "2", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert re.search(r"need the package matplotlib, which is not installed: .* -m pip install -e '.*\[plots\]' brings it", said)
    assert not out.exists()


# --- table and page ---------------------------------------------------------------------------------------------------------

ARM: dict[str, Any] = {
    "window_steps": 7,
    "tokens_per_second": 1234.0,
    "speedup": None,
    "step_seconds": 2.0,
    "idle_share": {"rollout": 0.25, "learner": 0.5, "envpool": 0.9, "scheduler": 1.0},
    "staleness_mean": None,
    "staleness_max": None,
    "staleness_bound": 4,
    "reprefill_share": 0.125,
    "wasted_share": 0.01,
    "length_bias": 0.98,
    "env_failures": 3,
    "efficiency": 0.5,
}


def test_the_table_has_every_figure_and_dashes_for_what_is_not_known() -> None:
    point = {"x": 2.0, "spread": None, "arms": {"sync": ARM}}
    heading, columns, row = sweep_table.point_text("longest/mean", point).split("\n")
    assert heading == "longest/mean 2: ceilings not measured"
    assert columns.split()[:3] == ["arm", "tokens/s", "speed-up"] and len(columns) == len(row)
    assert " ".join(row.split()) == "sync 1,234 – 0.500 7 2.00 25% 50% 90% 100% – / – of 4 12.5% 1.0% 0.980 3"


def test_a_window_of_few_steps_is_told_of_on_the_console_and_the_page() -> None:
    point = {"x": 2.0, "spread": None, "arms": {"sync": ARM, "async_keep": ARM | {"window_steps": 1}}}
    _, few, _, _, _ = sweep_table.point_text("longest/mean", point).split("\n")
    assert few.strip() == "figures of few steps (async_keep 1): give more --steps before you rely on them"


def test_a_point_out_of_balance_is_marked() -> None:
    ceilings = {"generation_ceiling": 2000.0, "training_ceiling": 1000.0, "balance": 2.0, "balanced": False}
    text = sweep_table.ceilings_text(ceilings)
    assert text == "generation alone 2,000, training alone 1,000 tokens/s, balance 2.00: NOT BALANCED (0.8 to 1.25)"
    assert "NOT" not in sweep_table.ceilings_text(ceilings | {"balance": 1.0, "balanced": True})


def test_plots_without_a_figure_are_left_out_and_ids_stay_apart(tmp_path: Path) -> None:
    arms = {"sync": ARM | {"efficiency": None, "speedup": 1.0}}
    document = {
        "arms": {"sync": {}},
        "sweep": {"axis": "x", "spread_label": "σ"},
        "points": [{"x": x, "spread": None, "arms": arms} for x in (1.0, 2.0)],
    }
    drawn = plots.draw(document, tmp_path)
    assert [plot.name for plot in drawn] == ["speedup", "idle"]
    assert len(plots.COLOURS) == len(plots.MARKERS) >= len(arms)
    inline = page.inline(drawn[0])
    assert inline.startswith("<svg role='img' aria-label='Speed-up over sync'") and "<metadata" not in inline
    assert all(name.startswith("speedup-") for name in re.findall(r'\bid="([^"]+)"', inline))


@pytest.mark.parametrize(("seeds", "bars"), [([0.9, 1.2], 2), ([0.9], 0)])
def test_a_bar_shows_the_seeds_from_least_to_greatest(seeds: list[float], bars: int, tmp_path: Path) -> None:
    arms = {"sync": ARM | {"efficiency": 1.0, "efficiencies": seeds}}
    document = {
        "arms": {"sync": {}},
        "sweep": {"axis": "x", "spread_label": "σ"},
        "points": [{"x": x, "spread": None, "arms": arms} for x in (1.0, 2.0)],
    }
    svg = next(plot.svg for plot in plots.draw(document, tmp_path) if plot.name == "efficiency")
    assert len(re.findall(r'id="LineCollection_\d+"', svg)) == bars


def test_the_window_leaves_out_what_a_heavy_tail_fills() -> None:
    world = load_world(straggler.SWEEP.scenario, {"config": {"steps": 40}})
    assert (window_of(world).warm, window_of(world).last) == (10, 34)
