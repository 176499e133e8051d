"""Calls between roles: requests and replies are routed, errors travel as values, nothing else comes out."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue import wire
from segue.errors import UserError, WireError
from segue.ports.journal import MemoryJournal, Record
from segue.ports.learner import COMMITTED, PUBLISH, Committed, Publish, PublishReply
from segue.ports.rpc import Done, Failure, PeerLost, PeerTimeout, RemoteError, Rpc, Service, ask

ASK_FAILURE = Rpc("ask_failure", Done, Failure)


class Near:
    """An in-process peer of a service, that can also be dead, slow or damaged."""

    name = "near"

    def __init__(self, service: Service) -> None:
        self._service = service
        self.trouble: Exception | None = None
        self.reply: bytes | None = None
        self.timeouts: list[float] = []

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        self.timeouts.append(timeout)
        if self.trouble is not None:
            raise self.trouble
        return await self._service.handle(method, body) if self.reply is None else self.reply


def service(answer: Exception | PublishReply) -> tuple[Service, list[tuple[str, Exception]]]:
    errors: list[tuple[str, Exception]] = []
    made = Service(lambda method, error: errors.append((method, error)))

    async def publish(request: Publish) -> PublishReply:
        assert request.step == 3
        if isinstance(answer, Exception):
            raise answer
        return answer

    made.add(PUBLISH, publish)
    return made, errors


REQUEST = Publish(3, "host:1")


async def test_a_call_gets_its_reply() -> None:
    made, errors = service(PublishReply(7))
    peer = Near(made)
    assert await ask(peer, PUBLISH, REQUEST, timeout=2.5) == PublishReply(7)
    assert peer.timeouts == [2.5] and errors == []


@pytest.mark.parametrize(
    ("error", "fault", "name", "text"),
    [
        (UserError("No port is free: free one."), "user", "UserError", "No port is free: free one."),
        (wire.CorruptMessage("bad delta"), "wire", "CorruptMessage", "bad delta"),
        (ValueError("step 4 twice"), "internal", "ValueError", "step 4 twice"),
        (KeyError("x"), "internal", "KeyError", "'x'"),
    ],
)
async def test_an_error_of_the_far_side_comes_out_as_one(error: Exception, fault: str, name: str, text: str) -> None:
    made, errors = service(error)
    with pytest.raises(RemoteError) as caught:
        await ask(Near(made), PUBLISH, REQUEST, timeout=1.0)
    assert (caught.value.fault, caught.value.error, caught.value.sentence) == (fault, name, text)
    assert str(caught.value) == f"{name}: {text}"
    assert errors == [("publish", error)]


async def test_a_call_that_nobody_handles_is_an_answer() -> None:
    made, errors = service(PublishReply(7))
    with pytest.raises(RemoteError, match="WireError: no such call: committed"):
        await ask(Near(made), COMMITTED, Committed(1), timeout=1.0)
    assert [method for method, _ in errors] == ["committed"]


@given(st.binary(max_size=64))
def test_bytes_that_are_no_request_are_answered_and_not_raised(body: bytes) -> None:
    made, _ = service(PublishReply(7))
    failure = wire.decode(asyncio.run(made.handle("publish", body)), Failure)
    assert failure.fault == "wire"


async def test_a_reply_of_the_wrong_kind_says_what_was_expected() -> None:
    made, _ = service(PublishReply(7))
    peer = Near(made)
    peer.reply = wire.encode(Committed(1))
    with pytest.raises(wire.UnknownMessage, match="expected a PublishReply and got a 'Committed'"):
        await ask(peer, PUBLISH, REQUEST, timeout=1.0)
    peer.reply = peer.reply[:-1]
    with pytest.raises(WireError):
        await ask(peer, PUBLISH, REQUEST, timeout=1.0)


async def test_a_failure_may_be_a_reply() -> None:
    made = Service()

    async def answer(_: Done) -> Failure:
        return Failure("user", "A", "b")

    made.add(ASK_FAILURE, answer)
    assert await ask(Near(made), ASK_FAILURE, Done(), timeout=1.0) == Failure("user", "A", "b")


@pytest.mark.parametrize("trouble", [PeerLost("gone"), PeerTimeout("late")])
async def test_the_transports_troubles_pass_through(trouble: Exception) -> None:
    made, _ = service(PublishReply(7))
    peer = Near(made)
    peer.trouble = trouble
    with pytest.raises(type(trouble)):
        await ask(peer, PUBLISH, REQUEST, timeout=1.0)


async def test_cancellation_is_no_answer() -> None:
    made = Service()
    entered = asyncio.Event()

    async def hang(_: Publish) -> PublishReply:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    made.add(PUBLISH, hang)
    call = asyncio.create_task(made.handle("publish", wire.encode(REQUEST)))
    await entered.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_a_call_has_one_handler() -> None:
    made, _ = service(PublishReply(7))

    async def other(_: Publish) -> PublishReply:
        return PublishReply(8)

    with pytest.raises(AssertionError, match="publish"):
        made.add(PUBLISH, other)


@pytest.mark.parametrize("keep", [0, 1, 5])
async def test_the_memory_journal_counts_all_and_keeps_the_newest(keep: int) -> None:
    journal = MemoryJournal(keep)
    records = [Record(float(n), "exchange", bytes([n])) for n in range(40)]
    for start in range(0, 40, 3):
        await journal.append(records[start : start + 3])
        kept = len(journal.records)
        assert kept <= 2 * keep and journal.records == records[journal.appended - kept : journal.appended]
        assert kept >= min(keep, journal.appended)
    assert journal.appended == 40
    await journal.close()
    assert journal.records == []


async def test_the_memory_journal_is_bounded_in_bytes() -> None:
    journal = MemoryJournal(keep=100, keep_bytes=1000)
    for n in range(50):
        await journal.append([Record(float(n), "exchange", b"x" * 90)] * (1 + n % 3))
        assert sum(len(record.body) for record in journal.records) <= 1000
        assert len(journal.records) == min(journal.appended, 11)
    await journal.append([Record(50.0, "exchange", b"x" * 2000)])
    assert journal.records == [] and journal.appended == sum(1 + n % 3 for n in range(50)) + 1
