"""Sections of work between marks, whose instructions `bench.bench_instructions` counts.

It runs `main` under callgrind, which is told to write down its counts whenever ``adler32`` of zlib
is called: nothing else here calls it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import LRUPromptCache

from tieredkv import Namespace, keys
from tieredkv.core import Block, Chain, TensorSpec
from tieredkv.tiers.hot import HotTier

MARK = "adler32"
# No folder of that name: its files would stand for a model.
KEY = ("a model", None, None)
ROOT = keys.namespace_key(Namespace("bench"))
BLOCK_TOKENS = 256
PROMPT_TOKENS = 2048
FEW, MANY = 10, 100
EVICTED = 64

_DICE = np.random.default_rng(1)
SHARED = _DICE.integers(0, 50_000, 100).tolist()
_SPEC = (TensorSpec("bool", (1, 1, BLOCK_TOKENS, 1)),)
_ARRAY = mx.zeros(_SPEC[0].shape, mx.bool_)


def prompt() -> list[int]:
    """One that shares its first tokens with all others."""
    return [*SHARED, *_DICE.integers(0, 50_000, PROMPT_TOKENS - len(SHARED)).tolist()]


def chain(tokens: list[int]) -> Chain:
    """Its blocks' keys."""
    return keys.chain(ROOT, keys.as_tokens(tokens)[:-1], BLOCK_TOKENS)


def filled(prompts: list[list[int]]) -> HotTier:
    """A tier that has them."""
    tier = HotTier(1 << 30)
    for tokens in prompts:
        c = chain(tokens)
        tier.put(
            [
                Block(ROOT, c.parent(i), c.keys[i], c.tokens_of(i), _SPEC, (_ARRAY,))
                for i in range(c.n_full)
            ]
        )
    return tier


def lookup(tier: HotTier, tokens: list[int]) -> None:
    """All that a fetch does to find a prompt's prefix there."""
    c = chain(tokens)
    n = tier.lookup(c)
    if n < len(c.keys):
        tier.nearest(c.parent(n), c.tokens_of(n))


def packed_and_hashed(tokens: list[int]) -> bytes:
    """The least that a name made of all tokens costs."""
    return hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=32).digest()


def sections() -> dict[str, Callable[[], object]]:
    """Each once, by name."""
    mx.eval(_ARRAY)
    prompts = [prompt() for _ in range(MANY)]
    few, many = filled(prompts[:FEW]), filled(prompts)
    theirs = LRUPromptCache(FEW)
    for tokens in prompts[:FEW]:
        theirs.insert_cache(KEY, tokens, [])
    query, known = prompt(), [*prompts[0][:-1], 7]
    # What is made at its first use isn't part of it.
    for tier in (few, many):
        lookup(tier, query)
    packed_and_hashed(query)

    def evict(tier: HotTier) -> None:
        tier.trim_to(tier.n_bytes - EVICTED * BLOCK_TOKENS)

    return {
        "nothing": lambda: None,
        "lookup, among few": lambda: lookup(few, query),
        "lookup, among many": lambda: lookup(many, query),
        "lookup of a known prompt": lambda: lookup(few, known),
        "packing and hashing": lambda: packed_and_hashed(query),
        "mlx-lm": lambda: theirs._trie.search(KEY, query),
        "evict, of few": lambda: evict(few),
        "evict, of many": lambda: evict(many),
    }


def main() -> None:
    """Run the sections, with a mark before each and one at the end."""
    for work in sections().values():
        zlib.adler32(b"")
        work()
    zlib.adler32(b"")
