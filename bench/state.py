"""State to measure with: real values of a small model, also arranged as larger ones' would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import KVCache, make_prompt_cache

from bench.demo import long_text
from bench.model import ensure

PREFILLED = 2048
_STEP = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers, heads of keys and values, and their width."""

    layers: int
    heads: int
    width: int

    @property
    def bytes_per_token(self) -> int:
        """In bfloat16."""
        return self.layers * self.heads * self.width * 4


SMALL = Shape(30, 3, 64)
EIGHT_B = Shape(32, 8, 128)


@cache
def prefilled() -> tuple[list[int], tuple[mx.array, ...]]:
    """Tokens of real text, and keys and values of each layer of SmolLM2 after them."""
    folder = ensure()
    model, tokenizer = load(str(folder))
    tokens = tokenizer.encode(long_text(folder, PREFILLED + 2000))
    caches = make_prompt_cache(model)
    for at in range(0, PREFILLED, _STEP):
        model(mx.array([tokens[at : at + _STEP]]), cache=caches)
        mx.eval([c.state for c in caches])
    leaves = tuple(x[:, :, :PREFILLED] for c in caches for x in (c.keys, c.values))
    return tokens, leaves


def _arranged(leaves: Sequence[mx.array], shape: Shape, i: int, n_tokens: int) -> mx.array:
    """Leaf ``i`` of a model of another shape, of the values of this one's: keys stay keys."""
    source = leaves[(2 * ((i // 2) % SMALL.layers)) + i % 2]
    side = -(-shape.width // SMALL.width)
    heads = [
        mx.concatenate([source[:, (h * side + j) % SMALL.heads] for j in range(side)], axis=-1)
        for h in range(shape.heads)
    ]
    rows = mx.stack(heads, axis=1)[..., : shape.width]
    times = -(-n_tokens // PREFILLED)
    return mx.concatenate([rows] * times, axis=2)[:, :, :n_tokens]


def caches_of(shape: Shape, n_tokens: int) -> list[KVCache]:
    """Live caches of ``n_tokens`` tokens, evaluated."""
    _, leaves = prefilled()
    found = []
    for layer in range(shape.layers):
        pair = [_arranged(leaves, shape, 2 * layer + j, n_tokens) for j in (0, 1)]
        cache = KVCache()
        cache.update_and_fetch(*pair)
        mx.eval(cache.state)
        found.append(cache)
    return found
