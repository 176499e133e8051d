"""Where the hosts of a run meet: the address of the first, and the token that they share."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from segue.cluster.hosts import where as wheres
from segue.cluster.hosts.facts import address_towards, own_address
from segue.cluster.hosts.member import join
from segue.cluster.hosts.where import resolve, token_of
from segue.errors import UserError


def test_the_token(tmp_path: Path) -> None:
    assert token_of({"SEGUE_TOKEN": "mine"}, tmp_path / "token") == "mine"
    made = token_of({}, tmp_path / "deep" / "token")
    assert len(made) == 64
    assert token_of({}, tmp_path / "deep" / "token") == made
    assert (tmp_path / "deep" / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "empty").write_text("")
    with pytest.raises(UserError, match="is empty: remove it, or set SEGUE_TOKEN"):
        token_of({}, tmp_path / "empty")


def test_an_unknown_address_is_said() -> None:
    assert resolve("localhost") in ("127.0.0.1", "::1")
    assert resolve("127.0.0.2") == "127.0.0.2", "an address is meant as it is"
    with pytest.raises(UserError, match="is no address that is known here"):
        resolve("no-such-host.invalid")


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("..foo", "no host can have that name"),
        ("a" * 70, "no host can have that name"),
        ("127.0.0.1:29400", "and set HEAD_PORT to the port"),
        ("0.0.0.0", "is no address to call at"),
    ],
)
def test_what_can_be_no_host_is_said_without_a_traceback(address: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        resolve(address)
    if address != "0.0.0.0":
        with pytest.raises(UserError, match=r"HEAD_ADDR = .* cannot be reached from"):
            address_towards(address, 29400)


def test_a_hosts_own_address_is_one_that_it_has() -> None:
    assert own_address("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(UserError, match=r"HEAD_ADDR = '\.\.foo' is no address \(no host can have that name\)"):
        join("..foo", 29400, 1, "127.0.0.1", "token", 1.0)  # its own address is known, so that nobody asked for the head's before
    for address in ("not-an-address.invalid", "203.0.113.7", "..foo"):
        with pytest.raises(UserError, match=f"NODE_ADDR = '{address}' is no address of .*: set it to the one"):
            own_address(address)


def test_a_host_that_takes_its_own_name_for_loopback_is_reached_where_its_packets_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts has it; SLURM tells the first node by its name."""
    known = ["127.0.1.1"]

    def names(name: str, *_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in known]

    monkeypatch.setattr(socket, "getaddrinfo", names)
    monkeypatch.setattr(wheres, "ELSEWHERE", "127.0.0.9")  # reached from 127.0.0.1, on every machine
    assert resolve("node1") == "127.0.0.1"
    monkeypatch.setattr(wheres, "_outward", Mock(side_effect=OSError("Network is unreachable")))
    with pytest.raises(
        UserError, match=r"HEAD_ADDR = 'node1' is 127.0.1.1 on this host, where no other reaches it: set HEAD_ADDR"
    ):
        resolve("node1")
    known.append("10.0.0.1")
    assert resolve("node1") == "10.0.0.1"
