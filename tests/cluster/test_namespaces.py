"""A run over three hosts made of network namespaces: `launch.sh` on each, roles apart, a cable pulled and put back.

docs/cluster.md tells what is promised; here it is seen. Root and iproute2 are needed.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from launches import ROOT, Launch
from namespaces import Hosts, lacking

from segue.config import load_config
from segue.files import read_jsonl
from segue.rundir import RunDir

FIRST_STEP_SECONDS = 90.0
CUT_SECONDS = 30.0
GIVEN_UP_SECONDS = 120.0  # within which Ray gives up a host that it does not hear
QUICKSTART_SECONDS = 600.0
PORT = 29411
APART = "cluster.hosts={scheduler=[0], learner=[0], rollout=[1], envpool=[2]}"

NODE = """
import sys, time, urllib.request
from segue.metrics.samples import read_exposition, total
names = ("segue_decode_tokens_total", "segue_discarded_tokens_total", "segue_leases_lost_total", "segue_episodes_running")
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
while True:
    now = time.monotonic()
    try:
        scrape = {"rollout-0": read_exposition(opener.open(f"http://{sys.argv[1]}/metrics", timeout=5.0).read().decode())}
    except OSError:
        break
    print(now, *(total(scrape, "rollout", name) for name in names), flush=True)
    time.sleep(0.05)
"""
"""Reads the rollout node's counters on its own host, where they can be read also while nobody else reaches it."""

COUNTED = """
import sys, time, urllib.request
from segue.metrics.samples import read_exposition, total
address, target, name = sys.argv[1:]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
while True:
    try:
        scrape = {target: read_exposition(opener.open(f"http://{address}/metrics", timeout=5.0).read().decode())}
        if total(scrape, target.partition("-")[0], name) > 0:
            break
    except OSError:
        pass
    time.sleep(0.1)
print("counted", flush=True)
"""
"""Ends once a process has counted something."""

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


def target(folder: Path, name: str, within: float) -> str:
    """The address at which a process serves its metrics, once it does."""
    path = folder / "run" / "metrics" / "targets" / f"{name}.json"
    deadline = time.monotonic() + within
    while not path.exists():
        assert time.monotonic() < deadline, f"{name} is no target within {within:g} s"
        time.sleep(0.1)
    address: str = json.loads(path.read_text())[0]["targets"][0]
    return address


def assert_map(head: Launch, hosts: Hosts, *roles: str) -> None:
    """The world map that was printed, host by host."""
    for host, names in enumerate(roles):
        line = rf"^  host {host}    \S+ at {re.escape(hosts.address(host))}, (?:no GPU|\d+ GPUs?), \d+ cores: {names}$"
        assert re.search(line, head.text, re.MULTILINE), head.text


def apart(steps: int) -> list[str]:
    """Learner, one rollout node and env pool on hosts of their own."""
    sets = (APART, f"steps={steps}", "rollout.nodes=1", "eval.tasks=0", "staleness.max_age=8")  # a bound that leaves no node idle
    return ["configs/smoke.toml", *(word for each in sets for word in ("--set", each))]


def assert_little_was_lost(read: list[list[float]], cut: float, mended: float) -> None:
    """What the node had sampled and the scheduler did not have when the node's own clock ended its leases, counted by the node.

    A turn is a delta, and the next turn needs the env pool, which is out of reach: of each episode that is at most the turn whose
    delta was not acknowledged yet, and the one under way. `read` is what `NODE` printed; one machine has one monotonic clock.
    """
    before = [line for line in read if line[0] <= cut][-1]
    last = [line for line in read if cut < line[0] < mended][-1]
    assert last[3] > before[3] and last[4] == 0, "it did not give its leases up while it was cut off"
    lost, running = last[2] - before[2], before[4]
    turn = load_config(ROOT / "configs" / "smoke.toml", []).rollout.max_turn_tokens
    print(f"{lost:.0f} of {before[1]:.0f} sampled tokens were lost, of {running:.0f} episodes")
    assert lost <= 2 * turn * running


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
    neighbour = Launch(hosts.command(1, "bash", "-c", "exec -a raylet sleep 900"), tmp_path / "neighbour.txt")
    with neighbour, ExitStack() as stack:
        head, *members = [stack.enter_context(each) for each in launch(hosts, tmp_path, *apart(steps))]
        head.line(r"^step +1/", FIRST_STEP_SECONDS)
        first = time.monotonic() - head.began
        assert_map(head, hosts, "scheduler-0, learner-0", "rollout-0", "envpool-0")
        targets = {
            path.stem: json.loads(path.read_text())[0]["targets"][0] for path in (tmp_path / "run/metrics/targets").glob("*")
        }
        where = {name: address.rpartition(":")[0] for name, address in targets.items()}
        assert where["learner-0"] == where["scheduler-0"] == hosts.address(0)
        assert where["rollout-0"] == hosts.address(1)
        assert where["envpool-0"] == hosts.address(2)
        watch = hosts.command(1, sys.executable, "-c", NODE, targets["rollout-0"])
        node = stack.enter_context(Launch(watch, tmp_path / "node.txt"))
        node.line(r"^\d", 30.0)
        head.line(r"^step +4/", 60.0)
        node.line(r"^\S+ \S+ \S+ \S+ ([4-9]|1\d)\.0\n\Z", 30.0)  # it has episodes at this moment
        cut = time.monotonic()
        hosts.cut(1)
        time.sleep(CUT_SECONDS)  # the promise is about this long an absence
        mended = time.monotonic()
        hosts.mend(1)
        head.line(r"^warning: rollout-0 was fenced \(\w+\): its episodes go on elsewhere from their last deltas", 60.0)
        assert head.wait(240.0) == 0, head.fail("it failed")
        assert [member.wait(30.0) for member in members] == [0, 0]
        node.wait(30.0)
        left = [hosts.pids(host) for host in range(3)]
        assert left == [[], [neighbour.process.pid], []], "what was started is gone, and nothing else"
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert logs >= {
        f"{name}.log" for name in ("driver-0", "scheduler-0", "learner-0", "rollout-0", "envpool-0", "host-1", "host-2")
    }
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(steps))
    assert first < FIRST_STEP_SECONDS
    assert_little_was_lost([[float(word) for word in line.split()] for line in node.text.splitlines()], cut, mended)
    assert summary(tmp_path)["steps"] == steps


def test_a_host_that_was_given_up_rejoins_as_a_new_node(hosts: Hosts, tmp_path: Path) -> None:
    steps = 12
    with ExitStack() as stack:
        head, *members = [stack.enter_context(each) for each in launch(hosts, tmp_path, *apart(steps))]
        head.line(r"^step +2/", FIRST_STEP_SECONDS + 30.0)
        hosts.cut(1)
        head.line(r"rollout-0 is gone with host 1 .*; it waits for that host for up to 600 s", GIVEN_UP_SECONDS)
        hosts.mend(1)
        head.line(r"(?s)rollout-0 is gone.*rollout-0 died; starting it again on host 1 ", 120.0)
        assert head.wait(240.0) == 0, head.fail("it failed")
        assert [member.wait(30.0) for member in members] == [0, 0]
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(range(steps))
    assert summary(tmp_path)["steps"] == steps
    assert all(hosts.pids(host) == [] for host in range(3)), "something is left behind"


def test_learner_ranks_on_two_hosts_train_as_one(hosts: Hosts, tmp_path: Path) -> None:
    """They meet at the first of them, which is not where the driver is."""
    steps, elsewhere = 6, "cluster.hosts={scheduler=[0], learner=[1, 2], rollout=[0], envpool=[0]}"
    sets = (elsewhere, f"steps={steps}", "learner.ranks=2", "rollout.nodes=1", "eval.tasks=0", "weightsync.bucket_bytes=16384")
    with ExitStack() as stack:
        words = ["configs/smoke.toml", *(word for each in sets for word in ("--set", each))]
        head, *members = [stack.enter_context(each) for each in launch(hosts, tmp_path, *words)]
        assert head.wait(240.0) == 0, head.fail("it failed")
        assert [member.wait(30.0) for member in members] == [0, 0]
        assert_map(head, hosts, "scheduler-0, rollout-0, envpool-0", "learner-0", "learner-1")
    assert [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(range(steps))
    log = (tmp_path / "run" / "logs" / "learner-1.log").read_text()
    assert f"learner-1 sends its share of step {steps - 1}" in log, "and both send weights to the node"


def test_a_host_that_comes_late_gets_a_node_and_a_pool_and_leaves_again_while_the_run_goes_on(
    hosts: Hosts, tmp_path: Path
) -> None:
    sets = ("cluster.hosts={scheduler=[0], learner=[0], rollout=[1], envpool=[0]}", "steps=100000", "eval.tasks=0")
    more = ("rollout.nodes=1", "rollout.max_nodes=2", "envpool.max_pools=2", "staleness.max_age=8", "checkpoint.every=1000")
    words = ["configs/smoke.toml", *(word for each in (*sets, *more) for word in ("--set", each))]
    with ExitStack() as stack:

        def start(*ranks: int) -> list[Launch]:
            return [stack.enter_context(each) for each in launch(hosts, tmp_path, *words, ranks=ranks, NUM_NODES="2")]

        head, member = start(0, 1)
        head.line(r"^step +2/", FIRST_STEP_SECONDS + 30.0)
        [late] = start(2)
        for name, metric in (("rollout-1", "segue_decode_tokens_total"), ("envpool-1", "segue_env_step_seconds_count")):
            head.line(rf"^{name} starts on host 2 ", 90.0)
            address = target(tmp_path, name, 90.0)
            assert address.startswith(f"{hosts.address(2)}:")
            works = hosts.command(0, sys.executable, "-c", COUNTED, address, name, metric)
            assert stack.enter_context(Launch(works, tmp_path / f"{name}.txt")).wait(120.0) == 0
        late.process.send_signal(signal.SIGINT)
        assert late.wait(30.0) == 128 + signal.SIGINT
        assert hosts.pids(2) == [], "something is left behind"
        head.line(r"^host 2 .* leaves: it was told to \(SIGINT\)", 30.0)
        trained = max(int(step) for step in re.findall(r"^step +(\d+)/", head.text, re.MULTILINE))
        head.line(rf"^step +{trained + 5}/", 120.0)
        head.process.send_signal(signal.SIGINT)
        assert head.wait(120.0) == 128 + signal.SIGINT, head.fail("it did not stop in order")
        assert member.wait(30.0) == 0
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines))) and len(lines) >= trained + 5
    assert RunDir.open(tmp_path / "run").latest_checkpoint().step == len(lines)
    assert all(hosts.pids(host) == [] for host in range(3)), "something is left behind"
