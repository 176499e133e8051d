"""Which of Ray's nodes a host of the run is, and where a role goes when its host is lost. Ray's list of nodes is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from segue.cluster import driver, placement
from segue.cluster.child import Job, Report
from segue.cluster.hosts.layout import Seat
from segue.cluster.hosts.member import HOST_RESOURCE
from segue.cluster.hosts.messages import HostFacts
from segue.cluster.hosts.plan import Plan
from segue.cluster.placement import Placement
from segue.cluster.ray_nodes import Addressed, Numbered
from segue.cluster.role_handle import Died
from segue.config import Config
from segue.config.root import resolve
from segue.console import Console
from segue.errors import RunFailed
from segue.rundir import RunDir

SEATS = [Seat("rollout-0", 1, 1.0), Seat("envpool-0", 1)]
RAY = "10.0.0.1:6379"


def host(rank: int, gpus: int = 1) -> HostFacts:
    return HostFacts(rank, f"node{rank}", f"10.0.0.{rank}", "", "", "", "", "", 8, gpus)


def node(rank: int, gpus: int = 1, address: str = "") -> dict[str, Any]:
    address = address or f"10.0.0.{rank}"
    resources = {HOST_RESOURCE.format(rank): 1.0, f"node:{address}": 1.0, "GPU": float(gpus)}
    return {
        "NodeID": f"first-{rank}",
        "Alive": True,
        "NodeManagerAddress": address,
        "NodeManagerHostname": f"node{rank}",
        "Resources": resources,
    }


def config(patience: float, max_pools: int = 0, **rollout: Any) -> Config:
    return resolve(
        {
            "steps": 1,
            "task": {"env": "latency"},
            "model": {"path": "x"},
            "cluster": {"absence_seconds": patience},
            "rollout": {"gpus": 1, "max_episodes": 8} | rollout,
            "envpool": {"max_pools": max_pools},
        },
        "a test",
    )


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """Ray's nodes as the next looks will find them; the last stays."""
    looks: list[list[dict[str, Any]]] = []
    monkeypatch.setattr("segue.cluster.ray_nodes.ray.nodes", lambda: looks.pop(0) if len(looks) > 1 else looks[0])
    monkeypatch.setattr(placement, "_LOOK_SECONDS", 0.0)
    return looks


def test_nodes_of_a_ray_that_was_there_are_known_by_address_and_keep_their_numbers(there: list[Any]) -> None:
    nodes = Addressed([host(0), host(1)])
    there.append([node(7), node(0), node(1), node(5) | {"Alive": False}])
    assert sorted(nodes.alive()) == [0, 1, 2]
    assert nodes.alive()[2]["NodeManagerAddress"] == "10.0.0.7"
    there[:] = [[node(0), node(8), node(7)]]
    assert {rank: each["NodeManagerAddress"] for rank, each in nodes.alive().items()} == {
        0: "10.0.0.0",
        2: "10.0.0.7",
        3: "10.0.0.8",
    }
    assert nodes.resource(host(1)) in node(1)["Resources"]


def test_hosts_that_were_started_for_the_run_are_known_by_number(there: list[Any]) -> None:
    there.append([node(1, address="10.9.9.9"), node(0), {"Alive": True, "Resources": {"CPU": 1.0}}])
    assert sorted(Numbered().alive()) == [0, 1]
    assert Numbered().resource(host(1)) in node(1)["Resources"]


async def test_a_host_that_comes_back_under_another_address_is_used_there(there: list[Any]) -> None:
    place = Placement(config(60.0), Plan([host(0, 0), host(1)], SEATS))
    there += [[node(0, 0)], [node(0, 0)], [node(0, 0), node(1, address="10.9.9.9")]]
    assert await place.seat_again("rollout-0")
    assert (place.host_of("rollout-0"), place.address_of("rollout-0")) == (1, "10.9.9.9")


@pytest.mark.parametrize(("ray", "moves"), [("", False), (RAY, True)])
async def test_only_where_lost_nodes_do_not_come_back_a_rollout_node_takes_another_at_once(
    there: list[Any], ray: str, moves: bool
) -> None:
    """Its own host is back with the second look."""
    place = Placement(config(60.0), Plan([host(0, 0), host(1), host(2)], SEATS, ray))
    there += [[node(0, 0), node(2)], [node(0, 0), node(2)], [node(0, 0), node(1), node(2)]]
    assert await place.seat_again("rollout-0")
    assert place.host_of("rollout-0") == (2 if moves else 1)


async def test_an_env_pool_moves_at_once_and_a_node_that_finds_no_room_stays_away(there: list[Any]) -> None:
    place = Placement(config(0.001), Plan([host(0, 0), host(1)], SEATS))
    there.append([node(0, 0)])
    assert await place.seat_again("envpool-0")
    assert place.host_of("envpool-0") == 0
    assert not await place.seat_again("rollout-0")


async def test_an_env_pool_that_no_other_host_may_have_waits_for_its_own(there: list[Any]) -> None:
    pinned = config(60.0)
    pinned = pinned.model_copy(update={"cluster": pinned.cluster.model_copy(update={"hosts": {"envpool": [1]}})})
    place = Placement(pinned, Plan([host(0, 0), host(1)], SEATS))
    there += [[node(0, 0)], [node(0, 0)], [node(0, 0)], [node(0, 0)], [node(0, 0), node(1)]]
    assert await place.seat_again("envpool-0")
    assert place.host_of("envpool-0") == 1


@pytest.mark.parametrize(("ray", "hint"), [("", "see logs/host-1.log"), (RAY, "kubectl describe pod node1")])
async def test_a_host_that_is_no_node_of_ray_is_named(there: list[Any], ray: str, hint: str) -> None:
    there.append([node(0)])
    with pytest.raises(RunFailed, match=rf"Host 1 \(node1\) was no node of Ray within cluster.start_seconds = 0.01: .*{hint}"):
        await Placement(config(1.0), Plan([host(0), host(1)], SEATS, ray)).gathered(0.01)


@pytest.mark.parametrize(("ray", "hint"), [("", "see logs/host-1.log"), (RAY, "kubectl describe pod node1")])
async def test_a_host_that_is_lost_with_a_role_that_starts_is_named(there: list[Any], ray: str, hint: str) -> None:
    """Ray learns it late."""
    place = Placement(config(1.0), Plan([host(0, 0), host(1)], SEATS, ray))
    there += [[node(0, 0), node(1)], [node(0, 0), node(1)], [node(0, 0)]]
    lost = str(await place.lost_with("rollout-0"))
    assert lost.startswith("Host 1 (node1) was lost while the roles started, and rollout-0 with it: ")
    assert hint in lost


async def test_a_host_that_has_joined_again_by_then_was_lost(there: list[Any]) -> None:
    place = Placement(config(1.0), Plan([host(0, 0), host(1)], SEATS))
    there.append([node(0, 0), node(1)])
    await place.gathered(20.0)
    there[:] = [[node(0, 0), node(1) | {"NodeID": "second"}]]
    assert "Host 1 (node1) was lost" in str(await place.lost_with("envpool-0"))


async def test_a_role_that_dies_on_a_host_that_stays_has_died_by_itself(
    there: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_LOST_SECONDS", 0.05)
    place = Placement(config(1.0), Plan([host(0, 0), host(1)], [*SEATS, Seat("scheduler-0", 0)]))
    there.append([node(0, 0), node(1)])
    assert await place.lost_with("rollout-0") is None
    there[:] = [[]]
    assert await place.lost_with("scheduler-0") is None, "who asks is on that host"


async def test_a_death_in_the_start_is_put_down_to_the_host_that_was_lost(
    there: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver itself, up to the start of its roles, which ends with a death."""
    told = Config.model_validate(config(1.0).model_dump())
    run = RunDir(tmp_path)
    place = Plan([host(0, 0), host(1)], SEATS)
    report, cluster = Mock(spec=Report), Mock(processes=list, address="10.0.0.0:1")
    monkeypatch.setattr(driver, "read_hosts", lambda run: place)
    monkeypatch.setattr(driver, "ray_of", lambda *_: cluster)
    monkeypatch.setattr(driver.Driver, "_start", AsyncMock(side_effect=Died(RunFailed("rollout-0", "rollout-0 died."))))
    monkeypatch.setattr(driver, "pin", lambda *_: None)
    there += [[node(0, 0), node(1)], [node(0, 0), node(1)], [node(0, 0)]]
    job = Job(run, told, "", 1, "", False, report, Mock(spec=Console), tmp_path)
    assert await driver.Driver(job).run() == 1
    code, part, sentence = report.result.call_args.args
    assert (code, part) == (1, "rollout-0") and sentence.startswith("Host 1 (node1) was lost while the roles started")
    cluster.stop.assert_called_once()


def test_newcomers_get_rollout_nodes_and_a_pool_each_as_far_as_may_be(there: list[Any]) -> None:
    place = Placement(config(1.0, max_pools=2, max_nodes=3), Plan([host(0), host(1)], SEATS, RAY))
    there.append([node(0), node(1), node(4, gpus=4), node(5, gpus=4)])
    assert place.newcomers() == ["envpool-1", "rollout-1", "rollout-2"]
    assert {place.address_of(name) for name in ("envpool-1", "rollout-1", "rollout-2")} == {"10.0.0.4"}
    assert place.newcomers() == []


def test_without_leave_for_more_newcomers_get_nothing(there: list[Any]) -> None:
    place = Placement(config(1.0, nodes=1), Plan([host(0), host(1)], SEATS))
    there.append([node(0), node(1), node(4, gpus=4)])
    assert place.newcomers() == []


@pytest.mark.parametrize("pool", [0, 1])
async def test_a_host_that_comes_back_after_its_node_was_given_up_gets_another(there: list[Any], pool: int) -> None:
    """Also where a pool waits for that host. The name is not used again: what it left behind is still known under it."""
    seats = [Seat("rollout-0", 0, 1.0), Seat("rollout-1", 1, 1.0), Seat("envpool-0", pool)]
    place = Placement(config(0.001, nodes=2), Plan([host(0), host(1)], seats))
    there.append([node(0)])
    assert not await place.seat_again("rollout-1")
    place.give_up("rollout-1")
    assert place.newcomers() == [], "it has not come back"
    there[:] = [[node(0), node(1, address="10.9.9.9")]]
    assert place.newcomers() == ["rollout-2"]
    assert place.address_of("rollout-2") == "10.9.9.9"
    assert place.newcomers() == []
