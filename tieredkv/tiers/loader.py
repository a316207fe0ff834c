"""Blocks from the cold tier's rows to tensors: read, checked and decoded by a few threads.

Reads go ahead of decoding, within a budget: on a disk whose pages aren't cached most of the time is
spent waiting for them. A disk that stalls is given up on for as long as it does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredkv.codec import checksum
from tieredkv.core import Allocate, Block, BlockKey, Codec, CorruptBlob, TensorSpec
from tieredkv.tiers.ledger import Rows
from tieredkv.tiers.records import Record

# Encoded bytes that are read ahead of those being decoded.
_AHEAD_BYTES = 64 << 20
# Memory kept from one load for the next, whose page faults cost as much as reading does.
_KEPT_BYTES = 64 << 20
_MAX_THREADS = 4
# How long the next block may take. Then the disk stalls, and computing is faster.
STALL_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A block as the index knows it."""

    key: BlockKey
    record: Record
    grade: int


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A block as it was read, sound as far as its checksum and its header show."""

    stored: Stored
    memory: NDArray[np.uint8]
    parsed: Any


class _Memory:
    """Buffers that are used again. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[NDArray[np.uint8]] = []
        self._n_bytes = 0

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            fit = [i for i, m in enumerate(self._free) if n_bytes <= m.size <= 2 * n_bytes]
            if fit:
                found = self._free.pop(fit[0])
                self._n_bytes -= found.size
                return found
        return np.empty(n_bytes, np.uint8)

    def give(self, memory: NDArray[np.uint8]) -> None:
        with self._lock:
            if self._n_bytes + memory.size <= _KEPT_BYTES:
                self._free.append(memory)
                self._n_bytes += memory.size


class Loader:
    """Decodes blocks of one tier. Any thread may call; one load is worked on by all threads."""

    def __init__(
        self,
        codec: Codec,
        read: Callable[[BlockKey, Record, NDArray[np.uint8]], bool],
        condemn: Callable[[BlockKey, str], None],
        fail: Callable[[str, BaseException], None],
    ) -> None:
        """Load by these, which any thread may call.

        Args:
            codec: of the blobs.
            read: copies a blob out; False if it is gone or damaged.
            condemn: is told of a damaged block, and what is wrong with it.
            fail: is told of another fault, and its kind.
        """
        self._codec = codec
        self._read = read
        self._condemn = condemn
        self._fail = fail
        self._memory = _Memory()
        self._pool = ThreadPoolExecutor(
            min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="tieredkv-load"
        )
        self._stalled: Future[Any] | None = None

    def load(self, wanted: Sequence[Stored], allocate: Allocate) -> list[Block]:
        """The leading blocks of ``wanted`` that could be read and decoded, in order.

        ``allocate`` is called, on this thread and maybe several times, with keys and specs of
        blocks to come, and gives writable memory for their tensors or None. Those for which it
        gave some have that as their tensors.
        """
        if self._stalled is not None and not self._stalled.done():
            return []
        blocks: list[Block] = []
        groups = list(_groups(wanted))
        reads = [self._pool.submit(self._fetch, s) for s in groups[0]] if groups else []
        for after in [*groups[1:], []]:
            fetched = self._leading(reads)
            is_short = len(fetched) < len(reads)
            if not is_short:
                reads = [self._pool.submit(self._fetch, s) for s in after]
            decoded = self._decoded(fetched, allocate)
            blocks += decoded
            if is_short or len(decoded) < len(fetched):
                break
        return blocks

    def _leading(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Results up to the first that failed or that doesn't come."""
        found = []
        for future in futures:
            try:
                result = future.result(STALL_SECONDS)
            except StillRunning as stall:
                self._stalled = future
                self._fail("stalled", stall)
                result = None
            except Exception as error:  # noqa: BLE001 - counted, logged; the caller serves requests
                self._fail("load", error)
                result = None
            if result is None:
                break
            found.append(result)
        for future in futures[len(found) :]:
            future.cancel()
        return found

    def _decoded(self, fetched: Sequence[_Fetched], allocate: Allocate) -> list[Block]:
        if not fetched:
            return []
        keys = [f.stored.key for f in fetched]
        memories = allocate(keys, [f.parsed.specs for f in fetched])
        if len(fetched) == 1:
            block = self._decode(fetched[0], memories[0])
            return [block] if block else []
        pairs = zip(fetched, memories, strict=True)
        return self._leading([self._pool.submit(self._decode, f, m) for f, m in pairs])

    def _fetch(self, stored: Stored) -> _Fetched | None:
        key, record = stored.key, stored.record
        memory = self._memory.take(record.blob_bytes)
        blob = memory[: record.blob_bytes]
        if not self._read(key, record, blob):
            return None
        if checksum(blob.data) != record.checksum:
            self._condemn(key, "its checksum is wrong")
            return None
        try:
            return _Fetched(stored, memory, self._codec.parse(blob.data, record.raw_bytes))
        except CorruptBlob as error:
            self._condemn(key, str(error))
            return None

    def _decode(self, fetched: _Fetched, into: Sequence[Any] | None) -> Block | None:
        key, record = fetched.stored.key, fetched.stored.record
        try:
            tensors = self._codec.decode_parsed(fetched.parsed, into)
        except CorruptBlob as error:
            self._condemn(key, str(error))
            return None
        except Exception as error:  # noqa: BLE001 - counted, logged; the caller serves requests
            self._fail("decode", error)
            return None
        self._memory.give(fetched.memory)
        return Block(
            record.root,
            record.parent,
            key,
            record.tokens,
            fetched.parsed.specs,
            tensors if into is None else tuple(into),
            fetched.stored.grade,
        )


def copy_blob(rows: Rows, key: BlockKey, record: Record, out: NDArray[np.uint8]) -> bool:
    """Copy the pieces of a blob to ``out``; False if they aren't those that the record counts."""
    start = 0
    for piece in rows.pieces(key, record):
        stop = start + len(piece)
        if stop > len(out):
            return False
        # numpy lets other threads run meanwhile.
        out[start:stop] = np.frombuffer(piece, np.uint8)
        start = stop
    return start == len(out)


def own_memory(keys: Sequence[BlockKey], _: Sequence[tuple[TensorSpec, ...]]) -> list[None]:
    """No memory for anything: blocks get their own."""
    return [None] * len(keys)


def _groups(wanted: Sequence[Stored]) -> Iterator[list[Stored]]:
    group: list[Stored] = []
    n_bytes = 0
    for stored in wanted:
        if group and n_bytes + stored.record.blob_bytes > _AHEAD_BYTES // 2:
            yield group
            group, n_bytes = [], 0
        group.append(stored)
        n_bytes += stored.record.blob_bytes
    if group:
        yield group
