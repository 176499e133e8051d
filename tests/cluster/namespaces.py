"""Several hosts out of one: network namespaces on a bridge, each with an address of its own. Needs root and iproute2.

They share the file system, which stands for shared storage, and the process ids: `ip netns pids` finds all that runs there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from types import TracebackType
from typing import Self

END_SECONDS = 20.0


def lacking() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip here (Debian: iproute2)"
    name = f"sgtry{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"ip netns add fails: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    bridge = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True)
    if bridge.returncode != 0:
        return f"ip link add type bridge fails: {bridge.stderr.strip()}"
    subprocess.run(["ip", "link", "delete", name], check=True)
    return ""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"


_made = itertools.count()


class Hosts:
    """`count` hosts, numbered from 0. A context: leaving it ends every process in them and takes them away."""

    def __init__(self, count: int) -> None:
        number = os.getpid()
        # Names of their own for each set: the kernel takes a deleted namespace's cables away later, when it likes.
        self._tag = f"sg{number % 100000}{chr(ord('a') + next(_made) % 26)}"
        self._net = f"10.77.{number % 250 + 1}"
        self._count = count
        self._bridge = f"{self._tag}br"

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self._net}.254/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host in range(self._count):
                name, cable = self.name(host), self._cable(host)
                _ip("netns", "add", name)
                _ip("link", "add", cable, "type", "veth", "peer", "name", "e0", "netns", name)
                _ip("link", "set", cable, "master", self._bridge, "up")
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "e0")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "e0", "up")
                _ip("-n", name, "route", "add", "default", "via", f"{self._net}.254")
        except BaseException:
            self._take_away()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._take_away()

    def name(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def _cable(self, host: int) -> str:
        return f"{self._tag}v{host}"

    def address(self, host: int) -> str:
        return f"{self._net}.{host + 1}"

    def command(self, host: int, *words: str) -> list[str]:
        """That runs `words` on a host."""
        return ["ip", "netns", "exec", self.name(host), *words]

    def cut(self, host: int) -> None:
        """Pull its cable: it keeps its address and routes, and reaches nobody."""
        _ip("link", "set", self._cable(host), "down")

    def mend(self, host: int) -> None:
        """Put the cable back."""
        _ip("link", "set", self._cable(host), "up")

    def pids(self, host: int) -> list[int]:
        """Of all processes on a host."""
        found = subprocess.run(["ip", "netns", "pids", self.name(host)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def _take_away(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for host in range(self._count):
            while (pids := self.pids(host)) and time.monotonic() < deadline:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            subprocess.run(["ip", "link", "delete", self._cable(host)], capture_output=True)
            subprocess.run(["ip", "netns", "delete", self.name(host)], capture_output=True)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True)
