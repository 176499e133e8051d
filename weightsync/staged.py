"""Weights that have fully arrived."""

from __future__ import annotations

import torch

from segue.ports.weights import Manifest
from weightsync.buckets import unpack
from weightsync.manifest import Layout, ManifestMismatch, tied_in_model_only


class Staged:
    """Implements `segue.ports.weights.StagedWeights`: buffers that nobody writes again, freed with the last view of them."""

    def __init__(self, version: int, manifest: Manifest, buckets: list[torch.Tensor]) -> None:
        assert len(manifest.checksums) == len(manifest.buckets)
        self.version = version
        self.manifest = manifest
        self._tensors = unpack(manifest, buckets)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, tied names included."""
        return dict(self._tensors)


def check_ties(manifest: Manifest, expected: Layout | None, buckets: list[torch.Tensor]) -> None:
    """Where the model ties two names that were sent apart, loading keeps whichever came last: refuse unless they are equal.

    Raises `ManifestMismatch`.
    """
    pairs = tied_in_model_only(manifest, expected) if expected is not None else []
    if not pairs:
        return
    tensors = unpack(manifest, buckets)
    for name, alias in pairs:
        if not torch.equal(tensors[name], tensors[alias]):
            raise ManifestMismatch(f"the model ties {alias} to {name}, and the sender sent different values for them")
