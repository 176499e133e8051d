"""Which episodes an engine may forget, and when."""

from __future__ import annotations

from rollout.departed import Departed


def test_who_may_come_back_is_kept_and_the_oldest_goes_first() -> None:
    forgotten: list[int] = []
    departed = Departed(2, forgotten.append)
    for episode in (1, 2, 3):
        departed.left(episode, for_good=False)
    assert forgotten == [1]
    departed.back(2)
    departed.left(4, for_good=False)
    assert forgotten == [1], "one of them is here again"
    departed.left(2, for_good=True)
    departed.left(3, for_good=True)
    assert forgotten == [1, 2, 3]
    departed.left(5, for_good=False)
    assert forgotten == [1, 2, 3], "who was forgotten takes no place"
