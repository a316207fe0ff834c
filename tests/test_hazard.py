"""The learning eviction policy: standings, counters, scores and who leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv import hazard
from tieredkv.core import GRADES
from tieredkv.hazard import BLOCK, CLASSES, STATE, TAIL, Choice, Counters, Shelves, Standing, Table

SPAN = 1000

standings = st.builds(
    Standing,
    last=st.integers(0, 10 * SPAN),
    kind=st.sampled_from([BLOCK, TAIL, STATE]),
    turn=st.integers(1, 100),
    fresh=st.integers(0, 10**6),
    refs=st.integers(0, 10**6),
    branches=st.integers(0, 5),
    awaited=st.booleans(),
)
# Class, when the wait began, and its age when the block came back; no age if it did not.
waits = st.lists(
    st.tuples(
        st.integers(0, CLASSES - 1),
        st.integers(0, 12 * SPAN),
        st.none() | st.integers(0, 9 * SPAN),
    ),
    max_size=60,
)


def _events(rows: list[tuple[int, int, int | None]]) -> list[tuple[int, int, int | None]]:
    """Beginnings and ends in the order of their time: class, beginning, end or None."""
    events = [(start, of_class, start, None) for of_class, start, _ in rows]
    events += [(start + age, of_class, start, start + age) for of_class, start, age in rows if age]
    events.sort(key=lambda event: event[0])
    return [event[1:] for event in events]


def _count(counters: Counters, event: tuple[int, int, int | None]) -> None:
    of_class, start, end = event
    if end is None:
        counters.begin(of_class, start)
    else:
        counters.end(of_class, start, end)


class _Chain:
    """A chain of blocks as a tier has it, added and used one after another."""

    def __init__(self) -> None:
        self.counters = Counters(SPAN)
        self.standings: list[Standing] = []

    def standing(self, key: int) -> Standing:
        return self.standings[key]

    def stand(self, key: int, standing: Standing) -> None:
        self.standings[key] = standing

    def parent(self, key: int) -> int | None:
        return key - 1 if key else None

    def add(self, now: int, n_tokens: int = 512, ghost: Standing | None = None) -> None:
        above = len(self.standings) - 1 if self.standings else None
        new = hazard.arrive(self, above, BLOCK, n_tokens, ghost, now, self.counters)
        self.standings.append(new)

    def touch(self, key: int, now: int) -> None:
        self.standings[key] = hazard.touch(self.standings[key], now, self.counters)

    def evict(self) -> Standing:
        gone = self.standings.pop()
        self.standings[-1] = hazard.inherit(self.standings[-1], gone, self.counters)
        return gone


def _leaves(rows: list[tuple[int, int]]) -> Shelves[int]:
    leaves: Shelves[int] = Shelves()
    for key, (shelf, last) in enumerate(rows):
        leaves.add(shelf, last, key)
    return leaves


# ---- standings


@settings(deadline=None)
@given(standings, st.integers(0, GRADES - 1))
def test_every_standing_has_a_shelf_in_one_byte(standing: Standing, grade: int) -> None:
    """Otherwise a leaf would have no place in the order, or that of another class."""
    assert 0 <= standing.of_class < CLASSES
    assert hazard.shelf_of(standing.of_class, grade) < 256


def test_each_request_that_goes_on_at_the_end_of_a_chain_is_a_turn() -> None:
    """Otherwise conversations would be taken for prompts that part, and never be kept longer."""
    chain = _Chain()
    chain.add(1)
    for turn in range(2, 7):
        chain.touch(-1, turn)
        chain.add(turn)
        end = chain.standings[-1]
        assert (end.turn, end.fresh, end.branches) == (turn, 512, 0)


def test_blocks_that_one_request_adds_in_steps_are_one_turn() -> None:
    """Otherwise checkpoints of a prefill would look like turns."""
    chain = _Chain()
    for now in range(6):
        chain.add(now)
    end = chain.standings[-1]
    assert (end.turn, end.fresh) == (1, 3072)
    assert [s.awaited for s in chain.standings] == 5 * [False] + [True]
    assert chain.counters.waiting.sum() == 1


def test_a_block_that_is_put_again_is_no_other_turn() -> None:
    """Otherwise the insert at the end of a request would count as the next one."""
    chain = _Chain()
    chain.add(1)
    again = hazard.renew(chain.standings[0], 9, chain.counters)
    assert again == replace(chain.standings[0], last=9)
    assert chain.counters.returns.sum() == 0
    assert chain.counters.waiting.sum() == 1


def test_a_block_where_prompts_part_is_shared_and_what_follows_it_new() -> None:
    """Otherwise a system prompt would be one more turn of each prompt below it."""
    chain = _Chain()
    for now in (1, 2):
        chain.add(now)
    chain.touch(0, 3)
    del chain.standings[1:]
    chain.add(4)
    parted, end = chain.standings
    assert (parted.branches, parted.refs, parted.awaited) == (1, 1, True)
    assert (end.turn, end.branches) == (1, 0)


@pytest.mark.parametrize("n_lost", [1, 2, 4])
def test_a_chain_whose_end_had_left_goes_on_with_its_next_turn(n_lost: int) -> None:
    """Otherwise a conversation that lost blocks would start anew, and its rest look shared."""
    chain = _Chain()
    for now in range(6):
        chain.add(now)
    ghost, *_ = [chain.evict() for _ in range(n_lost)]
    rest = len(chain.standings) - 1
    chain.touch(rest, 500)
    for now in range(n_lost - 1):
        chain.add(501 + now)
    chain.add(520, ghost=ghost)
    chain.add(521)
    again, parent = chain.standings[-1], chain.standings[rest]
    assert (again.turn, again.fresh) == (2, 512)
    assert (parent.branches, parent.awaited) == (0, False)
    assert chain.counters.returns.sum() == 1
    assert chain.counters.waiting.sum() == 1


def test_who_added_a_block_did_not_come_back_to_its_parent() -> None:
    """Otherwise each request would count as a return to what it shares, at no age at all."""
    chain = _Chain()
    for now in (1, 2):
        chain.add(now)
    chain.touch(0, 300)
    chain.standings[1:] = []
    chain.add(305)
    before = chain.counters.returns.sum()
    chain.evict()
    assert chain.standings[0].last == 305
    assert chain.counters.returns.sum() == before


@settings(deadline=None)
@given(standings, standings)
def test_a_parent_is_used_no_earlier_than_a_child_that_leaves(
    parent: Standing, child: Standing
) -> None:
    """Otherwise the rest of a chain would leave before older ones."""
    heir = hazard.inherit(parent, child, Counters(SPAN))
    assert heir.last == max(parent.last, child.last)
    assert heir.refs == parent.refs + (child.refs if child.kind == BLOCK else 0)


@settings(deadline=None)
@given(standings)
def test_what_hangs_on_a_block_does_not_change_its_class(parent: Standing) -> None:
    """Otherwise a tail that leaves would make its conversation look like one."""
    tail = Standing(20 * SPAN, TAIL, awaited=True)
    heir = hazard.inherit(parent, tail, Counters(SPAN))
    assert replace(heir, last=parent.last) == parent


def test_a_dropped_block_is_counted_neither_way() -> None:
    """Otherwise pruning would teach that nothing returns."""
    counters = Counters(SPAN)
    tail = hazard.arrive(_Chain(), None, TAIL, 100, None, 5, counters)
    hazard.drop(tail, counters)
    assert counters.waiting.sum() == counters.returns.sum() == 0


# ---- counters


@settings(deadline=None)
@given(waits)
def test_counters_come_back_from_their_bytes(rows: list[tuple[int, int, int | None]]) -> None:
    """Otherwise a restart would forget, or make up, what was learned."""
    counters = Counters(SPAN)
    for event in _events(rows):
        _count(counters, event)
    data = counters.to_bytes()
    assert len(data) < 4096
    assert Counters.from_bytes(data).to_bytes() == data


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_other_bytes_are_no_counters(data: bytes) -> None:
    """Otherwise a damaged row would decide what leaves."""
    sound = Counters(SPAN).to_bytes()
    for damaged in (data, sound[:-1], b"\xff" * 4 + sound[4:], sound[:-4] + b"\x00\x00\xc0\x7f"):
        with pytest.raises(ValueError, match="counters"):
            Counters.from_bytes(damaged)


@settings(deadline=None)
@given(waits)
def test_no_wait_is_left_behind_after_the_horizon(
    rows: list[tuple[int, int, int | None]],
) -> None:
    """Otherwise what never returns would look as if it still might."""
    counters = Counters(SPAN)
    for event in _events([(c, start, None) for c, start, _ in rows]):
        _count(counters, event)
    counters.advance(100 * SPAN)
    assert not counters.waiting.any()
    assert bool(counters.lost.any()) == bool(rows)


@settings(deadline=None)
@given(st.floats(0, 100))
def test_bins_cover_all_ages_in_order(age: float) -> None:
    """Otherwise returns would be counted at another age, or not at all."""
    assert 0 <= hazard.bin_of(age) <= hazard.bin_of(age * 1.5) < hazard.BINS


# ---- scores


def _learned(returning: int, going: int) -> Counters:
    """Counters of one class whose blocks return at an age of 1/2, and one whose never do."""
    counters = Counters(SPAN)
    for i in range(2000):
        counters.begin(returning, 10 * i)
        counters.begin(going, 10 * i)
        if i >= 50:
            counters.end(returning, 10 * (i - 50), 10 * i)
    return counters


def test_a_class_that_returns_outlasts_one_that_does_not() -> None:
    """Otherwise nothing is learned."""
    counters = _learned(returning=10, going=8)
    table = Table.learned(counters, 20 * SPAN)
    for age in (1, 50, 200, 450):
        assert table.score(10, age) > table.score(8, 1) + 1


def test_chances_are_those_that_were_counted() -> None:
    """Otherwise scores would rest on something else than what happened."""
    found = hazard.hazards(_learned(returning=10, going=8), 20 * SPAN)
    at = hazard.bin_of(0.5)
    returned = 1 - np.prod(1 - found[10, : at + 3])
    assert returned > 0.9
    assert found[10, : at - 2].max() < 0.02
    assert found[8].max() < 0.02


def test_blocks_that_wait_still_count_as_not_returned() -> None:
    """Otherwise all that ever returned would look as if it always did, until the horizon."""
    counters = Counters(SPAN)
    for i in range(1000):
        counters.begin(8, i)
    for i in range(100):
        counters.end(8, i, i + SPAN)
    found = hazard.hazards(counters, 2 * SPAN)
    returned = 1 - np.prod(1 - found[8, : hazard.bin_of(1.0) + 2])
    assert 0.03 < returned < 0.25


def test_of_blocks_that_return_at_one_age_the_youngest_leaves() -> None:
    """Otherwise a scan of more than the tier holds would never hit."""
    leaves = _leaves([(10, 20 * SPAN - age) for age in (20, 100, 200, 300, 400)])
    table = Table.learned(_learned(returning=10, going=8), 20 * SPAN)
    assert Choice(leaves, table, 20 * SPAN).first() == 0


def test_nothing_learned_is_least_recently_used() -> None:
    """Otherwise the first blocks to leave would be any."""
    rows = [(shelf, 977 * shelf % 400) for shelf in range(7, CLASSES)]
    table = Table.learned(Counters(SPAN), 0)
    first = Choice(_leaves(rows), table, 500).first()
    assert first == min(range(len(rows)), key=lambda key: rows[key][1])


# ---- who leaves

rows_of_leaves = st.lists(
    st.tuples(st.integers(0, CLASSES - 1), st.integers(0, 20 * SPAN)), min_size=1, max_size=40
)


@settings(deadline=None)
@given(rows_of_leaves)
def test_by_age_the_least_recently_used_leaves_first(rows: list[tuple[int, int]]) -> None:
    """Otherwise the way back to leaf-LRU would not be one."""
    leaves = _leaves(rows)
    choice = Choice(leaves, Table.by_age(SPAN), 20 * SPAN)
    order = []
    while (key := choice.first()) is not None:
        order.append(rows[key][1])
        leaves.remove(*rows[key], key)
        choice.changed(rows[key][0])
    steps = [math.floor(4 * math.log2(max(20 * SPAN - last, 1) / SPAN)) for last in order]
    assert len(order) == len(rows)
    assert all(
        a >= b and (a > b or x <= y)
        for a, b, x, y in zip(steps, steps[1:], order, order[1:], strict=False)
        if a > -28
    )


@settings(deadline=None)
@given(rows_of_leaves, st.integers(0, 2**32 - 1), st.sets(st.integers(0, 39)))
def test_the_leaf_with_the_smallest_score_leaves(
    rows: list[tuple[int, int]], seed: int, spared: set[int]
) -> None:
    """Otherwise looking at a few leaves would miss the one to leave."""
    random = np.random.default_rng(seed)
    steps = random.normal(0, 1, (CLASSES, 56)).cumsum(axis=1)
    table = Table(steps, SPAN)
    now = 20 * SPAN + 1
    scores = {
        key: table.score(shelf, now - last)
        for key, (shelf, last) in enumerate(rows)
        if key not in spared
    }
    first = Choice(_leaves(rows), table, now, spared).first()
    assert (first is None) == (not scores)
    assert first is None or scores[first] <= min(scores.values()) + 1e-6


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=GRADES, max_size=GRADES))
def test_a_grade_more_ages_twice_as_fast(ages: list[int]) -> None:
    """Otherwise snapshots would not leave as the policy of grades has it."""
    now = 1 << 20
    rows = [(hazard.shelf_of(8, grade), now - 64 * age) for grade, age in enumerate(ages)]
    first = Choice(_leaves(rows), Table.by_age(1 << 13), now).first()
    assert first is not None
    oldest = max(age << grade for grade, age in enumerate(ages))
    assert 1 <= oldest / (ages[first] << first) < 2**0.5


def test_a_parent_in_the_place_of_its_child_is_next() -> None:
    """Otherwise the blocks of a chain would be searched for one by one."""
    leaves = _leaves([(8, 10), (8, 20)])
    choice = Choice(leaves, Table.by_age(SPAN), 100)
    assert choice.first() == 0
    leaves.remove(8, 10, 0)
    leaves.add(8, 10, 7)
    choice.left(8, 10, (8, 10, 7))
    assert choice.first() == 7
    leaves.remove(8, 10, 7)
    choice.left(8, 10, None)
    assert choice.first() == 1


def test_a_spared_parent_does_not_take_the_place_of_its_child() -> None:
    """Otherwise a request could evict its own blocks."""
    leaves = _leaves([(8, 10), (8, 20)])
    choice = Choice(leaves, Table.by_age(SPAN), 100, {7})
    leaves.remove(8, 10, 0)
    leaves.add(8, 10, 7)
    choice.left(8, 10, (8, 10, 7))
    assert choice.first() == 1


# ---- ghosts and the trial


def test_ghosts_are_bounded_in_number_and_time() -> None:
    """Otherwise what left would take ever more room."""
    ghosts: hazard.Ghosts[int] = hazard.Ghosts()
    for now in range(100):
        ghosts.add(now, Standing(now, awaited=True), now)
    counters = Counters(10)
    ghosts.trim(counters, 60 + hazard.COHORTS * 10 // 2, 1000)
    assert len(ghosts) == 40
    ghosts.trim(counters, 100, 1)
    assert len(ghosts) == hazard.GHOSTS_PER_BLOCK
    assert ghosts.pop(99) == Standing(99, awaited=True)
    assert ghosts.pop(50) is None


def test_waits_that_began_before_the_counting_are_not_counted() -> None:
    """Otherwise what was forgotten with damaged counters would be taken off the new ones."""
    counters = Counters(SPAN, since=5 * SPAN)
    counters.cancel(8, 4 * SPAN)
    counters.end(8, 4 * SPAN, 6 * SPAN)
    assert not counters.waiting.any()
    assert not counters.returns.any()
    counters.begin(8, 6 * SPAN)
    assert Counters.from_bytes(counters.to_bytes()).waiting.sum() == 1


def test_only_what_is_awaited_becomes_a_ghost() -> None:
    """Otherwise every block of a chain would take a row, and be counted as returned."""
    ghosts: hazard.Ghosts[int] = hazard.Ghosts()
    ghosts.add(1, Standing(5), 6)
    assert len(ghosts) == 0


def test_leaf_lru_takes_over_from_who_finds_less_and_later_lets_go() -> None:
    """Otherwise a policy that is misled would stay so, or never be tried again."""
    trial: hazard.Trial[int] = hazard.Trial()
    path = list(range(10))
    trial.saw(path, 0, 200)
    for _ in range(3):
        assert not trial.is_lost
        trial.saw(path, 0, 200)
    assert trial.is_lost
    for _ in range(40):
        trial.saw(path, 10, 200)
    assert not trial.is_lost


def test_who_finds_as_much_is_left_alone() -> None:
    """Otherwise the policy would give way without a reason."""
    trial: hazard.Trial[int] = hazard.Trial()
    for i in range(1000):
        path = [0, 1, 2, 3 + i % 7]
        trial.saw(path, 4 if i >= 7 else 3 if i else 0, 20)
        assert not trial.is_lost
