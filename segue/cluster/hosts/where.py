"""Where the hosts of a run meet, and the secret by which they know each other."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from segue.cluster.hosts.facts import reason
from segue.errors import UserError

PORT = 29400
TOKEN_FILE = Path("~/.segue/token")
ELSEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): packets to it would take the route to other networks."""


@dataclass(frozen=True)
class Where:
    """What `launch.sh` is told: how many hosts, and where this first one listens for the others."""

    hosts: int
    address: str
    port: int = PORT
    token: str = ""


def resolve(address: str) -> str:
    """HEAD_ADDR, a name or an address, as the address at which this first host is reached. Raises `UserError`.

    A host may know its own name as a loopback address (127.0.1.1 in Debian's /etc/hosts), which means each other machine to
    itself. Then it is the address that its packets to other networks leave from.
    """
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        port = ", and set HEAD_PORT to the port" if ":" in address else ""
        raise UserError(
            f"HEAD_ADDR = {address!r} is no address that is known here ({reason(error)}): set it to a name or an address "
            f"alone{port}."
        ) from None
    if any(ipaddress.ip_address(each).is_unspecified for each in found):
        raise UserError(f"HEAD_ADDR = {address!r} is no address to call at: set it to one at which all hosts reach this one.")
    if address in (*found, "localhost"):  # meant as it is: all hosts are on this machine
        return found[0]
    if reached := [each for each in found if not ipaddress.ip_address(each).is_loopback]:
        return reached[0]
    try:
        return _outward()
    except OSError:
        raise UserError(
            f"HEAD_ADDR = {address!r} is {found[0]} on this host, where no other reaches it: set HEAD_ADDR to an address."
        ) from None


def _outward() -> str:
    """The address that packets to other networks leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ELSEWHERE, 9))
        return str(probe.getsockname()[0])


def token_of(environment: Mapping[str, str], file: Path = TOKEN_FILE) -> str:
    """The token that the hosts of a run share: SEGUE_TOKEN, or a file made on first use that only its owner can read."""
    if token := environment.get("SEGUE_TOKEN", ""):
        return token
    path = file.expanduser()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as made:  # for its owner alone; it appears whole
                made.write(secrets.token_hex(32))
                made.flush()
                with contextlib.suppress(FileExistsError):
                    os.link(made.name, path)
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{path} cannot be used ({error.strerror}): set SEGUE_TOKEN to the same words on all hosts.") from None
    if not token:
        raise UserError(f"{path} is empty: remove it, or set SEGUE_TOKEN to the same words on all hosts.")
    return token
