"""The memory tier: its cap, who leaves first, what is held, and its books."""

from __future__ import annotations

from collections.abc import Sequence

import caches
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tieredkv import policy
from tieredkv.core import Block
from tieredkv.tiers.hot import HotTier, held_bytes

ONE = held_bytes(caches.blocks(caches.chain([1, 2, 3, 4]))[0].specs)


def put(tier: HotTier, tokens: Sequence[int], kind: str = "assistant") -> list[Block]:
    c = caches.chain(tokens)
    blocks = caches.blocks(c)
    tier.put(blocks, kind)
    tier.enter(c, kind)
    return blocks


def has(tier: HotTier, tokens: Sequence[int]) -> bool:
    c = caches.chain(tokens)
    return len(tier.load(c.keys)) == len(c.keys)


def test_the_oldest_leaf_leaves_first() -> None:
    """Evicting a parent, or a younger leaf, would cut prompts that are in use."""
    tier = HotTier(4 * ONE)
    put(tier, range(8))
    put(tier, range(100, 108))
    put(tier, range(200, 204))
    assert has(tier, range(4))
    assert not has(tier, range(8))
    assert has(tier, range(100, 108))


def test_a_use_of_the_deepest_block_protects_the_whole_chain() -> None:
    """Recency that stays at the leaf would let its parents go as soon as it has left."""
    tier = HotTier(4 * ONE)
    put(tier, range(8))
    put(tier, range(100, 108))
    tier.touch([caches.chain(range(8)).keys[-1]])
    put(tier, range(200, 208))
    assert has(tier, range(8))
    assert not has(tier, range(100, 104))


def test_a_prompt_larger_than_the_cap_evicts_nobody() -> None:
    """One entry over the cap would empty the cache for a prefix of itself."""
    tier = HotTier(10 * ONE)
    put(tier, range(40))
    put(tier, range(1000, 1080))
    assert has(tier, range(40))
    assert tier.check() == []


def test_the_system_prompt_outlives_a_burst_of_one_off_prompts() -> None:
    """Plain LRU would lose the prefix that every request shares."""
    tier = HotTier(6 * ONE)
    put(tier, range(8), "system")
    for i in range(1, 50):
        put(tier, range(i * 1000, i * 1000 + 8))
    assert has(tier, range(8))


def test_a_longer_prompt_takes_the_place_of_its_prefix() -> None:
    """A tail kept beside the longer block that has its tokens would be counted twice."""
    tier = HotTier(10 * ONE)
    put(tier, [1, 2])
    put(tier, [1, 2, 3])
    assert tier.n_blocks == 1
    assert tier.n_entries == 1
    assert tier.check() == []


def test_a_prompt_covered_by_a_longer_one_is_not_stored_again() -> None:
    """Both rows would be equal: the second copy only takes room."""
    tier = HotTier(10 * ONE)
    put(tier, [1, 2, 3])
    before = tier.n_bytes
    put(tier, [1, 2])
    assert tier.n_bytes == before
    assert tier.n_entries == 2


def test_held_blocks_stay_until_released_and_count() -> None:
    """A block evicted while it waits for its commit would still take memory, uncounted."""
    tier = HotTier(2 * ONE)
    held = tier.hold(put(tier, range(8)))
    put(tier, range(100, 108))
    assert has(tier, range(8))
    assert not has(tier, range(100, 104))
    tier.release(b.key for b in held)
    put(tier, range(100, 108))
    assert has(tier, range(100, 108))
    assert tier.check() == []


def test_a_tail_replaced_while_held_still_counts() -> None:
    """Its memory isn't free before the writer lets go of it."""
    tier = HotTier(10 * ONE)
    held = tier.hold(put(tier, [1, 2]))
    tail_bytes = held_bytes(held[0].specs)
    put(tier, [1, 2, 3, 4])
    assert tier.n_bytes == ONE + tail_bytes
    tier.release([held[0].key])
    tier.reap()
    assert tier.n_bytes == ONE
    assert tier.check() == []


def test_memory_that_is_held_leaves_at_the_next_call() -> None:
    """Memory pressure that met only held blocks would be forgotten."""
    tier = HotTier(4 * ONE)
    held = tier.hold(put(tier, range(16)))
    tier.trim_to(ONE)
    assert tier.n_bytes == 4 * ONE
    tier.release(b.key for b in held)
    tier.trim_to(ONE)
    assert tier.n_bytes == ONE


def test_a_block_put_again_while_its_first_copy_is_held_is_told_apart() -> None:
    """Released against the wrong one, the copy would be held, and counted, for ever."""
    tier = HotTier(10 * ONE)
    held = tier.hold(put(tier, [1, 2]))
    put(tier, [1, 2, 3])
    tier.limit_entries(0)
    put(tier, [1, 2])
    again = tier.hold(caches.blocks(caches.chain([1, 2])))
    tier.release([held[0].key])
    tier.release([again[0].key])
    tier.trim_to(0)
    assert (tier.n_bytes, tier.check()) == (0, [])


def test_what_can_not_leave_is_not_taken_for_room() -> None:
    """A prompt that doesn't fit would evict all others before that is noticed."""
    tier = HotTier(10 * ONE)
    held = put(tier, range(16))
    tier.hold(held)
    tier.release(b.key for b in held[:-1])
    put(tier, range(100, 124))
    assert tier.make_room(caches.chain(range(200, 228)).keys, [ONE] * 7) == 0
    assert has(tier, range(100, 124))


def test_entries_that_leave_while_held_take_their_blocks_along_later() -> None:
    """With a disk every new prompt is held at first: the limit would free nothing."""
    tier = HotTier(100 * ONE)
    held = tier.hold(put(tier, range(16)))
    tier.limit_entries(0)
    assert (tier.n_entries, tier.n_blocks) == (0, 4)
    tier.release(b.key for b in held)
    tier.reap()
    assert (tier.n_blocks, tier.n_bytes) == (0, 0)


def test_the_block_that_takes_a_tails_place_takes_its_standing() -> None:
    """A system prompt shorter than a block is a tail: a first reply would end its protection."""
    tier = HotTier(6 * ONE)
    put(tier, [1, 2], "system")
    put(tier, [1, 2, 3, 4, 5])
    for i in range(1, 50):
        put(tier, range(i * 1000, i * 1000 + 8))
    assert has(tier, [1, 2, 3, 4])


def test_entries_over_the_limit_leave_with_what_only_they_need() -> None:
    """A count that drops without its memory, or that takes a shared prefix along, is wrong."""
    tier = HotTier(100 * ONE)
    put(tier, [*range(8), 50])
    put(tier, [*range(8), 60])
    put(tier, [*range(8), 70])
    tier.limit_entries(2)
    assert tier.n_entries == 2
    assert not has(tier, [*range(8), 50])
    assert has(tier, [*range(8), 60])
    assert has(tier, [*range(8), 70])


def test_bytes_by_type_add_up() -> None:
    """The server logs them next to the total."""
    tier = HotTier(100 * ONE)
    put(tier, range(8), "system")
    put(tier, [*range(8), 1, 2, 3, 4], "user")
    put(tier, range(100, 110))
    stats = tier.stats_by_type()
    assert sum(s["n_bytes"] for s in stats.values()) == tier.n_bytes
    assert stats["system"]["n_bytes"] == 2 * ONE
    assert stats["user"]["n_sequences"] == 1


@pytest.mark.parametrize(
    ("sizes", "free", "reclaimable", "taken"),
    [
        ([4, 4], 8, 0, 2),
        ([4, 4], 4, 4, 2),
        ([4, 4], 4, 3, 1),
        ([4, 4], 0, 7, 0),
        ([], 0, 0, 0),
    ],
)
def test_admission(sizes: list[int], free: int, reclaimable: int, taken: int) -> None:
    """Whole prompts may evict, parts of one may only fill what is free."""
    assert policy.admit(sizes, free=free, reclaimable=reclaimable) == taken


@pytest.mark.parametrize(
    ("assistant", "user", "system", "first"),
    [(3, 2, 1, "assistant"), (1, 2, 1, "user"), (1, 2, 3, "system"), (0, 0, 1, "system")],
)
def test_types_give_way_as_upstream_has_it(
    assistant: int, user: int, system: int, first: str
) -> None:
    """Users of mlx-lm rely on system prompts outliving replies."""
    counts = {"assistant": assistant, "user": user, "system": system}
    assert policy.victim_order(counts)[0] == first


class HotMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the books right and every block findable or gone."""

    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)

    @initialize(blocks=st.integers(0, 12))
    def make(self, blocks: int) -> None:
        self.tier = HotTier(blocks * ONE)
        self.held: list[Block] = []

    @rule(tokens=prompts, kind=st.sampled_from(["assistant", "user", "system"]))
    def put(self, tokens: list[int], kind: str) -> None:
        put(self.tier, tokens, kind)

    @rule(tokens=prompts)
    def hold(self, tokens: list[int]) -> None:
        self.held += self.tier.hold(caches.blocks(caches.chain(tokens)))

    @rule()
    def release(self) -> None:
        self.tier.release(b.key for b in self.held)
        self.held = []

    @rule(tokens=prompts)
    def touch(self, tokens: list[int]) -> None:
        self.tier.touch(caches.chain(tokens).keys)

    @rule(n=st.integers(0, 12))
    def trim(self, n: int) -> None:
        self.tier.trim_to(n * ONE)

    @rule(n=st.integers(0, 4))
    def limit(self, n: int) -> None:
        self.tier.limit_entries(n)
        assert self.tier.n_entries <= n

    @rule(tokens=prompts)
    def find(self, tokens: list[int]) -> None:
        c = caches.chain(tokens)
        n = self.tier.lookup(c)
        loaded = self.tier.load(c.keys[:n])
        assert [caches.data(b) for b in loaded] == [
            caches.data(b) for b in caches.blocks(c, range(n))
        ]

    @invariant()
    def books_are_right(self) -> None:
        assert self.tier.check() == []


HotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHotMachine = HotMachine.TestCase
