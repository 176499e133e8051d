"""The slot policy: by example, and against rows that remember what was really written into them."""

from __future__ import annotations

from typing import Any

from engine_contract import ask
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.embedded.sequence import Sequence
from rollout.embedded.slots import MIN_SHARED, Plan, SlotPolicy, common_prefix
from segue.ports.engine import Admission

_arrival = iter(range(10**9))


def sequence(tokens: list[int], **options: Any) -> Sequence:
    return Sequence(ask(tokens, **options), next(_arrival))


def last_admission(s: Sequence) -> Admission:
    """The newest one, whether a chunk carries it by now or not."""
    return [*(a for chunk in s.out._chunks for a in chunk.admissions), *s._admissions][-1]


def decode(s: Sequence, token: int, version: int = 0) -> None:
    s.append(token, -1.0, version)


def steps(policy: SlotPolicy, count: int) -> None:
    for _ in range(count):
        policy.stepped()


A, B = list(range(100, 120)), list(range(200, 220))


def test_common_prefix_is_that_of_a_loop() -> None:
    for n in range(12):
        for difference in range(n + 1):
            a = list(range(n))
            b = [*a[:difference], 99, *a[difference + 1 :]]
            expected = next((i for i in range(n) if a[i] != b[i]), n)
            assert common_prefix(a, b, 100) == expected
            assert common_prefix(a, b, 3) == min(expected, 3)


def test_the_next_turn_goes_on_in_place() -> None:
    policy = SlotPolicy(2)
    first = sequence(A, episode=1)
    policy.admit([first], 0)
    assert last_admission(first) == Admission(context=19, cached=0, prefilled=19)
    decode(first, 7)
    decode(first, 8)
    policy.park(first)
    second = sequence([*A, 7, 8, 9], episode=1)
    (placement,) = policy.admit([second], 0).placements
    assert (placement.cached, placement.prefill) == (21, [8])  # 8 was sampled and never fed
    assert last_admission(second) == Admission(context=22, cached=21, prefilled=1)


def test_members_of_a_group_admitted_together_wait_for_one_prefill() -> None:
    policy = SlotPolicy(4)
    members = [sequence(A, group=1) for _ in range(3)]
    other = sequence(B)
    plan = policy.admit([*members, other], 0)
    assert [(p.cached, p.wave) for p in plan.placements] == [(0, 0), (19, 1), (19, 1), (0, 0)]
    assert {p.source for p in plan.placements[1:3]} == {plan.placements[0].slot.row}


def test_a_short_prefix_is_computed_rather_than_copied() -> None:
    policy = SlotPolicy(2)
    policy.admit([sequence([*A[: MIN_SHARED - 1], *B])], 0)
    (placement,) = policy.admit([sequence(A)], 0).placements
    assert placement.cached == 0


def test_kv_is_shared_only_within_the_version_now_loaded() -> None:
    policy = SlotPolicy(4)
    policy.admit([sequence(A)], 0)
    policy.loaded(kept=True)
    fresh, old = sequence(A, lineage=1), sequence(A, lineage=0)
    plan = policy.admit([fresh, old], 1)
    assert [p.cached for p in plan.placements] == [0, 0]
    assert (fresh.kv_version, old.kv_version) == (1, 1)  # the old lineage is lost: what was recomputed is of version 1


def test_an_episode_keeps_its_lineage_and_says_so() -> None:
    policy = SlotPolicy(2)
    first = sequence(A, episode=1)
    policy.admit([first], 0)
    policy.park(first)
    policy.loaded(kept=True)
    second = sequence([*A, *B], episode=1, lineage=0)
    policy.admit([second], 1)
    assert last_admission(second) == Admission(context=39, cached=19, prefilled=20)
    assert second.kv_version == 0
    policy.park(second)
    third = sequence([*A, *B, 5], episode=1, lineage=1)
    policy.admit([third], 1)
    assert last_admission(third) == Admission(context=40, cached=0, prefilled=40, lost="weight_update")


def test_the_least_worth_keeping_is_evicted_and_its_episode_is_told() -> None:
    policy = SlotPolicy(3)
    for episode, priority in ((1, 0), (2, 5), (3, 5)):
        s = sequence([episode, *A], episode=episode, priority=priority)
        policy.admit([s], 0)
        policy.park(s)
    policy.admit([sequence(B, episode=4, priority=9)], 0)  # 2 has a higher number than 1 and was used before 3
    assert policy.evictions == 1
    steps(policy, 10)
    back = sequence([2, *A], episode=2, priority=5)
    policy.admit([back], 0)  # takes 3's place
    assert last_admission(back).lost == "eviction"
    assert [s.episode for s in policy.slots] == [1, 4, 2]


def test_an_idle_slot_is_kept_for_as_long_as_its_kv_would_cost_to_recompute() -> None:
    policy = SlotPolicy(2, keep_steps=0.5)
    idle, running = sequence(A, episode=1, priority=3), sequence(B, episode=2, priority=3)
    policy.admit([idle, running], 0)
    policy.park(idle)  # 19 tokens of KV: kept for 9.5 steps
    same, older, back = (sequence([9] * 20, episode=e, priority=p) for e, p in ((3, 3), (4, 2), (1, 3)))
    steps(policy, 9)
    assert not policy.can_place([same]) and policy.admit([same], 0) == Plan()
    assert policy.can_place([older]), "an older group may take it at once"
    assert policy.can_place([back]), "and so may its own episode"
    assert [p.sequence for p in policy.admit([same, back], 0).placements] == [back]
    policy.park(back)
    steps(policy, 10)
    assert policy.can_place([same]) and len(policy.admit([same], 0).placements) == 1
    assert policy.evictions == 1 and policy.preemptions == 0


def test_nothing_is_kept_while_nothing_runs() -> None:
    policy = SlotPolicy(1)
    first = sequence(A, episode=1)
    policy.admit([first], 0)
    policy.park(first)
    newcomer = sequence(B, episode=2, priority=9)
    assert policy.can_place([newcomer]) and len(policy.admit([newcomer], 0).placements) == 1


def test_a_waiting_request_does_not_lose_its_own_kv_to_another_in_the_same_round() -> None:
    policy = SlotPolicy(2)
    for episode in (1, 2):
        s = sequence([episode, *A], episode=episode)
        policy.admit([s], 0)
        policy.park(s)
    back = sequence([1, *A, 9], episode=1, priority=1)
    policy.admit([sequence(B, episode=3), back], 0)  # 1 was used before 2, but it is wanted
    assert last_admission(back) == Admission(context=21, cached=20, prefilled=1)


def test_kv_that_an_update_made_useless_goes_first_and_is_no_eviction() -> None:
    policy = SlotPolicy(2)
    stale = sequence(A, episode=1)
    policy.admit([stale], 0)
    policy.park(stale)
    policy.loaded(kept=False)
    fresh = sequence(B, episode=2, priority=9, lineage=1)
    policy.admit([fresh], 1)
    policy.park(fresh)
    policy.admit([sequence([1] * 20, episode=3, lineage=1)], 1)
    assert policy.evictions == 0
    back = sequence(A, episode=1, lineage=1)
    policy.admit([back], 1)
    assert last_admission(back).lost == "weight_update"


def test_kv_evicted_before_an_update_would_have_been_useless_anyway() -> None:
    policy = SlotPolicy(1)
    for episode, tokens in ((1, A), (2, B)):
        s = sequence(tokens, episode=episode)
        policy.admit([s], 0)
        policy.park(s)
    policy.loaded(kept=False)
    back = sequence(A, episode=1, lineage=1)
    policy.admit([back], 1)
    assert last_admission(back).lost == "weight_update"


def test_what_was_recomputed_is_of_the_new_lineage() -> None:
    """Displaced, recomputed under newer weights, displaced again: the second loss is a preemption, not an update."""
    policy = SlotPolicy(1)
    s = sequence(A, episode=1, priority=5)
    lost = []
    for version in (0, 1, 1):
        policy.admit([s], version)
        lost.append(last_admission(s).lost)
        urgent = sequence(B, lineage=version)
        policy.admit([urgent], version)
        policy.drop(urgent)
    assert lost == ["", "preemption", "preemption"] and s.lineage == s.kv_version == 1


def test_an_older_group_displaces_the_youngest_and_it_comes_back_with_what_it_had() -> None:
    policy = SlotPolicy(2)
    older, younger = sequence(A, priority=1), sequence(B, priority=2, episode=7)
    policy.admit([older, younger], 0)
    decode(younger, 9)
    first = sequence([1] * 20, priority=0)
    plan = policy.admit([first], 0)
    assert plan.displaced == [younger] and younger.slot is None and policy.preemptions == 1
    assert policy.admit([younger], 0) == Plan()  # it can displace nobody
    policy.park(older)
    steps(policy, 5)
    plan = policy.admit([younger], 0)
    assert [p.prefill for p in plan.placements] == [B]
    assert last_admission(younger) == Admission(context=20, cached=0, prefilled=20, lost="preemption")


def test_idle_slots_keep_the_kv_of_more_episodes_than_run_at_once() -> None:
    policy = SlotPolicy(1, idle=2)
    for episode in (1, 2, 3):
        s = sequence([episode, *A], episode=episode)
        policy.admit([s], 0)
        policy.park(s)
    second, first = (sequence([episode, *A, 9], episode=episode) for episode in (2, 1))
    assert [p.sequence for p in policy.admit([second, first], 0).placements] == [second], "one runs at once"
    assert not policy.can_place([first]), "though its slot is idle"
    assert last_admission(second) == Admission(context=21, cached=20, prefilled=1)
    policy.park(second)
    policy.admit([first], 0)
    assert last_admission(first) == Admission(context=21, cached=20, prefilled=1) and policy.evictions == 0


def test_where_slots_are_enough_a_preempted_sequence_goes_on_with_its_kv() -> None:
    policy = SlotPolicy(1, idle=1)
    younger, older = sequence(A, priority=2, episode=7), sequence(B, priority=1, episode=8)
    policy.admit([younger], 0)
    decode(younger, 5)
    younger.flush()
    assert policy.admit([older], 0).displaced == [younger] and policy.preemptions == 1
    policy.park(older)
    policy.admit([younger], 0)
    assert last_admission(younger) == Admission(context=20, cached=20, prefilled=0)


def test_a_preempted_sequence_whose_consumer_leaves_takes_its_kv_along() -> None:
    policy = SlotPolicy(1, idle=1)
    younger, older = sequence(A, priority=2, episode=7), sequence(B, priority=1, episode=8)
    policy.admit([younger], 0)
    policy.admit([older], 0)
    policy.drop(younger)
    assert [slot.episode for slot in policy.slots if slot.episode is not None] == [8] and older.slot is not None


def test_equal_numbers_never_displace_each_other() -> None:
    policy = SlotPolicy(1)
    policy.admit([sequence(A, priority=3)], 0)
    assert not policy.can_place([sequence(B, priority=3)]) and policy.can_place([sequence(B, priority=2)])
    assert policy.admit([sequence(B, priority=3)], 0) == Plan()


def test_running_rows_move_together_when_holes_are_many() -> None:
    policy = SlotPolicy(16)
    running = [sequence([i, *A], episode=i) for i in range(16)]
    policy.admit(running, 0)
    policy.park(running[3])
    assert policy.compact() == []  # one hole among fifteen is cheaper than a move
    for s in (running[0], running[5], running[9]):
        policy.park(s)
    moves = policy.compact()
    rows = sorted(s.row for s in policy.slots if s.sequence is not None)
    assert rows == list(range(12))
    assert len(moves) == 4 and all(length == 20 for _, _, length in moves)
    assert [s.row for s in policy.slots] == list(range(16))


class Rows(RuleBasedStateMachine):
    """Random episodes against rows that remember, per position, the token and the version it was computed under.

    Whatever the policy claims to be cached must be there: the right tokens, of the claimed lineage, computed by the episode
    itself or under the version now loaded.
    """

    @initialize(slots=st.integers(1, 5), idle=st.sampled_from([0, 0, 1, 3]))
    def begin(self, slots: int, idle: int) -> None:
        self.policy, self.at_once = SlotPolicy(slots, idle), slots
        self.rows: list[dict[int, tuple[int, int]]] = [{} for _ in range(slots + idle)]
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.version = 0
        self.contexts: dict[int, list[int]] = {}
        self.lineages: dict[int, int] = {}
        self.prefilled = self.preempted = 0

    @rule(episode=st.integers(0, 7), priority=st.integers(0, 2), new=st.lists(st.integers(0, 1), max_size=3), keep=st.booleans())
    def submit(self, episode: int, priority: int, new: list[int], keep: bool) -> None:
        if any(s.request.episode == episode for s in self.waiting + self.running):
            return
        group = episode // 3
        context = self.contexts.get(episode, [group] * 9) + new
        lineage = self.lineages.get(episode, self.version) if keep else self.version
        self.waiting.append(sequence(context, episode=episode, priority=priority, lineage=lineage, max_tokens=1000))

    @rule()
    def admit(self) -> None:
        possible = self.policy.can_place(self.waiting)
        plan = self.policy.admit(self.waiting, self.version)
        assert possible == bool(plan.placements)
        assert plan.placements or self.running or not self.waiting, "the engine would stand still"
        for s in plan.displaced:
            self.running.remove(s)
        self.preempted += len(plan.displaced)
        placed = [p.sequence for p in plan.placements]
        self.waiting = [s for s in self.waiting if s not in placed] + plan.displaced
        self.running += placed
        for wave in range(4):
            here = [p for p in plan.placements if p.wave == wave]
            for p in here:
                source = dict(self.rows[p.source])
                self.rows[p.slot.row].update({i: source[i] for i in range(p.cached)})
            for p in here:
                for i, token in enumerate(p.prefill, start=p.cached):
                    self.rows[p.slot.row][i] = (token, self.version)
                self.prefilled += len(p.prefill)
        assert all(p.wave < 4 for p in plan.placements)
        for p in plan.placements:
            self._check(p.sequence)
            admission = last_admission(p.sequence)
            assert admission.cached + admission.prefilled == admission.context == len(p.sequence.tokens) - 1
            assert admission.prefilled == len(p.prefill)

    def _check(self, s: Sequence) -> None:
        assert s.slot is not None
        stored = [self.rows[s.slot.row][i] for i in range(len(s.tokens) - 1)]
        assert [token for token, _ in stored] == s.tokens[:-1]
        versions = [version for _, version in stored]
        if s.kv_version == self.version:
            assert set(versions) <= {self.version}
        elif versions:
            assert versions[0] == s.kv_version and versions == sorted(versions)

    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        for s in self.running:
            assert s.slot is not None
            self.rows[s.slot.row][len(s.tokens) - 1] = (s.tokens[-1], self.version)
            decode(s, token, self.version)
        self.policy.stepped()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kept=st.booleans())
    def end(self, data: st.DataObject, kept: bool) -> None:
        s = data.draw(st.sampled_from(self.running))
        self.running.remove(s)
        if kept:
            self.policy.park(s)
            self.contexts[s.request.episode] = list(s.tokens)
            self.lineages[s.request.episode] = s.kv_version
        else:
            self.policy.drop(s)

    @rule(episode=st.integers(0, 7))
    def forget(self, episode: int) -> None:
        self.policy.forget(episode)

    @rule(kept=st.booleans())
    def load(self, kept: bool) -> None:
        self.version += 1
        self.policy.loaded(kept)

    @rule()
    def compact(self) -> None:
        for a, b, length in self.policy.compact():
            for i in range(length):
                x, y = self.rows[a].pop(i, None), self.rows[b].pop(i, None)
                if x is not None:
                    self.rows[b][i] = x
                if y is not None:
                    self.rows[a][i] = y

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "policy"):
            return
        assert [s.row for s in self.policy.slots] == list(range(len(self.rows)))
        assert {id(s.sequence) for s in self.policy.slots if s.sequence is not None} == {id(s) for s in self.running}
        assert self.policy.preemptions == self.preempted
        assert len(self.running) <= self.at_once
        for s in self.running:
            assert s.slot is not None and s.slot.sequence is s
            self._check(s)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
