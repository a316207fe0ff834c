"""A restored prefix, of which nothing has been copied yet.

A host that serves one prompt at a time writes to what it restored; one that batches merges it into
a batch first. Either way the rows are copied once, straight from the blocks.

Every function here runs mlx ops: call them on the generation thread only.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import BatchKVCache
from numpy.typing import NDArray

_MAX_THREADS = 4
# Bytes that are made, and then handed to a thread, at a time: enough to be worth a thread's while,
# and few enough that it begins soon.
_BATCH_BYTES = 4 << 20


class Copiers:
    """Threads that copy rows from blocks to where they are restored. Any thread may use them.

    MLX's own copy runs at a third of the memory's speed on the CPU, and unified memory is as near
    to the cores as to the GPU.
    """

    def __init__(self) -> None:
        n_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="tieredkv-copy")

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Do some work, which runs no mlx op, on one of them, or here if there can't be any."""
        once = _Once(work)
        try:
            return self._pool.submit(once)
        except RuntimeError:
            # The system has no thread left, or the interpreter is about to end. A host that was
            # given its caches can't do without the rows. The pool may have queued it all the same.
            once()
            done: Future[None] = Future()
            done.set_result(None)
            return done


class _Once:
    """Work that is done once, whoever calls; a call returns when it has been done."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._work is not None:
                self._work()
                self._work = None


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

    def __init__(
        self, leaves: Sequence[Leaf], n_tokens: int, n_spare: int, copiers: Copiers
    ) -> None:
        self.n_tokens = n_tokens
        self._leaves = leaves
        self._n_rows = n_tokens + n_spare
        self._copiers = copiers
        self._copied: list[mx.array] | None = None
        # Copies that were made with another's, and are still to be lent.
        self._ready: dict[int, mx.array] = {}

    @property
    def is_taken(self) -> bool:
        """Whether the arrays have been copied, and can only be taken any more."""
        return self._copied is not None

    def n_bytes(self, i: int) -> int:
        """Bytes of array ``i`` once it is copied, which it hasn't been."""
        leaf = self._leaves[i]
        return leaf.heads * self._n_rows * leaf.row_bytes

    def joined(self, i: int) -> mx.array:
        """Array ``i``, shape (1, heads, rows, width), in memory of its own.

        Who asks for one asks for all, most often: they are made together. Asked for a second time,
        another copy of all is made.
        """
        if i not in self._ready:
            self._ready = dict(enumerate(self._join()))
        return self._ready.pop(i)

    def _join(self) -> list[mx.array]:
        joined: list[mx.array] = []
        copies: list[Future[None]] = []
        for numbers in self._batches():
            leaves = self._leaves[numbers.start : numbers.stop]
            arrays = [self._blank(leaf) for leaf in leaves]
            mx.eval(arrays)
            # They are filled while the next ones are made.
            copies.append(self._copiers.start(partial(_fill, arrays, leaves)))
            joined += arrays
        for copy_ in copies:
            copy_.result()
        return joined

    def _batches(self) -> Iterator[range]:
        start = n_bytes = 0
        for i in range(len(self._leaves)):
            n_bytes += self.n_bytes(i)
            if n_bytes >= _BATCH_BYTES or i + 1 == len(self._leaves):
                yield range(start, i + 1)
                start, n_bytes = i + 1, 0

    def _blank(self, leaf: Leaf) -> mx.array:
        width = leaf.row_bytes // leaf.dtype.size
        return mx.zeros((1, leaf.heads, self._n_rows, width), leaf.dtype)

    def take(self, i: int) -> mx.array:
        """Array ``i`` in memory of its own, evaluated, with the first call together with all
        others. To be taken once, and not after `joined`.
        """
        if self._copied is None:
            self._ready = {}
            self._copied = self._join()
            self._leaves = ()
        taken = self._copied[i]
        # The taker's must be the only reference, or its first write would copy it again.
        self._copied[i] = mx.array(0)
        return taken


def _fill(arrays: Sequence[mx.array], leaves: Sequence[Leaf]) -> None:
    """Write the parts of each leaf into the first rows of its array."""
    for array, leaf in zip(arrays, leaves, strict=True):
        memory: Any = memoryview(array)  # type: ignore[arg-type]  # mlx's stubs lack that it is one
        shape = (leaf.heads, array.shape[2], leaf.row_bytes)
        rows = np.frombuffer(memory, np.uint8).reshape(shape)
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
        batch.keys, batch.values = prefix.joined(self._i), prefix.joined(self._i + 1)
        batch.offset += self.offset
        batch._idx = self.offset
        return batch
