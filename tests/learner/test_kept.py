"""The newest trajectories are kept for reading, and no more of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.kept import SampledTrajectories


def test_the_newest_trajectories_are_kept_and_numbering_goes_on(tmp_path: Path) -> None:
    first = SampledTrajectories(tmp_path, "rollout-0", 3)
    for number in range(5):
        first.save(lambda number=number: {"n": number})  # type: ignore[misc]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"rollout-0-{n:06d}.json" for n in (2, 3, 4)]
    again = SampledTrajectories(tmp_path, "rollout-0", 3)
    path = again.save(lambda: {"n": 5})
    assert path == tmp_path / "rollout-0-000005.json" and json.loads(path.read_text()) == {"n": 5}
    SampledTrajectories(tmp_path, "rollout-1", 3).save(lambda: {"n": 0})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rollout-0-000003.json", "rollout-0-000004.json", "rollout-0-000005.json", "rollout-1-000000.json",
    ]  # fmt: skip


def test_none_are_made_when_none_are_kept(tmp_path: Path) -> None:
    assert SampledTrajectories(tmp_path, "rollout-0", 0).save(lambda: pytest.fail("asked for")) is None
    assert not list(tmp_path.iterdir())
