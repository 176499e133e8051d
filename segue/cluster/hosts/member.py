"""`segue join`: what a host other than the first does. It finds the head, is checked, runs Ray's node process, ends with the run.

consumes       the head's messages; the end of Ray's node process; SIGINT, SIGTERM
produces       Ray's node process, and below it the roles that the driver puts here; a log, logs/host-<rank>.log
waits for      the head, at most `seconds` until it answers; then its messages, at most `SILENCE_SECONDS` apart
unblocked by   `End`, the connection's end, a signal
on cancel      everything that was started here ends, by pid, and its files go; after SIGKILL too (`segue.cluster.hosts.ray_node`)

Ray ends a node process that was cut off for too long. It is then started anew: the host joins as a new node.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from segue.cluster.hosts.channel import AuthenticationError, Channel, prove
from segue.cluster.hosts.facts import address_towards, facts_here, own_address, reason
from segue.cluster.hosts.messages import Check, Checked, End, HeadSays, Hello, Join, Left, MemberSays, Refused
from segue.cluster.hosts.ray_node import beside
from segue.cluster.ports import free_ports
from segue.cluster.processes import adopt_orphans, describe_exit, end_family, sigterm_blocked
from segue.errors import DiskFailed, RunFailed, UserError
from segue.files import write_atomic

RETRY_SECONDS = 1.0
TRY_SECONDS = 10.0
"""An address that swallows what is sent to it is called anew after so long: the system itself repeats ever more seldom."""
REJOIN_SECONDS = (1.0, 2.0, 5.0, 10.0)
"""Before Ray is started again; the last repeats."""
POLL_SECONDS = 0.2
HOST_RESOURCE = "segue_host_{}"
"""Each Ray node has one unit of the resource that carries its host's number: roles ask for a little of it."""

_Channel = Channel[HeadSays, MemberSays]


def join(head: str, port: int, rank: int, address: str, token: str, seconds: float) -> int:
    """Take part in the run whose head is at `head`:`port`, as host `rank`; the exit code: 0 when the run ended in order.

    `address` is this host's own, or "". Raises `UserError` and `RunFailed`, one sentence each.
    """
    address = own_address(address) if address else address_towards(head, port)
    channel = _connect(head, port, token, seconds)
    channel.send(MemberSays(Hello(facts_here(rank, address))))
    print(f"Segue: host {rank} ({address}) waits for the run at {head}:{port}; what it prints is on host 0.", flush=True)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="segue-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        member = _Member(channel, rank, address, Path(scratch))
        try:
            return member.run()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # this is the end already, and it must be whole
            end_family(grace_seconds=0.0)  # what runs here hears no SIGTERM
            channel.close()


def _connect(head: str, port: int, token: str, seconds: float) -> _Channel:
    """Try until somebody answers there, at most `seconds`; whoever it is proves itself within another `PROOF_SECONDS`."""
    where = f"{head}:{port}"
    connection = _call(head, port, seconds)
    try:
        prove(connection, token, first=False)
    except AuthenticationError:
        raise UserError(
            f"The run at {where} has another token: set SEGUE_TOKEN to the same words on all hosts, or share ~/.segue/token."
        ) from None
    except (EOFError, OSError):
        raise RunFailed("start", f"What answers at {where} is no Segue run: correct HEAD_ADDR and HEAD_PORT.") from None
    return Channel(connection, HeadSays, MemberSays, "head")


def _call(head: str, port: int, seconds: float) -> Connection:
    """A connection to whatever listens there. Raises `RunFailed` after `seconds`."""
    deadline = time.monotonic() + seconds
    left = max(seconds, POLL_SECONDS)
    while True:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(head, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as calling:
                calling.settimeout(min(left, TRY_SECONDS))
                calling.connect(where)
                calling.settimeout(None)
                return Connection(calling.detach())
        except UnicodeError as error:
            raise UserError(f"HEAD_ADDR = {head!r} is no address ({reason(error)}): correct it.") from None
        except OSError as error:
            left = deadline - time.monotonic() - RETRY_SECONDS
            if left <= 0:
                raise RunFailed(
                    "start",
                    f"Nobody answers at {head}:{port} after {seconds:g} s ({error.strerror or error}): start launch.sh with "
                    "NODE_RANK=0 on that host, or correct HEAD_ADDR and HEAD_PORT.",
                ) from None
        time.sleep(RETRY_SECONDS)


class _Member:
    """The course of a member once it is connected."""

    def __init__(self, channel: _Channel, rank: int, address: str, scratch: Path) -> None:
        self._channel = channel
        self._rank = rank
        self._address = address
        self._scratch = scratch
        self._join: Join | None = None
        self._ray: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self._starts = 0
        self._signals: list[int] = []
        self._leave_at = float("inf")

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._signals.append(number))
        while True:
            try:
                said = self._channel.inbox.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self._look_after_ray()
                if (code := self._look_at_signals()) is not None:
                    return code
                continue
            if said is None:
                raise RunFailed("head", f"The head of the run is gone ({self._channel.why}): host {self._rank} ends with it.")
            match said.message:
                case Check() as check:
                    self._channel.send(MemberSays(checked(check, self._address)))
                case Join() as join:
                    self._join = join
                    self._start_ray()
                case Refused(sentence):
                    raise UserError(sentence)
                case End(code):
                    print(f"Segue: the run has ended with exit code {code}.", flush=True)
                    return 0
                case other:
                    raise AssertionError(f"what is this for? {other}")

    def _look_at_signals(self) -> int | None:
        """SIGINT: this host leaves at once. SIGTERM (the job ends; SLURM may say so twice): the head stops in order first,
        if it was told too."""
        if not self._signals:
            return None
        first = self._signals[0]
        if all(number == signal.SIGTERM for number in self._signals):
            if self._leave_at == float("inf"):
                self._leave_at = time.monotonic() + (self._join.stop_seconds if self._join else 0.0)
            if time.monotonic() < self._leave_at:
                return None
        self._channel.send(MemberSays(Left(f"it was told to ({signal.Signals(first).name})", for_good=True)))
        return 128 + first

    # --- Ray ------------------------------------------------------------------------------------------------------------

    def _look_after_ray(self) -> None:
        if self._join is None:
            return
        if self._ray is None:
            if time.monotonic() >= self._start_at:
                self._start_ray()
            return
        code = self._ray.poll()
        if code is None:
            return
        self._ray = None
        end_family(grace_seconds=0.0)  # what it left behind holds memory and GPUs
        self._start_at = time.monotonic() + REJOIN_SECONDS[min(self._starts, len(REJOIN_SECONDS)) - 1]
        self._channel.send(MemberSays(Left(f"its node process ended with {describe_exit(code)}", for_good=False)))

    def _start_ray(self) -> None:
        assert self._join is not None
        join = self._join
        self._starts += 1
        folder = self._scratch / f"ray-{self._starts}"
        shutil.rmtree(self._scratch / f"ray-{self._starts - 1}", ignore_errors=True)
        command = ray_start(join, self._rank, self._address, folder, facts_here(self._rank, self._address).gpus)
        environment = os.environ | join.environment | {"TMPDIR": str(self._scratch)}
        environment.setdefault("RAY_worker_maximum_startup_concurrency", str(os.cpu_count() or 1))  # as on host 0
        for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
            environment.pop(name, None)
        # A batch system that ends the job signals Ray's processes too: they are to last until the head has stopped in order.
        with open(Path(join.logs) / f"host-{self._rank}.log", "ab") as log, sigterm_blocked():
            self._ray = subprocess.Popen(
                beside(os.getpid(), self._scratch, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )


def ray_start(join: Join, rank: int, address: str, folder: Path, gpus: int) -> list[str]:
    """The command that runs Ray's node process here until the run ends."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--log-style", "record"),
        *("--address", join.ray_address, "--node-ip-address", address, "--temp-dir", str(folder)),
        *("--num-cpus", "0", "--num-gpus", str(gpus), "--resources", json.dumps({HOST_RESOURCE.format(rank): 1})),
        *("--object-store-memory", str(join.object_store_bytes), "--include-log-monitor", "false"),
    ]


def checked(check: Check, address: str) -> Checked:
    """What this host sees of what the head asks about."""
    missing = [path for path, words in sorted(check.files.items()) if _words(Path(path)) != words]
    unwritable = ""
    probe = Path(check.folder) / f".host-{address}-{os.getpid()}"
    try:
        write_atomic(probe, b"")
        probe.unlink()
    except (OSError, RunFailed) as error:
        cause = error.__cause__ if isinstance(error, DiskFailed) else error
        unwritable = getattr(cause, "strerror", "") or str(error)
    return Checked(missing, unwritable, free_ports(address, check.ports))


def _words(path: Path) -> str | None:
    """What the file says; None if it cannot be read. A folder says nothing, but is there."""
    try:
        return "" if path.is_dir() else path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
