"""`sbatch launch.sh …` on a real SLURM whose nodes are all on this machine (Debian: slurm-wlm, munge). Needs root."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from launches import ROOT, SCRUB, Launch
from slurm import Slurm, lacking

from segue.files import read_jsonl
from segue.rundir import RunDir

JOB_SECONDS = 240.0
QUICKSTART_SECONDS = 600.0
APART = "cluster.hosts={scheduler=[0], learner=[0], rollout=[1], envpool=[1]}"
MAP = r"(?m)^  host 0    .* cores: scheduler-0, learner-0$\n^  host 1    .* cores: rollout-0, rollout-1, envpool-0$"

pytestmark = [pytest.mark.processes, pytest.mark.cluster, pytest.mark.skipif(bool(lacking()), reason=lacking())]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster", 2) as cluster:
        yield cluster


def sbatch(
    slurm: Slurm, folder: Path, *words: str, flags: tuple[str, ...] = ("--nodes=2",), within: float = JOB_SECONDS
) -> tuple[int, str]:
    """A job to its end: exit code, and all that it printed."""
    out = folder / "job.txt"
    environment = {key: value for key, value in os.environ.items() if key not in SCRUB} | slurm.env
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = ["sbatch", "--wait", *flags, f"--output={out}", "launch.sh", *words]
    try:
        job = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=within)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{' '.join(command)}: no end within {within:g} s\n{out.read_text()[-4000:]}\n{slurm.logs()}")
    return job.returncode, job.stderr + (out.read_text() if out.exists() else "")


def test_the_quickstart_learns_on_all_nodes_of_a_job(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("configs/quickstart.toml", "--run", str(run), "--set", APART)
    code, said = sbatch(slurm, tmp_path, *words, within=QUICKSTART_SECONDS)
    assert code == 0, said + slurm.logs()
    assert re.search(MAP, said), said
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(60))
    told = json.loads((run / "summary.json").read_text())["eval"]
    assert told["after"]["success"] > told["before"]["success"] + 0.2, told
    assert (run / "logs" / "host-1.log").exists()


def test_one_call_inside_an_allocation_trains_on_all_of_its_nodes(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["configs/smoke.toml", "--run", str(run), "--set", APART, "--set", "steps=3", "--set", "eval.tasks=0"]
    with Launch(["salloc", "--nodes=2", "./launch.sh", *words], tmp_path / "salloc.txt", slurm.env) as call:
        assert call.wait(JOB_SECONDS) == 0, call.fail("it failed")
        assert re.search(MAP, call.text), call.text
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(3))


@pytest.mark.parametrize(("nodes", "how"), [(1, ()), (2, ("--signal=TERM",))], ids=["one node", "two nodes"])
def test_scancel_stops_in_order(slurm: Slurm, tmp_path: Path, nodes: int, how: tuple[str, ...]) -> None:
    """SLURM signals every process it knows; a checkpoint is written all the same, and the run can go on."""
    run, out = tmp_path / "run", tmp_path / "job.txt"
    out.touch()
    words = ["configs/smoke.toml", "--run", str(run), "--set", "steps=100000", "--set", "eval.tasks=0"]
    words += ["--set", "checkpoint.every=1000", *(("--set", APART) if nodes > 1 else ())]
    command = ["sbatch", "--wait", f"--nodes={nodes}", f"--output={out}", "launch.sh", *words]
    with ExitStack() as stack:
        job = stack.enter_context(Launch(command, tmp_path / "sbatch.txt", slurm.env))
        said = stack.enter_context(Launch(["tail", "-n", "+1", "-F", str(out)], tmp_path / "said.txt"))
        number = job.line(r"^Submitted batch job (\d+)", 30.0)[1]
        said.line(r"^step +2/", JOB_SECONDS)
        assert slurm.call("scancel", *how, number).returncode == 0
        code = job.wait(JOB_SECONDS)
        stopped = said.line(r"^Stopped at step (\d+) of 100000; the newest checkpoint is", 30.0)
    assert code == 143 or not how, said.text  # of a job that is cancelled SLURM tells otherwise
    assert RunDir.open(run).latest_checkpoint().step == int(stopped[1]) >= 2


def test_the_jobs_exit_code_is_the_runs(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, said = sbatch(slurm, tmp_path, "configs/smoke.toml", "--run", str(run), "--set", "steps=0")
    assert code == 2, said
    assert "steps" in said and not run.exists()


def test_a_job_on_gpu_nodes_that_asked_for_none_is_refused(slurm: Slurm, tmp_path: Path) -> None:
    code, said = sbatch(slurm, tmp_path, "configs/smoke.toml", flags=("--partition=gpu", "--nodes=1"))
    assert code == 2, said
    assert "asked for no GPUs" in said and "--gpus-per-node" in said
