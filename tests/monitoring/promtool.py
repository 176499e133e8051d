"""Runs promtool; where there is none, the tests that need it are skipped (`make` installs one)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from segue.monitoring.binaries import HOW_TO_GET, find

PROMTOOL, PROMETHEUS = find("promtool"), find("prometheus")
needs_prometheus = pytest.mark.skipif(not (PROMTOOL and PROMETHEUS), reason=f"there is no Prometheus here: {HOW_TO_GET}")


def promtool(*arguments: str | Path, given: str | None = None) -> str:
    """Its output; fails the test with it if promtool finds something wrong."""
    done = subprocess.run(
        [str(PROMTOOL), *map(str, arguments)], input=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
