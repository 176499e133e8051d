"""A checkout with launch.sh in it, whose python is a stand-in: pip is the edge, and its calls are noted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"""#!/bin/sh
case "$*" in
    *"-m pip"*) echo "$*" >>"$CALLS" ;;
    *"-m venv"*) for last; do :; done; mkdir -p "$last/bin" && cp "$0" "$last/bin/python" ;;
    *"-m segue.cli"*) echo "ran $* as $SEGUE_COMMAND" ;;
    -V) echo "Python ${{FAKE_VERSION:-3.11.7}}" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


class Checkout:
    """A folder with launch.sh, a config, and the only python3 in its PATH."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "segue"
        (self.path / "bin").mkdir(parents=True)
        for name in ("launch.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, self.path / name)
        (self.path / "my.toml").touch()
        self.program("python3", PYTHON)
        self._calls = folder / "calls"

    def program(self, name: str, text: str) -> None:
        """Put a program into its PATH, before the machine's own of that name."""
        (self.path / "bin" / name).write_text(text)
        (self.path / "bin" / name).chmod(0o755)

    def launch(self, *arguments: str, script: str = "./launch.sh", **env: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a call in it."""
        variables = {"PATH": f"{self.path / 'bin'}:{os.environ['PATH']}", "CALLS": str(self._calls)} | env
        done = subprocess.run([script, *arguments], cwd=self.path, env=variables, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    def calls(self) -> str:
        return self._calls.read_text() if self._calls.exists() else ""

    def installs(self) -> int:
        return len(self.calls().splitlines())
