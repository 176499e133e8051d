"""Where the hosts of a run meet, and the secret by which they know each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from segue.errors import UserError

PORT = 29400
TOKEN_FILE = Path("~/.segue/token")


@dataclass(frozen=True)
class Where:
    """What `launch.sh` is told: how many hosts, and where this first one listens for the others."""

    hosts: int
    address: str
    port: int = PORT
    token: str = ""


def resolve(address: str) -> str:
    """A name or an address as an address. Raises `UserError`."""
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(
            f"HEAD_ADDR = {address!r} is no address that is known here ({error.strerror or error}): correct it."
        ) from None


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
