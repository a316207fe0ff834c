"""Promote, insert and prefill over the length of a prompt, for models of several sizes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, LRUPromptCache, save_prompt_cache
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import Work, fastest, nothing, record
from bench.entries import KEY, Entry
from bench.state import SHAPES, caches_of, copied, points, prefilled
from tieredkv import TieredPromptCache

ROUNDS = 5
# What takes long is done less often, or not at all.
LONG_BYTES = 400 << 20
LONG_ROUNDS = 3


def rounds(n_bytes: int) -> int:
    return LONG_ROUNDS if n_bytes > LONG_BYTES else ROUNDS


@pytest.mark.parametrize(("name", "n_tokens"), points(2 << 30))
def test_promote(benchmark: BenchmarkFixture, tmp_path: Path, name: str, n_tokens: int) -> None:
    """From a warm page cache, against whole-entry files and a copy of the raw bytes."""
    entry = Entry(tmp_path, SHAPES[name], n_tokens)
    contestants = {
        "ours": entry.from_cold_tier,
        "zstd-3 safetensors": entry.from_zstd,
        "safetensors": entry.from_safetensors,
        "memcpy": copied(SHAPES[name], n_tokens),
    }
    record(benchmark, contestants, rounds(entry.n_bytes), entry.demote)
    benchmark.extra_info["bytes"] = entry.n_bytes
    benchmark.extra_info["encoded / raw bytes"] = entry.encoded_bytes / entry.n_bytes
    assert entry.cache.stats().promotes > 0
    entry.cache.close()


class Inserts:
    """Prompts that are new to every cache, all with one state."""

    def __init__(self, live: list[KVCache], n_tokens: int) -> None:
        self._live = live
        self._n_tokens = n_tokens
        self._firsts = itertools.count()
        self.tokens: list[int] = []
        self.live: list[KVCache] = []

    def renew(self) -> None:
        """Another prompt, and live caches to give away."""
        self.tokens = [next(self._firsts), *range(1, self._n_tokens)]
        self.live = [KVCache.from_state(c.state) for c in self._live]
        mx.clear_cache()


@pytest.mark.parametrize(("name", "n_tokens"), points(LONG_BYTES))
def test_insert(benchmark: BenchmarkFixture, tmp_path: Path, name: str, n_tokens: int) -> None:
    """What the generation thread waits for, against mlx-lm's insert, which copies nothing and
    keeps a batch's memory, and against a copy; and what is on disk at the end of it, against a
    whole-entry file.
    """
    shape = SHAPES[name]
    n_bytes = shape.bytes_per_token * n_tokens
    new = Inserts(caches_of(shape, n_tokens), n_tokens)
    hot = TieredPromptCache(hot_bytes=4 << 30)
    cold = TieredPromptCache(tmp_path / "cold", hot_bytes=4 << 30)
    theirs = LRUPromptCache(1)

    def until_durable() -> None:
        cold.insert_cache(KEY, new.tokens, new.live)
        assert cold.flush(120)

    def whole_entry() -> None:
        path = tmp_path / "entry.safetensors"
        save_prompt_cache(str(path), new.live)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def renew() -> None:
        new.renew()
        for cache in (hot, cold):
            cache.trim_to(n_bytes=0)

    contestants: dict[str, Work] = {
        "ours": lambda: hot.insert_cache(KEY, new.tokens, new.live),
        "mlx-lm": lambda: theirs.insert_cache(KEY, new.tokens, new.live),
        "memcpy": copied(SHAPES[name], n_tokens),
    }
    record(benchmark, contestants, LONG_ROUNDS, renew)
    durable = fastest({"ours": until_durable, "safetensors": whole_entry}, LONG_ROUNDS, renew)
    benchmark.extra_info |= {
        "bytes": n_bytes,
        "seconds until durable": durable["ours"].seconds,
        "seconds until durable, safetensors": durable["safetensors"].seconds,
        "until durable, ours / safetensors": durable["ours"].seconds
        / durable["safetensors"].seconds,
    }
    assert not hot.stats().faults
    assert not cold.stats().faults
    hot.close()
    cold.close()


def test_prefill(benchmark: BenchmarkFixture) -> None:
    """The computation that a hit spares, on the real model."""
    benchmark.pedantic(nothing, rounds=1)
    benchmark.extra_info |= {f"seconds, {n}": s for n, s in prefilled().seconds.items()}
