"""A server that fails is left alone, and found again, without anybody waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tieredkv.breaker import Breaker
from tieredkv.throttle import Throttle


class Clock:
    """Time as told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(failures=3, first_pause=1.0, longest_pause=10.0, clock=clock)


def fail(breaker: Breaker, n: int, kind: str = "ask") -> list[bool]:
    return [breaker.failed(kind) for _ in range(n)]


def test_it_opens_at_the_last_of_some_failures_in_a_row(breaker: Breaker) -> None:
    """One lost packet is no reason to do without a server; a server that is down is."""
    assert fail(breaker, 2) == [False, False]
    breaker.succeeded("ask")
    assert fail(breaker, 3) == [False, False, True]
    assert breaker.is_open


def test_calls_that_work_do_not_hide_those_that_do_not(breaker: Breaker) -> None:
    """A server may answer questions and hang at each transfer: that costs its time every time."""
    for _ in range(2):
        breaker.failed("fetch")
        breaker.succeeded("ask")
    assert breaker.failed("fetch")


def test_one_caller_tries_again_once_the_pause_is_over(breaker: Breaker, clock: Clock) -> None:
    """If all did, a server that is down would cost every request of that moment its time."""
    fail(breaker, 3)
    assert not breaker.is_due()
    clock.now += 1.0
    assert [breaker.is_due(), breaker.is_due()] == [True, False]
    assert breaker.recovered()
    assert not breaker.is_open


def test_who_tries_and_never_comes_back_is_replaced(breaker: Breaker, clock: Clock) -> None:
    """A thread can end at any time; the server would be done without for ever."""
    fail(breaker, 3)
    for _ in range(3):
        clock.now += 1.0
        assert breaker.is_due()


def test_pauses_double_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    """A server that is down for a night must not be asked every second of it."""
    fail(breaker, 3)
    pauses = []
    for _ in range(6):
        pauses.append(breaker.pause)
        clock.now += breaker.pause
        assert breaker.is_due()
        breaker.still_fails()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_server_that_only_seems_to_be_back_is_left_at_its_next_failure(
    breaker: Breaker, clock: Clock
) -> None:
    """What is tried is a small question: its answer says little of what failed."""
    fail(breaker, 3, "fetch")
    clock.now += 1.0
    assert breaker.is_due()
    breaker.recovered()
    breaker.succeeded("ask")
    assert breaker.failed("fetch")
    assert breaker.pause == 2.0


def test_a_call_of_the_kind_that_failed_restores_full_trust(breaker: Breaker, clock: Clock) -> None:
    """Else a server that was away once would be left at every lost packet."""
    fail(breaker, 3)
    clock.now += 1.0
    breaker.recovered()
    breaker.succeeded("ask")
    assert (fail(breaker, 2), breaker.pause) == ([False, False], 1.0)


@pytest.mark.parametrize("late", [lambda b: b.succeeded("ask"), lambda b: b.failed("ask")])
def test_what_comes_late_changes_nothing_while_it_is_open(
    breaker: Breaker, clock: Clock, late: Callable[[Breaker], object]
) -> None:
    """Calls that were under way end after the one that opened it."""
    fail(breaker, 3)
    assert not late(breaker)
    assert breaker.is_open
    clock.now += 1.0
    assert breaker.is_due()


def test_a_throttle_keeps_its_rate_whatever_the_sizes(clock: Clock) -> None:
    """A cap that is exceeded is no cap: somebody pays for that line."""
    throttle, start = Throttle(100, clock), clock.now
    for n_bytes in (50, 500, 1, 449):
        clock.now += throttle.delay(n_bytes)
    # All but what may go out at once.
    assert clock.now - start == pytest.approx(9.0)


def test_a_rest_earns_no_more_than_a_second(clock: Clock) -> None:
    """After a quiet night all of a backlog would go out at once."""
    throttle = Throttle(100, clock)
    clock.now += 3600
    assert throttle.delay(200) == pytest.approx(1.0)


def test_no_rate_is_no_wait(clock: Clock) -> None:
    """Most people have no cap."""
    assert Throttle(0, clock).delay(1 << 40) == 0.0
