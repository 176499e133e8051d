"""Which processes are pinned to which CPU cores, and that the kernel does it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from segue.cluster.cores import check_cores, cores_of, cores_text, key_of, pin
from segue.config import load_config
from segue.errors import UserError

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "smoke.toml"
HERE = sorted(os.sched_getaffinity(0))


def test_a_role_without_cores_of_its_own_has_those_of_the_cluster() -> None:
    config = load_config(
        CONFIG,
        ["rollout.nodes=3", "rollout.max_episodes=8", "rollout.cores=[[0], [1, 2]]", "cluster.cores=[3]", "scheduler.cores=[4]"],
    )
    assert [cores_of(config, "rollout", rank) for rank in range(3)] == [[0], [1, 2], [0]], "in turn"
    assert (cores_of(config, "scheduler", 0), cores_of(config, "learner", 0), cores_of(config, "envpool", 0)) == ([4], [3], [3])
    assert (key_of(config, "rollout"), key_of(config, "learner")) == ("rollout.cores", "cluster.cores")
    assert cores_text(config) == "driver 3, scheduler 4, rollout 0 | 1,2 | 0, learner 3, envpool 3"
    assert cores_text(load_config(CONFIG, [])) == ""


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("learner.cores=[[0, 0]]", "twice"),
        ("cluster.cores=[-1]", "the first of which is 0"),
        ("envpool.cores=[[]]", "at least one"),
    ],
)
def test_what_is_no_list_of_cores_is_refused(given: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        load_config(CONFIG, [given])


def test_a_core_that_is_not_here_is_named_with_its_key() -> None:
    with pytest.raises(UserError, match=r"learner\.cores names core 4095, and this process may use"):
        check_cores(load_config(CONFIG, ["learner.cores=[[4095]]"]))
    check_cores(load_config(CONFIG, [f"learner.cores=[[{HERE[0]}]]"]))


SLEEPERS = """
import sys, threading
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def test_all_threads_of_a_process_are_pinned_and_what_they_start_later() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        pin(child.pid, [HERE[-1]], "learner.cores")
        threads = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
        assert len(threads) == 4 and all(os.sched_getaffinity(thread) == {HERE[-1]} for thread in threads)
        with pytest.raises(UserError, match=r"learner\.cores names core 4095"):
            pin(child.pid, [4095], "learner.cores")
        pin(child.pid, [], "learner.cores")
        assert os.sched_getaffinity(child.pid) == {HERE[-1]}, "no cores: nothing changes"
        assert child.stdin is not None
        child.stdin.close()
