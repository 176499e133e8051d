"""When exchanges are sent, what is in them, what a reply settles, and how long leases last: pure, with time handed in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.outbox import EXCHANGE_BYTES, FLUSH_BYTES, OrderInbox, Outbox
from segue.ports.rollout import (
    Delta,
    DeltaHead,
    Discarded,
    Drop,
    ExchangeReply,
    Finish,
    Loaded,
    NodeEvent,
    NodeInfo,
    Orders,
    SliceUsed,
)

INFO = NodeInfo(8, 4)


def outbox(now: float = 0.0) -> Outbox:
    """One that has joined: its first exchange was acknowledged at `now`."""
    box = Outbox("rollout-0", 1, INFO, 15.0, now)
    number = box.take(now, 0, {}).number
    box.replied(ExchangeReply(number, [], [], 0.5, 15.0), now)
    return box


def delta(episode: int = 0, seq: int = 0, *, attempt: int = 1, size: int = 100, record: bool = False, sampled: int = 0) -> Delta:
    spans = ((1, sampled),) if sampled else ()
    return Delta(DeltaHead(episode, attempt, seq, seq, spans, record=record), b"x" * size)


def finish(episode: int = 0, seq: int = 1) -> Finish:
    return Finish(episode, 1, seq, "terminated", 1, 1.0, 0, 1.0)


def ack(box: Outbox, now: float, refused: list[tuple[int, int]] | None = None, resend: list[tuple[int, int, int]] | None = None):  # type: ignore[no-untyped-def]
    flight = box.take(now, 0, {})
    return flight, box.replied(ExchangeReply(flight.number, refused or [], resend or [], 0.5, 15.0), now)


def test_the_first_exchange_joins_at_once_and_says_who_it_is() -> None:
    box = Outbox("rollout-0", 3, INFO, 15.0, 100.0)
    assert box.due() <= 100.0 and (box.joined, box.lease_end) == (False, None)
    first = box.take(100.0, 0, {"running": 1.0})
    assert (first.info, first.session, first.number, first.counts) == (INFO, 3, 1, {"running": 1.0})
    box.replied(ExchangeReply(1, [], [], 0.5, 15.0), 100.2)
    assert (box.joined, box.lease_end) == (True, 100.0 + 0.8 * 15.0)
    assert box.take(101.0, 0, {}).info is None


def test_the_first_pending_event_arms_the_timer() -> None:
    box = outbox(0.0)
    assert box.due() == 5.0, "nothing pending: the renewal, a third of the lease after the last exchange"
    box.put(SliceUsed(0, 1), 1.0)
    assert box.due() == 1.5
    box.put(SliceUsed(1, 1), 1.4)
    assert box.due() == 1.5, "later events ride along"
    assert len(box.take(1.5, 0, {}).events) == 2


def test_urgent_events_wait_only_for_the_flush_interval_since_the_last_exchange() -> None:
    box = outbox(0.0)
    box.put(finish(), 0.2, urgent=True)
    assert box.due() == 0.5
    late = outbox(0.0)
    late.put(finish(), 3.0, urgent=True)
    assert late.due() <= 3.0


def test_64_kilobytes_are_as_urgent() -> None:
    box = outbox(0.0)
    while box._bytes < FLUSH_BYTES - 4000:
        box.put(delta(size=1000), 2.0)
    assert box.due() == 2.5
    box.put(delta(size=4000), 2.1)
    assert box.due() <= 2.1


def test_what_an_update_waits_for_goes_at_once() -> None:
    box = outbox(0.0)
    box.put(Loaded(1, 2, 0.0, 0.0, 0.0), 0.1)
    assert box.due() <= 0.1


def test_an_exchange_in_flight_is_repeated_unchanged_and_holds_what_comes_meanwhile() -> None:
    box = outbox(0.0)
    box.put(delta(seq=0), 1.0)
    first = box.take(1.5, 4, {"a": 1.0})
    box.put(delta(seq=1), 2.0, urgent=True)
    assert box.due() <= 1.5, "repeat at once when asked"
    assert box.take(4.5, 9, {"a": 2.0}) is first
    assert box.replied(ExchangeReply(first.number - 1, [], [], 0.5, 15.0), 4.6) is None, "an old reply settles nothing"
    box.replied(ExchangeReply(first.number, [], [], 0.5, 15.0), 4.7)
    second = box.take(4.8, 9, {})
    assert second.number == first.number + 1 and second.events == [delta(seq=1)]


def test_leases_are_timed_from_the_first_sending_of_what_was_acknowledged() -> None:
    box = outbox(0.0)
    flight = box.take(4.0, 0, {})
    box.take(7.0, 0, {})  # again
    box.replied(ExchangeReply(flight.number, [], [], 0.5, 10.0), 7.1)
    assert box.lease_end == 4.0 + 0.8 * 10.0
    assert box.due() == 4.0 + 10.0 / 3, "and renewed soon after a bad stretch"


def test_records_that_were_accepted_are_told() -> None:
    box = outbox()
    box.put(delta(0, 0, record=True), 1.0)
    box.put(delta(0, 1), 1.0)
    box.put(delta(1, 0, record=True), 1.0)
    _, settled = ack(box, 2.0, refused=[(1, 1)])
    assert settled.records == [(0, 1, 0)] and settled.refused == [(1, 1)]


def test_a_refused_attempt_has_nothing_more_to_say() -> None:
    box = outbox()
    box.put(delta(0, 0), 1.0)
    box.take(1.5, 0, {})
    box.put(delta(0, 1, sampled=3), 1.6)
    box.put(delta(0, 0, attempt=2), 1.6)
    box.put(Loaded(1, 2, 0.0, 0.0, 0.0), 1.6)
    ack(box, 2.0, refused=[(0, 1)])
    assert box.take(3.0, 0, {}).events == [delta(0, 0, attempt=2), Loaded(1, 2, 0.0, 0.0, 0.0)]


def test_discarding_counts_the_tokens_that_were_not_accepted() -> None:
    box = outbox()
    box.put(delta(0, 0, sampled=5), 1.0)
    box.put(delta(1, 0, sampled=7), 1.0)
    box.put(Discarded(0, 1), 1.0)
    assert box.sampled() == 12
    assert box.discard((0, 1)) == 5
    assert box.take(2.0, 0, {}).events == [delta(1, 0, sampled=7)] and box.sampled() == 7


def test_a_gap_is_filled_in_front_with_all_that_followed_it() -> None:
    box = outbox()
    for seq in range(3):
        box.put(delta(0, seq), 1.0)
    box.put(finish(0, 3), 1.0)
    box.put(delta(1, 0), 1.0)
    box.take(1.5, 0, {})
    box.put(delta(1, 1), 1.6)
    _, settled = ack(box, 2.0, resend=[(0, 1, 1)])
    assert settled.unfillable == [] and box.due() <= 2.0
    again = box.take(2.0, 0, {})
    assert again.events == [delta(0, 1), delta(0, 2), finish(0, 3), delta(1, 1)]
    box.replied(ExchangeReply(again.number, [], [], 0.5, 15.0), 2.1)
    assert (0, 1) not in box._history and (1, 1) in box._history, "who ended and was heard is forgotten"


def test_a_gap_before_anything_this_attempt_said_cannot_be_filled() -> None:
    box = outbox()
    box.put(delta(0, 5), 1.0)
    _, settled = ack(box, 2.0, resend=[(0, 1, 3)])
    assert settled.unfillable == [(0, 1)]


def test_a_fenced_reply_ends_everything() -> None:
    box = outbox()
    flight = box.take(1.0, 0, {})
    settled = box.replied(ExchangeReply(flight.number, [], [], 0.5, 15.0, fenced=True), 1.1)
    assert settled is not None and settled.fenced and box.lease_end == 12.0


def test_no_exchange_grows_without_bound() -> None:
    box = outbox()
    for seq in range(5):
        box.put(delta(0, seq, size=EXCHANGE_BYTES // 2 - 1000), 1.0)
    sizes = []
    for _ in range(3):
        flight, _ = ack(box, 2.0)
        sizes.append(len(flight.events))
    assert sizes == [2, 2, 1] and not box.unacknowledged


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_event_is_delivered_once_and_in_order(data: st.DataObject) -> None:
    """Against a scheduler that sees every sending, answers some, and keeps what it has seen by number."""
    box = Outbox("rollout-0", 1, INFO, 15.0, 0.0)
    put: list[NodeEvent] = []
    heard: dict[int, list[NodeEvent]] = {}
    now = 0.0
    for n in range(data.draw(st.integers(1, 30))):
        now += data.draw(st.floats(0.0, 2.0))
        if data.draw(st.booleans()):
            event = delta(n % 3, n, size=data.draw(st.integers(0, 40_000)))
            put.append(event)
            box.put(event, now, data.draw(st.booleans()))
        if now >= box.due():
            flight = box.take(now, 0, {})
            heard.setdefault(flight.number, flight.events)
            assert heard[flight.number] == flight.events, "sent again unchanged"
            if data.draw(st.booleans()):
                box.replied(ExchangeReply(flight.number, [], [], 0.5, 15.0), now)
    while box.unacknowledged:
        flight = box.take(now, 0, {})
        heard.setdefault(flight.number, flight.events)
        box.replied(ExchangeReply(flight.number, [], [], 0.5, 15.0), now)
    assert list(heard) == list(range(1, len(heard) + 1))
    assert [e for events in heard.values() for e in events] == put


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=20))
def test_orders_are_carried_out_once_and_in_order(batches: list[tuple[int, int]]) -> None:
    inbox = OrderInbox(7)
    done: list[int] = []
    for first, count in batches:
        orders = [Drop(n, 1, "x") for n in range(first, first + count)]
        fresh = inbox.take(Orders("rollout-0", 7, first, list(orders)))
        done += [order.episode for order in fresh if isinstance(order, Drop)]
        assert inbox.take(Orders("rollout-0", 6, inbox.upto, list(orders))) == []
    assert done == list(range(inbox.upto))
