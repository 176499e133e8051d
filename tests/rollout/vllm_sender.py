"""A weight sender in a process of its own, for the test that kills it: publishes one version, and halts in the middle of sending.

    python vllm_sender.py MEMBER VERSION TRANSFER

Says "address HOST:PORT", then, when it halts, "halted".
"""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

from engine_models import named
from vllm_harness import model_of
from vllm_weights import make_sender

import weightsync.group
from segue.ports.transfer import Transfer

HALT_AT = 2


def halt_in_the_middle() -> None:
    """The third broadcast of this process does not begin."""
    begin = weightsync.group.BroadcastGroup.begin
    count = 0

    def halting(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count > HALT_AT:
            print("halted", flush=True)
            threading.Event().wait()
        return begin(self, *args)

    weightsync.group.BroadcastGroup.begin = halting  # type: ignore[method-assign, assignment]


async def main(member: str, version: int, number: int) -> None:
    sender = make_sender()
    sender.publish(version, named(model_of(version, False)))
    halt_in_the_middle()
    print(f"address {sender.address}", flush=True)
    await sender.send(Transfer(version, version, number, number, [member], sender.address, 600.0))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
