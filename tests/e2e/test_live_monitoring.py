"""A run beside a real Prometheus: every panel of every dashboard has data, and every `/metrics` passes the linter.

The run is the smallest one there is; `make test-full` does the same with the quickstart.
"""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_run import Command, fetch, segue

from benchmarks.metrics_cost import LIMIT, asked_seconds, share, write_seconds
from segue.metrics.catalogue import CATALOGUE
from segue.metrics.samples import Scrape, read_exposition, read_sample
from segue.metrics.vocabulary import STATES
from segue.monitoring.binaries import HOW_TO_GET, find
from segue.monitoring.boards import DASHBOARDS
from segue.monitoring.panels import Panel
from segue.monitoring.rules import RULES

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (find("prometheus") and find("promtool")), reason=f"there is no Prometheus here: {HOW_TO_GET}"),
]
ROOT = Path(__file__).resolve().parents[2]
INTERVAL = 0.5
STEPS = 25
"""That Prometheus sees: some ten seconds."""
WINDOW = "10s"
"""What Grafana would choose is four scrapes at least; a step of the smoke run takes a second or so."""
TROUBLES = {
    *("segue_messages_refused_total", "segue_rpc_failures_total", "segue_queue_spilled_bytes_total", "segue_leases_lost_total"),
    *("segue_episodes_dropped_total", "segue_dropped_tokens_total", "segue_episodes_failed_total", "segue_episode_retries_total"),
    *("segue_episodes_migrated_total", "segue_lease_expiries_total", "segue_nodes_fenced_total", "segue_tasks_quarantined_total"),
    *("segue_discarded_tokens_total", "segue_engine_preemptions_total", "segue_engine_evictions_total"),
    *("segue_env_timeouts_total", "segue_env_crashes_total", "segue_env_respawns_total", "segue_env_kills_total"),
    *("segue_env_failures_total", "segue_env_failure_reasons_total", "segue_weight_sync_failures_total"),
    *(
        "segue_process_restarts_total",
        "segue_masked_tokens_total",
        "segue_clipped_tokens_ratio",
        "segue_weight_updates_coalesced_total",
    ),
}
"""Metrics that nothing need ever add to in a healthy run."""
MOMENTS = {
    *("segue_queue_bytes", "segue_requests_running", "segue_reprefill_share_ratio", "segue_groups_zero_variance_total"),
    *("segue_weight_sync_started_timestamp_seconds", "segue_gpu_assignment_info"),
}
"""Those that a healthy run of a few steps on a CPU may show as 0."""
PANELS = [pytest.param(panel, id=f"{board.name}/{panel.title}") for board in DASHBOARDS for panel in board.panels]


@dataclass
class Seen:
    """What is there to ask once the run is over: Prometheus' address, the time the run took, every target's text at its end and
    samples at its beginning, and what `segue top` showed."""

    address: str
    began: float
    ended: float
    texts: dict[str, str]
    top: str
    first: Scrape

    def ask(self, expr: str) -> list[Any]:
        """The series of an expression over the whole run."""
        query = {"query": expr, "start": self.began, "end": self.ended, "step": "1"}
        status, _, body = fetch(self.address, f"/api/v1/query_range?{urllib.parse.urlencode(query)}")
        answer = json.loads(body)
        assert status == 200 and answer["status"] == "success", body
        found: list[Any] = answer["data"]["result"]
        return found

    def has_data(self, expr: str) -> bool:
        return any(math.isfinite(float(value)) for series in self.ask(expr) for _, value in series["values"])

    def ever_moved(self, name: str) -> bool:
        """Whether any series of a metric was other than 0 at any time."""
        return any(float(value) for each in (name, f"{name}_count") for series in self.ask(each) for _, value in series["values"])


@pytest.fixture(scope="module", params=["smoke", pytest.param("quickstart", marks=pytest.mark.full)])
def seen(request: pytest.FixtureRequest, smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    config = smoke if request.param == "smoke" else ROOT / "configs" / "quickstart.toml"
    run = tmp_path_factory.mktemp("live") / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Command("train", config, "--run", run, "--set", "steps=100000", "--set", "checkpoint.every=10") as training:
        training.line(r"^eval before training", within=600.0)  # the quickstart makes its warm start first
        with Command("monitor", run, "--port", port, "--interval", INTERVAL) as monitoring:
            monitoring.line(r"^Prometheus of run: http://127\.0\.0\.1:")
            began = time.time()
            first = {name: read_exposition(fetch(address, "/metrics")[2]) for name, address in training.targets().items()}
            training.steps(training.trained() + STEPS)
            texts = {name: fetch(address, "/metrics")[2] for name, address in training.targets().items()}
            ended = time.time()
            top = segue("top", run, "--once", "--interval", "0.2")
            assert (top.wait(), top.err) == (0, []), top.tails()
            training.signal(signal.SIGINT)
            assert training.wait() == 130, training.tails()
            yield Seen(f"127.0.0.1:{port}", began, ended, texts, "\n".join(top.out), first)
            monitoring.signal(signal.SIGINT)
            assert monitoring.wait() == 130, monitoring.tails()
            assert monitoring.err == ["Interrupted."]
            monitoring.assert_nothing_left()
        training.assert_nothing_left()


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_shows_something(panel: Panel, seen: Seen) -> None:
    full = [seen.has_data(query.expr.replace("$__rate_interval", WINDOW).replace("$run", ".*")) for query in panel.queries]
    if panel.gpu:
        return  # it was asked all the same: Prometheus takes the expression
    assert all(full), [query.expr for query, has in zip(panel.queries, full, strict=True) if not has]


def test_every_metric_counts_something(seen: Seen) -> None:
    """A panel has data also where nobody writes its metric: all series are there from the start, as 0."""
    samples = [(name, value) for text in seen.texts.values() for name, value in read_exposition(text).items() if value]
    moved = {re.sub(r"_(bucket|sum|count)$", "", read_sample(name)[0]) for name, _ in samples}
    still = {metric.name for metric in CATALOGUE.values() if not metric.read} - moved - TROUBLES - MOMENTS
    # What was 0 when the texts were fetched may have counted before: a gauge of what waits, say.
    assert {name for name in still if not seen.ever_moved(name)} == set()


def test_every_recording_rule_has_data_that_needs_no_gpu(seen: Seen) -> None:
    assert [rule.name for rule in RULES if "gpu" not in rule.name and not seen.has_data(rule.name)] == []


def test_no_alert_fires_in_a_healthy_run(seen: Seen) -> None:
    fired = {series["metric"]["alertname"] for series in seen.ask('ALERTS{alertstate="firing"}')}
    assert fired == set()
    begun = {series["metric"]["alertname"] for series in seen.ask('ALERTS{severity="critical"}')}
    late = {"SegueNoHeartbeat"}  # on a busy machine one scrape may be late here, where each has half a second
    assert begun <= late, "the condition of a critical one does not hold for a moment"


def test_top_asks_the_runs_prometheus_for_alerts(seen: Seen) -> None:
    assert re.search(r"^alerts +(none|Segue\w+ pending for )", seen.top, re.M), seen.top


def test_all_targets_of_the_run_were_scraped(seen: Seen) -> None:
    scraped = {(series["metric"]["role"], series["metric"]["rank"]) for series in seen.ask('up{job="segue"} == 1')}
    assert scraped == {tuple(name.split("-", 1)) for name in seen.texts}


def test_every_target_passes_the_linter(seen: Seen) -> None:
    for name, text in seen.texts.items():
        done = subprocess.run([str(find("promtool")), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), name


def test_states_sum_to_elapsed_time_in_every_scrape(seen: Seen) -> None:
    """Both are read in the process at one moment; of env pools each slot has its state."""
    states, slots, elapsed = (
        f"sum by (role, rank) ({name})"
        for name in ("segue_worker_state_seconds_total", "segue_worker_state", "segue_worker_elapsed_seconds_total")
    )
    found = seen.ask(f"{states} / ({slots} * {elapsed})")
    assert len(found) == len(seen.texts)
    for series in found:
        assert [float(value) for _, value in series["values"]] == pytest.approx([1.0] * len(series["values"]), rel=0.01), series


def test_what_processes_write_and_tell_costs_under_a_hundredth_of_their_cpu_seconds(seen: Seen) -> None:
    """Counted in the run, times what one costs. Scrapes, whose share depends on how much of the machine the run gets, are in
    `python -m benchmarks.metrics_cost`."""
    after = {name: read_exposition(text) for name, text in seen.texts.items()}
    asked = {role: asked_seconds(role, 20, 3) for role in STATES}
    roles = share(seen.first, after, seen.ended - seen.began, write_seconds(2000, 3), STEPS, asked)
    cpu = sum(of["cpu_seconds"] for of in roles.values())
    spent = sum((of["write_share"] + of["step_share"]) * of["cpu_seconds"] for of in roles.values())
    assert sum(of["writes"] for of in roles.values()) > 1000 and 0.0 < spent < LIMIT * cpu, roles
