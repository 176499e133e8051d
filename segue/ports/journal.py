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
    """The journal of this version: keeps counts, and the newest records for reading in tests and after a failure.

    These are at least `keep` and at most twice as many, or fewer where their bodies weigh more than `keep_bytes` (an exchange may
    have megabytes).
    """

    def __init__(self, keep: int = 1000, keep_bytes: int = 16 << 20) -> None:
        self.appended = 0
        self.records: list[Record] = []
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._bytes = 0

    async def append(self, records: list[Record]) -> None:
        self.appended += len(records)
        self.records.extend(records)
        for record in records:
            self._bytes += len(record.body)
        if len(self.records) <= 2 * self._keep and self._bytes <= self._keep_bytes:
            return
        gone = len(self.records) - self._keep if len(self.records) > 2 * self._keep else 0
        self._bytes -= sum(len(record.body) for record in self.records[:gone])
        while self._bytes > self._keep_bytes:
            self._bytes -= len(self.records[gone].body)
            gone += 1
        del self.records[:gone]

    async def close(self) -> None:
        self.records.clear()
        self._bytes = 0
