"""Questions about real facts that need two look-ups and a calculation: see `suite`."""

from envpool.suites.search_qa.suite import SearchQAArgs, SearchQASuite, build

__all__ = ["SearchQAArgs", "SearchQASuite", "build"]
