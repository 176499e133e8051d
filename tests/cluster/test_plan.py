"""The plan says what will run: processes and ports where there are any."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.cluster.plan import plan_lines
from segue.config.root import resolve

CONFIG = resolve({"steps": 8, "task": {"env": "latency"}, "model": {"path": "x"}}, "a test")


@pytest.mark.parametrize("serial", [True, False])
def test_a_serial_run_has_neither_processes_nor_ports(serial: bool) -> None:
    text = "\n".join(plan_lines(CONFIG, "my.toml", Path("runs/x"), "m", serial))
    assert ("serial    one process, one loop, logical clock" in text) == serial
    for word in ("ports", "worker processes", "broadcast", "rank(s)"):
        assert (word in text) != serial, word
    assert "grpo, decoupled, lr" in text
