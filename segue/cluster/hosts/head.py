"""The first host's side: it collects the others, compares them, tells them to join Ray, and tells them when all is over.

consumes       connections of members (`segue.cluster.hosts.member`), their facts, checks and departures
produces       checks, orders to join, the end; lines for the console about who came and went
waits for      all hosts, at most until the deadline given to `gather`; answers to a check, `CHECK_SECONDS`
unblocked by   the members; the deadline, whose sentence names who is missing
on cancel      `close`: every connection ends, and with it the members

It lives in the supervisor's process and uses threads: the supervisor waits for it before its loop begins.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener

import msgspec

from segue.cluster.hosts.channel import FAREWELL_SECONDS, LIFE_SECONDS, AuthenticationError, Channel, prove
from segue.cluster.hosts.facts import differences
from segue.cluster.hosts.messages import (
    SILENCE_SECONDS,
    Check,
    Checked,
    End,
    HeadSays,
    Hello,
    HostFacts,
    Join,
    Left,
    MemberSays,
    Refused,
)
from segue.errors import RunFailed, UserError

CHECK_SECONDS = 60.0
ACCEPT_AGAIN_SECONDS = 1.0
"""After an `accept` that failed: what it lacks, say files that may be open, does not come back sooner."""

log = logging.getLogger(__name__)

_Channel = Channel[MemberSays, HeadSays]


class _Member:
    """A host that has said who it is. `late`: after the hosts of the run were gathered; it never ends the run."""

    def __init__(self, facts: HostFacts, channel: _Channel) -> None:
        self.facts = facts
        self.channel = channel
        self.checked: Checked | None = None
        self.late = False

    def say(self, message: Check | Join | Refused | End) -> None:
        self.channel.send(HeadSays(message))


class Head:
    """See the module. `mine` is this host, number 0; `count` is how many hosts the run was started on, this one included."""

    def __init__(self, mine: HostFacts, port: int, count: int, token: str, say: Callable[[str], None]) -> None:
        self._mine = mine
        self._count = count
        self._token = token
        self._say = say
        self._members: dict[int, _Member] = {}
        self._strangers: list[str] = []
        self._engine = ""
        self._gathered = False
        self._refusal = ""
        self._check: Check | None = None
        self._join: Join | None = None
        self._changed = threading.Condition()
        self._closing = False
        try:
            self._listener = Listener((mine.address, port), "AF_INET6" if ":" in mine.address else "AF_INET", backlog=64)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(
                    f"HEAD_ADDR = {mine.address} is no address of this host, which has NODE_RANK=0: correct HEAD_ADDR on all "
                    "hosts, or start NODE_RANK=0 there."
                ) from None
            raise UserError(
                f"Port {port} of {mine.address} cannot be listened on for the other hosts ({error.strerror}): "
                "stop what uses it, or set HEAD_PORT to another one on all hosts."
            ) from None
        threading.Thread(target=self._accept, name="hosts", daemon=True).start()

    # --- before anything starts -----------------------------------------------------------------------------------------

    def gather(self, seconds: float, engine: str) -> list[HostFacts]:
        """All hosts of the run in order, once they are there and fit together.

        Raises `RunFailed` naming who has not come, `UserError` for the first thing in which they differ.
        """
        self._engine = engine
        if self._count > 1:
            self._say(f"waiting for {self._count - 1} more of {self._count} hosts at {self._mine.address}:{self._port}")
        with self._changed:
            self._changed.wait_for(lambda: len(self._here()) >= self._count - 1, seconds)
            self._gathered = True
            hosts = [self._mine, *(member.facts for _, member in sorted(self._here().items()))]
        if len(hosts) < self._count:
            raise RunFailed("start", self._who_is_missing(hosts, seconds))
        if sentence := differences(hosts, engine):
            raise UserError(sentence)
        return hosts

    def check(self, check: Check, needed_ports: dict[int, int]) -> None:
        """Have every member look at the shared files and its ports. Raises `UserError` for the first that will not do."""
        with self._changed:
            self._check = check
            members = sorted((rank, member) for rank, member in self._members.items() if not member.late)
        for _, member in members:
            member.say(check)
        with self._changed:
            self._changed.wait_for(lambda: all(m.checked is not None or m.channel.over for _, m in members), CHECK_SECONDS)
        for rank, member in members:
            who = f"Host {rank} ({member.facts.name})"
            if member.checked is None and member.channel.over:
                raise RunFailed("start", f"{who} was gone before it answered ({member.channel.why}): see what it printed.")
            if member.checked is None:
                raise RunFailed("start", f"{who} did not answer within {CHECK_SECONDS:g} s.")
            if sentence := unfit(who, check, member.checked, needed_ports.get(rank, 1)):
                raise UserError(sentence)

    def _here(self) -> dict[int, _Member]:
        """Under the lock: a host that was lost and is started again takes its number."""
        return {rank: member for rank, member in self._members.items() if not member.channel.over}

    def _who_is_missing(self, hosts: list[HostFacts], seconds: float) -> str:
        missing = sorted(set(range(self._count)) - {host.rank for host in hosts})
        names = ", ".join(map(str, missing))
        strangers = f" (refused: {'; '.join(sorted(set(self._strangers)))})" if self._strangers else ""
        return (
            f"Host {names} of {self._count} did not appear at {self._mine.address}:{self._port} within cluster.join_seconds = "
            f"{seconds:g}{strangers}: start launch.sh there with NODE_RANK={missing[0]} and HEAD_ADDR={self._mine.address}."
        )

    @property
    def _port(self) -> int:
        address = self._listener.address
        assert isinstance(address, tuple)
        return int(address[1])

    # --- while it runs --------------------------------------------------------------------------------------------------

    def order_join(self, join: Join) -> None:
        """Ray runs: all members join it, and so does whoever comes later."""
        with self._changed:
            self._join = join
            members = list(self._members.values())
        for member in members:
            if member.late:
                self._ask_late(member)
            else:
                member.say(join)

    def turn_away(self, sentence: str, seconds: float) -> None:
        """There will be no run: say so to every host that is here or comes within `seconds`, and end."""
        with self._changed:
            self._refusal = sentence
            for member in self._members.values():
                member.say(Refused(sentence))
            self._changed.wait_for(lambda: len(self._members) >= self._count - 1, seconds)
        self.close(2)

    def close(self, code: int) -> None:
        """Tell all members that the run is over, and with which exit code; they have `FAREWELL_SECONDS` to hear it, and those
        that show life `SILENCE_SECONDS`, all together."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            members = list(self._members.values())
        for member in members:
            member.say(End(code))
            member.channel.farewell()
        began = time.monotonic()
        for member in members:
            spent = time.monotonic() - began
            member.channel.close(seconds=max(0.0, FAREWELL_SECONDS - spent), patience=max(0.0, SILENCE_SECONDS - spent))
        with contextlib.suppress(OSError):
            self._listener.close()

    # --- threads --------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        failed = False
        while True:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError) as error:
                if not (failed or self._closing):
                    log.warning("no host can be let in (%s); trying again every %g s", error, ACCEPT_AGAIN_SECONDS)
                failed = True
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, ACCEPT_AGAIN_SECONDS):
                        return
                continue
            failed = False
            threading.Thread(target=self._meet, args=(connection,), name="host", daemon=True).start()

    def _meet(self, connection: Connection) -> None:
        """One connection, from its proof to its end."""
        try:
            prove(connection, self._token, first=True)
        except (AuthenticationError, EOFError, OSError) as error:
            if isinstance(error, AuthenticationError):
                self._strangers.append("one with another token")
            with contextlib.suppress(OSError):
                connection.close()
            return
        channel: _Channel = Channel(connection, MemberSays, HeadSays, "member")
        try:
            said = channel.inbox.get(timeout=CHECK_SECONDS)
        except queue.Empty:
            said = None
        if said is None or not isinstance(said.message, Hello):
            self._strangers.append(channel.why or "one that does not say who it is")
            channel.close()
            return
        member = _Member(said.message.facts, channel)
        if sentence := self._take_in(member):
            self._strangers.append(sentence)
            member.say(Refused(sentence))
            channel.close()
            return
        self._serve(member)

    def _take_in(self, member: _Member) -> str:
        """Make it one of ours; or say why not.

        A host that was cut off and has called anew finds its number taken by a connection that nobody has ended yet. Who has it
        keeps it if it still speaks.
        """
        facts = member.facts
        taken = f"NODE_RANK={facts.rank} is taken, and {facts.name} says so too: give every host a number of its own."
        if facts.rank == 0:
            return taken
        while True:
            with self._changed:
                if not self._gathered and facts.rank >= self._count:
                    return (
                        f"NODE_RANK={facts.rank} ({facts.name}), and the run has the hosts 0 to {self._count - 1}: correct it, "
                        "or NUM_NODES on all hosts; a host more may come once the run goes on."
                    )
                before = self._members.get(facts.rank)
                if before is None or before.channel.over:
                    return self._enter(member)
            if before.channel.speaks(LIFE_SECONDS):
                return taken
            before.channel.close(f"it said nothing for {LIFE_SECONDS:g} s, and {facts.name} has come in its place")

    def _enter(self, member: _Member) -> str:
        """Under the lock: the number is free. Why it is refused, or ""."""
        facts = member.facts
        member.late = self._gathered
        if member.late and (sentence := differences([self._mine, facts], self._engine)):
            return sentence
        self._members[facts.rank] = member
        if self._refusal:
            member.say(Refused(self._refusal))
        self._changed.notify_all()
        if self._join is not None:
            self._ask_late(member)
        return ""

    def _ask_late(self, member: _Member) -> None:
        """It may join when it has seen what it must; what only the start's check needed is gone."""
        check = self._check
        assert check is not None
        self._say(f"host {member.facts.rank} ({member.facts.name}) has come")
        member.say(msgspec.structs.replace(check, files={path: words for path, words in check.files.items() if not words}))

    def _serve(self, member: _Member) -> None:
        who = f"host {member.facts.rank} ({member.facts.name})"
        while (said := member.channel.inbox.get()) is not None:
            match said.message:
                case Checked() as checked:
                    with self._changed:
                        member.checked = checked
                        check, join = self._check, self._join
                        self._changed.notify_all()
                    if member.late and check is not None and join is not None:
                        sentence = unfit(who.capitalize(), check, checked, 1)
                        member.say(Refused(sentence) if sentence else join)
                case Left(why, for_good):
                    self._say(f"{who} {'leaves' if for_good else 'lost its Ray and joins again'}: {why}")
                case _:
                    log.warning("%s says what is not for the head: %s", who, said.message)
        if not self._closing:
            self._say(f"{who} is gone: {member.channel.why}")
        with self._changed:
            self._changed.notify_all()


def unfit(who: str, check: Check, checked: Checked, needed_ports: int) -> str:
    """What keeps a member out, as a sentence; "" if nothing does."""
    if checked.missing:
        return (
            f"{who} does not see {checked.missing[0]} as host 0 does: put the run directory (--run), the model and the cache on "
            "storage that all hosts share under one path."
        )
    if checked.unwritable:
        return f"{who} cannot write {check.folder} ({checked.unwritable}): make it writable there, or name another --run."
    if checked.free_ports < needed_ports:
        low, high = check.ports
        return (
            f"{who} has {checked.free_ports} free ports in cluster.ports = [{low}, {high}] and needs {needed_ports}: "
            "stop what uses them or set another range."
        )
    return ""
