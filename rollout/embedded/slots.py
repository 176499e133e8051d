"""Who gets which slot, what of its KV is there already, and who has to go. Pure bookkeeping: no tensor, no clock, no loop.

A slot is empty, running (a sequence decodes in it) or idle (an episode waits for its environment; its KV stays until somebody
needs the slot). KV is tagged with the weight version it was computed under: its *lineage*. A sequence reads

- its own episode's KV if that is of the sequence's lineage: then it goes on with it, also when newer weights are loaded (`keep`);
- anybody's KV of the version now loaded, if that is its lineage too: the common prefix is copied from row to row.

At most `at_once` sequences run. There may be more slots than that: then as many more episodes keep their KV while they wait.

A request that finds no free slot may take an idle one (eviction), or that of a running sequence with a higher priority number
(preemption; where there are slots enough, the other one only stops, and its KV stays). But an episode whose environment answers
at once would be evicted by a newcomer, only to come back and evict that one: each turn would cost two contexts. So an idle slot
is kept, against requests of no older group, for as many decode steps as recomputing its KV would cost: at worst that doubles the
cost of a wrong guess (the ski-rental bound). If nothing else can run, nothing is kept.

Nothing else is ever read. What remains of `tokens[: len − 1]` is prefilled; the last token is always fed by decoding. This one
rule covers first turns, later turns, forks, eviction, preemption and recomputation after an update.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.embedded.sequence import Sequence
from segue.ports.engine import Admission
from segue.trajectory import NO_VERSION

MIN_SHARED = 8
"""A prefix shorter than this is computed, not copied from another row: the copy would cost as much."""
KEEP_STEPS = 0.25
"""Decode steps for which an idle slot is kept, per token of its KV. Measured on a CPU with 32 rows: to compute a token of context
costs as much as a quarter of a step of one row."""
MAX_HOLES = 8
"""Rows of a decode batch are contiguous; one row in so many may be a hole before running rows are moved together."""


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the cache. While a sequence runs in it `tokens` is the sequence's own list and all but its last token have KV;
    else the first `kv` of `tokens` have. `parked` numbers the times a sequence ended, `keep_until` is in decode steps.
    `worthless`: no coming request is expected to be of the KV's lineage. `preempted`: its sequence was stopped for another.
    """

    row: int
    episode: int | None = None
    tokens: list[int] = field(default_factory=list)
    kv: int = 0
    version: int = NO_VERSION
    priority: int = 0
    parked: int = 0
    keep_until: float = 0.0
    worthless: bool = False
    preempted: bool = False
    sequence: Sequence | None = None

    @property
    def stored(self) -> int:
        """How many positions have KV (once the running plan is carried out)."""
        return len(self.tokens) - 1 if self.sequence is not None else self.kv

    def clear(self) -> None:
        self.episode, self.tokens, self.kv, self.version, self.sequence = None, [], 0, NO_VERSION, None
        self.worthless = self.preempted = False


@dataclass(slots=True, eq=False)
class Placement:
    """A sequence goes into a slot: positions [0, cached) are in row `source` (copy them if that is another row), positions
    [cached, len − 1) are to be prefilled. Waves are carried out in order: copies first, in the order of the plan, then prefill.
    """

    sequence: Sequence
    slot: Slot
    source: int
    cached: int
    wave: int

    @property
    def prefill(self) -> list[int]:
        return self.sequence.tokens[self.cached : -1]


@dataclass(slots=True)
class Plan:
    """`displaced` sequences lost their slots to those placed; they keep all they sampled and wait."""

    placements: list[Placement] = field(default_factory=list)
    displaced: list[Sequence] = field(default_factory=list)


def common_prefix(a: list[int], b: list[int], limit: int) -> int:
    """How many of the first `limit` tokens are the same in both."""
    high = min(len(a), len(b), limit)
    if a[:high] == b[:high]:
        return high
    low = 0
    while high - low > 1:  # a[:low] == b[:low], and not so for high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class SlotPolicy:
    """The slots of one engine and the rules of this module."""

    def __init__(self, at_once: int, idle: int = 0, keep_steps: float = KEEP_STEPS) -> None:
        """`at_once` sequences decode together; `idle` more slots hold KV alone."""
        self.slots = [Slot(row) for row in range(at_once + idle)]  # slots[i].row == i at all times
        self.preemptions = 0
        self.evictions = 0
        self._at_once = at_once
        self._keep_steps = keep_steps
        self._parked = 0
        self._step = 0
        self._lost: dict[int, tuple[str, int]] = {}  # episode → why its KV is gone, and of which version that was

    def stepped(self) -> None:
        """A decode step was taken."""
        self._step += 1

    def _free(self, slot: Slot, running: bool) -> bool:
        """May anybody have this idle slot?"""
        return slot.episode is None or slot.worthless or not running or slot.keep_until <= self._step

    def can_place(self, waiting: list[Sequence]) -> bool:
        """Would `admit` find a slot for one of them?"""
        idle, running = self._idle(), self.running()
        if len(running) >= self._at_once:
            highest = max(s.priority for s in running)
            return any(s.request.priority < highest for s in waiting)
        if any(self._free(s, bool(running)) for s in idle):
            return bool(waiting)
        own = {s.episode for s in idle}
        highest = max(s.priority for s in self.slots)
        return any(s.request.episode in own or s.request.priority < highest for s in waiting)

    def _idle(self) -> list[Slot]:
        return [s for s in self.slots if s.sequence is None]

    def admit(self, waiting: list[Sequence], version: int) -> Plan:
        """Give slots to as many of `waiting` as can have one, the first in order first. `version` is the one now loaded."""
        plan = Plan()
        by_slot: dict[int, Placement] = {}  # row → what this plan puts there
        wanted = {sequence.request.episode for sequence in waiting}
        for sequence in sorted(waiting, key=lambda s: s.order):
            slot = self._choose(sequence, wanted, plan)
            if slot is None:
                continue  # whoever comes later can displace no more than this one, but may have a slot of its own
            placement = self._place(sequence, slot, version, by_slot, plan)
            by_slot[slot.row] = placement
            plan.placements.append(placement)
        return plan

    def _choose(self, sequence: Sequence, wanted: set[int], plan: Plan) -> Slot | None:
        """The slot it gets: its own, an empty one, or the idle one least worth keeping. Where as many run as may, or no slot is
        free, one that runs with a higher number is stopped first."""
        priority = sequence.request.priority
        running = self.running()
        if len(running) >= self._at_once:
            return self._pick(sequence, wanted) if self._stop_last(running, priority, plan) else None
        slot = self._pick(sequence, wanted)
        if slot is None and self._stop_last(running, priority, plan):
            slot = self._pick(sequence, wanted)
        return slot

    def _pick(self, sequence: Sequence, wanted: set[int]) -> Slot | None:
        """One that is idle."""
        priority, idle = sequence.request.priority, self._idle()
        own = [s for s in idle if s.episode == sequence.request.episode]
        if own:
            return max(own, key=lambda s: s.parked)
        running = len(idle) < len(self.slots)
        free = [s for s in idle if s.priority > priority or self._free(s, running)]
        if not free:
            return None
        return min(free, key=lambda s: (s.episode is not None, not s.worthless, s.episode in wanted, -s.priority, s.parked))

    def _stop_last(self, running: list[Slot], priority: int, plan: Plan) -> bool:
        """Stop the running sequence that is last in order, if its number is above `priority`. Its KV stays where it is."""
        slot = max(running, key=lambda s: s.sequence.order if s.sequence else (0, 0))
        assert slot.sequence is not None
        if slot.sequence.request.priority <= priority:
            return False
        self.preemptions += 1
        plan.displaced.append(slot.sequence)
        slot.preempted = True
        self._rest(slot)
        return True

    def _place(self, sequence: Sequence, slot: Slot, version: int, by_slot: dict[int, Placement], plan: Plan) -> Placement:
        request = sequence.request
        limit = len(sequence.tokens) - 1
        cause, lost_version = self._lost.pop(request.episode, ("", NO_VERSION))
        cached, source, wave = 0, slot.row, 0
        if slot.sequence is None and slot.episode == request.episode:
            if slot.version == sequence.lineage:
                cause, cached = "", common_prefix(slot.tokens, sequence.tokens, min(slot.stored, limit))
            else:
                cause, lost_version = "weight_update", slot.version
        if cause and lost_version != sequence.lineage:
            cause = "weight_update"  # evicted or not, an update had made it useless
        if sequence.lineage == version:
            shared = self._shared(sequence, limit, version, by_slot)
            if shared is not None and shared[0] >= cached + MIN_SHARED:
                cached, source, wave = shared
        kept = sequence.lineage if cached else version
        self._take(sequence, slot, kept)
        sequence.admitted(Admission(context=limit, cached=cached, prefilled=limit - cached, lost=cause), kept)
        return Placement(sequence, slot, source, cached, wave)

    def _shared(self, sequence: Sequence, limit: int, version: int, by_slot: dict[int, Placement]) -> tuple[int, int, int] | None:
        """The longest prefix that some row has or will have: (length, row, wave in which to copy it), earliest wave first."""
        best: tuple[int, int, int] | None = None
        for slot in self.slots:
            if slot.version != version or slot.tokens[:MIN_SHARED] != sequence.tokens[:MIN_SHARED]:
                continue
            length = common_prefix(slot.tokens, sequence.tokens, min(slot.stored, limit))
            placed = by_slot.get(slot.row)
            # what this plan prefills there is there one wave later
            wave = 0 if placed is None else placed.wave + (length > placed.cached)
            if best is None or (-length, wave) < (-best[0], best[2]):
                best = length, slot.row, wave
        return best

    def _take(self, sequence: Sequence, slot: Slot, version: int) -> None:
        """Put the sequence into the slot; remember what that costs whose KV was there."""
        if slot.episode is not None and slot.episode != sequence.request.episode:
            why = "weight_update" if slot.worthless else "preemption" if slot.preempted else "eviction"
            self._lost[slot.episode] = (why, slot.version)
            self.evictions += why == "eviction"
        slot.episode, slot.priority = sequence.request.episode, sequence.request.priority
        slot.tokens, slot.version, slot.sequence = sequence.tokens, version, sequence
        slot.worthless = slot.preempted = False
        sequence.slot = slot

    def park(self, sequence: Sequence) -> None:
        """The sequence ended; its KV stays for the episode's next turn."""
        slot = sequence.slot
        if slot is None:
            return
        if sequence.forgotten:
            self.drop(sequence)
            return
        self._rest(slot)

    def _rest(self, slot: Slot) -> None:
        """Its sequence runs no longer; the KV stays."""
        assert slot.sequence is not None
        self._parked += 1
        slot.sequence.slot = None
        slot.kv, slot.parked, slot.sequence = slot.stored, self._parked, None
        slot.keep_until = self._step + self._keep_steps * slot.kv

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended and its KV goes, also where it was stopped and its KV stayed."""
        for slot in self.slots:
            if slot.sequence is sequence or (slot.preempted and slot.tokens is sequence.tokens):
                slot.clear()
        sequence.slot = None

    def forget(self, episode: int) -> None:
        """The episode is gone: so is its KV, at once or when its sequence ends."""
        self._lost.pop(episode, None)
        for slot in self.slots:
            if slot.episode == episode:
                if slot.sequence is None:
                    slot.clear()
                else:
                    slot.sequence.forgotten = True

    def loaded(self, kept: bool) -> None:
        """Other weights are loaded now. `kept`: requests of the older lineage will come, so its idle KV is worth keeping."""
        for slot in self.slots:
            if slot.sequence is None and slot.episode is not None:
                slot.worthless = not kept

    @property
    def busy(self) -> bool:
        """Does any sequence have a slot?"""
        return any(s.sequence is not None for s in self.slots)

    def rows(self) -> list[Sequence | None]:
        """Who is in which row, up to the last one that decodes."""
        rows = [slot.sequence for slot in self.slots]
        while rows[-1] is None:
            rows.pop()
        return rows

    def running(self) -> list[Slot]:
        return [s for s in self.slots if s.sequence is not None]

    def compact(self) -> list[tuple[int, int, int]]:
        """Move running rows together once too many holes are between them. Returns (row, other row, positions to exchange)."""
        rows = [s.row for s in self.slots if s.sequence is not None]
        count = len(rows)
        if not rows or (rows[-1] + 1 - count) * MAX_HOLES <= count:
            return []
        moves = []
        holes = (s.row for s in self.slots[:count] if s.sequence is None)
        for hole, row in zip(list(holes), [r for r in rows if r >= count], strict=True):
            a, b = self.slots[hole], self.slots[row]
            moves.append((hole, row, max(a.stored, b.stored)))
            self.slots[hole], self.slots[row] = b, a
            a.row, b.row = row, hole
        return moves
