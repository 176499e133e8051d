"""The env pools: how slow environments are, and how often they break."""

from __future__ import annotations

from segue.monitoring.panels import Dashboard, Panel, Query, Row
from segue.monitoring.query import increase, over, quantile, rate, select

_ROLE = 'role="envpool"'


def _latency(title: str, metric: str, what: str) -> Panel:
    queries = tuple(Query(quantile(q, metric, "env"), f"{{{{run}}}} {{{{env}}}} p{round(100 * q)}") for q in (0.5, 0.95, 0.99))
    return Panel(title, what, "seconds", queries)


_LATENCY = Row(
    "Latency",
    (
        _latency("Steps", "segue_env_step_seconds", "Latency of environment steps; those that time out are not in it."),
        _latency("Resets", "segue_env_reset_seconds", "Latency of create and reset, or restore."),
        Panel(
            "Steps and resets per second",
            "Calls that came back.",
            "per second",
            (
                Query(rate("segue_env_step_seconds_count", "env"), "{{run}} {{env}} steps"),
                Query(rate("segue_env_reset_seconds_count", "env"), "{{run}} {{env}} resets"),
            ),
        ),
        Panel(
            "Slots by state",
            "Slots (workers × instances) that step, reset, start anew, or wait for an action.",
            "count",
            (Query(over("sum", "segue_worker_state", "state", where=_ROLE), "{{run}} {{state}}"),),
            stack=True,
        ),
        Panel(
            "Calls that wait for a slot",
            "Depth of the pools' queues.",
            "count",
            (Query(over("sum", "segue_queue_depth", "rank", where=f'{_ROLE}, queue="requests"'), "{{run}} envpool-{{rank}}"),),
        ),
        Panel(
            "Wait for a slot",
            "p95 of the time a call waited.",
            "seconds",
            (Query(quantile(0.95, "segue_queue_wait_seconds", "rank", where=_ROLE), "{{run}} envpool-{{rank}}"),),
        ),
    ),
)

_HEALTH = Row(
    "Health",
    (
        Panel(
            "Calls past their deadline",
            "Share of the calls, over 5 minutes. Their worker is killed, its neighbours go on from their snapshots.",
            "ratio",
            (Query(select("env:segue_env_timeout:ratio_rate5m"), "{{run}} {{env}}"),),
        ),
        Panel(
            "Timeouts, crashes, respawns",
            "Calls past their deadline, workers that died of themselves, workers started in place of dead ones.",
            "count",
            (
                Query(increase("segue_env_timeouts_total", "env"), "{{run}} {{env}} timeouts"),
                Query(increase("segue_env_crashes_total", "env"), "{{run}} {{env}} crashes"),
                Query(increase("segue_env_respawns_total", "env"), "{{run}} {{env}} respawns"),
            ),
        ),
        Panel(
            "Workers killed, by reason",
            "By the deadline that passed; lost: it had died already.",
            "count",
            (Query(increase("segue_env_kills_total", "env", "reason"), "{{run}} {{env}} {{reason}}"),),
        ),
        Panel(
            "Failed calls, by class",
            "infra: the machine's; env: the environment's; data: the task's.",
            "count",
            (Query(increase("segue_env_failures_total", "env", "class"), "{{run}} {{env}} {{class}}"),),
        ),
        Panel(
            "Failed calls, by reason",
            "The same failures, finer.",
            "count",
            (Query(increase("segue_env_failure_reasons_total", "env", "reason"), "{{run}} {{env}} {{reason}}"),),
        ),
    ),
)

ENVPOOL = Dashboard("envpool", "Segue: env pools", "How slow environments are, and how often they break.", (_LATENCY, _HEALTH))
