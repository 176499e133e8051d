"""Weights from the learner to the rollout nodes: manifests, buckets, broadcast (docs/design.md §9)."""
