"""From a hit in memory to the first new token's keys and values in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import Work, record
from bench.state import SHAPES, caches_of, copied, points
from tieredkv import TieredPromptCache

# No folder of that name: its files would stand for a model.
KEY = ("a model", None, None)
ROUNDS = 5
# What takes long is done less often, and in the way that matters more: a server merges.
LONG_BYTES = 400 << 20
LONG_ROUNDS = 3


def sequential(cache: Any, prompt: list[int], step: mx.array) -> list[Any]:
    """As mlx-lm serves a prompt by itself: it writes to what it fetched."""
    live, _ = cache.fetch_nearest_cache(KEY, prompt)
    for c in live:
        c.update_and_fetch(step, step)
    mx.eval([c.state for c in live])
    return live


def batched(cache: Any, prompt: list[int], step: mx.array) -> list[Any]:
    """As mlx-lm serves prompts in batches: it merges what it fetched."""
    live, _ = cache.fetch_nearest_cache(KEY, prompt)
    merged = [c.merge([c]) for c in live]
    del live
    for batch in merged:
        batch.update_and_fetch(step, step)
    mx.eval([batch.state for batch in merged])
    return merged


def extra_bytes(work: Work) -> int:
    """The most that MLX held beyond what it did before."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    work()
    return mx.get_peak_memory() - before


HITS = [(batched, *point) for point in points(2 << 30)]
HITS += [(sequential, *point) for point in points(LONG_BYTES)]


@pytest.mark.parametrize(
    ("serve", "name", "n_tokens"), HITS, ids=[f"{s.__name__}-{name}-{n}" for s, name, n in HITS]
)
def test_hot_hit(
    benchmark: BenchmarkFixture, serve: Callable[..., list[Any]], name: str, n_tokens: int
) -> None:
    """Against mlx-lm's prompt cache, and one copy of the bytes into fresh memory."""
    shape = SHAPES[name]
    ours, theirs = TieredPromptCache(hot_bytes=8 << 30), LRUPromptCache()
    tokens = list(range(n_tokens))
    ours.insert_cache(KEY, tokens, caches_of(shape, n_tokens))
    theirs.insert_cache(KEY, tokens, caches_of(shape, n_tokens))
    prompt = [*tokens, 7]
    step = mx.zeros((1, shape.heads, 1, shape.width), mx.bfloat16)
    n_bytes = shape.bytes_per_token * n_tokens

    contestants = {
        "ours": lambda: serve(ours, prompt, step),
        "mlx-lm": lambda: serve(theirs, prompt, step),
        "memcpy": copied(shape, n_tokens),
    }
    rounds = LONG_ROUNDS if n_bytes > LONG_BYTES else ROUNDS
    record(benchmark, contestants, rounds, mx.clear_cache)
    benchmark.extra_info["bytes"] = n_bytes
    mine, other = (extra_bytes(contestants[who]) for who in ("ours", "mlx-lm"))
    benchmark.extra_info["extra memory, ours / mlx-lm"] = mine / other
    assert mine / other <= 1.15
