"""Which transfers are still worth taking part in: ids only grow, so a stale order is refused without touching the network."""

from __future__ import annotations

from segue.ports.transfer import Transfer, TransferResult
from segue.ports.weights import TransferFailed


class SenderTurns:
    """The newest transfer each member was in. A transfer must be newer than all that its members were in; members of different
    transfers may be disjoint, so transfers may overlap in time."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self.closed = False

    def begin(self, transfer: Transfer) -> TransferResult | None:
        """None and the transfer counts; or the result that refuses it."""
        why = self._objection(transfer)
        if why:
            return _refused(transfer, why)
        self._newest.update(dict.fromkeys(transfer.members, transfer.transfer))
        return None

    def _objection(self, transfer: Transfer) -> str:
        if self.closed:
            return "the sender is closed"
        if not transfer.members or len(set(transfer.members)) != len(transfer.members):
            return f"its members {transfer.members} are none, or one is named twice"
        newest = max(self._newest.get(name, -1) for name in transfer.members)
        return f"it is stale, its members have been in transfer {newest}" if newest >= transfer.transfer else ""


class ReceiverTurns:
    """The newest transfer this member was in."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._newest = -1
        self.closed = False

    def begin(self, transfer: Transfer, rank: int) -> None:
        """The transfer counts from now on. Raises `TransferFailed` if it is stale or `rank` is not this member's."""
        why = ""
        if self.closed:
            why = "the receiver is closed"
        elif transfer.transfer <= self._newest:
            why = f"the transfer is stale, transfer {self._newest} has been seen"
        elif not 1 <= rank <= len(transfer.members) or transfer.members[rank - 1] != self._member:
            why = f"it was told to be rank {rank}, and the members from rank 1 on are {', '.join(transfer.members)}"
        if why:
            raise TransferFailed(failure_sentence(transfer, self._member, why))
        self._newest = transfer.transfer


def failure_sentence(transfer: Transfer, member: str, why: str) -> str:
    """What a receiver says about a transfer that failed at its end."""
    return f"{member} did not receive version {transfer.version} (step {transfer.step}, transfer {transfer.transfer}): {why}"


def _refused(transfer: Transfer, why: str) -> TransferResult:
    return TransferResult(
        version=transfer.version,
        transfer=transfer.transfer,
        ok=False,
        missing=[],
        reason=f"transfer {transfer.transfer} of version {transfer.version} was refused: {why}",
        bytes=0,
        gather_seconds=0.0,
        transfer_seconds=0.0,
    )
