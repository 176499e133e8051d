"""Free TCP ports out of `cluster.ports`."""

from __future__ import annotations

import socket

from segue.errors import UserError


def free_port(interface: str, ports: tuple[int, int], purpose: str) -> int:
    """A port of the range nobody listens on now. Raises `UserError` if there is none."""
    low, high = ports
    for port in range(high, low - 1, -1):  # from the top: metrics servers take theirs from the bottom
        with socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET) as probe:
            try:
                probe.bind((interface, port))
            except OSError:
                continue
            return port
    raise UserError(
        f"No port of cluster.ports = [{low}, {high}] is free on {interface} for {purpose}: "
        "stop what uses them or set another range."
    )
