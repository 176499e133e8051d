"""`segue bench NAME`: a benchmark of the folder beside this package, in the place of this process. Nothing of it is imported."""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from segue.errors import UserError

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
_MAIN = 'if __name__ == "__main__":'


def commands(folder: Path = FOLDER) -> dict[str, str]:
    """The benchmarks there, and what each is about: modules with a command line (`package.module` too), packages with one."""
    found: dict[str, str] = {}
    for file in (*folder.glob("*.py"), *folder.glob("*/*.py")):
        text = file.read_text(encoding="utf-8")
        parts = file.relative_to(folder).with_suffix("").parts
        if parts[-1] == "__main__":
            found[_name(parts[:-1])] = _about(text)
        elif "\ndef main(" in text and _MAIN in text:
            found[_name(parts)] = _about(text)
    return dict(sorted(found.items()))


def _name(parts: Sequence[str]) -> str:
    return ".".join(parts).replace("_", "-")


def _about(text: str) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def listing(folder: Path = FOLDER) -> str:
    """What there is to run, a line each."""
    found = commands(folder)
    width = max(map(len, found), default=0)
    lines = [f"  {name:<{width}}  {about}" for name, about in found.items()]
    return "\n".join(["Usage: segue bench NAME [OPTIONS]; segue bench NAME --help tells the options. Benchmarks:", *lines])


def run(name: str, arguments: Sequence[str], folder: Path = FOLDER) -> NoReturn:
    """Become one of them: signals go to it alone, its exit code is this process's. `_` stands for `-` too. Raises `UserError`."""
    known = commands(folder) if folder.is_dir() else {}
    if not known:
        raise UserError(f"There are no benchmarks in {folder}: run `segue bench` from a checkout of the repository.")
    asked = name.replace("_", "-")
    if asked not in known:
        close = difflib.get_close_matches(asked, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"There is no benchmark {name}{hint}: name one of {', '.join(known)}.")
    path = os.pathsep.join(filter(None, (str(folder.parent), os.environ.get("PYTHONPATH", ""))))
    module = f"{folder.name}.{asked.replace('-', '_')}"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], {**os.environ, "PYTHONPATH": path})
