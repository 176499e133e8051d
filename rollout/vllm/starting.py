"""Why vLLM did not start, in one sentence. What fails in its processes is only in what they print: vLLM's own error
says "see above". The first exception there is the cause; later ones say that somebody else's process failed.
Pure, but for `Printed`.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from segue.errors import UserError

_EXCEPTION = re.compile(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt)): (.+)$")
_HEAD = re.compile(r"^\d+ validation errors? for \w+$")
_LONGEST = 300
_TAIL = 1 << 20
REMEDIES = (
    (
        re.compile(r"out of memory|can't allocate|cannot allocate memory|free memory on device", re.IGNORECASE),
        "lower rollout.engine_args.gpu_memory_utilization or rollout.engine_args.kv_cache_memory_bytes, use a smaller model, or "
        "spread it with rollout.engine_args.tensor_parallel_size.",
    ),
    (
        re.compile(r"kv.?cache", re.IGNORECASE),
        "set rollout.engine_args.kv_cache_memory_bytes to what the machine has and an episode needs, or lower "
        "rollout.max_tokens.",
    ),
    (
        re.compile(r"not supported|unsupported", re.IGNORECASE),
        "use another model or other rollout.engine_args, or set rollout.engine = 'embedded'.",
    ),
)
OTHERWISE = "correct rollout.engine_args or the model folder; the node's log has all of it."


def cause_of(output: str) -> str:
    """The first exception that was printed, as "Kind: text"; "" if there is none."""
    for line in output.splitlines():
        found = _EXCEPTION.match(line)
        if found is not None:
            return f"{found[1]}: {found[2]}"
    return ""


def first_words(error: BaseException) -> str:
    """What an exception of this process says: of a validation error the first fault, without pydantic's decoration."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and _HEAD.match(lines[0]):
        lines = lines[1:]
    text = lines[0].removeprefix("Value error, ").split(" [type=")[0] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def not_started(cause: str) -> UserError:
    """The sentence."""
    text = " ".join(cause.split())
    if len(text) > _LONGEST:
        text = text[: text.rfind(" ", 0, _LONGEST)] + " …"
    remedy = next((remedy for pattern, remedy in REMEDIES if pattern.search(text)), OTHERWISE)
    return UserError(f"vLLM did not start ({text.rstrip('.')}): {remedy}")


class Printed:
    """What this process and its children print to stderr from now on, where that goes to a file (as in every role process)."""

    def __init__(self) -> None:
        self._path = Path("/proc/self/fd/2")
        self._from = -1
        self.forget()

    def forget(self) -> None:
        """What was printed up to now is of no interest."""
        self._from = self._size()

    def _size(self) -> int:
        try:
            status = os.stat(self._path)
        except OSError:
            return -1
        return status.st_size if stat.S_ISREG(status.st_mode) else -1

    def read(self) -> str:
        """All of it, but for what is more than a megabyte ago; "" where it does not go to a file."""
        size = self._size()
        if self._from < 0 or size <= self._from:
            return ""
        with open(self._path, "rb") as file:
            file.seek(max(self._from, size - _TAIL))
            return file.read().decode("utf-8", errors="replace")
