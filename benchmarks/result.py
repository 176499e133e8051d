"""What every benchmark writes beside its figures: which benchmark, machine, versions, seeds, arguments, command and time.

    result = document("engine", {"ratio_to_hf": 0.9}, seeds=[0], arguments=vars(args), packages=("torch", "transformers"))
    write(args.json, result)

`machine` is taken when it is called: call it before the measurement, so that `load_at_start` tells whether others were busy.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from segue import __version__
from segue.build import git_sha
from segue.files import write_json

QUIET_LOAD = 0.3
"""A load average per core above this, before a measurement began, means that the machine was not its own."""


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in the text of /proc/cpuinfo; "" if it has none (it has none on ARM)."""
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == "model name":
            return value.strip()
    return ""


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, system, and the load average of the last minute."""
    cpuinfo = Path("/proc/cpuinfo")
    model = cpu_model(cpuinfo.read_text(encoding="utf-8")) if cpuinfo.is_file() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "load_at_start": round(load, 2),
        "quiet": load <= QUIET_LOAD * cores,
    }


def busy(where: Mapping[str, Any]) -> str:
    """A sentence about a `machine()` that was not its own; "" if it was."""
    if where["quiet"]:
        return ""
    return (
        f"note: the machine was busy before the first run (load {where['load_at_start']}); ratios of arms that ran "
        "in turns hold; rates do not, nor does what is measured once (ceilings, and so efficiency)."
    )


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Python, Segue with its commit, and installed packages by their distribution names. Imports none of them."""
    found = {"python": platform.python_version(), "segue": __version__, "git_sha": git_sha()}
    return found | {package: importlib.metadata.version(package) for package in packages}


def command(module: str, arguments: Sequence[str] | None = None) -> str:
    """The command line that ran this benchmark, ready to be run again."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)])


def document(
    benchmark: str,
    figures: Mapping[str, Any],
    *,
    seeds: Sequence[int],
    arguments: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    where: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole document: `figures` at the top level, as docs/benchmarks.md names them. `where` is an earlier `machine()`."""
    told = {
        "machine": dict(where) if where is not None else machine(),
        "versions": versions(packages),
        "seeds": list(seeds),
        "arguments": {key: _plain(value) for key, value in (arguments or {}).items()},
        "command": command(f"benchmarks.{benchmark}"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    taken = sorted(set(told) & set(figures))
    assert not taken, f"figures named like what every result has: {taken}"
    return {"benchmark": benchmark, **figures, **told}


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a document as JSON; nothing where no file was asked for. Raises `RunFailed` on a full disk."""
    if path is not None:
        write_json(path, dict(result))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
