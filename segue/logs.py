"""One log file per process, `logs/<role>-<rank>.log`, and the counter of what was logged.

Line: `2026-03-01T12:00:00.123+0000 INFO rollout-0 rollout.node: text`. Our own packages log from `level` on, others from
WARNING on.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from types import TracebackType

from segue.errors import UserError
from segue.metrics.registry import Metrics
from segue.metrics.vocabulary import LOG_LEVELS

PACKAGES = ("segue", "scheduler", "envpool", "rollout", "learner", "weightsync")


def parse_level(level: str) -> int:
    """The number of a level's name; raises `UserError` for an unknown one."""
    if level.lower() not in LOG_LEVELS:
        raise UserError(f"There is no log level {level!r}: choose one of {', '.join(LOG_LEVELS)}.")
    number = logging.getLevelName(level.upper())
    assert isinstance(number, int)
    return number


class _Lines(logging.Formatter):
    """Wall-clock time in UTC with milliseconds: lines of several hosts can be merged by sorting."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{moment}.{int(record.msecs):03d}+0000"


class _FileHandler(logging.FileHandler):
    """A log file that cannot be written says so once and is then left alone: a full disk must not end a role by its log."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        else:
            self._tell(error)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what was buffered cannot be written either
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            print(f"{self.baseFilename} cannot be written ({error.strerror}): log lines are lost.", file=sys.stderr)


def _ours_or_loud(record: logging.LogRecord) -> bool:
    """Some libraries set their own loggers to DEBUG: what is not ours is written from WARNING on."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in PACKAGES


class CountingHandler(logging.Handler):
    """Counts every record in `segue_log_messages_total` by level."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def emit(self, record: logging.LogRecord) -> None:
        self._metrics.add("segue_log_messages_total", level=level_name(record.levelno))


def level_name(number: int) -> str:
    """The closed set's name for a level number: the highest standard level not above it."""
    standard = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    index = max((i for i, level in enumerate(standard) if level <= number), default=0)
    return LOG_LEVELS[index]


class ProcessLog:
    """The log of one process while the block runs (or until `close`): its file, and the counter if `metrics` are given.

    Every line names the process, for instance "rollout-0".
    """

    def __init__(self, path: Path, process: str, *, level: str = "info", metrics: Metrics | None = None) -> None:
        threshold = parse_level(level)
        file = _FileHandler(path, encoding="utf-8", delay=False)
        file.setFormatter(_Lines(process))
        self._handlers: list[logging.Handler] = [file]
        if metrics is not None:
            self._handlers.append(CountingHandler(metrics))
        root = logging.getLogger()
        for handler in self._handlers:
            handler.addFilter(_ours_or_loud)
            root.addHandler(handler)
        self._levels = {name: logging.getLogger(name).level for name in PACKAGES}
        for name in PACKAGES:
            logging.getLogger(name).setLevel(threshold)
        self.path = Path(file.baseFilename)

    def close(self) -> None:
        """Take the handlers off and put the levels back."""
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self._handlers.clear()

    def __enter__(self) -> ProcessLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
