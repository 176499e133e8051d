"""launch.sh under SLURM, whose commands are stand-ins: what it asks of them, and what it says. tests/cluster has the real ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from launch_checkout import Checkout

SCONTROL = """#!/bin/sh
case "$1 $2" in
    "show job") printf '%s\\n' "JobId=$3 JobName=launch.sh" "   Command=$JOB_COMMAND --set steps=3" "   TresPerNode=$JOB_TRES" ;;
    "show hostnames") printf '%s\\n' node7 node9 ;;
    "show node") printf '%s\\n' "NodeName=$3 Arch=x86_64" "   Gres=$NODE_GRES" "   NodeAddr=$3.cluster NodeHostName=$3" ;;
esac
"""
SRUN = """#!/bin/sh
echo "started $*"
env | grep -E '^(HEAD_ADDR|HEAD_PORT|NUM_NODES|NODE_RANK|SEGUE_TOKEN)=' | sort
"""
JOB = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "node[7,9]", "SLURM_JOB_NUM_NODES": "2", "NODE_GRES": "(null)", "JOB_TRES": "cpu:1"}
TASK = {"SLURM_JOB_ID": "5", "NUM_NODES": "2", "HEAD_ADDR": "node7.cluster", "HEAD_PORT": "29405", "SEGUE_TOKEN": "words"}
EACH = "--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --no-kill"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """With everything installed."""
    made = Checkout(tmp_path)
    made.program("scontrol", SCONTROL)
    made.program("srun", SRUN)
    assert made.launch("--install-only")[0] == 0
    return made


def test_a_job_that_asked_for_no_gpus_on_nodes_with_some_is_one_sentence(tmp_path: Path) -> None:
    bare = Checkout(tmp_path)
    bare.program("scontrol", SCONTROL)
    bare.program("srun", SRUN)
    code, out, err = bare.launch("my.toml", **(JOB | {"NODE_GRES": "gpu:h100:8(S:0-1)"}))
    assert (code, out) == (2, "") and err == (
        "launch.sh: job 5 asked for no GPUs, and its nodes have some: add --gpus-per-node=N to sbatch or salloc, or set "
        "SEGUE_DEVICE=cpu.\n"
    )
    assert bare.calls() == "", "nothing is installed for it"


@pytest.mark.parametrize("more", [{"JOB_TRES": "gres:gpu:8"}, {"JOB_TRES": "gres/gpu=8"}, {"SEGUE_DEVICE": "cpu"}])
def test_a_job_that_asked_for_them_or_wants_none_starts_a_task_per_node(checkout: Checkout, more: dict[str, str]) -> None:
    code, out, err = checkout.launch("my.toml", "--set", "steps=3", NODE_GRES="gpu:8", NODE_RANK="", **(JOB | more))
    assert (code, err) == (0, "")
    started, *environment = out.splitlines()[-5:]
    assert started == f"started --nodes=2 --ntasks=2 {EACH} {checkout.path}/launch.sh my.toml --set steps=3"
    assert environment[:3] == ["HEAD_ADDR=node7.cluster", "HEAD_PORT=29405", "NUM_NODES=2"], "of the job's first node"
    assert re.fullmatch("SEGUE_TOKEN=[0-9a-f]{48}", environment[3]), "one for the job, and no NODE_RANK"


def test_each_job_has_a_token_of_its_own_unless_one_is_given(checkout: Checkout) -> None:
    tokens = [checkout.launch("my.toml", **JOB)[1].splitlines()[-1] for _ in range(2)]
    assert tokens[0] != tokens[1]
    assert checkout.launch("my.toml", SEGUE_TOKEN="mine", **JOB)[1].splitlines()[-1] == "SEGUE_TOKEN=mine"


@pytest.mark.parametrize("known", [True, False])
def test_the_copy_that_slurm_runs_finds_the_checkout(checkout: Checkout, tmp_path: Path, known: bool) -> None:
    """By the job's command, or where it was submitted."""
    spool = tmp_path / "spool" / "slurm_script"
    spool.parent.mkdir()
    shutil.copy(checkout.path / "launch.sh", spool)
    told = {"JOB_COMMAND": f"{checkout.path}/launch.sh"} if known else {"JOB_COMMAND": "", "SLURM_SUBMIT_DIR": str(checkout.path)}
    code, out, err = checkout.launch("my.toml", script=str(spool), **(JOB | told))
    assert (code, err) == (0, "")
    assert f"started --nodes=2 --ntasks=2 {EACH} {checkout.path}/launch.sh my.toml" in out


def test_the_first_task_trains_and_the_others_join_and_forgive(checkout: Checkout) -> None:
    code, out, err = checkout.launch("my.toml", SLURM_NODEID="0", **TASK)
    assert (code, err) == (0, "")
    assert "ran -m segue.cli train my.toml --hosts 2 --address node7.cluster --port 29405 as " in out
    code, out, err = checkout.launch("my.toml", SLURM_NODEID="1", **TASK)
    assert (code, err) == (0, "")
    assert "ran -m segue.cli join --address node7.cluster --port 29405 --seconds 600 --forgiving --rank 1 as " in out


def test_on_its_only_node_a_job_trains_where_it_is(checkout: Checkout) -> None:
    one = JOB | {"SLURM_JOB_NUM_NODES": "1"}
    code, out, err = checkout.launch("my.toml", SLURMD_NODENAME="node7", **one)
    assert (code, err, out) == (0, "", "ran -m segue.cli train my.toml as ./launch.sh\n")
    assert "started --nodes=1 --ntasks=1 " in checkout.launch("my.toml", **one)[1], "salloc leaves its shell elsewhere"


def test_a_dry_run_in_an_allocation_prints_the_task_and_its_hosts_and_starts_none(checkout: Checkout) -> None:
    code, out, err = checkout.launch("my.toml", "--dry-run", **JOB)
    assert (code, err) == (0, "") and "started" not in out
    task, environment, first, second, plan = out.splitlines()
    assert task == f"srun --nodes=2 --ntasks=2 {EACH} {checkout.path}/launch.sh my.toml"
    assert environment == (
        "  with HEAD_ADDR=node7.cluster HEAD_PORT=29405 NUM_NODES=2 SEGUE_TOKEN=..., NODE_RANK of each from SLURM_NODEID"
    )
    assert first.startswith("host 0: ") and first.endswith("train my.toml --hosts 2 --address node7.cluster --port 29405")
    assert second.startswith("host 1: ") and second.endswith(
        "join --address node7.cluster --port 29405 --seconds 600 --forgiving --rank 1"
    )
    assert plan.startswith("ran -m segue.cli train my.toml --dry-run --hosts 2 ")
