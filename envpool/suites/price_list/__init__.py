"""A shop's price list behind tools that are called as a language model calls them: see `suite`."""

from envpool.suites.price_list.suite import PriceListArgs, PriceListSuite, build

__all__ = ["PriceListArgs", "PriceListSuite", "build"]
