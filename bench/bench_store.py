"""What the store costs in memory and on disk, each as a ratio to a baseline of the same run.

``make bench`` runs it and prints the ratios. Every figure is in the benchmark's ``extra_info`` in
``build/bench.json``; the ratios that the project promises are asserted.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, save_prompt_cache
from pytest_benchmark.fixture import BenchmarkFixture

from bench.state import PREFILLED, prefilled, text_tokens
from tieredkv import TieredPromptCache

BRANCHES = 20
BRANCH_TOKENS = 32
# No folder of that name: its files would stand for a model.
KEY = ("a model", None, None)


def _branch(prefix: int, i: int) -> list[KVCache]:
    """Live caches of the first tokens of real text, and of as many others as a branch has: those
    of other tokens of the text, since only their number counts here.
    """
    leaves = prefilled().leaves
    own = slice(i * BRANCH_TOKENS, (i + 1) * BRANCH_TOKENS)
    found = []
    for pair in zip(leaves[::2], leaves[1::2], strict=True):
        cache = KVCache()
        cache.update_and_fetch(*(x[:, :, :prefix] for x in pair))
        cache.update_and_fetch(*(x[:, :, own] for x in pair))
        found.append(cache)
    mx.eval([c.state for c in found])
    return found


@pytest.mark.parametrize(("prefix", "promised"), [(2048, 0.10), (2000, 0.15)])
def test_twenty_branches_over_one_prefix(
    benchmark: BenchmarkFixture, tmp_path: Path, prefix: int, promised: float
) -> None:
    """Bytes of the cold tier's file against twenty whole-entry safetensors files.

    A prefix of whole blocks, and one that ends inside a block: its 208 tokens there are stored
    again by every branch.
    """
    tokens = text_tokens()
    whole = 0

    def insert_all() -> TieredPromptCache:
        nonlocal whole
        cache = TieredPromptCache(tmp_path / "cold", hot_bytes=1 << 30)
        for i in range(BRANCHES):
            start = PREFILLED + i * BRANCH_TOKENS
            own = tokens[start : start + BRANCH_TOKENS]
            branch = _branch(prefix, i)
            save_prompt_cache(str(tmp_path / "entry.safetensors"), branch)
            whole += (tmp_path / "entry.safetensors").stat().st_size
            cache.insert_cache(KEY, tokens[:prefix] + own, branch)
        assert cache.flush(60)
        return cache

    cache = benchmark.pedantic(insert_all, rounds=1)
    file_bytes = (tmp_path / "cold" / "data.mdb").stat().st_size
    benchmark.extra_info |= {
        "cold_file_bytes": file_bytes,
        "cold_live_bytes": cache.stats().cold.n_bytes,
        "whole_entry_bytes": whole,
        "ratio": file_bytes / whole,
    }
    cache.close()
    assert file_bytes / whole <= promised


def test_memory_under_random_inserts_and_fetches(
    benchmark: BenchmarkFixture, tmp_path: Path
) -> None:
    """The most that MLX ever held because of the store, against its cap: 10,000 operations."""
    cap = 4_000_000
    operations = 10_000
    rng = random.Random(7)
    cache = TieredPromptCache(tmp_path, hot_bytes=cap, cold_bytes=256 << 20, block_tokens=64)
    peak = 0

    def state(n: int) -> list[KVCache]:
        caches = [KVCache() for _ in range(2)]
        for c in caches:
            x = mx.full((1, 2, n, 16), rng.random(), mx.bfloat16)
            c.update_and_fetch(x, x)
        return caches

    def run() -> None:
        nonlocal peak
        prompts: list[list[int]] = []
        gc.collect()
        base = mx.get_active_memory()
        for _ in range(operations):
            if prompts and rng.random() < 0.5:
                cache.fetch_nearest_cache(KEY, [*rng.choice(prompts), 1])
            else:
                stem = rng.choice(prompts)[: rng.randrange(400)] if prompts else []
                tokens = stem + [rng.randrange(1000) for _ in range(rng.randrange(1, 300))]
                prompts = [*prompts[-200:], tokens]
                cache.insert_cache(KEY, tokens, state(len(tokens)))
            peak = max(peak, mx.get_active_memory() - base)

    benchmark.pedantic(run, rounds=1)
    stats = cache.stats()
    benchmark.extra_info |= {
        "cap_bytes": cap,
        "peak_bytes": peak,
        "ratio": peak / cap,
        "hits": stats.hits,
        "inserts": stats.inserts,
        "promotes": stats.promotes,
        "demotes": stats.demotes,
        "evictions_cold": stats.evictions_cold,
    }
    assert cache.check() == []
    assert stats.faults == {}
    cache.close()
    assert peak / cap <= 1.0
