"""What all hosts must see before a run starts, and that a run which they do not see is taken back."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from segue.cluster.hosts.facts import facts_here
from segue.cluster.hosts.member import checked
from segue.cluster.hosts.plan import note_hosts
from segue.cluster.hosts.several import to_be_seen
from segue.cluster.ports import ports_needed
from segue.cluster.prepare import Prepared
from segue.config import load_config, to_toml
from segue.errors import UserError
from segue.rundir import RunDir

SMOKE = Path(__file__).resolve().parents[2] / "configs" / "smoke.toml"
APART = "cluster.hosts={scheduler=[0], learner=[0], rollout=[1], envpool=[1]}"
MINE = facts_here(0, "127.0.0.1")
HOSTS = [MINE, msgspec.structs.replace(MINE, rank=1)]


def prepared(folder: Path, resume: str = "") -> Prepared:
    config = load_config(SMOKE, [APART])
    run = RunDir.create(folder / "run", to_toml(config))
    note_hosts(run, HOSTS, [])
    (folder / "model").mkdir()
    return Prepared(config, run, str(folder / "model"), resume, run.begin_attempt(datetime(2026, 1, 1)))


def test_a_host_that_shares_the_storage_sees_what_was_just_written_and_nothing_of_it_stays(tmp_path: Path) -> None:
    ready = prepared(tmp_path)
    before = sorted(ready.run.path.iterdir())
    with to_be_seen(ready, HOSTS) as (check, ports):
        assert checked(check, "127.0.0.1").missing == []
        [written] = [path for path, words in check.files.items() if words]
        assert Path(written).parent == ready.run.path and check.files[str(tmp_path / "model")] == ""
        Path(written).write_text("another host's file of that name")
        assert checked(check, "127.0.0.1").missing == [written], "storage that is not shared, under the same path"
    assert ports == {0: ports_needed(["scheduler", "learner"]), 1: ports_needed(["rollout", "rollout", "envpool"])}
    assert sorted(ready.run.path.iterdir()) == before


@pytest.mark.parametrize("resume", ["", "checkpoints/step_4"])
def test_where_a_host_does_not_see_it_a_new_run_is_taken_back_and_a_resumed_one_stays(resume: str, tmp_path: Path) -> None:
    ready = prepared(tmp_path, resume)
    with pytest.raises(UserError, match="Host 1"), to_be_seen(ready, HOSTS):
        raise UserError("Host 1 (node1) does not see it.")
    assert ready.run.path.exists() == bool(resume)
    assert not list(tmp_path.glob("run/.seen-by-all-*"))
