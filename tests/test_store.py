"""The tiers as one: what was matched is no promise, what is loaded is proven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import caches
import pytest

from tieredkv import Config, TieredStore
from tieredkv.core import Block, BlockKey, Match
from tieredkv.tiers.hot import held_bytes

CHAIN = caches.chain(range(12))
ONE = held_bytes(caches.blocks(CHAIN)[0].specs)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    s = TieredStore(Config(tmp_path, block_tokens=4))
    s.put(CHAIN, caches.blocks(CHAIN))
    assert s.flush(10)
    yield s
    assert s.check() == []
    s.close()


def n_tokens(store: TieredStore, match: Match) -> int:
    hit = store.load(CHAIN, match)
    return hit.n_tokens if hit else 0


def test_what_is_evicted_between_match_and_load_makes_the_hit_shorter(store: TieredStore) -> None:
    """A membership test is no reservation: elsewhere a KeyError ended the engine."""
    match = store.match(CHAIN)
    assert match == Match(CHAIN.keys, 12, 3)
    store.trim_to(2 * ONE)
    assert n_tokens(store, match) == 8


def test_what_another_process_evicts_meanwhile_is_a_miss(store: TieredStore) -> None:
    """The cold tier is shared: its blocks can go between any two calls."""
    store.trim_to(0)
    match = store.match(CHAIN)
    assert match == Match(CHAIN.keys, 12, 0)
    store.cold.trim_to(0)
    assert n_tokens(store, match) == 0


def test_a_prefix_half_hot_and_half_cold_is_one_hit(store: TieredStore) -> None:
    """Leaves leave memory first, so this is the usual state of a long prompt."""
    store.trim_to(ONE)
    match = store.match(CHAIN)
    assert match == Match(CHAIN.keys, 12, 1)
    hit = store.load(CHAIN, match)
    assert hit is not None
    assert (hit.n_tokens, hit.n_hot, hit.n_cold) == (12, 4, 8)
    assert [caches.data(b) for b in hit.blocks] == [caches.data(b) for b in caches.blocks(CHAIN)]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": caches.chain([9, 9, 9, 9]).tokens_of(0)},
        {"parent": BlockKey(bytes(32))},
    ],
    ids=["other tokens", "other parent"],
)
def test_a_block_that_is_not_the_prompts_ends_the_hit_before_it(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch, change: dict[str, bytes]
) -> None:
    """Whatever a tier returns by mistake must not become part of an answer."""
    match = store.match(CHAIN)
    load = store.hot.load

    def wrong(keys: Sequence[BlockKey]) -> list[Block]:
        return [replace(b, **change) if i == 1 else b for i, b in enumerate(load(keys))]

    monkeypatch.setattr(store.hot, "load", wrong)
    assert n_tokens(store, match) == 4


def test_a_decoder_that_fails_in_the_middle_gives_the_part_before(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed transfer that counted as loaded made a wrong answer elsewhere."""
    store.trim_to(0)
    load = store.cold.load
    monkeypatch.setattr(store.cold, "load", lambda *args: load(*args)[:2])
    assert n_tokens(store, store.match(CHAIN)) == 8


def test_blocks_that_the_cold_tier_lost_are_written_again_with_their_children(
    store: TieredStore,
) -> None:
    """A child can't be stored without its parents: they have to come along."""
    store.cold.trim_to(0)
    longer = caches.chain(range(16))
    store.put(longer, caches.blocks(longer, [3]))
    assert store.flush(10)
    assert store.cold.lookup(longer) == 4


def test_known_blocks_are_neither_captured_nor_written_again(store: TieredStore) -> None:
    """Twenty prompts over one prefix cost one prefix."""
    written = store.stats().bytes_written
    longer = caches.chain([*range(12), 50, 51])
    assert store.lacking(longer) == range(3, 4)
    store.put(longer, caches.blocks(longer, [3]))
    assert store.flush(10)
    assert store.lacking(longer) == range(4, 4)
    assert store.stats().bytes_written - written < written
