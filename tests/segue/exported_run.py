"""A run as its processes would export it, by the real registries on a clock that the test sets, and as it would be on disk."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from segue.config import Config, to_toml
from segue.config.root import resolve
from segue.files import JsonLines, write_json
from segue.metrics import ActivityClock, Metrics, SlotClock, StateClock
from segue.metrics.samples import difference
from segue.metrics.vocabulary import ROLLOUT_PRECEDENCE, STATES
from segue.report import EpisodeCounts, EvalResult, RunFacts, build_summary, step_line
from segue.report.counted import NAMES, counted
from segue.rundir import RunDir

ENV = "latency"
SLOTS = 4


class Exported:
    """Registries of one scheduler, env pool and learner and of `nodes` rollout nodes; `time` is everybody's clock, in seconds."""

    def __init__(self, nodes: int = 2) -> None:
        self.time = 100.0

        def now() -> float:
            return self.time

        self.scheduler = Metrics("scheduler", envs=(ENV,))
        self.pool = Metrics("envpool", envs=(ENV,))
        self.learner = Metrics("learner", envs=(ENV,), staleness_bound=4)
        self.nodes = [Metrics("rollout", str(rank), envs=(ENV,)) for rank in range(nodes)]
        self.activities = [ActivityClock(ROLLOUT_PRECEDENCE, now) for _ in self.nodes]
        self.learning = StateClock(STATES["learner"], now, "wait_batch")
        self.slots = SlotClock(STATES["envpool"], SLOTS, now, "wait_action")
        self.scheduler.attach(StateClock(STATES["scheduler"], now, "wait_capacity"))
        self.pool.attach(self.slots)
        self.learner.attach(self.learning)
        for node, activity in zip(self.nodes, self.activities, strict=True):
            node.attach(activity)
        for metrics in self.targets().values():
            metrics.set("segue_worker_heartbeat_timestamp_seconds", 5000.0)

    def targets(self) -> dict[str, Metrics]:
        nodes = {f"rollout-{rank}": node for rank, node in enumerate(self.nodes)}
        return {"scheduler-0": self.scheduler, "envpool-0": self.pool, "learner-0": self.learner, **nodes}

    def scrape(self) -> dict[str, dict[str, float]]:
        return {target: metrics.snapshot() for target, metrics in self.targets().items()}

    def counts(self) -> dict[str, dict[str, float]]:
        """What a step's line asks for."""
        return {target: metrics.snapshot(NAMES) for target, metrics in self.targets().items()}

    def work(self, seconds: float) -> None:
        """Nodes generate three quarters of the time and then wait for environments; the learner computes half of it."""
        for part, (activity_state, learner_state) in zip(
            (0.5, 0.25, 0.25), (("generate", "wait_batch"), ("generate", "compute"), ("wait_env", "compute")), strict=True
        ):
            self.learning.enter(learner_state)
            for activity in self.activities:
                activity.begin(activity_state)
            self.time += part * seconds
            for activity in self.activities:
                activity.end(activity_state)
        for node in self.nodes:
            node.add("segue_decode_tokens_total", 100 * seconds)
            node.add("segue_engine_prefill_tokens_total", 40 * seconds)
            node.add("segue_prefill_tokens_total", 30 * seconds, cause="turn")
            node.add("segue_prefill_tokens_total", 10 * seconds, cause="weight_update")
        self.pool.observe("segue_env_step_seconds", 0.2, env=ENV)


def config_of(steps: int) -> Config:
    return resolve({"steps": steps, "task": {"env": ENV}, "model": {"path": "x"}, "eval": {"tasks": 4}}, "a test")


def line_of(step: int, since: dict[str, Any] | None = None, **stats: float) -> dict[str, Any]:
    """A step of two seconds that trained 300 tokens."""
    known = {"reward_mean": 0.1 * step, "info_success": 0.1 * step, "entropy": 1.0 / (1 + step), "grad_norm": 0.5}
    known |= {"tokens_trained": 300.0, "logprob_gap_mean": 1e-7, "logprob_gap_max": 1e-5, "logprob_gap_tokens": 10.0}
    return step_line(
        step,
        elapsed_seconds=2.0 * (step + 1),
        step_seconds=2.0,
        wait_seconds=0.5,
        version=step,
        queue_groups=3,
        in_flight=12,
        ages=[100, 150, 50],
        reprefill={"tokens": 5, "seconds": 0.1, "updates": step, "coalesced": 0, "inflight": "recompute"},
        stats={**known, **stats},
        since=since,
    )


def write_run(path: Path, trained: int, of: int, done: bool = False, told: bool = True) -> RunDir:
    """A run directory with `trained` of `of` steps, which nobody owns any more; with its summary if it is `done`. `told`: its
    lines say what the roles counted."""
    run = RunDir.create(path, to_toml(config_of(of)))
    run.begin_attempt(datetime(2026, 1, 2, 3, 4, 5))
    exported = Exported()
    before = exported.counts()
    lines = []
    for step in range(trained):
        exported.work(2.0)
        after = exported.counts()
        lines.append(line_of(step, counted(difference(before, after)) if told else None))
        before = after
    with JsonLines(run.metrics) as written:
        for line in lines:
            written.append(line)
    evals = {"before": EvalResult(0.25, 4)} | ({"after": EvalResult(0.75, 4)} if done else {})
    write_json(run.evals, {name: {"success": found.success, "n": found.n, "failed": 0} for name, found in evals.items()})
    if done:
        states = {target: metrics.clock.seconds() for target, metrics in exported.targets().items() if metrics.clock}
        facts = RunFacts("async", 4, 2.0 * trained, lines, EpisodeCounts(), metrics=exported.scrape(), states=states, evals=evals)
        write_json(run.summary, build_summary(facts))
    run.unlock()
    return run
