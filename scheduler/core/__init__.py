"""The scheduler's core: a pure state machine (design.md §5). Import what you need from its files; `core` puts them together."""

from scheduler.core.core import SchedulerCore

__all__ = ["SchedulerCore"]
