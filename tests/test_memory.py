"""The hot tier gives memory back before MLX has none left."""

from __future__ import annotations

from pathlib import Path

import caches
import mlx.core as mx
import pytest
from caches import MODEL

from tieredkv import TieredPromptCache

PROMPT = list(range(256))
# Two layers' keys and values of two heads, four wide, in float32.
PROMPT_BYTES = 256 * 2 * 2 * 2 * 4 * 4
N = 8


def filled(folder: Path, room: int) -> TieredPromptCache:
    """A cache with N prompts and room for so many bytes more."""
    with_prompts = mx.get_active_memory() + N * PROMPT_BYTES
    cache = TieredPromptCache(folder, memory_bytes=with_prompts + room)
    for i in range(N):
        live = caches.make([i, *PROMPT[1:]])
        cache.insert_cache(MODEL, [i, *PROMPT[1:]], live)
        del live
        # What is still to be written can't give way.
        assert cache.flush(10)
    return cache


def test_a_prompt_that_would_not_fit_finds_room(tmp_path: Path) -> None:
    """A pool grows until a prefill trips Metal's out-of-memory abort, which nothing can catch."""
    with filled(tmp_path, room=3 * PROMPT_BYTES) as cache:
        before = cache.nbytes
        assert before == N * PROMPT_BYTES
        cache.fetch_nearest_cache(MODEL, [99] * 512)
        # Two prompts' length, twice: once as restored, once in the batch.
        assert before - cache.nbytes == PROMPT_BYTES
        assert cache.stats().yielded_bytes == PROMPT_BYTES
        assert cache.check() == []


def test_what_gave_way_comes_back_from_disk(tmp_path: Path) -> None:
    """Giving back is demoting: the data stays."""
    with filled(tmp_path, room=0) as cache:
        cache.fetch_nearest_cache(MODEL, [99] * 256 * N)
        assert cache.nbytes == 0
        for i in range(N):
            found, rest = cache.fetch_nearest_cache(MODEL, [i, *PROMPT[1:], 7])
            assert rest == [7]
            assert found is not None
            assert caches.holds(found, [i, *PROMPT[1:]])


def test_nothing_is_stored_that_live_prompts_have_no_room_for(tmp_path: Path) -> None:
    """A copy in the hot tier would be what makes the next step fail."""
    live = caches.make(PROMPT)
    mx.eval([c.state for c in live])
    with TieredPromptCache(tmp_path, memory_bytes=mx.get_active_memory()) as cache:
        cache.insert_cache(MODEL, PROMPT, live)
        assert cache.nbytes == 0
        assert cache.stats().refused == {"memory": 1}


def test_without_pressure_nothing_leaves(tmp_path: Path) -> None:
    """Room that is there is what the hot tier is for."""
    with filled(tmp_path, room=1 << 30) as cache:
        cache.fetch_nearest_cache(MODEL, [99] * 512)
        assert cache.nbytes == N * PROMPT_BYTES
        assert cache.stats().yielded_bytes == 0


@pytest.mark.skipif(not mx.metal.is_available(), reason="only Metal recommends a most")
def test_the_recommended_working_set_is_the_limit_on_metal() -> None:
    """Beyond it Metal aborts the process."""
    with TieredPromptCache() as cache:
        assert cache._memory_bytes == mx.device_info()["max_recommended_working_set_size"]


def test_a_prompt_that_grows_keeps_what_it_grows_from(tmp_path: Path) -> None:
    """Without its parents the new part could not be stored anywhere."""
    longer = [*PROMPT, *range(1000, 1256)]
    live = caches.make(PROMPT)
    mx.eval([c.state for c in live])
    room = mx.get_active_memory() + 2 * PROMPT_BYTES
    with TieredPromptCache(tmp_path, memory_bytes=room) as cache:
        cache.insert_cache(MODEL, PROMPT, live)
        assert cache.flush(10)
        grown = caches.make(longer)
        mx.eval([c.state for c in grown])
        cache.insert_cache(MODEL, longer, grown)
        assert cache.stats().refused == {"memory": 1}
        assert cache.stats().dropped == {}
        assert cache.nbytes == PROMPT_BYTES
