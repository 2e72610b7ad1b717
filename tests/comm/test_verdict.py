"""What a rank concludes from what the others tell (csrc/comm/verdict.h): tables, without processes.

This rank is 0. It waits, since second 10, for collective 7 of group "g", for which it needs ranks 0, 1 and 2. It is second 20.
"""

from __future__ import annotations

from typing import Any

import pytest
from shardtensor import _C
from shardtensor._C import GroupProgress, Mark, Report, ReportState, Verdict

GRACE = 0.6
MAY_COME, COMES_IF_BACK, IN_VAIN = Verdict.MayCome, Verdict.ComesIfBack, Verdict.InVain


def wait(**fields: Any) -> Report:
    told = {"rank": 0, "text": "all_gather", "group": "g", "number": 7, "facts": 5, "since": 10.0}
    return Report(ReportState.InCollective, **told | fields)


def failed(number: int | None = 6, rank: int = 1, text: str = "aten::mm", **fields: Any) -> Report:
    """At second 1 a rank has failed, after `number` collectives of g. Further fields are the group's or the report's."""
    progress = {name: fields.pop(name) for name in ("broken", "skipped") if name in fields}
    groups = {} if number is None else {"g": GroupProgress(number=number, **progress)}
    return Report(**{"state": ReportState.Failed, "rank": rank, "text": text, "groups": groups, "since": 1.0} | fields)


def ended(number: int | None = 6, **fields: Any) -> Report:
    return failed(number, state=ReportState.Ended, **{"text": "ended its script"} | fields)


# what another rank has told, what this rank waits for, its own failures, the verdict
VERDICTS = {
    "it has not begun mine": (failed(6), wait(), [], COMES_IF_BACK),
    "it has begun none of the group": (failed(None), wait(), [], COMES_IF_BACK),
    "it has begun mine": (failed(7), wait(), [], MAY_COME),
    "it has begun a later one": (failed(8), wait(), [], MAY_COME),
    "it has left mine out": (failed(7, skipped=[7]), wait(), [], IN_VAIN),
    "it has left mine out among others": (failed(8, skipped=[3, 7, 8]), wait(), [], IN_VAIN),
    "it has left an earlier one out": (failed(7, skipped=[6]), wait(), [], MAY_COME),
    "it has left an earlier one out, and mine is next": (failed(6, skipped=[6]), wait(), [], COMES_IF_BACK),
    "the group is broken there": (failed(6, broken=True), wait(), [], IN_VAIN),
    "the group is broken there, after mine": (failed(9, broken=True), wait(), [], IN_VAIN),
    "it is not needed": (failed(6, rank=3), wait(), [], MAY_COME),
    "it is not needed, and its group of that name is broken": (failed(6, rank=3, broken=True), wait(), [], MAY_COME),
    "it is this rank": (failed(6, rank=0), wait(), [], MAY_COME),
    "it is this rank, whose group is broken": (failed(6, rank=0, broken=True), wait(), [], MAY_COME),
    "heard of just now": (failed(6, since=19.5), wait(), [], MAY_COME),
    "heard of when grace ends": (failed(6, since=20.0 - GRACE), wait(), [], COMES_IF_BACK),
    "I have just begun to wait": (failed(6), wait(since=19.5), [], MAY_COME),
    "I began to wait when grace ends": (failed(6), wait(since=20.0 - GRACE), [], COMES_IF_BACK),
    "heard of just now, and left out": (failed(7, skipped=[7], since=19.9), wait(since=19.9), [], IN_VAIN),
    "I have failed alike": (failed(6), wait(), [failed(6, rank=0)], MAY_COME),
    "I have failed alike among others": (failed(6), wait(), [failed(3, rank=0), failed(6, rank=0), failed(6, 0, "x")], MAY_COME),
    "I have failed in another op": (failed(6), wait(), [failed(6, rank=0, text="aten::add")], COMES_IF_BACK),
    "I have failed at another collective": (failed(6), wait(), [failed(5, rank=0)], COMES_IF_BACK),
    "both have failed alike before the first one": (failed(None), wait(number=1), [failed(0, rank=0)], MAY_COME),
    "I have failed alike, but the group is broken there": (failed(6, broken=True), wait(), [failed(6, rank=0)], IN_VAIN),
    "I have failed alike, but it has left mine out": (failed(7, skipped=[7]), wait(), [failed(7, rank=0)], IN_VAIN),
    "it counts in another group of mine": (
        failed(None, groups={"h": GroupProgress(number=9)}), wait(), [], COMES_IF_BACK,
    ),
    "another group of it is broken": (
        failed(None, groups={"h": GroupProgress(broken=True), "g": GroupProgress(7)}), wait(), [], MAY_COME,
    ),
    "it has ended": (ended(6), wait(), [], IN_VAIN),
    "it has ended without the group": (ended(None), wait(), [], IN_VAIN),
    "it has ended just now": (ended(6, since=19.9), wait(since=19.9), [], IN_VAIN),
    "it has ended after mine": (ended(7), wait(), [], MAY_COME),
    "it has ended, and is not needed": (ended(6, rank=3), wait(), [], MAY_COME),
    "it has ended, and so have I": (ended(6), wait(), [ended(6, rank=0)], IN_VAIN),
    "a message's sender has ended": (ended(6), wait(group=""), [], MAY_COME),
    "a message's sender has failed": (failed(6), wait(group=""), [], COMES_IF_BACK),
    "a message's sender has failed just now": (failed(6, since=19.5), wait(group=""), [], MAY_COME),
    "a message's sender has failed, another thread goes on": (
        failed(None, groups={"": GroupProgress(back=[4])}), wait(group="", number=0), [], COMES_IF_BACK,
    ),
    "a message's sender has broken a group": (failed(6, broken=True, since=19.5), wait(group=""), [], MAY_COME),
    "a message's sender has failed alike": (failed(6), wait(group=""), [failed(6, rank=0)], COMES_IF_BACK),
    "another rank than a message's sender": (failed(6, rank=3), wait(group=""), [], MAY_COME),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_verdict(case: str) -> None:
    other, mine, own, expected = VERDICTS[case]
    assert _C.verdict(mine, [0, 1, 2], other, own, 20.0, GRACE) == expected


def present(nth: int, absent: tuple[int, ...] = (), back: tuple[int, ...] = ()) -> Report:
    """What the rank that has failed tells now. nth: the last failure that it knows of."""
    return Report(ReportState.Running, nth=nth, absent=list(absent), groups={"g": GroupProgress(number=9, back=list(back))})


# Of failure 4: what its rank tells now, and whether it goes on in g.
BACK = {
    "its thread has come back": (present(4), True),
    "it has failed again, and come back": (present(6), True),
    "it has failed again, and has not come back from that": (present(6, absent=(6,)), True),
    "it has told that before the failure": (present(3), False),
    "it has never told of a failure": (present(-1), False),
    "its thread has not come back": (present(4, absent=(4,)), False),
    "it has not come back from many": (present(6, absent=(2, 4, 6)), False),
    "another thread goes on in the group": (present(4, absent=(4,), back=(4,)), True),
    "another thread goes on, after another failure": (present(6, absent=(4, 6), back=(6,)), False),
    "another thread goes on in another group": (
        Report(ReportState.Running, nth=4, absent=[4], groups={"h": GroupProgress(back=[4])}), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BACK)
def test_a_rank_that_has_failed_is_back(case: str) -> None:
    now, expected = BACK[case]
    assert _C.is_back(failed(6, nth=4), now, "g") == expected


def test_messages_are_a_group_without_a_name() -> None:
    now = Report(ReportState.Running, nth=4, absent=[4], groups={"": GroupProgress(back=[4])})
    assert _C.is_back(failed(6, nth=4), now, "") and not _C.is_back(failed(6, nth=4), now, "g")


def waits(state: str = "InCollective", begun_of_mine: int | None = 6) -> Report:
    """Rank 1 waits for number 3 of group h. It has begun that many of g, of which this rank waits for number 7."""
    groups = {"h": GroupProgress(number=3)} | ({} if begun_of_mine is None else {"g": GroupProgress(number=begun_of_mine)})
    return Report(getattr(ReportState, state), rank=1, text="all_reduce", group="h", number=3, groups=groups)


# What the other tells, how many of what it waits for this rank has begun, and whether neither can go on.
DEADLOCKS = {
    "each waits for the other": (waits(), 2, True),
    "it has begun none of my group": (waits(begun_of_mine=None), 2, True),
    "I have begun none of its group": (waits(), 0, True),
    "it has begun mine": (waits(begun_of_mine=7), 2, False),
    "it has begun a later one": (waits(begun_of_mine=8), 2, False),
    "I have begun what it waits for": (waits(), 3, False),
    "I have begun a later one": (waits(), 4, False),
    "I am not in its group": (waits(), None, False),
    "it waits at a barrier": (waits("InBarrier"), 2, True),
    "it waits at a barrier that I have begun": (waits("InBarrier"), 3, False),
    "it waits at a barrier after mine": (waits("InBarrier", begun_of_mine=7), 2, False),
    "it waits for nothing": (waits("Running"), 2, False),
    "it has failed": (waits("Failed"), 2, False),
}


@pytest.mark.parametrize("case", DEADLOCKS)
def test_ranks_that_wait_for_each_other(case: str) -> None:
    other, begun, expected = DEADLOCKS[case]
    text = "the ranks wait for each other. Rank 0: all_gather; rank 1: all_reduce"
    assert _C.wait_for_each_other(wait(), other, begun) == (text if expected else "")


def test_different_collectives_of_one_number() -> None:
    text = "the ranks make different collectives. Rank 0: all_gather; rank 1: all_reduce"
    assert _C.differ(wait(), wait(rank=1, text="all_reduce", facts=6)) == text
    assert _C.differ(wait(), wait(rank=1, text="all_reduce")) == ""


# The low 16 bits of equal_pieces count the tensors that from_local has taken to be equal; the others are a hash of their sizes.
# (mine, the other's) -> (have begun others, have taken unequal pieces for equal)
MARKS = {
    "same": (Mark(8, 11, 0x50001), Mark(8, 11, 0x50001), (False, False)),
    "other collectives": (Mark(8, 11), Mark(8, 12), (True, False)),
    "other sizes": (Mark(8, 11, 0x50001), Mark(8, 11, 0x60001), (False, True)),
    "one more tensor": (Mark(8, 11, 0x50001), Mark(8, 11, 0x60002), (False, False)),
    "both": (Mark(8, 11, 0x50001), Mark(8, 12, 0x60001), (True, True)),
}


@pytest.mark.parametrize("case", MARKS)
def test_marks(case: str) -> None:
    mine, theirs, expected = MARKS[case]
    assert _C.compare_marks(mine, theirs) == expected == _C.compare_marks(theirs, mine)


# What this rank has heard -> which of ranks 0 to 3 it has not heard of since second 15.
SILENT = {
    "nothing": ([], [1, 2, 3]),
    "a failure since": ([failed(rank=2, since=16.0)], [1, 3]),
    "a failure at that time": ([failed(rank=2, since=15.0)], [1, 3]),
    "a failure before": ([failed(rank=2, since=14.0)], [1, 2, 3]),
    "an end before": ([ended(rank=2)], [1, 3]),
    "a failure before, and one since": ([failed(rank=1), failed(rank=1, since=16.0)], [2, 3]),
    "all": ([failed(rank=r, since=16.0) for r in (3, 2, 1)], []),
    "others": ([failed(rank=4, since=16.0)], [1, 2, 3]),
}


@pytest.mark.parametrize("case", SILENT)
def test_silent(case: str) -> None:
    news, expected = SILENT[case]
    assert _C.silent(0, [0, 1, 2, 3], news, 15.0) == expected


def test_the_first_that_has_ended() -> None:
    news = [failed(rank=1), ended(rank=4), ended(rank=2, error="ValueError: x"), ended(rank=1)]
    assert str(_C.first_ended([1, 2], news)) == "rank 2 has ended its script: ValueError: x"
    assert _C.first_ended([3], news) is None and _C.first_ended([1, 2], news[:1]) is None


def test_text_of_a_failure() -> None:
    assert str(failed(error="index out of range")) == "rank 1 failed in aten::mm: index out of range"
    assert str(ended()) == "rank 1 has ended its script"


def everything(**fields: Any) -> Report:
    groups = {
        "0": GroupProgress(number=2**40, broken=True, skipped=[3, 5, 2**40], back=[1, 2], mark=Mark(16, 2**64 - 1, 2**63)),
        "": GroupProgress(back=[9]),
        "h": GroupProgress(),
    }
    told = {"rank": 7, "text": "a text", "error": "an error", "group": "0", "number": 8, "facts": 2**64 - 1, "drawn": 2**63}
    return Report(ReportState.InBarrier, **told | {"nth": 9, "absent": [1, 2, 9], "groups": groups} | fields)


CHANGES = {
    "rank": 8,
    "text": "",
    "error": "",
    "group": "",
    "number": 0,
    "facts": 1,
    "drawn": 1,
    "nth": -1,
    "absent": [],
    "groups": {},
    "since": 3.0,
}


def test_a_report_comes_through_the_store_whole() -> None:
    text = _C.write_report(everything())
    assert _C.write_report(_C.read_report(text)) == text
    told = _C.read_report(text)
    assert _C.is_back(failed(nth=9), told, "") and not _C.is_back(failed(nth=9), told, "h") and not _C.is_back(failed(nth=10), told, "")
    texts = {field: _C.write_report(everything(**{field: value})) for field, value in CHANGES.items()}
    assert texts.pop("since") == text  # each rank has its own clock
    assert len({text, *texts.values()}) == len(CHANGES)
    assert all(_C.write_report(_C.read_report(t)) == t for t in texts.values())


# A text for people, and what is left of it in the store.
TEXTS = {
    "lines": ("one\ntwo", "one two"),
    "separators": ("a\x1fb\x1ec", "a b c"),
    "C++ trace": ("what\nException raised from f at g.cpp:3\nframe #0", "what"),
    "long": ("x" * 1001, "x" * 1000 + "..."),
    "not quite long": ("x" * 1000, "x" * 1000),
    "empty": ("", ""),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_in_the_store_are_short_lines(case: str) -> None:
    text, expected = TEXTS[case]
    told = _C.read_report(_C.write_report(failed(text=text, error=text)))
    assert str(told) == f"rank 1 failed in {expected}" + (f": {expected}" if expected else "")
