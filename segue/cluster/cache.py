"""Models that are made once and found again: folders named by a hash of what they were made of.

A folder is written aside and renamed: one that is there is whole, and of two processes that make the same one at once the second
throws its own away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from segue.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
_DAY = 86_400.0


def cache_root() -> Path:
    """`SEGUE_CACHE`, or `.cache` in the checkout."""
    told = os.environ.get("SEGUE_CACHE")
    return Path(told).expanduser() if told else ROOT / ".cache"


def fingerprint(recipe: dict[str, Any]) -> str:
    """A hash of a recipe, 16 hex digits."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def make_folder(folder: Path, recipe: dict[str, Any], whole: Callable[[Path], bool], fill: Callable[[Path], None]) -> None:
    """Make `folder`: `fill` gets an empty one aside; `recipe` is written beside what it makes. A damaged `folder` is replaced.

    Raises `UserError` if the cache cannot be written, and what `fill` raises; then nothing is left.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        fill(aside)
        (aside / "recipe.json").write_text(json.dumps(recipe, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        aside.chmod(0o755)
        _move(aside, folder, whole)
    except OSError as error:
        raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> UserError:
    what = "warm start" if folder.parent.name == "warmstart" else "model"
    reason = error.strerror or str(error)
    return UserError(
        f"The {what} cannot be written to {folder.parent} ({reason}): free space there, "
        "or set SEGUE_CACHE to a folder you can write to."
    )


def _sweep(parent: Path) -> None:
    """Remove what was left by processes that were ended in the middle: nothing takes a day to be made."""
    for left in parent.glob("*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _DAY:
                shutil.rmtree(left, ignore_errors=True)


def _move(aside: Path, folder: Path, whole: Callable[[Path], bool]) -> None:
    """Give the finished folder its name, unless another process was faster."""
    try:
        aside.rename(folder)
    except OSError:
        if not whole(folder):
            shutil.rmtree(folder)
            aside.rename(folder)
