"""The learner: advantages, corrections, losses, packing, training, checkpoints (docs/design.md §8)."""
