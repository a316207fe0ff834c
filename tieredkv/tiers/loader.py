"""Blocks from the cold tier's rows to tensors: read, checked and decoded by a few threads.

Reads go ahead of decoding, within a budget: on a disk whose pages aren't cached most of the time is
spent waiting for them. A disk that stalls is given up on for as long as it does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredkv.codec import checksum
from tieredkv.core import Allocate, Block, BlockKey, Codec, CorruptBlob, TensorSpec
from tieredkv.tiers.ledger import Rows
from tieredkv.tiers.records import Record

# Encoded bytes under way at a time: half of them are decoded, half are read ahead.
_AHEAD_BYTES = 64 << 20
# Memory kept from one load for the next, whose page faults cost as much as reading does.
_KEPT_BYTES = 64 << 20
# Kinds of blocks of which the specs are kept.
_MAX_KINDS = 256
_MAX_THREADS = 4
# How long the next block may take. Then the disk stalls, and computing is faster.
STALL_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A block as the index knows it."""

    key: BlockKey
    record: Record
    grade: int
    expires: int = 0


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
        announce: Callable[[Sequence[Stored]], None],
        condemn: Callable[[BlockKey, str], None],
        fail: Callable[[str, BaseException], None],
    ) -> None:
        """Load by these, which any thread may call.

        Args:
            codec: of the blobs.
            read: copies a blob out; False if it is gone or damaged.
            announce: is told which blobs are read next, so that the disk may begin.
            condemn: is told of a damaged block, and what is wrong with it.
            fail: is told of another fault, and its kind.
        """
        self._codec = codec
        self._read = read
        self._announce = announce
        self._condemn = condemn
        self._fail = fail
        self._memory = _Memory()
        self._pool = ThreadPoolExecutor(
            min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="tieredkv-load"
        )
        self._stalled: Future[Any] | None = None
        # Blocks of one namespace with as many tokens and bytes are alike, but for snapshots of
        # unlike layouts: what was seen says where the next one is to be decoded to.
        self._specs: dict[tuple[BlockKey, int, int], tuple[TensorSpec, ...]] = {}

    def load(self, wanted: Sequence[Stored], allocate: Allocate) -> list[Block]:
        """The leading blocks of ``wanted`` that could be read and decoded, in order.

        ``allocate`` is called, on this thread and maybe several times, with keys and specs of
        blocks to come, and gives writable memory for their tensors or None. Those for which it
        gave some have that as their tensors.
        """
        if not wanted or self._is_stalled():
            return []
        blocks: list[Block] = []
        groups = list(_groups(wanted))
        announced = self._tell(groups[0])
        started = self._start(groups[0], allocate)
        for group, after in pairwise([*groups, []]):
            under_way = started
            # The next group is on its way while this one is waited for.
            ahead = after if len(under_way) == len(group) else []
            announced += self._tell(ahead)
            started = self._start(ahead, allocate)
            found = self._leading(under_way)
            blocks += found
            if len(found) < len(group):
                break
        self._end([*announced, *started])
        return blocks

    def _is_stalled(self) -> bool:
        return self._stalled is not None and not self._stalled.done()

    def _tell(self, group: Sequence[Stored]) -> list[Future[None]]:
        return [self._pool.submit(self._announce, group)] if group else []

    def _end(self, futures: Sequence[Future[Any]]) -> None:
        """Leave no reader behind: it would keep the environment open after a ``close``."""
        running = [future for future in futures if not future.cancel()]
        if not self._is_stalled():
            wait(running, STALL_SECONDS)

    def _start(self, group: Sequence[Stored], allocate: Allocate) -> list[Future[Any]]:
        """Begin to load the leading blocks of a group of which it is known what they hold."""
        started: list[Future[Any]] = []
        while len(started) < len(group):
            run = self._alike(group[len(started) :])
            if not run:
                break
            specs = [spec for _, spec in run]
            # Making memory takes time, in which the first are decoded.
            memory = allocate([stored.key for stored, _ in run], specs)
            for (stored, spec), into in zip(run, memory, strict=True):
                started.append(self._pool.submit(self._load_one, stored, spec, into))
        return started

    def _alike(self, group: Sequence[Stored]) -> list[tuple[Stored, tuple[TensorSpec, ...]]]:
        """The first block of a group, and those behind it of which what they hold is known."""
        first, *rest = group
        specs = self._specs_of(first)
        run = [] if specs is None else [(first, specs)]
        for stored in rest if run else ():
            known = self._specs.get(_kind(stored))
            if known is None:
                break
            run.append((stored, known))
        return run

    def _specs_of(self, stored: Stored) -> tuple[TensorSpec, ...] | None:
        """What a block most likely holds; the first of its kind is read to find out."""
        kind = _kind(stored)
        known = self._specs.get(kind)
        if known is not None:
            return known
        for fetched in self._leading([self._pool.submit(self._fetch, stored)]):
            if len(self._specs) >= _MAX_KINDS:
                self._specs.clear()
            self._memory.give(fetched.memory)
            specs: tuple[TensorSpec, ...] = fetched.parsed.specs
            self._specs[kind] = specs
            return specs
        return None

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

    def _load_one(
        self, stored: Stored, specs: Sequence[TensorSpec], into: Sequence[Any] | None
    ) -> Block | None:
        """A block, in the memory that was given for what it was taken to hold."""
        fetched = self._fetch(stored)
        if fetched is None:
            return None
        return self._decode(fetched, into if fetched.parsed.specs == specs else None)

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
            fetched.stored.expires,
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


def _kind(stored: Stored) -> tuple[BlockKey, int, int]:
    """What blocks that hold the same have in common."""
    record = stored.record
    return record.root, len(record.tokens), record.raw_bytes


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
