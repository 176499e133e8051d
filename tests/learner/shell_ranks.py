"""One rank of test_shell_ranks.py: `python shell_ranks.py RANK WORLD PORT MODEL RUN-DIR PLAN`. A whole shell on a real loop.

PLAN: "all" trains every step; "stop" is told to stop, on the last rank alone; "die" loses its last rank without a word.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import torch
from learner_data import learner_config, random_batch
from learner_scheduler import HandedOut, Kept, KeptElsewhere
from transformers import AutoModelForCausalLM

from learner.shell import LearnerShell
from segue.errors import RunFailed
from segue.metrics import Metrics, StateClock
from segue.metrics.vocabulary import STATES
from segue.ports.learner import Batch


def check_probes(sender: Kept, folder: str) -> None:
    """Each version's probe is what its published tensors, whole, make of it: however many ranks it was scored and gathered on."""
    assert len(sender.probes) > 1
    for step, probe in sender.probes.items():
        assert probe is not None
        lm = AutoModelForCausalLM.from_pretrained(folder).eval()
        lm.load_state_dict(sender.published[step])
        with torch.no_grad():
            logprobs = torch.log_softmax(lm(torch.tensor([probe.tokens]), use_cache=False).logits[0, :-1], -1)
        expected = logprobs.gather(1, torch.tensor(probe.tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(probe.logprobs), expected, atol=1e-4, rtol=0, msg=f"probe of step {step}")


def check_share(source: Kept) -> None:
    """A further source gets the values of its share, and of the rest what is needed to lay them out."""
    assert len(source.published) > 1
    for named in source.published.values():
        share = source.share(named)
        assert 0 < len(share) < len(named)
        assert all(tensor.is_meta == (name not in share) for name, tensor in named.items())


async def main(rank: int, world: int, port: int, model: str, run_dir: Path, plan: str) -> str:
    config = learner_config(steps=6, checkpoint={"every": 0}, learner={"lr": 0.01, "pack_tokens": 64, "ranks": world})
    stops: list[asyncio.Task[None]] = []

    def batches(step: int) -> Batch:
        if step == 2 and rank == world - 1 > 0:
            if plan == "die":
                os._exit(9)
            if plan == "stop" and not stops:
                stops.append(asyncio.get_running_loop().create_task(shell.stop()))
        return random_batch(seed=step, groups=6, step=step, versions=(max(0, step - 1), step))

    scheduler = HandedOut(batches)
    scheduler.trained = 99 if rank else 0  # nobody reports to the other ranks' scheduler
    metrics = Metrics("learner", str(rank), envs=["latency"])
    clock = StateClock(STATES["learner"], asyncio.get_running_loop().time)
    sender = Kept() if rank == 0 else KeptElsewhere()
    shell = LearnerShell(
        config, run_dir, rank, world, model, sender, metrics, clock, rendezvous=f"127.0.0.1:{port}" if world > 1 else ""
    )
    shell.connect("scheduler-0", scheduler)
    await shell.start()
    await shell.run()
    await shell.stop()
    assert sender.closed
    if rank == 0:
        check_probes(sender, model)
    else:
        check_share(sender)
    return f"version {shell.version}"


if __name__ == "__main__":
    number, size, where = (int(x) for x in sys.argv[1:4])
    try:
        print(asyncio.run(main(number, size, where, sys.argv[4], Path(sys.argv[5]), sys.argv[6])))
    except RunFailed as failure:
        print(failure.sentence, flush=True)
        os._exit(1)
