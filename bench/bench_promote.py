"""From disk to the first new token's keys and values in place, and what it takes there."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zstandard
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import Work, record
from bench.state import EIGHT_B, SMALL, Shape, caches_of
from tieredkv import TieredPromptCache

KEY = ("bench", None, None)
N_TOKENS = 2048
SHAPES = {"SmolLM2": SMALL, "8B": EIGHT_B}


class Stored:
    """One prompt's state in a cold tier and in the files that people use instead."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder = folder
        self.shape = shape
        self.tokens = list(range(N_TOKENS))
        live = caches_of(shape, N_TOKENS)
        self.plain = folder / "entry.safetensors"
        save_prompt_cache(str(self.plain), live)
        self.packed = folder / "entry.zst"
        self.packed.write_bytes(zstandard.compress(self.plain.read_bytes(), 3))
        with self.opened() as cache:
            cache.insert_cache(KEY, self.tokens, live)
            assert cache.flush(120)
            self.encoded_bytes = cache.stats().bytes_written
        self.encoded = folder / "encoded"
        self.encoded.write_bytes(os.urandom(self.encoded_bytes))
        self.raw_bytes = shape.bytes_per_token * N_TOKENS
        self._step = mx.zeros((1, shape.heads, 1, shape.width), mx.bfloat16)

    def opened(self) -> TieredPromptCache:
        return TieredPromptCache(self.folder / "cold", hot_bytes=2 << 30)

    def written(self, live: list[Any]) -> None:
        """Go on by one token, as every hit does."""
        for c in live:
            c.update_and_fetch(self._step, self._step)
        mx.eval([c.state for c in live])

    def from_safetensors(self) -> None:
        self.written(load_prompt_cache(str(self.plain)))

    def from_zstd(self) -> None:
        content = io.BytesIO(zstandard.decompress(self.packed.read_bytes()))
        arrays = mx.load(content, format="safetensors")
        live = []
        for i in range(self.shape.layers):
            state = (arrays[f"{i}.0"], arrays[f"{i}.1"], N_TOKENS)
            live.append(KVCache.from_state(state))
        self.written(live)

    def from_cold_tier(self, cache: TieredPromptCache) -> None:
        live, _ = cache.fetch_nearest_cache(KEY, [*self.tokens, 7])
        assert live is not None
        self.written(live)


@pytest.fixture(scope="module", params=SHAPES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(tmp_path_factory.mktemp("stored"), SHAPES[request.param])


@pytest.fixture
def opened(stored: Stored) -> Iterator[TieredPromptCache]:
    with stored.opened() as cache:
        yield cache


def test_promote_from_a_warm_page_cache(
    benchmark: BenchmarkFixture, stored: Stored, opened: TieredPromptCache
) -> None:
    """Against whole-entry files, compressed and not, and a copy of the raw bytes."""

    def demote() -> None:
        opened.trim_to(n_bytes=0)
        mx.clear_cache()

    source = np.ones(stored.raw_bytes, np.uint8)
    contestants = {
        "ours": partial(stored.from_cold_tier, opened),
        "zstd-3 safetensors": stored.from_zstd,
        "safetensors": stored.from_safetensors,
        "memcpy": source.copy,
    }
    record(benchmark, contestants, rounds=7, before=demote)
    benchmark.extra_info["encoded / raw bytes"] = stored.encoded_bytes / stored.raw_bytes
    assert opened.stats().promotes > 0


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system can't drop its cache")
def test_promote_from_a_cold_page_cache(benchmark: BenchmarkFixture, stored: Stored) -> None:
    """Against reading as many bytes, as they are stored, from a file of their own."""
    seconds = {"ours": float("inf"), "pread": float("inf")}
    for _ in range(5):
        forget(stored.folder / "cold" / "data.mdb")
        with stored.opened() as cache:
            forget(stored.folder / "cold" / "data.mdb")
            took = _timed(lambda cache=cache: stored.from_cold_tier(cache))
            seconds["ours"] = min(seconds["ours"], took)
        forget(stored.encoded)
        seconds["pread"] = min(seconds["pread"], _timed(lambda: _read(stored.encoded)))
    benchmark.pedantic(lambda: None, rounds=1)
    benchmark.extra_info["seconds"] = seconds["ours"]
    benchmark.extra_info["ours / pread"] = seconds["ours"] / seconds["pread"]


def _timed(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        for at in range(0, size, 1 << 20):
            os.pread(fd, 1 << 20, at)
    finally:
        os.close(fd)
