"""Faults that broke other prompt caches and that no other test shows in small."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import caches
import cold_blocks
import mlx.core as mx
import numpy as np
import pytest
from caches import MODEL
from crash.failpoints import POINTS, wrap
from mlx_lm.models.cache import KVCache

from tieredkv import TieredPromptCache, layout
from tieredkv.codec import PlaneCodec
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.records import PIECE_BYTES

BLOCK_TOKENS = 4
BLOCK_BYTES = BLOCK_TOKENS * 128
TOKENS = list(range(5 * BLOCK_TOKENS))
POISON = 0xA5


@contextmanager
def passing(point: str, act: Callable[[], None]) -> Iterator[None]:
    """Have something done each time that a point is passed."""
    undo = wrap(POINTS[point], act)
    try:
        yield
    finally:
        undo()


def insert(cache: TieredPromptCache, tokens: list[int]) -> None:
    cache.insert_cache(MODEL, tokens, caches.make(tokens))


def hit(cache: TieredPromptCache, tokens: list[int]) -> int:
    """Hit length of a prompt, having checked every row of what came."""
    found, rest = cache.fetch_nearest_cache(MODEL, [*tokens, 7])
    n = len(tokens) + 1 - len(rest)
    assert (n == 0) if found is None else caches.holds(found, tokens[:n])
    return n


# ---- a promote that ends half-way


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is about to be filled has a value that no state has."""
    empty, blank = np.empty, layout.blank

    def poisoned_empty(*args, **options):
        array = empty(*args, **options)
        array.view(np.uint8).fill(POISON) if array.flags.c_contiguous and array.ndim else None
        return array

    def poisoned_blank(specs):
        arrays = blank(specs)
        for array in arrays:
            memoryview(array).cast("B")[:] = bytes([POISON]) * array.nbytes
        return arrays

    monkeypatch.setattr(np, "empty", poisoned_empty)
    monkeypatch.setattr(layout, "blank", poisoned_blank)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cold directory that holds five blocks."""
    with TieredPromptCache(tmp_path, block_tokens=BLOCK_TOKENS) as cache:
        insert(cache, TOKENS)
        assert cache.flush(10)
    return tmp_path


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("n", range(1, 7))
def test_room_that_runs_out_in_a_promote_leaves_no_unfilled_rows(folder: Path, n: int) -> None:
    """If this failed, buffers that nothing was read into would be taken for the prompt's state."""
    with TieredPromptCache(folder, block_tokens=BLOCK_TOKENS, hot_bytes=n * BLOCK_BYTES) as cache:
        assert [hit(cache, TOKENS) for _ in range(2)] == [len(TOKENS)] * 2
        assert cache.nbytes <= n * BLOCK_BYTES
        assert cache.check() == []


@pytest.mark.usefixtures("poisoned")
def test_a_block_that_fails_in_a_promote_leaves_no_unfilled_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this failed, the rows of a block that failed would be part of this hit, or of the next."""
    decode, calls = PlaneCodec.decode_parsed, iter(range(100))

    def third_fails(self, *args):
        if next(calls) == 2:
            raise RuntimeError("no")
        return decode(self, *args)

    monkeypatch.setattr(PlaneCodec, "decode_parsed", third_fails)
    with TieredPromptCache(folder, block_tokens=BLOCK_TOKENS) as cache:
        # Which one is third depends on the threads.
        assert hit(cache, TOKENS) < len(TOKENS)
        assert hit(cache, TOKENS) == len(TOKENS)
        assert cache.stats().faults == {"decode": 1}
        assert cache.nbytes == len(TOKENS) * 128


@pytest.mark.usefixtures("poisoned")
def test_unfilled_rows_would_be_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this failed, the two tests before would pass whatever a promote fills."""

    def fills_nothing(_self, _parsed, into):
        return tuple(into)

    monkeypatch.setattr(PlaneCodec, "decode_parsed", fills_nothing)
    with TieredPromptCache(folder, block_tokens=BLOCK_TOKENS) as cache:
        found, rest = cache.fetch_nearest_cache(MODEL, [*TOKENS, 7])
        assert rest == [7]
        assert not caches.holds(found, TOKENS)


# ---- a block that is only half written


def test_a_block_is_absent_until_all_its_pieces_are_there(tmp_path: Path) -> None:
    """If this failed, a prompt could be answered from a block that is still being written."""
    tier = ColdTier(tmp_path, 64 << 20, cold_blocks.PlainCodec())
    chain = cold_blocks.chain(range(8))
    half_way, go_on = threading.Event(), threading.Event()
    pieces = iter(range(100))

    def stop_before_the_second() -> None:
        if next(pieces) == 1:
            half_way.set()
            assert go_on.wait(30)

    blocks = cold_blocks.blocks(range(8), n_bytes=3 * PIECE_BYTES)
    with passing("commit.piece", stop_before_the_second):
        writing = threading.Thread(target=tier.put, args=(blocks,))
        writing.start()
        assert half_way.wait(30)
        other = ColdTier(tmp_path, 64 << 20, cold_blocks.PlainCodec())
        for reader in (tier, other):
            assert reader.lookup(chain) == 0
            assert reader.nearest(chain.root, chain.tokens_of(0)) is None
            assert reader.load(chain.keys) == []
        go_on.set()
        writing.join()
    assert [cold_blocks.is_right(block) for block in other.load(chain.keys)] == [True] * 2
    assert tier.counters().faults == other.counters().faults == {}
    other.close()
    tier.close()


# ---- a disk that takes nothing for a while, or little


def test_writes_that_fail_for_a_while_leave_nothing_behind(tmp_path: Path) -> None:
    """If this failed, each failed write would hold its memory, and its place in the queue."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with TieredPromptCache(tmp_path, block_tokens=BLOCK_TOKENS) as cache:
        prompts = [[100 + i, *TOKENS] for i in range(20)]
        with passing("commit.ready", full):
            for tokens in prompts:
                insert(cache, tokens)
            assert not cache.flush(10)
        stats = cache.stats()
        assert (stats.queue_blocks, stats.queue_bytes) == (0, 0)
        assert stats.dropped == {"cold_refused": stats.hot.n_blocks}
        assert (stats.cold.n_blocks, stats.bytes_written) == (0, 0)
        cache.trim_to(n_bytes=0)
        assert cache.nbytes == 0
        for tokens in prompts:
            insert(cache, tokens)
        assert cache.flush(10)
        cache.trim_to(n_bytes=0)
        assert [hit(cache, tokens) for tokens in prompts] == [len(TOKENS) + 1] * 20
        assert cache.check() == []


SLOW_BYTES_PER_S = 1_000_000
NOISE_TOKENS = 256
HOT_BYTES = 8 << 20


def noise(seed: int) -> list[KVCache]:
    """Two megabytes of state that no codec makes much smaller."""
    rng = np.random.default_rng(seed)
    live = []
    for _ in range(2):
        cache = KVCache()
        shape = (1, 2, NOISE_TOKENS, 256)
        k, v = (mx.array(rng.standard_normal(shape, np.float32)) for _ in range(2))
        cache.update_and_fetch(k, v)
        live.append(cache)
    mx.eval([(c.keys, c.values) for c in live])
    return live


def seconds_of_inserts(cache: TieredPromptCache, first: int, n: int) -> list[float]:
    """How long each of so many inserts of two megabytes took, having checked the caps."""
    took = []
    for i in range(first, first + n):
        live = noise(i)
        started = time.perf_counter()
        cache.insert_cache(MODEL, [i] * NOISE_TOKENS, live)
        took.append(time.perf_counter() - started)
        stats = cache.stats()
        assert cache.nbytes <= HOT_BYTES
        assert stats.queue_bytes <= HOT_BYTES * 3 // 4
    return sorted(took)


def test_a_slow_disk_costs_drops_and_no_time_or_memory(tmp_path: Path) -> None:
    """If this failed, a disk of a megabyte a second would hold up every prompt, or fill memory."""
    with TieredPromptCache(tmp_path, hot_bytes=HOT_BYTES) as cache:
        quick = seconds_of_inserts(cache, 0, 5)
        # On a busy machine some of these were dropped, too.
        cache.flush(30)
        assert not cache.stats().queue_bytes
        with passing("commit.piece", lambda: time.sleep(PIECE_BYTES / SLOW_BYTES_PER_S)):
            slow = seconds_of_inserts(cache, 5, 50)
        # To wait for the disk would take two seconds each.
        assert slow[len(slow) // 2] < 2 * quick[-1] + 0.05
        assert slow[-1] < 1.0
        stats = cache.stats()
        assert sum(stats.dropped.values()) > 30
        assert stats.faults == {}
        cache.flush(30)
        assert cache.check() == []
