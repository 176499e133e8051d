"""What is sent and in which order: tensor specs, tied names, the bucket plan, and whether a manifest fits a model.

Nothing here touches tensor data or does I/O. Names go in *layer order*: components between dots compare as numbers where they are
numbers, so the tensors of a layer are neighbours and layer 10 follows layer 9, whatever order a state dict had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from segue.ports.weights import Manifest, Probe, TensorSpec
from segue.trajectory import NO_VERSION

FULL = "full"
KINDS = (FULL, "adapter", "delta")
"""Kinds of a manifest; only "full" can be sent and loaded so far."""

ALIGNMENT = 64
"""Bytes: every tensor starts at a multiple of it in its bucket, so that it can be viewed as any dtype, copied in wide words."""

_NAMED_IN_ERRORS = 3


class ManifestMismatch(ValueError):
    """A manifest that does not fit: one sentence that says what differs."""


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in layer order, each tied tensor once. `aliases` maps its other names to the one in `tensors`."""

    tensors: list[TensorSpec]
    aliases: dict[str, str] = field(default_factory=dict)

    def names(self) -> set[str]:
        """All names, tied ones included."""
        return {spec.name for spec in self.tensors} | self.aliases.keys()


def layout(named: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Layout:
    """The layout of named tensors (real or on the meta device). `dtype`: what floating-point tensors are sent as.

    Tensors that are the same view of the same storage are tied; the name that comes first in `named` is the one that is sent.
    """
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    specs: list[TensorSpec] = []
    for name, tensor in named.items():
        owner = first.setdefault(_identity(name, tensor), name)
        if owner != name:
            aliases[name] = owner
            continue
        kind = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        specs.append(TensorSpec(name, list(tensor.shape), str(kind).removeprefix("torch.")))
    specs.sort(key=lambda spec: _layer_order(spec.name))
    return Layout(specs, dict(sorted(aliases.items())))


def _identity(name: str, tensor: torch.Tensor) -> object:
    if tensor.numel() == 0:
        return name  # empty tensors share nothing
    storage = tensor.untyped_storage()
    where = storage.data_ptr() or storage._cdata  # on the meta device there is no data, only the storage object
    return (str(tensor.device), where, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _layer_order(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called `name` (without "torch."). Raises `ManifestMismatch` for any other word."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestMismatch(f"a manifest names the dtype {name!r}, which this torch ({torch.__version__}) does not have")
    return dtype


def nbytes(spec: TensorSpec) -> int:
    """Bytes of one tensor."""
    size: int = math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize
    return size


def aligned(size: int) -> int:
    """`size` rounded up to the next tensor's start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan(tensors: Sequence[TensorSpec], bucket_bytes: int) -> list[list[int]]:
    """Fill buckets of at most `bucket_bytes` in order; a tensor larger than that gets a bucket of its own."""
    assert bucket_bytes > 0, bucket_bytes
    buckets: list[list[int]] = []
    filled = 0
    for index, spec in enumerate(tensors):
        size = aligned(nbytes(spec))
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def build_manifest(model: str, step: int, what: Layout, bucket_bytes: int, probe: Probe | None = None) -> Manifest:
    """The manifest of the full weights of `step`; its checksums are added once the bytes are known (`with_checksums`)."""
    buckets = plan(what.tensors, bucket_bytes)
    return Manifest(
        what=FULL,
        model=model,
        base=NO_VERSION,
        step=step,
        tensors=what.tensors,
        buckets=buckets,
        checksums=[],
        aliases=what.aliases,
        probe=probe,
    )


def with_checksums(manifest: Manifest, checksums: Sequence[int]) -> Manifest:
    """The manifest with one CRC-32 per bucket."""
    assert len(checksums) == len(manifest.buckets)
    return msgspec.structs.replace(manifest, checksums=list(checksums))


def bucket_offsets(manifest: Manifest, bucket: int) -> tuple[list[int], int]:
    """Where each tensor of a bucket starts, in bytes, and how long the bucket is."""
    offsets: list[int] = []
    end = 0
    for index in manifest.buckets[bucket]:
        offsets.append(end)
        end += aligned(nbytes(manifest.tensors[index]))
    return offsets, end


def payload_bytes(manifest: Manifest) -> int:
    """Bytes of all buckets, padding included: what one member receives."""
    return sum(bucket_offsets(manifest, bucket)[1] for bucket in range(len(manifest.buckets)))


def check_manifest(manifest: Manifest, model: str, expected: Layout | None) -> None:
    """Refuse what cannot be loaded, before the first byte is sent.

    Refused are: a kind other than "full", another model's weights, an inconsistent bucket plan, and, where the model's own
    layout is known (`expected`), names that are missing or too many, and shapes or dtypes that differ. Raises `ManifestMismatch`.
    """
    if manifest.what != FULL:
        known = f"weights of kind {manifest.what!r}" if manifest.what in KINDS else f"the unknown kind {manifest.what!r}"
        raise ManifestMismatch(f"the sender announces {known}, and this receiver loads only {FULL!r} weights")
    if manifest.model != model:
        raise ManifestMismatch(f"the sender announces weights of the model {manifest.model!r}, and this receiver holds {model!r}")
    _check_plan(manifest)
    if expected is not None:
        _check_names(manifest, expected)
        _check_shapes(manifest, expected)


def _check_plan(manifest: Manifest) -> None:
    names = [spec.name for spec in manifest.tensors]
    if len(set(names)) != len(names) or manifest.aliases.keys() & set(names):
        raise ManifestMismatch("the manifest names a tensor twice")
    if not set(manifest.aliases.values()) <= set(names):
        raise ManifestMismatch("the manifest ties a name to a tensor that it does not list")
    if [index for bucket in manifest.buckets for index in bucket] != list(range(len(names))) or not all(manifest.buckets):
        raise ManifestMismatch("the buckets of the manifest do not hold each of its tensors once, in order")
    probe = manifest.probe
    if probe is not None and not 1 <= len(probe.logprobs) == len(probe.tokens) - 1:
        raise ManifestMismatch(
            f"the manifest's probe has {len(probe.tokens)} tokens and {len(probe.logprobs)} log-probabilities, not one fewer"
        )
    for spec in manifest.tensors:
        torch_dtype(spec.dtype)
        if any(size < 0 for size in spec.shape):
            raise ManifestMismatch(f"the manifest gives {spec.name} the impossible shape {spec.shape}")


def _check_names(manifest: Manifest, expected: Layout) -> None:
    """A tied tensor is there when it is there under any of its names."""
    sent = {spec.name for spec in manifest.tensors} | manifest.aliases.keys()
    known = expected.names()
    missing = sorted(set(_canonical(known, expected)) - set(_canonical(sent & known, expected)), key=_layer_order)
    if missing:
        raise ManifestMismatch(f"the manifest lacks {_some(missing)} of the model")
    of_sent = Layout(manifest.tensors, manifest.aliases)
    extra = sorted(set(_canonical(sent, of_sent)) - set(_canonical(sent & known, of_sent)), key=_layer_order)
    if extra:
        raise ManifestMismatch(f"the manifest has {_some(extra)}, which the model does not have")


def _canonical(names: set[str], what: Layout) -> list[str]:
    return [what.aliases.get(name, name) for name in names]


def _check_shapes(manifest: Manifest, expected: Layout) -> None:
    ours = {spec.name: spec for spec in expected.tensors}
    ours |= {alias: ours[name] for alias, name in expected.aliases.items()}
    theirs = {spec.name: spec for spec in manifest.tensors}
    theirs |= {alias: theirs[name] for alias, name in manifest.aliases.items()}
    wrong = [
        f"{name} as {_kind(theirs[name])} where the model has {_kind(ours[name])}"
        for name in sorted(theirs.keys() & ours.keys(), key=_layer_order)
        if _kind(theirs[name]) != _kind(ours[name])
    ]
    if wrong:
        raise ManifestMismatch(f"the manifest gives {_some(wrong)}")


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _some(items: Sequence[str]) -> str:
    shown = ", ".join(items[:_NAMED_IN_ERRORS])
    left = len(items) - _NAMED_IN_ERRORS
    return f"{shown} and {left} more" if left > 0 else shown


def tied_in_model_only(manifest: Manifest, expected: Layout) -> list[tuple[str, str]]:
    """Pairs of names that the model ties and the sender sends as two tensors: they can be loaded only if they are equal."""
    sent = {spec.name for spec in manifest.tensors}
    return [(name, alias) for alias, name in expected.aliases.items() if alias in sent and name in sent]
