"""Documentation that is generated from the code: written by `python -m MODULE`, compared by `python -m MODULE --check`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = ["|".join(("", *header, "")), "|" + "---|" * len(header)]
    lines += ["|".join(("", *(cell.replace("|", "\\|") for cell in row), "")) for row in rows]
    return "\n".join(lines) + "\n"


def write_or_check(path: Path, text: str, module: str, arguments: Sequence[str]) -> int:
    """Write `text`, or with `--check` say whether `path` holds it; the exit code."""
    if list(arguments) not in ([], ["--check"]):
        print(f"python -m {module} takes no arguments but --check.", file=sys.stderr)
        return 2
    if not arguments:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path} is out of date: run python -m {module} and commit the result.", file=sys.stderr)
    return 1
