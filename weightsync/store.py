"""The meeting place of a transfer: a TCPStore that the sender serves, and one member's view of one transfer in it.

Keys of transfer T are `transfer/T/…`: `head`, `go` and `commit` (the sender's), `joined/NAME`, `ready/NAME` and `received/NAME`
(each member's, under its own name, so that the sender can say exactly who is missing), and the queue `bell`, into which a member
drops the key of a report it has just written, so that the sender wakes for any of them. Where other learner ranks send, too, each
has a queue `orders/NAME` of the transfers in which it is to take part, and reports like a member.

Every client is used by one thread only: a TCPStore client holds a lock while it waits. Waits end at their deadline as long as the
store answers; when its process is frozen they do not (torch 2.13 then waits for the answer to its own cancellation), which is why
all of this runs in threads that can be left behind.
"""

from __future__ import annotations

import errno
import socket
import threading
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from segue import wire
from segue.errors import UserError
from segue.ports.learner import SendWeights
from segue.ports.transfer import Transfer
from segue.wire import Message
from weightsync.crew import Deadline
from weightsync.messages import Head, Report, Stage, Verdict

M = TypeVar("M", bound=Message)

_BACKLOG = 1024
_ORDERS = "orders"
_NOTHING = b"-"
_ANSWER_SECONDS = 10.0
"""How long a living store may take to answer what needs no waiting."""


class StoreError(Exception):
    """The store could not be reached, or its far side is gone."""


class StoreTimeout(StoreError):
    """A key did not appear by the deadline."""


def serve_store(host: str, ports: tuple[int, int]) -> dist.TCPStore:
    """A store that listens on `host` only, on a free port of `ports` (inclusive).

    Raises `UserError` when no port is free, or when `host` is no address of this machine.
    """
    listener = _listen(host, ports)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30), master_listen_fd=listener.detach()
    )


def _listen(host: str, ports: tuple[int, int]) -> socket.socket:
    low, high = ports
    middle = (low + high) // 2  # metrics servers take ports from the bottom of the range, the learner's rendezvous from the top
    for port in [*range(middle, high + 1), *range(low, middle)]:
        listener = socket.socket(_family(host), socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            raise UserError(
                f"weight sync cannot listen on cluster.interface = {host!r} ({error.strerror or error}): "
                "set it to an address of this machine."
            ) from error
        return listener
    raise UserError(f"no port of cluster.ports = [{low}, {high}] is free for weight sync: free one or widen the range.")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The inverse of `join_address`. Raises `StoreError` for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise StoreError(f"{address!r} is no address (host:port) of a weight sender")
    return host.strip("[]"), int(port)


def local_address(towards: str) -> str:
    """The address of this machine from which `towards` (host:port) is reached: where peers can reach us too."""
    host, port = split_address(towards)
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect((host, port))
        except OSError as error:
            raise StoreError(f"no route to the weight sender at {towards}: {error.strerror or error}") from error
        return str(probe.getsockname()[0])


def connect_store(address: str, deadline: Deadline) -> dist.TCPStore:
    """A client of its own, for one thread. Raises `StoreError`, at once where nobody listens: senders listen before they publish.

    TCPStore itself would go on trying, for longer than its time-out and not without noise, so a plain connection goes first.
    """
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=max(0.001, deadline.left())).close()
        return dist.TCPStore(host, port, wait_for_workers=False, timeout=_span(deadline.left()))
    except OSError as error:
        raise StoreError(f"the weight sender at {address} cannot be reached ({error.strerror or error})") from error
    except dist.DistError as error:
        raise StoreError(f"the weight sender at {address} does not answer ({_first_line(error)})") from error


def _span(seconds: float) -> timedelta:
    return timedelta(seconds=max(0.001, seconds))  # torch takes 0 for "for ever"


def transfer_prefix(transfer: int) -> str:
    """Under which the keys of a transfer are."""
    return f"transfer/{transfer}"


class Sweeper:
    """Deletes what ended transfers left in the store, once no member can be waiting for it any more."""

    def __init__(self) -> None:
        self._ended: list[tuple[Deadline, tuple[str, ...]]] = []
        self._lock = threading.Lock()

    def ended(self, deadline: Deadline, *prefixes: str) -> None:
        """Keys under `prefixes` may go after `deadline`."""
        with self._lock:
            self._ended.append((deadline, prefixes))

    def sweep(self, store: dist.TCPStore) -> None:
        """Delete what is due. Raises `StoreError`."""
        with self._lock:
            due = tuple(prefix for deadline, prefixes in self._ended if not deadline.left() for prefix in prefixes)
            self._ended = [one for one in self._ended if one[0].left()]
        if not due:
            return
        try:
            for key in store.list_keys():
                if key.startswith(due):
                    store.delete_key(key)
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error


def next_order(store: dist.TCPStore, source: str, deadline: Deadline) -> Transfer | None:
    """The next transfer in which `source` is to take part; None at the deadline, or when it was woken. Raises `StoreError`."""
    try:
        store.set_timeout(_span(deadline.left()))
        order = store.queue_pop(f"{_ORDERS}/{source}")
        return wire.decode(order, SendWeights).transfer if order != _NOTHING else None
    except dist.DistStoreError:
        return None
    except dist.DistError as error:
        raise StoreError(_gone(error)) from error
    finally:
        store.set_timeout(_span(_ANSWER_SECONDS))


def wake(store: dist.TCPStore, source: str) -> None:
    """End the wait of a source for its next order. Raises `StoreError`."""
    try:
        store.queue_push(f"{_ORDERS}/{source}", _NOTHING.decode())
    except dist.DistError as error:
        raise StoreError(_gone(error)) from error


class Channel:
    """One member's (or the sender's) view of transfer number `transfer`. All methods raise `StoreError`."""

    def __init__(self, store: dist.TCPStore, transfer: int) -> None:
        self._store = store
        self._prefix = transfer_prefix(transfer)

    # --- the sender's side ------------------------------------------------------------------------------------------

    def announce(self, head: Head) -> None:
        self._set("head", head)

    def order(self, source: str, transfer: Transfer) -> None:
        """Tell another source to take part."""
        try:
            self._store.queue_push(f"{_ORDERS}/{source}", wire.encode(SendWeights(transfer)))
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error

    def decide(self, key: str, verdict: Verdict) -> None:
        """Post the verdict "go" or "commit"."""
        self._set(key, verdict)

    def next_report(self, deadline: Deadline) -> Report | None:
        """The next report of any member, about any stage; None at the deadline."""
        try:
            self._store.set_timeout(_span(deadline.left()))
            key = self._store.queue_pop(f"{self._prefix}/bell").decode()
        except dist.DistStoreError:
            return None
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error
        finally:
            self._store.set_timeout(_span(_ANSWER_SECONDS))
        return self._get(key, Report)

    def report_of(self, member: str, stage: Stage) -> Report | None:
        """What `member` reported about `stage`, if anything."""
        key = f"{stage}/{member}"
        return self._get(key, Report) if self._has(key) else None

    def joined(self, member: str) -> str:
        """Where `member` joined from, or "" if it never did."""
        key = f"{self._prefix}/joined/{member}"
        return self._store.get(key).decode() if self._has(f"joined/{member}") else ""

    # --- a member's side --------------------------------------------------------------------------------------------

    def join(self, member: str, where: str) -> None:
        """Announce a member by name before anything else."""
        try:
            self._store.set(f"{self._prefix}/joined/{member}", where)
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error

    def head(self, deadline: Deadline) -> Head:
        return self._await("head", Head, deadline)

    def verdict(self, key: str, deadline: Deadline) -> Verdict:
        """Wait for the sender's "go" or "commit"."""
        return self._await(key, Verdict, deadline)

    def report(self, report: Report) -> None:
        key = f"{report.stage}/{report.member}"
        self._set(key, report)
        try:
            self._store.queue_push(f"{self._prefix}/bell", key)
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error

    # --- both -------------------------------------------------------------------------------------------------------

    def _set(self, key: str, message: Message) -> None:
        try:
            self._store.set(f"{self._prefix}/{key}", wire.encode(message))
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([f"{self._prefix}/{key}"]))
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error

    def _await(self, key: str, kind: type[M], deadline: Deadline) -> M:
        try:
            self._store.wait([f"{self._prefix}/{key}"], _span(deadline.left()))
        except dist.DistStoreError as error:
            raise StoreTimeout(f"the sender's {key!r} did not come by the deadline") from error
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error
        return self._get(key, kind)

    def _get(self, key: str, kind: type[M]) -> M:
        try:
            return wire.decode(self._store.get(f"{self._prefix}/{key}"), kind)
        except dist.DistError as error:
            raise StoreError(_gone(error)) from error


def _gone(error: BaseException) -> str:
    return f"the store of the weight sender is gone ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:120]
