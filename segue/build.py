"""Which code is running."""

from __future__ import annotations

from pathlib import Path


def git_sha(root: Path | None = None) -> str:
    """The commit checked out in `root` (default: where this package lives), 12 digits, or "unknown" outside a checkout.

    Reads git's files: no process is started, and a machine without git can do it too.
    """
    git = (root or Path(__file__).resolve().parent.parent) / ".git"
    try:
        if git.is_file():  # a worktree points to its folder
            git = (git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head[:12]
        ref = head.removeprefix("ref:").strip()
        common = git / "commondir"
        shared = (git / common.read_text(encoding="utf-8").strip()).resolve() if common.is_file() else git
        if (shared / ref).is_file():
            return (shared / ref).read_text(encoding="utf-8").strip()[:12]
        for line in (shared / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(" " + ref):
                return line[:12]
    except (OSError, UnicodeDecodeError):
        pass
    return "unknown"
