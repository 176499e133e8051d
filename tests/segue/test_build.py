"""The commit that runs, read from git's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.build import git_sha

SHA = "0123456789abcdef0123456789abcdef01234567"


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"DOTgit__HEAD": f"{SHA}\n"},
        {"DOTgit__HEAD": "ref: refs/heads/main\n", "DOTgit__refs__heads__main": f"{SHA}\n"},
        {
            "DOTgit__HEAD": "ref: refs/heads/main\n",
            "DOTgit__packed-refs": f"# pack-refs\nffff refs/heads/other\n{SHA} refs/heads/main\n",
        },
        {
            "DOTgit": "gitdir: real/worktrees/a\n",
            "real__worktrees__a__HEAD": "ref: refs/heads/a\n",
            "real__worktrees__a__commondir": "../..\n",
            "real__refs__heads__a": f"{SHA}\n",
        },
    ],
    ids=["detached", "branch", "packed", "worktree"],
)
def test_the_commit_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    assert git_sha(write(tmp_path, **files)) == SHA[:12]


@pytest.mark.parametrize("files", [{}, {"DOTgit__HEAD": "ref: refs/heads/gone\n"}, {"DOTgit": "gitdir: nowhere\n"}])
def test_outside_a_checkout_it_is_unknown(tmp_path: Path, files: dict[str, str]) -> None:
    assert git_sha(write(tmp_path, **files)) == "unknown"
