"""The journal: what the scheduler writes down before it acknowledges a change of state."""

from __future__ import annotations

from typing import Protocol

from segue.wire import Message


class Record(Message, frozen=True):
    """One input of the scheduler's core: enough to repeat it. `body` is the encoded message it came in."""

    now: float
    method: str
    body: bytes


class Journal(Protocol):
    """Append-only. Only when `append` has returned is a change acknowledged."""

    async def append(self, records: list[Record]) -> None: ...

    async def close(self) -> None: ...


class MemoryJournal:
    """The journal of this version: keeps counts, and the newest `keep` records for reading in tests and after a failure."""

    def __init__(self, keep: int = 1000) -> None:
        self.appended = 0
        self._keep = keep
        self.records: list[Record] = []

    async def append(self, records: list[Record]) -> None:
        self.appended += len(records)
        self.records.extend(records)
        if len(self.records) > 2 * self._keep:
            del self.records[: len(self.records) - self._keep]

    async def close(self) -> None:
        self.records.clear()
