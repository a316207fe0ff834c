"""Write-behind: one thread that takes blocks from a bounded queue to a slower tier.

Durable as it happens: what is submitted is committed as soon as the tier can follow, and
nothing waits for a shutdown. The thread runs no mlx op; it reads tensors as buffers.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tieredkv.core import Block, BlockKey, Tier, later

_LOG = logging.getLogger("tieredkv")

# Raw bytes taken to the tier at once: small enough that a kill loses little, large enough that
# one commit's sync is shared by several blocks.
_BATCH_BYTES = 32 << 20

# Where cores are short the model's threads go first: with a writer as important as they are, the
# median decode step took 1.4 times as long, beside this one as long as alone.
_NICENESS = 10

# How long a recorded use may wait for company before it is written.
_TOUCH_SECONDS = 1.0

# How often what has expired is deleted. It isn't found before either.
_SWEEP_SECONDS = 5.0

_T = TypeVar("_T")
_R = TypeVar("_R")
Done = Callable[[Sequence[BlockKey], int], None]


class Writer:
    """Takes blocks to ``tier`` in the background.

    ``done(keys, n)`` is called on the writer thread when blocks have left the queue and nothing
    here refers to them any more: the first ``n`` are committed, the others were given up.
    `submit` and `touch` never wait.
    """

    def __init__(self, tier: Tier, limit_bytes: int, done: Done) -> None:
        self._tier = tier
        self._limit = limit_bytes
        self._done = done
        # One deque per submission: consecutive blocks of one chain, so a block's fate decides
        # that of those behind it.
        self._jobs: deque[deque[Block]] = deque()
        self._pending: set[BlockKey] = set()
        self._n_bytes = 0
        # Until when each block that was used is to be kept.
        self._touched: dict[BlockKey, int] = {}
        self._next_sweep = time.monotonic() + _SWEEP_SECONDS
        self._n_faults = 0
        self._busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tieredkv-writer", daemon=True)
        self._thread.start()

    @property
    def n_bytes(self) -> int:
        """Raw bytes of the blocks that wait, the ones being written included."""
        return self._n_bytes

    @property
    def n_blocks(self) -> int:
        """Blocks that wait, the ones being written included."""
        return len(self._pending)

    def waits(self, key: BlockKey) -> bool:
        """Whether a block is in the queue or being written."""
        with self._changed:
            return key in self._pending

    def submit(self, blocks: Sequence[Block]) -> int:
        """Queue consecutive blocks of one chain; how many, from the first, there was room for."""
        with self._changed:
            if self._closing:
                return 0
            taken: deque[Block] = deque()
            for block in blocks:
                if self._n_bytes + block.n_bytes > self._limit:
                    break
                self._n_bytes += block.n_bytes
                self._pending.add(block.key)
                taken.append(block)
            if taken:
                self._jobs.append(taken)
                self._changed.notify_all()
            return len(taken)

    def touch(self, key: BlockKey, expires: int = 0) -> None:
        """Record a use in the tier, some time soon: see `core.Tier.touch`."""
        with self._changed:
            before = self._touched.pop(key, expires)
            self._touched[key] = later(before, expires)
            if len(self._touched) == 1:
                self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty; False if it isn't after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout)

    def close(self, timeout: float | None = None) -> int:
        """Stop taking blocks, write what is queued for at most ``timeout`` seconds, end the
        thread. Returns how many blocks were given up. Idempotent.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # The last reference to a cache may be dropped on this very thread.
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        with self._changed:
            given_up = [block for job in self._jobs for block in job]
            self._jobs.clear()
            self._pending.difference_update(block.key for block in given_up)
            self._n_bytes -= sum(block.n_bytes for block in given_up)
            return len(given_up)

    def _run(self) -> None:
        _give_way()
        while True:
            try:
                batch, touched = self._next()
            except MemoryError:
                self._guarded(self._give_up, [], None)
                continue
            # A request's match is told before what it adds.
            for expires, keys in touched.items():
                self._guarded(partial(self._tier.touch, expires=expires), keys, None)
            if batch:
                self._write(batch)
            self._sweep()
            if self._is_over:
                break
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _give_up(self, _: list[BlockKey]) -> None:
        """Let go of all that waits: what a step that failed half-way had in hand isn't known."""
        with self._changed:
            keys = list(self._pending)
            self._jobs.clear()
            self._pending.clear()
            self._n_bytes = 0
        _LOG.warning("tieredkv: out of memory: %d blocks that waited are not stored", len(keys))
        self._done(keys, 0)

    def _sweep(self) -> None:
        """Delete some of what has expired in the tier, every now and then. As long as there is
        more, what waits goes first: all of a large store may expire at once.
        """
        if time.monotonic() < self._next_sweep:
            return
        with self._changed:
            # Whoever flushes doesn't wait for this.
            self._busy = False
            self._changed.notify_all()
        n = self._guarded(lambda _: self._tier.expire(time.time_ns()), [], 0)
        self._next_sweep = time.monotonic() + (0 if n else _SWEEP_SECONDS)

    @property
    def _is_over(self) -> bool:
        with self._changed:
            return self._closing and not self._jobs and not self._touched

    def _guarded(self, act: Callable[[list[_T]], _R], items: list[_T], otherwise: _R) -> _R:
        """What ``act`` returns; ``otherwise``, and a log line, if it fails against its contract."""
        try:
            return act(items)
        except Exception:  # noqa: BLE001 - the thread must outlive a fault of the tier or the store
            self._n_faults += 1
            if self._n_faults == 1:
                _LOG.exception(
                    "tieredkv: a fault of the writer's tier cost %d items; further ones are not "
                    "logged",
                    len(items),
                )
            return otherwise

    def _next(self) -> tuple[list[Block], dict[int, list[BlockKey]]]:
        """Wait for the next batch of one job and the uses recorded, by expiry, or for the next
        sweep; nothing at all when closing.
        """
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self._jobs and not self._closing:
                patience = max(0.0, self._next_sweep - time.monotonic())
                if self._touched:
                    patience = min(patience, _TOUCH_SECONDS)
                if not self._changed.wait(patience):
                    break
            self._busy = True
            touched: dict[int, list[BlockKey]] = {}
            for key, expires in self._touched.items():
                touched.setdefault(expires, []).append(key)
            self._touched.clear()
            return self._take(), touched

    def _take(self) -> list[Block]:
        batch: list[Block] = []
        if not self._jobs:
            return batch
        blocks = self._jobs[0]
        size = 0
        # A snapshot goes with its block, which the tier might leave to a longer one otherwise.
        while blocks and (
            not batch or size + blocks[0].n_bytes <= _BATCH_BYTES or not blocks[0].tokens
        ):
            size += blocks[0].n_bytes
            batch.append(blocks.popleft())
        if not blocks:
            self._jobs.popleft()
        return batch

    def _write(self, batch: list[Block]) -> None:
        n = self._guarded(self._tier.put, batch, 0)
        with self._changed:
            if n < len(batch):
                batch += self._abandon(batch[-1])
            keys = [block.key for block in batch]
            self._pending.difference_update(keys)
            self._n_bytes -= sum(block.n_bytes for block in batch)
        batch.clear()
        self._guarded(lambda left: self._done(left, n), keys, None)

    def _abandon(self, last: Block) -> deque[Block]:
        """Blocks queued behind one that could not be written: without it they can't be either."""
        if not self._jobs or self._jobs[0][0].parent != last.key:
            return deque()
        return self._jobs.popleft()


def _give_way() -> None:
    """Let other threads go before this one. Elsewhere than on Linux, niceness is the process'."""
    if sys.platform == "linux":
        os.nice(_NICENESS)
