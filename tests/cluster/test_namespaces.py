"""A run over three hosts made of network namespaces: `launch.sh` on each, roles apart, a cable pulled and put back.

docs/cluster.md tells what is promised; here it is seen. Root and iproute2 are needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from launches import Launch
from namespaces import Hosts, lacking

from segue.files import read_jsonl

FIRST_STEP_SECONDS = 90.0
CUT_SECONDS = 30.0
QUICKSTART_SECONDS = 600.0
PORT = 29411
APART = "cluster.hosts={scheduler=[0], learner=[0], rollout=[1], envpool=[2]}"

pytestmark = [pytest.mark.processes, pytest.mark.cluster, pytest.mark.skipif(bool(lacking()), reason=lacking())]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


def launch(hosts: Hosts, folder: Path, *words: str, ranks: tuple[int, ...] = (0, 1, 2), **env: str) -> list[Launch]:
    """The same call on every host, as docs/cluster.md says."""
    call = ["./launch.sh", *words, "--run", str(folder / "run")]
    shared = {"HEAD_ADDR": hosts.address(0), "HEAD_PORT": str(PORT), "NUM_NODES": "3", "SEGUE_TOKEN": "words that all know"} | env
    return [Launch(hosts.command(rank, *call), folder / f"host-{rank}.txt", shared | {"NODE_RANK": str(rank)}) for rank in ranks]


def summary(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return told


def test_the_quickstart_learns_across_hosts(hosts: Hosts, tmp_path: Path) -> None:
    with ExitStack() as stack:
        head, *members = [
            stack.enter_context(each) for each in launch(hosts, tmp_path, "configs/quickstart.toml", "--set", APART)
        ]
        assert head.wait(QUICKSTART_SECONDS) == 0, head.text
        assert [member.wait(30.0) for member in members] == [0, 0]
    told = summary(tmp_path)
    before, after = (told["eval"][when]["success"] for when in ("before", "after"))
    assert after > before + 0.2, told["eval"]


def test_roles_train_on_hosts_of_their_own_and_a_cut_cable_costs_no_step(hosts: Hosts, tmp_path: Path) -> None:
    steps = 24
    words = ("configs/smoke.toml", "--set", APART, "--set", f"steps={steps}", "--set", "rollout.nodes=1", "--set", "eval.tasks=0")
    with ExitStack() as stack:
        head, *members = [stack.enter_context(each) for each in launch(hosts, tmp_path, *words)]
        head.line(r"^step +1/", FIRST_STEP_SECONDS)
        first = time.monotonic() - head.began
        targets = {
            path.stem: json.loads(path.read_text())[0]["targets"][0] for path in (tmp_path / "run/metrics/targets").glob("*")
        }
        where = {name: address.rpartition(":")[0] for name, address in targets.items()}
        assert where["learner-0"] == where["scheduler-0"] == hosts.address(0)
        assert where["rollout-0"] == hosts.address(1)
        assert where["envpool-0"] == hosts.address(2)
        head.line(r"^step +4/", 60.0)
        hosts.cut(1)
        time.sleep(CUT_SECONDS)  # the promise is about this long an absence
        hosts.mend(1)
        assert head.wait(240.0) == 0, head.fail("it failed")
        assert [member.wait(30.0) for member in members] == [0, 0]
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(steps))
    assert first < FIRST_STEP_SECONDS
    assert summary(tmp_path)["steps"] == steps
    assert all(hosts.pids(host) == [] for host in range(3)), "something is left behind"
