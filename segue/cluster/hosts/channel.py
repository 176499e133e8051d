"""One end of a head-member connection: messages in, messages out, beats in between.

consumes       bytes of the other end
produces       decoded messages, in a queue; None once the connection is over
waits for      the other end, at most `SILENCE_SECONDS`
unblocked by   a message, a beat, the connection's end, or the silence
on cancel      `close`: both threads end; the other end has `FAREWELL_SECONDS` to take leave, and more while it shows life

A system that closes a connection and still gets bytes resets it, and a reset may overtake what was sent last. So who closes says
first that nothing more comes, and reads on until the other end, whose reader then has all, says the same. After a cut that may
take longer: TCP sends what was lost again after a pause that has doubled with each try; what the other end says comes at once.

Threads and blocking sockets, because the processes that hold these wait for other things with their loops, or have none.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Generic, TypeVar

from segue import wire
from segue.cluster.hosts.messages import BEAT_SECONDS, SILENCE_SECONDS, Beat, HeadSays, MemberSays
from segue.errors import WireError

In = TypeVar("In", HeadSays, MemberSays)
Out = TypeVar("Out", HeadSays, MemberSays)


FAREWELL_SECONDS = 2.0
"""An end that hears takes leave at once; one that is cut off never does."""
LIFE_SECONDS = 3 * BEAT_SECONDS
"""Who has said nothing for so long shows no life."""
_LOOK_SECONDS = 0.1
PROOF_SECONDS = 10.0
"""Both ends have proved themselves within this, or what is at the other end is none of ours."""


def prove(connection: Connection, token: str, first: bool) -> None:
    """Both ends show that they know the token, within `PROOF_SECONDS`; the head goes `first`.

    Raises `AuthenticationError`, or `EOFError` or `OSError` where the other end does not speak of tokens, or not in time.
    """
    key = token.encode()
    expiry = threading.Timer(PROOF_SECONDS, _shut, (connection, socket.SHUT_RDWR))
    expiry.daemon = True
    expiry.start()
    try:
        for turn in (first, not first):
            (deliver_challenge if turn else answer_challenge)(connection, key)
    except AssertionError as error:  # how Python 3.11 says that what came is no challenge
        raise OSError(str(error)) from None
    finally:
        expiry.cancel()


def _shut(connection: Connection, how: int) -> None:
    """Shut the socket, which wakes who reads from it; closing the file under a reader does not."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(how)


class Channel(Generic[In, Out]):
    """See the module. `inbox` gets what arrives; `why` says why it is over."""

    def __init__(self, connection: Connection, receives: type[In], sends: type[Out], name: str) -> None:
        self._connection = connection
        self._receives: type[In] = receives
        self._sends: type[Out] = sends
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._heard = threading.Condition()
        self._times = 0
        self._last = float("-inf")
        self.why = ""
        self.inbox: queue.Queue[In | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name=f"beat-{name}", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def send(self, message: Out) -> None:
        """Send, or end the channel where that fails: the reader tells."""
        try:
            with self._lock:
                self._connection.send_bytes(wire.encode(message))
        except (OSError, ValueError):
            self._end("the connection broke")

    def speaks(self, seconds: float) -> bool:
        """Whether the other end says anything, if only a beat, within `seconds` from now and before the channel is over."""
        with self._heard:
            before = self._times
            self._heard.wait_for(lambda: self._times > before or self.over, seconds)
            return self._times > before and not self.over

    def farewell(self, why: str = "closed") -> None:
        """The first half of `close`, which waits for nothing: whoever has several to close begins with this."""
        self._end(why)
        _shut(self._connection, socket.SHUT_WR)

    def close(self, why: str = "closed", seconds: float | None = None, patience: float = SILENCE_SECONDS) -> None:
        """End both threads. What was sent arrives, if the other end takes leave within `seconds` (`FAREWELL_SECONDS`), or shows
        life (`LIFE_SECONDS`) until it does, for at most `patience` seconds."""
        self.farewell(why)
        self._reader.join(FAREWELL_SECONDS if seconds is None else seconds)
        until = time.monotonic() + patience
        while self._reader.is_alive() and time.monotonic() < min(until, self._last + LIFE_SECONDS):
            self._reader.join(_LOOK_SECONDS)
        _shut(self._connection, socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._connection.close()

    def _read(self) -> None:
        try:
            while True:  # also when nothing more can be sent: the other end's last word may be on its way
                if not self._connection.poll(SILENCE_SECONDS):
                    return self._end(f"nothing came for {SILENCE_SECONDS:g} s")
                said = wire.decode(self._connection.recv_bytes(1 << 20), self._receives)
                with self._heard:
                    self._times += 1
                    self._last = time.monotonic()
                    self._heard.notify_all()
                if not isinstance(said.message, Beat):
                    self.inbox.put(said)
        except WireError as error:
            self._end(f"it speaks another Segue ({error})")
        except (EOFError, OSError, TypeError):  # TypeError: the connection was closed under a poll
            self._end("the connection ended")
        finally:
            self.inbox.put(None)
            _shut(self._connection, socket.SHUT_RDWR)  # the other end may wait for this one's leave

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self.send(self._sends(Beat()))

    def _end(self, why: str) -> None:
        if not self._over.is_set():
            self.why = why
            self._over.set()
            with self._heard:
                self._heard.notify_all()


__all__ = ["AuthenticationError", "Channel", "prove"]
