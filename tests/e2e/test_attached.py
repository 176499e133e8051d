"""Runs on a Ray that is there already: what is refused, a whole run, what is left of it, and that the Ray goes on.

The Ray is a real one, with a token and two nodes on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_run import Command, assert_whole, kill, segue

from segue.cluster.hosts import gathered
from segue.cluster.hosts.attached import Attached, look
from segue.cluster.hosts.messages import Look
from segue.cluster.hosts.nodes import why
from segue.cluster.hosts.plan import read_hosts
from segue.cluster.hosts.several import check_alone
from segue.cluster.hosts.where import Where
from segue.cluster.supervisor import supervise
from segue.config import Config, load_config
from segue.config.root import resolve
from segue.errors import UserError
from segue.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
SMOKE = "configs/smoke.toml"
START_SECONDS = 90.0
LEFT_SECONDS = 30.0
TOKEN = "the words of this test's Ray, not of any other"
LEFT = """
import json, os, ray
ray.init(address=os.environ["ADDRESS"], log_to_driver=False, logging_level="ERROR")
actors = [each["State"] for each in ray._private.state.actors().values()]
groups = [each["state"] for each in ray.util.placement_group_table().values()]
nodes = [each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]]
print(json.dumps({"actors": actors, "groups": groups, "nodes": nodes}))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class RayThere:
    """A Ray of two nodes that nobody of Segue started. Not at 127.0.0.1: Ray makes the address of an interface out of that."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.2:{free_port()}"
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        port = self.address.rpartition(":")[2]
        self._folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._start("127.0.0.2", "--head", "--port", port, "--include-dashboard", "false")
        self._start("127.0.0.3", "--address", self.address)

    def _start(self, address: str, *words: str) -> None:
        """One node, until it runs."""
        log = self._folder / f"{address}.log"
        common = ["--block", "--disable-usage-stats", "--node-ip-address", address, "--num-cpus", "2", "--num-gpus", "0"]
        common += ["--object-store-memory", "80000000", "--temp-dir", str(self._folder / address)]
        with log.open("wb") as out:
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common]
            node = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | self.env, start_new_session=True)
        self._nodes.append(node)
        deadline = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            if node.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"this test's Ray did not start:\n{log.read_text()}")
            time.sleep(0.1)

    def left(self) -> dict[str, Any]:
        """What a driver of it sees."""
        env = os.environ | self.env | {"ADDRESS": self.address}
        told = subprocess.run([sys.executable, "-c", LEFT], env=env, capture_output=True, text=True, timeout=60, check=True)
        seen: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
        return seen

    def assert_as_before(self) -> None:
        """Both nodes, and soon no actor and no placement group."""
        deadline = time.monotonic() + LEFT_SECONDS
        while True:
            seen = self.left()
            assert sorted(seen["nodes"]) == ["127.0.0.2", "127.0.0.3"]
            if set(seen["actors"]) <= {"DEAD"} and set(seen["groups"]) <= {"REMOVED"}:
                return
            assert time.monotonic() < deadline, seen

    def close(self) -> None:
        for node in reversed(self._nodes):
            with contextlib.suppress(psutil.NoSuchProcess):
                family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
                node.send_signal(signal.SIGTERM)
                _, alive = psutil.wait_procs(family, timeout=10.0)
                for process in alive:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            node.wait()


@pytest.fixture(scope="module")
def there() -> Iterator[RayThere]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray = RayThere(Path(folder))
        yield ray
        ray.close()


def config(**cluster: Any) -> Config:
    told = {"steps": 1, "task": {"env": "latency"}, "model": {"path": "x"}, "cluster": cluster}
    return resolve(told, "a test")


# --- sentences ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["somewhere", "ray://10.0.0.1:10001", "10.0.0.1", ":6379", "10.0.0.1:port"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(UserError, match=r"sets cluster.ray = .*, which must be .*host:port: change it"):
        config(ray=address)


def test_hosts_are_not_gathered_for_a_ray_that_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "TURN_AWAY_SECONDS", 0.0)
    check_alone(config(ray="auto"), 1)
    check_alone(config(), 4)
    where = Where(2, "127.0.0.1", free_port(), "words")
    sentence = r"cluster.ray = 'auto' runs on the nodes of a Ray that is there, and --hosts \(NUM_NODES\) gathers others"
    with pytest.raises(UserError, match=sentence):
        supervise(ROOT / SMOKE, ["cluster.ray=auto"], tmp_path / "run", False, False, where)
    assert not (tmp_path / "run").exists()


def test_what_keeps_us_from_a_ray_is_one_sentence() -> None:
    """What Ray 2.60 says, in its own words."""
    mismatch = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.12.1\n"
        "This process on Ray Client was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    assert why("10.0.0.1:6379", RuntimeError(mismatch)) == (
        "The Ray at 10.0.0.1:6379 is Ray 2.59.0 on Python 3.12.1, and here is Ray 2.60.0 on Python 3.11.7: install the same on "
        "all (with containers, use one image)."
    )
    assert "\n" not in why("auto", RuntimeError("what\nelse"))


@pytest.mark.processes
def test_nobody_there() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"No Ray answers at {address} \(Connection refused\): correct cluster.ray"):
        look(Look(address))


@pytest.mark.processes
@pytest.mark.full
def test_another_token(there: RayThere, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (there.env | {"RAY_AUTH_TOKEN": "not the words"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"The Ray at {there.address} wants a token, and another one than there is here"):
        look(Look(there.address))


@pytest.mark.processes
@pytest.mark.full
def test_roles_that_do_not_fit_are_said_before_anything_starts(there: RayThere, tmp_path: Path) -> None:
    sets = ("--set", f"cluster.ray={there.address}", "--set", "rollout.gpus=1")
    command = segue("train", SMOKE, "--run", tmp_path / "run", *sets, env=there.env)
    assert command.wait() == 2
    assert "rollout.nodes = 2 with 1 GPU each do not fit on 2 hosts with 0 GPUs" in command.sentence()
    assert not (tmp_path / "run").exists()


# --- runs -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.full
def test_a_run_leaves_the_ray_as_it_was(there: RayThere, tmp_path: Path) -> None:
    run = tmp_path / "run"
    apart = "cluster.hosts={scheduler=[0], learner=[0], rollout=[1], envpool=[1]}"
    sets = ("--set", "steps=2", "--set", "eval.tasks=0", "--set", "rollout.nodes=1", "--set", apart)
    command = segue("train", SMOKE, "--run", run, *sets, "--set", f"cluster.ray={there.address}", env=there.env)
    if command.wait() != 0:
        command.fail("it failed")
    there.assert_as_before()
    assert_whole(run, 2)
    assert f"  ray       the one at {there.address}, which goes on when the run ends" in command.out
    plan = read_hosts(RunDir.open(run))
    assert plan is not None and plan.ray == there.address
    assert [host.address for host in plan.hosts] == ["127.0.0.2", "127.0.0.3"]
    assert {seat.name: seat.host for seat in plan.seats}["envpool-0"] == 1
    command.assert_nothing_left()


@pytest.mark.processes
@pytest.mark.full
def test_the_roles_of_a_killed_driver_go(there: RayThere, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sets = ("--set", "eval.tasks=0", "--set", "steps=1000", "--set", f"cluster.ray={there.address}")
    with Command("train", SMOKE, "--run", run, *sets, env=there.env) as command:
        command.steps(1)
        kill(command.pid_of("segue.cluster.driver"))
        assert command.wait(60.0) == 1
        assert "driver died" in command.sentence()
        there.assert_as_before()


@pytest.mark.processes
@pytest.mark.full
def test_auto_is_the_ray_of_this_machine(there: RayThere, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in KubeRay's head pod, where RAY_ADDRESS says which it is."""
    for name, value in (there.env | {"RAY_ADDRESS": there.address}).items():
        monkeypatch.setenv(name, value)
    with Attached(load_config(ROOT / SMOKE, ["cluster.ray=auto"])) as attached:
        assert [(host.rank, host.address, host.gpus) for host in attached.hosts] == [(0, "127.0.0.2", 0), (1, "127.0.0.3", 0)]
        assert attached.ray == there.address
