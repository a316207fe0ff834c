"""Capture and restore: the same bytes, of memory of their own."""

from __future__ import annotations

from typing import Any

import caches
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from tieredkv import layout
from tieredkv.core import Block, BlockKey, Hit, Refused
from tieredkv.layout import Layout
from tieredkv.restored import Copiers

COPIERS = Copiers()
DTYPES = [mx.bfloat16, mx.float16, mx.float32, mx.int32, mx.bool_]


def captured(live: list[KVCache], tokens: list[int], step: int) -> tuple[Layout, list[Block]]:
    shape = layout.inspect(live, len(tokens))
    spans = [(a, min(a + step, len(tokens))) for a in range(0, len(tokens), step)]
    tensors = layout.capture(live, shape, spans)
    k = BlockKey(b"")
    return shape, [
        Block(k, k, k, bytes(8 * (b - a)), shape.specs(b - a), t)
        for (a, b), t in zip(spans, tensors, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 5, 8, 11])
def test_any_prefix_is_restored_byte_for_byte(dtype: mx.Dtype, n: int) -> None:
    """A cut inside a block, or a row of another leaf, would be another state."""
    tokens = list(range(11))
    shape, blocks = captured(caches.make(tokens, dtype), tokens, 4)
    restored = layout.restore(shape, Hit(tuple(blocks[: -(-n // 4)]), n, None), 20, COPIERS)
    assert caches.holds(restored, tokens[:n], dtype)


def test_values_may_be_wider_than_keys() -> None:
    """Latent-attention models have leaves of different widths, in blocks of two tensors."""
    live = [KVCache() for _ in range(3)]
    for i, c in enumerate(live):
        c.update_and_fetch(
            mx.random.normal((1, 2, 7, 8), key=mx.random.key(i)),
            mx.random.normal((1, 1, 7, 4), key=mx.random.key(100 + i)),
        )
    shape, blocks = captured(live, list(range(7)), 4)
    assert len(blocks[0].tensors) == 2
    restored = layout.restore(shape, Hit(tuple(blocks), 7, None), 8, COPIERS)
    for a, b in zip(live, restored, strict=True):
        assert mx.array_equal(a.keys[:, :, :7], b.keys[:, :, :7])
        assert mx.array_equal(a.values[:, :, :7], b.values[:, :, :7])


def test_decoded_words_and_arrays_may_be_mixed() -> None:
    """A prefix is half in memory and half from disk when its leaves were evicted."""
    tokens = list(range(8))
    shape, blocks = captured(caches.make(tokens, mx.bfloat16), tokens, 4)
    words = tuple(
        np.frombuffer(memoryview(t), np.uint16).reshape(t.shape) for t in blocks[1].tensors
    )
    b = blocks[1]
    mixed = [blocks[0], Block(b.root, b.parent, b.key, b.tokens, b.specs, words)]
    assert caches.holds(
        layout.restore(shape, Hit(tuple(mixed), 8, None), 9, COPIERS), tokens, mx.bfloat16
    )


def test_a_restored_cache_decodes_in_place() -> None:
    """Without rows to spare the first token copies the whole prefix again."""
    tokens = list(range(300))
    shape, blocks = captured(caches.make(tokens), tokens, 256)
    (cache, _) = layout.restore(shape, Hit(tuple(blocks), 300, None), 301, COPIERS)
    rows = cache.keys.shape[2]
    for _ in range(layout.SPARE_TOKENS):
        cache.update_and_fetch(mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 4)))
    assert cache.keys.shape[2] == rows


def test_captured_blocks_do_not_see_later_writes() -> None:
    """The host goes on writing to the caches it gave; a shared buffer would change the block."""
    tokens = list(range(4))
    live = caches.make(tokens)
    shape, blocks = captured(live, tokens, 4)
    for c in live:
        c.keys[...] = 77
        c.values[...] = 77
        mx.eval(c.keys, c.values)
    assert caches.holds(layout.restore(shape, Hit(tuple(blocks), 4, None), 5, COPIERS), tokens)


def test_captured_blocks_do_not_pin_the_cache_they_came_from() -> None:
    """A view of one row would keep the whole batch in memory, uncounted."""
    live = [KVCache()]
    x = mx.zeros((1, 1, 4096, 64))
    live[0].update_and_fetch(x, mx.zeros((1, 1, 4096, 32)))
    mx.eval(live[0].keys, live[0].values)
    del x
    mx.synchronize()
    _, blocks = captured(live, list(range(4096)), 4096)
    kept = sum(b.n_bytes for b in blocks)
    before = mx.get_active_memory()
    del live
    assert before - mx.get_active_memory() >= kept


def test_two_restores_share_nothing() -> None:
    """One request's tokens would show up in another's state."""
    tokens = list(range(6))
    shape, blocks = captured(caches.make(tokens), tokens, 4)
    first = layout.restore(shape, Hit(tuple(blocks), 6, None), 7, COPIERS)
    for c in first:
        c.keys[...] = 5
        mx.eval(c.keys)
    assert caches.holds(layout.restore(shape, Hit(tuple(blocks), 6, None), 7, COPIERS), tokens)


def filled(kind: str, n: int) -> Any:
    """A cache of each class as a model leaves it after ``n`` tokens, in steps of 5 and then 1."""
    cache: Any = {
        "kv": KVCache,
        "concatenate": ConcatenateKVCache,
        "quantized": lambda: QuantizedKVCache(group_size=32, bits=4),
        "rotating": lambda: RotatingKVCache(max_size=8),
        "rotating, keeping": lambda: RotatingKVCache(max_size=8, keep=2),
        "chunked": lambda: ChunkedKVCache(8),
        "list": lambda: CacheList(KVCache(), CacheList(RotatingKVCache(max_size=8), KVCache())),
        "arrays": lambda: ArraysCache(3),
    }[kind]()
    for leaf in leaves_of(cache):
        feed(leaf, 0, n)
    return cache


def leaves_of(cache: Any) -> list[Any]:
    if isinstance(cache, CacheList):
        return [leaf for c in cache.caches for leaf in leaves_of(c)]
    return [cache]


def feed(cache: Any, start: int, stop: int) -> list[mx.array]:
    """Rows ``start`` to ``stop`` as a model would add them; what attention then sees each time."""
    seen = []
    while start < stop:
        step = 5 if start % 2 == 0 and start + 5 <= stop else 1
        x = mx.random.normal((1, 2, step, 32), key=mx.random.key(start))
        if isinstance(cache, ArraysCache):
            cache[0], cache[2] = x[:, 0, -1], x * 2
        else:
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
            seen += [a for _, a in tree_flatten(cache.update_and_fetch(x, x + 1))]
        start += step
    return seen


KINDS = [
    *("kv", "concatenate", "quantized", "rotating", "rotating, keeping", "chunked", "list"),
    "arrays",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 6, 8, 11, 24])
def test_every_class_goes_on_as_if_it_had_never_left(kind: str, n: int) -> None:
    """The contract of a class: what attention sees after a restore is what it would have seen."""
    live = [filled(kind, n)]
    shape = layout.inspect(live, n)
    layout.settle(live, 0, n)
    k = BlockKey(b"")
    (tensors,) = layout.capture(live, shape, [(0, n)])
    block = Block(k, k, k, bytes(8 * n), shape.specs(n), tensors)
    plan = layout.SnapshotPlan(live)
    snapshot = Block(k, k, k, b"", plan.specs(), plan.capture())
    assert [tuple(t.shape) for t in snapshot.tensors] == [s.shape for s in snapshot.specs]
    (restored,) = layout.restore(shape, Hit((block,), n, snapshot), n + 1, COPIERS)
    assert isinstance(restored, type(live[0]))
    assert type(restored).__name__ == type(live[0]).__name__
    for before, after in zip(leaves_of(live[0]), leaves_of(restored), strict=True):
        want, got = feed(before, n, n + 13), feed(after, n, n + 13)
        assert len(want) == len(got)
        assert all(same_rows(a, b) for a, b in zip(want, got, strict=True))
        if isinstance(before, ArraysCache):
            assert after[1] is None
            assert all(mx.array_equal(before[i], after[i]).item() for i in (0, 2))


def same_rows(a: mx.array, b: mx.array) -> bool:
    """Equal up to the order of rows: a ring that has wrapped may start elsewhere."""

    def order(x: mx.array) -> list[bytes]:
        return sorted(bytes(memoryview(mx.contiguous(x[0, :, i]))) for i in range(x.shape[2]))

    return a.shape == b.shape and order(a) == order(b)


def test_a_restored_snapshot_is_private() -> None:
    """Two requests from one snapshot must not see each other's steps."""
    live = [filled("arrays", 3), filled("rotating", 3)]
    shape = layout.inspect(live, 3)
    plan = layout.SnapshotPlan(live)
    k = BlockKey(b"")
    snapshot = Block(k, k, k, b"", plan.specs(), plan.capture())
    block = Block(k, k, k, bytes(24), (), ())
    first = layout.restore(shape, Hit((block,), 3, snapshot), 4, COPIERS)
    feed(first[1], 3, 12)
    first[0][0][...] = 7
    mx.eval(first[0][0])
    again = layout.restore(shape, Hit((block,), 3, snapshot), 4, COPIERS)
    assert mx.array_equal(again[0][0], live[0][0]).item()
    assert again[1].offset == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: type("Subclass", (KVCache,), {})(),
        lambda: type("Unknown", (), {"offset": 2, "keys": None})(),
        lambda: CacheList(KVCache(), type("Subclass", (KVCache,), {})()),
    ],
)
def test_other_classes_are_refused(make) -> None:
    """State that can't be proven restorable must not be stored: a hit would change the output."""
    with pytest.raises(Refused):
        layout.inspect([*caches.make([1, 2]), make()], 2)


def test_bits_and_windows_are_part_of_the_layout() -> None:
    """State of 4 bits read as 8, or of another window, is another state."""
    layouts = {
        layout.inspect([cache], 3).to_json()
        for cache in (
            filled("quantized", 3),
            filled("rotating", 3),
            filled("rotating, keeping", 3),
            filled("kv", 3),
            filled("list", 3),
        )
    }
    assert len(layouts) == 5


def test_a_recurrent_layer_in_a_padded_batch_is_refused() -> None:
    """Its state isn't that of the prompt's tokens alone."""
    cache = filled("arrays", 3)
    cache.prepare(lengths=[2])
    with pytest.raises(Refused) as e:
        layout.inspect([cache], 3)
    assert e.value.reason == "padding"


@pytest.mark.parametrize("n", [3, 5])
def test_a_key_that_is_not_as_long_as_the_state_is_refused(n: int) -> None:
    """Draft models leave such caches behind; reused, their output is wrong."""
    with pytest.raises(Refused) as e:
        layout.inspect(caches.make([1, 2, 3, 4]), n)
    assert e.value.reason == "offset"


def test_one_layer_behind_the_others_is_refused() -> None:
    """Every layer is asked, not the first."""
    live = caches.make([1, 2, 3, 4], layers=3)
    live[2].trim(1)
    with pytest.raises(Refused):
        layout.inspect(live, 4)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float, dtype: mx.Dtype) -> None:
    """A prefill that overflowed once would answer every later prompt with nonsense."""
    live = caches.make([1, 2, 3, 4], dtype=dtype)
    live[1].values[0, 1, 2, 3] = value
    with pytest.raises(Refused) as e:
        layout.settle(live, 0, 4)
    layout.settle(live, 0, 2)
    assert e.value.reason == "nonfinite"


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_the_largest_finite_values_are_state_like_any_other(dtype: mx.Dtype) -> None:
    """What is refused without need is computed again by every prompt."""
    live = caches.make([1, 2, 3, 4], dtype=dtype)
    live[1].values[0, 1, 2, 3] = mx.finfo(dtype).max
    live[0].keys[0, 0, 0, 0] = mx.finfo(dtype).min
    layout.settle(live, 0, 4)


@pytest.mark.parametrize(("live", "n"), [([], 1), ([KVCache()], 0), ([KVCache()], 1)])
def test_nothing_is_refused_as_state(live: list[KVCache], n: int) -> None:
    """An empty cache under a key would be a hit of nothing."""
    with pytest.raises(Refused):
        layout.inspect(live, n)


def test_a_batch_of_two_is_refused() -> None:
    """Its rows belong to two prompts."""
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((2, 1, 3, 4)), mx.zeros((2, 1, 3, 4)))
    with pytest.raises(Refused) as e:
        layout.inspect([cache], 3)
    assert e.value.reason == "shape"


def test_a_layout_survives_json_and_names_the_dtype() -> None:
    """The layout is part of the namespace: another dtype must be another one."""
    a = layout.inspect(caches.make([1], mx.bfloat16), 1)
    b = layout.inspect(caches.make([1], mx.float32), 1)
    assert Layout.from_json(a.to_json()) == a
    assert a.to_json() != b.to_json()


def test_weights_in_memory_have_a_digest_of_their_own() -> None:
    """Weights that were quantized, cast or adapted after loading compute other state."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = layout.digest([model])
    assert layout.digest([model]) == before
    model.layers[1].weight[:, 0] += 1
    changed = layout.digest([model])
    nn.quantize(model, group_size=64)
    assert len({before, changed, layout.digest([model])}) == 3
