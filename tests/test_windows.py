"""Models with sliding windows: hits at the end of every block whose rows were still there."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import caches
import mlx.core as mx
import pytest
from caches import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from tieredkv import SaltedPrompt, TieredPromptCache, keys, layout, policy
from tieredkv.core import GRADES, WINDOW
from tieredkv.patch import make_rings_exact
from tieredkv.tiers.records import MAX_RAW_BYTES, piece_key

SIZES = (6, 3)
BLOCK = 4


def advance(live: list[Any], tokens: list[int], start: int, stop: int) -> None:
    """One step of a model with a layer of attention and two of sliding windows."""
    for layer, cache in enumerate(live):
        k, v = (mx.array(caches.rows(tokens[:stop], 2 * layer + i)) for i in (0, 1))
        cache.update_and_fetch(k[:, :, start:stop], v[:, :, start:stop])
    layout.vouch(live)


def make() -> list[Any]:
    return [*caches.make([], layers=0), caches.KVCache(), *map(RotatingKVCache, SIZES)]


def holds(live: list[Any], tokens: list[int]) -> bool:
    """Whether all layers hold just the state of ``tokens``: rings in the order of time."""
    if not caches.holds(live[:1], tokens):
        return False
    for layer, ring in enumerate(live[1:], 1):
        n = min(ring.max_size, len(tokens))
        for i, rows in enumerate((ring.keys, ring.values)):
            got = ring._temporal_order(rows)[:, :, -n:]
            want = mx.array(caches.rows(tokens, 2 * layer + i)[:, :, -n:])
            if ring.offset != len(tokens) or not mx.array_equal(got, want).item():
                return False
    return True


def serve(
    cache: TieredPromptCache, tokens: list[int], stops: list[int], ttl: float | None = None
) -> None:
    """Prefill in steps, with an insert after each."""
    live, done = make(), 0
    for stop in stops:
        advance(live, tokens, done, stop)
        prompt = SaltedPrompt(tokens[:stop], ttl=ttl)
        cache.insert_cache(MODEL, prompt, live, cache_type="user")
        done = stop


def hit(cache: TieredPromptCache, tokens: list[int]) -> int:
    """Hit length, having checked the state, and that going on from it is as without the cache."""
    found, rest = cache.fetch_nearest_cache(MODEL, tokens)
    n = len(tokens) - len(rest)
    assert (found is None) == (n == 0)
    if found is not None:
        assert holds(found, tokens[:n])
        for stop in range(n + 1, len(tokens) + 1):
            advance(found, tokens, stop - 1, stop)
        assert holds(found, tokens)
    return n


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with TieredPromptCache(
        tmp_path if request.param == "disk" else None, block_tokens=BLOCK
    ) as cache:
        yield cache
        assert cache.check() == []
        assert cache.stats().faults == {}


def test_a_prompt_that_diverges_hits_at_the_block_before(cache: TieredPromptCache) -> None:
    """Without windows it would be prefilled from the end of the last message that it shares."""
    tokens = list(range(40))
    serve(cache, tokens, [38])
    assert cache.flush(10)
    if cache.stats().cold.n_blocks:
        cache.trim_to(n_bytes=0)
    for shared in (3, 5, 9, 20, 31, 37):
        assert hit(cache, [*tokens[:shared], 99, 98, 97]) == shared // BLOCK * BLOCK


def test_rows_that_have_left_the_ring_are_no_window(cache: TieredPromptCache) -> None:
    """Of a step only the rows before it and in it are there; others would be another state."""
    tokens = list(range(40))
    live = make()
    advance(live, tokens, 0, 20)
    advance(live, tokens, 20, 36)
    cache.insert_cache(MODEL, tokens[:36], live)
    hits = {n: hit(cache, [*tokens[:n], 99, 98]) for n in (8, 16, 20, 25, 29, 35, 37)}
    assert hits == {8: 0, 16: 0, 20: 0, 25: 0, 29: 28, 35: 32, 37: 36}


def windows_of(cache: TieredPromptCache, tokens: list[int]) -> list[Any]:
    known = cache._known_namespace(MODEL)
    assert known is not None
    return [keys.window_key(k) for k in cache._chain(known[0], keys.as_tokens(tokens)).keys]


def test_a_block_needs_the_windows_of_all_that_its_ring_spans() -> None:
    """One that was evicted leaves a hole in the ring."""
    tokens = list(range(24))
    cache = TieredPromptCache(block_tokens=BLOCK)
    serve(cache, tokens, [24])
    cache._store.hot._evict(cache._store.hot._nodes[windows_of(cache, tokens)[2]], "room")
    hits = {n: hit(cache, [*tokens[:n], 99, 98]) for n in (9, 13, 17, 21)}
    assert hits == {9: 8, 13: 8, 17: 8, 21: 20}


def test_a_ring_that_decoding_has_turned_is_stored_as_it_lies(cache: TieredPromptCache) -> None:
    """Attention sums the rows in their order: in another one its last bits would differ."""
    tokens = list(range(16))
    serve(cache, tokens, [14, 15, 16])
    found, rest = cache.fetch_nearest_cache(MODEL, [*tokens, 50])
    assert len(rest) == 1
    live = make()
    for start, stop in ((0, 14), (14, 15), (15, 16)):
        advance(live, tokens, start, stop)
    assert found is not None
    for got, want in zip(found[1:], live[1:], strict=True):
        assert got._idx == want._idx
        assert mx.array_equal(got.keys, want.keys[:, :, : got.keys.shape[2]]).item()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=2, max_size=30), st.integers(1, 12)),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=6),
    st.integers(0, 60),
)
def test_whatever_is_evicted_a_hit_is_right(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[tuple[list[int], int]],
    queries: list[list[int]],
    kept: int,
) -> None:
    """Windows and snapshots come and go by themselves; what is left must be the state."""
    with TieredPromptCache(tmp_path_factory.mktemp("cold"), block_tokens=BLOCK) as cache:
        for tokens, step in prompts:
            serve(cache, tokens, [*range(step, len(tokens), step), len(tokens)])
        assert cache.flush(10)
        for query in queries:
            cache.trim_to(n_bytes=kept * 128)
            hit(cache, query)
        assert cache.check() == []
        assert cache.stats().faults == {}


def test_the_mark_of_a_window_is_no_token() -> None:
    """A prompt that could name it would be answered with a window as if it were a block."""
    tokens = list(range(12))
    cache = TieredPromptCache(block_tokens=BLOCK)
    serve(cache, tokens, [12])
    assert cache.fetch_nearest_cache(MODEL, [*tokens[:4], WINDOW, 5])[0] is None
    assert cache.stats().misses == {"fault": 1}


def test_positions_that_more_powers_of_two_divide_stay_longer() -> None:
    """Thinned from the front, all hits would be at the end."""
    spared = [policy.spared_between(i * 256, 256) for i in (1, 2, 3, 4, 8)]
    assert spared == [64, 128, 64, 256, 512]
    grades = [policy.grade(1 << 20, s, 4096) for s in spared]
    assert grades == sorted(grades, reverse=True) or grades[2] == grades[0]
    assert max(grades) < GRADES


@given(st.integers(1, MAX_RAW_BYTES), st.floats(0.25, 1e7), st.integers(0, 1 << 24))
def test_a_grade_is_within_bounds(n_bytes: int, spared: float, bytes_per_token: int) -> None:
    """It is a byte of a key, and a shift."""
    assert 0 <= policy.grade(n_bytes, spared, bytes_per_token) < GRADES


def test_a_hit_that_damage_shortens_is_taken_with_fewer_windows(tmp_path: Path) -> None:
    """Of two blocks, each with its window, the second is damaged."""
    tokens = list(range(8))
    with TieredPromptCache(tmp_path, block_tokens=BLOCK) as cache:
        serve(cache, tokens, [8])
        assert cache.flush(10)
        cache.trim_to(n_bytes=0)
        known = cache._known_namespace(MODEL)
        assert known is not None
        damaged = cache._chain(known[0], keys.as_tokens(tokens)).keys[1]
        cache._store.cold._write(
            lambda ledger, _: ledger._txn.put(
                piece_key(damaged, 0),
                bytes(ledger.record(damaged).blob_bytes),
                db=ledger._dbs.blob,
            )
        )
        assert hit(cache, [*tokens, 9]) == 4
        assert cache.stats().faults == {"corrupt": 1}


def unvouched(tokens: list[int]) -> list[Any]:
    """Live caches that hold ``tokens``, of whose rings nobody says that all rows are tokens'."""
    live = make()
    advance(live, tokens, 0, len(tokens))
    for ring in live[1:]:
        del ring.tieredkv_vouched
    return live


def test_rows_that_nobody_vouches_for_are_believed_as_far_as_masks_reach() -> None:
    """In mlx-lm's batches rows of padding lie before them and pass for tokens."""
    tokens = list(range(40))
    live = unvouched(tokens[:38])
    cache = TieredPromptCache(block_tokens=BLOCK)
    cache.insert_cache(MODEL, tokens[:38], live)
    hits = {n: hit(cache, [*tokens[:n], 99, 98]) for n in (8, 20, 30, 33, 39)}
    assert hits == {8: 0, 20: 0, 30: 0, 33: 0, 39: 38}


@pytest.mark.parametrize("seed", range(4))
def test_rings_of_a_batch_have_only_rows_of_tokens(seed: int) -> None:
    """Prompts of unlike length in several steps, with others that join: what is extracted must be
    the rows of each prompt, and no padding.
    """
    make_rings_exact()
    dice = random.Random(seed)
    lengths = [dice.randrange(1, 60) for _ in range(3)]
    prompts = [[1000 * i + j + 1 for j in range(n)] for i, n in enumerate(lengths)]

    def rows(tokens: list[int]) -> mx.array:
        return mx.array(tokens, mx.float32).reshape(1, 1, -1, 1)

    batch = RotatingKVCache(SIZES[0]).merge([RotatingKVCache(SIZES[0]) for _ in prompts])
    done = 0
    while done < max(lengths):
        step = dice.randrange(1, 25)
        parts = [p[done : done + step] for p in prompts]
        longest = max(map(len, parts))
        padding = [longest - len(p) for p in parts]
        if longest > 1:
            batch.prepare(lengths=[len(p) for p in parts], right_padding=padding)
            padded = [rows([*p, *[-1] * k]) for p, k in zip(parts, padding, strict=True)]
            x = mx.concatenate(padded, axis=0)
            batch.update_and_fetch(x, x)
            batch.finalize()
            mx.eval(batch.state[:4])
        else:
            break
        done += longest
        for i, p in enumerate(prompts):
            ring = batch.extract(i)
            n = min(done, len(p))
            held = ring.keys.shape[2]
            assert ring.offset == n
            assert ring.keys.flatten().tolist() == p[n - held : n]


def test_windows_of_known_blocks_are_looked_at_too() -> None:
    """What overflowed in a ring would answer every prompt that hits there with nonsense."""
    tokens = list(range(24))
    live = unvouched(tokens)
    cache = TieredPromptCache(block_tokens=BLOCK)
    cache.insert_cache(MODEL, tokens, live)
    spoilt = make()
    advance(spoilt, tokens, 0, 24)
    spoilt[1].keys[0, 0, 17, 0] = float("nan")
    cache.insert_cache(MODEL, tokens, spoilt)
    assert cache.stats().refused == {"nonfinite": 1}
    assert hit(cache, [*tokens[:21], 99, 98]) == 0


def test_windows_last_as_long_as_the_longest_prompt_that_needs_them(
    cache: TieredPromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is to be kept would be found no more, for want of another's windows."""
    tokens = list(range(18))
    serve(cache, tokens, [16], ttl=60)
    serve(cache, tokens, [16])
    cache.flush()
    later = time.time_ns() + 61 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: later)
    cache._store.cold.expire(later)
    assert hit(cache, tokens) == 16
    cache.trim_to(n_bytes=0)
    assert hit(cache, tokens) == (16 if cache.stats().cold.cap_bytes else 0)


def test_a_pinned_prefix_keeps_the_windows_at_its_end(tmp_path: Path) -> None:
    """It could not be restored, and would be kept for nothing."""
    with TieredPromptCache(tmp_path, block_tokens=BLOCK) as cache:
        tokens = list(range(18))
        serve(cache, tokens, [16])
        pinned = cache.pin(MODEL, tokens)
        assert pinned.n_tokens == 16
        for pin in (lambda: None, lambda: (cache.unpin_id(pinned.id), cache.pin_id(pinned.id))):
            pin()
            cache._store.cold.trim_to(0)
            cache.trim_to(n_bytes=0)
            assert hit(cache, tokens) == 16
        cache.unpin(MODEL, tokens)
        cache._store.cold.trim_to(0)
        assert cache.stats().cold.n_blocks == 0
