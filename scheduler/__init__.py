"""Pure scheduling core, trajectory queue, and the thin actor that gives them I/O (docs/design.md §5)."""
