"""Weight sync: how long new weights take from the learner into every engine, and what they hold up."""

from __future__ import annotations

from segue.monitoring.panels import Dashboard, Panel, Query, Row
from segue.monitoring.query import increase, over, quantile, rate, select

_BLOCKED = "segue_worker_state_seconds_total"

_TRANSFERS = Row(
    "Transfers",
    (
        Panel(
            "Phases, median",
            "Sender: gather, transfer; receiver: stage, drain, pause (load + probe + resume).",
            "seconds",
            (Query(quantile(0.5, "segue_weight_sync_seconds", "phase"), "{{run}} {{phase}}"),),
        ),
        Panel(
            "Phases, p95",
            "The slow ones.",
            "seconds",
            (Query(quantile(0.95, "segue_weight_sync_seconds", "phase"), "{{run}} {{phase}}"),),
        ),
        Panel(
            "Bytes per second",
            "Weights sent and received, by process, averaged over the window: between transfers nothing flows.",
            "bytes/s",
            (Query(rate("segue_weight_sync_bytes_total", "rank"), "{{run}} {{rank}}"),),
        ),
        Panel(
            "Transfers and loads that failed",
            "By where they stopped; probe: the engine did not run what was published.",
            "count",
            (Query(increase("segue_weight_sync_failures_total", "phase"), "{{run}} {{phase}}"),),
        ),
        Panel(
            "Running transfers",
            "Wall clock at which each running transfer began; 0 where none runs. Over 120 s an alert fires.",
            "number",
            (Query(over("max", "segue_weight_sync_started_timestamp_seconds", "rank"), "{{run}} {{rank}}"),),
        ),
        Panel(
            "Time by state",
            "Seconds per second; transfer includes the wait for its receivers.",
            "number",
            (Query(rate(_BLOCKED, "rank", "state", where='role="weightsync"'), "{{run}} {{rank}} {{state}}"),),
            stack=True,
        ),
    ),
)

_VERSIONS = Row(
    "Versions",
    (
        Panel(
            "Published and loaded versions",
            "The newest version of the learner, and the one in each engine.",
            "versions",
            (Query(over("max", "segue_policy_version", "role", "rank"), "{{run}} {{role}}-{{rank}}"),),
        ),
        Panel(
            "Age of the weights",
            "Since the last publish (learner) and the last load (rollout).",
            "seconds",
            (
                Query(
                    f"time() - max by (run, role, rank) ({select('segue_policy_update_timestamp_seconds')} > 0)",
                    "{{run}} {{role}}-{{rank}}",
                ),
            ),
        ),
        Panel(
            "Updates",
            "Of nodes that had weights, by how requests in flight crossed; and versions that never went out, by why.",
            "per second",
            (
                Query(rate("segue_weight_updates_total", "inflight"), "{{run}} {{inflight}}"),
                Query(rate("segue_weight_updates_coalesced_total", "reason"), "{{run}} never sent: {{reason}}"),
            ),
        ),
        Panel(
            "Blocked by weight sync",
            "Seconds per second in which rollout nodes waited for weights, and the learner copied them aside.",
            "number",
            (
                Query(rate(_BLOCKED, where='role="rollout", state="wait_weights"'), "{{run}} rollout"),
                Query(rate(_BLOCKED, where='role="learner", state="wait_publish"'), "{{run}} learner"),
            ),
        ),
    ),
)

WEIGHTSYNC = Dashboard(
    "weightsync", "Segue: weight sync", "How long new weights take, and what they hold up.", (_TRANSFERS, _VERSIONS)
)
