"""Modelled weights: a version is its number and the probe's answer; a transfer is a wait. No tensors, and so no torch.

A transfer waits at the `Hub` until all its members have come (or its deadline), then takes as long as the scenario says.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from benchmarks.virtual.engine import LOGPROB
from benchmarks.virtual.scenario import WeightsModel
from segue.clock import now
from segue.ports.transfer import Transfer, TransferResult

_REMEMBERED = 64
"""Ended transfers whose reason is remembered: late members belong to the newest few."""


class ModelledProbe(msgspec.Struct, frozen=True):
    """`segue.ports.weights.Probe`: what every modelled engine says too."""

    tokens: list[int]
    logprobs: list[float]


class ModelledManifest(msgspec.Struct, frozen=True):
    """What a node reads of `segue.ports.weights.Manifest`."""

    step: int
    probe: ModelledProbe | None


class Staged(msgspec.Struct, frozen=True):
    """`segue.ports.weights.StagedWeights` without tensors."""

    version: int
    manifest: ModelledManifest

    def tensors(self) -> dict[str, Any]:
        """None: a modelled engine loads a number."""
        return {}


class NotSent(Exception):
    """A transfer that did not complete."""


class _Meeting:
    """The members that came to a transfer, each with the future of what it stages; `expected`: how many the sender waits for."""

    def __init__(self) -> None:
        self.seats: dict[str, asyncio.Future[Staged]] = {}
        self.came = asyncio.Event()
        self.expected = 0

    def take(self, member: str, seat: asyncio.Future[Staged]) -> None:
        self.seats[member] = seat
        if len(self.seats) >= self.expected:
            self.came.set()


class Hub:
    """Where sender and receivers meet, by transfer id. `probe_tokens` as in `weightsync.probe_tokens`."""

    def __init__(self, model: WeightsModel, probe_tokens: int) -> None:
        self._model = model
        self._meetings: dict[int, _Meeting] = {}
        self._over: dict[int, str] = {}
        self._probe = ModelledProbe([0] * probe_tokens, [LOGPROB] * (probe_tokens - 1)) if probe_tokens else None

    def meeting(self, transfer: int) -> _Meeting:
        """The first to come opens it."""
        return self._meetings.setdefault(transfer, _Meeting())

    def over(self, transfer: int) -> str:
        """Why it is too late for a transfer, or ""."""
        return self._over.get(transfer, "")

    async def send(self, transfer: Transfer) -> TransferResult:
        """The sender's part; never raises for a member, and returns by the deadline."""
        meeting, began = self.meeting(transfer.transfer), now()
        meeting.expected = len(transfer.members)
        missing: list[str] = []
        try:
            async with asyncio.timeout(transfer.deadline_seconds):
                while missing := [name for name in transfer.members if name not in meeting.seats]:
                    meeting.came.clear()
                    await meeting.came.wait()
                began = now()
                await asyncio.sleep(self._model.seconds + self._model.seconds_per_member * len(transfer.members))
        except TimeoutError:
            missing = [name for name in missing if name not in meeting.seats]
            reason = f"{len(missing)} members did not come" if missing else "it took longer than its deadline"
            return self._conclude(transfer, meeting, missing or list(transfer.members), reason, 0.0)
        left = [name for name in transfer.members if meeting.seats[name].done()]
        return self._conclude(transfer, meeting, left, "members left before its end" if left else "", now() - began)

    def _conclude(self, transfer: Transfer, meeting: _Meeting, missing: list[str], reason: str, seconds: float) -> TransferResult:
        del self._meetings[transfer.transfer]
        self._over[transfer.transfer] = reason or "the transfer is over"
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]
        staged = Staged(transfer.version, ModelledManifest(transfer.step, self._probe))
        for seat in meeting.seats.values():
            if not seat.done():
                if reason:
                    seat.set_exception(NotSent(f"transfer {transfer.transfer}: {reason}"))
                else:
                    seat.set_result(staged)
        return TransferResult(transfer.version, transfer.transfer, not reason, missing if reason else [], reason, 0, 0.0, seconds)


class ModelledReceiver:
    """`segue.ports.weights.WeightReceiver` of one node. A newer call supersedes one that still waits."""

    def __init__(self, hub: Hub, name: str) -> None:
        self._hub = hub
        self._name = name
        self._seat: asyncio.Future[Staged] | None = None

    async def stage(self, transfer: Transfer, rank: int) -> Staged:
        """Wait for the transfer's end. Raises `NotSent`."""
        if why := self._hub.over(transfer.transfer):
            raise NotSent(f"transfer {transfer.transfer}: {why}")
        self.close()
        meeting = self._hub.meeting(transfer.transfer)
        seat = self._seat = asyncio.get_running_loop().create_future()
        meeting.take(self._name, seat)
        try:
            async with asyncio.timeout(transfer.deadline_seconds):
                return await asyncio.shield(seat)
        except TimeoutError:
            raise NotSent(f"transfer {transfer.transfer} did not end by its deadline") from None
        finally:
            if not seat.done():
                seat.cancel()

    def close(self) -> None:
        """Give up what runs."""
        if self._seat is not None and not self._seat.done():
            self._seat.cancel()
