"""Hypothesis strategies for every message that crosses a border, built from the classes' own type hints."""

from __future__ import annotations

import enum
import importlib
import math
import pkgutil
import types
import typing
from functools import cache
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import segue.episode
import segue.ports
import segue.trajectory
from segue.wire import Message

DTYPES = ("<i4", "<i8", "<f4", "<f8", "|u1", "|i1", "<u4", "<i2", "<u2", "|b1", ">i4", ">i8", ">f4", ">f8", ">i2", ">u4")
INT64 = st.integers(-(2**63), 2**63 - 1)
JSON_LIKE = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def message_classes() -> list[type[Message]]:
    """Every `Message` subclass of the ports, the episode and the trajectory, in a fixed order."""
    modules = [segue.episode, segue.trajectory]
    for info in pkgutil.iter_modules(segue.ports.__path__):
        modules.append(importlib.import_module(f"segue.ports.{info.name}"))
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }
    return sorted(found, key=lambda kind: (kind.__module__, kind.__name__))


@cache
def strategy_for(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint as it appears in a message's fields."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return JSON_LIKE
    if hint is np.ndarray or origin is np.ndarray:
        shapes = nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
        return st.sampled_from(DTYPES).flatmap(lambda dtype: nps.arrays(np.dtype(dtype), shapes))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(strategy_for(arg) for arg in args))
    if origin is list:
        return st.lists(strategy_for(args[0]), max_size=3)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return st.lists(strategy_for(args[0]), max_size=3).map(tuple)
        return st.tuples(*(strategy_for(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(strategy_for(args[0]), strategy_for(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{name: strategy_for(hints[name]) for name in hint.__struct_fields__})
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: INT64,
        float: st.floats(),
        bool: st.booleans(),
        str: st.text(st.characters(), max_size=12),  # lone surrogates included: a user's JSON can hold them
        bytes: st.binary(max_size=16),
        type(None): st.none(),
    }
    return simple[hint]


def sample(hint: Any, salt: int = 0) -> Any:
    """One value of a type hint with some content everywhere: what is broken byte by byte in the tests."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {"key": [1, 2.5, "text", b"raw", None]}
    if hint is np.ndarray or origin is np.ndarray:
        return np.arange(salt, salt + 2, dtype=np.int32)
    if origin in (typing.Union, types.UnionType):
        return sample(args[0], salt)
    if origin is list:
        return [sample(args[0], salt), *(sample(arg, salt) for arg in typing.get_args(args[0])[1:2] if _is_union(args[0]))]
    if origin is tuple:
        return tuple(sample(arg, salt) for arg in args if arg is not Ellipsis)
    if origin is dict:
        return {sample(args[0], salt): sample(args[1], salt)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return list(hint)[salt % len(hint)]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint)
        return hint(**{name: sample(hints[name], i) for i, name in enumerate(hint.__struct_fields__)})
    return {int: 300 + salt, float: 0.5 + salt, bool: True, str: f"text{salt}", bytes: b"\x00raw", type(None): None}[hint]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def same(left: Any, right: Any) -> bool:
    """Equality of messages: arrays by type, shape and bytes, NaN equal to NaN, tuples of `Any` fields equal to lists."""
    if isinstance(left, np.ndarray):
        little = left.astype(left.dtype.newbyteorder("<"))
        return (
            isinstance(right, np.ndarray)
            and (little.dtype, little.shape) == (right.dtype, right.shape)
            and little.tobytes() == right.tobytes()
        )
    if isinstance(left, msgspec.Struct):
        fields = left.__struct_fields__
        return type(left) is type(right) and all(same(getattr(left, f), getattr(right, f)) for f in fields)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return type(left) is type(right) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, float):
        return isinstance(right, float) and (left == right or (math.isnan(left) and math.isnan(right)))
    return type(left) is type(right) and left == right
