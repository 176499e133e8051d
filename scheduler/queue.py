"""The trajectory queue: the payloads of every episode's accepted deltas, in order, counted in bytes, spilled to disk when too
many.

The core decides what is queued (its envelopes: groups, outcomes, tokens per version); this is where the payloads lie. Nothing
here blocks or refuses: back-pressure acts at admission alone. When more than `limit` bytes are in memory, the logs that are
needed last are written to a file in the run directory's `queue/`: batches kept until they are committed, then the youngest
finished episodes, then the youngest unfinished ones. A spill is planned here (`plan_spill`), written wherever the caller runs
blocking work (`SpillJob.write`), and takes effect only when the file is complete (`finish_spill`): until then everything is
still in memory.
"""

from __future__ import annotations

import enum
import os
import struct
import zlib
from collections import OrderedDict
from pathlib import Path

from segue.errors import RunFailed

_RECORD = struct.Struct("<II")  # length, CRC-32
KEEP = 0.9
"""A spill brings memory down to this share of the limit, so that it happens in pieces worth a file."""
MAX_JOB_BYTES = 64 << 20


class SpillFailed(RunFailed):
    """The run directory could not take what does not fit into memory, or did not give it back as it was."""

    def __init__(self, sentence: str) -> None:
        super().__init__("scheduler", sentence)


class Place(enum.Enum):
    """Where an episode is, as far as its payloads are concerned; also the names of the queues in the metrics."""

    LIVE = "pending"
    READY = "ready"
    KEPT = "batches"


class _File:
    """A spill file and how many logs still have something in it."""

    __slots__ = ("logs", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = 0


class _Piece:
    """A run of payloads of one log in a spill file."""

    __slots__ = ("count", "file", "length", "offset")

    def __init__(self, file: _File, offset: int, length: int, count: int) -> None:
        self.file = file
        self.offset = offset
        self.length = length
        self.count = count


class _Log:
    """One episode's payloads: first the spilled pieces, then what is in memory."""

    __slots__ = ("checksum", "count", "discarded", "in_memory", "memory", "pieces", "place")

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.memory: list[bytes] = []
        self.in_memory = 0
        self.count = 0
        self.checksum = 0
        self.place = Place.LIVE
        self.discarded = False


class LogReader:
    """One episode's payloads as they were when this was made, to be read later, from a thread if need be."""

    def __init__(self, log: _Log | None) -> None:
        self._log = log
        self._pieces, self._memory = (list(log.pieces), list(log.memory)) if log is not None else ([], [])

    @property
    def on_disk(self) -> bool:
        """Whether something of it was spilled, so that reading blocks."""
        return bool(self._pieces)

    @property
    def gone(self) -> bool:
        """Whether the log was discarded since: its files may be gone, too."""
        return self._log is not None and self._log.discarded

    def __call__(self) -> list[bytes]:
        """All payloads in order. Raises `SpillFailed` if a file is gone or changed."""
        return [payload for piece in self._pieces for payload in _read(piece)] + self._memory


class SpillJob:
    """Some logs to be written to one file. `write` blocks and may run in a thread; it touches nothing but the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs: list[tuple[int, _Log, list[bytes]]] = []
        self.nbytes = 0

    def write(self) -> None:
        """Write the file aside and rename it. Raises `SpillFailed` with one sentence; then nothing was lost."""
        aside = self.path.with_suffix(".part")
        try:
            with open(aside, "wb") as file:
                for _, _, payloads in self.logs:
                    for payload in payloads:
                        file.write(_RECORD.pack(len(payload), zlib.crc32(payload)))
                        file.write(payload)
            os.replace(aside, self.path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise SpillFailed(
                f"The trajectory queue could not write {self.nbytes} bytes to {self.path} ({error.strerror}): "
                "free space there or raise queue.bytes, and go on with --resume."
            ) from error


class TrajectoryQueue:
    """Logs by episode. `folder` is created at the first spill; what an earlier life left in it is removed."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._logs: dict[int, _Log] = {}
        self._order: dict[Place, OrderedDict[int, _Log]] = {place: OrderedDict() for place in Place}
        self._files = 0
        self.memory_bytes = 0
        self.bytes_by_place = dict.fromkeys(Place, 0)
        self.spilled_bytes = 0
        for left_over in folder.glob("spill-*"):
            left_over.unlink(missing_ok=True)

    # --- the log of an episode ------------------------------------------------------------------------------------------

    def append(self, episode: int, payload: bytes) -> None:
        """The next accepted delta."""
        log = self._logs.get(episode)
        if log is None:
            log = self._logs[episode] = self._order[Place.LIVE][episode] = _Log()
        log.memory.append(payload)
        log.count += 1
        log.checksum = zlib.crc32(payload, log.checksum)
        self._account(log, len(payload))

    def count(self, episode: int) -> int:
        """How many deltas the log has."""
        log = self._logs.get(episode)
        return log.count if log is not None else 0

    def checksum(self, episode: int) -> int:
        """CRC-32 over all payloads in order (`segue.episode.log_checksum`)."""
        log = self._logs.get(episode)
        return log.checksum if log is not None else 0

    def reader(self, episode: int) -> LogReader:
        """Its log as it is now."""
        return LogReader(self._logs.get(episode))

    def move(self, episode: int, place: Place) -> None:
        """The episode finished (READY) or is in a batch (KEPT): this decides when it is spilled."""
        log = self._logs.get(episode)
        if log is None or log.place is place:
            return
        del self._order[log.place][episode]
        self.bytes_by_place[log.place] -= log.in_memory
        log.place = place
        self._order[place][episode] = log
        self.bytes_by_place[place] += log.in_memory

    def finished(self, episode: int) -> None:
        """The episode finished; it may be in a batch already."""
        log = self._logs.get(episode)
        if log is not None and log.place is Place.LIVE:
            self.move(episode, Place.READY)

    def discard(self, episode: int) -> None:
        """Nobody needs the log any more."""
        log = self._logs.pop(episode, None)
        if log is None:
            return
        log.discarded = True
        del self._order[log.place][episode]
        self._account(log, -log.in_memory)
        for piece in log.pieces:
            self._release(piece.file)

    def __len__(self) -> int:
        return len(self._logs)

    def _account(self, log: _Log, nbytes: int) -> None:
        log.in_memory += nbytes
        self.memory_bytes += nbytes
        self.bytes_by_place[log.place] += nbytes

    # --- spilling -------------------------------------------------------------------------------------------------------

    def plan_spill(self) -> SpillJob | None:
        """What to write so that memory is within the limit; None if it is."""
        if self.memory_bytes <= self._limit:
            return None
        excess = min(self.memory_bytes - int(KEEP * self._limit), MAX_JOB_BYTES)
        self._files += 1
        job = SpillJob(self._folder / f"spill-{self._files:06d}.bin")
        for place in (Place.KEPT, Place.READY, Place.LIVE):
            for episode, log in reversed(self._order[place].items()):
                if job.nbytes >= excess:
                    return self._started(job)
                if log.in_memory:
                    job.logs.append((episode, log, list(log.memory)))
                    job.nbytes += log.in_memory
        return self._started(job)

    def _started(self, job: SpillJob) -> SpillJob | None:
        if not job.logs:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpillFailed(f"The folder {self._folder} cannot be made ({error.strerror}): check its permissions.") from error
        return job

    def finish_spill(self, job: SpillJob) -> None:
        """The file is complete: what it holds leaves memory. Logs discarded meanwhile just stay unread in it."""
        file = _File(job.path)
        offset = 0
        for episode, log, payloads in job.logs:
            length = sum(_RECORD.size + len(payload) for payload in payloads)
            if self._logs.get(episode) is log:
                log.pieces.append(_Piece(file, offset, length, len(payloads)))
                del log.memory[: len(payloads)]
                self._account(log, -sum(map(len, payloads)))
                file.logs += 1
            offset += length
        self.spilled_bytes += job.nbytes
        if not file.logs:
            file.path.unlink(missing_ok=True)

    def _release(self, file: _File) -> None:
        file.logs -= 1
        if not file.logs:
            file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the spill files: without a journal nothing can read them again."""
        for log in self._logs.values():
            for piece in log.pieces:
                piece.file.path.unlink(missing_ok=True)
        self._logs.clear()


def _read(piece: _Piece) -> list[bytes]:
    try:
        with open(piece.file.path, "rb") as file:
            file.seek(piece.offset)
            data = file.read(piece.length)
    except OSError as error:
        raise SpillFailed(
            f"The trajectory queue cannot read {piece.file.path} again ({error.strerror}): nobody else may touch that folder."
        ) from error
    payloads: list[bytes] = []
    position = 0
    while position + _RECORD.size <= len(data):
        length, checksum = _RECORD.unpack_from(data, position)
        position += _RECORD.size
        payload = data[position : position + length]
        position += length
        if len(payload) != length or zlib.crc32(payload) != checksum:
            break
        payloads.append(payload)
    if len(payloads) != piece.count:
        raise SpillFailed(f"{piece.file.path} has changed since the trajectory queue wrote it: check that disk.")
    return payloads
