"""A small inference engine on torch: continuous batching over slots, for laptops, tests and the quickstart."""

from rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
