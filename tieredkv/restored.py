"""A restored prefix, of which nothing has been copied yet.

A host that serves one prompt at a time writes to what it restored; one that batches merges it into
a batch first. Either way the rows are copied once, straight from the blocks.

Every function here runs mlx ops: call them on the generation thread only.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import BatchKVCache

_MAX_LANES = 4


class Lanes:
    """Streams over which the copies of a restore are spread. Any thread may use them.

    On the CPU, MLX runs all of a stream on one thread, which doesn't saturate the memory; a GPU
    needs no second one.
    """

    def __init__(self) -> None:
        device = mx.default_device()
        n = 1 if device.type == mx.gpu else min(_MAX_LANES, os.cpu_count() or 1)
        self._more = [mx.new_thread_local_stream(device) for _ in range(n - 1)]

    def streams(self) -> Iterator[Any]:
        """The streams in turn, without end; the default one is the first."""
        return cycle([mx.default_stream(mx.default_device()), *self._more])


class Prefix:
    """The first ``n_tokens`` rows of every array of a model's sliced layers, still in blocks.

    ``leaves`` has the parts of each array in order, shape (1, heads, rows, width) each. Copies get
    ``n_spare`` rows more, so that the next tokens are written in place.
    """

    def __init__(
        self, leaves: Sequence[Sequence[mx.array]], n_tokens: int, n_spare: int, lanes: Lanes
    ) -> None:
        self.n_tokens = n_tokens
        self._leaves: list[Sequence[mx.array]] = list(leaves)
        self._n_spare = n_spare
        self._lanes = lanes.streams()
        # One array of nothing for all arrays of a shape.
        self._spare: dict[tuple[mx.Dtype, tuple[int, ...]], mx.array] = {}
        self._copied: list[mx.array] | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the arrays have been copied, and can only be taken any more."""
        return self._copied is not None

    def n_bytes(self, i: int) -> int:
        """Bytes of array ``i`` once it is copied, which it hasn't been."""
        parts = self._leaves[i]
        per_row = int(parts[0].nbytes) // parts[0].shape[2]
        return per_row * (self.n_tokens + self._n_spare)

    def parts(self, i: int) -> Sequence[mx.array]:
        """The parts of array ``i``, spare rows last."""
        first = self._leaves[i][0]
        shape = (first.shape[0], first.shape[1], self._n_spare, first.shape[3])
        kind = (first.dtype, shape)
        if kind not in self._spare:
            self._spare[kind] = mx.zeros(shape, first.dtype)
            mx.eval(self._spare[kind])
        return [*self._leaves[i], self._spare[kind]]

    def joined(self, i: int) -> mx.array:
        """Array ``i`` in memory of its own; to be evaluated."""
        with mx.stream(next(self._lanes)):
            return mx.concatenate(list(self.parts(i)), axis=2)

    def take(self, i: int) -> mx.array:
        """Array ``i`` in memory of its own, evaluated, with the first call together with all
        others. To be taken once, and not after `joined`.
        """
        if self._copied is None:
            self._copied = [self.joined(j) for j in range(len(self._leaves))]
            mx.eval(self._copied)
            self._leaves = [()] * len(self._leaves)
        taken = self._copied[i]
        # The taker's must be the only reference, or its first write would copy it again.
        self._copied[i] = mx.array(0)
        return taken


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
        batch.keys, batch.values = prefix.joined(self._i), prefix.joined(self._i + 1)
        batch.offset += self.offset
        batch._idx = self.offset
        return batch
