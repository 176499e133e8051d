"""What rows of published tables come to: each claim beside what was reproduced, Segue's best arm beside the best published one.

Pure: arms that were played in, the document of results.json and rows of text out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.paper_rows import Played, Row
from benchmarks.virtual.published import Claim, PaperArm

ENOUGH = 1.15
"""How much faster than the best published arm Segue's best one should be."""
TIE = 0.01
"""Arms whose steps differ by less than this share are equally fast: both are bound by training, say."""

NOT_PLAYED: dict[str, Any] = {
    "name": "areal_age_quality",
    "table": "P4",
    "row": "age bound against AIME24 and AIME25",
    "source": "AReaL, blog/AReaL_v0_3.md (table 3), arXiv 2505.24298: naive and decoupled PPO, bounds of 0 to 16 and none.",
    "reason": "What a model learns is not simulated; python -m benchmarks.learning has the same ablation in small, for real.",
}
"""The row that no simulation has."""


def row_document(row: Row, played: Mapping[str, Played]) -> dict[str, Any]:
    """A row as results.json has it, from all of its arms."""
    paper, scenario, config = row.paper, row.world.scenario, row.world.config
    slowest = max(played[arm.name].step_seconds for arm in paper.arms if arm.kind == "published")
    return {
        "name": row.name,
        "table": paper.table,
        "row": paper.row,
        "about": scenario.about,
        "source": scenario.source,
        "assumptions": list(scenario.assumptions),
        "bound": paper.bound,
        "scale": paper.scale,
        "scale_why": paper.scale_why,
        "batch_groups": config.batch.groups,
        "group_size": config.group.size,
        "arms": {arm.name: _arm(arm, played[arm.name], slowest) for arm in paper.arms},
        "claims": [_claim(claim, played) for claim in paper.claims],
        "order": _order(paper.order, played) if paper.order else None,
        "best": best(row, played),
    }


def reproduced(claim: Claim, played: Mapping[str, Played]) -> float:
    """The claim's figure, as played."""
    of = played[claim.of]
    if claim.measure == "speedup":
        return played[claim.over].step_seconds / of.step_seconds
    return {"start_age": of.start_age, "mean_length": of.mean_length, "longest_length": of.longest_length}[claim.measure]


def best(row: Row, played: Mapping[str, Played]) -> dict[str, Any]:
    """Segue's fastest arm under the published arms' bound against the fastest of these, and why it is not faster."""
    published, ours, beyond = (
        [played[arm.name] for arm in row.paper.arms if arm.kind == kind] for kind in ("published", "segue", "beyond")
    )
    theirs = min(published, key=lambda arm: arm.step_seconds)
    mine = min(ours, key=lambda arm: (round(arm.step_seconds / theirs.step_seconds / TIE), -arm.figures.tokens_per_second))
    further = min(beyond, key=lambda arm: arm.step_seconds, default=None)
    ratio = theirs.step_seconds / mine.step_seconds
    room = theirs.step_seconds / theirs.training_step_seconds if theirs.training_step_seconds else None
    return {
        "arm": mine.arm,
        "over": theirs.arm,
        "ratio": ratio,
        "tokens_ratio": mine.figures.tokens_per_second / theirs.figures.tokens_per_second,
        "room": room,
        "enough": ratio >= ENOUGH,
        "reason": "" if ratio >= ENOUGH else _why_slower(row, mine, theirs, room),
        "beyond": None
        if further is None
        else {
            "arm": further.arm,
            "bound": further.figures.staleness.bound,
            "ratio": theirs.step_seconds / further.step_seconds,
            "tokens_ratio": further.figures.tokens_per_second / theirs.figures.tokens_per_second,
        },
    }


def _why_slower(row: Row, mine: Played, theirs: Played, room: float | None) -> str:
    if room is not None and room < ENOUGH:
        return (
            f"Training alone takes {1.0 / room:.0%} of the step of {theirs.arm}: on these GPUs nothing can be more than "
            f"{room:.2f} times as fast."
        )
    idle = mine.figures.idle_share["rollout"]
    return f"{row.paper.if_slower} Rollout nodes of {mine.arm} wait {idle:.0%} of their time.".strip()


def _arm(arm: PaperArm, played: Played, slowest: float) -> dict[str, Any]:
    figures = played.figures
    return {
        "kind": arm.kind,
        "about": arm.about,
        "speedup": slowest / played.step_seconds,
        "step_seconds": played.step_seconds,
        "tokens_per_second": figures.tokens_per_second,
        "training_share": played.training_step_seconds / played.step_seconds,
        "idle_share": figures.idle_share,
        "start_age": played.start_age,
        "staleness_bound": figures.staleness.bound,
        "staleness_mean": figures.staleness.mean,
        "staleness_max": figures.staleness.max,
        "reprefill_share": figures.reprefill_share,
        "wasted_share": figures.wasted.run_share,
        "mean_length": played.mean_length,
        "longest_length": played.longest_length,
        "virtual_seconds": played.virtual_seconds,
        "cpu_seconds": played.cpu_seconds,
        "warnings": played.warnings,
        "figures": msgspec.to_builtins(figures),
    }


def _claim(claim: Claim, played: Mapping[str, Played]) -> dict[str, Any]:
    value = reproduced(claim, played)
    within = claim.within(value)
    return {
        "name": claim.name,
        "measure": claim.measure,
        "published": claim.published,
        "reproduced": value,
        "error": value - claim.published if claim.absolute else value / claim.published - 1.0,
        "tolerance": claim.tolerance,
        "absolute": claim.absolute,
        "within": within,
        "reason": "" if within else claim.if_missed,
    }


def _order(order: Sequence[str], played: Mapping[str, Played]) -> dict[str, Any]:
    seconds = [played[name].step_seconds for name in order]
    pairs = list(itertools.pairwise(seconds))
    return {
        "from_slow_to_fast": list(order),
        "holds": all(later <= min(seconds[:i]) * (1.0 + TIE) for i, later in enumerate(seconds) if i),
        "ties": sum(abs(later / earlier - 1.0) <= TIE for earlier, later in pairs),
    }


# --- rows of text -----------------------------------------------------------------------------------------------------------

HEADINGS = (
    "table",
    "row",
    "figure",
    "published",
    "reproduced",
    "within tolerance",
    "Segue's best, same bound",
    "over best published",
)


def table(documents: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One line per claim; Segue's best stands beside the first of a row. Without headings."""
    lines: list[list[str]] = []
    for row in documents:
        if "claims" not in row:
            lines.append([row["table"], row["row"], "quality", "13 runs", "–", "no: not simulated", "–", "–"])
            continue
        for i, claim in enumerate(row["claims"]):
            head = [row["table"], row["row"]] if i == 0 else ["", ""]
            lines.append(
                [*head, claim["name"], number(claim["published"]), number(claim["reproduced"]), verdict(claim), *_ours(row, i)]
            )
        if row["order"] is not None:
            lines.append(["", "", "order of the published arms", "", "", _order_text(row["order"]), "", ""])
    return lines


def verdict(claim: Mapping[str, Any]) -> str:
    """Whether a claim is within its tolerance, and by how much it is off."""
    off = f"{claim['error']:+.2f}" if claim["absolute"] else f"{claim['error']:+.1%}"
    return f"{'yes' if claim['within'] else 'NO'} ({off})"


def reasons(row: Mapping[str, Any]) -> list[str]:
    """Why claims of a row are not matched, and why Segue is not faster."""
    if "claims" not in row:
        return [row["reason"]]
    missed = [
        f"{claim['name']}: {claim['reason'] or 'NOT MATCHED, and no reason is known'}"
        for claim in row["claims"]
        if not claim["within"]
    ]
    slower = [] if row["best"]["enough"] else [f"{row['best']['arm']} is not {ENOUGH:g} times as fast: {row['best']['reason']}"]
    further = row["best"]["beyond"]
    if further is not None:
        slower.append(
            f"With a bound of {further['bound']} in place of {row['bound']}, {further['arm']} is {further['ratio']:.2f} times as "
            f"fast ({further['tokens_ratio']:.2f} in trained tokens per second)."
        )
    return missed + slower


def unexplained(documents: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a claim is not matched without a reason, or the published arms do not keep their order."""
    missed = any(not claim["within"] and not claim["reason"] for row in documents for claim in row.get("claims", ()))
    return missed or any(not row["order"]["holds"] for row in documents if row.get("order"))


def number(value: float) -> str:
    """A published or reproduced figure: two decimals, or whole numbers where it is a length."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.2f}"


def _ours(row: Mapping[str, Any], i: int) -> list[str]:
    if i:
        return ["", ""]
    ours = row["best"]
    return [ours["arm"], f"{ours['ratio']:.2f} ({ours['tokens_ratio']:.2f} in tokens/s)"]


def _order_text(order: Mapping[str, Any]) -> str:
    ties = f" ({order['ties']} tied)" if order["ties"] else ""
    return f"{'yes' if order['holds'] else 'NO'}{ties}"
