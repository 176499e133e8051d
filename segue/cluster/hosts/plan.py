"""hosts.json in the run directory: the hosts of a run on several and who sits where, for the driver and for whoever reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from segue.cluster.hosts.layout import Seat
from segue.cluster.hosts.messages import HostFacts
from segue.files import write_json
from segue.rundir import HOSTS, RunDir


class Plan(NamedTuple):
    """`ray` is the address of the Ray that the hosts are nodes of already, "" where one is started for the run."""

    hosts: list[HostFacts]
    seats: list[Seat]
    ray: str = ""


def note_hosts(run: RunDir, hosts: Sequence[HostFacts], seats: Sequence[Seat], ray: str = "") -> None:
    """Write the plan; without hosts the file of an earlier attempt goes."""
    if not hosts:
        (run.path / HOSTS).unlink(missing_ok=True)
        return
    placed = [{"name": seat.name, "host": seat.host, "gpus": seat.gpus} for seat in seats]
    write_json(run.path / HOSTS, {"ray": ray, "hosts": msgspec.to_builtins(list(hosts)), "seats": placed})


def read_hosts(run: RunDir) -> Plan | None:
    """What `note_hosts` left; None for a run on one machine."""
    if not (run.path / HOSTS).is_file():
        return None
    told = json.loads((run.path / HOSTS).read_text(encoding="utf-8"))
    hosts = msgspec.convert(told["hosts"], list[HostFacts])
    return Plan(hosts, [Seat(**seat) for seat in told["seats"]], told.get("ray", ""))
