"""`segue bench NAME`: a benchmark of the folder beside this package, in a process of its own. Nothing of it is imported here."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from segue.errors import UserError

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
_MAIN = 'if __name__ == "__main__":'


def names(folder: Path = FOLDER) -> list[str]:
    """The benchmarks there: modules with a command line, and packages that have one."""
    found = [file.stem for file in folder.glob("*.py") if _is_command(file)]
    return sorted([*found, *(file.parent.name for file in folder.glob("*/__main__.py"))])


def _is_command(file: Path) -> bool:
    text = file.read_text(encoding="utf-8")
    return "\ndef main(" in text and _MAIN in text


def run(name: str, arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Run one to its end; its exit code. `-` stands for `_` in names. Raises `UserError`."""
    known = names(folder) if folder.is_dir() else []
    if not known:
        raise UserError(f"There are no benchmarks in {folder}: run `segue bench` from a checkout of the repository.")
    module = name.replace("-", "_")
    if module not in known:
        close = difflib.get_close_matches(module, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"There is no benchmark {name}{hint}: name one of {', '.join(known)}.")
    path = os.pathsep.join(filter(None, (str(folder.parent), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", f"{folder.name}.{module}", *arguments]
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    return code if code >= 0 else 128 - code
