"""Series under which each alert fires, and under which it stays quiet although they come close: what promtool's unit tests read.

Values are in promtool's notation: `0+12x80` begins at 0 and grows by 12 eighty times; `5x80` stays. One value every 15 s, or as
`interval` says. Time begins at 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEARNER = 'run="r", role="learner", rank="0", node="n", job="segue", instance="a:1"'
ROLLOUT = 'run="r", role="rollout", rank="0", node="n", job="segue", instance="b:1"'
SCHEDULER = 'run="r", role="scheduler", rank="0"'
SYNC = 'run="r", role="weightsync", rank="rollout-0", node="n", job="segue", instance="b:2"'
POOL = 'run="r", role="envpool", rank="0"'
LEARNER_LABELS = {"run": "r", "role": "learner", "rank": "0", "node": "n", "job": "segue", "instance": "a:1"}
ROLLOUT_LABELS = {"run": "r", "role": "rollout", "rank": "0", "node": "n", "job": "segue", "instance": "b:1"}
SYNC_LABELS = {"run": "r", "role": "weightsync", "rank": "rollout-0", "node": "n", "job": "segue", "instance": "b:2"}


@dataclass(frozen=True)
class Fires:
    """At `at` the alert fires once, with these labels; `value` is what its description makes of the value. Its condition does not
    hold before `begins` (seconds)."""

    series: dict[str, str]
    at: str
    labels: dict[str, str]
    value: str = ""
    interval: str = "15s"
    begins: int = 0


@dataclass(frozen=True)
class Quiet:
    """At `at` it does not, because of `why`."""

    why: str
    series: dict[str, str]
    at: str
    interval: str = "15s"


@dataclass(frozen=True)
class Cases:
    fires: list[Fires]
    quiet: list[Quiet] = field(default_factory=list)


def states(target: str, **seconds: str) -> dict[str, str]:
    return {f'segue_worker_state_seconds_total{{{target}, state="{state}"}}': values for state, values in seconds.items()}


def ages(**counts: str) -> dict[str, str]:
    buckets = {
        f'segue_token_staleness_versions_bucket{{{LEARNER}, le="{le}"}}': counts[f"le{le}"]
        for le in ("1.0", "3.0", "4.0")
        if f"le{le}" in counts
    }
    total = counts["all"]
    return {
        **buckets,
        f'segue_token_staleness_versions_bucket{{{LEARNER}, le="+Inf"}}': total,
        f"segue_token_staleness_versions_count{{{LEARNER}}}": total,
    }


def bound(versions: int) -> dict[str, str]:
    return {f"segue_staleness_bound_versions{{{LEARNER}}}": f"{versions}x80"}


def drops(stale: int, admitted: int) -> dict[str, str]:
    return {
        f'segue_episodes_dropped_total{{{SCHEDULER}, reason="stale", stage="queue"}}': f"0+{stale}x80",
        f'segue_episodes_dropped_total{{{SCHEDULER}, reason="redundant", stage="queue"}}': f"0+{admitted}x80",
        f'segue_episodes_admitted_total{{{SCHEDULER}, env="e"}}': f"0+{admitted}x80",
    }


def calls(timeouts: int, steps: int) -> dict[str, str]:
    return {
        f'segue_env_timeouts_total{{{POOL}, env="e"}}': f"0+{timeouts}x80",
        f'segue_env_step_seconds_count{{{POOL}, env="e"}}': f"0+{steps}x80",
    }


def prefetch(depth: str) -> dict[str, str]:
    return {f'segue_queue_depth{{{LEARNER}, queue="prefetch"}}': depth}


def queue(depth: int, capacity: int) -> dict[str, str]:
    return {
        f'segue_queue_depth{{{SCHEDULER}, queue="ready"}}': f"{depth}x80",
        f'segue_queue_capacity{{{SCHEDULER}, queue="ready"}}': f"{capacity}x80",
    }


def training(std: str, entropy: str, mean: str) -> dict[str, str]:
    second = 'run="r", role="learner", rank="1"'  # a further rank tells nothing: its gauges stay 0
    return {
        f'segue_reward_std{{{LEARNER}, env="e"}}': std,
        f'segue_reward_mean{{{LEARNER}, env="e"}}': mean,
        f"segue_entropy_nats{{{LEARNER}}}": entropy,
        f'segue_reward_std{{{second}, env="e"}}': "0x100",
        f'segue_reward_mean{{{second}, env="e"}}': "0x100",
        f"segue_entropy_nats{{{second}}}": "0x100",
    }


IDLE, BUSY = states(LEARNER, wait_batch="0+12x80", compute="0+3x80"), states(LEARNER, wait_batch="0+3x80", compute="0+12x80")
STARTED = f"segue_weight_sync_started_timestamp_seconds{{{SYNC}}}"
LOADED = "segue_policy_update_timestamp_seconds"
BEAT = f"segue_worker_heartbeat_timestamp_seconds{{{ROLLOUT}}}"
GRADS, GAP = f"segue_grad_norm{{{LEARNER}}}", f"segue_logprob_gap_abs_mean_nats{{{LEARNER}}}"
STEADY_THEN_LOW = ("0.4x75 0.1x20", "1x75 0.3x20", "0.5x75 0.2x20")

CASES: dict[str, Cases] = {
    "SegueQueueStarved": Cases(
        [
            Fires({**prefetch("0x80"), **IDLE}, "12m", {"run": "r"}),
            Fires({**prefetch("0x7 1 0x7 1 0x80"), **IDLE}, "12m", {"run": "r"}),
        ],
        [
            Quiet("a batch is ready: the learner waits for something else", {**prefetch("1x80"), **IDLE}, "12m"),
            Quiet("the learner has enough to do", {**prefetch("0x80"), **BUSY}, "12m"),
            Quiet("it has not lasted", {**prefetch("0x80"), **IDLE}, "4m"),
        ],
    ),
    "SegueQueueFull": Cases(
        [Fires(queue(62, 64), "12m", {"run": "r", "queue": "ready"}, "96.88%")],
        [Quiet("half full", queue(32, 64), "12m"), Quiet("a queue without a limit", queue(62, 0), "12m")],
    ),
    "SegueRoleIdle": Cases(
        [Fires(IDLE, "16m", {"run": "r", "role": "learner"}, "80%")],
        [
            Quiet("it works most of the time", BUSY, "16m"),
            Quiet("env pools own no GPU", states(POOL, wait_action="0+14x80", step="0+1x80"), "16m"),
        ],
    ),
    "SegueStalenessNearBound": Cases(
        [
            Fires(
                {**bound(4), **ages(**{"le1.0": "0x80", "le3.0": "0x80", "le4.0": "0+100x80", "all": "0+100x80"})},
                "12m",
                {"run": "r"},
                "3.99",
            ),
            Fires(drops(10, 100), "12m", {"run": "r"}, "0.1"),
        ],
        [
            Quiet(
                "young tokens",
                {**bound(4), **ages(**{"le1.0": "0+100x80", "le3.0": "0+100x80", "le4.0": "0+100x80", "all": "0+100x80"})},
                "12m",
            ),
            Quiet("with a bound of 1 all are at it", {**bound(1), **ages(**{"le1.0": "0+100x80", "all": "0+100x80"})}, "12m"),
            Quiet("few drops for age, many for others' sake", drops(2, 100), "12m"),
            Quiet("nothing is trained", {**bound(4), **ages(**{"le4.0": "9x80", "all": "9x80"})}, "12m"),
        ],
    ),
    "SegueWeightSyncStuck": Cases(
        [Fires({STARTED: "100x80"}, "5m", SYNC_LABELS, "3m 20s")],
        [Quiet("no transfer runs", {STARTED: "0x80"}, "5m"), Quiet("it has just begun", {STARTED: "200x80"}, "5m")],
    ),
    "SeguePolicyStalled": Cases(
        [Fires({f"{LOADED}{{{ROLLOUT}}}": "10x100"}, "20m", ROLLOUT_LABELS, "19m 50s", begins=911)],
        [
            Quiet("nothing was loaded yet", {f"{LOADED}{{{ROLLOUT}}}": "0x100"}, "20m"),
            Quiet("it has just loaded", {f"{LOADED}{{{ROLLOUT}}}": "1000x100"}, "20m"),
            Quiet("the learner's is another matter", {f"{LOADED}{{{LEARNER}}}": "10x100"}, "20m"),
        ],
    ),
    "SegueEnvTimeouts": Cases(
        [
            Fires(calls(1, 9), "16m", {"run": "r", "env": "e"}, "10%"),
            Fires(calls(1, 0), "16m", {"run": "r", "env": "e"}, "100%"),
        ],
        [Quiet("one in a hundred", calls(1, 99), "16m"), Quiet("nothing is called", calls(0, 0), "16m")],
    ),
    "SegueEchoTrap": Cases(
        [Fires(training(*STEADY_THEN_LOW), "90m", {"run": "r", "env": "e"}, interval="60s", begins=76 * 60)],
        [
            Quiet(
                "its reward rises: it has solved its tasks",
                training("0.4x75 0.1x20", "1x75 0.3x20", "0.5x75 0.9x20"),
                "90m",
                "60s",
            ),
            Quiet("the entropy stays", training("0.4x75 0.1x20", "1x95", "0.5x75 0.2x20"), "90m", "60s"),
            Quiet("the spread stays", training("0.4x95", "1x75 0.3x20", "0.5x75 0.2x20"), "90m", "60s"),
        ],
    ),
    "SegueGradSpike": Cases(
        [Fires({GRADS: "1x75 8x20"}, "90m", {"run": "r"}, "8", "60s", begins=76 * 60)],
        [Quiet("three times as large", {GRADS: "1x75 3x20"}, "90m", "60s"), Quiet("no history", {GRADS: "8x10"}, "10m", "60s")],
    ),
    "SegueNoHeartbeat": Cases(
        [
            Fires({BEAT: "10x40"}, "5m", ROLLOUT_LABELS, begins=71),
            Fires({f"up{{{LEARNER}}}": "1x4 0x40"}, "5m", LEARNER_LABELS, begins=75),
        ],
        [
            Quiet("it beats and answers", {BEAT: "1+15x40", f"up{{{ROLLOUT}}}": "1x40"}, "5m"),
            Quiet("it is no process of ours", {'up{job="dcgm", instance="x:1"}': "0x40"}, "5m"),
            Quiet("it was withdrawn", {BEAT: "10x4 stale", f"up{{{ROLLOUT}}}": "1x4 stale"}, "5m"),
        ],
    ),
    "SegueLogprobGap": Cases(
        [Fires({GAP: "0.2x80"}, "12m", {"run": "r"}, "0.2")],
        [Quiet("rounding", {GAP: "0.05x80"}, "12m"), Quiet("it passed", {GAP: "0.2x20 0.01x80"}, "12m")],
    ),
}
