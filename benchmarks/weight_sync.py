"""Weight sync: how near a transfer comes to a bare broadcast, and how long it makes an engine pause.

    python -m benchmarks.weight_sync [--json FILE] [--pairs 7] [--megabytes 4 40 400] [--receivers 1 2 4] …

Transfers: one sender and n receivers, each a process. In turns they do a bare `torch.distributed.broadcast` of B bytes into
memory that was used before, timed from barrier to barrier, and a whole transfer of B bytes in tensors of a newly published
version, timed from the go to the moment at which the sender knows that everybody has every bucket undamaged. No engine runs.

Pauses: a sender and a rollout node (engine, receiver and update procedure as in a run) that is asked for tokens all the time, at
the two ends of a link. In turns an update at full speed, one over the link slowed ten times, and the local operation that the
pause is compared with. A pause lasts from the engine being idle until it can go on; drain and probe are reported apart.

`--device cuda` does the same over NCCL, on a machine with a GPU per process.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.command import Parser, ended, json_file, positive
from benchmarks.peers import Peer
from benchmarks.result import document, machine, write
from benchmarks.slow_link import Link, make_link
from segue.config.learner import WeightSyncConfig
from segue.errors import RunFailed, UserError
from segue.ports.transfer import Transfer

MODULE = "benchmarks.weight_sync_peer"
HOST = "127.0.0.1"
DEADLINE = 100.0
SLOWDOWN = 10.0
WARM = 2
"""Rounds before the first that counts: processes meet, memory is touched."""


class Transfers:
    """Publications and transfers of the sender at `address`; every transfer is one of a version of its own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.step = -1

    def next(self, members: list[str]) -> dict[str, Any]:
        """Of the newest step, in the group that these members have kept."""
        transfer = Transfer(self.step, self.step, self.step, len(members), members, self._address, DEADLINE)
        plain: dict[str, Any] = msgspec.to_builtins(transfer)
        return plain

    async def whole(self, peers: Sequence[Peer], nbytes: int) -> float:
        """Publish `nbytes` and bring them to all: seconds from the go to the commit."""
        sender, *receivers = peers
        self.step += 1
        await sender.ask("publish", step=self.step, nbytes=nbytes)
        transfer = self.next([peer.name for peer in receivers])
        staged = [asyncio.ensure_future(peer.ask("stage", transfer=transfer)) for peer in receivers]
        answer = await sender.ask("send", transfer=transfer)
        for there in await asyncio.gather(*staged):
            assert there["bytes"] == nbytes
        seconds: float = answer["seconds"]
        return seconds


async def _start(stack: AsyncExitStack, name: str, role: str, *arguments: str, **options: Any) -> Peer:
    peer = await Peer.start(name, MODULE, [role, "--name", name, *arguments], **options)
    stack.push_async_callback(peer.close)
    return peer


# --- transfers --------------------------------------------------------------------------------------------------------


async def measure_transfers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per size and number of receivers: seconds of each pair, medians, and their ratio."""
    async with AsyncExitStack() as stack:
        peers = await _fleet(args, stack)
        transfers = Transfers(peers[0].ready["address"])
        rows: list[dict[str, Any]] = []
        for megabytes, count in _grid(args):
            nbytes = int(megabytes * 1e6) // 64 * 64
            seconds: dict[str, list[float]] = {"bare": [], "ours": []}
            for pair in range(-WARM, args.pairs):
                for arm in ("bare", "ours") if pair % 2 else ("ours", "bare"):
                    took = await (_bare if arm == "bare" else transfers.whole)(peers[: 1 + count], nbytes)
                    if pair >= 0:
                        seconds[arm].append(took)
            row = _row(nbytes, count, seconds)
            rows.append(row)
            print(
                f"{megabytes:g} MB to {count}: bare {row['bare_seconds'] * 1e3:.1f} ms, whole transfer "
                f"{row['transfer_seconds'] * 1e3:.1f} ms, ratio {row['ratio']:.3f}",
                flush=True,
            )
        return rows


async def _fleet(args: argparse.Namespace, stack: AsyncExitStack) -> list[Peer]:
    """The sender and the receivers, met for bare broadcasts."""
    count = 1 + max(args.receivers)
    devices = _devices(args, count)
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    shared = ["--host", HOST, "--bucket-bytes", str(args.bucket_bytes)]
    starting = [_start(stack, "learner-0", "sender", "--device", devices[0], *shared, env=env)]
    for number, device in enumerate(devices[1:]):
        starting.append(_start(stack, f"rollout-{number}", "receiver", "--device", device, env=env))
    peers = await asyncio.gather(*starting)
    meet = {"address": f"{HOST}:{_free_port()}", "world": count, "counts": args.receivers}
    await asyncio.gather(*(peer.ask("world", rank=rank, **meet) for rank, peer in enumerate(peers)))
    return peers


def _grid(args: argparse.Namespace) -> list[tuple[float, int]]:
    """The largest size to every number of receivers, the others to the smallest number."""
    largest = max(args.megabytes)
    smaller = [(megabytes, min(args.receivers)) for megabytes in sorted(args.megabytes) if megabytes != largest]
    return [*smaller, *((largest, count) for count in sorted(args.receivers))]


async def _bare(peers: Sequence[Peer], nbytes: int) -> float:
    answers = await asyncio.gather(*(peer.ask("bare", nbytes=nbytes, count=len(peers) - 1) for peer in peers))
    seconds: float = answers[0]["seconds"]
    return seconds


def _row(nbytes: int, count: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [bare / ours for bare, ours in zip(seconds["bare"], seconds["ours"], strict=True)]
    return {
        "bytes": nbytes,
        "receivers": count,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "bare_seconds": statistics.median(seconds["bare"]),
        "transfer_seconds": statistics.median(seconds["ours"]),
        "bare_bytes_per_second": nbytes / statistics.median(seconds["bare"]),
        "transfer_bytes_per_second": nbytes / statistics.median(seconds["ours"]),
    }


# --- pauses -----------------------------------------------------------------------------------------------------------


async def measure_pauses(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    link = make_link("throttle" if args.device == "cuda" else args.link)
    try:
        async with AsyncExitStack() as stack:
            return await _measure_pauses(args, folder, link, stack)
    finally:
        link.close()


async def _measure_pauses(args: argparse.Namespace, folder: str, link: Link, stack: AsyncExitStack) -> dict[str, Any]:
    ends = await _ends(args, folder, link, stack)
    await ends.update()
    await ends.node.ask("generate")
    warm = [await ends.update() for _ in range(WARM)]
    slow_rate = ends.weights["bytes"] / (SLOWDOWN * min(one["transfer"] for one in warm))
    rounds: list[dict[str, Any]] = []
    for pair in range(args.pairs):
        found: dict[str, Any] = {}
        for arm in ("full", "slow", "baseline") if pair % 2 else ("baseline", "slow", "full"):
            if arm == "baseline":
                found[arm] = (await ends.node.ask("baseline"))["seconds"]
                continue
            await ends.sender.ask("limit", bytes_per_second=link.limit(slow_rate if arm == "slow" else None))
            found[arm] = await ends.update()
        rounds.append(found)
        full, slow = found["full"], found["slow"]
        print(
            f"pause {_pause(full) * 1e3:.1f} ms (slow link {_pause(slow) * 1e3:.1f} ms), "
            f"baseline {found['baseline'] * 1e3:.1f} ms; "
            f"drain {full['drain'] * 1e3:.1f} ms, probe {full['probe'] * 1e3:.1f} ms; transfer {full['transfer']:.2f} s "
            f"(slow {slow['transfer']:.2f} s, {slow['tokens']} tokens meanwhile)",
            flush=True,
        )
    return _pauses(rounds, ends.weights, ends.node.ready["baseline"], link.kind)


class Ends:
    """A sender that publishes the model in `folder`, and a node; `weights` says what it publishes."""

    def __init__(self, sender: Peer, node: Peer, folder: str, tokens: list[int]) -> None:
        self.sender, self.node = sender, node
        self.weights: dict[str, Any] = {}
        self._folder, self._tokens = folder, tokens
        self._transfers = Transfers(sender.ready["address"])

    async def publish(self) -> None:
        self._transfers.step += 1
        self.weights = await self.sender.ask("publish_model", step=self._transfers.step, path=self._folder, tokens=self._tokens)

    async def update(self) -> dict[str, Any]:
        """Publish a version and bring it to the node: its seconds by phase."""
        await self.publish()
        transfer = self._transfers.next(self.node.ready["members"])
        loading = asyncio.ensure_future(self.node.ask("update", transfer=transfer))
        sent = await self.sender.ask("send", transfer=transfer)
        return {**await loading, "transfer": sent["seconds"]}


async def _ends(args: argparse.Namespace, folder: str, link: Link, stack: AsyncExitStack) -> Ends:
    tokens = [1 + 37 * i % (args.vocabulary - 1) for i in range(args.probe_tokens)]
    devices = _devices(args, 2)
    options: list[dict[str, Any]] = []
    for end in range(2):
        interface = link.interface(end)
        options.append({"prefix": link.prefix(end), "env": {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}})
    shared = ["--host", link.addresses[0], "--bucket-bytes", str(args.bucket_bytes)]
    size = (await asyncio.to_thread(Path(folder, "model.safetensors").stat)).st_size
    sender, node = await asyncio.gather(
        _start(stack, "learner-0", "sender", "--device", devices[0], *shared, **options[0]),
        _start(
            stack,
            "rollout-0",
            "node",
            *("--device", devices[1], "--engine", args.engine, "--staging", args.staging, "--model", folder),
            *("--bytes", str(size), "--sequences", str(args.sequences)),
            **options[1],
        ),
    )
    return Ends(sender, node, folder, tokens)


def _pause(update: dict[str, Any]) -> float:
    """From idle to the first step possible, without the probe."""
    seconds: float = update["pause"] - update["probe"]
    return seconds


def _pauses(rounds: list[dict[str, Any]], published: dict[str, Any], baseline: str, link: str) -> dict[str, Any]:
    ratios = [_pause(one["full"]) / one["baseline"] for one in rounds]
    slow = [_pause(one["slow"]) / _pause(one["full"]) for one in rounds]
    medians = {
        f"{name}_seconds": statistics.median(one["full"][name] for one in rounds)
        for name in ("stage", "drain", "pause", "probe", "load", "resume", "transfer")
    }
    return {
        "pause_ratio": statistics.median(ratios),
        "pause_ratios": ratios,
        "pause_ratio_slow_link": statistics.median(_pause(one["slow"]) for one in rounds)
        / statistics.median(_pause(one["full"]) for one in rounds),
        "pause_ratios_slow_link": slow,
        "pause_baseline": baseline,
        "pause_baseline_seconds": statistics.median(one["baseline"] for one in rounds),
        "link": link,
        "link_slowdown": statistics.median(one["slow"]["transfer"] / one["full"]["transfer"] for one in rounds),
        "tokens_while_slow": statistics.median(one["slow"]["tokens"] for one in rounds),
        "weight_bytes": published["bytes"],
        "weight_buckets": published["buckets"],
        "pauses": medians,
        "rounds": rounds,
    }


def build_model(args: argparse.Namespace, folder: str) -> int:
    """A random Llama, saved; its number of parameters."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(args.seed)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


# --- all --------------------------------------------------------------------------------------------------------------


def _devices(args: argparse.Namespace, count: int) -> list[str]:
    return [f"cuda:{i}" if args.device == "cuda" else "cpu" for i in range(count)]


def check(args: argparse.Namespace) -> None:
    """Raises `UserError` for what this machine cannot do."""
    if args.device != "cuda":
        return
    import torch

    needed, there = 1 + max(args.receivers), torch.cuda.device_count()
    if there < needed:
        raise UserError(
            f"--device cuda needs a GPU per process, {needed} for --receivers {max(args.receivers)}, and this machine has "
            f"{there}: ask for fewer receivers, or use --device cpu."
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


async def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All figures, as docs/benchmarks.md names them."""
    figures: dict[str, Any] = {}
    if args.only in ("", "transfer"):
        rows = await measure_transfers(args)
        largest = [row for row in rows if row["bytes"] == max(row["bytes"] for row in rows)]
        figures |= {"transfer_ratio": min(row["ratio"] for row in largest), "transfers": rows}
    if args.only in ("", "pause"):
        figures["parameters"] = await asyncio.to_thread(build_model, args, folder)
        figures |= await measure_pauses(args, folder)
    return figures


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("weight-sync", __doc__)
    parser.add_argument("--json", type=json_file, help="write the figures here")
    parser.add_argument("--only", choices=("", "transfer", "pause"), default="", help="one half of it")
    parser.add_argument("--pairs", type=positive, default=7)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[4.0, 40.0, 400.0])
    parser.add_argument("--receivers", type=positive, nargs="+", default=[1, 2, 4])
    parser.add_argument("--bucket-bytes", type=positive, default=WeightSyncConfig().bucket_bytes, help="weightsync.bucket_bytes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", default="embedded", help="whose pause is measured (benchmarks.weight_sync_arms)")
    parser.add_argument("--staging", choices=("device", "host", "none"), default="device", help="weightsync.staging")
    parser.add_argument("--link", choices=("auto", "namespaces", "throttle"), default="auto", help="what is slowed, and how")
    parser.add_argument("--sequences", type=positive, default=4, help="requests that the engine is asked at a time")
    parser.add_argument("--probe-tokens", type=positive, default=64)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    where = machine()
    try:
        check(args)
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(measure(args, folder))
    except (RunFailed, UserError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    for name in ("transfer_ratio", "pause_ratio", "pause_ratio_slow_link"):
        if name in result:
            print(f"{name}: {result[name]:.3f}")
    told = {key: value for key, value in vars(args).items() if key != "json"}
    packages = ("torch", "transformers")
    write(args.json, document("weight_sync", result, seeds=[args.seed], arguments=told, packages=packages, where=where))
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
