"""The pool's end of the channel to a worker: frames over a non-blocking socket in the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from envpool.messages import LENGTH, MAX_FRAME

_CHUNK = 1 << 18


class Channel:
    """Writes never wait: what the socket does not take is kept and written when it does. After `close` nothing happens any more.

    `on_frame` gets the bytes of each frame; `on_end` is called once if the channel ends of itself.
    """

    def __init__(self, end: socket.socket, on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._socket = end
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._unsent = bytearray()
        self._open = True
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self.drain)

    def write(self, data: bytes) -> None:
        """Send, now or later."""
        if not self._open:
            return
        idle = not self._unsent
        self._unsent += data
        if idle:
            self._send()
            if self._unsent and self._open:
                self._loop.add_writer(self._socket.fileno(), self._send)

    def drain(self) -> None:
        """Read all there is and hand over the frames in it."""
        while self._open:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            self._received += data
            self._take_frames()

    def close(self) -> None:
        """Stop; safe to call twice."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _take_frames(self) -> None:
        start = 0
        while self._open and len(self._received) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received, start)
            if length > MAX_FRAME:
                self._end()
                return
            if len(self._received) - start - LENGTH.size < length:
                break
            body = bytes(self._received[start + LENGTH.size : start + LENGTH.size + length])
            start += LENGTH.size + length
            self._on_frame(body)
        del self._received[:start]

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the reading side will notice the end
        self._loop.remove_writer(self._socket.fileno())

    def _end(self) -> None:
        self.close()
        self._on_end()
