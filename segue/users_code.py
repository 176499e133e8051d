"""What code of the user's raised, in half a sentence: the exception, its message, and the line of theirs that it came from."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path
from typing import Any

MESSAGE_CHARACTERS = 300
TRACEBACK_CHARACTERS = 8000
_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def described(error: BaseException, owner: Any = None) -> str:
    """For instance "KeyError: 'oops' in bugs.py:10", on one line.

    The line is the innermost one outside of libraries and of what calls the user's code. Where there is none (an environment
    returned what it must not), it is the one that defines `owner`, a class or function.
    """
    message = " ".join(str(error).split())
    if len(message) > MESSAGE_CHARACTERS:
        message = message[: MESSAGE_CHARACTERS - 1] + "…"
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{what}{_in(where(error, owner))}".encode("utf-8", "replace").decode()


def kind(error: BaseException, owner: Any = None) -> str:
    """What makes it the same error again: its type and line, not its message, which may name the task."""
    return f"{type(error).__name__}{_in(where(error, owner))}"


def traceback_of(error: BaseException) -> str:
    """The whole traceback; the middle of a very long one is left out."""
    text = "".join(traceback.format_exception(error)).encode("utf-8", "replace").decode()
    half = TRACEBACK_CHARACTERS // 2
    return text if len(text) <= TRACEBACK_CHARACTERS else f"{text[:half]}\n…\n{text[-half:]}"


def where(error: BaseException, owner: Any = None) -> str:
    """The user's line as "file.py:10", or ""."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [(file, line) for file, line in frames if not _calls_users(file) and not file.startswith(("<", *_LIBRARIES))]
    if theirs:
        file, line = theirs[-1]
        return f"{Path(file).name}:{line}"
    return defined_at(owner)


def defined_at(owner: Any) -> str:
    """Where a class or function is defined, as "file.py:10", or ""."""
    try:
        file = inspect.getsourcefile(owner)
        return f"{Path(file).name}:{inspect.getsourcelines(owner)[1]}" if file else ""
    except (TypeError, OSError):
        return ""


def _calls_users(file: str) -> bool:
    """Whether the file is a part of Segue that calls environments; the suites in `envpool.suites` are called like others."""
    path = Path(file)
    try:
        parts = path.resolve().relative_to(_OURS).parts
    except ValueError:
        return False
    return parts[:1] in {("segue",), ("scheduler",), ("envpool",)} and (len(parts) < 4 or parts[:2] != ("envpool", "suites"))


def _in(place: str) -> str:
    return f" in {place}" if place else ""
