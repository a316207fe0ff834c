"""State to measure with: real values of a small model, also arranged as larger ones' would be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import KVCache, make_prompt_cache

from bench.demo import long_text
from bench.model import ensure

PREFILLED = 2048
# Where the prefill stops, to be timed. Steps of 512: a longer one takes as long, and more memory.
_STOPS = (256, 512, 1024, 1536, PREFILLED)


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
SEVENTY_B = Shape(80, 8, 128)
SHAPES = {"SmolLM2": SMALL, "8B": EIGHT_B, "70B": SEVENTY_B}

# The curves' lengths of a prompt, as far as state of the shape fits a small machine several times.
CURVES = {
    "SmolLM2": (256, 1024, 2048, 8192, 32768),
    "8B": (256, 1024, 2048, 8192),
    "70B": (256, 1024, 2048),
}


def points(most_bytes: int) -> list[tuple[str, int]]:
    """Shapes and lengths of the curves whose state takes at most so many bytes."""
    return [
        (name, n)
        for name, lengths in CURVES.items()
        for n in lengths
        if SHAPES[name].bytes_per_token * n <= most_bytes
    ]


@cache
def model() -> tuple[Any, Any]:
    """SmolLM2 and its tokenizer."""
    loaded: tuple[Any, Any] = load(str(ensure()))
    return loaded


@cache
def text_tokens() -> list[int]:
    """Tokens of real text, more than are prefilled."""
    tokens: list[int] = model()[1].encode(long_text(ensure(), PREFILLED + 2000))
    return tokens


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Keys and values of each layer of SmolLM2 after the first tokens of the text, of shape
    (1, heads, tokens, width), and the seconds that it took to get to some lengths.
    """

    leaves: tuple[mx.array, ...]
    seconds: Mapping[int, float]


@cache
def prefilled() -> Prefilled:
    """The state after ``PREFILLED`` tokens."""
    network, _ = model()
    tokens = text_tokens()
    caches = make_prompt_cache(network)
    seconds = {}
    at = 0
    start = time.perf_counter()
    for stop in _STOPS:
        network(mx.array([tokens[at:stop]]), cache=caches)
        mx.eval([c.state for c in caches])
        at, seconds[stop] = stop, time.perf_counter() - start
    leaves = tuple(x[:, :, :PREFILLED] for c in caches for x in (c.keys, c.values))
    return Prefilled(leaves, seconds)


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
    leaves = prefilled().leaves
    found = []
    for layer in range(shape.layers):
        pair = [_arranged(leaves, shape, 2 * layer + j, n_tokens) for j in (0, 1)]
        cache = KVCache()
        cache.update_and_fetch(*pair)
        mx.eval(cache.state)
        found.append(cache)
    return found


def copied(shape: Shape, n_tokens: int) -> Callable[[], object]:
    """Copies as many bytes as the state has, in as many arrays: one large array would lie in
    memory that the system has to make first, every time, where layers' arrays find some.
    """
    n_bytes = shape.bytes_per_token * n_tokens // (2 * shape.layers)
    sources = [np.ones(n_bytes, np.uint8) for _ in range(2 * shape.layers)]
    return lambda: [source.copy() for source in sources]
