"""What the scheduler answers instead of doing what it was asked."""

from __future__ import annotations


class CallRefused(ValueError):
    """The caller reports what cannot be: it is told so, and nothing has changed. Other errors are the scheduler's own."""
