"""One contract for every tier: what the store may rely on, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import caches
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tieredkv import keys
from tieredkv.codec import PlaneCodec
from tieredkv.core import Chain, LowerTier, Partial, Tier
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.hot import HotTier
from tieredkv.tiers.null import NullTier

PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=14)

Make = Callable[[], Tier]


@pytest.fixture(params=["hot", "cold"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    if request.param == "hot":
        return lambda: HotTier(1 << 20)
    return lambda: ColdTier(tmp_path_factory.mktemp("cold"), 64 << 20, PlaneCodec())


@pytest.fixture
def tier(make: Make) -> Iterator[Tier]:
    t = make()
    yield t
    assert t.check() == []
    t.close()


def put(tier: Tier, tokens: list[int] | range) -> Chain:
    c = caches.chain(tokens)
    assert tier.put(caches.blocks(c)) == len(c.keys)
    return c


def test_implementations_satisfy_the_protocols(tmp_path: Path) -> None:
    """A missing method would be found in production, by an exception that is then contained."""
    assert isinstance(HotTier(1), Tier)
    assert isinstance(NullTier(), LowerTier)
    cold = ColdTier(tmp_path, 64 << 20, PlaneCodec())
    assert isinstance(cold, LowerTier)
    cold.close()


def test_what_is_put_is_loaded_bit_for_bit(tier: Tier) -> None:
    """The law of the whole thing, one tier at a time."""
    c = put(tier, range(10))
    loaded = tier.load(c.keys)
    want = caches.blocks(c)
    assert [(b.root, b.parent, b.key, b.tokens, b.specs) for b in loaded] == [
        (b.root, b.parent, b.key, b.tokens, b.specs) for b in want
    ]
    assert [caches.data(b) for b in loaded] == [caches.data(b) for b in want]


def test_lookup_counts_full_blocks_from_the_start(tier: Tier) -> None:
    """Tails are never found by key: they are leaves, and `nearest` cuts them."""
    put(tier, range(10))
    assert tier.lookup(caches.chain(range(30))) == 2
    assert tier.lookup(caches.chain(range(10)), 1) == 2
    assert tier.lookup(caches.chain(range(10)), 2) == 2
    assert tier.lookup(caches.chain([9, *range(10)])) == 0


def test_lookup_compares_tokens_and_not_only_keys(tier: Tier) -> None:
    """A key that collides must be a miss, not another prompt's state."""
    c = put(tier, range(8))
    forged = Chain(c.root, keys.as_tokens([9, 9, 9, 9]), 4, c.keys[:1])
    assert tier.lookup(forged) == 0


def test_nearest_finds_the_longest_common_prefix_of_the_children(tier: Tier) -> None:
    """A partial hit shorter than it could be is work done twice."""
    first = put(tier, [1, 2, 3, 4, 5, 6, 7])
    second = put(tier, [1, 2, 3, 4, 5, 9])
    parent = first.keys[0]
    raw = caches.chain([5, 6, 8]).tokens_of(0)
    assert tier.nearest(parent, raw) == Partial(first.keys[1], 2)
    raw = caches.chain([5, 9, 9]).tokens_of(0)
    assert tier.nearest(parent, raw) == Partial(second.keys[1], 2)
    assert tier.nearest(parent, caches.chain([8]).tokens_of(0)) is None
    assert tier.nearest(second.keys[1], raw) is None


def test_prefixes_are_the_children_that_lead_a_query_longest_first(tier: Tier) -> None:
    """Only where such a child ends can state that isn't sliced have been captured."""
    by_length = {}
    for tokens in ([5], [5, 6, 7], [5, 6, 9], [8]):
        c = caches.chain([1, 2, 3, 4, *tokens])
        snapshot = keys.with_snapshot(c)
        blocks = caches.blocks(c)
        empty = replace(blocks[0], parent=c.keys[-1], key=snapshot.keys[-1], tokens=b"")
        assert tier.put([*blocks, empty]) == 3
        by_length[len(tokens), tokens[-1]] = c.keys[1]
    query = caches.chain([5, 6, 7, 8]).tokens_of(0)
    assert tier.prefixes(c.keys[0], query) == [
        Partial(by_length[3, 7], 3),
        Partial(by_length[1, 5], 1),
    ]
    assert tier.prefixes(c.keys[0], b"") == []
    assert tier.prefixes(c.keys[1], query) == []


def test_load_stops_at_the_first_absent_block(tier: Tier) -> None:
    """A gap in a prefix is the end of it."""
    c = put(tier, range(8))
    absent = caches.chain(range(50, 54)).keys[0]
    assert [b.key for b in tier.load([c.keys[0], absent, c.keys[1]])] == [c.keys[0]]
    assert tier.load([]) == []


def test_a_block_without_its_parent_is_not_taken(tier: Tier) -> None:
    """It could never be reached, and would take room until evicted by chance."""
    c = caches.chain(range(12))
    blocks = caches.blocks(c)
    assert tier.put(blocks[1:]) == 0
    assert tier.n_blocks == 0
    assert tier.put([blocks[0], blocks[2]]) == 1


def test_known_blocks_are_not_stored_again(tier: Tier) -> None:
    """Twenty prompts over one prefix take the prefix once."""
    put(tier, range(8))
    n_bytes = tier.n_bytes
    put(tier, range(8))
    assert (tier.n_bytes, tier.n_blocks) == (n_bytes, 2)


def test_a_tail_gives_way_to_a_longer_sibling_that_covers_it(tier: Tier) -> None:
    """Both hold the same rows; a growing conversation would keep every length it had."""
    short = put(tier, [1, 2, 3, 4, 5])
    put(tier, [1, 2, 3, 4, 5, 6])
    assert tier.n_blocks == 2
    assert [b.key for b in tier.load(short.keys)] == [short.keys[0]]


def test_a_tail_that_is_covered_counts_as_held(tier: Tier) -> None:
    """There is nothing to store, and nothing was lost."""
    put(tier, [1, 2, 3, 4, 5, 6])
    put(tier, [1, 2, 3, 4, 5])
    assert tier.n_blocks == 2


def test_namespaces_do_not_mix(tier: Tier) -> None:
    """The same tokens under another root are another prompt."""
    put(tier, range(8))
    other = caches.chain(range(8), model="other")
    assert tier.lookup(other) == 0
    assert tier.nearest(other.root, other.tokens_of(0)) is None


def test_trim_evicts_leaves_and_keeps_prefixes(tier: Tier) -> None:
    """A child that outlives its parent can't be restored."""
    c = caches.chain(range(40))
    tier.put(caches.noise(c))
    tier.trim_to(tier.n_bytes * 3 // 4)
    n = tier.lookup(c)
    assert 0 < n < 10
    assert tier.n_blocks == n


def test_the_oldest_leaf_goes_first_and_a_touch_counts(tier: Tier) -> None:
    """A prompt in use must outlive one that isn't."""
    used, idle = caches.chain(range(4)), caches.chain(range(100, 104))
    tier.put(caches.noise(used))
    tier.put(caches.noise(idle))
    tier.touch(used.keys)
    tier.trim_to(tier.n_bytes - 1)
    assert tier.load(used.keys)
    assert not tier.load(idle.keys)


def test_unknown_keys_are_ignored_by_touch(tier: Tier) -> None:
    """What is touched may have been evicted meanwhile."""
    tier.touch(caches.chain(range(4)).keys)


PAST, FUTURE = 1, 1 << 62


def put_until(tier: Tier, tokens: list[int] | range, expires: int) -> Chain:
    c = caches.chain(tokens)
    blocks = [replace(b, expires=expires) for b in caches.blocks(c)]
    assert tier.put(blocks) == len(c.keys)
    return c


def test_what_has_expired_is_not_found(tier: Tier) -> None:
    """Until it is deleted somebody could still be told what was asked."""
    c = put_until(tier, range(10), PAST)
    assert tier.lookup(c) == 0
    assert tier.nearest(c.root, c.tokens_of(0)) is None
    assert tier.nearest(c.keys[1], c.tokens_of(2)) is None
    assert tier.prefixes(c.keys[1], c.tokens_of(2)) == []
    assert tier.present(c.keys) == frozenset()


def test_a_match_ends_before_what_has_expired(tier: Tier) -> None:
    """What others still use must be found up to there, and no further."""
    put_until(tier, range(4), 0)
    c = put_until(tier, range(12), PAST)
    assert tier.lookup(c) == 1
    assert tier.present(c.keys) == {c.keys[0]}


def test_what_has_expired_is_deleted_up_to_what_lasts(tier: Tier) -> None:
    """Prompts that were to be forgotten would stay, or a shared prefix go with them."""
    c = put_until(tier, range(12), PAST)
    kept = put_until(tier, [0, 1, 2, 3, 9, 9, 9, 9], FUTURE)
    assert tier.expire(PAST - 1) == 0
    assert tier.expire(PAST) == 2
    assert tier.n_blocks == 2
    assert (tier.lookup(c), tier.lookup(kept)) == (1, 2)
    assert tier.expire(FUTURE) == 2


def test_what_is_never_to_expire_stays(tier: Tier) -> None:
    """Who says nothing of time keeps prompts as long as there is room."""
    put(tier, range(8))
    assert tier.expire(FUTURE) == 0
    assert tier.n_blocks == 2


def test_a_block_lives_as_long_as_one_below_it(tier: Tier) -> None:
    """A conversation that goes on would lose its beginning."""
    old = put_until(tier, range(4), PAST)
    new = put_until(tier, range(8), FUTURE)
    assert tier.lookup(old) == 1
    assert tier.expire(PAST) == 0
    assert tier.lookup(new) == 2


@pytest.mark.parametrize(("expires", "n_found"), [(PAST, 0), (FUTURE, 2), (0, 2)])
def test_a_use_puts_the_end_off_and_never_brings_it_nearer(
    tier: Tier, expires: int, n_found: int
) -> None:
    """Entries in use would vanish, or those of somebody who wants to keep them."""
    c = put_until(tier, range(8), PAST)
    tier.touch(c.keys[-1:], expires)
    tier.touch(c.keys[-1:], PAST)
    assert tier.lookup(c) == n_found
    assert tier.expire(FUTURE - 1) == 2 - n_found


def test_a_block_that_is_put_again_lasts_longer(tier: Tier) -> None:
    """The second who asks may want to keep what the first wanted to forget."""
    put_until(tier, range(8), PAST)
    c = put_until(tier, range(8), FUTURE)
    assert tier.lookup(c) == 2
    put_until(tier, range(8), PAST)
    assert tier.lookup(c) == 2


def test_what_covers_a_tail_lasts_as_long_as_the_tail_should(tier: Tier) -> None:
    """A prompt that needed no block of its own would be lost with another's."""
    put_until(tier, range(7), PAST)
    put_until(tier, range(6), FUTURE)
    assert tier.expire(PAST) == 0
    assert tier.lookup(caches.chain(range(6))) == 1
    assert tier.nearest(caches.chain(range(4)).keys[0], caches.chain([4, 5]).tokens_of(0))


def test_what_replaces_a_tail_lasts_as_long_as_it_did(tier: Tier) -> None:
    """A conversation that goes on for a moment would be lost with that moment."""
    put_until(tier, range(6), FUTURE)
    put_until(tier, range(7), PAST)
    assert tier.expire(PAST) == 0
    assert tier.n_blocks == 2


def test_a_parent_takes_over_the_later_expiry_of_a_child_that_leaves(tier: Tier) -> None:
    """Only the deepest block of a hit is touched: what is above would expire once that leaves."""
    c = caches.chain(range(8))
    tier.put([replace(b, expires=PAST) for b in caches.noise(c)])
    tier.touch(c.keys[1:], FUTURE)
    tier.trim_to(tier.n_bytes - 1)
    assert tier.n_blocks == 1
    assert tier.expire(PAST) == 0
    assert tier.lookup(c) == 1


def test_after_close_nothing_is_found_and_nothing_taken(make: Make) -> None:
    """A server that ends still has requests under way."""
    tier = make()
    c = put(tier, range(8))
    tier.close()
    tier.close()
    assert tier.lookup(c) == 0
    assert tier.nearest(c.root, c.tokens_of(0)) is None
    assert tier.load(c.keys) == []
    assert tier.put(caches.blocks(c)) == 0
    tier.touch(c.keys)
    tier.trim_to(0)


# `make` makes a new tier for each example, so that it is set up only once does no harm.
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(PROMPT, max_size=8), PROMPT)
def test_lookup_and_nearest_agree_with_a_search_of_all_prompts(
    make: Make, prompts: list[list[int]], query: list[int]
) -> None:
    """The oracle looks at every prompt; the tier must find as much in a few steps."""
    tier = make()
    for p in prompts:
        put(tier, p)
    c = caches.chain(query)
    n = tier.lookup(c)
    found = n * 4
    if n < len(c.keys):
        partial = tier.nearest(c.parent(n), c.tokens_of(n))
        found += partial.n_tokens if partial else 0
    assert found == max((shared(p, query) for p in prompts), default=0)
    assert tier.check() == []
    tier.close()


def shared(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def test_the_null_tier_finds_nothing_and_wants_nothing() -> None:
    """A store without a disk must not queue writes for one."""
    tier, c = NullTier(), caches.chain(range(8))
    assert tier.put(caches.blocks(c)) == 0
    assert tier.missing(c) == len(c.keys)
    assert (tier.lookup(c), tier.lookup(c, 1), tier.load(c.keys)) == (0, 1, [])
    assert tier.nearest(c.root, c.tokens_of(0)) is None
    assert (tier.n_bytes, tier.n_blocks, tier.check(), tier.layouts(c.root)) == (0, 0, [], [])
    tier.close()


def test_missing_tells_what_the_cold_tier_lacks(tmp_path: Path) -> None:
    """The store queues from there on: too early writes twice, too late leaves a gap."""
    tier = ColdTier(tmp_path, 64 << 20, PlaneCodec())
    c = caches.chain(range(10))
    assert tier.missing(c) == 0
    tier.put(caches.blocks(c, range(2)))
    assert tier.missing(c) == 2
    tier.put(caches.blocks(c))
    assert tier.missing(c) == 3
    assert tier.missing(caches.chain(range(9))) == 3  # its tail is covered
    tier.close()
