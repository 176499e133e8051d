"""The alerts. Each has an entry in docs/runbook.md: what it means, how to look, what to do. Thresholds are defaults to tune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RUNBOOK = "docs/runbook.md"


@dataclass(frozen=True)
class Alert:
    """An alert; `wait` is how long its condition must hold. Texts may use `$labels` and `$value`, as Prometheus fills them in."""

    name: str
    expr: str
    wait: str
    severity: Literal["warning", "critical"]
    anchor: str
    summary: str
    description: str


def _median(name: str, by: str) -> str:
    """What was usual in the hour before the last 15 minutes. A median: a mean would absorb the spike itself."""
    return f"max by ({by}) (quantile_over_time(0.5, {name}[1h] offset 15m))"


ALERTS: tuple[Alert, ...] = (
    Alert(
        "SegueQueueStarved",
        # The queue holds a batch for moments only, even where the learner starves: its mean says more than a sample of it.
        'max by (run) (avg_over_time(segue_queue_depth{role="learner", queue="prefetch"}[5m])) < 0.5\n'
        'and on (run)\nrole:segue_idle:ratio_rate5m{role="learner"} > 0.5',
        "5m",
        "warning",
        "queue-starved",
        "The learner waits for batches.",
        "Run {{ $labels.run }}: no batch is ready most of the time, and the learner idles more than half of it.",
    ),
    Alert(
        "SegueQueueFull",
        'max by (run, queue) (segue_queue_depth{role="scheduler"})\n/\n'
        '(max by (run, queue) (segue_queue_capacity{role="scheduler"}) > 0)\n> 0.95',
        "10m",
        "warning",
        "queue-full",
        "A queue is full.",
        "Run {{ $labels.run }}: queue {{ $labels.queue }} is {{ $value | humanizePercentage }} full: nothing new may begin.",
    ),
    Alert(
        "SegueRoleIdle",
        'role:segue_idle:ratio_rate5m{role=~"learner|rollout"} > 0.5',
        "10m",
        "warning",
        "idle-gpu",
        "A role that may own GPUs idles.",
        "Run {{ $labels.run }}: {{ $labels.role }} waits {{ $value | humanizePercentage }} of its time.",
    ),
    Alert(
        "SegueStalenessNearBound",
        # With a bound of 0 or 1 all tokens are at it, as they are meant to be.
        "run:segue_token_staleness_versions:p99_5m > on (run) 0.8 * (max by (run) (segue_staleness_bound_versions) > 1)\n"
        "or\nrun:segue_stale_drop:ratio_rate5m > 0.05",
        "5m",
        "warning",
        "staleness",
        "Tokens are trained close to the age bound, or episodes dropped beyond it.",
        'Run {{ $labels.run }}: the p99 of ages, or the share of episodes dropped for age, is {{ $value | printf "%.3g" }}.',
    ),
    Alert(
        "SegueWeightSyncStuck",
        "time() - (segue_weight_sync_started_timestamp_seconds > 0) > 120",
        "0s",
        "critical",
        "weight-sync",
        "A weight transfer does not end.",
        "Run {{ $labels.run }}: a transfer at {{ $labels.rank }} has been running for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "SeguePolicyStalled",
        'time() - (segue_policy_update_timestamp_seconds{role="rollout"} > 0) > 900',
        "1m",
        "critical",
        "policy-stalled",
        "A rollout node has had no new weights for long.",
        "Run {{ $labels.run }}: rollout {{ $labels.rank }} loaded weights {{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        "SegueEnvTimeouts",
        "env:segue_env_timeout:ratio_rate5m > 0.05",
        "10m",
        "warning",
        "env-timeouts",
        "Environment calls run into their deadline.",
        "Run {{ $labels.run }}: {{ $value | humanizePercentage }} of the calls of {{ $labels.env }} time out.",
    ),
    Alert(
        "SegueEchoTrap",
        # The third condition: a policy that solves its tasks also loses spread and entropy, but its reward rises.
        f"max by (run, env) (segue_reward_std) < 0.5 * {_median('segue_reward_std', 'run, env')}\n"
        f"and on (run)\nmax by (run) (segue_entropy_nats) < 0.5 * {_median('segue_entropy_nats', 'run')}\n"
        f"and on (run, env)\nmax by (run, env) (segue_reward_mean) <= {_median('segue_reward_mean', 'run, env')}",
        "5m",
        "warning",
        "echo-trap",
        "The policy collapses onto one kind of answer.",
        "Run {{ $labels.run }}, {{ $labels.env }}: spread of rewards and entropy are under half of what was usual.",
    ),
    Alert(
        "SegueGradSpike",
        f"max by (run) (segue_grad_norm) > 5 * {_median('segue_grad_norm', 'run')}",
        "5m",
        "warning",
        "echo-trap",
        "Gradients are far larger than usual.",
        'Run {{ $labels.run }}: the gradient norm is {{ $value | printf "%.3g" }}, over 5 times what was usual.',
    ),
    Alert(
        "SegueNoHeartbeat",
        'time() - (segue_worker_heartbeat_timestamp_seconds > 0) > 60\nor\nup{job="segue"} == 0',
        "1m",
        "critical",
        "no-heartbeat",
        "A process gives no sign of life.",
        "Run {{ $labels.run }}: {{ $labels.role }}-{{ $labels.rank }} on {{ $labels.node }} does not answer or is stuck.",
    ),
    Alert(
        "SegueLogprobGap",
        "max by (run) (segue_logprob_gap_abs_mean_nats) > 0.1",
        "10m",
        "warning",
        "logprob-gap",
        "Engine and learner disagree on log-probabilities.",
        'Run {{ $labels.run }}: they differ by {{ $value | printf "%.3g" }} nats on average under the same weights.',
    ),
)


def alert_groups() -> dict[str, object]:
    """The content of the alerts file."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "description": alert.description,
                "runbook_url": f"{RUNBOOK}#{alert.anchor}",
            },
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "segue-alerts", "rules": rules}]}
