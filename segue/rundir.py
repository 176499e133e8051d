"""The run directory (docs/design.md §12): what a run leaves behind, written so that a crash never leaves half a file.

config.toml             the resolved config
attempts.jsonl          one line per start of the run, resumes included
metrics.jsonl           one line per learner step
evals.json              the evaluations so far, by name
summary.json            at the end
report.html             what `segue report --html` made of it
hosts.json              on several hosts: which, and who runs where
metrics/targets/*.json  where each process serves its metrics (Prometheus file_sd)
journal/  queue/  checkpoints/step_N/  trajectories/  logs/<role>-<rank>[.<attempt>[-<start>]].log
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tomllib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from segue import __version__, suite_path
from segue.build import git_sha
from segue.errors import DiskFailed, UserError
from segue.files import JsonLines, disk_errors, read_jsonl, write_atomic

CONFIG, METRICS, SUMMARY, ATTEMPTS, LOCK = "config.toml", "metrics.jsonl", "summary.json", "attempts.jsonl", ".lock"
EVALS, PAGE, HOSTS = "evals.json", "report.html", "hosts.json"
STACKS = "profile"
CHECKPOINT_COMPLETE, SCHEDULER_CUT = "COMPLETE", "scheduler.cut"
_FOLDERS = ("metrics/targets", "journal", "queue", "checkpoints", "logs", "trajectories")


@dataclass(frozen=True)
class CheckpointFolder:
    """A complete checkpoint of a run (learner/checkpoints.py says what is in it)."""

    path: Path
    step: int


class RunDir:
    """One run's directory. Made by `create`, found again by `resume` (both own it from then on) and by `open` (for reading)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    # --- getting one ------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, config_toml: str, remedy: str = "name another with --run") -> RunDir:
        """A new run directory. Raises `UserError` if it is used already or cannot be made (and then says the `remedy`).

        One in which no step was trained may be used again: what the earlier attempt left is removed.
        """
        try:
            run = cls(path)
            run._check_unused()
            path.mkdir(parents=True, exist_ok=True)
            run.lock()
            run._check_unused()  # the other process may have been quicker
            run._clear()
            run._make_folders()
            write_atomic(path / CONFIG, config_toml.encode())
        except DiskFailed as error:
            raise UserError(error.place) from error
        except OSError as error:
            raise UserError(f"The run directory {path} cannot be made ({error.strerror}): {remedy}.") from None
        return run

    def _check_unused(self) -> None:
        """Raises `UserError` unless a run may begin here."""
        path = self.path
        if path.is_dir():
            if self.begun_in_vain() or not any(name.name != LOCK for name in path.iterdir()):
                return
        elif not path.exists():
            return
        if not self._ours():
            what = "is not empty and no run directory" if path.is_dir() else "is a file"
            raise UserError(f"{path} {what}: name a new or an empty folder with --run.")
        if self.complete_checkpoints():
            raise UserError(
                f"The run directory {path} is already used: add --resume to go on with that run, "
                "or give this one another name with --run."
            )
        raise UserError(
            f"The run directory {path} is already used, by a run that has no checkpoint to go on from: "
            "give this one another name with --run."
        )

    def begun_in_vain(self) -> bool:
        """Whether this is the directory of a run that has trained no step (or none that a checkpoint or metrics.jsonl shows)."""
        if not self._ours() or self.complete_checkpoints() or self.summary.exists():
            return False
        return not (self.metrics.is_file() and self.metrics.stat().st_size)

    def _ours(self) -> bool:
        """Whether it is a run directory: others have a config.toml, or logs/, too."""
        return all((self.path / name).exists() for name in (CONFIG, LOCK, *_FOLDERS))

    def _clear(self) -> None:
        """Remove all that a run leaves behind; what is not ours stays."""
        for folder in {name.partition("/")[0] for name in (*_FOLDERS, STACKS)}:
            shutil.rmtree(self.path / folder, ignore_errors=True)
        for name in (CONFIG, METRICS, SUMMARY, ATTEMPTS, EVALS, PAGE, HOSTS):
            (self.path / name).unlink(missing_ok=True)
        for pattern in ("config.attempt-*.toml", "summary.attempt-*.json"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Take back a run that was not begun: its name is free again."""
        self._clear()
        (self.path / LOCK).unlink(missing_ok=True)
        self.unlock()
        with contextlib.suppress(OSError):  # a file of somebody else's
            self.path.rmdir()

    @classmethod
    def create_default(cls, config_path: Path, config_toml: str, now: datetime, root: Path = Path("runs"), **how: str) -> RunDir:
        """A new run directory `runs/<config name>-<time>`; a second one in the same second gets a number."""
        base = f"{config_path.stem}-{now:%Y%m%d-%H%M%S}"
        names = [base, *(f"{base}-{n}" for n in range(2, 100))]
        name = next((name for name in names if not (root / name).exists()), base)
        return cls.create(root / name, config_toml, **how)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run directory. Raises `UserError` if `path` is none."""
        if not path.is_dir():
            raise UserError(f"There is no run directory {path}: name one, for instance a folder under runs/.")
        if not (path / CONFIG).is_file():
            raise UserError(f"{path} is no run directory (it holds no {CONFIG}): name one, for instance a folder under runs/.")
        return cls(path)

    @classmethod
    def resume(cls, path: Path, config_toml: str) -> RunDir:
        """An existing run directory, to be gone on with under this config.

        A config that differs and a summary are those of the last attempt: they are kept beside, under its number.
        """
        run = cls.open(path)
        run.lock()
        last = max(1, run.attempts())
        before = run.config_text()
        with disk_errors(path):
            run._make_folders()
            if before != config_toml:
                os.replace(run.config, path / f"config.attempt-{last}.toml")
                write_atomic(run.config, config_toml.encode())
            if run.summary.exists():
                os.replace(run.summary, path / f"summary.attempt-{last}.json")
        return run

    def earlier_configs(self) -> list[Path]:
        """The configs of earlier attempts, as far as they differ from what came after."""
        return sorted(self.path.glob("config.attempt-*.toml"))

    def _make_folders(self) -> None:
        for folder in _FOLDERS:
            (self.path / folder).mkdir(parents=True, exist_ok=True)

    # --- one owner --------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Own the directory until this process ends or calls `unlock`. Raises `UserError` if another process does."""
        if self._lock is not None:
            return
        try:
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self.path / LOCK} cannot be written ({error.strerror}): make {self.path} writable.") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 32).decode("ascii", "replace").strip()
            os.close(handle)
            raise UserError(f"The run in {self.path} is still going on (process {owner}): stop it first.") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._lock = handle

    def held(self) -> bool:
        """Whether a process owns the directory now: then its run goes on. Whoever looks holds a shared lock for an instant."""
        try:
            handle = os.open(self.path / LOCK, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin_attempt(self, now: datetime, resumed_from: int | None = None) -> int:
        """Note a start of the run (`resumed_from`: the checkpoint's step) and return its number, counted from 1."""
        attempt = self.attempts() + 1
        with JsonLines(self.path / ATTEMPTS) as lines:
            started = now.isoformat(timespec="seconds")
            line = {"attempt": attempt, "started": started, "version": __version__, "resumed_from": resumed_from}
            lines.append(line | {"suite_path": suite_path.folders(), "git_sha": git_sha()})
        return attempt

    def env_log(self) -> Path:
        """The log that what an environment raised just now is in: of an env pool, or of the one process of a serial run."""
        logs = [path for name in ("envpool-*.log", "serial-0*.log") for path in self.logs.glob(name)]
        return max(logs, key=lambda path: path.stat().st_mtime, default=self.log_of("envpool-0"))

    def suite_path(self) -> list[str]:
        """Where the newest attempt looked for a suite of the user's own (`segue.suite_path`); nothing if there was none."""
        lines = read_jsonl(self.path / ATTEMPTS)
        folders = lines[-1].get("suite_path") if lines else None
        return [str(folder) for folder in folders] if isinstance(folders, list) else []

    def attempts(self) -> int:
        """How often the run was started."""
        return len(read_jsonl(self.path / ATTEMPTS))

    # --- what is in it ----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def config_text(self) -> str:
        """The config of the newest attempt, as its file has it: TOML. Raises `UserError` where it is damaged."""
        try:
            text = self.config.read_text(encoding="utf-8")
            tomllib.loads(text)
        except OSError as error:
            raise UserError(f"{self.config} cannot be read ({error.strerror}): check its permissions.") from None
        except ValueError as error:
            raise UserError(f"{self.config} is damaged ({error}): put the run's config back there.") from None
        return text

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def summary(self) -> Path:
        return self.path / SUMMARY

    @property
    def evals(self) -> Path:
        return self.path / EVALS

    @property
    def page(self) -> Path:
        return self.path / PAGE

    @property
    def targets(self) -> Path:
        return self.path / "metrics" / "targets"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_of(self, process: str, attempt: int = 1, start: int = 1) -> Path:
        """The log of a process by its name, for instance "rollout-0"; of an attempt of the run, and its nth start in that."""
        which = f".{attempt}" * (attempt > 1 or start > 1) + f"-{start}" * (start > 1)
        return self.logs / f"{process}{which}.log"

    def stacks_of(self, process: str) -> Path:
        """Where a process that samples its stacks (`segue.stacks`) writes what it found."""
        return self.path / STACKS / f"{process}.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def queue(self) -> Path:
        return self.path / "queue"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    def complete_checkpoints(self) -> list[CheckpointFolder]:
        """All complete checkpoints, oldest first."""
        found = []
        for path in self.checkpoints.glob("step_*"):
            number = path.name.removeprefix("step_")
            if number.isdecimal() and (path / CHECKPOINT_COMPLETE).is_file():
                found.append(CheckpointFolder(path, int(number)))
        return sorted(found, key=lambda folder: folder.step)

    def latest_checkpoint(self) -> CheckpointFolder:
        """The newest complete checkpoint. Raises `UserError` when there is none."""
        found = self.complete_checkpoints()
        if not found:
            again = "start it again without --resume" if self.begun_in_vain() else "start the run anew in another directory"
            raise UserError(f"{self.path} has no complete checkpoint to resume from: {again}.")
        return found[-1]

    def truncate_metrics(self, step: int) -> int:
        """Keep the lines of `metrics.jsonl` for steps below `step` (a resume trains the others again); how many were cut."""
        lines = read_jsonl(self.metrics)
        if not all(isinstance(line.get("step"), int) for line in lines):
            raise UserError(f"{self.metrics} has a line without a step: restore the file or remove that line.")
        kept = [line for line in lines if line["step"] < step]
        if len(kept) != len(lines):
            write_atomic(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return len(lines) - len(kept)

    def clear_targets(self) -> None:
        """Remove the scrape targets that a crashed attempt left behind."""
        for path in self.targets.glob("*.json"):
            path.unlink(missing_ok=True)
