"""A folder of results: nobody else's, locked while it is filled, and, where it was left half filled, gone on with.

results.json says with which `settings` its points were measured: points of other settings, or of another commit, do not join.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from segue.errors import UserError
from segue.files import plain

RESULTS, LOCK = "results.json", ".lock"


@contextlib.contextmanager
def claimed(out: Path, resume: bool = False) -> Iterator[None]:
    """A folder that nobody uses; with `resume` one that may have results. Raises `UserError`."""
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} exists already and is not a folder: give --out another name, or remove it.")
        used = out.is_dir() and any(path.name != LOCK for path in out.iterdir())
        if used and not resume:
            more = ", or go on with what is there: --resume" if (out / RESULTS).is_file() else ", or remove it"
            raise UserError(f"{out} exists already and is not an empty folder: give --out another name{more}.")
        if used and not (out / RESULTS).is_file():
            raise UserError(f"{out} has no {RESULTS} to go on with: name a folder of results with --out, or an empty one.")
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / LOCK, "w")  # noqa: SIM115 - held until the end
    except OSError as error:
        raise UserError(f"{out} cannot be made ({error.strerror}): give --out another name.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out} is in use by another benchmark: wait for it, or give --out another name.") from None
        yield


def earlier(out: Path, benchmark: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The results.json of a folder, if it has one, and it is this benchmark's with these settings. Raises `UserError`."""
    path = out / RESULTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        told, known = found["benchmark"], found["settings"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove the folder, or give --out another name.") from None
    if told != benchmark:
        raise UserError(f"{path} is of the benchmark {told}: give --out another name.")
    key = first_difference(known, settings)
    if key is not None:
        was, now = flat(known).get(key), flat(_as_json(settings)).get(key)
        raise UserError(
            f"{path} was measured with {key} = {was!r}, and now it is {now!r}: go back to that, or give --out another name."
        )
    return dict(found)


def flat(tables: Mapping[str, Any], parents: str = "") -> dict[str, Any]:
    """Nested tables by their whole keys: "learner.lr" and so on."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{parents}{key}.")
        else:
            found[parents + str(key)] = value
    return found


def first_difference(known: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key, in the order of the alphabet, whose values differ once both are JSON."""
    a, b = flat(known), flat(_as_json(now))
    return next((key for key in sorted({*a, *b}) if (key in a, a.get(key)) != (key in b, b.get(key))), None)


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As a file has them."""
    return dict(json.loads(json.dumps(plain(dict(settings)))))
