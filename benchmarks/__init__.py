"""Benchmarks: each `python -m benchmarks.<name> [--json FILE]`, ratios measured side by side in one run."""
