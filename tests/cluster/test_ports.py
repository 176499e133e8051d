"""Free ports are looked for on this host before anything is begun, for the roles that come here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from segue.cluster.hosts.facts import facts_here
from segue.cluster.ports import all_roles, ports_needed
from segue.cluster.prepare import prepare
from segue.config import load_config
from segue.errors import UserError

SMOKE = Path(__file__).resolve().parents[2] / "configs" / "smoke.toml"
APART = "cluster.hosts={scheduler=[0], learner=[1], rollout=[0], envpool=[1]}"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize("count", [1, 2])
def test_a_taken_port_is_said_before_the_run_is_begun_on_one_host_and_on_several(taken: int, count: int, tmp_path: Path) -> None:
    mine = facts_here(0, "127.0.0.1")
    hosts = [msgspec.structs.replace(mine, rank=rank) for rank in range(count)] if count > 1 else []
    overrides = [f"cluster.ports=[{taken}, {taken}]", *([APART] if hosts else [])]
    here = ["scheduler", "rollout", "rollout"] if hosts else all_roles(load_config(SMOKE, []))
    wanted = rf"ports = \[{taken}, {taken}\] has 0 free ports on 127.0.0.1 and this run takes {ports_needed(here)} here"
    with pytest.raises(UserError, match=wanted):
        prepare(SMOKE, overrides, tmp_path / "run", False, hosts=hosts)
    assert not (tmp_path / "run").exists()
