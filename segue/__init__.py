"""The language all roles of Segue speak; see docs/design.md §2."""

__version__ = "0.1.0"
