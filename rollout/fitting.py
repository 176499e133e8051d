"""Fitting staged weights to a model: everything is checked before anything changes."""

from __future__ import annotations

import torch

from segue.ports.weights import Manifest, StagedWeights

Bindings = list[tuple[torch.Tensor, torch.Tensor]]
"""(the model's own tensor, the one to copy into it)"""


def bind(model: torch.nn.Module, weights: StagedWeights) -> Bindings:
    """Which staged tensor goes where. Raises `ValueError` with one sentence if they do not fit exactly (`fit`)."""
    own: dict[str, torch.Tensor] = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
    own = {**dict(model.named_buffers()), **own}
    return [(own[name], tensor) for name, tensor in fit(model, weights).items()]


def fit(model: torch.nn.Module, weights: StagedWeights) -> dict[str, torch.Tensor]:
    """The staged tensors under the names `model` (on any device, meta too) has for them, tied ones once.

    Every parameter must come, under one of its names: tied ones have several, and those that come must be equal. Buffers may
    come. Floating-point tensors of another precision are converted, as the engine's own dtype is the user's choice.
    Raises `ValueError` with one sentence if they do not fit exactly.
    """
    manifest, tensors = weights.manifest, weights.tensors()
    what = f"Weights of version {weights.version}"
    if manifest.what != "full":
        raise ValueError(f"{what} are of kind '{manifest.what}', and the engine loads only full ones: send them all.")
    specs = {spec.name: spec for spec in manifest.tensors}
    specs |= {alias: specs[name] for alias, name in manifest.aliases.items() if name in specs}
    if set(specs) != set(tensors):
        raise ValueError(f"{what} do not match their manifest ({_some(set(specs) ^ set(tensors))}): stage them again.")
    # .data: what a parameter shares with its tied twin
    own: dict[str, torch.Tensor] = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
    keys = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, buffer in model.named_buffers():
        own.setdefault(name, buffer)
        keys.setdefault(name, id(buffer))
    unknown = set(tensors) - set(own)
    if unknown:
        raise ValueError(f"{what} have tensors the engine's model lacks ({_some(unknown)}): use one model folder for all roles.")
    first = {key: name for name, key in reversed(keys.items())}
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        target, spec = own[name], specs[name]
        if list(tensor.shape) != list(target.shape) or list(spec.shape) != list(target.shape):
            raise ValueError(
                f"{what} have {name} of shape {list(tensor.shape)} where the engine's model has {list(target.shape)}: "
                "use one model folder for all roles."
            )
        if str(tensor.dtype).removeprefix("torch.") != spec.dtype or tensor.is_floating_point() != target.is_floating_point():
            raise ValueError(f"{what} have {name} as {tensor.dtype}, not as {spec.dtype} for {target.dtype}: stage them again.")
        tied = found.setdefault(keys[name], (name, tensor))
        if tied[1] is not tensor and tensor.is_meta:
            raise ValueError(f"{what} have {tied[0]} and {name} apart, which are tied in the engine's model: send them once.")
        if tied[1] is not tensor and not torch.equal(tied[1], tensor):
            raise ValueError(f"{what} have different values for {tied[0]} and {name}, which are tied in the engine's model.")
    missing = {name for name, _ in model.named_parameters() if keys[name] not in found}
    if missing:
        raise ValueError(f"{what} lack parameters of the engine's model ({_some(missing)}): send every one.")
    return {first[key]: tensor for key, (_, tensor) in found.items()}


class _Announced:
    """Weights of which the manifest alone is known."""

    def __init__(self, version: int, manifest: Manifest) -> None:
        self.version = version
        self.manifest = manifest
        self.own = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in manifest.tensors
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.own | {alias: self.own[name] for alias, name in self.manifest.aliases.items()}


def targets(model: torch.nn.Module, version: int, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The model's own tensor for each name in `manifest.tensors`, before any of them has come. Raises `ValueError` as `fit`."""
    announced = _Announced(version, manifest)
    places = {id(tensor): target for target, tensor in bind(model, announced)}
    return {name: places[id(tensor)] for name, tensor in announced.own.items()}


def _some(names: set[str]) -> str:
    """The first three names, and how many more there are."""
    first = sorted(names)[:3]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return ", ".join(first) + more
