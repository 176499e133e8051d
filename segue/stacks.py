"""Into which functions a process's CPU time goes: samples the stacks of its Python threads, weighed by each thread's CPU time.

A thread that waits costs nothing and counts nothing; one that computes is charged, at every sample, with the CPU time it has
used since the last one. So the seconds of all functions sum to the threads' CPU time whatever the interval; to which function
a stretch shorter than the interval belongs is a matter of chance. The sampler itself takes the interpreter lock for some ten
microseconds at a time and is left out. Threads that run no Python (a native library's own) are summed as one figure.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from segue.files import write_json

INTERVAL_SECONDS = 0.005
TOP = 60
"""Functions that are written, by self time and by cumulative time."""
_STOP_SECONDS = 5.0

Function = tuple[str, str]
"""File and qualified name."""


def thread_cpu_seconds(tid: int) -> float:
    """CPU seconds of a thread of this process by its native id; Linux. Raises `OSError` if it has ended."""
    return time.clock_gettime((~tid << 3) | 6)  # what pthread_getcpuclockid gives, which must not be asked of a dead thread


@dataclass
class Section:
    """What was sampled between two moments, in CPU seconds. `process` is the whole process, native threads included."""

    began: float = field(default_factory=time.process_time)
    process: float = 0.0
    threads: dict[str, float] = field(default_factory=dict)
    own: dict[Function, float] = field(default_factory=dict)
    cumulative: dict[Function, float] = field(default_factory=dict)

    def charge(self, thread: str, stack: list[CodeType], seconds: float) -> None:
        """`seconds` of CPU time to the function that runs (the first of `stack`), and to all that called it, each once."""
        self.threads[thread] = self.threads.get(thread, 0.0) + seconds
        functions = [name_of(code) for code in stack]
        self.own[functions[0]] = self.own.get(functions[0], 0.0) + seconds
        for function in set(functions):
            self.cumulative[function] = self.cumulative.get(function, 0.0) + seconds

    def told(self) -> dict[str, Any]:
        """As JSON: seconds by thread, and the `TOP` functions."""
        return {
            "cpu_seconds": round(self.process, 3),
            "python_threads": {name: round(s, 3) for name, s in sorted(self.threads.items(), key=lambda item: -item[1])},
            "self": _top(self.own),
            "cumulative": _top(self.cumulative),
        }


def _top(seconds: dict[Function, float]) -> list[dict[str, Any]]:
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:TOP]
    return [{"file": file, "function": name, "seconds": round(s, 3)} for (file, name), s in ranked]


def name_of(code: CodeType) -> Function:
    """The last two parts of its path, and its qualified name."""
    return "/".join(code.co_filename.rsplit("/", 2)[-2:]), code.co_qualname


class StackSampler:
    """Samples this process from now on; `close` writes `path`. `section(name)` begins the next part of the report."""

    def __init__(self, path: Path, section: str, interval: float = INTERVAL_SECONDS) -> None:
        self._path = path
        self._interval = interval
        self._sections = {section: Section()}
        self._current = self._sections[section]
        self._known: dict[int, float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stacks", daemon=True)
        self._thread.start()

    def section(self, name: str) -> None:
        """What is sampled from now on is reported under `name`."""
        self.sample()
        with self._lock:
            self._close_section()
            self._current = self._sections[name] = Section()

    def close(self) -> None:
        """Stop, and write the report. Raises `RunFailed` on a full disk."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)
        with self._lock:
            self._close_section()
            report = {name: section.told() for name, section in self._sections.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"interval_seconds": self._interval, "sections": report})

    def _close_section(self) -> None:
        self._current.process = time.process_time() - self._current.began

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.sample()

    def sample(self) -> None:
        """Charge every thread with what it has used since the last sample.

        Nothing in here may give the interpreter lock away between asking for the stacks and having walked them: a frame that runs
        on meanwhile is no longer what it was.
        """
        threads = threading.enumerate()
        with self._lock:
            frames = sys._current_frames()
            stacks = [(thread, walk(frames.get(thread.ident or 0))) for thread in threads if thread is not self._thread]
            del frames
            for thread, stack in stacks:
                if not stack or thread.native_id is None:
                    continue
                with contextlib.suppress(OSError):
                    used = thread_cpu_seconds(thread.native_id)
                    spent = used - self._known.get(thread.native_id, 0.0)
                    self._known[thread.native_id] = used
                    if spent > 0.0:
                        self._current.charge(thread.name, stack, spent)


def walk(frame: FrameType | None) -> list[CodeType]:
    """The code that a frame runs, then its callers'. Frames of compiled extensions (uvloop) have none of their own: left out."""
    found: list[CodeType] = []
    while frame is not None:
        if isinstance(frame.f_code, CodeType):
            found.append(frame.f_code)
        frame = frame.f_back
    return found
