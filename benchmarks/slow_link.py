"""A link between two processes of this machine whose speed can be set: two network namespaces with a veth pair between them,
slowed by `tc`'s token bucket. It needs root and iproute2; elsewhere the sender is throttled, and the output says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Protocol

from segue.errors import UserError

ADDRESSES = ("198.18.0.1", "198.18.0.2")
"""Of the two ends, out of the range that is set aside for benchmarks of networks (RFC 2544); nothing else can reach them."""
COMMAND_SECONDS = 10.0


class Link(Protocol):
    """`kind` names it in the output; end 0 is the sender's."""

    kind: str
    addresses: tuple[str, str]

    def prefix(self, end: int) -> list[str]:
        """What a command at this end begins with."""
        ...

    def interface(self, end: int) -> str: ...

    def limit(self, bytes_per_second: float | None) -> float | None:
        """Set the speed of what the sender sends; what it returns is the speed that the sender must keep to by itself."""
        ...

    def close(self) -> None: ...


class Namespaces:
    """Names carry this process's id, so that two benchmarks do not meet."""

    kind = "network namespaces, tc tbf"
    addresses = ADDRESSES

    def __init__(self) -> None:
        self._names = [f"segue-{os.getpid()}-{end}" for end in "ab"]
        made: list[str] = []
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
                made.append(name)
            a, b = self._names
            _run("ip", "link", "add", "link0", "netns", a, "type", "veth", "peer", "name", "link0", "netns", b)
            for name, address in zip(self._names, self.addresses, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", "link0")
                _run("ip", "-n", name, "link", "set", "link0", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:  # also Ctrl-C and a command that hangs
            for name in made:
                _run("ip", "netns", "delete", name, may_fail=True)
            raise

    def prefix(self, end: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[end]]

    def interface(self, end: int) -> str:
        return "link0"

    def limit(self, bytes_per_second: float | None) -> float | None:
        tc = (*self.prefix(0), "tc", "qdisc")
        if bytes_per_second is None:
            _run(*tc, "delete", "dev", "link0", "root", may_fail=True)
        else:
            rate, burst = f"{int(8 * bytes_per_second)}bit", f"{max(262144, int(bytes_per_second / 250))}b"
            _run(*tc, "replace", "dev", "link0", "root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
        return None

    def close(self) -> None:
        for name in self._names:
            _run("ip", "netns", "delete", name)


class Throttled:
    """No link at all: the sender waits before each bucket as long as a slow link would take for it."""

    kind = "loopback, the sender throttled"
    addresses = ("127.0.0.1", "127.0.0.1")

    def prefix(self, end: int) -> list[str]:
        return []

    def interface(self, end: int) -> str:
        return "lo"

    def limit(self, bytes_per_second: float | None) -> float | None:
        return bytes_per_second

    def close(self) -> None:
        pass


def make_link(kind: str) -> Link:
    """`kind`: "namespaces", "throttle", or "auto". Raises `UserError` where namespaces are asked for and cannot be had."""
    if kind == "throttle":
        return Throttled()
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
        try:
            return Namespaces()
        except UserError:
            if kind == "namespaces":
                raise
            return Throttled()
    if kind == "namespaces":
        raise UserError("--link namespaces needs root and iproute2 (ip, tc): run it as root, or use --link throttle.")
    return Throttled()


def _run(*command: str, may_fail: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode != 0 and not may_fail:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{' '.join(command)} failed ({why}): use --link throttle.")
