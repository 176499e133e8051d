"""Who runs where, and whether hosts fit together: pure decisions."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.cluster.hosts.facts import differences
from segue.cluster.hosts.head import unfit
from segue.cluster.hosts.layout import Seat, elsewhere, lay_out, map_lines
from segue.cluster.hosts.messages import Check, Checked, HostFacts
from segue.cluster.hosts.plan import Plan, note_hosts, read_hosts
from segue.config import Config, load_config
from segue.errors import UserError
from segue.rundir import RunDir

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.toml"


def host(rank: int, gpus: int = 0, cores: int = 8, **other: str) -> HostFacts:
    versions = {"segue": "0.1.0 (abc)", "python": "3.11.7", "torch": "2.13.0+cpu", "vllm": "", "ray": "2.60.0"} | other
    return HostFacts(rank=rank, name=f"node{rank}", address=f"10.0.0.{rank}", cores=cores, gpus=gpus, **versions)


def config(**keys: object) -> Config:
    return load_config(SMOKE, ["envpool.instances=64", *(f"{key.replace('__', '.')}={value}" for key, value in keys.items())])


def places(seats: list[Seat]) -> dict[str, int]:
    return {seat.name: seat.host for seat in seats}


def test_without_gpus_the_learner_trains_alone_on_the_first_host() -> None:
    assert places(lay_out(config(), [host(0), host(1), host(2)])) == {
        "scheduler-0": 0,
        "learner-0": 0,
        "rollout-0": 1,
        "rollout-1": 2,
        "envpool-0": 1,
    }


def test_learner_ranks_stay_together_and_env_pools_keep_off_gpus() -> None:
    asked = config(learner__ranks=4, learner__gpus=1.0, rollout__gpus=2.0, rollout__nodes=6, envpool__pools=2)
    seats = lay_out(asked, [host(0, 8), host(1, 8), host(2), host(3)])
    where = places(seats)
    assert {where[f"learner-{rank}"] for rank in range(4)} == {0}
    assert sorted(where[f"rollout-{n}"] for n in range(6)) == [0, 0, 1, 1, 1, 1]
    assert {where["envpool-0"], where["envpool-1"]} == {2, 3}


def test_without_gpus_learner_ranks_spread_over_the_hosts_that_are_named_for_them() -> None:
    hosts = [host(0), host(1), host(2, cores=16), host(3)]
    asked = load_config(SMOKE, ["learner.ranks=3", "cluster.hosts={learner=[1,2]}"])
    where = places(lay_out(asked, hosts))
    assert [where[f"learner-{rank}"] for rank in range(3)] == [1, 2, 2], "by their cores"
    where = places(lay_out(load_config(SMOKE, ["learner.ranks=3"]), hosts))
    assert {where[f"learner-{rank}"] for rank in range(3)} == {0}


def test_a_node_sits_whole_on_one_host() -> None:
    with pytest.raises(UserError, match=r"rollout.nodes = 1 with 4 GPU each do not fit on 2 hosts with 6 GPUs"):
        lay_out(config(rollout__gpus=4.0, rollout__nodes=1, learner__gpus=0.0), [host(0, 3), host(1, 3)])


def test_the_config_may_name_hosts() -> None:
    asked = load_config(SMOKE, ["cluster.hosts={learner=[2],rollout=[1],envpool=[0]}"])
    where = places(lay_out(asked, [host(0), host(1), host(2)]))
    assert where == {"scheduler-0": 0, "learner-0": 2, "rollout-0": 1, "rollout-1": 1, "envpool-0": 0}
    with pytest.raises(UserError, match=r"cluster.hosts.learner names host 2 and this run has 2 hosts"):
        lay_out(asked, [host(0), host(1)])
    for wrong in ("[]", "[-1]", "[1,1]"):
        with pytest.raises(UserError, match=r"cluster.hosts"):
            load_config(SMOKE, [f"cluster.hosts={{learner={wrong}}}"])


@given(
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    ranks=st.integers(1, 6),
    nodes=st.integers(1, 8),
    each=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_no_host_gives_more_gpus_than_it_has(gpus: list[int], ranks: int, nodes: int, each: float) -> None:
    hosts = [host(rank, number) for rank, number in enumerate(gpus)]
    asked = config(learner__ranks=ranks, learner__gpus=min(each, 1.0), rollout__nodes=nodes, rollout__gpus=each)
    try:
        seats = lay_out(asked, hosts)
    except UserError:
        return
    assert len(seats) == 1 + ranks + nodes + asked.envpool.pools
    for one in hosts:
        assert sum(seat.gpus for seat in seats if seat.host == one.rank) <= one.gpus + 1e-6


def test_a_role_moves_where_room_is_left() -> None:
    hosts = [host(0, 2), host(1, 1)]
    taken = [Seat("learner-0", 0, 1.0), Seat("rollout-1", 1, 1.0)]
    assert elsewhere(Seat("rollout-0", 2, 1.0), config(), hosts, taken) == Seat("rollout-0", 0, 1.0)
    assert elsewhere(Seat("rollout-0", 2, 2.0), config(), hosts, taken) is None


def test_the_map_and_the_file(tmp_path: Path) -> None:
    hosts = [host(0, 1), host(1)]
    seats = [Seat("learner-0", 0, 1.0), Seat("envpool-0", 1)]
    assert map_lines(seats, hosts) == [
        "  host 0    node0 at 10.0.0.0, 1 GPU, 8 cores: learner-0 (1 GPU)",
        "  host 1    node1 at 10.0.0.1, no GPU, 8 cores: envpool-0",
    ]
    run = RunDir(tmp_path)
    assert read_hosts(run) is None
    note_hosts(run, hosts, seats)
    assert read_hosts(run) == Plan(hosts, seats)
    note_hosts(run, hosts, seats, "10.0.0.1:6379")
    assert read_hosts(run) == Plan(hosts, seats, "10.0.0.1:6379"), "a run on a Ray that was there before"
    note_hosts(run, [], [])
    assert read_hosts(run) is None


def test_what_differs_is_said() -> None:
    assert differences([host(0), host(1, torch="2.13.0+cu130")], "embedded") == "", "CPU and GPU builds of one version"
    assert differences([host(0), host(1, vllm="0.31.0")], "embedded") == "", "vLLM is not used"
    said = differences([host(0, vllm="0.32.0"), host(1)], "vllm")
    assert said.startswith("Host 1 (node1) has vllm not at all, and host 0 (node0) 0.32.0: install the same")
    others = {
        "Python": ("python", "3.12.1"),
        "Segue": ("segue", "0.1.0 (def)"),
        "torch": ("torch", "2.12.0"),
        "ray": ("ray", "2.59.0"),
    }
    for title, (key, version) in others.items():
        said = differences([host(0), host(1), msgspec.structs.replace(host(2), **{key: version})], "embedded")
        ours = getattr(host(0), key).partition("+")[0]
        assert said.startswith(f"Host 2 (node2) has {title} {version}, and host 0 (node0) {ours}"), said


def test_what_keeps_a_host_out_is_said() -> None:
    check = Check({"/runs/x/.seen": "words", "/models/m": ""}, "/runs/x", (20000, 20003))
    assert unfit("Host 1 (node1)", check, Checked([], "", 4), 4) == ""
    assert unfit("Host 1 (node1)", check, Checked(["/models/m"], "", 4), 4).startswith("Host 1 (node1) does not see /models/m")
    assert "cannot write /runs/x (Read-only file system)" in unfit("H", check, Checked([], "Read-only file system", 4), 4)
    assert "has 3 free ports in cluster.ports = [20000, 20003] and needs 4" in unfit("H", check, Checked([], "", 3), 4)
