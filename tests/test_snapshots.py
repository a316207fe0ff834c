"""Models with state that can't be cut: hits end where that state was captured."""

from __future__ import annotations

from pathlib import Path

import caches
import pytest
from caches import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv import TieredPromptCache

PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def insert(cache: TieredPromptCache, tokens: list[int]) -> None:
    cache.insert_cache(MODEL, tokens, caches.make_hybrid(tokens))


def hit(cache: TieredPromptCache, tokens: list[int]) -> int:
    """Hit length, having checked that both layers hold just the state of it."""
    found, rest = cache.fetch_nearest_cache(MODEL, tokens)
    n = len(tokens) - len(rest)
    assert (found is None) == (n == 0)
    if found is not None:
        assert caches.holds_hybrid(found, tokens[:n])
    return n


def longest(prompts: list[list[int]], tokens: list[int]) -> int:
    """Hit length by looking at every prompt."""
    fit = [len(p) for p in prompts if len(p) < len(tokens) and tokens[: len(p)] == p]
    return max(fit, default=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPT, max_size=10), st.lists(PROMPT, min_size=1, max_size=6))
def test_a_hit_ends_at_the_longest_snapshot(
    prompts: list[list[int]], queries: list[list[int]]
) -> None:
    """Earlier wastes work; anywhere else is another state."""
    cache = TieredPromptCache(block_tokens=4)
    for p in prompts:
        insert(cache, p)
    for q in queries:
        assert hit(cache, q) == longest(prompts, q)
    assert cache.check() == []


@settings(max_examples=15, deadline=None)
@given(
    st.lists(PROMPT, min_size=1, max_size=8),
    st.lists(PROMPT, min_size=1, max_size=4),
    st.integers(0, 20),
)
def test_so_it_does_across_both_tiers(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    queries: list[list[int]],
    kept: int,
) -> None:
    """A snapshot from disk belongs to blocks from memory, and the other way round."""
    with TieredPromptCache(tmp_path_factory.mktemp("cold"), block_tokens=4) as cache:
        for p in prompts:
            insert(cache, p)
        assert cache.flush(10)
        for q in queries:
            cache.trim_to(n_bytes=kept * 64)
            assert hit(cache, q) == longest(prompts, q)
        assert cache.check() == []


def test_tails_that_share_hundreds_of_tokens_are_told_apart(tmp_path: Path) -> None:
    """In the cold tier their rows go over several levels of the index."""
    stem = [100_000 + i for i in range(200)]
    prompts = [stem[:n] for n in (1, 99, 100, 101, 133, 134, 150, 199, 200)]
    prompts += [[*stem[:150], 7], [*stem[:99], -(2**59)]]
    with TieredPromptCache(tmp_path) as cache:
        for p in prompts:
            insert(cache, p)
        assert cache.flush(10)
        cache.trim_to(n_bytes=0)
        for q in (*prompts, [*stem, 5], [*stem[:160], 5], [*stem[:98], 5]):
            assert hit(cache, q) == longest(prompts, q)


def test_a_snapshot_is_stored_once_and_counted(tmp_path: Path) -> None:
    """It weighs as much as many blocks."""
    tokens = list(range(9))
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, tokens)
        n_bytes, n_blocks = cache.nbytes, cache.stats().hot.n_blocks
        assert n_blocks == 4
        insert(cache, tokens)
        assert cache.flush(10)
        assert (cache.nbytes, cache.stats().hot.n_blocks) == (n_bytes, n_blocks)
        assert cache.stats().cold.n_blocks == n_blocks


def test_prompts_that_are_prefixes_stay_entries_of_their_own() -> None:
    """A longer prompt can't stand in for them: its state can't be cut."""
    cache = TieredPromptCache(block_tokens=4)
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    assert len(cache) == 2


def test_without_its_snapshot_a_prompt_is_a_miss() -> None:
    """Blocks alone restore half of the layers."""
    cache = TieredPromptCache(block_tokens=4)
    insert(cache, list(range(9)))
    assert hit(cache, list(range(20))) == 9
    one = cache.nbytes
    cache.trim_to(n_bytes=one - 1)
    assert hit(cache, list(range(20))) == 0
