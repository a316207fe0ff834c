"""What goes to the remote tier: one thread, a queue of names, and the cold tier to read from.

Blocks are read when their turn comes, encoded as they are, so nothing waits in memory. A block
brings those of its ancestors that aren't there: parents go first, whatever was lost before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Container, Iterable
from typing import Protocol

from tieredkv.breaker import Breaker
from tieredkv.core import BlockKey
from tieredkv.engines.base import EngineFault
from tieredkv.metrics import Counters
from tieredkv.throttle import Throttle
from tieredkv.tiers.objects import Parcel
from tieredkv.tiers.remote import RemoteTier

_LOG = logging.getLogger("tieredkv")

_MAX_QUEUED = 1 << 14
_MAX_KNOWN = 1 << 16
# For how long what was there is taken to be there still. Engines' lifetimes are hours and more.
_KNOWN_SECONDS = 3600.0
# How often a block is tried, and seconds between two looks at what is waited for.
_TRIES = 4
_PATIENCE = 0.5
# The kind of calls, for the breaker.
_PUT = "put"
# How long what waits may still take at the end.
_CLOSE_SECONDS = 2.0
# How often it is looked what other processes have pinned.
_LOOK_SECONDS = 30.0


class Source(Protocol):
    """What is asked of a cold tier. Any thread may call."""

    def line(self, key: BlockKey, known: Container[BlockKey]) -> list[BlockKey]:
        """A block and its ancestors, from the first behind the last that is ``known``; nothing if
        it isn't here.
        """

    def export(self, key: BlockKey) -> Parcel | None:
        """A block as it is stored; None if it isn't here."""

    def pinned_keys(self) -> list[BlockKey]:
        """Blocks that are pinned, without their ancestors."""


class _Gone(Exception):
    """A block, or one of its ancestors, isn't in the cold tier any more, or may not leave it. Says
    why, in a word.
    """


class _Known:
    """Blocks that were there not long ago. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: OrderedDict[BlockKey, float] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        with self._lock:
            since = self._since.get(key)  # type: ignore[call-overload] # what isn't a key isn't in
            return since is not None and time.monotonic() - since < _KNOWN_SECONDS

    def add(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            now = time.monotonic()
            for key in keys:
                self._since[key] = now
                self._since.move_to_end(key)
            while len(self._since) > _MAX_KNOWN:
                self._since.popitem(last=False)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._since.pop(key, None)


class Uploader:
    """Copies blocks from a cold tier to a remote one. `submit` never waits; any thread may call."""

    def __init__(
        self,
        tier: RemoteTier,
        source: Source,
        rate: float,
        counters: Counters,
        breaker: Breaker | None = None,
    ) -> None:
        """Start the thread.

        Args:
            tier: where blocks go.
            source: the cold tier.
            rate: at most so many bytes a second; 0 for no such cap.
            counters: where blocks and bytes are counted, and what is given up.
            breaker: when to leave an engine alone that takes nothing.
        """
        self._tier = tier
        self._source = source
        self._throttle = Throttle(rate)
        self._counters = counters
        self._breaker = breaker or Breaker()
        self._queue: OrderedDict[BlockKey, None] = OrderedDict()
        self._known = _Known()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tieredkv-upload", daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Blocks in the queue."""
        return len(self._queue)

    def submit(self, keys: Iterable[BlockKey]) -> None:
        """Queue blocks that aren't known to be there, parents first."""
        with self._changed:
            fresh = [key for key in keys if key not in self._known and key not in self._queue]
            room = 0 if self._closing else _MAX_QUEUED - len(self._queue)
            self._queue.update(dict.fromkeys(fresh[:room]))
            self._lose("queue_full", len(fresh[room:]))
            self._changed.notify_all()

    def look(self) -> None:
        """Queue what is pinned."""
        self.submit(self._source.pinned_keys())

    def know(self, keys: Iterable[BlockKey]) -> None:
        """Note that blocks are there."""
        self._known.add(keys)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Note that blocks turned out not to be there."""
        self._known.discard(keys)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty; False if it isn't after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self) -> None:
        """Finish what can be finished in a short time. Idempotent."""
        self.flush(_CLOSE_SECONDS if not self._breaker.is_open else 0.0)
        with self._changed:
            self._closing = True
            self._lose("closed", len(self._queue))
            self._queue.clear()
            self._changed.notify_all()

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            key = self._next()
            if key is not None:
                self._upload(key)
            elif not self._closing:
                self.look()

    def _next(self) -> BlockKey | None:
        """The block whose turn it is; None if there was none for a while, or this is the end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._queue) or self._closing, _LOOK_SECONDS)
            if self._closing or not self._queue:
                return None
            key, _ = self._queue.popitem(last=False)
            self._busy = True
            return key

    def _upload(self, key: BlockKey) -> None:
        """Bring a block and its ancestors there; try again after a fault, but not for ever."""
        for _ in range(_TRIES):
            if not self._wait_for_engine():
                return
            try:
                self._bring(key)
            except _Gone as gone:
                self._lose(str(gone), 1)
                return
            except EngineFault as fault:
                self._fail(fault)
                continue
            except BaseException:  # noqa: BLE001 - the thread must outlive a library's panic too
                if self._lose("fault", 1) == 1:
                    _LOG.exception("tieredkv: a block could not be uploaded; only counted now")
                return
            self._succeed()
            return
        self._lose("engine", 1)

    def _bring(self, key: BlockKey) -> None:
        line = self._source.line(key, self._known)
        if not line:
            raise _Gone("gone")
        held = self._tier.held(line)
        # Before anything is put that nothing would hang on.
        leaf = None if key in held else self._leaf(key)
        for k in line:
            if k not in held:
                self._put(k, leaf if leaf and k == key else self._exported(k))
        # A parent must not go long before its child.
        self._tier.refresh([k for k in line if k in held])
        self.know(line)

    def _leaf(self, key: BlockKey) -> Parcel:
        parcel = self._exported(key)
        if parcel.expires:
            # No engine could be told to forget it in time.
            raise _Gone("expires")
        return parcel

    def _exported(self, key: BlockKey) -> Parcel:
        parcel = self._source.export(key)
        if parcel is None:
            raise _Gone("gone")
        return parcel

    def _put(self, key: BlockKey, parcel: Parcel) -> None:
        self._pause(self._throttle.delay(len(parcel.blob)))
        n_bytes = self._tier.put(key, parcel)
        if not n_bytes:
            raise _Gone("too_large")
        self.know([key])
        self._counters.add("remote_blocks_written")
        self._counters.add("remote_bytes_written", n_bytes)

    def _wait_for_engine(self) -> bool:
        """Wait while the engine is left alone; False if there is no more time for that."""
        while self._breaker.is_open and not self._breaker.is_due():
            if not self._pause(_PATIENCE):
                return False
        return not self._closing

    def _pause(self, seconds: float) -> bool:
        """Wait, unless this is the end; whether it isn't."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)
            return not self._closing

    def _succeed(self) -> None:
        if self._breaker.recovered():
            _LOG.warning("tieredkv: %s takes uploads again", self._tier.title)
        self._breaker.succeeded(_PUT)

    def _fail(self, fault: EngineFault) -> None:
        self._counters.add("remote_faults", label=f"upload_{fault.kind}")
        if self._breaker.is_open:
            self._breaker.still_fails()
        elif self._breaker.failed(_PUT):
            _LOG.warning(
                "tieredkv: %s takes no uploads (%s: %s); tried again in %.0f s",
                self._tier.title,
                fault.kind,
                fault,
                self._breaker.pause,
            )
        else:
            self._pause(_PATIENCE)

    def _lose(self, why: str, n: int) -> int:
        return self._counters.add("remote_dropped", n, why) if n else 0
