"""The plan says what will run: processes and ports where there are any."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.cluster.hosts.facts import facts_here, short
from segue.cluster.plan import plan_lines
from segue.cluster.prepare import dry_run
from segue.config.root import resolve
from segue.errors import UserError

SMOKE = Path(__file__).resolve().parents[2] / "configs" / "smoke.toml"
CONFIG = resolve({"steps": 8, "task": {"env": "latency"}, "model": {"path": "x"}}, "a test")


@pytest.mark.parametrize("serial", [True, False])
def test_a_serial_run_has_neither_processes_nor_ports(serial: bool) -> None:
    text = "\n".join(plan_lines(CONFIG, "my.toml", Path("runs/x"), "m", serial))
    assert ("serial    one process, one loop, logical clock" in text) == serial
    for word in ("ports", "worker processes", "broadcast", "rank(s)"):
        assert (word in text) != serial, word
    assert "grpo, decoupled, lr" in text


def test_a_dry_run_prints_plan_and_map_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert dry_run(SMOKE, ["rollout.nodes=1"], serial=False, count=1) == 0
    alone = capsys.readouterr().out.splitlines()
    assert alone[0].startswith("Segue ") and alone[0].endswith(f": {SMOKE} → (a dry run)")
    assert any(line.startswith("  rollout   1 × embedded engine") for line in alone) and "host 0" not in "\n".join(alone)
    assert dry_run(SMOKE, ["rollout.nodes=1"], serial=False, count=3) == 0
    several = capsys.readouterr().out.splitlines()
    here = short(facts_here(0, ""))
    there = [line.replace("on 127.0.0.1", "on each host's own address") for line in alone]
    assert (
        there != alone
        and several[: len(alone)] == there
        and several[len(alone) :]
        == [
            f"  host 0    {here}: scheduler-0, learner-0",
            f"  host 1    {here}: rollout-0",
            f"  host 2    {here}: envpool-0",
            "  (as if every host were like this one)",
        ]
    )
    with pytest.raises(UserError, match="steps = 0"):
        dry_run(SMOKE, ["steps=0"], serial=False, count=1)
    with pytest.raises(UserError, match="do not fit on 2 hosts with 0 GPUs"):
        dry_run(SMOKE, ["rollout.gpus=1"], serial=False, count=2)
    assert list(tmp_path.iterdir()) == [], "no run directory, no model"
