"""What crosses a process border comes out as it went in, or as a `WireError`, and nothing else."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_strategies import DTYPES, message_classes, same, sample, strategy_for

from segue import wire
from segue.errors import WireError
from segue.ports.learner import BatchReply, Committed
from segue.ports.rollout import ExchangeReply, Orders
from segue.ports.rpc import Done, Failure
from segue.trajectory import Author, Trajectory, context

CLASSES = message_classes()
HEADER = struct.Struct("<2sBI")


def frame(body: bytes, version: int = wire.SCHEMA_VERSION) -> bytes:
    return HEADER.pack(b"SG", version, zlib.crc32(body)) + body


def example_of(kind: type[wire.Message]) -> bytes:
    """One small encoded message with content in every field."""
    return wire.encode(sample(kind))


def test_all_messages_are_found() -> None:
    names = {kind.__name__ for kind in CLASSES}
    assert {"Exchange", "Orders", "Batch", "EnvSubmit", "EnvDeliver", "Manifest", "DeltaBody", "Trajectory", "Record"} <= names
    assert len(names) == len(CLASSES), "two messages of one name would have one kind"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[wire.Message]) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy_for(kind))
    def round_trip(message: wire.Message) -> None:
        data = wire.encode(message)
        back = wire.decode(data, kind)
        assert same(message, back)
        assert wire.encode(back) == data

    round_trip()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_truncated_at_every_byte(kind: type[wire.Message]) -> None:
    data = example_of(kind)
    for length in range(len(data)):
        with pytest.raises(WireError) as caught:
            wire.decode(data[:length], kind)
        if length < HEADER.size:
            assert isinstance(caught.value, wire.TruncatedMessage)
    with pytest.raises(WireError):
        wire.decode(data + b"\0", kind)


def assert_refused(data: bytes, index: int, change: int, kind: type[wire.Message]) -> None:
    broken = bytearray(data)
    broken[index] ^= change
    with pytest.raises(WireError):
        wire.decode(bytes(broken), kind)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_changed_bit_or_byte_anywhere(kind: type[wire.Message]) -> None:
    data = example_of(kind)
    for index in range(len(data)):
        assert_refused(data, index, 1 << (index % 8), kind)
        assert_refused(data, index, 0xFF, kind)


@pytest.mark.parametrize("kind", [Orders, Trajectory])
def test_every_single_bit(kind: type[wire.Message]) -> None:
    data = example_of(kind)
    for index in range(len(data)):
        for bit in range(8):
            assert_refused(data, index, 1 << bit, kind)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_wire_error(data: bytes) -> None:
    for body in (data, frame(data)):
        with pytest.raises(WireError):
            wire.decode(body, ExchangeReply)


@settings(max_examples=100)
@given(strategy_for(Any), st.sampled_from(CLASSES))
def test_well_formed_bodies_with_wrong_fields_are_a_wire_error(fields: Any, kind: type[wire.Message]) -> None:
    """The checksum holds and MessagePack decodes, but the content is not a message of this kind."""
    data = frame(msgpack.packb([kind.kind, fields]))
    try:
        message = wire.decode(data, kind)
    except WireError:
        return
    assert isinstance(message, kind)  # an empty mapping is a whole message where no field is required
    assert isinstance(fields, dict)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb(None),
        msgpack.packb(7),
        msgpack.packb(["Done"]),
        msgpack.packb(["Done", {}, 1]),
        msgpack.packb({"Done": {}}),
        msgpack.packb([["Done"], {}]),
        msgpack.packb([b"Done", {}]),
        msgpack.packb(["Done", {}]) + b"\0",
        msgpack.packb(["Done", {}])[:-1],
        b"\x91" * 2000,
        b"\x92\xa4Done" + b"\x91" * 900 + b"\x90",
        b"\xdd\xff\xff\xff\xff",
        b"\xc7\xff\x01" + b"x" * 255,
    ],
    ids=range(15),
)
def test_bodies_that_are_no_message(body: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(frame(body), Done)


def test_each_trouble_has_its_class_and_a_sentence() -> None:
    data = wire.encode(Committed(3))
    with pytest.raises(wire.TruncatedMessage, match="of 2 bytes is shorter"):
        wire.decode(data[:2], Committed)
    with pytest.raises(wire.CorruptMessage, match="not a Segue message"):
        wire.decode(b"XX" + data[2:], Committed)
    with pytest.raises(wire.CorruptMessage, match="checksum"):
        wire.decode(data[:-1], Committed)
    with pytest.raises(wire.UnknownVersion, match=r"schema version 9 .* run the same Segue on all nodes"):
        wire.decode(frame(data[HEADER.size :], version=9), Committed)
    with pytest.raises(wire.UnknownMessage, match="expected a Done and got a 'Committed'"):
        wire.decode(data, Done)
    with pytest.raises(wire.UnknownMessage, match="wrong fields"):
        wire.decode(frame(msgpack.packb(["Committed", {"step": "three"}])), Committed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_travel_as_raw_little_endian_buffers(dtype: str) -> None:
    array = np.array([[1, 0], [1, 1], [0, 1]]).astype(dtype)
    name, shape, raw = wire.pack_array(array)
    assert name[0] in "<|" and shape == [3, 2]
    assert raw == array.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    for view in (array.T, array[::-1], np.asfortranarray(array)):
        back = wire.unpack_array(wire.pack_array(view))
        assert back.dtype.byteorder in "<=|" and np.array_equal(back, view)
    assert not back.flags.writeable


@pytest.mark.parametrize(
    "array", [np.zeros(0, np.float32), np.zeros((0, 3), np.int32), np.float64(2.5).reshape(()), np.zeros((2, 0, 1))]
)
def test_empty_and_scalar_arrays_keep_their_shape(array: np.ndarray[Any, Any]) -> None:
    back = wire.unpack_array(wire.pack_array(array))
    assert back.shape == array.shape and back.dtype == array.dtype


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        ["<f4", [1]],
        ["<f4", [1], "text"],
        ["<f4", [2], b"1234"],
        ["<f4", [-1], b""],
        ["<f4", [True], b"1234"],
        ["<f4", "1", b"1234"],
        ["<f4", 1, b"1234"],
        ["|O", [1], b"12345678"],
        ["<c8", [1], b"12345678"],
        [">f4", [1], b"1234"],
        [["<f4"], [1], b"1234"],
        ["<f4", [2**40, 2**40], b""],
        ["<f4", [2**62, 4, 0], b""],
    ],
    ids=range(15),
)
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="array"):
        wire.unpack_array(value)
    log = {"tokens": value, "mask": value, "logprobs": value, "versions": value, "kv_versions": value, "segments": []}
    fields = {
        "episode": 0, "group": 0, "member": 0, "task": "", "purpose": "", "log": log, "turn_rewards": [], "outcome": "",
        "temperature": 1.0, "info": {},
    }  # fmt: skip
    with pytest.raises(wire.UnknownMessage):
        wire.decode(frame(msgpack.packb(["Trajectory", fields])), Trajectory)


def test_objects_do_not_travel() -> None:
    log = context([1], Author.USER, -1)
    broken = Trajectory(0, 0, 0, "t", "train", log, [], "", 1.0, {"a": object()})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="object does not travel"):
        wire.encode(broken)
    with pytest.raises(AssertionError, match="does not travel"):
        wire.pack_array(np.array([object()]))
    with pytest.raises(AssertionError, match="does not travel"):
        wire.pack_array(np.array(["text"]))


def test_numpy_scalars_travel_as_plain_numbers() -> None:
    number: Any = np.int64(4)
    reward: Any = np.float32(0.5)
    message = Trajectory(number, 0, 0, "t", "train", context([], Author.USER, -1), [reward], "", 1.0, {"x": number})
    back = wire.decode(wire.encode(message), Trajectory)
    assert (back.episode, back.turn_rewards, back.info) == (4, [0.5], {"x": 4.0})
    assert type(back.episode) is int and type(back.turn_rewards[0]) is float


def test_lone_surrogates_of_a_users_json_survive() -> None:
    failure = Failure("user", "ValueError", "a \ud800 text")
    assert wire.decode(wire.encode(failure), Failure) == failure


def test_a_missing_batch_is_none() -> None:
    assert wire.decode(wire.encode(BatchReply(None, "stopping")), BatchReply) == BatchReply(None, "stopping")
