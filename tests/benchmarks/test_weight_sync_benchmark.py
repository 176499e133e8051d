"""The weight-sync benchmark at a tiny size: whole, with real processes, and its figures are of what it says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import slow_link, weight_sync
from benchmarks.peers import Peer
from segue.errors import RunFailed, UserError

TINY = ["--pairs", "1", "--megabytes", "0.5", "1", "--receivers", "1", "--bucket-bytes", "200000"]
MODEL = ["--hidden", "64", "--layers", "1", "--vocabulary", "128"]


@pytest.mark.processes
async def test_a_tiny_run_has_every_figure(tmp_path: Path) -> None:
    args = weight_sync.parse([*TINY, *MODEL, "--link", "throttle"])
    figures = await weight_sync.measure(args, str(tmp_path))
    json.dumps(figures)
    assert [(row["bytes"], row["receivers"]) for row in figures["transfers"]] == [(500_000 // 64 * 64, 1), (1_000_000, 1)]
    assert figures["transfer_ratio"] == figures["transfers"][-1]["ratio"] > 0.0
    [found] = figures["rounds"]
    for arm in ("full", "slow"):
        update = found[arm]
        assert 0.0 < update["load"] + update["probe"] + update["resume"] <= update["pause"] * 1.001
        assert update["tokens"] > 0 and update["transfer"] <= update["stage"]
    assert found["slow"]["transfer"] > found["full"]["transfer"] and figures["link"] == "loopback, the sender throttled"
    assert figures["pause_ratio"] == (found["full"]["pause"] - found["full"]["probe"]) / found["baseline"]
    assert figures["weight_bytes"] == 4 * figures["parameters"] and figures["weight_buckets"] > 1


@pytest.mark.processes
async def test_what_a_peer_cannot_do_is_one_sentence_and_nothing_is_left_behind() -> None:
    peer = await Peer.start("rollout-0", weight_sync.MODULE, ["receiver", "--name", "rollout-0"])
    transfers = weight_sync.Transfers("127.0.0.1:1")  # where nobody listens
    transfers.step = 0
    transfer = transfers.next(["rollout-0"])
    with pytest.raises(RunFailed, match=r"rollout-0: TransferFailed: rollout-0 did not receive .* cannot be reached"):
        await peer.ask("stage", transfer=transfer)
    await peer.close()
    assert peer._process.returncode == 0


def test_the_largest_size_goes_to_every_number_of_receivers() -> None:
    args = weight_sync.parse(["--megabytes", "40", "400", "4", "--receivers", "4", "1", "2"])
    assert weight_sync._grid(args) == [(4.0, 1), (40.0, 1), (400.0, 1), (400.0, 2), (400.0, 4)]


def test_too_few_gpus_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    weight_sync.check(weight_sync.parse(["--device", "cuda", "--receivers", "1"]))
    with pytest.raises(UserError, match=r"needs a GPU per process, 5 for --receivers 4, and this machine has 2"):
        weight_sync.check(weight_sync.parse(["--device", "cuda"]))


def test_without_root_the_sender_is_throttled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    link = slow_link.make_link("auto")
    assert "throttled" in link.kind and link.limit(1e6) == 1e6
    with pytest.raises(UserError, match="--link namespaces needs root and iproute2"):
        slow_link.make_link("namespaces")


def test_namespaces_are_made_limited_and_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands, in order; whether this machine may run them is tried by the benchmark itself."""
    said: list[str] = []

    def run(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        said.append(" ".join(command))
        code = 1 if "veth" in command and len(said) > 20 else 0
        return subprocess.CompletedProcess(command, code, "", "Operation not permitted")

    monkeypatch.setattr("subprocess.run", run)
    link = slow_link.Namespaces()
    assert link.limit(125e6) is None
    name = link.prefix(0)[3]
    assert said[-1] == f"ip netns exec {name} tc qdisc replace dev link0 root tbf rate 1000000000bit burst 500000b latency 50ms"
    link.limit(None)
    link.close()
    assert sum(line.startswith("ip netns add") for line in said) == sum(line.startswith("ip netns delete") for line in said) == 2
    said.extend(["filler"] * 21)
    with pytest.raises(UserError, match="Operation not permitted"):
        slow_link.Namespaces()
    assert sum(line.startswith("ip netns add") for line in said) == sum(line.startswith("ip netns delete") for line in said) == 4
