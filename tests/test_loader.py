"""Blocks from rows to tensors, by threads that may get stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import caches
import mlx.core as mx
import numpy as np
import pytest

from tieredkv import layout
from tieredkv.codec import PlaneCodec, checksum
from tieredkv.core import Block, BlockKey, TensorSpec
from tieredkv.tiers import loader
from tieredkv.tiers.loader import Loader, Stored, own_memory
from tieredkv.tiers.records import record_of

BLOCKS = caches.blocks(caches.chain(range(40)))
BLOBS = {b.key: PlaneCodec().encode(b) for b in BLOCKS}
STORED = [
    Stored(b.key, record_of(b, len(BLOBS[b.key]), checksum(BLOBS[b.key]), 0), grade=i % 8)
    for i, b in enumerate(BLOCKS)
]


class Disk:
    """Blobs by key; reads wait while it stalls."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.works.set()
        self.condemned: list[BlockKey] = []
        self.faults: list[str] = []
        self.announced: list[BlockKey] = []
        self.loader = Loader(PlaneCodec(), self.read, self.announce, self.condemn, self.fail)

    def read(self, key: BlockKey, _: Any, out: Any) -> bool:
        self.works.wait()
        if key not in BLOBS:
            return False
        out[:] = np.frombuffer(BLOBS[key], np.uint8)
        return True

    def announce(self, coming: Sequence[Stored]) -> None:
        self.announced += [stored.key for stored in coming]

    def condemn(self, key: BlockKey, _: str) -> None:
        self.condemned.append(key)

    def fail(self, kind: str, _: BaseException) -> None:
        self.faults.append(kind)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def data(blocks: Sequence[Block]) -> list[bytes]:
    return [caches.data(b) for b in blocks]


@pytest.mark.parametrize("ahead", [1, 1 << 20])
def test_blocks_come_in_order_and_whole(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """One at a time or all at once, as their sizes and the budget have it."""
    monkeypatch.setattr(loader, "_AHEAD_BYTES", ahead)
    for n in (0, 1, 2, 10):
        found = disk.loader.load(STORED[:n], own_memory)
        assert data(found) == data(BLOCKS[:n])
        assert [b.grade for b in found] == [s.grade for s in STORED[:n]]
        assert [(b.root, b.parent, b.key, b.tokens) for b in found] == [
            (b.root, b.parent, b.key, b.tokens) for b in BLOCKS[:n]
        ]


def test_the_disk_is_told_what_comes_before_it_is_read(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is asked for a page at a time idles in between."""
    monkeypatch.setattr(loader, "_AHEAD_BYTES", 1)
    disk.loader.load(STORED, own_memory)
    assert disk.announced == [s.key for s in STORED]


def test_a_block_unlike_others_of_its_kind_is_decoded_all_the_same(disk: Disk) -> None:
    """Memory is given for what a block is taken to hold: another may not end up in it."""
    disk.loader.load(STORED, own_memory)
    block = BLOCKS[3]
    specs = tuple(
        replace(s, shape=(*s.shape[:1], 1, s.shape[1] * s.shape[2], *s.shape[3:]))
        for s in block.specs
    )
    tensors = tuple(t.reshape(s.shape) for t, s in zip(block.tensors, specs, strict=True))
    other = replace(block, specs=specs, tensors=tensors)
    blob = PlaneCodec().encode(other)
    stored = Stored(other.key, record_of(other, len(blob), checksum(blob), 0), 0)

    def read(_key: BlockKey, _record: Any, out: Any) -> bool:
        out[:] = np.frombuffer(blob, np.uint8)
        return True

    disk.loader._read = read

    def allocate(_: Any, specs: Sequence[tuple[TensorSpec, ...]]) -> list[Any]:
        return [layout.blank(s) for s in specs]

    (found,) = disk.loader.load([stored], allocate)
    assert found.specs == other.specs
    assert data([found]) == data([other])
    assert not isinstance(found.tensors[0], mx.array)


def test_later_loads_do_not_change_earlier_blocks(disk: Disk) -> None:
    """What was read into is used again for the next."""
    first = disk.loader.load(STORED[:5], own_memory)
    disk.loader.load(STORED[5:], own_memory)
    assert data(first) == data(BLOCKS[:5])


def test_they_are_decoded_into_the_memory_that_is_given(disk: Disk) -> None:
    """A copy fewer, and none that isn't counted."""
    given: dict[BlockKey, Any] = {}

    def allocate(keys: Sequence[BlockKey], specs: Sequence[tuple[TensorSpec, ...]]) -> list[Any]:
        for key, of_block in zip(keys, specs, strict=True):
            if len(given) < 3:
                given[key] = layout.blank(of_block)
        return [given.get(key) for key in keys]

    found = disk.loader.load(STORED[:5], allocate)
    assert data(found) == data(BLOCKS[:5])
    assert [isinstance(b.tensors[0], mx.array) for b in found] == [True] * 3 + [False] * 2
    assert all(b.tensors[0] is given[b.key][0] for b in found[:3])


def test_memory_for_blocks_that_are_alike_is_asked_for_at_once(disk: Disk) -> None:
    """If this failed, making room for a long prompt would take time by the square of its length."""
    asked: list[int] = []

    def allocate(keys: Sequence[BlockKey], _: Any) -> list[None]:
        asked.append(len(keys))
        return [None] * len(keys)

    assert data(disk.loader.load(STORED, allocate)) == data(BLOCKS)
    assert asked == [len(STORED)]


def test_a_stalled_disk_costs_one_wait(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request would wait for it, while it could have been computed."""
    monkeypatch.setattr(loader, "STALL_SECONDS", 0.2)
    disk.works.clear()
    start = time.monotonic()
    assert [disk.loader.load(STORED, own_memory) for _ in range(20)] == [[]] * 20
    assert time.monotonic() - start < 2
    assert disk.faults == ["stalled"]
    disk.works.set()
    deadline = time.monotonic() + 10
    while data(disk.loader.load(STORED, own_memory)) != data(BLOCKS):
        assert time.monotonic() < deadline


def test_what_is_damaged_or_gone_ends_the_load_before_it(disk: Disk) -> None:
    """What follows it is of no use, and it itself would be a wrong answer."""
    bad = STORED[3]
    forged = record_of(BLOCKS[3], len(BLOBS[bad.key]), bytes(16), 0)
    wanted = [*STORED[:3], Stored(bad.key, forged, 0), *STORED[4:]]
    assert data(disk.loader.load(wanted, own_memory)) == data(BLOCKS[:3])
    assert disk.condemned == [bad.key]
    gone = [*STORED[:2], Stored(BlockKey(bytes(32)), bad.record, 0), *STORED[2:]]
    assert data(disk.loader.load(gone, own_memory)) == data(BLOCKS[:2])


def test_a_fault_of_a_thread_ends_the_load_before_it(disk: Disk) -> None:
    """An exception would take the blocks before it with it."""

    def read(key: BlockKey, record: Any, out: Any) -> bool:
        if key == STORED[2].key:
            raise MemoryError
        return disk.read(key, record, out)

    failing = Loader(PlaneCodec(), read, disk.announce, disk.condemn, disk.fail)
    assert data(failing.load(STORED, own_memory)) == data(BLOCKS[:2])
    assert disk.faults == ["load"]
