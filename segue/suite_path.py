"""Where the modules of users' suites are looked for besides the installed packages: here, and beside the config file.

Told to all processes of a run by an environment variable. The folders come last in `sys.path`: a file beside a config never hides
a module of a library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "SEGUE_PATH"


def folders() -> list[str]:
    """The folders that were told, absolute, in order."""
    return [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]


def look_in(*more: str | Path) -> None:
    """Tell this process and those it starts to look in these folders too."""
    told = dict.fromkeys([*folders(), *(os.path.abspath(folder) for folder in more)])
    os.environ[VARIABLE] = os.pathsep.join(told)


def look_beside(config: Path, noted: Iterable[str] = ()) -> None:
    """Look here, beside the config file, and in the folders `noted` in the run whose config it is."""
    look_in(Path.cwd(), config.parent, *noted)


def extend_path() -> None:
    """Put the folders into this process's `sys.path`."""
    sys.path.extend(folder for folder in folders() if folder not in sys.path)
