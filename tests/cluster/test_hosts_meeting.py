"""Head and members over real sockets: tokens, numbers, versions, silence; Ray and roles are not needed for it."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue.cluster.hosts import channel as channels
from segue.cluster.hosts import head as heads
from segue.cluster.hosts.channel import Channel, prove
from segue.cluster.hosts.facts import facts_here
from segue.cluster.hosts.head import Head
from segue.cluster.hosts.member import checked, join, ray_start
from segue.cluster.hosts.messages import Check, Checked, End, HeadSays, Hello, HostFacts, Join, MemberSays, Refused
from segue.errors import RunFailed, UserError

TOKEN = "the words"
SECONDS = 20.0
CHECK = Check({}, "/", (20000, 20999))
FIT = Checked([], "", 99)
ORDER = Join("127.0.0.1:6379", {"A": "b"}, 1 << 27, 5.0, "logs")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def meeting() -> Iterator[Callable[[int], tuple[Head, int]]]:
    heads: list[Head] = []

    def begin(count: int) -> tuple[Head, int]:
        port = free_port()
        heads.append(Head(facts_here(0, "127.0.0.1"), port, count, TOKEN, lambda line: None))
        return heads[-1], port

    yield begin
    for head in heads:
        head.close(0)


def member(port: int, facts: HostFacts, token: str = TOKEN) -> Channel[HeadSays, MemberSays]:
    connection = Client(("127.0.0.1", port), "AF_INET")
    prove(connection, token, first=False)
    channel = Channel(connection, HeadSays, MemberSays, "test")
    channel.send(MemberSays(Hello(facts)))
    return channel


def heard(channel: Channel[HeadSays, MemberSays]) -> object:
    said = channel.inbox.get(timeout=20.0)
    return said.message if said is not None else None


def test_hosts_are_collected_checked_joined_and_told_the_end(meeting: Callable[[int], tuple[Head, int]], tmp_path: Path) -> None:
    head, port = meeting(3)
    mine = facts_here(0, "127.0.0.1")
    two, one = [member(port, msgspec.structs.replace(mine, rank=rank)) for rank in (2, 1)]
    assert [host.rank for host in head.gather(20.0, "embedded")] == [0, 1, 2]
    (tmp_path / "seen").write_text("words")
    check = Check({str(tmp_path / "seen"): "words"}, str(tmp_path), (20000, 20999))

    def answer() -> None:
        for channel in (one, two):
            channel.send(MemberSays(checked(heard_check(channel), "127.0.0.1")))

    answers = threading.Thread(target=answer)
    answers.start()
    head.check(check, {1: 5, 2: 5})
    answers.join()
    order = Join("127.0.0.1:6379", {"A": "b"}, 1 << 27, 5.0, str(tmp_path))
    head.order_join(order)
    assert heard(one) == heard(two) == order
    late = member(port, msgspec.structs.replace(mine, rank=3))
    asked = heard(late)
    assert isinstance(asked, Check) and asked.files == {}, "of what only the start needed nothing is left to be seen"
    late.send(MemberSays(checked(asked, "127.0.0.1")))
    assert heard(late) == order
    blind = member(port, msgspec.structs.replace(mine, rank=4))
    asked = heard(blind)
    assert isinstance(asked, Check)
    blind.send(MemberSays(Checked([], "Permission denied", 99)))
    refused = heard(blind)
    assert isinstance(refused, Refused) and "cannot write" in refused.sentence and refused.sentence.startswith("Host 4")
    head.close(7)
    assert heard(one) == heard(late) == End(7)


def heard_check(channel: Channel[HeadSays, MemberSays]) -> Check:
    message = heard(channel)
    assert isinstance(message, Check)
    return message


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (Checked(["/runs/x"], "", 99), r"Host 1 \(.*\) does not see /runs/x as host 0 does: put the run directory"),
        (Checked([], "Read-only file system", 99), r"Host 1 \(.*\) cannot write / \(Read-only file system\)"),
        (Checked([], "", 2), r"Host 1 \(.*\) has 2 free ports in cluster.ports = \[20000, 20999\] and needs 3"),
    ],
)
def test_a_host_that_will_not_do_is_said(meeting: Callable[[int], tuple[Head, int]], answer: Checked, sentence: str) -> None:
    head, port = meeting(3)
    mine = facts_here(0, "127.0.0.1")
    answers = {1: answer, 2: FIT}
    for rank, says in answers.items():
        channel = member(port, msgspec.structs.replace(mine, rank=rank))
        threading.Thread(target=fit, args=(channel, says), daemon=True).start()
    head.gather(SECONDS, "embedded")
    with pytest.raises(UserError, match=sentence):
        head.check(CHECK, {1: 3, 2: 1})


def test_a_host_that_is_silent_when_it_is_asked_is_named(
    meeting: Callable[[int], tuple[Head, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, port = meeting(2)
    member(port, msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1))
    head.gather(SECONDS, "embedded")
    monkeypatch.setattr(heads, "CHECK_SECONDS", 0.05)
    with pytest.raises(RunFailed, match=r"Host 1 \(.*\) did not answer within 0.05 s\.$"):
        head.check(CHECK, {})


def test_a_host_that_leaves_before_it_answers_is_not_said_to_be_slow(meeting: Callable[[int], tuple[Head, int]]) -> None:
    head, port = meeting(2)
    channel = member(port, msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1))
    head.gather(SECONDS, "embedded")

    def leave() -> None:
        heard_check(channel)
        channel.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(RunFailed, match=r"^Host 1 \(.*\) was gone before it answered \(the connection ended\): see what it pr"):
        head.check(CHECK, {})
    leaving.join()


def test_a_host_that_was_lost_again_is_not_there(meeting: Callable[[int], tuple[Head, int]]) -> None:
    """It is waited for, because it may be started again."""
    head, port = meeting(3)
    one, two = (msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=rank) for rank in (1, 2))
    lost = member(port, one)
    while 1 not in head._members:
        assert not lost.over
    lost.close()
    while not head._members[1].channel.over:
        pass
    there = member(port, two)
    while 2 not in head._members:
        assert not there.over
    with pytest.raises(RunFailed, match="Host 1 of 3 did not appear"):
        head.gather(0.5, "embedded")


def test_who_has_not_come_is_named(meeting: Callable[[int], tuple[Head, int]]) -> None:
    head, port = meeting(3)
    member(port, msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1))
    with pytest.raises(RunFailed, match=r"Host 2 of 3 did not appear at 127.0.0.1:\d+ within cluster.join_seconds = 0.5"):
        head.gather(0.5, "embedded")


def test_another_version_is_refused(meeting: Callable[[int], tuple[Head, int]]) -> None:
    head, port = meeting(2)
    member(port, msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1, ray="1.0"))
    with pytest.raises(UserError, match=r"Host 1 \(.*\) has ray 1.0, and host 0"):
        head.gather(20.0, "embedded")


def test_a_number_is_given_once(meeting: Callable[[int], tuple[Head, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "BEAT_SECONDS", 0.02)  # who has it is asked for a sign of life
    head, port = meeting(2)
    facts = msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1)
    first = member(port, facts)
    head.gather(SECONDS, "embedded")
    message = heard(member(port, facts))
    assert isinstance(message, Refused) and "NODE_RANK=1 is taken" in message.sentence
    assert not first.over


def fit(channel: Channel[HeadSays, MemberSays], answer: Checked = FIT) -> None:
    """Answer a check: all is well here, or so."""
    heard_check(channel)
    channel.send(MemberSays(answer))


def begun(head: Head, first: Channel[HeadSays, MemberSays]) -> None:
    """The only other host passes the check and is told to join."""
    answering = threading.Thread(target=fit, args=(first,))
    answering.start()
    head.check(CHECK, {})
    answering.join()
    head.order_join(ORDER)
    assert heard(first) == ORDER


def test_a_host_that_was_cut_off_takes_its_number_again(
    meeting: Callable[[int], tuple[Head, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls anew; its old connection is silent and not over, because nobody was there to end it."""
    monkeypatch.setattr(channels, "BEAT_SECONDS", 60.0)
    monkeypatch.setattr(heads, "LIFE_SECONDS", 0.05)
    head, port = meeting(2)
    facts = msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1)
    old = member(port, facts)
    head.gather(20.0, "embedded")
    begun(head, old)
    new = member(port, facts)
    fit(new)
    assert heard(new) == ORDER
    assert heard(old) is None, "nobody speaks to it any more"
    head.close(3)
    assert heard(new) == End(3)


def test_a_host_that_comes_after_the_others_is_compared_and_checked_though_nothing_runs_yet(
    meeting: Callable[[int], tuple[Head, int]],
) -> None:
    head, port = meeting(2)
    mine = facts_here(0, "127.0.0.1")
    planned = member(port, msgspec.structs.replace(mine, rank=1))
    head.gather(20.0, "embedded")
    other = heard(member(port, msgspec.structs.replace(mine, rank=2, torch="1.0")))
    assert isinstance(other, Refused) and "has torch 1.0, and host 0" in other.sentence
    late = member(port, msgspec.structs.replace(mine, rank=3))
    while 3 not in head._members:
        assert late.inbox.empty(), "nothing runs that it could join"
    begun(head, planned)  # which does not wait for the late one
    fit(late)
    assert heard(late) == ORDER


class Full(Listener):
    """`accept` fails `FAILURES` times, as where too many files are open."""

    FAILURES = 3

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tried = queue.Queue[int]()

    def accept(self) -> Connection:
        self.tried.put(self.tried.qsize())
        if self.tried.qsize() <= self.FAILURES:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_where_nobody_can_be_let_in_it_is_said_once_and_tried_again(
    meeting: Callable[[int], tuple[Head, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heads, "Listener", Full)
    monkeypatch.setattr(heads, "ACCEPT_AGAIN_SECONDS", 0.01)
    head, port = meeting(2)
    member(port, msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1))
    assert len(head.gather(20.0, "embedded")) == 2
    assert [record.message for record in caplog.records] == [
        "no host can be let in ([Errno 24] Too many open files); trying again every 0.01 s"
    ]


def test_where_nobody_can_be_let_in_the_end_is_not_waited_for(
    meeting: Callable[[int], tuple[Head, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "Listener", Full)
    monkeypatch.setattr(heads, "ACCEPT_AGAIN_SECONDS", 600.0)
    before = set(threading.enumerate())
    head, _ = meeting(2)
    (accepting,) = set(threading.enumerate()) - before
    listener = head._listener
    assert isinstance(listener, Full)
    while listener.tried.empty():
        assert accepting.is_alive()
    head.close(0)
    accepting.join(SECONDS)
    assert not accepting.is_alive() and listener.tried.qsize() == 1


def test_a_wrong_token_is_said_on_both_sides(meeting: Callable[[int], tuple[Head, int]]) -> None:
    head, port = meeting(2)
    with pytest.raises(UserError, match=r"has another token: set SEGUE_TOKEN to the same words"):
        join("127.0.0.1", port, 1, "127.0.0.1", "other words", 5.0)
    with pytest.raises(RunFailed, match=r"refused: one with another token"):
        head.gather(0.3, "embedded")


def test_nobody_there_and_a_stranger_there() -> None:
    with pytest.raises(RunFailed, match=r"Nobody answers at 127.0.0.1:\d+ after 0.1 s"):
        join("127.0.0.1", free_port(), 1, "127.0.0.1", TOKEN, 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(RunFailed, match=r"is no Segue run: correct HEAD_ADDR"):
            join("127.0.0.1", server.getsockname()[1], 1, "127.0.0.1", TOKEN, 5.0)


def in_time(call: Callable[[], object]) -> None:
    """Where `call` waits for ever, the test fails and goes on; what it raises is raised."""
    done: Future[object] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    done.result(SECONDS)


def test_what_answers_and_says_nothing_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "PROOF_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(RunFailed, match=r"is no Segue run: correct HEAD_ADDR"):
        in_time(lambda: join("127.0.0.1", server.getsockname()[1], 1, "127.0.0.1", TOKEN, 5.0))


def test_an_address_that_swallows_what_is_sent_to_it_is_not_waited_for_longer_than_told() -> None:
    """A listener whose queue is full answers nobody."""
    with socket.socket() as server, socket.socket() as one, socket.socket() as two:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for waiting in (one, two):
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        with pytest.raises(RunFailed, match=r"Nobody answers at 127.0.0.1:\d+ after 0.1 s \(timed out\)"):
            in_time(lambda: join("127.0.0.1", server.getsockname()[1], 1, "127.0.0.1", TOKEN, 0.1))


def test_who_says_nothing_to_the_head_is_left(
    meeting: Callable[[int], tuple[Head, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "PROOF_SECONDS", 0.05)
    _, port = meeting(2)
    with socket.create_connection(("127.0.0.1", port), SECONDS) as silent:
        while silent.recv(1024):
            pass


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UserError, match="set HEAD_PORT to another one"):
        Head(facts_here(0, "127.0.0.1"), server.getsockname()[1], 2, TOKEN, lambda line: None)


def test_silence_ends_a_connection(meeting: Callable[[int], tuple[Head, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that was cut off for good sends nothing, not even the end of the connection."""
    monkeypatch.setattr(channels, "SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(channels, "BEAT_SECONDS", 60.0)
    _, port = meeting(2)
    channel = member(port, msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1))
    assert heard(channel) is None
    assert channel.why in ("nothing came for 0.05 s", "the connection ended"), "whichever end is the first to give up"


def test_who_hears_the_last_word_takes_leave_at_once(
    meeting: Callable[[int], tuple[Head, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head waits for it, and not for what a host has yet to end."""
    for module in (channels, heads):
        monkeypatch.setattr(module, "FAREWELL_SECONDS", 600.0)
    head, port = meeting(2)
    channel = member(port, msgspec.structs.replace(facts_here(0, "127.0.0.1"), rank=1))
    head.gather(SECONDS, "embedded")
    in_time(lambda: head.close(3))
    assert heard(channel) == End(3)


def test_what_a_host_sees(tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("words\n")
    (tmp_path / "model").mkdir()
    files = {"seen": "words", "model": "", "gone": "words"}
    files = {str(tmp_path / name): words for name, words in files.items()}
    found = checked(Check(files, str(tmp_path), (20000, 20009)), "127.0.0.1")
    assert found.missing == [str(tmp_path / "gone")]
    assert found.unwritable == ""
    assert 0 < found.free_ports <= 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "seen"], "nothing is left behind"
    assert "No such file" in checked(Check({}, str(tmp_path / "none"), (20000, 20009)), "127.0.0.1").unwritable
    assert isinstance(found, Checked)


def test_rays_command_names_the_host(tmp_path: Path) -> None:
    command = ray_start(Join("10.0.0.1:6379", {}, 1 << 27, 5.0, ""), 3, "10.0.0.4", tmp_path, gpus=2)
    line = " ".join(command)
    assert "--address 10.0.0.1:6379 --node-ip-address 10.0.0.4" in line
    assert '--num-gpus 2 --resources {"segue_host_3": 1}' in line


def test_where_there_will_be_no_run_all_who_are_there_or_come_are_told(meeting: Callable[[int], tuple[Head, int]]) -> None:
    head, port = meeting(3)
    mine = facts_here(0, "127.0.0.1")
    early = member(port, msgspec.structs.replace(mine, rank=1))
    turned = threading.Thread(target=head.turn_away, args=("No run today.", 20.0))
    turned.start()
    assert heard(early) == Refused("No run today.")
    late = member(port, msgspec.structs.replace(mine, rank=2))
    assert heard(late) == Refused("No run today.")
    turned.join(20.0)
    assert not turned.is_alive(), "all have heard it: it does not wait for anybody else"
