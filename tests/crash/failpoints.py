"""Named points on the way of a block at which a process dies, or at which a call fails.

Production code has no hooks: a point is a function of it, wrapped from outside in the process
that is to die. `POINTS` is checked by a test, so that a renamed function can't disable a point.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import lmdb

_COLD = "tieredkv.tiers.cold"
_ENVIRONMENT = "tieredkv.tiers.environment"
_GATE = "tieredkv.tiers.gate"
_HEALTH = "tieredkv.tiers.health"
_HOT = "tieredkv.tiers.hot"
_LAYOUT = "tieredkv.layout"
_LOADER = "tieredkv.tiers.loader"
_LEDGER = "tieredkv.tiers.ledger"
_STORE = "tieredkv.store"
_WRITER = "tieredkv.tiers.writer"
_CODEC = "tieredkv.codec"

BEFORE, AFTER, LEAVING = "before", "after", "leaving"


@dataclass(frozen=True, slots=True)
class Point:
    """A function, named from its module on, and when: before it is called, after it returned, or,
    for one that is used in a ``with`` statement, when its block has ended.
    """

    module: str
    attribute: str
    moment: str


POINTS = {
    "capture.inspect": Point(_LAYOUT, "inspect", BEFORE),
    "capture.settle": Point(_LAYOUT, "settle", AFTER),
    "capture.admit": Point(_STORE, "TieredStore.admit", AFTER),
    "capture.begin": Point(_LAYOUT, "capture", BEFORE),
    "capture.end": Point(_LAYOUT, "capture", AFTER),
    "capture.hot": Point(_HOT, "HotTier.put", BEFORE),
    "capture.held": Point(_HOT, "HotTier.hold", AFTER),
    "capture.queue": Point(_WRITER, "Writer.submit", BEFORE),
    "capture.queued": Point(_WRITER, "Writer.submit", AFTER),
    "encode.batch": Point(_WRITER, "Writer._take", AFTER),
    "encode.block": Point(_CODEC, "PlaneCodec.encode", BEFORE),
    "encode.checksum": Point(_COLD, "checksum", BEFORE),
    "encode.end": Point(_COLD, "ColdTier._encode", AFTER),
    "commit.gate": Point(_GATE, "Gate._lock", BEFORE),
    "commit.locked": Point(_GATE, "Gate._lock", AFTER),
    "commit.repaired": Point(_GATE, "Gate._repair", AFTER),
    "commit.begun": Point(_LEDGER, "Ledger.__init__", AFTER),
    "commit.block": Point(_LEDGER, "Ledger.add", BEFORE),
    "commit.piece": Point(_LEDGER, "piece_key", BEFORE),
    "commit.index": Point(_LEDGER, "Record.pack", BEFORE),
    "commit.use": Point(_LEDGER, "Ledger._put_use", AFTER),
    "commit.child": Point(_LEDGER, "child_rows", BEFORE),
    "commit.counters": Point(_LEDGER, "Ledger._count_in", AFTER),
    "commit.finish": Point(_LEDGER, "Ledger.finish", BEFORE),
    "commit.learned": Point(_LEDGER, "pack_counters", BEFORE),
    "commit.ready": Point(_LEDGER, "Ledger.finish", AFTER),
    "commit.done": Point(_ENVIRONMENT, "Environment._counted", LEAVING),
    "commit.opened": Point(_GATE, "Gate.hold", LEAVING),
    "commit.told": Point(_STORE, "TieredStore._written", BEFORE),
    "evict.begin": Point(_LEDGER, "Ledger.evict", BEFORE),
    "evict.rows": Point(_LEDGER, "Ledger._delete", BEFORE),
    "evict.parent": Point(_LEDGER, "Ledger._orphaned_by", BEFORE),
    "evict.counters": Point(_LEDGER, "Ledger._count_out", BEFORE),
    "evict.ghost": Point(_LEDGER, "Ledger._add_ghost", BEFORE),
    "evict.end": Point(_LEDGER, "Ledger.evict", AFTER),
    "evict.superseded": Point(_COLD, "_supersede", AFTER),
    "evict.hot": Point(_HOT, "HotTier._evict_one", AFTER),
    "promote.match": Point(_COLD, "ColdTier.lookup", AFTER),
    "promote.load": Point(_COLD, "ColdTier.load", BEFORE),
    "promote.copied": Point(_LOADER, "Loader._fetch", AFTER),
    "promote.decode": Point(_CODEC, "PlaneCodec.decode_parsed", BEFORE),
    "promote.hot": Point(_HOT, "HotTier.mark_stored", BEFORE),
    "promote.restore": Point(_LAYOUT, "restore", BEFORE),
    "promote.touch": Point(_LEDGER, "Ledger.touch", AFTER),
    "open.directory": Point(_ENVIRONMENT, "_prepare", AFTER),
    "open.gate": Point(_GATE, "Gate.__init__", AFTER),
    "open.health": Point(_HEALTH, "in_use", AFTER),
    "open.walked": Point(_HEALTH, "finding", AFTER),
    "open.map": Point("lmdb", "open", BEFORE),
    "open.mapped": Point("lmdb", "open", AFTER),
    "open.databases": Point(_ENVIRONMENT, "_databases", AFTER),
    "open.synced": Point(_ENVIRONMENT, "_sync_directory", AFTER),
    "open.watched": Point(_GATE, "Gate.watch", AFTER),
    "open.cap": Point(_COLD, "ColdTier._change_cap", AFTER),
}

ERRORS: dict[str, Callable[[], Exception]] = {
    "disk-full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "lmdb": lambda: lmdb.Error("failpoint"),
    "fault": lambda: RuntimeError("failpoint"),
    "memory": lambda: MemoryError("failpoint"),
}

# Between two steps in memory there is nothing that fails.
IN_MEMORY = ("capture.held", "capture.queue", "encode.batch", "commit.told", "promote.hot")


@dataclass(frozen=True, slots=True)
class Failpoint:
    """What happens at the ``nth`` passing of a point: ``kill``, or the name of an error."""

    name: str
    nth: int
    action: str = "kill"


def _owner(point: Point) -> tuple[Any, str]:
    owner: Any = importlib.import_module(point.module)
    *path, name = point.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def wrap(point: Point, passed: Callable[[], None]) -> Callable[[], None]:
    """Have ``passed`` called each time that this process passes ``point``, until the function
    that is returned is called.

    Raises:
        AttributeError: there is no such function any more.
    """
    owner, name = _owner(point)
    function = getattr(owner, name)
    is_own = name in vars(owner)

    @functools.wraps(function)
    def before(*args: Any, **options: Any) -> Any:
        passed()
        return function(*args, **options)

    @functools.wraps(function)
    def after(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        passed()
        return result

    @contextmanager
    def leaving(*args: Any, **options: Any) -> Iterator[Any]:
        with function(*args, **options) as value:
            yield value
        passed()

    def undo() -> None:
        if is_own:
            setattr(owner, name, function)
        else:
            delattr(owner, name)

    setattr(owner, name, {BEFORE: before, AFTER: after, LEAVING: leaving}[point.moment])
    return undo


def strike(action: str) -> NoReturn:
    """End this process, or raise the error, that ``action`` names."""
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ERRORS[action]()


def arm(failpoint: Failpoint) -> Callable[[], None]:
    """Let this process die, or one call in it fail, as ``failpoint`` says; returns the undoing."""
    lock = threading.Lock()
    left = failpoint.nth

    def passed() -> None:
        nonlocal left
        with lock:
            left -= 1
            now = left == 0
        if now:
            strike(failpoint.action)

    return wrap(POINTS[failpoint.name], passed)


def count_all() -> Counter[str]:
    """How often each point is passed by this process from now on."""
    counts: Counter[str] = Counter()

    def counter(name: str) -> Callable[[], None]:
        def passed() -> None:
            counts[name] += 1

        return passed

    for name, point in POINTS.items():
        wrap(point, counter(name))
    return counts
