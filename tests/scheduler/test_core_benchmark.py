"""The benchmark of the core runs, exercises what it claims to, and its counted operations grow no faster than log n."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import scheduler_core


def test_operations_per_event_grow_no_faster_than_log_n() -> None:
    small, large = (scheduler_core.figures(scheduler_core.measure(live, 100_000, seed=1)) for live in (1_000, 4_000))
    growth = large["operations_per_event"] / small["operations_per_event"]
    assert growth <= math.log(4_000) / math.log(1_000)
    for name in ("batches_trained", "retries", "migrated", "nodes_lost", "parked", "updates"):
        assert small["seen"][name] + large["seen"][name] > 0, name
    assert large["live_episodes_mean"] == pytest.approx(4_000, rel=0.25)


def test_the_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["x", "--json", str(target), "--events", "2000", "--live", "100", "400"])
    scheduler_core.main()
    figures = json.loads(target.read_text())
    assert {"events_per_second", "operations_growth_1k_to_100k", "machine", "versions", "seeds", "command"} <= set(figures)
