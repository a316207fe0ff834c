"""mlx-lm cache objects to blocks and snapshots and back. The only module that knows a cache class.

A class is *sliced* if every token has rows of its own, which any prefix can be cut from, or
*whole* if its state is that of one position only: that goes into a snapshot. `_SLICED` and
`_WHOLE` are the tables; a class that is in neither is refused. A ring is whole, but after a step
of prefill it still has the rows of many positions: those go into *windows*, one a block.

Every function here runs mlx ops: call them on the generation thread only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from numpy.typing import NDArray

from tieredkv.core import ITEMSIZE, Block, Hit, Refused, TensorSpec
from tieredkv.restored import Copiers, Leaf, Prefix
from tieredkv.restored import KVCache as RestoredKVCache

# KVCache grows by this many rows at a time; a restored cache gets at least as many to spare, so
# that the first decode steps write in place instead of copying everything.
SPARE_TOKENS = 256

# Rows added for the rest of the prompt stop here: one prefill step of mlx-lm's server.
_SPARE_LIMIT = 2048


# ---- the classes


@dataclass(frozen=True, slots=True)
class _Sliced:
    """A class whose arrays have tokens on axis 2 of 4. ``build`` gets a prefix, and which of its
    arrays is the layer's first.
    """

    arrays: Callable[[Any], Sequence[mx.array]]
    constants: Callable[[Any], Sequence[int]]
    build: Callable[[Prefix, int, LayerSpec], Any]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A class that can be restored only where it was captured. Arrays may be None; ``numbers``
    are what else changes with the position.
    """

    arrays: Callable[[Any], Sequence[mx.array | None]]
    numbers: Callable[[Any], Sequence[int]]
    constants: Callable[[Any], Sequence[int]]
    build: Callable[[Sequence[mx.array | None], Sequence[int], int, Sequence[int]], Any]


def _keys_and_values(cache: Any) -> Sequence[mx.array]:
    return cache.keys, cache.values


def _none(_: Any) -> Sequence[int]:
    return ()


def _build_kv(prefix: Prefix, i: int, _: LayerSpec) -> KVCache:
    return RestoredKVCache(prefix, i)


def _taken(prefix: Prefix, i: int, layer: LayerSpec) -> list[mx.array]:
    return [prefix.take(i + j) for j in range(len(layer.leaves))]


def _build_concatenate(prefix: Prefix, i: int, layer: LayerSpec) -> ConcatenateKVCache:
    # It appends behind the last row, so there must be none to spare.
    arrays = _taken(prefix, i, layer)
    return ConcatenateKVCache.from_state(tuple(a[:, :, : prefix.n_tokens] for a in arrays))


def _quantized_arrays(cache: Any) -> Sequence[mx.array]:
    return *cache.keys, *cache.values


def _build_quantized(prefix: Prefix, i: int, layer: LayerSpec) -> QuantizedKVCache:
    # Lists, since the class assigns to their items.
    arrays = _taken(prefix, i, layer)
    pair = arrays[:3], arrays[3:]
    return QuantizedKVCache.from_state((*pair, prefix.n_tokens, *layer.constants))


def _ring(cache: RotatingKVCache) -> Sequence[mx.array | None]:
    """The rows as they lie: in another order attention would sum them in another order. After a
    prefill step there are up to a step more than ``max_size``; those go, oldest first.
    """
    return [_window(cache, rows) for rows in (cache.keys, cache.values)]


def _window(cache: RotatingKVCache, rows: mx.array) -> mx.array:
    extra = rows.shape[2] - cache.max_size
    if extra <= 0:
        return rows[:, :, : cache.offset]
    return mx.concatenate([rows[:, :, : cache.keep], rows[:, :, cache.keep + extra :]], axis=2)


def _ring_index(cache: RotatingKVCache) -> Sequence[int]:
    """Where the next row goes."""
    return (min(cache._idx, cache.max_size),)


def _build_rotating(
    arrays: Sequence[mx.array | None],
    numbers: Sequence[int],
    n_tokens: int,
    constants: Sequence[int],
) -> RotatingKVCache:
    return RotatingKVCache.from_state((*arrays, n_tokens, *constants, *numbers))


def _chunk(cache: ChunkedKVCache) -> Sequence[mx.array | None]:
    valid = cache.offset - cache.start_position
    return cache.keys[:, :, :valid], cache.values[:, :, :valid]


def _build_chunked(
    arrays: Sequence[mx.array | None],
    numbers: Sequence[int],
    n_tokens: int,
    constants: Sequence[int],
) -> ChunkedKVCache:
    return ChunkedKVCache.from_state((*arrays, n_tokens, *constants, *numbers))


def _states(cache: ArraysCache) -> Sequence[mx.array | None]:
    if cache.left_padding is not None or cache.lengths is not None:
        raise Refused("padding", "a recurrent layer is in the middle of a padded batch")
    return list(cache.cache)


def _build_arrays(
    arrays: Sequence[mx.array | None], _: Sequence[int], __: int, ___: Sequence[int]
) -> ArraysCache:
    cache = ArraysCache(len(arrays))
    cache.cache = list(arrays)
    return cache


_PLAIN = _Sliced(_keys_and_values, _none, _build_kv)
_SLICED: dict[type, _Sliced] = {
    KVCache: _PLAIN,
    RestoredKVCache: _PLAIN,
    ConcatenateKVCache: _Sliced(_keys_and_values, _none, _build_concatenate),
    QuantizedKVCache: _Sliced(
        _quantized_arrays, lambda c: (c.group_size, c.bits), _build_quantized
    ),
}
_WHOLE: dict[type, _Whole] = {
    RotatingKVCache: _Whole(_ring, _ring_index, lambda c: (c.keep, c.max_size), _build_rotating),
    ChunkedKVCache: _Whole(
        _chunk, lambda c: (c.start_position,), lambda c: (c.chunk_size,), _build_chunked
    ),
    ArraysCache: _Whole(_states, _none, _none, _build_arrays),
}
# Both classes of plain attention have one name.
_BY_NAME: dict[str, type] = {c.__name__: c for c in (*_SLICED, *_WHOLE)}


def _flat(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers with every list of caches taken apart."""
    for cache in caches:
        if type(cache) is CacheList:
            yield from _flat(cache.caches)
        else:
            yield cache


def _shape_of(caches: Sequence[Any]) -> list[Any]:
    """Nesting of the lists: a number for a cache, a list for a list."""
    return [_shape_of(c.caches) if type(c) is CacheList else 0 for c in caches]


# ---- the layout


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array of a sliced layer or a ring: ``(1, heads, tokens, width)``."""

    dtype: str
    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer's cache class, its constants and, if they have rows, its arrays in state order."""

    kind: str
    leaves: tuple[LeafSpec, ...] = ()
    constants: tuple[int, ...] = ()

    @property
    def is_sliced(self) -> bool:
        """Whether any prefix can be cut from its state."""
        return _BY_NAME[self.kind] in _SLICED

    @property
    def window(self) -> int:
        """Rows that it needs before a position, if it is a ring without rows kept from the start;
        else 0.
        """
        if self.kind != RotatingKVCache.__name__:
            return 0
        keep, max_size = self.constants
        return 0 if keep else max_size


@dataclass(frozen=True)
class Layout:
    """What the caches of a model look like, token count aside. Part of the namespace.

    ``nesting`` is the JSON of which layers are lists of caches.
    """

    layers: tuple[LayerSpec, ...]
    nesting: str = ""

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal strings."""
        return self._json

    @cached_property
    def _json(self) -> str:
        # Of 36 layers it takes as long to make as the keys of 32,000 tokens.
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: not JSON that `to_json` writes.
        """
        found = json.loads(text)
        return cls(
            tuple(
                LayerSpec(
                    str(x["kind"]),
                    tuple(LeafSpec(**leaf) for leaf in x["leaves"]),
                    tuple(int(c) for c in x["constants"]),
                )
                for x in found["layers"]
            ),
            str(found["nesting"]),
        )

    def quantized(self, group_size: int, bits: int) -> Layout:
        """The layout after mlx-lm has quantized what it can: nothing inside of lists."""
        shape = json.loads(self.nesting) if self.nesting else [0] * len(self.layers)
        inside = [depth > 0 for depth in _depths(shape)]
        layers = zip(self.layers, inside, strict=True)
        return replace(
            self,
            layers=tuple(x if deep else _quantized(x, group_size, bits) for x, deep in layers),
        )

    @property
    def is_quantized(self) -> bool:
        """Whether a layer is."""
        return any(layer.kind == QuantizedKVCache.__name__ for layer in self.layers)

    @cached_property
    def is_sliced(self) -> bool:
        """Whether any prefix can be restored; if not, a hit has to end at a snapshot, or at a
        block with windows before its end.
        """
        return all(layer.is_sliced for layer in self.layers)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of blocks that a token takes."""
        return sum(spec.n_bytes for spec in self.specs(1))

    def bytes_of(self, n_tokens: int) -> int:
        """Bytes of the state of so many tokens, as far as it is in rows."""
        rings = (
            (leaf, min(layer.window, n_tokens))
            for layer in self.layers
            if layer.window
            for leaf in layer.leaves
        )
        held = sum(ITEMSIZE[leaf.dtype] * leaf.heads * leaf.width * n for leaf, n in rings)
        return n_tokens * self.bytes_per_token + held

    @cached_property
    def window(self) -> int:
        """Rows before a position that rings need, if with them all else can be cut there; else
        0: only snapshots will do.
        """
        able = all(layer.is_sliced or layer.window for layer in self.layers)
        return max(layer.window for layer in self.layers) if able else 0

    def n_windows(self, block_tokens: int) -> int:
        """Windows that the end of a block needs before it."""
        return -(-self.window // block_tokens)

    @cached_property
    def groups(self) -> tuple[tuple[LeafSpec, tuple[int, ...]], ...]:
        """Equal leaves of the sliced layers and their indices among these; each group is one
        tensor of a block.
        """
        found: dict[LeafSpec, list[int]] = {}
        leaves = [leaf for layer in self.layers if layer.is_sliced for leaf in layer.leaves]
        for i, leaf in enumerate(leaves):
            found.setdefault(leaf, []).append(i)
        return tuple((leaf, tuple(rows)) for leaf, rows in found.items())

    @cached_property
    def ring_groups(self) -> tuple[tuple[LeafSpec, int, tuple[int, ...]], ...]:
        """As `groups`, of the rings: with the size of these, each one tensor of a window."""
        found: dict[tuple[LeafSpec, int], list[int]] = {}
        leaves = [(leaf, layer.window) for layer in self.layers for leaf in layer.leaves]
        for i, ring in enumerate((leaf, window) for leaf, window in leaves if window):
            found.setdefault(ring, []).append(i)
        return tuple((leaf, window, tuple(rows)) for (leaf, window), rows in found.items())

    def specs(self, n_tokens: int) -> tuple[TensorSpec, ...]:
        """Tensors of a block of ``n_tokens`` tokens."""
        return tuple(
            TensorSpec(leaf.dtype, (len(rows), leaf.heads, n_tokens, leaf.width))
            for leaf, rows in self.groups
        )

    def window_specs(self, block_tokens: int) -> tuple[TensorSpec, ...]:
        """Tensors of a window: the last rows of a block, as many as the ring has or all."""
        return tuple(
            TensorSpec(leaf.dtype, (len(rows), leaf.heads, min(window, block_tokens), leaf.width))
            for leaf, window, rows in self.ring_groups
        )


def _depths(shape: list[Any], depth: int = 0) -> Iterator[int]:
    """In how many lists each cache is."""
    for s in shape:
        yield from _depths(s, depth + 1) if isinstance(s, list) else (depth,)


def _quantized(layer: LayerSpec, group_size: int, bits: int) -> LayerSpec:
    if layer.kind != KVCache.__name__:
        return layer
    leaves = []
    for leaf in layer.leaves:
        scale = replace(leaf, width=leaf.width // group_size)
        packed = LeafSpec("uint32", leaf.heads, leaf.width * bits // 32)
        leaves += [packed, scale, scale]
    return LayerSpec(QuantizedKVCache.__name__, tuple(leaves), (group_size, bits))


def _dtype_name(dtype: mx.Dtype) -> str:
    name = str(dtype).rpartition(".")[2]
    if name not in ITEMSIZE:
        raise Refused("dtype", f"arrays of {name} can't be stored")
    return name


def _dtype(name: str) -> mx.Dtype:
    dtype: mx.Dtype = mx.bool_ if name == "bool" else getattr(mx, name)
    return dtype


def _is_empty(cache: Any) -> bool:
    # A recurrent layer may use some of its slots only, and not the first.
    arrays = cache.cache if isinstance(cache, ArraysCache) else [cache.keys]
    return all(a is None for a in arrays)


def _inspect_layer(cache: Any, n_tokens: int) -> LayerSpec:
    # The exact class: a subclass may keep state that its parent's fields don't show.
    kind = _SLICED.get(type(cache)) or _WHOLE.get(type(cache))
    if kind is None:
        raise Refused("class", f"cache class {type(cache).__name__} is not supported")
    # A recurrent layer doesn't know its position; the layers beside it do.
    held = 0 if _is_empty(cache) else getattr(cache, "offset", n_tokens)
    if held != n_tokens:
        raise Refused("offset", f"a layer holds {held} tokens where the key has {n_tokens}")
    constants = tuple(kind.constants(cache))
    leaves = []
    for array in kind.arrays(cache):
        if array is None:
            continue
        dtype = _dtype_name(array.dtype)
        if array.ndim == 0 or array.shape[0] != 1:
            raise Refused("shape", f"a layer's array has shape {array.shape}")
        rows = _n_rows(cache, n_tokens)
        if rows and (array.ndim != 4 or array.shape[2] < rows):
            raise Refused("shape", f"a layer's array has shape {array.shape}")
        if rows:
            leaves.append(LeafSpec(dtype, array.shape[1], array.shape[3]))
    return LayerSpec(type(cache).__name__, tuple(leaves), constants)


def _n_rows(cache: Any, n_tokens: int) -> int:
    """Rows that a layer's arrays must have, on axis 2 of 4; 0 if they aren't of that form."""
    if type(cache) in _SLICED:
        return n_tokens
    return min(n_tokens, cache.max_size) if type(cache) is RotatingKVCache else 0


def inspect(caches: Sequence[Any], n_tokens: int) -> Layout:
    """Layout of live caches that hold exactly ``n_tokens`` tokens on every layer.

    Raises:
        Refused: a class that isn't known, a layer whose offset differs (the key would promise
            tokens that the state doesn't have), an array that isn't one sequence's.
    """
    if not caches or n_tokens == 0:
        raise Refused("empty", "no state to store")
    layers = tuple(_inspect_layer(cache, n_tokens) for cache in _flat(caches))
    shape = _shape_of(caches)
    return Layout(layers, json.dumps(shape, separators=(",", ":")) if any(shape) else "")


def digest(models: Sequence[Any]) -> str:
    """Digest of the weights that models hold in memory, whatever their files say: names, shapes,
    dtypes and a few rows of each.
    """
    h = hashlib.blake2b(digest_size=16)
    named = [item for model in models for item in _named(model.parameters())]
    samples: list[Any] = [_sample(array) for _, array in named]
    mx.eval(samples)
    for (name, array), sample in zip(named, samples, strict=True):
        h.update(f"{name} {array.dtype} {array.shape}\n".encode())
        h.update(memoryview(sample))
    return h.hexdigest()


def _named(parameters: Any) -> list[tuple[str, Any]]:
    flat: Any = tree_flatten(parameters)
    return list(flat)


def _sample(array: mx.array) -> mx.array:
    """Up to 4,096 values of an array, evenly spread, in memory of their own."""
    flat = array.reshape(-1)
    return mx.contiguous(flat[:: max(1, flat.size // 4096)])


def probe(models: Sequence[Any]) -> Layout:
    """Layout of the caches that ``models`` make, in their order, found by running one token.

    Raises:
        Refused: as `inspect`.
    """
    caches: list[Any] = []
    for model in models:
        caches.extend(own := make_prompt_cache(model))
        mx.eval(model(mx.array([[0]]), cache=own))
    return inspect(caches, 1)


# ---- capture


def _leaves(caches: Sequence[Any]) -> list[mx.array]:
    """Arrays of the sliced layers, in the layout's order."""
    return [
        array
        for cache in _flat(caches)
        if (kind := _SLICED.get(type(cache)))
        for array in kind.arrays(cache)
    ]


def _wholes(caches: Sequence[Any]) -> list[tuple[Sequence[mx.array | None], Sequence[int]]]:
    """Arrays and numbers of the whole layers, in the layout's order."""
    return [
        (kind.arrays(cache), kind.numbers(cache))
        for cache in _flat(caches)
        if (kind := _WHOLE.get(type(cache)))
    ]


def settle(caches: Sequence[Any], start: int, stop: int) -> None:
    """Evaluate live caches, which may still have work of the batch before them, and look at the
    values of the tokens from ``start`` to ``stop``, and of all state that isn't by token.

    Raises:
        Refused: one of them isn't finite.
    """
    leaves = _leaves(caches)
    whole = [a for arrays, _ in _wholes(caches) for a in arrays if a is not None]
    whole += [a for ring in _rings(caches) for a in _in_order(ring)]
    mx.eval(leaves, whole)
    values = [leaf[0, :, start:stop] for leaf in leaves] + whole
    if not _all_finite([v for v in values if v.size and mx.issubdtype(v.dtype, mx.floating)]):
        raise Refused("nonfinite", "the state holds values that are not finite")


# Words of a floating point dtype, all of its bits but the sign, and its infinity: whatever isn't
# finite is no less than that.
_FLOAT_BITS = {
    mx.bfloat16: (mx.uint16, 0x7FFF, 0x7F80),
    mx.float16: (mx.uint16, 0x7FFF, 0x7C00),
    mx.float32: (mx.uint32, 0x7FFFFFFF, 0x7F800000),
}


# What small arrays are put together to before they are looked at.
_STACK_BYTES = 1 << 20


def _all_finite(arrays: Sequence[mx.array]) -> bool:
    """Whether all values are finite. Looks at bits, which on the CPU takes a fifth of the time of
    `mx.isfinite`.
    """
    finite = []
    for array in _stacks(arrays):
        words, magnitude, infinity = _FLOAT_BITS[array.dtype]
        bits = array.view(words) & mx.array(magnitude, words)
        finite.append(mx.max(bits) < mx.array(infinity, words))
    mx.eval(finite)
    return all(f.item() for f in finite)


def _stacks(arrays: Sequence[mx.array]) -> Iterator[mx.array]:
    """Small arrays of a kind together: an op for each would take longer than to copy them."""
    kinds: dict[tuple[mx.Dtype, tuple[int, ...]], list[mx.array]] = {}
    for array in arrays:
        kinds.setdefault((array.dtype, array.shape), []).append(array)
    for alike in kinds.values():
        n = max(1, _STACK_BYTES // alike[0].nbytes)
        yield from (mx.stack(alike[i : i + n]) for i in range(0, len(alike), n))


def _eval_exact(arrays: list[mx.array]) -> None:
    """Evaluate into buffers of just the arrays' sizes. MLX would otherwise take free ones from
    its pool that are up to twice as large, and the tier would hold more than it counts.
    """
    mx.clear_cache()
    mx.eval(arrays)


def _stack(arrays: list[mx.array]) -> mx.array:
    """Stack into memory of its own. Stacking one array alone is a view that would pin the batch."""
    if len(arrays) > 1:
        return mx.stack(arrays)
    one = arrays[0][None]
    return mx.concatenate([one, one[:0]], axis=0)


def capture(
    caches: Sequence[Any], layout: Layout, spans: Sequence[tuple[int, int]]
) -> list[tuple[mx.array, ...]]:
    """Copy token spans out of live caches: one tuple of block tensors per span.

    Everything is evaluated, synchronously, when this returns, so that the caches may be written
    to at once and another thread may read the tensors' bytes. Call `settle` first.
    """
    leaves = _leaves(caches)
    tensors = [
        tuple(_stack([leaves[i][0, :, a:b] for i in rows]) for _, rows in layout.groups)
        for a, b in spans
    ]
    _eval_exact([t for span in tensors for t in span])
    return tensors


def _rings(caches: Sequence[Any]) -> list[RotatingKVCache]:
    return [c for c in _flat(caches) if type(c) is RotatingKVCache and not c.keep]


def vouch(caches: Sequence[Any]) -> None:
    """Note that all rows of live rings are tokens' rows, also those beyond ``max_size``.

    Of others only the last ``max_size`` are believed: in mlx-lm's batches prompts of unlike length
    leave rows of padding before them, which its masks never reach.
    """
    for ring in _rings(caches):
        ring.tieredkv_vouched = True


def _in_order(ring: RotatingKVCache) -> list[mx.array]:
    """Keys and values of all tokens that a ring is known to have still, oldest first."""
    rows = _all_rows(ring)
    if getattr(ring, "tieredkv_vouched", False):
        return rows
    first = max(0, rows[0].shape[2] - ring.max_size)
    return [r[:, :, first:] for r in rows]


def _all_rows(ring: RotatingKVCache) -> list[mx.array]:
    if _is_rotated(ring):
        parts = slice(ring._idx, None), slice(None, ring._idx)
        return [
            mx.concatenate([rows[:, :, part] for part in parts], axis=2)
            for rows in (ring.keys, ring.values)
        ]
    n = min(ring._idx, ring.offset)
    return [ring.keys[:, :, :n], ring.values[:, :, :n]]


def _is_rotated(ring: RotatingKVCache) -> bool:
    return bool(ring._idx < min(ring.offset, ring.keys.shape[2]))


def is_rotated(caches: Sequence[Any]) -> bool:
    """Whether a ring has its rows in another order than a step of prefill leaves them in."""
    return any(map(_is_rotated, _rings(caches)))


def first_held(caches: Sequence[Any]) -> int:
    """The first token of which all rings still have the rows."""
    return max(int(r.offset) - _in_order(r)[0].shape[2] for r in _rings(caches))


def capture_windows(
    caches: Sequence[Any], layout: Layout, block_tokens: int, stops: Sequence[int]
) -> list[tuple[mx.array, ...]]:
    """Copy windows out of live caches: one tuple of tensors for each block, which ends at a stop.

    Evaluated when this returns. The rings must have the rows; call `settle` first.
    """
    rings = _rings(caches)
    leaves = [(ring.offset, rows) for ring in rings for rows in _in_order(ring)]
    tensors = []
    for stop in stops:
        window = []
        for _, size, indices in layout.ring_groups:
            parts = []
            for i in indices:
                offset, rows = leaves[i]
                end = rows.shape[2] - (offset - stop)
                parts.append(rows[0, :, end - min(size, block_tokens) : end])
            window.append(_stack(parts))
        tensors.append(tuple(window))
    _eval_exact([t for window in tensors for t in window])
    return tensors


def trim(caches: Sequence[Any]) -> None:
    """Let go of the rows to spare of live caches of plain attention."""
    for cache in _flat(caches):
        if isinstance(cache, KVCache):
            cache.keys = cache.keys[:, :, : cache.offset]
            cache.values = cache.values[:, :, : cache.offset]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two states of one layout are apart, over all tokens the largest.

    For a token that is the mean, over arrays that have its rows, of the length of the rows'
    difference over the other's length: in ``first`` over the arrays of the first layer that has
    some, in ``all`` over those of all layers. What isn't by token, such as a recurrent state,
    counts in ``all`` as a whole.
    """

    first: float
    all: float


def difference(caches: Sequence[Any], others: Sequence[Any], n_tokens: int) -> Difference:
    """How far the state of ``n_tokens`` tokens in one list of caches is from that in another."""
    by_layer: list[NDArray[Any]] = []
    worst = 0.0
    for cache, other in zip(_flat(caches), _flat(others), strict=True):
        by_token, arrays = _arrays_of(cache, n_tokens)
        pairs = zip(arrays, _arrays_of(other, n_tokens)[1], strict=True)
        parts = [_relative(array, theirs, by_token) for array, theirs in pairs]
        if by_token:
            by_layer.append(_mean_by_token(parts, n_tokens))
        else:
            worst = max([worst, *(float(part.max()) for part in parts)])
    if not by_layer:
        return Difference(0.0, worst)
    rows = np.stack(by_layer)
    mean = np.nansum(rows, axis=0) / np.maximum(1, np.sum(~np.isnan(rows), axis=0))
    return Difference(float(np.nanmax(by_layer[0])), max(worst, float(mean.max())))


def _mean_by_token(parts: Sequence[NDArray[Any]], n_tokens: int) -> NDArray[Any]:
    """The mean of arrays that have the last tokens, aligned at their ends; NaN before those."""
    mean = np.full(n_tokens, np.nan)
    n = min(map(len, parts))
    if n:
        mean[n_tokens - n :] = np.mean([part[len(part) - n :] for part in parts], axis=0)
    return mean


def _arrays_of(cache: Any, n_tokens: int) -> tuple[bool, list[mx.array | None]]:
    """A cache's state as arrays, and whether their axis 2 is of the last tokens."""
    if sliced := _SLICED.get(type(cache)):
        return True, [array[:, :, :n_tokens] for array in sliced.arrays(cache)]
    if type(cache) is RotatingKVCache and not cache.keep:
        return True, [rows[:, :, -cache.max_size :] for rows in _all_rows(cache)]
    return False, list(_WHOLE[type(cache)].arrays(cache))


def _relative(array: mx.array | None, other: mx.array | None, by_token: bool) -> NDArray[Any]:
    if array is None or other is None:
        return np.array([0.0 if array is other else np.inf])
    if array.shape != other.shape:
        return np.full(min(array.shape[2], other.shape[2]) if by_token else 1, np.inf)
    a, b = array.astype(mx.float32), other.astype(mx.float32)
    axes = (0, 1, 3) if by_token else None
    off, size = (mx.sqrt(mx.sum(x * x, axis=axes)) for x in (a - b, b))
    parts: NDArray[Any] = np.array(off / mx.maximum(size, 1e-6)).reshape(-1)
    parts[np.isnan(parts)] = np.inf
    return parts


class SnapshotPlan:
    """Where in a snapshot's tensors the arrays of the whole layers go.

    A snapshot's first tensor is an int64 list: for each whole layer the number of its arrays,
    for each of them the tensor and row it is in (or -1, -1 for None), the number of its numbers,
    and these. Equal arrays of all layers are stacked in one tensor.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self._groups: dict[tuple[str, tuple[int, ...]], list[mx.array]] = {}
        self._index: list[int] = []
        for arrays, numbers in _wholes(caches):
            self._index.append(len(arrays))
            for array in arrays:
                self._index.extend(self._place(array))
            self._index.extend([len(numbers), *numbers])

    def _place(self, array: mx.array | None) -> tuple[int, int]:
        if array is None:
            return -1, -1
        group = (_dtype_name(array.dtype), tuple(array.shape))
        rows = self._groups.setdefault(group, [])
        rows.append(array)
        return list(self._groups).index(group) + 1, len(rows) - 1

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that go into the snapshot."""
        return [array for rows in self._groups.values() for array in rows]

    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors of the snapshot."""
        stacked = [TensorSpec(d, (len(a), *shape)) for (d, shape), a in self._groups.items()]
        return (TensorSpec("int64", (len(self._index),)), *stacked)

    def capture(self) -> tuple[mx.array, ...]:
        """Copy the state out of the live caches; evaluated on return."""
        stacked = [_stack(arrays) for arrays in self._groups.values()]
        tensors = [mx.array(self._index, mx.int64), *stacked]
        _eval_exact(tensors)
        return tuple(tensors)


# ---- restore


def _as_array(tensor: Any, spec: TensorSpec) -> mx.array:
    if isinstance(tensor, mx.array):
        return tensor
    array = mx.array(np.asarray(tensor))
    dtype = _dtype(spec.dtype)
    return array if array.dtype == dtype else array.view(dtype)


def blank(specs: Sequence[TensorSpec]) -> tuple[mx.array, ...]:
    """Evaluated arrays of these specs in memory of just their size, for the values to be written
    into through their buffers before any op of mlx uses them.
    """
    mx.clear_cache()  # as in `_eval_exact`
    arrays = tuple(mx.zeros(spec.shape, _dtype(spec.dtype)) for spec in specs)
    mx.eval(arrays)
    return arrays


def adopt(blocks: Sequence[Block]) -> list[Block]:
    """Blocks with their decoded tensors turned into evaluated mlx arrays of the true dtype."""
    if all(isinstance(t, mx.array) for b in blocks for t in b.tensors):
        return list(blocks)
    mx.clear_cache()  # as in `_eval_exact`: arrays made from host memory are allocated at once
    adopted = [
        replace(b, tensors=tuple(_as_array(t, s) for t, s in zip(b.tensors, b.specs, strict=True)))
        for b in blocks
    ]
    mx.eval([b.tensors for b in adopted])
    return adopted


def fits(layout: Layout, hit: Hit) -> bool:
    """Whether a hit's tensors are what the layout says, and all that it needs."""
    if not all(block.specs == layout.specs(block.n_tokens) for block in hit.blocks):
        return False
    if layout.is_sliced or hit.snapshot:
        return True
    full = hit.blocks[0].n_tokens
    n_windows = min(layout.n_windows(full), len(hit.blocks))
    specs = layout.window_specs(full)
    return 0 < n_windows == len(hit.windows) and all(w.specs == specs for w in hit.windows)


def restore(layout: Layout, hit: Hit, n_prompt: int, copiers: Copiers) -> list[Any]:
    """Private caches that hold the prefix which ``hit`` is.

    Rows of sliced layers are copied into memory of their own, with rows to spare for the rest of
    a prompt of ``n_prompt`` tokens and the first generated ones; of plain attention not before
    they are used. What isn't sliced comes from the snapshot or the windows. The hit must fit the
    layout: see `fits`.
    """
    n_tokens = hit.n_tokens
    prefix = _prefix(layout, hit, n_prompt, copiers)
    n_leaves = 0
    state = hit.snapshot
    wholes = _unpack(state) if state else _join_windows(layout, hit.windows, n_tokens)
    caches: list[Any] = []
    for layer in layout.layers:
        kind = _BY_NAME[layer.kind]
        if sliced := _SLICED.get(kind):
            caches.append(sliced.build(prefix, n_leaves, layer))
            n_leaves += len(layer.leaves)
        else:
            states, numbers = next(wholes)
            caches.append(_WHOLE[kind].build(states, numbers, n_tokens, layer.constants))
    return _nest(json.loads(layout.nesting), caches) if layout.nesting else caches


def _prefix(layout: Layout, hit: Hit, n_prompt: int, copiers: Copiers) -> Prefix:
    n_used = hit.n_used
    leaves: dict[int, Leaf] = {}
    for g, (leaf, indices) in enumerate(layout.groups):
        tensors = [_rows(b.tensors[g], b.specs[g]) for b in hit.blocks]
        tensors[-1] = tensors[-1][:, :, :n_used]
        for row, i in enumerate(indices):
            leaves[i] = Leaf(_dtype(leaf.dtype), [t[row] for t in tensors])
    spare = SPARE_TOKENS + min(n_prompt - hit.n_tokens, _SPARE_LIMIT)
    return Prefix([leaves[i] for i in range(len(leaves))], hit.n_tokens, spare, copiers)


def _rows(tensor: Any, spec: TensorSpec) -> NDArray[np.uint8]:
    """A block's tensor as it lies in memory: (leaves, heads, tokens, bytes of a row)."""
    *shape, width = spec.shape
    return np.frombuffer(memoryview(tensor), np.uint8).reshape(*shape, width * ITEMSIZE[spec.dtype])


def _join_windows(
    layout: Layout, windows: Sequence[Block], n_tokens: int
) -> Iterator[tuple[list[mx.array | None], list[int]]]:
    """Arrays and numbers of each ring, as after a step of prefill that ended at ``n_tokens``."""
    parts = [w.tensors for w in adopt(windows)]
    leaves: dict[int, mx.array] = {}
    for g, (_, size, indices) in enumerate(layout.ring_groups):
        n = min(size, n_tokens)
        for row, i in enumerate(indices):
            rows = mx.concatenate([part[g][row : row + 1] for part in parts], axis=2)
            leaves[i] = _own(rows[:, :, rows.shape[2] - n :])
    mx.eval(list(leaves.values()))
    pairs = [(leaves[i], leaves[i + 1]) for i in range(0, len(leaves), 2)]
    return iter([([k, v], [k.shape[2]]) for k, v in pairs])


def _unpack(snapshot: Block) -> Iterator[tuple[list[mx.array | None], list[int]]]:
    """Arrays, private copies, and numbers of each whole layer."""
    index_array, *stacked = adopt([snapshot])[0].tensors
    index = iter(index_array.tolist())
    layers: list[tuple[list[mx.array | None], list[int]]] = []
    for n_arrays in index:
        places = [(next(index), next(index)) for _ in range(n_arrays)]
        arrays = [None if g < 0 else _own(stacked[g - 1][row]) for g, row in places]
        layers.append((arrays, [next(index) for _ in range(next(index))]))
    mx.eval([a for arrays, _ in layers for a in arrays if a is not None])
    return iter(layers)


def _own(array: mx.array) -> mx.array:
    return mx.concatenate([array, array[:0]], axis=0)


def _nest(shape: list[Any], caches: list[Any]) -> list[Any]:
    """Put lists of caches together again."""
    return [CacheList(*_nest(s, caches)) if isinstance(s, list) else caches.pop(0) for s in shape]
