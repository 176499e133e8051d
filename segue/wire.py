"""MessagePack with a schema version: the only thing that crosses a process border.

A message is a `Message` subclass (a frozen msgspec struct, whose types are checked when it is decoded). Its bytes are

    magic "SG" · schema version (u8) · CRC-32 of the body (u32, little endian) · body

where body is the MessagePack array `[kind, fields]`. Arrays travel as `[dtype, shape, raw little-endian bytes]`; nothing is
ever pickled. Whatever is wrong with the bytes raises one of the typed errors below, never anything else.
"""

from __future__ import annotations

import functools
import struct
import zlib
from typing import Any, ClassVar, TypeVar

import msgpack
import msgspec
import numpy as np

from segue.errors import WireError

SCHEMA_VERSION = 1
_MAGIC = b"SG"
_HEADER = struct.Struct("<2sBI")
_DTYPES = ("<i4", "<i8", "<f4", "<f8", "|u1", "|i1", "<u4", "<i2", "<u2", "|b1")
_SIZES = {name: np.dtype(name).itemsize for name in _DTYPES}


class TruncatedMessage(WireError):
    """Fewer bytes than a header, or a body cut short."""


class CorruptMessage(WireError):
    """Not ours, or changed on the way: bad magic, bad checksum, undecodable body."""


class UnknownVersion(WireError):
    """Written by another version of the schema."""


class UnknownMessage(WireError):
    """A well-formed message of a kind that was not expected here, or with fields of the wrong type."""


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of everything that crosses a border. Subclasses are frozen; `kind` defaults to the class name.

    A subclass that is a member of a union inside another message sets `tag=True` in its class statement.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = cls.__name__


M = TypeVar("M", bound=Message)


def pack_array(array: np.ndarray[Any, Any]) -> list[Any]:
    """`[dtype, shape, raw little-endian bytes]` of an array of numbers; any other dtype is a programmer's mistake."""
    dtype = array.dtype.str
    if dtype in _SIZES:  # what nearly all are: little-endian already
        return [dtype, list(array.shape), array.tobytes()]
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    assert little.dtype.str in _DTYPES, f"dtype {array.dtype} does not travel"
    return [little.dtype.str, list(array.shape), np.ascontiguousarray(little).tobytes()]


def unpack_array(value: Any) -> np.ndarray[Any, Any]:
    """The inverse of `pack_array`. Raises ValueError on anything else. The result is a read-only view of the bytes."""
    if not (isinstance(value, (list, tuple)) and len(value) == 3 and isinstance(value[2], bytes)):
        raise ValueError("expected an array [dtype, shape, bytes]")
    dtype, shape, raw = value
    size = _SIZES.get(dtype) if isinstance(dtype, str) else None
    if size and isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and shape[0] * size == len(raw):
        return np.frombuffer(raw, dtype=dtype)  # what nearly all are
    if dtype not in _DTYPES or not isinstance(shape, (list, tuple)) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"bad array header {dtype!r} {shape!r}")
    count = 1
    for n in shape:
        count *= n
    if count * np.dtype(dtype).itemsize != len(raw):
        raise ValueError(f"array of shape {shape} and dtype {dtype} does not fit {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return pack_array(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not travel")


def _decode_hook(kind: Any, value: Any) -> Any:
    if kind is np.ndarray or getattr(kind, "__origin__", None) is np.ndarray:
        return unpack_array(value)
    raise TypeError(f"{kind} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    try:
        body = _encoder.encode((type(message).kind, message))
    except UnicodeEncodeError:  # the text of a user's task may hold lone surrogates, as JSON allows
        fields = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_encode_hook)
        body = msgpack.packb([type(message).kind, fields], use_bin_type=True, unicode_errors="surrogatepass")
    return _HEADER.pack(_MAGIC, SCHEMA_VERSION, zlib.crc32(body)) + body


def decode(data: bytes, kind: type[M]) -> M:
    """The message in `data`, which must be of class `kind`. Raises a `WireError` subclass, and only that."""
    body = _checked_body(data)
    try:
        name, message = _decoder(kind).decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return _decode_slowly(body, kind)
    if name != kind.kind:
        raise UnknownMessage(f"expected a {kind.kind} and got a {name!r}")
    assert isinstance(message, kind)
    return message


@functools.cache
def _decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(tuple[str, kind], dec_hook=_decode_hook)  # type: ignore[valid-type]


def _decode_slowly(body: bytes, kind: type[M]) -> M:
    """In two steps, which tell what is wrong; and for lone surrogates, which the fast way does not read."""
    try:
        name, fields = msgpack.unpackb(body, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
    except Exception as error:  # msgpack raises a family of unrelated classes
        raise CorruptMessage(f"the body of a message does not decode: {error}") from error
    if name != kind.kind:
        raise UnknownMessage(f"expected a {kind.kind} and got a {name!r}")
    try:
        return msgspec.convert(fields, kind, dec_hook=_decode_hook, builtin_types=(bytes,))
    except (msgspec.ValidationError, TypeError) as error:
        raise UnknownMessage(f"a {kind.kind} with wrong fields: {error}") from error


def _checked_body(data: bytes) -> bytes:
    if len(data) < _HEADER.size:
        raise TruncatedMessage(f"a message of {len(data)} bytes is shorter than its header")
    magic, version, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptMessage("these bytes are not a Segue message")
    if version != SCHEMA_VERSION:
        raise UnknownVersion(
            f"a message of schema version {version} reached a Segue that speaks version {SCHEMA_VERSION}: "
            "run the same Segue on all nodes"
        )
    body = data[_HEADER.size :]
    if zlib.crc32(body) != checksum:
        raise CorruptMessage("the checksum of a message does not match: it was cut short or changed on the way")
    return body
