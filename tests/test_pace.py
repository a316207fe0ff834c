"""Whether to read state or to compute it."""

from __future__ import annotations

import time
from pathlib import Path

import caches
import pytest
from caches import MODEL
from hypothesis import given
from hypothesis import strategies as st

from tieredkv import TieredPromptCache
from tieredkv.pace import Pace

PROMPT = list(range(64))


def learned(per_byte: float, per_token: float) -> Pace:
    pace = Pace()
    pace.promoted(1000, 1000 * per_byte)
    pace.prefilled("model", 100, 100 * per_token)
    return pace


def test_the_faster_way_is_taken() -> None:
    """A hit on a disk that stalls took 18 s where the prefill would have taken less."""
    assert learned(per_byte=1e-6, per_token=1e-2).is_worth_promoting("model", 10, 10_000)
    assert not learned(per_byte=1e-4, per_token=1e-2).is_worth_promoting("model", 10, 10_000)


@pytest.mark.parametrize("model", ["another", "model"])
def test_what_is_not_known_is_tried(model: str) -> None:
    """After a start nothing is known, and a prefill of minutes would be the price of caution."""
    pace = Pace()
    pace.promoted(1000, 1e9)
    assert pace.is_worth_promoting(model, 1, 1 << 40)


def test_a_disk_that_has_recovered_is_found_out() -> None:
    """What is never tried again stays slow for ever."""
    pace = learned(per_byte=1.0, per_token=1e-6)
    tried = [pace.is_worth_promoting("model", 1, 1000) for _ in range(64)]
    assert 1 <= sum(tried) <= 8
    for _ in range(100):
        pace.promoted(1000, 1e-9)
    assert pace.is_worth_promoting("model", 1, 1000)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e6)), max_size=20))
def test_any_observations_leave_an_answer(seen: list[tuple[int, float]]) -> None:
    """A clock that doesn't advance must not divide by zero."""
    pace = Pace()
    for n, seconds in seen:
        pace.promoted(n, seconds)
        pace.prefilled("model", n, seconds)
    assert pace.is_worth_promoting("model", 1, 1) in (True, False)


def served(cache: TieredPromptCache, prefill_seconds: float) -> int:
    """Tokens reused of a prompt whose computing takes so long."""
    prompt = [*PROMPT, 7]
    found, rest = cache.fetch_nearest_cache(MODEL, prompt)
    if found is None:
        time.sleep(prefill_seconds)
        cache.insert_cache(MODEL, PROMPT, caches.make(PROMPT))
    assert cache.flush(10)
    cache.trim_to(n_bytes=0)
    return len(prompt) - len(rest)


def test_a_slow_prefill_is_spared(tmp_path: Path) -> None:
    """Else the cold tier would be there for nothing."""
    with TieredPromptCache(tmp_path, block_tokens=8) as cache:
        assert [served(cache, 1.0) for _ in range(4)] == [0, 64, 64, 64]
        assert cache.stats().recomputed == 0


def test_a_fast_one_is_made(tmp_path: Path) -> None:
    """The first promote shows what promotes cost; then it is computed, which costs nothing."""
    with TieredPromptCache(tmp_path, block_tokens=8) as cache:
        cache.insert_cache(MODEL, [1], caches.make([1]))  # what its state looks like
        assert [served(cache, 0.0) for _ in range(4)] == [0, 64, 0, 0]
        assert cache.stats().recomputed == 2
        found, rest = cache.fetch_nearest_cache(MODEL, [*PROMPT, 7])
        assert found is None
        cache.insert_cache(MODEL, PROMPT, caches.make(PROMPT))
        found, rest = cache.fetch_nearest_cache(MODEL, [*PROMPT, 7])
        assert (found is not None, rest) == (True, [7])  # from memory, at no cost
