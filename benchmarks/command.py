"""The command line of a benchmark: what is wrong with it is one sentence, found before anything is measured; so is Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """argparse's, for `segue bench NAME`: a mistake is one sentence in place of the whole usage; help keeps its lines."""

    def __init__(self, name: str, about: str | None) -> None:
        super().__init__(
            prog=f"segue bench {name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help tells the options).\n")


def json_file(text: str) -> Path:
    """The type of `--json`: a file that can be written, so that no measurement ends with nowhere to go."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it, or name another file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path.parent} cannot be written: name a file in another folder")
    return path


def ended(main: Callable[[], int]) -> int:
    """The exit code of a benchmark's `main`."""
    try:
        return main()
    except KeyboardInterrupt:
        print("Interrupted: nothing was written.", file=sys.stderr)
        return INTERRUPTED


def install(extra: str) -> str:
    """The command that installs one of pyproject.toml's extras: Segue is in no package index, but in its repository."""
    return f"{sys.executable} -m pip install -e '{Path(__file__).resolve().parent.parent}[{extra}]'"
