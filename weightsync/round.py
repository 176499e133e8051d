"""What the sender knows about the members of one transfer, and about the other sources. Pure: reports in; who is missing, and why
it failed, out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.messages import Fault, Report, Stage

_MISSING = (Fault.REFUSED, Fault.OWN)
"""Faults of the member itself: sending again to it would fail again. LOST and ABANDONED members are fit for another transfer."""


class Round:
    """The reports of one transfer. `sources` are those beside the sender; they report like members, and are named like them.

    `silent(stage)` are the members that have said nothing about `stage`; `troubled` is True once any member reported a fault, or
    `broke` was called. Written by the thread that runs the transfer, read by any.
    """

    def __init__(self, members: Sequence[str], sources: Sequence[str] = ()) -> None:
        everybody = [*members, *sources]
        assert len(set(everybody)) == len(everybody), everybody
        self.members = everybody
        self._sources = list(sources)
        self._reports: dict[Stage, dict[str, Report]] = {stage: {} for stage in Stage}
        self._faults: dict[str, Report] = {}
        self._broken = ""
        self._damaged: list[tuple[str, int]] = []
        self._silence: dict[str, str] = {}

    def hear(self, report: Report) -> None:
        """A member's report. Members that are not of this round, and repetitions, change nothing."""
        if report.member not in self.members:
            return
        if report.fault is not Fault.NONE:
            self._faults.setdefault(report.member, report)
        else:
            self._reports[report.stage].setdefault(report.member, report)

    def broke(self, reason: str) -> None:
        """The sender's own end failed; the first reason counts."""
        self._broken = self._broken or reason

    @property
    def troubled(self) -> bool:
        return bool(self._faults or self._broken)

    def silent(self, stage: Stage) -> list[str]:
        """Members that have neither reported at `stage` nor failed, in rank order."""
        return [name for name in self.members if name not in self._reports[stage] and name not in self._faults]

    @property
    def all_hold_group(self) -> bool:
        """Everybody acknowledged and still has the process group."""
        ready = self._reports[Stage.READY]
        return all(name in ready and ready[name].holds_group for name in self.members)

    def sent_by(self, source: str) -> list[int]:
        """Checksums of what a source sent, once it reported."""
        return self._reports[Stage.RECEIVED][source].checksums

    def compare(self, checksums: Sequence[int]) -> None:
        """Compare what the members received with what was sent."""
        for name, report in self._reports[Stage.RECEIVED].items():
            if name in self._sources:
                continue
            wrong = [bucket for bucket, value in enumerate(checksums) if [value] != report.checksums[bucket : bucket + 1]]
            self._damaged += [(name, bucket) for bucket in wrong]

    def waited_out(self, clauses: Mapping[str, str]) -> None:
        """The wait for these members ended: they are missing. `clauses` says of each what it did not do."""
        self._silence = dict(clauses)

    @property
    def ok(self) -> bool:
        """Everybody has everything."""
        return not (self.troubled or self._silence or self._damaged or self.silent(Stage.RECEIVED))

    def missing(self) -> list[str]:
        """Members that a repetition had better leave out: silent ones, and those with a fault of their own."""
        unfit = {name for name, report in self._faults.items() if report.fault in _MISSING}
        return [name for name in self.members if name in unfit or name in self._silence]

    def reason(self) -> str:
        """Why the transfer failed, one clause per cause; consequences only where no cause is known."""
        parts = [f"{name} {_says(report)}" for name, report in self._faults.items() if report.fault in _MISSING]
        parts += [f"{name} {clause}" for name, clause in self._silence.items()]
        parts += [f"bucket {bucket} arrived damaged at {name} (its checksum differs)" for name, bucket in self._damaged[:3]]
        parts += [f"{name} {_says(report)}" for name, report in self._faults.items() if report.fault is Fault.ABANDONED]
        if not parts and self._broken:
            parts.append(self._broken)
        if not parts:
            parts += [f"{name} {_says(report)}" for name, report in self._faults.items()]
        refused = any(report.fault is Fault.REFUSED for report in self._faults.values())
        return "; ".join(parts) + (_ONE_MODEL if refused else "")


_ONE_MODEL = ": start learner and nodes from one model folder"


def _says(report: Report) -> str:
    return {
        Fault.REFUSED: f"refused the manifest: {report.sentence}",
        Fault.LOST: f"lost the group: {report.sentence}",
        Fault.ABANDONED: f"gave the transfer up: {report.sentence}",
        Fault.OWN: f"failed: {report.sentence}",
    }[report.fault]
