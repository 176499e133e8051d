"""Rollout nodes: engines, the episode loop, chat rendering, the re-prefill ledger (docs/design.md §7)."""
