"""Whether to read state or to compute it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from caches import MODEL
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from tieredkv import TieredPromptCache
from tieredkv.pace import Pace

PROMPT = list(range(64))


def learned(per_byte: float, per_token: float) -> Pace:
    pace = Pace()
    pace.promoted(1 << 20, (1 << 20) * per_byte)
    pace.prefilled("model", 100, 100 * per_token)
    return pace


def test_the_faster_way_is_taken() -> None:
    """A hit on a disk that stalls took 18 s where the prefill would have taken less."""
    assert learned(per_byte=1e-6, per_token=1e-2).is_worth_promoting("model", 100, 1_000_000)
    assert not learned(per_byte=1e-4, per_token=1e-2).is_worth_promoting("model", 100, 1_000_000)


def test_what_takes_no_time_is_not_weighed() -> None:
    """Overhead and noise would decide, and hits come and go."""
    pace = learned(per_byte=1e-6, per_token=1e-9)
    assert pace.is_worth_promoting("model", 10, 10_000)
    assert not pace.is_worth_promoting("model", 10, 1_000_000)
    pace = Pace()
    pace.promoted(1000, 60.0)
    pace.prefilled("model", 100, 1e-9)
    assert pace.is_worth_promoting("model", 10, 1 << 30)


@pytest.mark.parametrize("model", ["another", "model"])
def test_what_is_not_known_is_tried(model: str) -> None:
    """After a start nothing is known, and a prefill of minutes would be the price of caution."""
    pace = Pace()
    pace.promoted(1 << 20, 1e9)
    assert pace.is_worth_promoting(model, 1, 1 << 40)


def test_a_disk_that_has_recovered_is_found_out() -> None:
    """What is never tried again stays slow for ever."""
    pace = learned(per_byte=1.0, per_token=1e-6)
    tried = [pace.is_worth_promoting("model", 1, 1000) for _ in range(64)]
    assert 1 <= sum(tried) <= 8
    for _ in range(100):
        pace.promoted(1 << 20, 1e-9)
    assert pace.is_worth_promoting("model", 1, 1000)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e6)), max_size=20))
def test_any_observations_leave_an_answer(seen: list[tuple[int, float]]) -> None:
    """A clock that doesn't advance must not divide by zero."""
    pace = Pace()
    for n, seconds in seen:
        pace.promoted(n, seconds)
        pace.prefilled("model", n, seconds)
    assert pace.is_worth_promoting("model", 1, 1) in (True, False)


def state() -> list[KVCache]:
    """64 MB, so that a promote takes its time."""
    cache = KVCache()
    x = mx.random.normal((1, 8, len(PROMPT), 16384))
    cache.update_and_fetch(x, x)
    return [cache]


def served(cache: TieredPromptCache, prefill_seconds: float) -> int:
    """Tokens reused of a prompt whose computing takes so long."""
    prompt = [*PROMPT, 7]
    found, rest = cache.fetch_nearest_cache(MODEL, prompt)
    if found is None:
        time.sleep(prefill_seconds)
        cache.insert_cache(MODEL, PROMPT, state())
    assert cache.flush(60)
    cache.trim_to(n_bytes=0)
    return len(prompt) - len(rest)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[TieredPromptCache]:
    with TieredPromptCache(tmp_path, block_tokens=8) as cache:
        # What its state looks like.
        cache.insert_cache(MODEL, [999], first_of(state()))
        assert cache.flush(60)
        yield cache


def first_of(live: list[KVCache]) -> list[KVCache]:
    for c in live:
        c.trim(c.offset - 1)
    return live


def test_a_slow_prefill_is_spared(opened: TieredPromptCache) -> None:
    """Else the cold tier would be there for nothing."""
    assert [served(opened, 5.0) for _ in range(3)] == [0, 64, 64]
    assert opened.stats().recomputed == 0


def test_a_fast_one_is_made(opened: TieredPromptCache) -> None:
    """The first promote shows what promotes cost; then it is computed, which costs nothing."""
    assert [served(opened, 0.0) for _ in range(4)] == [0, 64, 0, 0]
    assert opened.stats().recomputed == 2
    found, _ = opened.fetch_nearest_cache(MODEL, [*PROMPT, 7])
    assert found is None
    opened.insert_cache(MODEL, PROMPT, state())
    _, rest = opened.fetch_nearest_cache(MODEL, [*PROMPT, 7])
    assert rest == [7]  # from memory, at no cost
