"""Every alert fires when it should and stays quiet when it should, and recording rules say what they mean: by promtool."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alert_cases import CASES, LEARNER, ROLLOUT, Fires, Quiet, states
from promtool import needs_prometheus, promtool

from segue.monitoring.alerts import ALERTS, RUNBOOK, Alert
from segue.monitoring.checks import names_in
from segue.monitoring.generate import FOLDER
from segue.monitoring.rules import BY_NAME as RULE_BY_NAME
from segue.monitoring.yaml_text import yaml_text

BY_NAME = {alert.name: alert for alert in ALERTS}
EVERY = 15
"""Seconds between two evaluations."""
RULES = [str(FOLDER / "prometheus" / name) for name in ("recording.yml", "alerts.yml")]


def test_every_alert_has_cases_of_both_kinds() -> None:
    assert set(CASES) == set(BY_NAME)
    assert all(cases.fires and cases.quiet for cases in CASES.values())


@needs_prometheus
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_and_stays_quiet(name: str, tmp_path: Path) -> None:
    alert = BY_NAME[name]
    tests = [_test(case, name, [_expected(alert, case)]) for case in CASES[name].fires]
    tests += [_test(case, name, []) for case in CASES[name].quiet]
    unit(tmp_path, tests)


@needs_prometheus
@pytest.mark.parametrize("name", [alert.name for alert in ALERTS if alert.wait != "0s"])
def test_an_alert_waits_as_long_as_it_says(name: str, tmp_path: Path) -> None:
    """Just before its condition has held for `for`, it is pending and does not fire."""
    wait = 60 * int(BY_NAME[name].wait.removesuffix("m"))
    tests = []
    for case in CASES[name].fires:
        at = f"{(case.begins + wait - 1) // EVERY * EVERY}s"
        pending = {"expr": f'count(ALERTS{{alertname="{name}", alertstate="pending"}})', "eval_time": at}
        quiet = _test(replace(case, at=at), name, [])
        tests.append(quiet | {"promql_expr_test": [pending | {"exp_samples": [{"labels": "{}", "value": 1}]}]})
    unit(tmp_path, tests)


@needs_prometheus
def test_a_wrong_expectation_would_be_found(tmp_path: Path) -> None:
    case = CASES["SegueLogprobGap"].quiet[0]
    with pytest.raises(AssertionError, match="FAILED"):
        unit(
            tmp_path, [_test(case, "SegueLogprobGap", [_expected(BY_NAME["SegueLogprobGap"], CASES["SegueLogprobGap"].fires[0])])]
        )


def unit(folder: Path, tests: list[dict[str, Any]]) -> None:
    file = folder / "test.yml"
    file.write_text(yaml_text({"rule_files": RULES, "evaluation_interval": f"{EVERY}s", "tests": tests}))
    promtool("test", "rules", file)


def _series(series: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in series.items()]


def _test(case: Fires | Quiet, name: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    check = {"eval_time": case.at, "alertname": name, "exp_alerts": expected}
    return {"interval": case.interval, "input_series": _series(case.series), "alert_rule_test": [check]}


def _expected(alert: Alert, case: Fires) -> dict[str, Any]:
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: case.labels[found[1]], alert.description)
    text = re.sub(r"{{ \$value \| [^}]+ }}", case.value, text)
    notes = {"summary": alert.summary, "description": text, "runbook_url": f"{RUNBOOK}#{alert.anchor}"}
    return {"exp_labels": {**case.labels, "severity": alert.severity}, "exp_annotations": notes}


OWNED = {
    f'segue_gpu_assignment_info{{{LEARNER}, UUID="GPU-1"}}': "1x40",
    f'segue_gpu_assignment_info{{{ROLLOUT}, UUID="GPU-2"}}': "1x40",
    f'segue_gpu_assignment_info{{{ROLLOUT}, UUID="GPU-3"}}': "1x40",
    **states(LEARNER, wait_batch="0+3x40", compute="0+12x40"),
    **states(ROLLOUT, wait_env="0+9x40", generate="0+6x40"),
}
DCGM = {
    f'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{UUID="GPU-{n}", gpu="{n}", Hostname="n"}}': f"{v}x40"
    for n, v in ((1, 0.5), (2, 0.25), (3, 0.75), (9, 1))
}
DRIVER = {
    'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-2", gpu="2"}': "40x40",
    f'segue_gpu_utilization_ratio{{{LEARNER}, UUID="GPU-1"}}': "0.9x40",
}


PROVEN: list[tuple[str, dict[str, str], dict[str, float]]] = [
    ("role:segue_idle:ratio_rate5m", OWNED, {'run="r", role="learner"': 0.2, 'run="r", role="rollout"': 0.6}),
    (
        "gpu:segue_idle:ratio_rate5m",
        OWNED,
        {
            'run="r", role="learner", rank="0", UUID="GPU-1"': 0.2,
            'run="r", role="rollout", rank="0", UUID="GPU-2"': 0.6,
            'run="r", role="rollout", rank="0", UUID="GPU-3"': 0.6,
        },
    ),
    ("role:segue_gpu_tensor_active:avg", OWNED | DCGM, {'run="r", role="learner"': 0.5, 'run="r", role="rollout"': 0.5}),
    ("role:segue_gpu_utilization:avg", OWNED | DRIVER, {'run="r", role="learner"': 0.9, 'run="r", role="rollout"': 0.4}),
    ("role:segue_gpu_tensor_active:avg", OWNED, {}),
    (
        "run:segue_reprefill:ratio_rate5m",
        {
            f'segue_prefill_tokens_total{{{ROLLOUT}, cause="{cause}"}}': values
            for cause, values in {
                "first": "0+30x40",
                "turn": "0+40x40",
                "block": "0+5x40",
                "weight_update": "0+20x40",
                "migration": "0+5x40",
            }.items()
        },
        {'run="r"': 0.25},
    ),
    ("role:segue_other:ratio_rate5m", states(LEARNER, other="0x40", compute="0x40"), {}),
    ("role:segue_other:ratio_rate5m", states(LEARNER, other="0+1x40", compute="0+3x40"), {'run="r", role="learner"': 0.25}),
]


def test_every_recording_rule_is_proven_by_itself_or_by_an_alert() -> None:
    expressions = [rule for rule, _, _ in PROVEN] + [alert.expr for alert in ALERTS]
    proven: set[str] = set()
    while expressions:
        found = {name for name in names_in(expressions.pop()) if name in RULE_BY_NAME} - proven
        expressions += [RULE_BY_NAME[name].expr for name in found]
        proven |= found
    assert proven == set(RULE_BY_NAME)


@needs_prometheus
@pytest.mark.parametrize(("rule", "series", "expected"), PROVEN)
def test_recording_rules_give_what_they_say(
    rule: str, series: dict[str, str], expected: dict[str, float], tmp_path: Path
) -> None:
    rounded = f"round({rule}, 0.000001)"
    samples = [{"labels": "{" + labels + "}", "value": value} for labels, value in expected.items()]
    check = {"expr": rounded, "eval_time": "8m", "exp_samples": samples}
    unit(tmp_path, [{"interval": "15s", "input_series": _series(series), "promql_expr_test": [check]}])
