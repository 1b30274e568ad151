"""Trying again stays within its deadline, waits as long as it is asked to, and ends saved. Nothing here sleeps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import Interrupted, Refused
from assay.files.retry import PATIENCE, SHORTEST, Policy, Transient, again, patience, persist, retry_after

SECONDS = st.floats(min_value=0, max_value=1e4, allow_nan=False)


@dataclass
class Time:
    """A clock that only sleeping moves."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.slept.append(seconds)
        self.now += seconds

    def policy(self, deadline: float, first: float = 0.5, most: float = 30.0, share: float = 1.0) -> Policy:
        """A policy on this clock whose chance falls on the same share of every span."""
        return Policy(deadline, first, most, lambda: self.now, self.sleep, lambda a, b: a + share * (b - a))


@given(
    deadline=SECONDS,
    first=st.floats(0.01, 10),
    most=st.floats(0.01, 100),
    failures=st.lists(st.one_of(st.none(), SECONDS), max_size=60),
    share=st.floats(0, 1),
)
def test_pauses_stay_within_their_bounds_and_their_sum_within_the_deadline(
    deadline: float, first: float, most: float, failures: list[float | None], share: float
) -> None:
    time, left = Time(), iter(failures)

    def attempt(seconds: float) -> str:
        for after in left:
            raise Transient("again", after)
        return "done"

    with contextlib.suppress(Interrupted):  # raised when a failure has no pause, so never after the last one
        assert persist("it", attempt, time.policy(deadline, first, most, share)) == "done"
        assert len(time.slept) == len(failures)
    assert sum(time.slept) <= deadline * (1 + 1e-9)
    for number, (pause, after) in enumerate(zip(time.slept, failures, strict=False)):
        assert 0 <= pause <= (after or 0.0) + min(most, first * 2.0**number) + 1e-9
        assert pause >= (after or 0.0) or sum(time.slept[: number + 1]) >= deadline * (1 - 1e-9)


@given(share=st.floats(0, 1))
def test_full_jitter_doubles_its_span_up_to_the_longest_pause(share: float) -> None:
    policy = Time().policy(1e6, first=0.5, most=4.0, share=share)
    pauses = [policy.pause(failures, 1e6, None) for failures in (1, 2, 3, 4, 5, 500)]
    assert pauses == pytest.approx([share * span for span in (0.5, 1.0, 2.0, 4.0, 4.0, 4.0)])


def test_the_sentence_at_the_deadline_names_what_why_and_the_way_out() -> None:
    time = Time()

    def attempt(seconds: float) -> None:
        raise Transient("HTTP 503")

    with pytest.raises(Interrupted, match=r"^far/file: HTTP 503; given up at the deadline of 60 s; .*run the same"):
        persist("far/file", attempt, time.policy(60))
    assert time.now == 60


def test_each_attempt_is_told_what_is_left_of_the_deadline() -> None:
    time, told = Time(), list[float]()

    def attempt(seconds: float) -> None:
        told.append(seconds)
        raise Transient("HTTP 429", after=4.0)

    with pytest.raises(Interrupted):
        persist("it", attempt, time.policy(10, share=0.0))
    assert told == [10, 6, 2]  # the third is told to wait 4 s, which is more than is left


def test_the_deadline_counts_from_the_last_time_that_something_moved() -> None:
    time, moves = Time(), iter([True] * 50)

    def attempt(seconds: float) -> None:
        time.now += 9
        raise Transient("cut", moved=next(moves, False))

    with pytest.raises(Interrupted):
        persist("it", attempt, time.policy(10))
    assert time.now > 50 * 9


def test_what_no_try_can_mend_is_not_tried_again() -> None:
    tries = []

    def attempt(seconds: float) -> None:
        tries.append(seconds)
        raise Refused("no")

    with pytest.raises(Refused):
        persist("it", attempt, Time().policy(60))
    assert len(tries) == 1


@given(left=SECONDS)
def test_one_attempt_that_hangs_leaves_time_for_others(left: float) -> None:
    assert SHORTEST <= patience(left) <= PATIENCE
    assert patience(left) <= max(SHORTEST, left / 4)


def test_statuses_are_told_apart() -> None:
    assert [status for status in range(100, 600) if again(status)] == [408, 429, *range(500, 600)]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("Mon, 30 Nov 2026 12:00:30 GMT", 30.0),
        ("Mon, 30 Nov 2026 11:00:00 GMT", 0.0),
        ("soon", None),
        ("-3", None),
        ("", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-AFTER": value}, datetime(2026, 11, 30, 12, tzinfo=UTC)) == seconds


def test_without_a_header_nothing_is_asked_for() -> None:
    assert retry_after({"Content-Length": "3"}) is None
