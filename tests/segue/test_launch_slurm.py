"""launch.sh under SLURM, whose commands are stand-ins: what it asks of them, what each task does. tests/cluster has real ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from launch_checkout import Checkout

SCONTROL = """#!/bin/sh
case "$1 $2" in
    "show job")
        printf '%s\\n' "JobId=$3 JobName=launch.sh" "   Command=$JOB_COMMAND --set steps=3" "   TresPerNode=$JOB_TRES"
        seq 1 "${MORE:-0}" ;;
    "show hostnames") seq -f node%g 7 2 "${LAST:-9}" ;;
    "show node") printf '%s\\n' "NodeName=$3 Arch=x86_64" "   Gres=$NODE_GRES" "   NodeAddr=$3.cluster NodeHostName=$3" ;;
esac
"""
SRUN = """#!/bin/sh
echo "srun $*"
env | grep -E '^(HEAD_ADDR|HEAD_PORT|NUM_NODES|NODE_RANK|SEGUE_TOKEN)=' | sort
while [ "${1#--}" != "$1" ]; do shift; done
node=0
while [ "$node" -lt "$NUM_NODES" ]; do SLURM_NODEID=$node "$@" || exit; node=$((node + 1)); done
"""
"""Tells what it was asked and given, and runs the tasks, one after another."""
JOB = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "node[7,9]",
    "SLURM_JOB_NUM_NODES": "2",
    "NODE_GRES": "(null)",
    "JOB_TRES": "cpu:1",
}
ON_GPUS = JOB | {"NODE_GRES": "gpu:h100:8(S:0-1)"}
EACH = "--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --no-kill"


def with_slurm(folder: Path) -> Checkout:
    made = Checkout(folder)
    made.program("scontrol", SCONTROL)
    made.program("srun", SRUN)
    return made


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """With everything installed."""
    made = with_slurm(tmp_path)
    assert made.launch("--install-only")[0] == 0
    return made


def test_a_job_that_asked_for_no_gpus_on_nodes_with_some_is_one_sentence(tmp_path: Path) -> None:
    bare = with_slurm(tmp_path)
    code, out, err = bare.launch("my.toml", **ON_GPUS)
    assert (code, out) == (2, "") and err == (
        "launch.sh: job 5 asked for no GPUs, and its nodes have some: add --gpus-per-node=N to sbatch or salloc, or set "
        "SEGUE_DEVICE=cpu.\n"
    )
    assert bare.calls() == "", "nothing is installed for it"


@pytest.mark.parametrize("more", [{"JOB_TRES": "gres:gpu:8"}, {"JOB_TRES": "gres/gpu=8"}, {"SEGUE_DEVICE": "cpu"}])
def test_a_job_that_asked_for_them_or_wants_none_is_started(checkout: Checkout, more: dict[str, str]) -> None:
    code, out, err = checkout.launch("my.toml", **(ON_GPUS | more))
    assert (code, err) == (0, "") and out.startswith("srun ")


def test_each_node_of_a_job_has_a_task_and_the_first_trains(checkout: Checkout) -> None:
    """The other one forgives: the job's exit code is the first one's."""
    script, asked = f"{checkout.path}/launch.sh", "my.toml --set steps=3"
    code, out, err = checkout.launch(*asked.split(), **JOB)
    assert (code, err) == (0, "")
    task, address, port, number, token, first, second = out.splitlines()
    assert task == f"srun --nodes=2 --ntasks=2 {EACH} {script} {asked}"
    assert (address, port, number) == ("HEAD_ADDR=node7.cluster", "HEAD_PORT=29405", "NUM_NODES=2")
    assert re.fullmatch("SEGUE_TOKEN=[0-9a-f]{48}", token), "one for the job, and no NODE_RANK"
    assert first == f"ran -m segue.cli train {asked} --hosts 2 --address node7.cluster --port 29405 as {script}"
    assert second == f"ran -m segue.cli join --address node7.cluster --port 29405 --seconds 600 --forgiving --rank 1 as {script}"


def test_each_job_has_a_token_of_its_own_unless_one_is_given(checkout: Checkout) -> None:
    tokens = [checkout.launch("my.toml", **JOB)[1].splitlines()[4] for _ in range(2)]
    assert tokens[0] != tokens[1]
    assert checkout.launch("my.toml", SEGUE_TOKEN="mine", **JOB)[1].splitlines()[4] == "SEGUE_TOKEN=mine"


@pytest.mark.parametrize("known", [True, False])
def test_the_copy_that_slurm_runs_finds_the_checkout(checkout: Checkout, tmp_path: Path, known: bool) -> None:
    """By the job's command, or where it was submitted."""
    spool = tmp_path / "spool" / "slurm_script"
    spool.parent.mkdir()
    shutil.copy(checkout.path / "launch.sh", spool)
    told = {"JOB_COMMAND": f"{checkout.path}/launch.sh"} if known else {"JOB_COMMAND": "", "SLURM_SUBMIT_DIR": str(checkout.path)}
    code, out, err = checkout.launch("my.toml", script=str(spool), SLURMD_NODENAME="node7", **(JOB | told))
    assert (code, err) == (0, "")
    assert out.startswith(f"srun --nodes=2 --ntasks=2 {EACH} {checkout.path}/launch.sh my.toml\n")
    assert f"ran -m segue.cli train my.toml --hosts 2 --address node7.cluster --port 29405 as {checkout.path}/launch.sh\n" in out


def test_on_its_only_node_a_job_trains_where_it_is(checkout: Checkout) -> None:
    one = JOB | {"SLURM_JOB_NUM_NODES": "1"}
    assert checkout.launch("my.toml", SLURMD_NODENAME="node7", **one) == (
        0,
        "ran -m segue.cli train my.toml as ./launch.sh\n",
        "",
    )
    code, out, err = checkout.launch("my.toml", **one)
    assert (code, err) == (0, "") and out.startswith("srun --nodes=1 --ntasks=1 "), "salloc leaves its shell elsewhere"
    assert out.endswith(f"ran -m segue.cli train my.toml as {checkout.path}/launch.sh\n")


def test_a_dry_run_in_an_allocation_prints_the_task_and_its_hosts_and_starts_none(checkout: Checkout) -> None:
    code, out, err = checkout.launch("my.toml", "--dry-run", **JOB)
    assert (code, err) == (0, "")
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


def test_a_job_without_slurms_commands_is_one_sentence(tmp_path: Path) -> None:
    bare = Checkout(tmp_path)
    for name in ("bash", "basename", "dirname"):  # all that is used before it is looked
        (bare.path / "bin" / name).symlink_to(str(shutil.which(name)))
    code, out, err = bare.launch("my.toml", PATH=str(bare.path / "bin"), **JOB)
    assert (code, out) == (2, "")
    assert err == "launch.sh: SLURM_JOB_ID is set and there is no srun here: unset it, or add SLURM's commands to PATH.\n"


def test_of_a_job_of_many_nodes_the_first_is_found_and_what_it_asked_for(checkout: Checkout) -> None:
    """More is said than a pipe holds: nobody may close it before all is read."""
    many = {"LAST": "60001", "MORE": "60000", "NODE_GRES": "gpu:8", "JOB_TRES": "gres/gpu:8"}
    code, out, err = checkout.launch("my.toml", **(JOB | many))
    assert (code, err) == (0, "") and "HEAD_ADDR=node7.cluster\n" in out
