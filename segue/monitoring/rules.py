"""The recording rules: ratios that alerts and several panels share. A denominator of 0 gives no sample, never NaN."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_ACTIVE = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
GPU_UTIL = "DCGM_FI_DEV_GPU_UTIL"


@dataclass(frozen=True)
class Rule:
    """A recording rule: the name says what it is by, of what, and over which time."""

    name: str
    expr: str
    labels: tuple[str, ...]
    help: str


def _share(by: str, part: str, whole: str) -> str:
    return f"sum by ({by}) (rate({part}[5m]))\n/\n(sum by ({by}) (rate({whole}[5m])) > 0)"


_STATES = "segue_worker_state_seconds_total"
_IDLE = f'{_STATES}{{state=~"wait_.+"}}'
_OWNERS = "max by (UUID, run, role) (segue_gpu_assignment_info)"

RULES: tuple[Rule, ...] = (
    Rule(
        "role:segue_idle:ratio_rate5m",
        _share("run, role", _IDLE, _STATES),
        ("run", "role"),
        "Share of a role's time in states named wait_.",
    ),
    Rule(
        "rank:segue_idle:ratio_rate5m",
        _share("run, role, rank", _IDLE, _STATES),
        ("run", "role", "rank"),
        "The same for each process.",
    ),
    Rule(
        "role:segue_other:ratio_rate5m",
        _share("run, role", f'{_STATES}{{state="other"}}', _STATES),
        ("run", "role"),
        "Share of a role's time in none of its named states.",
    ),
    Rule(
        "run:segue_reprefill:ratio_rate5m",
        _share("run", 'segue_prefill_tokens_total{cause!~"first|turn|block"}', "segue_prefill_tokens_total"),
        ("run",),
        "Context tokens computed again, of all that were computed.",
    ),
    Rule(
        "run:segue_token_staleness_versions:p99_5m",
        "histogram_quantile(0.99, sum by (run, le) (rate(segue_token_staleness_versions_bucket[5m])))\n"
        "and on (run)\n"
        "(sum by (run) (rate(segue_token_staleness_versions_count[5m])) > 0)",
        ("run",),
        "The age that 99 % of the trained tokens did not exceed.",
    ),
    Rule(
        "run:segue_stale_drop:ratio_rate5m",
        _share("run", 'segue_episodes_dropped_total{reason="stale"}', "segue_episodes_admitted_total"),
        ("run",),
        "Episodes dropped for their age, over those admitted.",
    ),
    Rule(
        "env:segue_env_timeout:ratio_rate5m",
        "sum by (run, env) (rate(segue_env_timeouts_total[5m]))\n/\n"
        "(\n  sum by (run, env) (rate(segue_env_step_seconds_count[5m]))\n"
        "  + sum by (run, env) (rate(segue_env_timeouts_total[5m]))\n  > 0\n)",
        ("run", "env"),
        "Calls that ran into their deadline, over steps and those calls: a call that times out is in no latency histogram.",
    ),
    Rule(
        "gpu:segue_idle:ratio_rate5m",
        "rank:segue_idle:ratio_rate5m\n* on (run, role, rank) group_right ()\n"
        "max by (run, role, rank, UUID) (segue_gpu_assignment_info)",
        ("run", "role", "rank", "UUID"),
        "Idle share of the process that owns a GPU, by its state clock.",
    ),
    Rule(
        "role:segue_gpu_tensor_active:avg",
        f"avg by (run, role) (\n  max by (UUID) ({TENSOR_ACTIVE})\n  * on (UUID) group_right ()\n  {_OWNERS}\n)",
        ("run", "role"),
        "Share of cycles in which the tensor cores of a role's GPUs worked, by DCGM.",
    ),
    Rule(
        "role:segue_gpu_utilization:avg",
        "avg by (run, role) (\n"
        f"  (max by (UUID) ({GPU_UTIL} / 100) or max by (UUID) (segue_gpu_utilization_ratio))\n"
        f"  * on (UUID) group_right ()\n  {_OWNERS}\n)",
        ("run", "role"),
        "Share of time in which a kernel ran on a role's GPUs, by DCGM or else NVML: weaker, waiting in a collective counts.",
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}


def rule_groups() -> dict[str, object]:
    """The content of the rules file."""
    rules = [{"record": rule.name, "expr": rule.expr} for rule in RULES]
    return {"groups": [{"name": "segue-ratios", "rules": rules}]}
