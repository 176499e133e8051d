"""The table `[paper]` of a scenario: what somebody published, and by which arms it is played here."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

Measure = Literal["speedup", "start_age", "mean_length", "longest_length"]
Kind = Literal["published", "segue", "beyond"]


class PaperArm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to run the scenario.

    kind     published: an arm of the paper; segue: ours, under the paper's age bound; beyond: ours, under a looser one
    tables   over the scenario's own, for instance `{ config = { mode = "sync" } }`
    barrier  every episode of the batch waits for the slowest before each turn (benchmarks/barrier.py)
    """

    name: str
    kind: Kind
    about: str
    tables: dict[str, Any] = {}
    barrier: bool = False


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published figure.

    measure    speedup: mean step seconds of arm `over` ÷ those of arm `of`; start_age: mean age in versions, from the start of an
               episode's generation to its training, of arm `of`; mean_length, longest_length: sampled tokens per episode of `of`
    tolerance  of the reproduced figure: relative, or with `absolute` in the figure's own unit
    if_missed  why it cannot be matched, where it is not
    """

    name: str
    measure: Measure
    published: float
    of: str
    over: str = ""
    tolerance: float = 0.15
    absolute: bool = False
    if_missed: str = ""

    def within(self, reproduced: float) -> bool:
        """Whether a figure lies within the tolerance."""
        error = abs(reproduced - self.published)
        return error <= self.tolerance * (1.0 if self.absolute else self.published)


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a published table.

    table, row  where it stands in the comparison, and its name there
    bound       the age bound of the published arms; Segue's arms have the same, and "beyond" ones another
    order       the published arms from slow to fast, where the order is a result of its own
    scale       share of the published size that is played; `scale_why`: why what is compared does not depend on it
    if_slower   why no arm of Segue's is 1.15 times as fast as the best published one, where none is
    """

    table: str
    row: str
    bound: int
    arms: list[PaperArm]
    claims: list[Claim]
    order: list[str] = []
    scale: float = 1.0
    scale_why: str = ""
    if_slower: str = ""

    def fault(self) -> str:
        """What is wrong with it, as the end of a sentence that begins with the file's name; "" if nothing is."""
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            return "has two [[paper.arms]] of one name: rename one"
        if not {"published", "segue"} <= {arm.kind for arm in self.arms}:
            return "needs a [[paper.arms]] of kind 'published' and one of kind 'segue': add what is missing"
        if not self.claims:
            return "has no [[paper.claims]]: add what was published"
        if not 0.0 < self.scale <= 1.0:
            return f"sets paper.scale = {self.scale:g}: set it above 0 and to at most 1"
        if self.scale < 1.0 and not self.scale_why:
            return f"sets paper.scale = {self.scale:g} without paper.scale_why: say why the figures do not depend on it"
        if self.bound < 0:
            return f"sets paper.bound = {self.bound}: set it to 0 or more"
        for name in [*self.order, *(name for claim in self.claims for name in (claim.of, claim.over) if name)]:
            if name not in names:
                return f"names an arm {name!r} that it does not have: known are {', '.join(names)}"
        for claim in self.claims:
            if not (math.isfinite(claim.published) and claim.published > 0.0 and claim.tolerance > 0.0):
                return f"has a claim {claim.name!r} whose published figure or tolerance is not above 0: correct it"
            if (claim.measure == "speedup") != bool(claim.over):
                return f"has a claim {claim.name!r} that needs `over` for a speedup, and for nothing else: correct it"
        return ""
