"""A restored prefix, of which nothing has been copied yet.

A host that serves one prompt at a time writes to what it restored; one that batches merges it into
a batch first. Either way the rows are copied once, straight from the blocks.

Every function here runs mlx ops: call them on the generation thread only.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import BatchKVCache
from numpy.typing import NDArray

_MAX_LANES = 4
# Less than this one core copies before another has woken up.
_LEAST_BYTES = 1 << 20


class Lanes:
    """Cores over which the copies of a restore are spread. Any thread may use them.

    Rows are copied by threads and not by MLX: on the CPU its copy runs at a third of the memory's
    speed, and unified memory is as near to the cores of a GPU's host.
    """

    def __init__(self) -> None:
        device = mx.default_device()
        self._n = min(_MAX_LANES, os.cpu_count() or 1)
        # On the CPU, MLX runs all of a stream on one thread; a GPU needs no second one.
        n_streams = 1 if device.type == mx.gpu else self._n
        self._more = [mx.new_thread_local_stream(device) for _ in range(n_streams - 1)]
        self._pool = ThreadPoolExecutor(max(1, self._n - 1), thread_name_prefix="tieredkv-copy")

    def streams(self) -> Iterator[Any]:
        """The streams in turn, without end; the default one is the first."""
        return cycle([mx.default_stream(mx.default_device()), *self._more])

    def share(self, work: Callable[[int], None], n: int) -> None:
        """Do ``work(i)``, which runs no mlx op, for each i below ``n``; done when it returns."""
        futures = [self._pool.submit(_each, work, range(k, n, self._n)) for k in range(1, self._n)]
        _each(work, range(0, n, self._n))
        for future in futures:
            future.result()


def _each(work: Callable[[int], None], numbers: range) -> None:
    for i in numbers:
        work(i)


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One array of a model's sliced layers: the parts that it is made of, in order, each its bytes
    in the shape (heads, rows, bytes of a row).
    """

    dtype: mx.Dtype
    parts: Sequence[NDArray[np.uint8]]

    @property
    def heads(self) -> int:
        """Heads of each part."""
        return int(self.parts[0].shape[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's row."""
        return int(self.parts[0].shape[2])


class Prefix:
    """The first ``n_tokens`` rows of every array of a model's sliced layers, still in blocks.

    Copies get ``n_spare`` rows more, so that the next tokens are written in place.
    """

    def __init__(self, leaves: Sequence[Leaf], n_tokens: int, n_spare: int, lanes: Lanes) -> None:
        self.n_tokens = n_tokens
        self._leaves = leaves
        self._n_rows = n_tokens + n_spare
        self._lanes = lanes
        self._copied: list[mx.array] | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the arrays have been copied, and can only be taken any more."""
        return self._copied is not None

    def n_bytes(self, i: int) -> int:
        """Bytes of array ``i`` once it is copied, which it hasn't been."""
        leaf = self._leaves[i]
        return leaf.heads * self._n_rows * leaf.row_bytes

    def joined(self, first: int, n: int) -> list[mx.array]:
        """``n`` arrays from ``first`` on, shape (1, heads, rows, width), in memory of their own."""
        leaves = self._leaves[first : first + n]
        streams = self._lanes.streams()
        arrays = [self._blank(leaf, stream) for leaf, stream in zip(leaves, streams, strict=False)]
        mx.eval(arrays)
        if sum(map(self.n_bytes, range(first, first + n))) < _LEAST_BYTES:
            _each(lambda i: _fill(arrays[i], leaves[i]), range(n))
        else:
            self._lanes.share(lambda i: _fill(arrays[i], leaves[i]), n)
        return arrays

    def _blank(self, leaf: Leaf, stream: Any) -> mx.array:
        width = leaf.row_bytes // leaf.dtype.size
        return mx.zeros((1, leaf.heads, self._n_rows, width), leaf.dtype, stream=stream)

    def take(self, i: int) -> mx.array:
        """Array ``i`` in memory of its own, evaluated, with the first call together with all
        others. To be taken once, and not after `joined`.
        """
        if self._copied is None:
            self._copied = self.joined(0, len(self._leaves))
            self._leaves = ()
        taken = self._copied[i]
        # The taker's must be the only reference, or its first write would copy it again.
        self._copied[i] = mx.array(0)
        return taken


def _fill(array: mx.array, leaf: Leaf) -> None:
    """Write a leaf's parts into the first rows of an array."""
    memory: Any = memoryview(array)  # type: ignore[arg-type]  # mlx's stubs don't say that it is one
    rows = np.frombuffer(memory, np.uint8).reshape(leaf.heads, array.shape[2], leaf.row_bytes)
    start = 0
    for part in leaf.parts:
        stop = start + part.shape[1]
        rows[:, start:stop] = part
        start = stop


class KVCache(upstream.KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's, whose keys and values are copied from a prefix when they are first looked at.

    Named as its base, for mlx-lm writes the names of classes into files.
    """

    # Of the class, for those that are made without a call: mlx-lm's `from_state` does so.
    _prefix: Prefix | None = None
    _i = 0
    _keys: mx.array | None = None
    _values: mx.array | None = None

    def __init__(self, prefix: Prefix | None = None, i: int = 0) -> None:
        """The layer whose keys are array ``i`` of the prefix and whose values are the next;
        an empty one without a prefix.
        """
        self._prefix = prefix
        self._i = i
        self.offset = prefix.n_tokens if prefix else 0

    @property
    def keys(self) -> mx.array | None:
        """Shape (1, heads, rows, width), with rows to spare."""
        self._settle()
        return self._keys

    @keys.setter
    def keys(self, array: mx.array | None) -> None:
        self._settle()
        self._keys = array

    @property
    def values(self) -> mx.array | None:
        """As `keys`."""
        self._settle()
        return self._values

    @values.setter
    def values(self, array: mx.array | None) -> None:
        self._settle()
        self._values = array

    def _settle(self) -> None:
        prefix, self._prefix = self._prefix, None
        if prefix is not None:
            self._keys, self._values = prefix.take(self._i), prefix.take(self._i + 1)

    def empty(self) -> bool:
        """Whether it holds nothing."""
        return self._prefix is None and self._keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values. Copies nothing."""
        if self._prefix is not None and not self._prefix.is_taken:
            return self._prefix.n_bytes(self._i) + self._prefix.n_bytes(self._i + 1)
        return int(super().nbytes)

    def __copy__(self) -> upstream.KVCache:
        return upstream.KVCache.from_state((self.keys, self.values, self.offset))

    def __deepcopy__(self, memo: dict[int, Any]) -> upstream.KVCache:
        pair = copy.deepcopy((self.keys, self.values), memo)
        return upstream.KVCache.from_state((*pair, self.offset))

    def __reduce__(self) -> tuple[Any, ...]:
        return upstream.KVCache.from_state, ((self.keys, self.values, self.offset),)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchKVCache:
        """One batch of them; a prefix that is alone in it is copied into it at once."""
        (first, *others) = caches
        if others or not isinstance(first, cls):
            return BatchKVCache.merge(caches)
        return first._batch()

    def _batch(self) -> BatchKVCache:
        # It stays what it is: the host may merge it again.
        prefix = self._prefix
        if prefix is None or prefix.is_taken or self.offset != prefix.n_tokens:
            return BatchKVCache.merge([self])
        batch = BatchKVCache([0])
        batch.keys, batch.values = prefix.joined(self._i, 2)
        batch.offset += self.offset
        batch._idx = self.offset
        return batch
