"""Asks the processes of a run for their metrics, over HTTP, where `metrics/targets/*.json` says that they are.

Waits for: each answer, its last byte included, at most `seconds`. A process that does not answer is an `OSError`, raised or
handed back.
"""

from __future__ import annotations

import http
import http.client
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.errors import UserError
from segue.metrics.samples import Samples, Scrape, read_exposition
from segue.rundir import RunDir

SCRAPE_SECONDS = 5.0
AT_ONCE = 32
"""Questions under way: a run of a hundred nodes is asked in a few rounds."""
_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
ANSWER_BYTES = 16 << 20
"""What answers with more is no process of a run: the metrics of a large one are some hundred kilobytes."""
_PIECE = 1 << 16


class _Timely(socket.socket):
    """Receives until `deadline` (`time.monotonic`). A socket's own timeout begins anew with every byte that comes."""

    deadline = 0.0

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("timed out")
        self.settimeout(left)
        return super().recv_into(*args, **kwargs)


class _Connection(http.client.HTTPConnection):
    """One question, whose timeout is over all of it."""

    def connect(self) -> None:
        seconds = self.timeout
        assert seconds is not None
        deadline = time.monotonic() + seconds
        super().connect()
        self.sock = _Timely(fileno=self.sock.detach())
        self.sock.settimeout(seconds)
        self.sock.deadline = deadline


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


def _direct() -> urllib.request.OpenerDirector:
    """HTTP alone: no `http_proxy` (a run's processes are on its own hosts, which a proxy for the world outside often cannot
    reach), no redirections (each would have a timeout of its own), and an answer that says no is an answer."""
    opener = urllib.request.OpenerDirector()
    for handler in (_Handler(), urllib.request.UnknownHandler()):
        opener.add_handler(handler)
    return opener


_DIRECT = _direct()


@dataclass(frozen=True)
class Target:
    """A process that serves metrics: its name, for instance "rollout-0", host:port, and what its host calls itself, if known."""

    name: str
    address: str
    node: str = ""


def targets(run: RunDir) -> list[Target]:
    """The targets of a run as it is now, by name. Raises `UserError` for a file that is none."""
    found = []
    for file in sorted(run.targets.glob("*.json")):
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))
            found += [
                Target(file.stem, _checked(address), str(dict(entry.get("labels") or {}).get("node", "")))
                for entry in entries
                for address in entry["targets"]
            ]
        except FileNotFoundError:
            continue  # withdrawn in between
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{file} cannot be read as a target of the run ({error}): remove it.") from None
    return found


def _checked(address: str) -> str:
    """host:port as it is. Raises `ValueError` or `TypeError` for what is none."""
    found = _ADDRESS.fullmatch(address)
    if not found or not 0 < int(found[1]) < 65536:
        raise ValueError(f"{address!r} is no host:port")
    return address


def hosts_of(there: Sequence[Target]) -> dict[str, str]:
    """The host of each target by the target's name, where there are several hosts; {} for a run on one. What a host calls itself
    if no two call themselves the same, else its address."""
    hosts = {target.name: target.address.rpartition(":")[0] for target in there}
    names = {hosts[target.name]: target.node for target in there}
    if len(names) < 2:
        return {}
    told = len({*names.values()}) == len(names) and all(names.values())
    return {name: names[host] if told else host for name, host in hosts.items()}


def get(url: str, seconds: float = SCRAPE_SECONDS, well: bool = False) -> str:
    """The text behind a URL, whole within `seconds` and `ANSWER_BYTES`; no proxy is asked.

    Raises `OSError`, also where the answer says no (as `/health` of a process that is not well does) if it must be `well`, and
    `ValueError` for what is no URL.
    """
    try:
        with _DIRECT.open(url, timeout=seconds) as answer:
            if well and answer.status != http.HTTPStatus.OK:
                raise OSError(f"the answer is {answer.status} {answer.reason}")
            return _body(answer).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"no answer in HTTP: {error!r}") from error


def _body(answer: http.client.HTTPResponse) -> bytes:
    """All of it. Raises `OSError` if it is too much, `IncompleteRead` if it ends before its Content-Length."""
    body = bytearray()
    while piece := answer.read(_PIECE):
        body += piece
        if len(body) > ANSWER_BYTES:
            raise OSError(f"it answers with more than {ANSWER_BYTES >> 20} MB")
    if answer.length:  # `read` of a given size does not complain
        raise http.client.IncompleteRead(bytes(body[:_PIECE]), answer.length)
    return bytes(body)


def samples_of(address: str, seconds: float = SCRAPE_SECONDS) -> Samples:
    """What the process at `address` exports. Raises `OSError`."""
    try:
        return read_exposition(get(f"http://{address}/metrics", seconds))
    except ValueError as error:
        raise OSError("what answers there serves no metrics") from error


def scrape(run: Path) -> Scrape:
    """Ask every target of a run now. Raises `OSError` when one does not answer, `UserError` if there is no such run."""
    return {target.name: samples_of(target.address) for target in targets(RunDir.open(run))}


class Scraper:
    """Asks the targets of one run again and again, all at once; those that do not answer are told with the reason.

    An address is believed once `/health` there has named this run and that process: a crashed run leaves its targets, and
    another run may have taken their ports since.
    """

    def __init__(self, run: RunDir, seconds: float) -> None:
        self._run = run
        self._seconds = seconds
        self._known: set[Target] = set()
        self.hosts: Mapping[str, str] = {}
        """`hosts_of` the targets of the last `ask`."""

    def ask(self) -> tuple[dict[str, Samples], dict[str, str]]:
        """Samples of the targets that answered, and why the others did not, by name."""
        there = targets(self._run)
        self.hosts = hosts_of(there)
        pool = ThreadPoolExecutor(max(1, min(AT_ONCE, len(there))), "scrape")
        try:
            answers = list(pool.map(self._one, there))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for who does not answer
        return _sorted(there, answers)

    def _one(self, target: Target) -> Samples | OSError:
        try:
            if target not in self._known:
                self._check(target)
            samples = samples_of(target.address, self._seconds)
        except OSError as error:
            self._known.discard(target)
            return error
        self._known.add(target)
        return samples

    def _check(self, target: Target) -> None:
        try:
            health = json.loads(get(f"http://{target.address}/health", self._seconds))
            who = (health["run"], f"{health['role']}-{health['rank']}")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OSError("something else answers there") from None
        if who != (self._run.name, target.name):
            raise OSError(f"{who[1]} of run {who[0]} answers there")


def _sorted(there: Sequence[Target], answers: Sequence[Samples | OSError]) -> tuple[dict[str, Samples], dict[str, str]]:
    answered: dict[str, Samples] = {}
    silent: dict[str, str] = {}
    for target, answer in zip(there, answers, strict=True):
        if isinstance(answer, OSError):
            silent[target.name] = _reason(answer)
        else:
            answered[target.name] = answer
    return answered, silent


def _reason(error: OSError) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    return (inner.strerror or str(inner)) if isinstance(inner, OSError) else str(inner)
