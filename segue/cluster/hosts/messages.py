"""What the first host (the head) and each other one (a member) say to each other, over one TCP connection each.

    member                             head
    Hello (facts)                      ─► collected until all hosts are there, then compared
    ◄─ Check (a file, ports)           once the run directory is made
    Checked                            ─►
    ◄─ Join (Ray's address, token)     once Ray runs on the head; a host that comes later gets it at once
    Left (why)                         ─► its Ray ended; it joins again by itself
    Beat                               both, all the time
    ◄─ End, or Refused                 the last word

Both ends prove that they have the run's token first (`multiprocessing.connection`: HMAC, the token itself does not travel).
"""

from __future__ import annotations

import msgspec

from segue.wire import Message

BEAT_SECONDS = 5.0
SILENCE_SECONDS = 120.0
"""A connection on which nothing came for so long is over. A host may be cut off for less and go on."""


class HostFacts(msgspec.Struct, frozen=True):
    """One host as it describes itself. Versions are "" where the package is missing; `gpus` are the GPUs it may use."""

    rank: int
    name: str
    address: str
    segue: str
    python: str
    torch: str
    vllm: str
    ray: str
    cores: int
    gpus: int


class Hello(Message, frozen=True, tag=True):
    facts: HostFacts


class Check(Message, frozen=True, tag=True):
    """Look whether `files` can be read and hold these words, `folder` can be written, and how many of `ports` are free."""

    files: dict[str, str]
    folder: str
    ports: tuple[int, int]


class Checked(Message, frozen=True, tag=True):
    """`missing`: files that are not there, or are others; `unwritable`: why the folder cannot be written, or ""."""

    missing: list[str]
    unwritable: str
    free_ports: int


class Join(Message, frozen=True, tag=True):
    """Start Ray and join the one at `ray_address`, in this environment; its output goes to a file of the host's in `logs`."""

    ray_address: str
    environment: dict[str, str]
    object_store_bytes: int
    stop_seconds: float
    logs: str


class Left(Message, frozen=True, tag=True):
    """The member's Ray has ended, or the member is leaving for good."""

    why: str
    for_good: bool


class Beat(Message, frozen=True, tag=True):
    pass


class Refused(Message, frozen=True, tag=True):
    """The head does not want this member; the sentence is for whoever started it."""

    sentence: str


class End(Message, frozen=True, tag=True):
    """The run is over, with this exit code."""

    code: int


class Look(Message, frozen=True):
    """To the child that looks at the nodes of the Ray at `address` ("auto": this machine's). With a `check`, those that have the
    addresses `hosts` are asked it; else all are asked what they are."""

    address: str
    check: Check | None = None
    hosts: list[str] = []


class Looked(Message, frozen=True):
    """`sentence` says why they will not do, or is "". `ray` is the Ray's own address; `hosts` are in order, the child's first;
    `checked` are answers, in the order of the question."""

    sentence: str = ""
    ray: str = ""
    hosts: list[HostFacts] = []
    checked: list[Checked] = []


FromMember = Hello | Checked | Left | Beat
FromHead = Check | Join | Beat | Refused | End


class MemberSays(Message, frozen=True):
    """Envelope of what a member sends."""

    message: FromMember


class HeadSays(Message, frozen=True):
    """Envelope of what the head sends."""

    message: FromHead
