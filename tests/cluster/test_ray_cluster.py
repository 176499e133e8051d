"""Starting Ray: one more try where it was only slow. Ray itself stands at the edge; tests/e2e start the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from segue.cluster import ray_cluster
from segue.config import Config, load_config
from segue.errors import RunFailed

ROOT = Path(__file__).resolve().parents[2]
LATE = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.fixture
def config() -> Config:
    return load_config(ROOT / "configs" / "smoke.toml")


class Starts:
    """`ray.init` that raises what it is given, one error for each call, and then starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[str] = []
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", lambda: self.calls.append("shutdown"))
        monkeypatch.setattr(ray_cluster, "end_family", lambda grace_seconds: self.calls.append("end"))

    def init(self, **_: object) -> None:
        self.calls.append("init")
        if self.errors:
            raise self.errors.pop(0)


def test_a_slow_start_is_tried_once_more(monkeypatch: pytest.MonkeyPatch, config: Config, tmp_path: Path) -> None:
    starts = Starts(monkeypatch, Exception(LATE))
    ray_cluster.RayCluster(config, tmp_path)
    assert starts.calls == ["init", "shutdown", "end", "init"], "what is left of the first is gone before the second"


def test_twice_slow_is_the_end_and_so_is_anything_else(monkeypatch: pytest.MonkeyPatch, config: Config, tmp_path: Path) -> None:
    for errors, calls in (((Exception(LATE), Exception(LATE)), 2), ((OSError("No space left"),), 1)):
        starts = Starts(monkeypatch, *errors)
        with pytest.raises(RunFailed, match=r"Ray did not start .*: look at memory, disk and ports"):
            ray_cluster.RayCluster(config, tmp_path)
        assert starts.calls.count("init") == calls
