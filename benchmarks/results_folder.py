"""A folder of results: nobody else's, locked while it is filled, and, where it was left half filled, gone on with.

results.json says with which `settings` its figures were measured. Those of other settings, or of another commit, do not compare,
so that going on with them is refused. What is measured on the way to a figure of results.json is kept in a file each (`Kept`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from segue.errors import UserError
from segue.files import disk_errors, plain, write_atomic

RESULTS, LOCK, PAGE, RUNS = "results.json", ".lock", "index.html", "runs"
T = TypeVar("T")


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """A folder that nobody uses, empty or with results to go on with. Raises `UserError`. One that was made here and got nothing,
    because what was asked for is refused, goes again."""
    ours = not out.exists()
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} exists already and is not a folder: give --out another name, or remove it.")
        if out.is_dir() and not (out / RESULTS).is_file() and any(path.name != LOCK for path in out.iterdir()):
            raise UserError(f"{out} exists already and is not an empty folder: give --out another name, or remove it.")
    except OSError as error:
        raise UserError(f"{out} cannot be read ({error.strerror}): give --out another name.") from None
    try:
        with locked(out, "--out"):
            yield
    finally:
        if ours and [path.name for path in out.glob("*")] in ([], [LOCK]) and out.is_dir():
            with contextlib.suppress(OSError):
                (out / LOCK).unlink(missing_ok=True)
                out.rmdir()


@contextlib.contextmanager
def locked(folder: Path, option: str) -> Iterator[None]:
    """The folder, made if need be, and ours alone. `option` names it on the command line. Raises `UserError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "w")  # noqa: SIM115 - held until the end
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}): give {option} another name.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is in use by another benchmark: wait for it, or give {option} another name.") from None
        yield


def earlier(
    out: Path, benchmark: str, settings: Mapping[str, Any], look: Callable[[Mapping[str, Any]], object]
) -> dict[str, Any] | None:
    """The results.json of a folder, if it has one, and it is this benchmark's with these settings. `look` reads of it what going
    on reads, and raises where something is amiss. Raises `UserError`."""
    path = out / RESULTS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        told, known = found["benchmark"], dict(found["settings"])
        if told == benchmark:
            look(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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


def refuse_whole(out: Path) -> NoReturn:
    """Raises `UserError` about a folder in which nothing that is asked for is missing."""
    raise UserError(f"{out} exists already and has all that is asked for: give --out another name, or remove it.")


def left(out: Path, whole: int, what: str, kept: int, part: str) -> str:
    """What there is of a call that was cut short: `whole` points of results.json, and `kept` runs of others, say."""
    if not whole and not kept:
        return "Nothing was measured yet."
    there = [f"{whole} {what}{'s' * (whole != 1)} in {RESULTS} and {PAGE}"] if whole else []
    others = f" of other {what}s" if whole else ""
    there += [f"{kept} {part}{'s' * (kept != 1)}{others} in {RUNS}/"] if kept else []
    return f"{out} has {' and '.join(there)}: the same command with --out {out} goes on."


class Kept:
    """What was measured so far, a file each in `DIR/runs/`, whole or absent: a call that is cut short loses what it was at."""

    def __init__(self, out: Path) -> None:
        self.folder = out / RUNS

    def of(self, name: str, kind: type[T], measure: Callable[[], T]) -> T:
        """What was measured under this name; if nothing was, what `measure` returns, as its file has it. Raises `UserError`."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            try:
                with disk_errors(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)  # before hours of measuring
            except FileExistsError:
                raise UserError(f"{self.folder} is a file, where runs are kept: remove it, or give --out another name.") from None
            data = json.dumps(msgspec.to_builtins(measure()))
            write_atomic(path, data.encode())
        try:
            return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), kind)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            raise UserError(f"{path} cannot be read ({error}): remove it, and it is measured again.") from None

    def names(self, pattern: str) -> list[str]:
        """Whose files are there, in the order of the alphabet."""
        return sorted(path.stem for path in self.folder.glob(f"{pattern}.json"))

    def drop(self, pattern: str) -> None:
        """What has become figures of results.json; the folder too, once it is empty."""
        for path in self.folder.glob(f"{pattern}.json"):
            path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


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
