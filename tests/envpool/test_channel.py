"""The pool's end of a worker's channel: frames in pieces, floods, rubbish, ends."""

from __future__ import annotations

import asyncio
import random
import socket

from envpool.channel import Channel
from envpool.messages import LENGTH, MAX_FRAME


class End:
    """A channel and its far end."""

    def __init__(self) -> None:
        near, self.far = socket.socketpair()
        self.frames: list[bytes] = []
        self.ends = 0
        self.channel = Channel(near, self.frames.append, self.ended)

    def ended(self) -> None:
        self.ends += 1


def packed(*bodies: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(body)) + body for body in bodies)


async def test_frames_arrive_whole_however_they_were_cut() -> None:
    rng = random.Random(0)
    bodies = [bytes(rng.randrange(256) for _ in range(rng.choice([0, 1, 3, 4, 5, 1000]))) for _ in range(50)]
    for cut in (1, 2, 3, 7, 64, 100_000):
        end = End()
        data = packed(*bodies)
        for start in range(0, len(data), cut):
            end.far.sendall(data[start : start + cut])
            end.channel.drain()
        assert end.frames == bodies and end.ends == 0
        end.channel.close()
        end.far.close()


async def test_what_was_sent_before_the_end_is_handed_over() -> None:
    end = End()
    end.far.sendall(packed(b"one", b"two") + LENGTH.pack(10) + b"cut")
    end.far.close()
    end.channel.drain()
    assert end.frames == [b"one", b"two"] and end.ends == 1
    end.channel.drain()
    end.channel.write(b"into the void")
    assert end.ends == 1


async def test_a_length_beyond_all_bounds_ends_the_channel() -> None:
    end = End()
    end.far.sendall(LENGTH.pack(MAX_FRAME + 1))
    end.channel.drain()
    assert end.ends == 1
    end.far.close()


async def test_writes_wait_for_nobody_and_arrive_in_order() -> None:
    end = End()
    data = [bytes([i]) * 100_000 for i in range(50)]
    for part in data:
        end.channel.write(part)
    received = bytearray()
    end.far.setblocking(False)
    while len(received) < sum(map(len, data)):
        received += await asyncio.get_running_loop().sock_recv(end.far, 1 << 16)
    assert bytes(received) == b"".join(data)
    end.channel.close()
    end.far.close()


async def test_writing_to_a_dead_worker_is_noticed_by_reading() -> None:
    end = End()
    end.far.close()
    end.channel.write(b"x" * 1_000_000)
    end.channel.drain()
    assert end.ends == 1


async def test_closing_inside_a_frame_stops_the_rest() -> None:
    near, far = socket.socketpair()
    frames: list[bytes] = []

    def take(body: bytes) -> None:
        frames.append(body)
        channel.close()

    channel = Channel(near, take, lambda: frames.append(b"end"))
    far.sendall(packed(b"one", b"two"))
    channel.drain()
    assert frames == [b"one"]
    far.close()
