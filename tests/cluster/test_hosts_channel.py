"""One end of a connection between hosts, with the bare socket at the other: what was sent arrives, also at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener

import pytest

from segue import wire
from segue.cluster.hosts import channel as channels
from segue.cluster.hosts.channel import Channel
from segue.cluster.hosts.messages import Beat, Checked, End, HeadSays, MemberSays

SECONDS = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel[MemberSays, HeadSays], Connection]]:
    """A head's end of a connection, and the bare other one."""
    with Listener(("127.0.0.1", 0), "AF_INET") as listener, Client(listener.address, "AF_INET") as bare:
        channel = Channel(listener.accept(), MemberSays, HeadSays, "test")
        yield channel, bare
        channel.close()


def test_the_last_word_is_not_lost_to_beats_that_come_after_it(
    ends: tuple[Channel[MemberSays, HeadSays], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end that was closed before them would answer the first with a reset, on which the second fails."""
    monkeypatch.setattr(channels, "FAREWELL_SECONDS", SECONDS)
    channel, bare = ends
    channel.send(HeadSays(End(3)))
    closing = threading.Thread(target=channel.close)
    closing.start()
    assert wire.decode(bare.recv_bytes(), HeadSays).message == End(3)
    with pytest.raises(EOFError):
        bare.recv_bytes()
    for _ in range(3):
        bare.send_bytes(wire.encode(MemberSays(Beat())))
    bare.close()
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_who_shows_life_is_waited_for_though_it_hears_late(
    ends: tuple[Channel[MemberSays, HeadSays], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a cut what was said last may come a minute late, while the other end's beats come at once."""
    monkeypatch.setattr(channels, "FAREWELL_SECONDS", 0.05)
    channel, bare = ends
    bare.send_bytes(wire.encode(MemberSays(Beat())))
    channel.send(HeadSays(End(3)))
    closing = threading.Thread(target=channel.close)
    closing.start()
    for _ in range(10):
        closing.join(0.05)
        bare.send_bytes(wire.encode(MemberSays(Beat())))
    assert closing.is_alive(), "it did not wait for one that beats"
    assert wire.decode(bare.recv_bytes(), HeadSays).message == End(3)
    bare.close()
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_who_shows_no_life_is_not_waited_for(
    ends: tuple[Channel[MemberSays, HeadSays], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "FAREWELL_SECONDS", 0.05)
    monkeypatch.setattr(channels, "LIFE_SECONDS", 0.2)
    channel, bare = ends
    bare.send_bytes(wire.encode(MemberSays(Beat())))
    closing = threading.Thread(target=channel.close)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_what_arrived_is_heard_though_nothing_can_be_sent_any_more(
    ends: tuple[Channel[MemberSays, HeadSays], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, bare = ends

    def broken(message: bytes) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(channel._connection, "send_bytes", broken)
    channel.send(HeadSays(End(3)))
    assert channel.over
    last = MemberSays(Checked([], "", 7))
    for message in (MemberSays(Beat()), last):
        bare.send_bytes(wire.encode(message))
    bare.close()
    assert [channel.inbox.get(timeout=SECONDS) for _ in range(2)] == [last, None]
