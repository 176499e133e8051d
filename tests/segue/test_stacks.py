"""The stack sampler: CPU time goes to the function that used it, to nothing else, and by section."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from segue.stacks import StackSampler, thread_cpu_seconds

NEVER = 1e6
"""Seconds between samples: these tests sample themselves."""


def burn(seconds: float) -> None:
    """Use so much CPU time of this thread, however long that takes."""
    me = threading.get_native_id()
    end = thread_cpu_seconds(me) + seconds
    while thread_cpu_seconds(me) < end:
        pass


def by_function(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {row["function"]: row["seconds"] for row in rows}


def test_cpu_time_is_charged_to_who_used_it(tmp_path: Path) -> None:
    sampler = StackSampler(tmp_path / "profile" / "me.json", "start", NEVER)
    sampler.section("run")
    at_work, sampled = threading.Event(), threading.Event()

    def waits_at_the_end() -> None:
        burn(0.05)
        at_work.set()
        sampled.wait()

    worker = threading.Thread(target=waits_at_the_end, name="worker")
    worker.start()
    at_work.wait()
    sampler.sample()
    sampled.set()
    worker.join()
    sampler.close()
    sections = json.loads((tmp_path / "profile" / "me.json").read_text())["sections"]
    assert list(sections) == ["start", "run"]
    run = sections["run"]
    assert run["python_threads"]["worker"] >= 0.05 and run["cpu_seconds"] >= 0.05
    cumulative = by_function(run["cumulative"])
    assert max(seconds for name, seconds in cumulative.items() if name.endswith("waits_at_the_end")) >= 0.05
    assert "worker" not in sections["start"]["python_threads"]
    own = sum(row["seconds"] for row in run["self"])
    assert abs(own - sum(run["python_threads"].values())) < 0.01  # every second belongs to one function


def test_a_thread_that_waits_costs_nothing(tmp_path: Path) -> None:
    release = threading.Event()
    worker = threading.Thread(target=release.wait, name="idle")
    worker.start()
    sampler = StackSampler(tmp_path / "me.json", "run", NEVER)
    sampler.sample()
    sampler.section("later")  # what the thread used before its first sample is behind
    sampler.sample()
    release.set()
    worker.join()
    sampler.close()
    assert json.loads((tmp_path / "me.json").read_text())["sections"]["later"]["python_threads"].get("idle", 0.0) == 0.0
