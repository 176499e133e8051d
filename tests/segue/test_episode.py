"""Hashes and checksums are equal in every process and differ when the content does."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from segue.episode import EpisodeSnapshot, log_checksum, observation_hash


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 6))
def test_a_checksum_can_go_on_where_it_stopped(payloads: list[bytes], cut: int) -> None:
    assert log_checksum(payloads[cut:], log_checksum(payloads[:cut])) == log_checksum(payloads)


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6), st.data())
def test_a_checksum_notices_a_changed_byte_and_a_missing_payload(payloads: list[bytes], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(payloads) - 1))
    changed = bytes([payloads[index][0] ^ data.draw(st.integers(1, 255))]) + payloads[index][1:]
    assert log_checksum([*payloads[:index], changed, *payloads[index + 1 :]]) != log_checksum(payloads)
    assert log_checksum(payloads[:-1]) != log_checksum(payloads)


TEXTS = st.lists(st.text(st.characters(), max_size=6), max_size=4)


@given(TEXTS, TEXTS)
def test_observation_hashes_tell_texts_apart(left: list[str], right: list[str]) -> None:
    assert (observation_hash(left) == observation_hash(right)) == (left == right)


def test_where_one_text_ends_and_the_next_begins_counts() -> None:
    assert len({observation_hash(texts) for texts in (["ab", "c"], ["a", "bc"], ["abc"], ["a\0", "bc"], ["a", "\0bc"], [])}) == 6


def test_observation_hashes_are_equal_in_every_process() -> None:
    code = "from segue.episode import observation_hash; print(observation_hash(['höhe', '\\ud800', '']))"
    env = {"PYTHONHASHSEED": "123", "PATH": ""}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, timeout=60)
    assert int(other.stdout) == observation_hash(["höhe", "\ud800", ""])


def test_a_fresh_snapshot_is_before_the_reset() -> None:
    assert EpisodeSnapshot() == EpisodeSnapshot(turn=-1, next_seq=0, deltas=[], seconds=0.0)
