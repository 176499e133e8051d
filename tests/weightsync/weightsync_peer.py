"""A process of its own, for the tests that kill or freeze one: receivers, a sender, or a further source, driven by JSON lines on
stdin. What a line means is up to the role:

    {"transfer": {…}, "members": ["n1"], "halt": true}    receiver: take part for these members
    {"transfer": {…}, "halt": true}                       sender: send step 0
    {"address": "host:port", "layers": 6, "halt": true}   source: obey the sender there, with the newest step published

"halt" stops that side for ever in the middle of the buckets; the line "halted" says that it is there. The other answers are
"ready" (with the sender's address), "staged" (what, and whether every bit is right) and "failed" (with the sentence). The process
exits when stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any

import msgspec
import torch
from weightsync_support import make_receiver, make_sender, make_source, publish_share, weights

import weightsync.group
from segue.ports.transfer import Transfer
from segue.ports.weights import TransferFailed
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender

HALT_AT = 2


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def halt_in_the_middle() -> None:
    """The third broadcast of this process does not return."""
    begin = weightsync.group.BroadcastGroup.begin
    count = 0

    def halting(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count > HALT_AT:
            say(what="halted")
            threading.Event().wait()
        return begin(self, *args)

    weightsync.group.BroadcastGroup.begin = halting  # type: ignore[method-assign, assignment]


async def receive(receiver: TorchReceiver, transfer: Transfer) -> None:
    name = receiver.member_name
    try:
        staged = await receiver.stage(transfer, transfer.members.index(name) + 1)
    except TransferFailed as error:
        say(what="failed", member=name, sentence=str(error))
    else:
        good = all(torch.equal(tensor, weights(transfer.step)[key]) for key, tensor in staged.tensors().items())
        say(what="staged", member=name, step=staged.manifest.step, version=staged.version, good=good)


async def send(sender: TorchSender, transfer: Transfer) -> None:
    result = await sender.send(transfer)
    say(what="sent", ok=result.ok, reason=result.reason)


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    receivers: dict[str, TorchReceiver] = {}
    tasks: list[asyncio.Future[None]] = []
    sender = make_sender() if sys.argv[1] == "sender" else None
    source = make_source() if sys.argv[1] == "source" else None
    step = 0
    if sender is not None:
        sender.publish(0, weights(0))
    say(what="ready", address=sender.address if sender is not None else "")
    while line := await reader.readline():
        order = json.loads(line)
        if order.get("halt"):
            halt_in_the_middle()
        if source is not None:
            publish_share(source, step, order.get("layers", 6))
            say(what="published", step=step)
            if step == 0:
                tasks.append(asyncio.ensure_future(source.serve(order["address"])))
            step += 1
            continue
        transfer = msgspec.convert(order["transfer"], Transfer)
        if sender is not None:
            tasks.append(asyncio.ensure_future(send(sender, transfer)))
            continue
        for name in order["members"]:
            receiver = receivers.setdefault(name, make_receiver(name))
            tasks.append(asyncio.ensure_future(receive(receiver, transfer)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
    os._exit(0)  # threads may have been left behind
