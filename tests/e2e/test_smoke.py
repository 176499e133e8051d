"""The smoke run from the command to its last word, looked at from all sides. One run, many tests."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e_run import STEP_LINE, Command, assert_whole, fetch, lines_of, summary_of
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from segue.config import Config, load_config, to_toml
from segue.metrics.catalogue import CATALOGUE

pytestmark = pytest.mark.processes
STATE_SECONDS, ELAPSED = "segue_worker_state_seconds_total", "segue_worker_elapsed_seconds_total"


@dataclass
class Scrape:
    """What one target answered, between two moments of this process's clock."""

    began: float
    ended: float
    type: str
    families: dict[str, Metric]
    health: dict[str, object]
    status: int

    def total(self, name: str) -> float:
        """The sum of a metric's series."""
        return sum(s.value for s in self.families[name.removesuffix("_total")].samples if s.name == name)


@dataclass
class Smoke:
    command: Command
    code: int
    config: Config
    first: dict[str, Scrape] = field(default_factory=dict)
    second: dict[str, Scrape] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.command.run


def scrape(address: str) -> Scrape:
    began = time.monotonic()
    _, kind, text = fetch(address, "/metrics")
    ended = time.monotonic()
    status, _, body = fetch(address, "/health")
    return Scrape(began, ended, kind, {f.name: f for f in text_string_to_metric_families(text)}, json.loads(body), status)


@pytest.fixture(scope="module")
def made(smoke: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smoke]:
    run = tmp_path_factory.mktemp("smoke") / "run"
    with Command("train", smoke, "--run", run) as command:
        command.line(r"^eval before training")
        first = {name: scrape(address) for name, address in command.targets().items()}
        command.steps(1)
        second = {name: scrape(address) for name, address in command.targets().items()}
        code = command.wait()
        command.assert_nothing_left()
        yield Smoke(command, code, load_config(run / "config.toml"), first, second)


def test_ends_well_and_says_where_to_look(made: Smoke) -> None:
    assert made.code == 0, made.command.tails()
    assert made.command.err == []
    assert any("summary.json" in line and str(made.run) in line for line in made.command.out)
    for log in (made.run / "logs").iterdir():
        text = log.read_text()
        assert "Traceback" not in text and " ERROR " not in text, f"{log}:\n{text}"


def test_the_smoke_config_is_small(made: Smoke) -> None:
    assert made.config.steps <= 10


def test_one_console_line_per_step_with_fields_in_fixed_order(made: Smoke) -> None:
    lines = [line for line in made.command.out if re.match(STEP_LINE, line)]
    assert [int(re.match(STEP_LINE, line)[1]) for line in lines] == list(range(1, made.config.steps + 1))  # type: ignore[index]
    fields = ["step", "seconds", "reward", "success", "age", "tokens", "kept", "loss", "gap", "norm", "queue", "in flight"]
    assert all(re.findall(r"(?:^|  )([a-z]+(?: [a-z]+)?) +\S", line) == fields for line in lines), lines


def test_the_figures_of_the_summary_agree_with_each_other(made: Smoke) -> None:
    assert_whole(made.run, made.config.steps)
    config, summary = made.config, summary_of(made.run)
    assert set(summary) >= {
        *("mode", "steps", "attempts", "wall_seconds", "tokens", "staleness", "episodes", "prefill"),
        *("roles", "weight_sync", "logprob_gap", "eval"),
    }
    assert summary["mode"] == config.mode and summary["staleness"]["bound"] == config.staleness.max_age
    trained = config.steps * config.batch.groups * config.group.size
    assert summary["episodes"]["trained"] == trained and summary["episodes"]["finished"] >= trained
    for name in ("before", "after"):
        assert summary["eval"][name]["n"] == config.eval.tasks and summary["eval"][name]["failed"] == 0
        assert 0.0 <= summary["eval"][name]["success"] <= 1.0
    assert summary["weight_sync"]["updates"] >= 1 and summary["weight_sync"]["bytes"] > 0
    assert 0.0 < summary["logprob_gap"]["max"] < 1e-3 and summary["logprob_gap"]["tokens"] > 0
    assert 0.0 < summary["logprob_gap"]["probe_max"] < 1e-4
    assert summary["tokens"]["generated"] >= summary["tokens"]["trained"]


def test_every_role_accounts_for_the_whole_time(made: Smoke) -> None:
    summary, config = summary_of(made.run), made.config
    pool = config.envpool
    many = {"rollout": config.rollout.nodes, "envpool": pool.pools * pool.workers * pool.instances}
    assert set(summary["roles"]) == {"scheduler", "rollout", "envpool", "learner", "weightsync"}
    for role, figures in summary["roles"].items():
        elapsed = sum(figures["states"].values())
        asked = 0.5  # roles are asked at the end one after another, on a busy machine
        assert elapsed >= many.get(role, 1) * (summary["wall_seconds"] * 0.99 - asked), role
        assert 0.0 < figures["busy_ratio"] <= 1.0


def test_metrics_lines_hold_every_step(made: Smoke) -> None:
    lines = lines_of(made.run)
    assert all(line["tokens_trained"] == sum(line["ages"]) for line in lines)
    assert all(len(line["ages"]) <= made.config.staleness.max_age + 1 for line in lines)
    assert [line["elapsed_seconds"] for line in lines] == sorted(line["elapsed_seconds"] for line in lines)


def test_metrics_lines_hold_what_every_role_counted_since_the_step_before(made: Smoke) -> None:
    lines, summary = lines_of(made.run), summary_of(made.run)
    for line in lines:
        assert set(line["state_seconds"]) == {"scheduler", "rollout", "envpool", "learner", "weightsync"}
        assert all(sum(states.values()) > 0.0 for states in line["state_seconds"].values())
    assert sum(line["decode_tokens"] for line in lines) <= summary["tokens"]["generated"], "evaluations are no step's"
    for cause in ("first", "turn"):
        assert 0 < sum(line["prefill_tokens"][cause] for line in lines) <= summary["prefill"][cause]
    latencies = [(line["env_step_p50_seconds"], line["env_step_p95_seconds"]) for line in lines]
    assert any(p50 is not None for p50, _ in latencies) and all(p50 <= p95 for p50, p95 in latencies if p50 is not None)


def test_all_roles_are_targets_and_answer_while_they_run(made: Smoke) -> None:
    config = made.config
    nodes = [f"rollout-{rank}" for rank in range(config.rollout.nodes)]
    hosts = ["scheduler-0", *(f"envpool-{rank}" for rank in range(config.envpool.pools)), *nodes]
    hosts += [f"learner-{rank}" for rank in range(config.learner.ranks)]
    expected = {*hosts, *(f"weightsync-{name}" for name in (*nodes, "learner-0"))}
    assert set(made.first) == set(made.second) == expected
    for name, seen in made.first.items():
        role, _, rank = name.partition("-")
        assert seen.status == 200 and seen.health["status"] == "ok", name
        assert (seen.health["role"], seen.health["rank"], seen.health["run"]) == (role, rank, "run")
    assert len({made.first[host].health["pid"] for host in hosts}) == len(hosts), "each role is a process of its own"


def test_metrics_are_those_of_the_catalogue(made: Smoke) -> None:
    for name, seen in made.second.items():
        assert seen.type.startswith("text/plain")
        for family in seen.families.values():
            full = f"{family.name}_total" if family.type == "counter" else family.name
            metric = CATALOGUE[full]
            assert (family.type, family.documentation) == (metric.kind, metric.help), f"{name}: {full}"


def test_state_seconds_sum_to_elapsed_time(made: Smoke) -> None:
    """Both are read in the process at one moment, so that nothing but the clock itself can part them."""
    slots = made.config.envpool.workers * made.config.envpool.instances
    for name, seen in [*made.first.items(), *made.second.items()]:
        each = slots if name.startswith("envpool") else 1
        assert seen.total(STATE_SECONDS) == pytest.approx(each * seen.total(ELAPSED), rel=0.01), name


def test_elapsed_time_is_that_of_this_machine(made: Smoke) -> None:
    """All processes of a machine have one monotonic clock: a scrape's moment lies between its beginning and its end."""
    for name, first in made.first.items():
        second = made.second[name]
        passed = second.total(ELAPSED) - first.total(ELAPSED)
        assert second.began - first.ended <= passed <= second.ended - first.began, name


def test_the_saved_config_resolves_to_itself(made: Smoke) -> None:
    assert to_toml(made.config) == (made.run / "config.toml").read_text()


def test_trajectories_are_kept_for_reading(made: Smoke) -> None:
    kept = [json.loads(path.read_text()) for path in (made.run / "trajectories").glob("*.json")]
    assert kept and all(kept)
