"""The sender's bookkeeping of one transfer, without any transfer."""

from weightsync.messages import Fault, Report, Stage
from weightsync.round import Round

MEMBERS = ["n0", "n1", "n2"]


def ready(member: str, holds: bool = False) -> Report:
    return Report(member, Stage.READY, holds_group=holds)


def received(member: str, *checksums: int) -> Report:
    return Report(member, Stage.RECEIVED, checksums=list(checksums))


def fault(member: str, kind: Fault, sentence: str = "why") -> Report:
    return Report(member, Stage.RECEIVED, kind, sentence)


def complete() -> Round:
    state = Round(MEMBERS)
    for name in MEMBERS:
        state.hear(ready(name))
        state.hear(received(name, 1, 2))
    return state


def test_ok_only_when_everybody_received_the_same_bytes() -> None:
    state = complete()
    state.compare([1, 2])
    assert state.ok and state.missing() == [] and state.silent(Stage.RECEIVED) == []


def test_ready_alone_is_not_ok() -> None:
    state = Round(MEMBERS)
    for name in MEMBERS:
        state.hear(ready(name))
    assert not state.ok and state.silent(Stage.READY) == [] and state.silent(Stage.RECEIVED) == MEMBERS


def test_silent_members_are_named_in_rank_order() -> None:
    state = Round(MEMBERS)
    state.hear(ready("n1"))
    assert state.silent(Stage.READY) == ["n0", "n2"]
    state.waited_out({"n0": "did not join", "n2": "slept"})
    assert state.missing() == ["n0", "n2"] and state.reason() == "n0 did not join; n2 slept" and not state.ok


def test_the_group_is_used_again_only_if_everybody_holds_it() -> None:
    state = Round(MEMBERS)
    state.hear(ready("n0", holds=True))
    state.hear(ready("n1", holds=True))
    before = state.all_hold_group
    state.hear(ready("n2", holds=True))
    assert (before, state.all_hold_group) == (False, True)
    other = Round(MEMBERS)
    for name in MEMBERS:
        other.hear(ready(name, holds=name != "n1"))
    assert not other.all_hold_group


def test_a_member_that_refused_or_failed_itself_is_missing_and_one_that_lost_the_group_is_not() -> None:
    state = Round(MEMBERS)
    state.hear(fault("n0", Fault.LOST))
    state.hear(fault("n1", Fault.OWN, "out of memory"))
    state.hear(fault("n2", Fault.REFUSED, "no such tensor"))
    assert state.troubled and state.missing() == ["n1", "n2"]
    assert state.reason() == (
        "n1 failed: out of memory; n2 refused the manifest: no such tensor: start learner and nodes from one model folder"
    )


def test_consequences_are_told_only_without_a_cause() -> None:
    state = Round(MEMBERS)
    state.hear(fault("n0", Fault.LOST, "connection closed"))
    assert state.reason() == "n0 lost the group: connection closed"
    state.broke("the broadcast broke: closed by peer")
    state.broke("and again")
    assert state.reason() == "the broadcast broke: closed by peer"
    state.waited_out({"n1": "is silent"})
    assert state.reason() == "n1 is silent" and state.missing() == ["n1"]


def test_an_abandoned_transfer_names_who_gave_up_and_misses_nobody() -> None:
    state = Round(MEMBERS)
    state.hear(fault("n2", Fault.ABANDONED, "superseded"))
    assert state.missing() == [] and state.reason() == "n2 gave the transfer up: superseded"


def test_damage_is_found_per_member_and_bucket_and_misses_nobody() -> None:
    state = Round(MEMBERS)
    for name, second in zip(MEMBERS, (2, 9, 2), strict=True):
        state.hear(ready(name))
        state.hear(received(name, 1, second))
    state.compare([1, 2])
    assert not state.ok and state.missing() == []
    assert state.reason() == "bucket 1 arrived damaged at n1 (its checksum differs)"


def test_checksums_that_do_not_come_are_damage() -> None:
    state = complete()
    state.compare([1, 2, 3])
    assert not state.ok


def test_strangers_and_repetitions_change_nothing() -> None:
    state = complete()
    state.hear(fault("stranger", Fault.OWN))
    state.hear(received("n0", 5, 5))
    state.compare([1, 2])
    assert state.ok
