"""A SLURM cluster on this machine: a controller and several slurmd, whose nodes share one address. Needs root, slurm-wlm, munge.

Everything of it, its munge key included, lives in one folder and ends with the context; a SLURM that runs here is not touched.
The last node has what SLURM takes for a GPU, in a partition of its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

START_SECONDS = 60.0
STOP_SECONDS = 20.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "salloc", "srun", "scontrol", "sinfo")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def lacking() -> str:
    """Why there can be no SLURM here; "" if there can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"there is no {missing[0]} here (Debian: slurm-wlm, munge)" if missing else ""


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Slurm:
    """`count` nodes n1, n2, … in the default partition, and g1 in partition `gpu`. `env` makes SLURM's commands talk to it."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._names = [f"n{i + 1}" for i in range(count)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}

    def __enter__(self) -> Self:
        self._folder.mkdir()
        self._folder.chmod(0o755)
        try:
            self._start_munge()
            self._configure()
            self._start("slurmctld", "-D", "-f", self.env["SLURM_CONF"])
            for name in (*self._names, "g1"):
                self._start("slurmd", "-D", "-N", name, "-f", self.env["SLURM_CONF"])
            self._until_idle()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def call(self, *words: str, within: float = 30.0) -> subprocess.CompletedProcess[str]:
        """One of SLURM's commands, to its end."""
        return subprocess.run(words, env=os.environ | self.env, capture_output=True, text=True, timeout=within)

    def logs(self) -> str:
        """The ends of all logs, for a test that failed."""
        parts = []
        for path in sorted(self._folder.glob("*.log")):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)

    # --- setting up -----------------------------------------------------------------------------------------------------

    def _start_munge(self) -> None:
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key-file": key, "socket": self._folder / "munge.socket", "pid-file": self._folder / "munge.pid"}
        files |= {"log-file": self._folder / "munge.log", "seed-file": self._folder / "munge.seed"}
        self._start("munged", "--foreground", "--force", "--num-threads=2", *(f"--{name}={path}" for name, path in files.items()))
        deadline = time.monotonic() + START_SECONDS
        while not files["socket"].exists():
            if time.monotonic() > deadline:
                pytest.fail(f"munged made no socket within {START_SECONDS:g} s\n{self.logs()}")
            time.sleep(0.05)

    def _configure(self) -> None:
        control, *ports = _free_ports(len(self._names) + 2)
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"
            for name, port in zip((*self._names, "g1"), ports, strict=True)
        ]
        nodes[-1] += " Gres=gpu:1"
        folder = self._folder
        lines = [
            "ClusterName=segue",
            "SlurmctldHost=localhost(127.0.0.1)",
            f"SlurmctldPort={control}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge.socket",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdLogFile={folder}/slurmd-%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "MpiDefault=none",
            "ReturnToService=2",
            "GresTypes=gpu",
            *nodes,
            f"PartitionName=all Nodes={','.join(self._names)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE",
            "PartitionName=gpu Nodes=g1 MaxTime=INFINITE State=UP",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "gres.conf").write_text("NodeName=g1 Name=gpu File=/dev/null\n")

    def _start(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=_PATH)
        assert program is not None, name
        with (self._folder / f"{name}-{len(self._daemons)}.log").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments],
                    env=os.environ | self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _until_idle(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        wanted = len(self._names) + 1
        while (said := self.call("sinfo", "--noheader", "--Node", "--format=%N %t").stdout).count(" idle") < wanted:
            if time.monotonic() > deadline:
                pytest.fail(f"SLURM's nodes did not become idle within {START_SECONDS:g} s:\n{said}\n{self.logs()}")
            time.sleep(0.2)

    def _stop(self) -> None:
        if len(self._daemons) > 1:
            self.call("scancel", "--user=root", "--signal=KILL")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
