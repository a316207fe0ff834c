"""mlx-lm cache objects to blocks and back. The only module that knows a cache class.

Every function here runs mlx ops: call them on the generation thread only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tieredkv.core import ITEMSIZE, Block, Refused, TensorSpec

# KVCache grows by this many rows at a time; a restored cache gets at least as many to spare, so
# that the first decode steps write in place instead of copying everything.
SPARE_TOKENS = 256

# Rows added for the rest of the prompt stop here: one prefill step of mlx-lm's server.
_SPARE_LIMIT = 2048


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array of a layer that can be sliced by token: ``(1, heads, tokens, width)``."""

    dtype: str
    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer's cache class and its leaves in state order."""

    kind: str
    leaves: tuple[LeafSpec, ...]


@dataclass(frozen=True)
class Layout:
    """What the caches of a model look like, token count aside. Part of the namespace."""

    layers: tuple[LayerSpec, ...]

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal strings."""
        return json.dumps([asdict(x) for x in self.layers], sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: not JSON that `to_json` writes.
        """
        return cls(
            tuple(
                LayerSpec(str(x["kind"]), tuple(LeafSpec(**leaf) for leaf in x["leaves"]))
                for x in json.loads(text)
            )
        )

    @cached_property
    def groups(self) -> tuple[tuple[LeafSpec, tuple[int, ...]], ...]:
        """Equal leaves and their indices over all layers; each group is one tensor of a block."""
        found: dict[LeafSpec, list[int]] = {}
        leaves = [leaf for layer in self.layers for leaf in layer.leaves]
        for i, leaf in enumerate(leaves):
            found.setdefault(leaf, []).append(i)
        return tuple((leaf, tuple(rows)) for leaf, rows in found.items())

    def specs(self, n_tokens: int) -> tuple[TensorSpec, ...]:
        """Tensors of a block of ``n_tokens`` tokens."""
        return tuple(
            TensorSpec(leaf.dtype, (len(rows), leaf.heads, n_tokens, leaf.width))
            for leaf, rows in self.groups
        )


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _dtype(name: str) -> mx.Dtype:
    dtype: mx.Dtype = mx.bool_ if name == "bool" else getattr(mx, name)
    return dtype


def _leaves(cache: Any) -> tuple[mx.array, ...]:
    """The arrays of one layer's cache, cut to its offset by nobody yet."""
    return cache.keys, cache.values


def _inspect_layer(cache: Any, n_tokens: int) -> LayerSpec:
    # The exact class: a subclass may keep state that its parent's fields don't show.
    if type(cache) is not KVCache:
        raise Refused("class", f"cache class {type(cache).__name__} is not supported")
    if cache.keys is None or cache.offset != n_tokens:
        raise Refused("offset", f"a layer holds {cache.offset} tokens where the key has {n_tokens}")
    specs = []
    for leaf in _leaves(cache):
        if leaf.ndim != 4 or leaf.shape[0] != 1 or leaf.shape[2] < n_tokens:
            raise Refused("shape", f"a layer's array has shape {leaf.shape}")
        dtype = _dtype_name(leaf.dtype)
        if dtype not in ITEMSIZE:
            raise Refused("dtype", f"arrays of {dtype} can't be stored")
        specs.append(LeafSpec(dtype, leaf.shape[1], leaf.shape[3]))
    return LayerSpec(type(cache).__name__, tuple(specs))


def inspect(caches: Sequence[Any], n_tokens: int) -> Layout:
    """Layout of live caches that hold exactly ``n_tokens`` tokens on every layer.

    Raises:
        Refused: a class that isn't known, a layer whose offset differs (the key would promise
            tokens that the state doesn't have), an array that isn't one sequence's.
    """
    if not caches or n_tokens == 0:
        raise Refused("empty", "no state to store")
    return Layout(tuple(_inspect_layer(cache, n_tokens) for cache in caches))


def digest(models: Sequence[Any]) -> str:
    """Digest of the weights that models hold in memory, whatever their files say: names, shapes,
    dtypes and a few rows of each.
    """
    h = hashlib.blake2b(digest_size=16)
    named = [item for model in models for item in _flat(model.parameters())]
    samples: list[Any] = [_sample(array) for _, array in named]
    mx.eval(samples)
    for (name, array), sample in zip(named, samples, strict=True):
        h.update(f"{name} {array.dtype} {array.shape}\n".encode())
        h.update(memoryview(sample))
    return h.hexdigest()


def _flat(parameters: Any) -> list[tuple[str, Any]]:
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


def _eval_exact(arrays: list[mx.array]) -> None:
    """Evaluate into buffers of just the arrays' sizes. MLX would otherwise take free ones from
    its pool that are up to twice as large, and the tier would hold more than it counts.
    """
    mx.clear_cache()
    mx.eval(arrays)


def _stack(leaves: list[mx.array]) -> mx.array:
    """Stack into memory of its own. Stacking one array alone is a view that would pin the batch."""
    if len(leaves) > 1:
        return mx.stack(leaves)
    leaf = leaves[0][None]
    return mx.concatenate([leaf, leaf[..., :0, :]], axis=-2)


def settle(caches: Sequence[Any], start: int, stop: int) -> None:
    """Evaluate live caches, which may still have work of the batch before them, and look at the
    values of the tokens from ``start`` to ``stop``.

    Raises:
        Refused: one of them isn't finite.
    """
    leaves = [leaf for cache in caches for leaf in _leaves(cache)]
    mx.eval(leaves)
    floats = [leaf for leaf in leaves if mx.issubdtype(leaf.dtype, mx.floating)]
    finite = [mx.all(mx.isfinite(leaf[0, :, start:stop])) for leaf in floats]
    mx.eval(finite)
    if not all(f.item() for f in finite):
        raise Refused("nonfinite", "the state holds values that are not finite")


def capture(
    caches: Sequence[Any], layout: Layout, spans: Sequence[tuple[int, int]]
) -> list[tuple[mx.array, ...]]:
    """Copy token spans out of live caches: one tuple of block tensors per span.

    Everything is evaluated, synchronously, when this returns, so that the caches may be written
    to at once and another thread may read the tensors' bytes. Call `settle` first.
    """
    leaves = [leaf for cache in caches for leaf in _leaves(cache)]
    tensors = [
        tuple(_stack([leaves[i][0, :, a:b] for i in rows]) for _, rows in layout.groups)
        for a, b in spans
    ]
    flat = [t for span in tensors for t in span]
    _eval_exact(flat)
    return tensors


def _as_array(tensor: Any, spec: TensorSpec) -> mx.array:
    if isinstance(tensor, mx.array):
        return tensor
    array = mx.array(np.asarray(tensor))
    dtype = _dtype(spec.dtype)
    return array if array.dtype == dtype else array.view(dtype)


def adopt(blocks: Sequence[Block]) -> list[Block]:
    """Blocks with their decoded tensors turned into evaluated mlx arrays of the true dtype."""
    if all(isinstance(t, mx.array) for b in blocks for t in b.tensors):
        return list(blocks)
    mx.clear_cache()  # as in `_eval_exact`: arrays made from host memory are allocated at once
    adopted = [
        Block(
            b.root,
            b.parent,
            b.key,
            b.tokens,
            b.specs,
            tuple(_as_array(t, s) for t, s in zip(b.tensors, b.specs, strict=True)),
        )
        for b in blocks
    ]
    mx.eval([b.tensors for b in adopted])
    return adopted


def fits(layout: Layout, block: Block) -> bool:
    """Whether a block's tensors are what the layout says."""
    return block.specs == layout.specs(block.n_tokens)


def restore(layout: Layout, blocks: Sequence[Block], n_tokens: int, n_prompt: int) -> list[KVCache]:
    """Private caches that hold the first ``n_tokens`` tokens of ``blocks``.

    One concatenate per leaf into memory of its own, with rows to spare for the rest of a prompt
    of ``n_prompt`` tokens and the first generated ones. Evaluated on return.
    """
    parts = [b.tensors for b in adopt(blocks)]
    cut = blocks[-1].n_tokens - (sum(b.n_tokens for b in blocks) - n_tokens)
    parts[-1] = tuple(t[:, :, :cut] for t in parts[-1])
    spare = SPARE_TOKENS + min(n_prompt - n_tokens, _SPARE_LIMIT)
    leaves: dict[int, mx.array] = {}
    for g, (leaf, rows) in enumerate(layout.groups):
        per_block = [mx.split(part[g], len(rows), axis=0) for part in parts]
        empty = mx.zeros((1, leaf.heads, spare, leaf.width), _dtype(leaf.dtype))
        for row, i in enumerate(rows):
            leaves[i] = mx.concatenate([*(block[row] for block in per_block), empty], axis=2)
    mx.eval(list(leaves.values()))
    return _build(layout, leaves, n_tokens)


def _build(layout: Layout, leaves: dict[int, mx.array], n_tokens: int) -> list[KVCache]:
    caches = []
    for i in range(len(layout.layers)):
        cache = KVCache()
        cache.keys, cache.values, cache.offset = leaves[2 * i], leaves[2 * i + 1], n_tokens
        caches.append(cache)
    return caches
