"""The command line of a benchmark: what is wrong with it is one sentence, found before anything is measured; so is Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks import children
from segue.errors import DiskFailed, RunFailed

INTERRUPTED = 128 + signal.SIGINT


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
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a plain file, and would be replaced by one: name another")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it, or name another file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path.parent} cannot be written: name a file in another folder")
    return path


def positive(text: str) -> int:
    """The type of how many: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def sentence(error: Exception) -> str:
    """What is printed of an error; a benchmark goes on by the same command, not with --resume."""
    return error.place if isinstance(error, DiskFailed) else str(error)


def interrupt() -> NoReturn:
    """Unwind what is at work. Silently: the roles of a virtual world would say at length that their tasks ended so."""
    logging.disable()
    raise KeyboardInterrupt


class _Interrupts:
    """What SIGINT, SIGTERM and SIGHUP do to a benchmark: the programs it runs are told to stop, and `KeyboardInterrupt` unwinds
    it, which waits for them. Ctrl-C once more ends it at once, and them with it. `first`: the signal that came first."""

    def __init__(self) -> None:
        self.first: int | None = None

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None and number != signal.SIGINT:
            return  # a terminal that closes may say so twice, and so does SLURM at the end of a job's time
        if self.first is None:
            self.first = number
        children.stop()
        interrupt()


def ended(main: Callable[[], int | None]) -> int:
    """The exit code of a benchmark's `main`, which SIGTERM and SIGHUP end as Ctrl-C does: in order."""
    interrupts = _Interrupts()
    interrupts.install()
    try:
        code = main() or 0
    except KeyboardInterrupt:
        print("Interrupted: nothing was written.", file=sys.stderr)
        code = INTERRUPTED
    except RunFailed as error:  # figures that cannot be written, on a full disk
        print(sentence(error), file=sys.stderr)
        code = 1
    return 128 + interrupts.first if code == INTERRUPTED and interrupts.first is not None else code


def install(extra: str) -> str:
    """The command that installs one of pyproject.toml's extras: Segue is in no package index, but in its repository."""
    return f"{sys.executable} -m pip install -e '{Path(__file__).resolve().parent.parent}[{extra}]'"
