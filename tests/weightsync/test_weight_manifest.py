"""Manifests: layer order, tied names, the bucket plan, and every way in which one can fail to fit."""

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue import wire
from segue.ports.weights import Manifest, Probe, TensorSpec
from weightsync.manifest import (
    ALIGNMENT,
    Layout,
    ManifestMismatch,
    bucket_offsets,
    build_manifest,
    check_manifest,
    layout,
    payload_bytes,
    plan,
    tied_in_model_only,
    with_checksums,
)

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int8", "bool", "uint8", "float8_e4m3fn")

specs = st.lists(
    st.builds(
        TensorSpec,
        st.text("abc.123", min_size=1, max_size=8),
        st.lists(st.integers(0, 7), max_size=3),
        st.sampled_from(DTYPES),
    ),
    min_size=0,
    max_size=12,
    unique_by=lambda spec: spec.name,
)


def manifest_of(named: dict[str, torch.Tensor], bucket_bytes: int = 256) -> Manifest:
    return build_manifest("policy", 3, layout(named), bucket_bytes)


@given(tensors=specs, bucket_bytes=st.integers(1, 2000))
def test_a_plan_holds_each_tensor_once_in_order_within_the_limit(tensors: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = plan(tensors, bucket_bytes)
    assert [index for bucket in buckets for index in bucket] == list(range(len(tensors)))
    assert all(buckets)
    manifest = build_manifest("policy", 0, Layout(tensors), bucket_bytes)
    for number, bucket in enumerate(buckets):
        offsets, size = bucket_offsets(manifest, number)
        assert size <= bucket_bytes or len(bucket) == 1
        end = 0
        for index, offset in zip(bucket, offsets, strict=True):
            spec = tensors[index]
            length = math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
            assert offset % ALIGNMENT == 0 and offset >= end
            end = offset + length
        assert end <= size
    check_manifest(manifest, "policy", Layout(tensors))
    assert wire.decode(wire.encode(manifest), Manifest) == manifest


def test_no_bucket_is_left_half_empty_when_the_next_tensor_fits() -> None:
    tensors = [TensorSpec(str(i), [16], "float32") for i in range(10)]  # 64 bytes each
    assert plan(tensors, 192) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert plan([tensors[0], TensorSpec("big", [1000], "float32"), tensors[1]], 192) == [[0], [1], [2]]


def test_layer_order_is_numeric_and_keeps_a_layer_together() -> None:
    names = [
        "model.norm.weight",
        "model.layers.10.mlp.up",
        "model.layers.2.mlp.up",
        "model.layers.10.attn.q",
        "model.layers.2.attn.q",
    ]
    ordered = [spec.name for spec in layout({name: torch.zeros(1) for name in names}).tensors]
    assert ordered == [
        "model.layers.2.attn.q",
        "model.layers.2.mlp.up",
        "model.layers.10.attn.q",
        "model.layers.10.mlp.up",
        "model.norm.weight",
    ]


@given(st.permutations(["lm_head.weight", "model.layers.0.a", "model.layers.0.b", "model.layers.11.a", "model.norm"]))
def test_the_order_of_the_state_dict_does_not_matter(names: list[str]) -> None:
    sizes = {"lm_head.weight": 5, "model.layers.0.a": 1, "model.layers.0.b": 2, "model.layers.11.a": 3, "model.norm": 4}
    fixed = manifest_of({name: torch.zeros(size) for name, size in sizes.items()})
    assert manifest_of({name: torch.zeros(sizes[name]) for name in names}) == fixed


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_names_are_sent_once_and_recorded(device: str) -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(5, 4, device=device), "head": torch.nn.Linear(4, 5, bias=False, device=device)}
    )
    model["head"].weight = model["embed"].weight
    both = layout(model.state_dict())
    assert [spec.name for spec in both.tensors] == ["embed.weight"]
    assert both.aliases == {"head.weight": "embed.weight"}
    assert both.names() == {"embed.weight", "head.weight"}
    once = layout(dict(model.named_parameters()))
    assert once.tensors == both.tensors and once.aliases == {}


def test_views_of_one_storage_that_differ_are_not_tied() -> None:
    base = torch.zeros(4, 4)
    found = layout({"all": base, "row": base[0], "other_row": base[1], "turned": base.T, "empty": base[:0], "empty2": base[:0]})
    assert found.aliases == {} and len(found.tensors) == 6


def test_floating_point_tensors_are_announced_in_the_dtype_they_are_sent_as() -> None:
    found = layout({"w": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int64)}, torch.bfloat16)
    assert {spec.name: spec.dtype for spec in found.tensors} == {"w": "bfloat16", "ids": "int64"}


NAMED = {"a.0.w": torch.zeros(2, 3), "a.1.w": torch.zeros(4), "b": torch.zeros(1, dtype=torch.int64)}


def refusal(manifest: Manifest, expected: dict[str, torch.Tensor] | None = None) -> str:
    with pytest.raises(ManifestMismatch) as caught:
        check_manifest(manifest, "policy", None if expected is None else layout(expected))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_a_missing_tensor_is_named() -> None:
    sent = manifest_of({name: tensor for name, tensor in NAMED.items() if name != "a.1.w"})
    assert refusal(sent, NAMED) == "the manifest lacks a.1.w of the model"


def test_an_extra_tensor_is_named() -> None:
    assert refusal(manifest_of(NAMED | {"c": torch.zeros(1)}), NAMED) == "the manifest has c, which the model does not have"


def test_wrong_shapes_and_dtypes_are_named_with_both_sides() -> None:
    sent = manifest_of(NAMED | {"a.0.w": torch.zeros(3, 2), "b": torch.zeros(1)})
    assert refusal(sent, NAMED) == (
        "the manifest gives a.0.w as float32[3, 2] where the model has float32[2, 3], "
        "b as float32[1] where the model has int64[1]"
    )


def test_many_differences_are_counted() -> None:
    many = {f"x.{i}": torch.zeros(1) for i in range(9)}
    assert refusal(manifest_of(NAMED), NAMED | many) == "the manifest lacks x.0, x.1, x.2 and 6 more of the model"


@pytest.mark.parametrize(
    ("kind", "says"),
    [("adapter", "weights of kind 'adapter'"), ("delta", "weights of kind 'delta'"), ("zip", "the unknown kind 'zip'")],
)
def test_other_kinds_are_refused_by_name(kind: str, says: str) -> None:
    sentence = refusal(msgspec.structs.replace(manifest_of(NAMED), what=kind))
    assert says in sentence and "loads only 'full' weights" in sentence


def test_another_model_is_refused_by_name() -> None:
    assert "'critic'" in refusal(msgspec.structs.replace(manifest_of(NAMED), model="critic"))


@pytest.mark.parametrize(
    "damage",
    [
        {"buckets": [[0, 1]]},
        {"buckets": [[0, 1, 2], []]},
        {"buckets": [[1, 0, 2]]},
        {"buckets": [[0, 1, 2, 2]]},
        {"tensors": [TensorSpec("a", [1], "float32")] * 3},
        {"tensors": [TensorSpec(n, [1], "float33") for n in "abc"]},
        {"tensors": [TensorSpec(n, [1], "nn") for n in "abc"]},
        {"tensors": [TensorSpec(n, [-1], "float32") for n in "abc"]},
        {"aliases": {"head": "nowhere"}},
        {"aliases": {"b": "a.0.w"}},
        {"probe": Probe([1, 2, 3], [-1.0])},
        {"probe": Probe([1], [])},
        {"probe": Probe([], [])},
    ],
)
def test_an_inconsistent_manifest_is_refused(damage: dict[str, object]) -> None:
    refusal(msgspec.structs.replace(manifest_of(NAMED, 1 << 20), **damage))


def tied(head_first: bool = False) -> dict[str, torch.Tensor]:
    weight = torch.zeros(5, 4)
    names = ["head", "embed"] if head_first else ["embed", "head"]
    return dict.fromkeys(names, weight) | {"norm": torch.zeros(4)}


def test_tied_names_fit_under_either_name() -> None:
    """F37: whichever of the two names the sides list first, or drop, the tensor is there."""
    once = {name: tensor for name, tensor in tied().items() if name != "head"}
    for sent in (tied(), tied(head_first=True), once):
        for expected in (tied(), tied(head_first=True)):
            check_manifest(manifest_of(sent), "policy", layout(expected))
    check_manifest(manifest_of(tied()), "policy", layout(once))
    check_manifest(manifest_of(tied(head_first=True)), "policy", layout(once))


def test_a_model_that_does_not_tie_needs_both_names() -> None:
    apart = {"embed": torch.zeros(5, 4), "head": torch.zeros(5, 4), "norm": torch.zeros(4)}
    once = {name: tensor for name, tensor in tied().items() if name != "head"}
    assert refusal(manifest_of(once), apart) == "the manifest lacks head of the model"
    check_manifest(manifest_of(tied()), "policy", layout(apart))


def test_names_tied_only_in_the_model_are_found() -> None:
    apart = manifest_of({"embed": torch.zeros(5, 4), "head": torch.zeros(5, 4), "norm": torch.zeros(4)})
    check_manifest(apart, "policy", layout(tied()))
    assert tied_in_model_only(apart, layout(tied())) == [("embed", "head")]
    assert tied_in_model_only(manifest_of(tied()), layout(tied())) == []


def test_checksums_are_added_one_per_bucket() -> None:
    manifest = manifest_of(NAMED, 64)
    assert manifest.checksums == [] and len(manifest.buckets) == 3
    assert with_checksums(manifest, [7, 8, 9]).checksums == [7, 8, 9]
    assert payload_bytes(manifest) == 3 * ALIGNMENT
    with pytest.raises(AssertionError):
        with_checksums(manifest, [7])
