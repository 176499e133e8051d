"""The summary adds up to what was put in; the line and the table show it; an incomplete run says so."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from segue.errors import UserError
from segue.files import JsonLines, plain, write_json
from segue.metrics import ActivityClock, Metrics, StateClock
from segue.metrics.vocabulary import PREFILL_CAUSES, ROLLOUT_PRECEDENCE, STATES
from segue.report import (
    EpisodeCounts,
    EvalResult,
    RunFacts,
    WeightSyncFigures,
    build_summary,
    print_summary,
    step_line,
    step_text,
    summary_table,
)
from segue.report.read import read_report
from segue.report.steps import age_histogram, age_max, age_mean, age_quantile, without_seconds
from segue.report.table import rows
from segue.rundir import RunDir

ISSUE_KEYS: dict[str, Any] = {
    "mode": None,
    "steps": None,
    "attempts": None,
    "wall_seconds": None,
    "tokens": {"generated", "trained", "masked_age"},
    "staleness": {"bound", "mean", "p99", "max", "multi_version_ratio"},
    "episodes": {"admitted", "finished", "trained", "states", "dropped", "failed", "paused", "resumed"},
    "prefill": {
        "first", "turn", "block", "weight_update", "migration", "preemption", "eviction", "cached", "engine_total"
    },
    "reprefill": {
        "updates", "inflight", "coalesced", "tokens", "seconds", "tokens_per_update", "seconds_per_update",
        "tokens_per_trained_token", "rollout_share",
    },
    "roles": None,
    "weight_sync": {"updates", "bytes", "transfer_seconds_mean", "pause_seconds_mean"},
    "logprob_gap": {"mean", "max"},
    "eval": {"before", "after"},
}  # fmt: skip


def line(step: int, ages: list[int], **stats: float) -> dict[str, Any]:
    made = step_line(
        step,
        elapsed_seconds=1.5 * (step + 1),
        step_seconds=1.5,
        wait_seconds=0.2,
        version=step + 1,
        queue_groups=3,
        in_flight=96,
        ages=ages,
        reprefill={"tokens": 120, "seconds": 0.25, "updates": step, "coalesced": 0, "inflight": "recompute", "share": 0.1},
        stats={"loss": 0.01, "tokens_trained": float(sum(ages)), **stats},
    )
    return json.loads(json.dumps(plain(made)))  # type: ignore[no-any-return]


LINES = [
    line(0, [100], reward_mean=0.25, info_success=0.2, tokens_masked_age=0.0, trajectories_trained=8.0,
         trajectories_multi_version=0.0, logprob_gap_mean=1e-5, logprob_gap_max=3e-5, logprob_gap_tokens=100.0),
    line(1, [60, 30, 10], reward_mean=0.5, info_success=0.4, tokens_masked_age=7.0, trajectories_trained=8.0,
         trajectories_multi_version=4.0, logprob_gap_mean=4e-5, logprob_gap_max=5e-5, logprob_gap_tokens=50.0,
         kept_fraction=float("nan"), grad_norm=1.5),
]  # fmt: skip

EPISODES = EpisodeCounts(
    admitted=40,
    finished=33,
    trained=16,
    states={"pending": 2, "leased": 5, "queued": 16, "trained": 16, "dropped": 1},  # 40 in all
    dropped={"stale": 1},
    failed={},
    paused=6,
    resumed=5,
)


def facts(**changes: Any) -> RunFacts:
    time = [0.0]
    rollout, metrics = ActivityClock(ROLLOUT_PRECEDENCE, lambda: time[0]), Metrics("rollout", envs=("a",))
    learner = StateClock(STATES["learner"], lambda: time[0])
    rollout.begin("generate")
    learner.enter("wait_batch")
    time[0] += 6.0
    rollout.end("generate")
    rollout.begin("wait_env")
    learner.enter("compute")
    time[0] += 2.0
    for index, cause in enumerate(PREFILL_CAUSES):
        metrics.add("segue_prefill_tokens_total", 10 * (index + 1), cause=cause)
        metrics.add("segue_prefill_seconds_total", 0.1 * (index + 1), cause=cause)
    metrics.add("segue_engine_prefill_tokens_total", 280)
    metrics.add("segue_cached_tokens_total", 500)
    metrics.add("segue_decode_tokens_total", 111)
    snapshot = metrics.snapshot()
    given: dict[str, Any] = {
        "mode": "async",
        "bound": 4,
        "wall_seconds": 12.3456,
        "lines": LINES,
        "episodes": EPISODES,
        "weight_sync": WeightSyncFigures(3, 3000, 4, 0.8, 6, 0.03),
        "node_updates": {"recompute": 1, "keep": 1},
        "coalesced": {"reprefill": 3},
        "metrics": {"rollout-0": snapshot, "rollout-1": snapshot, "learner-0": Metrics("learner").snapshot()},
        "states": {"rollout-0": rollout.seconds(), "rollout-1": rollout.seconds(), "learner-0": learner.seconds()},
        "evals": {"before": EvalResult(0.25, 256, 1), "after": EvalResult(0.75, 256)},
        "notes": ("one",),
    }
    return RunFacts(**(given | changes))


def test_the_summary_has_every_key_of_the_issue_and_is_json() -> None:
    summary = build_summary(facts())
    for key, parts in ISSUE_KEYS.items():
        assert key in summary
        if parts is not None:
            assert parts <= set(summary[key]), key
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    for figures in summary["roles"].values():
        assert set(figures) == {"busy_ratio", "states"}


def test_redundancy_says_how_short_trained_episodes_are_at_least() -> None:
    """8 trajectories of 10 tokens each were trained, and 2 dropped that had 30 by then: 80 ÷ 8 over 140 ÷ 10."""
    assert build_summary(facts())["redundancy"] == {"episodes": 0, "tokens": 0, "length_bias_at_most": None}
    batches = [LINES[0] | {"trajectories": 4.0, "tokens_generated": 40.0, "redundant_episodes": 1, "redundant_tokens": 30}] * 2
    summary = build_summary(facts(lines=batches))
    assert summary["redundancy"] == {"episodes": 2, "tokens": 60, "length_bias_at_most": 0.714286}
    assert dict(rows(summary))["redundant"].startswith("2 episodes dropped with 60 tokens; trained ones are at most 0.71 times")
    known = {key: value for key, value in LINES[0].items() if not key.startswith("redundant")}
    assert build_summary(facts(lines=[known]))["redundancy"]["episodes"] == 0, "lines of an older version"


def test_the_figures_are_the_facts() -> None:
    summary = build_summary(facts())
    assert (summary["mode"], summary["steps"], summary["wall_seconds"]) == ("async", 2, 12.346)
    assert summary["tokens"] == {"generated": 222, "trained": 200, "masked_age": 7}
    assert summary["staleness"] == {"bound": 4, "mean": 0.25, "p99": 2, "max": 2, "multi_version_ratio": 0.25}
    assert summary["episodes"]["admitted"] == sum(summary["episodes"]["states"].values()) == 40
    assert summary["prefill"]["first"] == 20 and summary["prefill"]["eviction"] == 140
    assert sum(summary["prefill"][cause] for cause in PREFILL_CAUSES) == summary["prefill"]["engine_total"] == 560
    assert summary["prefill"]["cached"] == 1000
    assert summary["reprefill"] == {
        "updates": 2, "inflight": {"recompute": 1, "keep": 1}, "coalesced": {"reprefill": 3},
        "tokens": 80, "seconds": 0.8, "tokens_per_update": 40.0, "seconds_per_update": 0.4,
        "tokens_per_trained_token": 0.4, "rollout_share": 0.05,
    }  # fmt: skip
    text = dict(rows(summary))
    assert text["re-prefill"] == (
        "each weight update cost 40 re-prefilled tokens and 0.400 s of rollout time (2 updates: 80 tokens, 0.8 s, 5.0% of it)"
    )
    assert ("", "updates: recompute 1, keep 1; coalesced: reprefill 3") in list(rows(summary))
    assert summary["roles"]["rollout"]["busy_ratio"] == 0.75 and summary["roles"]["learner"]["busy_ratio"] == 0.25
    assert summary["roles"]["rollout"]["states"]["generate"] == 12.0
    assert set(summary["roles"]) == {"rollout", "learner"}
    assert summary["weight_sync"] == {
        "updates": 3, "bytes": 3000, "transfer_seconds_mean": 0.2, "pause_seconds_mean": 0.005,
    }  # fmt: skip
    assert summary["logprob_gap"]["mean"] == pytest.approx(2e-5)
    assert summary["logprob_gap"]["max"] == 5e-5 and summary["logprob_gap"]["tokens"] == 150
    assert summary["eval"] == {
        "before": {"success": 0.25, "n": 256, "failed": 1}, "after": {"success": 0.75, "n": 256, "failed": 0},
    }  # fmt: skip
    assert summary["notes"] == ["one"]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"episodes": replace(EPISODES, admitted=41)}, "41 episodes were admitted, but the states hold 40."),
        ({"episodes": replace(EPISODES, dropped={})}, "1 episodes are dropped, but their reasons add up to 0."),
        ({"episodes": replace(EPISODES, failed={"env": 2})}, "0 episodes are failed, but their reasons add up to 2."),
        ({"episodes": replace(EPISODES, resumed=7)}, "7 requests were resumed, but only 6 were paused."),
        ({"bound": 1}, "A token of age 2 was trained, above staleness.max_age = 1."),
        ({"metrics": {"rollout-0": {'segue_prefill_tokens_total{cause="turn"}': 5.0, "segue_engine_prefill_tokens_total": 6.0}}},
         "5 prefilled tokens have a cause, but the engines counted 6."),
    ],
)  # fmt: skip
def test_figures_that_contradict_each_other_are_noted(changes: dict[str, Any], note: str) -> None:
    assert build_summary(facts(**changes))["notes"] == ["one", note]


def test_what_is_not_known_is_null_and_not_zero() -> None:
    empty = RunFacts("sync", 0, 1.0, [], EpisodeCounts())
    summary = build_summary(empty)
    assert summary["staleness"] == {"bound": 0, "mean": None, "p99": None, "max": None, "multi_version_ratio": None}
    assert summary["logprob_gap"] == {"mean": None, "max": None, "tokens": 0, "probe_max": None}
    assert summary["weight_sync"]["pause_seconds_mean"] is None and summary["roles"] == {}
    assert summary["eval"] == {"before": None, "after": None}


def test_the_probes_largest_gap_is_over_all_nodes_and_unknown_where_none_was_probed() -> None:
    metrics = {}
    for rank, gap in enumerate((3e-6, 7e-6)):
        metrics[f"rollout-{rank}"] = Metrics("rollout", envs=("a",))
        metrics[f"rollout-{rank}"].set("segue_weight_probe_gap_max_nats", gap)
        metrics[f"rollout-{rank}"].set("segue_weight_probe_gap_nats", 1e-6)
        metrics[f"weightsync-rollout-{rank}"] = Metrics("weightsync")

    def found() -> float | None:
        taken = {target: registry.snapshot() for target, registry in metrics.items()}
        return build_summary(facts(metrics=taken))["logprob_gap"]["probe_max"]  # type: ignore[no-any-return]

    assert found() is None
    metrics["weightsync-rollout-1"].observe("segue_weight_sync_seconds", 0.01, phase="probe")
    assert found() == 7e-6


def test_the_weight_sync_target_of_a_node_is_weight_syncs_and_not_the_nodes() -> None:
    states = {"weightsync-rollout-0": {"wait_version": 3.0, "load": 1.0}, "rollout-0": {"generate": 4.0}}
    roles = build_summary(facts(states=states))["roles"]
    assert roles["weightsync"]["busy_ratio"] == 0.25 and roles["rollout"]["busy_ratio"] == 1.0


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 60), max_size=6), max_size=5))
def test_ages_agree_with_numpy_over_every_single_token(histograms: list[list[int]]) -> None:
    tokens = np.array([age for h in histograms for age, n in enumerate(h) for _ in range(n)])
    counts = age_histogram([{"ages": h} for h in histograms])
    if len(tokens) == 0:
        assert age_mean(counts) is age_max(counts) is age_quantile(counts, 0.99) is None
        return
    assert age_mean(counts) == pytest.approx(tokens.mean())
    assert age_max(counts) == tokens.max()
    assert age_quantile(counts, 0.99) == np.quantile(tokens, 0.99, method="inverted_cdf")


def test_the_counts_come_from_the_schedulers_status_and_nothing_may_lack() -> None:
    status = {"admitted": 1, "finished": 1, "trained": 0, "states": {"queued": 1}, "dropped": {}, "failed": {}, "paused": 0}
    with pytest.raises(KeyError, match="resumed"):
        EpisodeCounts.from_status(status)
    assert EpisodeCounts.from_status(status | {"resumed": 2, "more": 1}).resumed == 2
    figures = {"updates": 2.0, "bytes": 10.0, "transfers": 2.0, "transfer_seconds": 0.5, "loads": 4.0, "pause_seconds": 0.1}
    assert WeightSyncFigures.from_status(figures | {"gather_seconds": 1.0}) == WeightSyncFigures(2, 10, 2, 0.5, 4, 0.1)
    with pytest.raises(KeyError, match="loads"):
        WeightSyncFigures.from_status({k: v for k, v in figures.items() if k != "loads"})


# --- the line -------------------------------------------------------------------------------------------------------


def test_fields_of_a_line_have_a_fixed_order_and_statistics_may_not_overwrite_them() -> None:
    assert list(LINES[0])[:16] == [
        "step", "elapsed_seconds", "step_seconds", "wait_seconds", "version", "queue_groups", "in_flight", "ages",
        "reprefill_tokens", "reprefill_seconds", "updates", "updates_coalesced", "inflight",
        "redundant_episodes", "redundant_tokens", "loss",
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="version"):
        line(0, [1], version=3.0)


def test_without_seconds_two_runs_can_be_compared() -> None:
    slower = LINES[0] | {"elapsed_seconds": 99.0, "step_seconds": 9.0, "wait_seconds": 8.0}
    assert without_seconds(slower) == without_seconds(LINES[0])
    assert without_seconds(LINES[0] | {"loss": 0.02}) != without_seconds(LINES[0])


def test_the_console_line_has_fixed_fields_and_columns() -> None:
    assert step_text(LINES[1], 60) == (
        "step  2/60  seconds   1.5  reward  0.500  success 0.400  age 0.50/2  tokens    100  kept     –  loss   0.0100  "
        "gap 5.0e-05  norm   1.50  queue   3  in flight   96"
    )
    bare = step_text({"step": 9, "ages": []}, 60)
    names = [part for part in bare.split() if part.isalpha()]
    assert names == [part for part in step_text(LINES[0], 60).split() if part.isalpha()]
    assert len(bare) == len(step_text(LINES[0], 60)) == len(step_text(LINES[1], 60))


# --- the table and the report ---------------------------------------------------------------------------------------


def rendered(summary: dict[str, Any]) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(summary, "Run demo"))
    return console.export_text()


def test_a_table_that_goes_to_a_file_is_neither_wrapped_nor_padded() -> None:
    summary = build_summary(facts()) | {"notes": ["a note of many words " * 20 + "256.3 / s"]}
    file = io.StringIO()
    print_summary(summary, "Run demo", file)
    lines = file.getvalue().splitlines()
    assert lines[0] == "Run demo" and len(lines) == 1 + len(list(rows(summary)))
    assert lines[-1].startswith("note ") and lines[-1].endswith("256.3 / s")
    assert all(line == line.rstrip() for line in lines)


def test_after_a_resume_each_figure_names_the_attempts_it_covers() -> None:
    shown = dict(rows(build_summary(facts(attempts=2))))
    assert shown["run"].endswith(" s, 2 attempts together")
    assert " generated in the last attempt, 200 trained" in shown["tokens"]
    once = dict(rows(build_summary(facts())))
    assert "attempt" not in once["run"] + once["tokens"]


def test_an_evaluation_alone_shows_what_it_found() -> None:
    summary = build_summary(facts(evals={"eval": EvalResult(0.988, 256, 2)}))
    assert list(rows(summary))[:2] == [("success", "0.988"), ("tasks", "256 held out, 2 failed")]
    assert all(subject == "note" for subject, _ in list(rows(summary))[2:])


def test_the_table_shows_the_figures() -> None:
    text = rendered(build_summary(facts()))
    for words in (
        "Run demo",
        "async, 2 steps in 12.3 s",
        "before training 0.250 (n = 256), after training 0.750 (n = 256)",
        "mean 0.25, p99 2, max 2 of at most 4 steps; 25.0% of trained trajectories",
        "dropped: stale 1",
        "eviction 140",
        "busy 75%: generate 12.0 s, wait_env 4.0 s",
        "3 updates, 3,000 bytes",
        "over 150 tokens",
        "note",
    ):
        assert words in text, words
    assert "failed:" not in text


def test_an_empty_summary_can_be_shown() -> None:
    assert "before training –, after training –" in rendered(build_summary(RunFacts("sync", 0, 1.0, [], EpisodeCounts())))


CONFIG = 'mode = "async"\nsteps = 5\n[task]\nenv = "latency"\n[warmstart]\n'


def test_a_finished_run_reports_its_summary(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", CONFIG)
    write_json(run.summary, build_summary(facts()))
    assert read_report(run.path) == (build_summary(facts()), "")


def test_an_incomplete_run_says_so_and_shows_what_the_steps_tell(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "demo", CONFIG)
    run.unlock()
    summary, sentence = read_report(run.path)
    assert summary["steps"] == 0 and "0 of 5 steps" in sentence
    with JsonLines(run.metrics) as lines:
        for one in LINES:
            lines.append(one)
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 2, "los')
    summary, sentence = read_report(run.path)
    assert sentence == (
        f"The run in {run.path} is not complete: 2 of 5 steps are trained, and the figures are those of the steps alone "
        "(it has no checkpoint to go on from yet)."
    )
    (run.checkpoints / "step_2").mkdir()
    (run.checkpoints / "step_2" / "COMPLETE").touch()
    run.lock()
    assert read_report(run.path)[1] == (
        f"The run in {run.path} goes on: 2 of 5 steps are trained, and the figures are those of the steps alone."
    )
    run.unlock()
    assert read_report(run.path)[1].endswith("those of the steps alone (a stopped run goes on with --resume).")
    assert summary["incomplete"] and summary["tokens"] == {"generated": None, "trained": 200, "masked_age": 7}
    assert summary["staleness"]["bound"] == 4 and summary["wall_seconds"] == 3.0
    text = rendered(summary)
    assert "– generated, 200 trained" in text and "episodes" not in text


def test_what_is_no_run_or_no_summary_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run directory"):
        read_report(tmp_path)
    run = RunDir.create(tmp_path / "demo", CONFIG)
    for content in ("{", "[]"):
        run.summary.write_text(content)
        with pytest.raises(UserError, match=r"summary.json .*remove it to see the figures of the steps"):
            read_report(run.path)


def test_a_figure_that_is_no_number_shows_as_a_dash() -> None:
    line = {"step": 0, "logprob_gap_max": float("nan"), "loss": 0.5}
    text = step_text(line, 10)
    assert "nan" not in text and "gap       –" in text and "loss   0.5000" in text
