"""What finding a prefix costs, in time and in memory."""

from __future__ import annotations

import gc
import hashlib
import random
import tracemalloc

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, LRUPromptCache
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import fastest, record
from bench.state import CURVES
from tieredkv import Namespace, TieredPromptCache, keys
from tieredkv.core import Block, Chain, TensorSpec
from tieredkv.tiers.hot import HotTier

# No folder of that name: its files would stand for a model.
KEY = ("a model", None, None)
LENGTHS = CURVES["SmolLM2"]
TOKENS = LENGTHS[-1]
ENTRIES = 10
SHARED = 100
# Bytes a cached token takes in mlx-lm's prompt trie.
UPSTREAM_INDEX_BYTES = 224

_RNG = random.Random(1)


def prompt(stem: list[int], n: int) -> list[int]:
    return stem + [_RNG.randrange(50_000) for _ in range(n - len(stem))]


def state(n: int) -> list[KVCache]:
    cache = KVCache()
    x = mx.zeros((1, 1, n, 1), mx.bfloat16)
    cache.update_and_fetch(x, x)
    return [cache]


def packed_and_hashed(tokens: list[int]) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=32).digest()


def lookup(cache: TieredPromptCache, tokens: list[int]) -> object:
    """All that a fetch does before it reads anything, of a prompt that nothing is known of."""
    cache._chains = keys.Chains()
    known = cache._known_namespace(KEY)
    assert known is not None
    return cache._store.match(cache._chain(known[0], keys.as_tokens(tokens)[:-1]))


@pytest.mark.parametrize(
    ("n_tokens", "shares"), [*((n, SHARED) for n in LENGTHS), (TOKENS, TOKENS - 50)]
)
def test_lookup_among_ten_entries(benchmark: BenchmarkFixture, n_tokens: int, shares: int) -> None:
    """A prompt that shares some tokens with all entries, or nearly all with one."""
    stem = prompt([], SHARED)
    prompts = [prompt(stem, n_tokens) for _ in range(ENTRIES)]
    cache, theirs = TieredPromptCache(), LRUPromptCache()
    for tokens in prompts:
        cache.insert_cache(KEY, tokens, state(n_tokens))
        theirs.insert_cache(KEY, tokens, state(n_tokens))
    query = prompt(prompts[3][:shares], n_tokens)
    ratios = record(
        benchmark,
        {
            "ours": lambda: lookup(cache, query),
            "packing and hashing": lambda: packed_and_hashed(query),
        },
        rounds=15,
    )
    trie = fastest({"mlx-lm": lambda: theirs._trie.search(KEY, query)}, rounds=1)["mlx-lm"].seconds
    benchmark.extra_info["seconds, mlx-lm"] = trie
    benchmark.extra_info["mlx-lm / ours"] = trie / benchmark.extra_info["seconds"]
    assert n_tokens < TOKENS or ratios["packing and hashing"] <= 3


def test_a_prompt_is_hashed_once(benchmark: BenchmarkFixture) -> None:
    """Naming the blocks of a prompt and its reply for the insert, after the fetch has named
    those of the prompt; eight prompts with one start are served at once.
    """
    root = keys.namespace_key(Namespace("bench"))
    stem = prompt([], TOKENS // 10)
    prompts = [prompt(stem, TOKENS) for _ in range(8)]
    chains = keys.Chains()
    for tokens in prompts:
        chains.chain(root, keys.as_tokens(tokens)[:-1], 256)
    answered = [keys.as_tokens(tokens + prompt([], 64)) for tokens in prompts]
    left = iter([*answered, answered[-1]])
    ratios = record(
        benchmark,
        {
            "after a fetch": lambda: chains.chain(root, next(left), 256),
            "from the start": lambda: keys.chain(root, answered[0], 256),
        },
        rounds=len(answered),
    )
    assert ratios["from the start"] <= 0.5


def filled(tier: HotTier, n_blocks: int, tokens: int = 256) -> Chain:
    """A hot tier with conversations of 32 blocks; one of them."""
    root = keys.namespace_key(Namespace("bench"))
    spec = (TensorSpec("bool", (1, 1, tokens, 1)),)
    array = mx.zeros((1, 1, tokens, 1), mx.bool_)
    mx.eval(array)
    for _ in range(n_blocks // 32):
        ids = np.array([_RNG.randrange(150_000) for _ in range(tokens * 32)])
        c = keys.chain(root, ids, tokens)
        tier.put(
            [
                Block(root, c.parent(i), c.keys[i], c.tokens_of(i), spec, (array,))
                for i in range(len(c.keys))
            ]
        )
    return c


def test_lookup_as_the_store_grows(benchmark: BenchmarkFixture) -> None:
    """With a hundred times as many blocks, both tiers in use."""
    small, large = (TieredPromptCache(hot_bytes=1 << 40, block_tokens=16) for _ in range(2))
    contestants = {}
    for name, cache, n in (("100k blocks", large, 102_400), ("1k blocks", small, 1024)):
        chain = filled(cache._store.hot, n, tokens=16)
        contestants[name] = lambda cache=cache, chain=chain: cache._store.match(chain)
    ratios = record(benchmark, contestants, rounds=200)
    assert ratios["1k blocks"] <= 3


def test_index_memory_per_token(benchmark: BenchmarkFixture) -> None:
    """Python's memory of the hot tier's index, the blocks' token ids included."""
    n_blocks = 3200
    tier = HotTier(1 << 40)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    benchmark.pedantic(filled, args=(tier, n_blocks), rounds=1)
    gc.collect()
    per_token = (tracemalloc.get_traced_memory()[0] - before) / (n_blocks * 256)
    tracemalloc.stop()
    benchmark.extra_info["bytes per token"] = per_token
    benchmark.extra_info["ours / mlx-lm"] = per_token / UPSTREAM_INDEX_BYTES
    assert per_token / UPSTREAM_INDEX_BYTES <= 0.05
