"""Every prefilled token has exactly one cause, and the causes sum to the engine's own count."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.ledger import Ledger
from segue.metrics.vocabulary import PREFILL_CAUSES
from segue.ports.engine import Admission, EngineCounts


class TokenModel:
    """One episode on one engine, position by position, as slowly and plainly as can be.

    For each position: is its KV here now, was it ever computed here, under an earlier lease, and if it was lost, to what?
    """

    def __init__(self, block: int, engine_tells: bool) -> None:
        self.block, self.engine_tells = block, engine_tells
        self.ledger = Ledger()
        self.expected: Counter[str] = Counter()
        self.engine_prefilled = self.engine_cached = 0
        self.tokens = self.prompt = 0
        self.kv: list[bool] = []
        self.ever_here: list[bool] = []
        self.before: list[bool] = []
        self.reason = ""
        self.lineage = 1
        self.running = False

    def start(self, prompt: int) -> None:
        self.tokens = self.prompt = prompt
        self._grow()
        self.lease = self.ledger.lease()

    def _grow(self) -> None:
        for row in (self.kv, self.ever_here, self.before):
            row.extend([False] * (self.tokens - len(row)))

    def request(self) -> None:
        self.lease.request(self.tokens, self.prompt, self.lineage)
        self._admit()
        self.running = True

    def _admit(self) -> None:
        context = self.tokens - 1
        whole = next((i for i in range(context) if not self.kv[i]), context)
        cached = whole - whole % self.block
        for position in range(cached, context):
            if self.kv[position]:
                cause = "block"
            elif self.ever_here[position]:
                cause = self.reason
            elif self.before[position]:
                cause = "migration"
            else:
                cause = "first" if position < self.prompt else "turn"
            self.expected[cause] += 1
            self.kv[position] = self.ever_here[position] = True
        self.engine_prefilled += context - cached
        self.engine_cached += cached
        lost = self.reason if self.engine_tells else ""
        self.lease.admit(Admission(context, cached, context - cached, lost, whole - cached))
        self.reason = ""

    def decode(self, n: int) -> None:
        for _ in range(n):
            self.kv[self.tokens - 1] = self.ever_here[self.tokens - 1] = True
            self.tokens += 1
            self._grow()
        self.lease.sampled(n)

    def preempt(self) -> None:
        self.kv = [False] * len(self.kv)
        self.reason = "preemption"
        self._admit()

    def end_turn(self, observation: int) -> None:
        self.running = False
        self.tokens += observation
        self._grow()

    def lose(self, reason: str, keep: int) -> None:
        """Everything behind position `keep` goes."""
        if any(self.kv[keep:]):
            self.reason = reason
        self.kv = [have and i < keep for i, have in enumerate(self.kv)]

    def update(self) -> None:
        """KV of older weights is of no use, and what was evicted before would have been of none either."""
        self.lineage += 1
        self.running = False
        self.kv = [False] * len(self.kv)
        if any(self.ever_here):
            self.reason = "weight_update"

    def migrate(self, sampled_until: int) -> None:
        """A new lease: nothing is here, and what is known to have been computed is all before the last sampled token."""
        self.running = False
        self.kv, self.ever_here = [False] * self.tokens, [False] * self.tokens
        self.before = [i < sampled_until for i in range(self.tokens)]
        self.reason = ""
        self.lease = self.ledger.lease(sampled_until)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_causes_agree_with_a_model_of_every_token(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([1, 4]), "block")
    model = TokenModel(block, engine_tells=data.draw(st.booleans(), "engine tells"))
    model.start(data.draw(st.integers(1, 12), "prompt"))
    last_sampled = 0
    for _ in range(data.draw(st.integers(1, 14))):
        if model.running:
            step = data.draw(st.sampled_from(["decode", "preempt", "end", "update"]))
            if step == "decode":
                model.decode(data.draw(st.integers(1, 5)))
                last_sampled = model.tokens - 1
            elif step == "preempt":
                model.preempt()
            elif step == "end":
                model.end_turn(data.draw(st.integers(0, 6)))
            else:
                model.update()
        else:
            step = data.draw(st.sampled_from(["request", "request", "evict", "update", "migrate"]))
            if step == "request":
                model.request()
            elif step == "evict":
                model.lose("eviction", data.draw(st.integers(0, model.tokens)))
            elif step == "update":
                model.update()
            else:
                model.migrate(last_sampled)
        assert model.ledger.total == model.engine_prefilled
        assert model.ledger.cached == model.engine_cached
        assert +model.ledger.prefilled == +model.expected


def test_a_whole_life_by_hand() -> None:
    ledger = Ledger()
    kv = ledger.lease()
    kv.request(10, 10, lineage=1)
    assert kv.admit(Admission(9, 0, 9)) == {"first": 9}
    kv.sampled(5)
    # Three observation tokens: 18 tokens, KV of 14.
    kv.request(18, 10, lineage=1)
    assert kv.admit(Admission(17, 12, 5, block=2)) == {"block": 2, "turn": 3}
    kv.sampled(2)
    assert kv.admit(Admission(19, 0, 19, "preemption")) == {"preemption": 19}
    kv.sampled(1)  # 21 tokens, KV of 20
    kv.request(21, 10, lineage=2)
    assert kv.admit(Admission(20, 0, 20, "weight_update")) == {"weight_update": 20}
    kv.sampled(1)
    moved = ledger.lease(elsewhere=21)  # 22 tokens; the 22nd was sampled and never fed
    moved.request(30, 10, lineage=2)
    assert moved.admit(Admission(29, 10, 19)) == {"migration": 11, "turn": 8}
    assert ledger.total == 9 + 5 + 19 + 20 + 19
    assert ledger.cached == 12 + 10


def test_group_mates_share_a_prompt_without_a_cause() -> None:
    ledger = Ledger()
    first, second = ledger.lease(), ledger.lease()
    for kv in (first, second):
        kv.request(10, 10, lineage=1)
    assert first.admit(Admission(9, 0, 9)) == {"first": 9}
    assert second.admit(Admission(9, 9, 0)) == {}


@pytest.mark.parametrize(("lineage", "cause"), [(1, "eviction"), (2, "weight_update")])
def test_an_engine_that_cannot_say_why(lineage: int, cause: str) -> None:
    kv = Ledger().lease()
    kv.request(6, 6, lineage=1)
    kv.admit(Admission(5, 0, 5))
    kv.sampled(1)
    kv.request(8, 6, lineage=lineage)
    assert kv.admit(Admission(7, 0, 7)) == {cause: 6, "turn": 1}


def counted(tokens: int, seconds: float, unclaimed: int = 0) -> EngineCounts:
    return EngineCounts(tokens, 0, 0, seconds, 0.0, seconds, 0, 0, 0, 0, unclaimed_tokens=unclaimed)


def test_seconds_are_charged_at_the_speed_of_their_time() -> None:
    """The prompt at 0.5 s a token, the recomputation at a tenth of that; never less than before, and the engine's in all."""
    ledger = Ledger()
    kv = ledger.lease()
    kv.request(5, 5, lineage=1)
    kv.admit(Admission(4, 0, 4))
    ledger.settle(counted(4, 2.0))
    assert ledger.seconds == {cause: 2.0 if cause == "first" else 0.0 for cause in PREFILL_CAUSES}
    kv.sampled(3)
    kv.request(12, 5, lineage=2)
    ledger.settle(counted(19, 2.75))
    assert sum(ledger.seconds.values()) == 2.0, "whose chunk has not come yet: it is charged with it"
    kv.admit(Admission(11, 0, 11, "weight_update"))
    ledger.settle(counted(19, 2.75))
    assert +Counter(ledger.seconds) == pytest.approx({"first": 2.0, "weight_update": 0.35, "turn": 0.2})
    kv.sampled(1)
    kv.admit(Admission(4, 0, 4, "preemption"))
    ledger.settle(counted(19, 2.75))
    assert sum(ledger.seconds.values()) == pytest.approx(2.75)


def test_what_was_computed_for_nobody_is_a_preempted_requests() -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.settle(counted(7, 0.7, unclaimed=7))
    assert +ledger.prefilled == {"preemption": 7} and ledger.total == 7
    assert ledger.seconds["preemption"] == pytest.approx(0.7)
