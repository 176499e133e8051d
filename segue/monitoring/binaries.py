"""Where the programs of Prometheus are: in PATH, or where `SEGUE_PROMETHEUS=1 ./launch.sh --install-only` puts them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HOW_TO_GET = (
    "on Debian and Ubuntu, SEGUE_PROMETHEUS=1 ./launch.sh --install-only unpacks their package into .venv/opt; elsewhere put "
    "prometheus (https://prometheus.io/download) into PATH"
)


def find(program: str) -> Path | None:
    """The path of `prometheus` or `promtool`, or None."""
    found = shutil.which(program)
    if found:
        return Path(found)
    unpacked = Path(sys.prefix) / "opt" / "prometheus" / "usr" / "bin" / program
    return unpacked if unpacked.is_file() else None
