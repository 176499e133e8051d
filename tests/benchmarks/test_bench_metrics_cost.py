"""The cost of metrics is counted: writes times what one costs, scrapes times what one cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import metrics_cost
from benchmarks.metrics_cost import INTERVAL_SECONDS, asked_seconds, overall, share, write_seconds


def target(writes: float, scraping: float, cpu: float | None) -> dict[str, float]:
    samples = {"segue_metric_writes_total": writes, "segue_scrape_cpu_seconds_total": scraping}
    return samples if cpu is None else samples | {"segue_process_cpu_seconds_total": cpu}


def test_writes_and_scrapes_are_weighed_against_the_cpu_seconds_of_their_process() -> None:
    hosts = ("scheduler-0", "rollout-0", "rollout-1", "envpool-0", "learner-0")
    before = {name: target(100, 0.5, 10.0) for name in hosts} | {"weightsync-rollout-0": target(10, 0.1, None)}
    after = {name: target(1100, 0.6, 20.0) for name in hosts} | {"weightsync-rollout-0": target(510, 0.2, None)}
    seconds = 10 * INTERVAL_SECONDS
    asked = {"scheduler": 1e-3, "rollout": 1e-3, "envpool": 1e-3, "learner": 1e-3, "weightsync": 2e-3}
    roles = share(before, after, seconds, 1e-5, scrapes=20, asked=asked)
    assert roles["scheduler"]["write_share"] == pytest.approx(1000 * 1e-5 / 10)
    assert roles["scheduler"]["scrape_share"] == pytest.approx(0.1 / 20 * 10 / 10)
    assert roles["rollout"]["writes"] == 2500 and roles["rollout"]["cpu_seconds"] == 20.0
    assert roles["rollout"]["scrape_share"] == pytest.approx(0.3 / 20 * 10 / 20)
    assert roles["learner"]["step_share"] == pytest.approx(20 * 1e-3 / 10)
    assert roles["rollout"]["step_share"] == pytest.approx(20 * (2 * 1e-3 + 2e-3) / 20), "its weight sync is asked too"
    total = (3 * 1000 + 2500) * 1e-5 + (3 * 0.1 + 0.3) / 20 * 10 + 20 * (5 * 1e-3 + 2e-3)
    assert overall(roles) == pytest.approx(total / 50)


def test_what_a_write_and_an_answer_cost_is_measured() -> None:
    assert 0.0 < write_seconds(2000, 2) < asked_seconds("rollout", 5, 2), "an answer reads hundreds of values"


@pytest.mark.parametrize(("share_of_all", "code"), [(0.009, 0), (0.01, 1)])
def test_a_share_that_is_too_large_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share_of_all: float, code: int
) -> None:
    figures = {"roles": {}, "write_seconds": 1e-6, "share": share_of_all}
    monkeypatch.setattr(metrics_cost, "measure", lambda *_: dict(figures))
    assert metrics_cost.main(["--json", str(tmp_path / "cost.json")]) == code
    assert json.loads((tmp_path / "cost.json").read_text())["holds"] == (code == 0)
