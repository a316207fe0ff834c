"""Live caches and blocks whose every row tells which tokens it was computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache

from tieredkv import keys
from tieredkv.core import Block, Chain, Namespace, TensorSpec

LAYERS, HEADS, WIDTH = 2, 2, 4
MODEL = ("model", None, None)


def tags(tokens: Sequence[int]) -> np.ndarray:
    """One number per token that depends on it and on all tokens before it."""
    tag, out = 1, []
    for t in tokens:
        tag = (tag * 31 + int(t) * 17 + 7) % 8191
        out.append(tag)
    return np.array(out, dtype=np.float32)


def rows(tokens: Sequence[int], leaf: int, heads: int = HEADS, width: int = WIDTH) -> np.ndarray:
    """What leaf ``leaf`` must hold for ``tokens``: shape (1, heads, tokens, width)."""
    shape = (1, heads, len(tokens), width)
    return np.broadcast_to(tags(tokens)[None, None, :, None] + leaf * 8192, shape)


def make(
    tokens: Sequence[int], dtype: mx.Dtype = mx.float32, layers: int = LAYERS
) -> list[KVCache]:
    """Caches that hold ``tokens``, as a model would leave them: over-allocated."""
    caches = []
    for layer in range(layers):
        cache = KVCache()
        k = mx.array(rows(tokens, 2 * layer)).astype(dtype)
        v = mx.array(rows(tokens, 2 * layer + 1)).astype(dtype)
        cache.update_and_fetch(k, v)
        caches.append(cache)
    return caches


def holds(caches: Sequence[KVCache], tokens: Sequence[int], dtype: mx.Dtype = mx.float32) -> bool:
    """Whether every layer holds exactly the state of ``tokens``."""
    for layer, cache in enumerate(caches):
        if cache.offset != len(tokens):
            return False
        for leaf, array in enumerate((cache.keys, cache.values)):
            want = mx.array(rows(tokens, 2 * layer + leaf)).astype(dtype)
            got = array[:, :, : cache.offset]
            if got.dtype != dtype or not mx.array_equal(got, want).item():
                return False
    return True


def make_hybrid(tokens: Sequence[int]) -> list[Any]:
    """Caches of an attention layer and of a recurrent one, whose state is the last tag."""
    recurrent = ArraysCache(2)
    recurrent[1] = mx.full((1, 3, 5), float(tags(tokens)[-1]))
    return [*make(tokens, layers=1), recurrent]


def holds_hybrid(caches: Sequence[Any], tokens: Sequence[int]) -> bool:
    """Whether both layers hold exactly the state of ``tokens``."""
    attention, recurrent = caches
    want = make_hybrid(tokens)[1]
    return (
        holds([attention], tokens)
        and recurrent[0] is None
        and mx.array_equal(recurrent[1], want[1]).item()
    )


def chain(tokens: Sequence[int], block_tokens: int = 4, model: str = "model") -> Chain:
    """The chain of ``tokens`` in a namespace of its own."""
    root = keys.namespace_key(Namespace(model, block_tokens=block_tokens))
    return keys.chain(root, keys.as_tokens(tokens), block_tokens)


def blocks(c: Chain, indices: Iterable[int] | None = None, width: int = WIDTH) -> list[Block]:
    """The blocks of a chain as decoded numpy, one float32 tensor each."""
    out = []
    all_rows = rows(c.tokens.tolist(), 0, width=width).astype(np.float32)
    for i in range(len(c.keys)) if indices is None else indices:
        a, b = c.span(i)
        tensor = np.ascontiguousarray(all_rows[:, :, a:b])
        spec = TensorSpec("float32", tensor.shape)
        out.append(Block(c.root, c.parent(i), c.keys[i], c.tokens_of(i), (spec,), (tensor,)))
    return out


def data(block: Block) -> bytes:
    """The raw bytes of a block's tensors, wherever they live."""
    return b"".join(bytes(memoryview(t)) for t in block.tensors)


def noise(c: Chain, width: int = 8192) -> list[Block]:
    """The blocks of a chain with content that no codec makes smaller, ``width`` bytes a token."""
    out = []
    for i, key in enumerate(c.keys):
        a, b = c.span(i)
        rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
        tensor = rng.integers(0, 256, (1, 1, b - a, width), np.uint8)
        spec = TensorSpec("uint8", tensor.shape)
        out.append(Block(c.root, c.parent(i), key, c.tokens_of(i), (spec,), (tensor,)))
    return out
