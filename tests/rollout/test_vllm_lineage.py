"""Whose KV a request may read under vLLM, and what is said of it."""

from __future__ import annotations

from rollout.vllm.lineage import Lineages
from segue.ports.engine import Admission, GenerateRequest

BLOCK = 4


def request(lineage: int, episode: int = 1, tokens: int = 13) -> GenerateRequest:
    return GenerateRequest("r", list(range(tokens)), 8, 1.0, (), (), 0, 0, 0, episode, 0, lineage)


def test_a_second_turn_loses_nothing_but_the_tail_of_a_block() -> None:
    lineages, r = Lineages("e", BLOCK), request(0)
    salt = lineages.salt(r)
    found = lineages.first(r, salt, r.tokens, 0, 12, 0)
    assert found.admission == Admission(12, 0, 12, "", 0) and found.kv_version == 0
    lineages.ended(1, salt, 0, [*range(19)], 18)
    turn = request(0, tokens=25)
    assert lineages.salt(turn) == salt
    assert lineages.first(turn, salt, turn.tokens, 16, 8, 0).admission == Admission(24, 16, 8, "", 2)
    assert lineages.first(turn, salt, turn.tokens, 8, 16, 0).admission == Admission(24, 8, 16, "eviction", 0)
    assert lineages.evictions == 1


def test_other_tokens_or_another_episode_have_lost_nothing() -> None:
    lineages, r = Lineages("e", BLOCK), request(0)
    lineages.ended(1, lineages.salt(r), 0, [99, *range(1, 19)], 18)
    assert lineages.first(r, lineages.salt(r), r.tokens, 0, 12, 0).admission.lost == ""
    other = request(0, episode=2)
    assert lineages.first(other, lineages.salt(other), other.tokens, 8, 4, 0).admission == Admission(12, 8, 4, "", 0)
    lineages.ended(1, lineages.salt(r), 0, [*range(19)], 18)
    lineages.forget(1)
    assert lineages.first(r, lineages.salt(r), r.tokens, 0, 12, 0).admission.lost == ""


def test_another_lineage_has_another_salt_and_lost_its_kv_to_the_update() -> None:
    lineages, r = Lineages("e", BLOCK), request(0)
    lineages.ended(1, lineages.salt(r), 0, [*range(19)], 18)
    lineages.loaded(1, set())
    turn = request(1, tokens=25)
    salt = lineages.salt(turn)
    assert salt != lineages.salt(request(0, episode=2))
    assert lineages.first(turn, salt, turn.tokens, 0, 24, 1).admission == Admission(24, 0, 24, "weight_update", 0)


def test_an_old_lineage_that_finds_nothing_becomes_a_new_one_and_everybody_is_told() -> None:
    """`keep` after an eviction: the blocks lie under the old salt, and were computed under the new weights."""
    lineages, first = Lineages("e", BLOCK), request(0)
    salt = lineages.salt(first)
    lineages.first(first, salt, first.tokens, 0, 12, 0)
    lineages.ended(1, salt, 0, [*range(19)], 18)
    lineages.loaded(3, {salt})
    turn = request(0, tokens=25)
    found = lineages.first(turn, salt, turn.tokens, 0, 24, 3)
    assert found.kv_version == 3 and found.admission.lost == "eviction"
    mate = request(0, episode=2)
    assert lineages.first(mate, lineages.salt(mate), mate.tokens, 12, 0, 3).kv_version == 3
    lineages.ended(1, salt, 3, [*range(30)], 29)
    onward = request(3, tokens=40)
    assert lineages.salt(onward) == salt, "its KV is found where it lies"


def test_a_slot_taken_and_given_back_is_a_preemption() -> None:
    lineages, r = Lineages("e", BLOCK), request(0)
    salt = lineages.salt(r)
    lineages.first(r, salt, r.tokens, 0, 12, 0)
    tokens = [*range(20)]
    assert lineages.again(r, salt, tokens, 8, 11, 0).admission == Admission(19, 8, 11, "preemption", 0)
    assert lineages.again(r, salt, tokens, 16, 3, 0).admission == Admission(19, 16, 3, "preemption", 3)
    again = lineages.again(r, salt, tokens, 0, 19, 2)
    assert again.kv_version == 2
