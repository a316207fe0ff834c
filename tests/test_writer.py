"""The write-behind: bounded, in order, and never in the way of who submits."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

import caches
import pytest

from tieredkv.core import Block, BlockKey
from tieredkv.tiers.null import NullTier
from tieredkv.tiers.writer import Writer


class SlowTier(NullTier):
    """Takes blocks when told to, all but those behind ``refuse_at``."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.refuse_at = 1_000_000
        self.got: list[BlockKey] = []
        self.touched: list[BlockKey] = []
        self.fault: Exception | None = None

    def put(self, blocks: Sequence[Block]) -> int:
        self.entered.set()
        self.gate.wait(10)
        if self.fault:
            raise self.fault
        taken = blocks[: max(0, self.refuse_at - len(self.got))]
        self.got += [b.key for b in taken]
        return len(taken)

    def touch(self, keys: Sequence[BlockKey], expires: int = 0) -> None:  # noqa: ARG002 - the contract
        if self.fault:
            raise self.fault
        self.touched += keys


class Log:
    def __init__(self) -> None:
        self.done: list[tuple[list[BlockKey], int]] = []

    def __call__(self, keys: Sequence[BlockKey], n: int) -> None:
        self.done.append((list(keys), n))


@pytest.fixture
def tier() -> SlowTier:
    return SlowTier()


def test_blocks_arrive_in_order(tier: SlowTier) -> None:
    """A child before its parent could never be stored."""
    log = Log()
    writer = Writer(tier, 10**9, log)
    a, b = caches.blocks(caches.chain(range(12))), caches.blocks(caches.chain(range(50, 58)))
    tier.gate.set()
    assert writer.submit(a) == 3
    assert writer.submit(b) == 2
    assert writer.flush(10)
    assert tier.got == [x.key for x in (*a, *b)]
    assert writer.close(10) == 0
    assert sum(n for _, n in log.done) == 5


def test_a_full_queue_takes_the_leading_blocks_only_and_never_waits(tier: SlowTier) -> None:
    """Waiting here is waiting for a disk on the thread that generates."""
    blocks = caches.blocks(caches.chain(range(40)))
    writer = Writer(tier, 3 * blocks[0].n_bytes, Log())
    started = time.monotonic()
    assert writer.submit(blocks) == 3
    assert writer.submit(blocks[3:]) == 0
    assert time.monotonic() - started < 1
    assert writer.n_bytes == 3 * blocks[0].n_bytes
    tier.gate.set()
    assert writer.flush(10)
    assert writer.n_bytes == writer.n_blocks == 0
    writer.close(10)


def test_the_block_being_written_counts(tier: SlowTier) -> None:
    """Bytes taken out of the account before the disk has them would unbound the queue."""
    blocks = caches.blocks(caches.chain(range(8)))
    writer = Writer(tier, 10**9, Log())
    writer.submit(blocks)
    assert tier.entered.wait(10)
    assert writer.n_bytes == sum(b.n_bytes for b in blocks)
    assert writer.waits(blocks[0].key)
    assert not writer.flush(0.05)
    tier.gate.set()
    writer.close(10)


def test_blocks_behind_one_that_was_refused_are_given_up(
    tier: SlowTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could only fail as well, and would hold their memory until then."""
    blocks = caches.blocks(caches.chain(range(40)))
    monkeypatch.setattr("tieredkv.tiers.writer._BATCH_BYTES", 2 * blocks[0].n_bytes)
    tier.refuse_at = 3
    tier.gate.set()
    log = Log()
    writer = Writer(tier, 10**9, log)
    writer.submit(blocks)
    assert writer.flush(10)
    assert writer.n_bytes == writer.n_blocks == 0
    assert sum(len(keys) for keys, _ in log.done) == 10
    assert sum(n for _, n in log.done) == 3
    writer.close(10)


def test_a_fault_of_the_tier_ends_in_a_drop(tier: SlowTier) -> None:
    """A dead writer thread would fill the queue for good."""
    log = Log()
    writer = Writer(tier, 10**9, log)
    tier.fault = RuntimeError("planted")
    tier.gate.set()
    blocks = caches.blocks(caches.chain(range(8)))
    writer.touch(blocks[0].key)
    writer.submit(blocks)
    assert writer.flush(10)
    tier.fault = None
    assert writer.submit(blocks) == 2
    assert writer.flush(10)
    assert [n for _, n in log.done] == [0, 2]
    writer.close(10)


def test_uses_are_recorded_once_and_without_a_write(tier: SlowTier) -> None:
    """A server that only hits must still age its entries rightly."""
    writer = Writer(tier, 10**9, Log())
    keys = [b.key for b in caches.blocks(caches.chain(range(8)))]
    for _ in range(50):
        writer.touch(keys[0])
        writer.touch(keys[1])
    deadline = time.monotonic() + 10
    while len(tier.touched) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert tier.touched == keys
    writer.close(10)


def test_close_writes_what_is_queued_and_takes_no_more(tier: SlowTier) -> None:
    """Ending a process in order loses nothing."""
    blocks = caches.blocks(caches.chain(range(8)))
    tier.gate.set()
    writer = Writer(tier, 10**9, Log())
    writer.submit(blocks)
    writer.touch(blocks[0].key)
    assert writer.close(10) == 0
    assert tier.got == [b.key for b in blocks]
    assert tier.touched == [blocks[0].key]
    assert writer.submit(blocks) == 0
    assert writer.flush(10)


def test_close_does_not_wait_for_a_stalled_disk(tier: SlowTier) -> None:
    """A server must end quickly whatever its disk does."""
    writer = Writer(tier, 10**9, Log())
    writer.submit(caches.blocks(caches.chain(range(8))))
    assert tier.entered.wait(10)
    assert writer.submit(caches.blocks(caches.chain(range(50, 58)))) == 2
    assert writer.close(0.05) == 2
    assert writer.n_blocks == 2
    tier.gate.set()
    assert writer.flush(10)


def test_a_step_that_runs_out_of_memory_does_not_end_the_writing(
    tier: SlowTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would be stored any more until a restart, and a flush would never return."""
    log = Log()
    writer = Writer(tier, 10**9, log)
    tier.gate.set()
    first, second = (caches.blocks(caches.chain(range(a, a + 8))) for a in (0, 50))
    take = writer._take

    def fails_once() -> list[Block]:
        monkeypatch.setattr(writer, "_take", take)
        raise MemoryError

    monkeypatch.setattr(writer, "_take", fails_once)
    assert writer.submit(first) == len(first)
    assert writer.flush(10)
    assert (writer.n_bytes, writer.n_blocks, tier.got) == (0, 0, [])
    assert [(sorted(keys), n) for keys, n in log.done] == [(sorted(b.key for b in first), 0)]
    assert writer.submit(second) == len(second)
    assert writer.flush(10)
    assert tier.got == [b.key for b in second]
    writer.close(10)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux")
def test_the_writer_gives_way_and_its_owner_does_not() -> None:
    """Saturated, it would take a core away from decoding, or decoding would give way with it."""
    niceness = []

    class Tier(NullTier):
        def put(self, blocks: Sequence[Block]) -> int:
            niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return len(blocks)

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer = Writer(Tier(), 10**9, Log())
    writer.submit(caches.blocks(caches.chain(range(8))))
    assert writer.flush(10)
    writer.close(10)
    assert niceness[0] > before
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
