"""What the scheduler shows of itself: the catalogue's metrics, and its counts as plain data for the driver and for `segue
top`."""

from __future__ import annotations

from typing import Any

from scheduler.core import SchedulerCore
from scheduler.core.meter import Tally
from scheduler.queue import Place, TrajectoryQueue
from segue.clock import now
from segue.config import Config
from segue.episode import State
from segue.metrics.registry import Metrics

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "admitted": ("segue_episodes_admitted_total", ("env",)),
    "finished": ("segue_episodes_finished_total", ("env", "outcome")),
    "retries": ("segue_episode_retries_total", ("class",)),
    "episodes_trained": ("segue_episodes_trained_total", ()),
    "paused": ("segue_episodes_paused_total", ("reason",)),
    "resumed": ("segue_episodes_resumed_total", ()),
    "migrated": ("segue_episodes_migrated_total", ("reason",)),
    "groups_finished": ("segue_groups_finished_total", ("env",)),
    "groups_zero_variance": ("segue_groups_zero_variance_total", ("env",)),
    "tokens_dropped": ("segue_dropped_tokens_total", ("reason",)),
    "eval_episodes": ("segue_eval_episodes_total", ("result",)),
    "lease_expiries": ("segue_lease_expiries_total", ()),
    "fenced": ("segue_nodes_fenced_total", ("reason",)),
    "updates": ("segue_weight_updates_total", ("inflight",)),
    "updates_coalesced": ("segue_weight_updates_coalesced_total", ("reason",)),
    "tasks_quarantined": ("segue_tasks_quarantined_total", ("env",)),
    "refused": ("segue_messages_refused_total", ("reason",)),
    "received": ("segue_messages_received_total", ()),
    "rpc_failures": ("segue_rpc_failures_total", ("reason",)),
    "journal_records": ("segue_journal_records_total", ()),
    "spilled_bytes": ("segue_queue_spilled_bytes_total", ()),
}
"""Names in the tally: their metric, and what the rest of the key labels."""
OBSERVED = {
    "segue_episode_duration_seconds": "env",
    "segue_group_completion_cv": "env",
    "segue_queue_wait_seconds": "queue",
}
REPORTED = (
    "attempts_failed",
    "finished",
    "fenced",
    "groups_dropped",
    "groups_finished",
    "groups_zero_variance",
    "migrated",
    "paused",
    "refused",
    "regenerated",
    "retries",
    "rpc_failures",
    "tokens_dropped",
    "updates",
    "updates_coalesced",
    "eval_episodes",
    "episodes_lost",
)
TOTALS = (
    "batches_formed",
    "batches_rewound",
    "journal_records",
    "lease_expiries",
    "load_failures",
    "park_orders",
    "parked",
    "received",
    "resumed",
    "slices_extended",
    "spilled_bytes",
    "tasks_passed_over",
    "tasks_reissued",
    "tokens_discarded",
    "tokens_over_age",
    "transfers",
    "transfers_failed",
    "transfers_unanswered",
)


class Report:
    """Reads the core, the queue and the tally; writes `metrics`."""

    def __init__(self, config: Config, core: SchedulerCore, queue: TrajectoryQueue, metrics: Metrics) -> None:
        self._config = config
        self._core = core
        self._queue = queue
        self._metrics = metrics
        self._tally: Tally = core.tables.tally
        self._exported: dict[tuple[str, ...], int] = {}
        self._dropped: dict[tuple[str, str], int] = {}
        self._failed: dict[str, int] = {}
        gauge, env = metrics.gauge, config.task.env
        self._states = {s: gauge("segue_episodes_state", state=s.value) for s in core.tables.episodes.counts}
        self._in_flight = gauge("segue_episodes_in_flight", env=env)
        self._depths = {name: gauge("segue_queue_depth", queue=name) for name in self.depths()}
        self._capacity = gauge("segue_queue_capacity", queue="ready")
        self._share = gauge("segue_reprefill_share_ratio")
        self._bytes = {place: gauge("segue_queue_bytes", queue=place.value) for place in Place}

    def export(self) -> None:
        """Bring the metrics up to date: counters by what was added since the last time, gauges as they are."""
        metrics, core = self._metrics, self._core
        for key, value in self._tally.items():
            added = value - self._exported.get(key, 0)
            known = COUNTERS.get(key[0]) if added else None
            if known is not None:
                name, labels = known
                metrics.add(name, added, **dict(zip(labels, key[1:], strict=True)))
                self._exported[key] = value
        table = core.tables.episodes
        for (reason, stage), value in table.dropped.items():
            label = (reason.value, stage)
            if added := value - self._dropped.get(label, 0):
                metrics.add("segue_episodes_dropped_total", added, reason=label[0], stage=label[1])
                self._dropped[label] = value
        for failure, value in table.failed.items():
            if added := value - self._failed.get(failure.value, 0):
                metrics.add("segue_episodes_failed_total", added, **{"class": failure.value})
                self._failed[failure.value] = value
        for metric, label_value, observed in core.tables.observations:
            metrics.observe(metric, observed, **{OBSERVED[metric]: label_value})
        core.tables.observations.clear()
        self._gauges()

    def _gauges(self) -> None:
        core = self._core
        counts = core.tables.episodes.counts
        for state, count in counts.items():
            self._states[state].set(count)
        self._in_flight.set(counts[State.LEASED])
        for name, depth in self.depths().items():
            self._depths[name].set(depth)
        self._capacity.set(self._config.queue.groups)
        self._share.set(core.updates.bill.share(now()))
        for place, nbytes in self._queue.bytes_by_place.items():
            self._bytes[place].set(nbytes)

    def depths(self) -> dict[str, int]:
        """Episodes waiting for a lease, finished groups waiting for a batch, batches not yet committed."""
        core = self._core
        return {"pending": core.tables.waiting.count, "ready": core.batches.ready, "batches": len(core.batches.kept)}

    def brief(self) -> dict[str, Any]:
        """The part of `status` that goes with every step."""
        core = self._core
        table = core.tables.episodes
        return {
            "episodes": {
                "admitted": table.admitted,
                "states": {state.value: count for state, count in table.counts.items()},
                "dropped": {f"{r.value}|{stage}": n for (r, stage), n in table.dropped.items() if n},
                "failed": {failure.value: n for failure, n in table.failed.items() if n},
                "finished": sum(self._tally.under("finished").values()),
                "paused": sum(self._tally.under("paused").values()),
                "resumed": self._tally.get(("resumed",), 0),
            },
            "queue": {**self.depths(), "bytes": self._queue.memory_bytes, "spilled_bytes": self._queue.spilled_bytes},
            "tokens_generated": core.intake.tokens,
            "redundant": {"episodes": core.groups.redundant_episodes, "tokens": core.groups.redundant_tokens},
            "live_groups": len(core.groups.live),
            "batches_formed": core.progress.formed,
            "newest_version": core.tables.versions.newest,
            "reprefill": {
                "tokens": core.updates.bill.tokens,
                "seconds": core.updates.bill.seconds,
                "share": core.updates.bill.share(now()),
                "updates": sum(self._tally.under("updates").values()),
                "coalesced": sum(self._tally.under("updates_coalesced").values()),
                "inflight": core.updates.policy.inflight,
            },
        }

    def status(self) -> dict[str, Any]:
        """Everything that is counted."""
        core, tally = self._core, self._tally
        table, progress = core.tables.episodes, core.progress
        return {
            **self.brief(),
            "steps": progress.steps,
            "trained": progress.trained,
            "committed": progress.committed,
            "eval_states": {state.value: count for state, count in table.eval_counts.items() if count},
            "eval_tokens": core.intake.eval_tokens,
            "counts": {name: counts for name in REPORTED if (counts := tally.under(name))},
            "totals": {name: tally.get((name,), 0) for name in TOTALS},
            "updates": dict(core.updates.figures),
            "quarantined": dict(core.failures.quarantined),
            "nodes": {
                node.name: {
                    "session": node.session,
                    "version": node.version,
                    "leased": len(node.leased),
                    "max_episodes": node.max_episodes,
                    "updating": node.update is not None,
                }
                for node in core.tables.nodes
            },
            "finished_at": core.intake.finished_at,
            "stopped": core.tables.stopped,
        }
