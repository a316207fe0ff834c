"""The tier on disk: blocks in one LMDB environment that all processes on a machine may share.

Which blocks are kept, read and given up is decided here. What rows a block has is in
``ledger``, how they look in ``records``, and how LMDB is kept safe in ``environment``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tieredkv.codec import checksum
from tieredkv.core import (
    BLOCK_TOKENS,
    PIN_SHARE,
    Allocate,
    Block,
    BlockKey,
    Chain,
    Codec,
    ColdCounters,
    ColdTierUnavailable,
    CorruptBlob,
    Namespace,
    Partial,
    Pinned,
    PinRefused,
    Place,
    Problem,
)
from tieredkv.hazard import STATE, Judge, Trial, kind_of
from tieredkv.keys import base_key, common_prefix, namespace_key
from tieredkv.metrics import Departures, Faults, Histogram
from tieredkv.tiers import audit, pins, pruning
from tieredkv.tiers.environment import (
    Damaged,
    Environment,
    Fault,
    Lost,
    log_quarantine,
    open_for_reading,
    open_for_writing,
    open_to_mend,
)
from tieredkv.tiers.health import finding
from tieredkv.tiers.ledger import ADDED, CAP, DISK, ENCODED, Ledger, Node, Origin, Rows
from tieredkv.tiers.loader import Loader, Stored, copy_blob, own_memory
from tieredkv.tiers.objects import Parcel
from tieredkv.tiers.pins import PinnedPrefix
from tieredkv.tiers.portable import Foreign, Row
from tieredkv.tiers.pruning import Criteria, Plan, Victim
from tieredkv.tiers.readahead import announce
from tieredkv.tiers.records import (
    MAX_PIECES,
    MAX_RAW_BYTES,
    MAX_TOKENS,
    PIECE_BYTES,
    Record,
    describe,
    described,
    record_of,
)
from tieredkv.tiers.selection import Chosen, Selection, choose
from tieredkv.tiers.traffic import thread_bytes
from tieredkv.tiers.usage import ColdUsage, NamespaceUsage, survey

__all__ = ["ColdReader", "ColdTier", "ColdTierCounters", "ColdUsage", "NamespaceUsage"]

logger = logging.getLogger("tieredkv")

_MAX_BATCH_BYTES = 64 << 20
_MAX_EVICTED_BYTES = 256 << 20
_MAX_PURGED_BLOCKS = 256
_MAX_PRUNED_BLOCKS = 1024
_MAX_EXPIRED_BLOCKS = 1024
# Namespaces whose first block may be on its way; clients make new ones with every salt.
_MAX_ORIGINS = 4096
# Others may write what is to go while it goes; for ever, if this did not end.
_MAX_PRUNE_PASSES = 3
# Pages that an empty store needs.
_EMPTY_PAGES = 16
_INCONSISTENT = "its pieces or its key are not those of its record"
# Why a block waits: there is room for it, but in pages that only a later transaction can use.
_SETTLING = "settling"
_MAX_SETTLING = 3
# How often, and for how many times the room that was lacking, blocks are evicted when the pages
# that are free are too scattered.
_MAX_FULLS = 3
_FULL_FACTOR = 4

_T = TypeVar("_T")


def batch_bytes(cap_bytes: int) -> int:
    """Encoded bytes after which a transaction takes no further block."""
    return min(_MAX_BATCH_BYTES, cap_bytes // 128)


def scattered_bytes(cap_bytes: int) -> int:
    """Free bytes of the file that fit nothing, with the lists of them; measured, see the tests."""
    return min(cap_bytes // 8, (4 << 20) + cap_bytes // 50)


def budget_bytes(cap_bytes: int, cost: int = 0) -> int:
    """Live bytes at which the *file* can be kept within ``cap_bytes``.

    Pages freed by one transaction can be used two later, so next to the scattered ones as many
    must be free as two transactions write: a batch each, and a block of ``cost`` bytes beyond.
    """
    margin = cap_bytes // 128
    written = 2 * (batch_bytes(cap_bytes) + cost)
    return cap_bytes - margin - scattered_bytes(cap_bytes) - written


@dataclass(frozen=True, slots=True)
class ColdTierCounters(ColdCounters):
    """Counts since the tier was opened, by this process alone.

    ``page_bytes_written`` is what the encoded bytes of new blocks take in whole pages.
    ``dropped`` counts blocks not stored, by reason, ``faults`` errors by kind.
    """

    blocks_written: int = 0
    page_bytes_written: int = 0
    superseded: int = 0
    corrupt: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class _Reading:
    """What needs no write: shared by the tier and by those who only look."""

    def __init__(self, environment: Environment, codec: Codec) -> None:
        self._directory = environment.directory
        self._codec = codec
        self._lock = threading.Lock()
        self._environment: Environment | None = environment
        # Replaced, never changed: other threads read it meanwhile.
        self._condemned: frozenset[BlockKey] = frozenset()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._recent = Faults()
        self._commits = Histogram()
        self._departures = Departures()
        self._loader: Loader | None = Loader(
            codec, self._copy_blob, self._announce, self._condemn, self._count_fault
        )
        self._closed = False

    @property
    def n_bytes(self) -> int:
        """Bytes of the pages in use, by all processes."""
        return self._read(Rows.live_bytes, 0)

    @property
    def n_blocks(self) -> int:
        """Blocks in the store, of all processes."""
        return self._read(lambda rows: rows.n_blocks, 0)

    @property
    def cap_bytes(self) -> int:
        """The cap in force, which is that of whoever opened the store last."""
        return self._read(lambda rows: rows.number(CAP) or 0, 0)

    def lookup(self, chain: Chain, start: int = 0) -> int:
        """See ``Tier.lookup``."""

        def walk(rows: Rows) -> int:
            i = start
            while i < chain.n_full and self._is_block(rows, chain, i):
                i += 1
            return start + rows.expired_end(chain.keys[start:i], time.time_ns())

        return self._read(walk, start)

    def nearest(self, parent: BlockKey, tokens: bytes) -> Partial | None:
        """See ``Tier.nearest``. O(log n) in the number of siblings."""
        query = tokens[: MAX_TOKENS * 8]

        def search(rows: Rows) -> Partial | None:
            shared = [
                Partial(node.key, common_prefix(node.record.tokens, query))
                for node in self._found(rows, rows.neighbours(parent, query))
            ]
            best = max(shared, key=lambda partial: partial.n_tokens, default=None)
            return best if best and best.n_tokens else None

        return self._read(search, None)

    def prefixes(self, parent: BlockKey, tokens: bytes) -> list[Partial]:
        """See ``Tier.prefixes``."""

        def search(rows: Rows) -> list[Partial]:
            return [
                Partial(node.key, len(node.record.tokens) // 8)
                for node in self._found(rows, rows.leading(parent, tokens))
            ]

        return self._read(search, [])

    def present(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """See ``Tier.present``. One transaction for all."""
        nothing: frozenset[BlockKey] = frozenset()

        def search(rows: Rows) -> frozenset[BlockKey]:
            here = frozenset(filter(rows.has, keys))
            now = time.time_ns()
            if rows.first_due(now) is None:
                return here
            return frozenset(key for key in here if not rows.has_expired(key, now))

        return self._read(search, nothing) - self._condemned

    def load(self, keys: Sequence[BlockKey], allocate: Allocate = own_memory) -> list[Block]:
        """See ``LowerTier.load``. Each blob is copied in a read transaction of its own."""
        loader = self._loader
        nothing: list[Stored] = []
        stored = self._read(lambda rows: self._stored(rows, keys), nothing)
        return loader.load(stored, allocate) if loader and stored else []

    def line(self, key: BlockKey, known: Container[BlockKey]) -> list[BlockKey]:
        """A block and its ancestors, from the first behind the last that is ``known``; nothing if
        it isn't here.
        """

        def climb(rows: Rows) -> list[BlockKey]:
            found = [key]
            record = rows.record(key)
            while record and record.parent != record.root and record.parent not in known:
                found.append(record.parent)
                record = rows.record(record.parent)
            return found[::-1] if record else []

        nothing: list[BlockKey] = []
        return self._read(climb, nothing)

    def export(self, key: BlockKey) -> Parcel | None:
        """A block as it is stored, to be put elsewhere; None if it isn't here or is damaged."""

        def read(rows: Rows) -> Parcel | None:
            record = None if key in self._condemned else rows.record(key)
            blob = rows.blob(key, record) if record else None
            if record is None or blob is None:
                return None
            use = rows.use(key)
            expires = 0 if use.expires and rows.is_pinned(key) else use.expires
            return Parcel(record, blob, use.grade, expires)

        parcel = self._read(read, None)
        if parcel is None or checksum(parcel.blob) != parcel.record.checksum:
            return None
        return parcel

    def pinned_keys(self) -> list[BlockKey]:
        """Blocks that are pinned, and the state pinned with them, without their ancestors."""
        nothing: list[BlockKey] = []
        return self._read(lambda rows: list(rows.pins()), nothing)

    def missing(self, chain: Chain) -> int:
        """Index of the first block of ``chain``, tail included, that isn't here.

        A tail that a longer sibling covers is here. O(log n): a block is never here without
        those before it.
        """

        def search(rows: Rows) -> int:
            low, high = 0, len(chain.keys)
            while low < high:
                middle = (low + high) // 2
                if _holder(rows, chain, middle) is not None:
                    low = middle + 1
                else:
                    high = middle
            bad = (i for i, key in enumerate(chain.keys[:low]) if key in self._condemned)
            # What has expired is to be put again, or it would be deleted before what comes below.
            return min(next(bad, low), _lasting(rows, chain, low))

        return self._read(search, 0)

    def meant(self, criteria: Criteria) -> frozenset[BlockKey]:
        """See ``LowerTier.meant``."""
        nothing: frozenset[BlockKey] = frozenset()

        def scan(rows: Rows) -> frozenset[BlockKey]:
            return frozenset(row.root for row in rows.namespaces() if criteria.names(row))

        return self._read(scan, nothing)

    @property
    def pinned_bytes(self) -> int:
        """See ``LowerTier.pinned_bytes``. Reads the index records of all these blocks."""
        return self._read(pins.pinned_bytes, 0)

    def pins(self) -> list[PinnedPrefix]:
        """All pinned prefixes, the first pinned first."""
        nothing: list[PinnedPrefix] = []
        return self._read(pins.listed, nothing)

    def layouts(self, base: BlockKey) -> list[str]:
        """Layout, as JSON, of every namespace in the store whose base key is ``base``."""

        def scan(rows: Rows) -> list[str]:
            return [
                str(described(row.origin.description).get("layout", ""))
                for row in rows.namespaces()
                if row.origin.base == base
            ]

        return self._read(scan, [])

    def usage(self) -> ColdUsage:
        """What the store holds, by namespace. Reads every index record."""
        file_bytes = self._environment.file_bytes() if self._environment else 0
        empty = ColdUsage(file_bytes, 0, 0, 0, 0, 0, 0, 0, ())
        return self._read(lambda rows: survey(rows, file_bytes), empty)

    def consult(self, work: Callable[[Rows], _T]) -> _T | None:
        """Result of ``work`` in one read transaction, None if the store can't be read."""
        return self._read(work, None)

    def check(self) -> list[Problem]:
        """See ``Tier.check``. Reads all rows, but not the contents of blobs."""
        failed = [Problem("cold", str(self._directory), "can't be read")]
        return [] if self._closed else self._read(self._recount, failed)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
        """``check``, and that every blob has its checksum and decodes: reads the whole store.

        ``progress`` is told how many blocks are done, of how many.
        """
        return [*self.check(), *self._unsound(progress or _tell_nobody)]

    def plan(self, criteria: Criteria) -> Plan:
        """What `ColdTier.prune` would delete.

        Raises:
            ColdTierUnavailable: the store can't be read.
        """
        plan = self._read(lambda rows: pruning.plan(rows, criteria), None)
        if plan is None:
            raise ColdTierUnavailable(
                f"{self._directory} can't be read; tieredkv verify tells what is wrong with it"
            )
        return plan

    def choose(self, selection: Selection) -> Chosen:
        """What an export of ``selection`` would write.

        Raises:
            UnknownPrefix: as `selection.choose`.
            ColdTierUnavailable: the store can't be read.
        """
        chosen = self._read(lambda rows: choose(rows, selection), None)
        if chosen is None:
            raise ColdTierUnavailable(
                f"{self._directory} can't be read; tieredkv verify tells what is wrong with it"
            )
        return chosen

    def blob(self, row: Row) -> bytes | None:
        """The encoded block of a row that was chosen; None if it isn't there any more."""

        def copy(rows: Rows) -> bytes | None:
            return rows.blob(row.key, row.record) if rows.has(row.key) else None

        return self._read(copy, None)

    def descriptions(self) -> dict[BlockKey, Mapping[str, object]]:
        """What describes each namespace that has a block here."""
        none: dict[BlockKey, Mapping[str, object]] = {}
        return self._read(
            lambda rows: {r.root: described(r.origin.description) for r in rows.namespaces()}, none
        )

    def counters(self) -> ColdTierCounters:
        """What happened since this tier was opened."""
        with self._lock:
            return ColdTierCounters(
                **self._counts,
                dropped=dict(self._dropped),
                faults=dict(self._faults),
                commit_seconds=self._commits.reading(),
                departures=self._departures.reading(),
                recent=self._recent.recent(),
            )

    def close(self) -> None:
        """Let go of the environment; operations under way end first. Idempotent."""
        with self._lock:
            environment, self._environment = self._environment, None
            self._closed = True
            # Its threads end once nobody uses it: a shutdown would fail a load under way.
            self._loader = None
        if environment and environment.pid == os.getpid():
            environment.release()

    def _hold(self) -> Environment | None:
        """The environment, to be released after use; None once closed or in another process."""
        environment = self._environment
        return environment if environment and environment.hold() else None

    def _read(self, work: Callable[[Rows], _T], absent: _T) -> _T:
        """Result of ``work`` in a read transaction, ``absent`` if the store can't be read."""
        environment = self._hold()
        if environment is None:
            return absent
        try:
            return environment.read(work)
        except Fault as fault:
            self._count_fault(fault.kind, fault)
            return absent
        finally:
            environment.release()

    def _is_block(self, rows: Rows, chain: Chain, i: int) -> bool:
        """Whether block ``i`` is here and is what the chain says: parent, root and token ids."""
        key = chain.keys[i]
        record = rows.record(key)
        return (
            record is not None
            and key not in self._condemned
            and record.root == chain.root
            and record.parent == chain.parent(i)
            and record.tokens == chain.tokens_of(i)
        )

    def _stored(self, rows: Rows, keys: Sequence[BlockKey]) -> list[Stored]:
        """Leading blocks of ``keys`` whose records are consistent."""
        found: list[Stored] = []
        for key in keys:
            record = None if key in self._condemned else rows.record(key)
            if record is None:
                break
            if not rows.has_pieces(key, record) or not record.names(key):
                self._condemn(key, _INCONSISTENT)
                break
            use = rows.use(key)
            # What is pinned is found for good.
            expires = 0 if use.expires and rows.is_pinned(key) else use.expires
            found.append(Stored(key, record, use.grade, expires))
        return found

    def _found(self, rows: Rows, nodes: Sequence[Node]) -> list[Node]:
        """Those that are neither damaged nor expired."""
        sound = [node for node in nodes if node.key not in self._condemned]
        now = time.time_ns()
        if not sound or rows.first_due(now) is None:
            return sound
        return [node for node in sound if not rows.has_expired(node.key, now)]

    def _copy_blob(self, key: BlockKey, record: Record, out: NDArray[np.uint8]) -> bool:
        def copy(rows: Rows) -> bool:
            if copy_blob(rows, key, record, out):
                return True
            if rows.has(key):
                self._condemn(key, _INCONSISTENT)
            return False

        return self._read(copy, False)

    def _announce(self, coming: Sequence[Stored]) -> None:
        """Have the disk begin to read blobs."""

        def begin(rows: Rows) -> None:
            for stored in coming:
                announce(rows.pieces(stored.key, stored.record))

        self._read(begin, None)

    def _condemn(self, key: BlockKey, why: str) -> None:
        """Treat a damaged block as absent from now on; a writer deletes it, to be stored anew."""
        with self._lock:
            new = key not in self._condemned
            self._condemned |= {key}
            self._counts["corrupt"] += new
        if new:
            self._count_fault("corrupt", CorruptBlob(f"block {key.hex()}: {why}"))

    def _count_fault(self, kind: str, error: BaseException) -> None:
        """Count an error, and log the first of its kind."""
        self._recent.note(kind, str(error) or type(error).__name__)
        with self._lock:
            self._faults[kind] += 1
            first = self._faults[kind] == 1
        if first:
            logger.warning(
                "cold tier in %s: %s: %s (further ones are only counted)",
                self._directory,
                kind,
                error or type(error).__name__,
            )

    def _unsound(self, progress: Callable[[int, int], None]) -> Iterator[Problem]:
        """Blocks whose blob isn't what their record says, read in a transaction each."""
        none: list[BlockKey] = []
        keys = self._read(lambda rows: [key for key, _ in rows.records()], none)
        for done, key in enumerate(keys):
            progress(done, len(keys))
            what = self._read(partial(self._flaw, key), "can't be read")
            if what:
                yield Problem("cold", key.hex(), what)

    def _flaw(self, key: BlockKey, rows: Rows) -> str:
        """What is wrong with a block's blob, nothing if it is sound or the block isn't here."""
        try:
            record = rows.record(key)
        except CorruptBlob:
            # Counted among the index's faults.
            return ""
        blob = rows.blob(key, record) if record else None
        if record is None:
            return ""
        if blob is None:
            return "its pieces are not those of its record"
        return audit.flaw(record, blob, self._codec)

    def _recount(self, rows: Rows) -> list[Problem]:
        try:
            problems = audit.recount(rows)
        except CorruptBlob as error:
            return [Problem("cold", str(self._directory), str(error))]
        cap = rows.number(CAP)
        # What is pinned stays, however low the cap was set later.
        if cap is not None and rows.live_bytes() > cap and rows.has_leaves():
            problems.append(Problem("cold", str(self._directory), "more than the cap is in use"))
        return problems


class ColdReader(_Reading):
    """A cold directory opened read-only, also while others write to it: for reports and checks."""

    def __init__(
        self, path: Path, codec: Codec, look: Callable[[Path], str | None] = finding
    ) -> None:
        """Open what is at ``path``; creates nothing.

        ``look`` says what is wrong with a store that nobody uses, see `environment.broken`.

        Raises:
            ColdTierUnavailable: there is no cold tier, or it is damaged or of another format.
        """
        super().__init__(open_for_reading(Path(path), look), codec)


def _tell_nobody(_done: int, _total: int) -> None:
    pass


def _sizes(rows: Rows) -> tuple[int, int]:
    """Blocks that are here, and those that were ever added."""
    return rows.n_blocks, rows.number(ADDED) or 0


def _holder(rows: Rows, chain: Chain, i: int) -> BlockKey | None:
    """The block that holds the tokens of block ``i`` of ``chain``: itself, or what covers it."""
    if rows.has(chain.keys[i]):
        return chain.keys[i]
    # What has a snapshot behind it must be here itself.
    is_tail = i == chain.n_full == len(chain.keys) - 1
    if not is_tail:
        return None
    return _covering(rows, chain.root, chain.parent(i), chain.tokens_of(i))


def _lasting(rows: Rows, chain: Chain, n: int) -> int:
    """How many of the first ``n`` blocks of ``chain``, which are here, have not expired."""
    now = time.time_ns()
    if not n or rows.first_due(now) is None:
        return n
    last = _holder(rows, chain, n - 1)
    return rows.expired_end([*chain.keys[: n - 1], last], now) if last else n - 1


def _covering(rows: Rows, root: BlockKey, parent: BlockKey, tokens: bytes) -> BlockKey | None:
    # Without the parent there is no sibling, which is the common case and cheaper to see.
    if not tokens:
        return None
    if parent != root and not rows.has(parent):
        return None
    return _cover(rows.neighbours(parent, tokens), tokens)


def _cover(beside: Sequence[Node], tokens: bytes) -> BlockKey | None:
    """The block among ``beside`` that has all of ``tokens``, if any, and more."""
    for node in beside if tokens else ():
        longer = node.record.tokens
        if len(longer) > len(tokens) and longer.startswith(tokens):
            return node.key
    return None


@dataclass(frozen=True, slots=True)
class _Item:
    """A block of a batch. ``blob`` is None if the block was here when the batch was made."""

    block: Block
    blob: bytes | None
    checksum: bytes
    is_last_of_chain: bool


@dataclass(frozen=True, slots=True)
class _Terms:
    """On which a batch may evict: never these keys, and at most so many bytes a transaction."""

    judge: Judge[BlockKey]
    spared: frozenset[BlockKey]
    evictable_bytes: int
    reason: str = "room"


@dataclass(slots=True)
class _Done:
    """What a transaction did, to be counted once it is committed."""

    held: int = 0
    reason: str = ""
    evicted_bytes: int = 0
    told: tuple[int, int] = (0, 0)
    shown: int = 0
    purged: set[BlockKey] = field(default_factory=set)
    pruned: list[Victim] = field(default_factory=list)
    pinned: Pinned | None = None
    pinned_bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    # Why each block left, and its last use in Unix ns.
    left: list[tuple[str, int]] = field(default_factory=list)


class ColdTier(_Reading):
    """``core.Tier`` on disk, durable with every return of ``put``.

    Any thread may call; writes are one transaction each and wait for one another, also across
    processes, for at most 10 s before they are dropped. Nothing raises but the constructor: an
    error of the disk or the store is counted, logged once for each kind, and the block isn't
    there. In a child process after a fork the tier finds nothing.
    """

    def __init__(
        self,
        path: Path,
        cap_bytes: int | None,
        codec: Codec,
        reserve_bytes: int = 0,
        block_tokens: int = BLOCK_TOKENS,
        pin_share: float = PIN_SHARE,
    ) -> None:
        """Open or create the store in directory ``path``.

        ``cap_bytes`` bounds the size of its data file. It replaces the cap that the store has,
        for all processes; if it is lower, the next writes evict, a bounded amount each. A store
        that is damaged is moved into ``quarantine-…`` in its directory and a new one started.
        With None the store must exist: it keeps its cap, and stays where it is at the opening.
        However high the cap, the file doesn't grow while it would leave less than
        ``reserve_bytes`` of its disk free. Blocks that are put with fewer than ``block_tokens``
        are tails. What is pinned through this tier may take ``pin_share`` of the cap.

        Raises:
            ColdTierUnavailable: the directory can't be used; the message says what to do.
        """
        folder = Path(path)
        super().__init__(
            open_to_mend(folder) if cap_bytes is None else open_for_writing(folder, cap_bytes),
            codec,
        )
        self._wanted_cap = self.cap_bytes if cap_bytes is None else cap_bytes
        self._reserve = reserve_bytes
        self._block_tokens = block_tokens
        self._pin_share = pin_share
        self._is_full = False
        # Encoded and disk bytes of commits that the store's own totals lack.
        self._untold = 0, 0
        self._judge: Judge[BlockKey] = Judge(Trial())
        # Blocks added by all when this tier was opened, and since then by this one that were
        # shown to the judge.
        _, self._n_added_before = self._read(_sizes, (0, 0))
        self._n_shown = 0
        self._origins: dict[BlockKey, Origin] = {}
        if self.cap_bytes != self._wanted_cap:
            self._change_cap()

    def register(self, namespace: Namespace) -> None:
        """Remember what describes ``namespace``; its row is written with its first block."""
        origin = Origin(base_key(namespace), describe(namespace))
        root = namespace_key(namespace)
        with self._lock:
            self._origins.pop(root, None)
            self._origins[root] = origin
            if len(self._origins) > _MAX_ORIGINS:
                del self._origins[next(iter(self._origins))]

    def put(self, blocks: Sequence[Block]) -> int:
        """See ``Tier.put``. Blocks are durable when it returns.

        Encodes outside of all locks. A batch of more raw bytes than the tier has room for fills
        what is free, but evicts nothing.
        """
        held, reason = self._put(blocks)
        if held < len(blocks):
            with self._lock:
                self._dropped[reason] += len(blocks) - held
        return held

    def adopt(
        self, blocks: Sequence[Foreign], origins: Mapping[BlockKey, Origin]
    ) -> tuple[int, str]:
        """Store blocks that were encoded elsewhere, parents first, where there is room: nothing is
        evicted for them. They keep their uses, and are durable on return.

        ``origins`` describe their namespaces. Returns how many leading ones are held, and why not
        all: "no_room", "disk_reserve", "too_large", "orphan", or "fault" if it can't be written.
        """
        self._origins.update(origins)
        terms = _Terms(self._judge, frozenset(), 0)
        held = settling = 0
        while held < len(blocks):
            batch = _until(blocks[held:], batch_bytes(self.cap_bytes or self._wanted_cap))
            done = self._write(partial(self._adopt, batch, terms))
            if done is None:
                return held, "fault"
            held += done.held
            settling = 0 if done.held else settling + 1
            if done.reason == _SETTLING and settling <= _MAX_SETTLING:
                continue
            if done.held < len(batch):
                return held, done.reason
        return held, ""

    def touch(self, keys: Sequence[BlockKey], expires: int = 0) -> None:
        """See ``Tier.touch``. One transaction for all."""

        def touch_all(ledger: Ledger, done: _Done) -> None:
            for key in keys:
                ledger.touch(key, expires)
            done.held = len(keys)

        if keys:
            self._write(touch_all)

    def saw(self, keys: Sequence[BlockKey], n_held: int) -> None:
        """See ``Tier.saw``. Each process judges by its own requests, in the part of the room that
        its own blocks have among all that were added meanwhile.
        """
        n_blocks, n_added = self._read(_sizes, (0, 0))
        n_meanwhile = max(self._n_shown, n_added - self._n_added_before)
        room = n_blocks * (self._n_shown + 1) // (n_meanwhile + 1)
        self._judge.saw(keys, n_held, max(1, room))

    def trim_to(self, n_bytes: int) -> None:
        """See ``Tier.trim_to``. In bounded steps, between which others may write."""

        def trim(ledger: Ledger, done: _Done) -> None:
            terms = _Terms(self._judge, frozenset(), _MAX_EVICTED_BYTES, "trim")
            _evict(ledger, max(0, n_bytes), terms, done)

        while (done := self._write(trim)) is not None and done.evicted_bytes:
            pass

    def expire(self, now: int) -> int:
        """See ``Tier.expire``. In one bounded transaction, and none if there is nothing to do.

        Whoever only reads notices here that the file was made anew, and what others store is there.
        """
        self._follow()
        if self._read(lambda rows: rows.first_due(now), None) is None:
            return 0
        done = self._write(partial(_expire, now))
        return done.counts["expired"] if done else 0

    def pin(self, places: Sequence[Place]) -> Pinned:
        """See ``LowerTier.pin``. Raises ColdTierUnavailable too: it can't be written."""

        def pin(ledger: Ledger) -> Pinned:
            # In one transaction, so that nobody evicts what was found.
            now = time.time_ns()
            found = pins.longest(
                pins.stored(ledger, place, self._condemned, now) for place in places
            )
            if found is None:
                raise pins.absent()
            known = pins.longest(pins.along(ledger, place.chain) for place in places)
            if known and known.n_tokens >= found.n_tokens and not found.state:
                return pins.told(ledger, known.key)
            return self._pin(ledger, (found.key, *found.state))

        return self._pinning(pin)

    def pin_id(self, prefix_id: str) -> Pinned:
        """See ``LowerTier.pin_id``. Raises ColdTierUnavailable too: it can't be written."""

        def pin(ledger: Ledger) -> Pinned:
            return self._pin(ledger, pins.with_state(ledger, pins.named(ledger, prefix_id)))

        return self._pinning(pin)

    def unpin(self, places: Sequence[Place]) -> Pinned:
        """See ``LowerTier.unpin``. Raises ColdTierUnavailable too: it can't be written."""

        def unpin(ledger: Ledger) -> Pinned:
            found = pins.longest(pins.along(ledger, place.chain) for place in places)
            if found is None:
                raise PinRefused("absent", "nothing of this prompt is pinned")
            return pins.unpin(ledger, found.key)

        return self._pinning(unpin)

    def unpin_id(self, prefix_id: str) -> Pinned:
        """See ``LowerTier.unpin_id``. Raises ColdTierUnavailable too: it can't be written."""

        def unpin(ledger: Ledger) -> Pinned:
            return pins.unpin(ledger, pins.named(ledger, prefix_id, pins.ends(ledger)))

        return self._pinning(unpin)

    def _pin(self, ledger: Ledger, keys: Sequence[BlockKey]) -> Pinned:
        if not self._condemned.isdisjoint(keys):
            raise pins.absent()
        limit = int((ledger.number(CAP) or 0) * self._pin_share)
        return pins.pin(ledger, keys, limit, time.time_ns())

    def _pinning(self, work: Callable[[Ledger], Pinned]) -> Pinned:
        def run(ledger: Ledger, done: _Done) -> None:
            done.pinned = work(ledger)

        done = self._write(run)
        if done is None or done.pinned is None:
            raise self._unwritable()
        return done.pinned

    def _unwritable(self) -> ColdTierUnavailable:
        return ColdTierUnavailable(
            f"{self._directory} can't be written ({', '.join(self._faults)})"
        )

    def prune(self, criteria: Criteria) -> Iterator[Victim]:
        """Delete what ``criteria`` mean, leaves first; yields what is gone, once it is committed.

        In bounded transactions, between which others may write. To stop is safe at any time.

        Raises:
            ColdTierUnavailable: the store can't be read or written.
        """
        for _ in range(_MAX_PRUNE_PASSES):
            victims = self.plan(criteria).victims
            gone = 0
            for start in range(0, len(victims), _MAX_PRUNED_BLOCKS):
                part = victims[start : start + _MAX_PRUNED_BLOCKS]
                done = self._write(partial(_prune, part, criteria))
                if done is None:
                    raise self._unwritable()
                gone += len(done.pruned)
                yield from done.pruned
                if done.reason:
                    return
            if not gone:
                return

    def _put(self, blocks: Sequence[Block]) -> tuple[int, str]:
        """How many leading blocks are held, and why not all."""
        if self._closed:
            return 0, "closed"
        if self._condemned:
            # What is deleted first must be encoded as well.
            self._write(lambda _ledger, _done: None)
        absent = [False] * len(blocks)
        ends = _ends(blocks)
        known = self._read(lambda rows: [*map(partial(_is_held, rows), blocks, ends)], absent)
        cap = self.cap_bytes or self._wanted_cap
        terms = _terms(self._judge, blocks, known, cap)
        held = 0
        settling = 0
        fulls = 0
        while held < len(blocks):
            batch, reason = self._encode(blocks, known, held, batch_bytes(cap))
            done = self._write(partial(self._store, batch, terms))
            if done is None:
                fulls += 1
                if fulls <= _MAX_FULLS and self._make_room(batch, terms):
                    continue
                return held, "fault"
            held += done.held
            settling = 0 if done.held else settling + 1
            if done.reason == _SETTLING and settling <= _MAX_SETTLING:
                continue
            if done.held < len(batch) or reason:
                return held, done.reason or reason
        return held, ""

    def _encode(
        self, blocks: Sequence[Block], known: Sequence[bool], start: int, limit: int
    ) -> tuple[list[_Item], str]:
        """The next batch, and why it ends before a block if that can't be encoded."""
        batch: list[_Item] = []
        n_bytes = 0
        ends = _ends(blocks)
        for i in range(start, len(blocks)):
            block = blocks[i]
            is_last = ends[i]
            if known[i]:
                batch.append(_Item(block, None, b"", is_last))
                continue
            if n_bytes >= limit and batch:
                break
            blob = self._blob(block)
            if isinstance(blob, str):
                return batch, blob
            batch.append(_Item(block, blob, checksum(blob), is_last))
            n_bytes += len(blob)
        return batch, ""

    def _blob(self, block: Block) -> bytes | str:
        """The encoded block, or why it can't be stored."""
        if block.n_bytes > MAX_RAW_BYTES or block.n_tokens > MAX_TOKENS:
            return "too_large"
        try:
            blob = self._codec.encode(block)
        except Exception as error:  # noqa: BLE001 - counted, logged; the caller is the writer
            self._count_fault("encode", error)
            return "encode"
        return blob if 0 < len(blob) <= MAX_PIECES * PIECE_BYTES else "too_large"

    def _store(self, batch: Sequence[_Item], terms: _Terms, ledger: Ledger, done: _Done) -> None:
        for item in batch:
            done.reason = self._store_one(ledger, item, terms, done)
            if done.reason:
                return
            done.held += 1

    def _adopt(self, batch: Sequence[Foreign], terms: _Terms, ledger: Ledger, done: _Done) -> None:
        for foreign, is_last in zip(batch, _ends([f.block for f in batch]), strict=True):
            key = foreign.block.key
            if not ledger.has(key):
                item = _Item(foreign.block, foreign.blob, foreign.checksum, is_last)
                done.reason = self._store_one(ledger, item, terms, done)
                if done.reason:
                    return
                if ledger.has(key):
                    ledger.recall(key, foreign.use)
            done.held += 1

    def _store_one(self, ledger: Ledger, item: _Item, terms: _Terms, done: _Done) -> str:
        """Make sure that a block is held; why it isn't, if it isn't."""
        block = item.block
        if {block.key, block.parent} & (self._condemned - done.purged):
            return "corrupt"
        if ledger.has(block.key):
            if item.is_last_of_chain:
                ledger.renew(block.key, block.expires)
            return ""
        if not _has_parent(ledger, block):
            return "orphan"
        beside = ledger.neighbours(block.parent, block.tokens)
        cover = _cover(beside, block.tokens) if item.is_last_of_chain else None
        if cover is not None:
            ledger.renew(cover, block.expires)
            return ""
        if item.blob is None:
            return "raced"
        reason = self._insert(ledger, item, item.blob, terms, done)
        if not reason:
            done.counts["superseded"] += _supersede(ledger, beside, block)
        return reason

    def _insert(self, ledger: Ledger, item: _Item, blob: bytes, terms: _Terms, done: _Done) -> str:
        block = item.block
        cost = ledger.cost_bytes(len(blob))
        cap = ledger.number(CAP) or 0
        if budget_bytes(cap, cost) - cost < _EMPTY_PAGES * ledger.page_bytes:
            return "too_large"
        cap = min(cap, ledger.file_bytes + self._room_on_disk())
        limit = budget_bytes(cap, cost) - cost
        if limit < _EMPTY_PAGES * ledger.page_bytes:
            return "disk_reserve"
        if not _evict(ledger, limit, terms, done):
            return "no_room"
        if not ledger.fits_file(cost, cap - cap // 128, scattered_bytes(cap)):
            return _SETTLING
        record = record_of(block, len(blob), item.checksum, time.time_ns())
        kind = kind_of(block.tokens, self._block_tokens)
        origin = self._origins.get(block.root)
        ledger.add(block.key, record, blob, kind, block.grade, origin, block.expires)
        done.shown += kind != STATE
        done.counts["blocks_written"] += 1
        done.counts["bytes_written"] += len(blob)
        done.counts["raw_bytes"] += block.n_bytes
        done.counts["page_bytes_written"] += cost
        return ""

    def _room_on_disk(self) -> int:
        """Bytes that the file may grow by, as far as the disk is concerned."""
        if not self._reserve:
            return 1 << 62
        disk = os.statvfs(self._directory)
        return max(0, disk.f_bavail * disk.f_frsize - self._reserve)

    def _make_room(self, batch: Sequence[_Item], terms: _Terms) -> bool:
        """After a write that failed: if pages ran out, evict some times what it needs, whose pages
        are together more often than not. Whether that makes another attempt worth it.
        """
        with self._lock:
            is_full, self._is_full = self._is_full, False
        n_bytes = _FULL_FACTOR * sum(len(item.blob or b"") for item in batch)
        if not is_full or n_bytes > self.n_bytes // 2:
            return False

        def evict(ledger: Ledger, done: _Done) -> None:
            _evict(ledger, max(0, ledger.live_bytes() - n_bytes), terms, done)

        done = self._write(evict)
        return done is not None and done.evicted_bytes > 0

    def _change_cap(self) -> None:
        def change(ledger: Ledger, done: _Done) -> None:
            ledger.set_number(CAP, self._wanted_cap)
            done.evicted_bytes = ledger.live_bytes() - budget_bytes(self._wanted_cap)
            done.pinned_bytes = pins.pinned_bytes(ledger)

        done = self._write(change)
        if done and done.evicted_bytes > 0:
            logger.warning(
                "cold tier in %s: the new cap of %d bytes is %d too low for what is there; "
                "the next writes evict the blocks of least worth, %d MiB each at most",
                self._directory,
                self._wanted_cap,
                done.evicted_bytes,
                _MAX_EVICTED_BYTES >> 20,
            )
        if done and done.pinned_bytes > budget_bytes(self._wanted_cap):
            logger.warning(
                "cold tier in %s: pinned prompts take %d bytes, for which the new cap of %d has no "
                "room: all else goes, and nothing is stored until some of them are unpinned",
                self._directory,
                done.pinned_bytes,
                self._wanted_cap,
            )

    def _write(self, work: Callable[[Ledger, _Done], None]) -> _Done | None:
        """What ``work`` did in one transaction, now committed; None if nothing was changed."""
        before, start = thread_bytes(), time.monotonic()
        done = self._write_once(work)
        if done is None and self._environment is None:
            # The store was lost or given up, and can be opened anew.
            done = self._write_once(work)
        if done is None:
            return None
        after = thread_bytes()
        pages = done.counts["page_bytes_written"]
        on_disk = pages if before is None or after is None else after - before
        with self._lock:
            self._condemned -= done.purged
            self._counts.update(done.counts)
            self._counts["commits"] += 1
            self._counts["disk_bytes"] += on_disk
            encoded, disk = (a - b for a, b in zip(self._untold, done.told, strict=True))
            self._untold = encoded + done.counts["bytes_written"], disk + on_disk
            self._n_shown += done.shown
        self._commits.observe(time.monotonic() - start)
        for reason, used in done.left:
            self._departures.note(reason, (time.time_ns() - used) / 1e9)
        return done

    def _write_once(self, work: Callable[[Ledger, _Done], None]) -> _Done | None:
        environment = self._hold() or self._reopen()
        if environment is None:
            return None

        def run(ledger: Ledger) -> _Done:
            done = _Done()
            self._purge(ledger, done)
            work(ledger, done)
            self._tell(ledger, done)
            return done

        try:
            return environment.write(run)
        except Fault as fault:
            self._count_fault(fault.kind, fault)
            self._is_full = fault.kind == "map_full"
            if isinstance(fault, Damaged):
                self._start_over(environment, fault)
            if isinstance(fault, Lost):
                self._leave(environment)
            return None
        finally:
            environment.release()

    def _tell(self, ledger: Ledger, done: _Done) -> None:
        """Add to the store's totals what the commits before took: of this one nobody knows yet."""
        with self._lock:
            done.told = self._untold
        for name, n_bytes in zip((ENCODED, DISK), done.told, strict=True):
            if n_bytes:
                # Two threads may have told the same, which the next one takes back.
                ledger.set_number(name, max(0, (ledger.number(name) or 0) + n_bytes))

    def _purge(self, ledger: Ledger, done: _Done) -> None:
        """Delete damaged blocks and, as no block is without its ancestors, what is below them."""
        left = _MAX_PURGED_BLOCKS
        for key in sorted(self._condemned):
            left -= ledger.remove_subtree(key, left)
            if not ledger.has(key):
                done.purged.add(key)

    def _start_over(self, environment: Environment, why: Damaged) -> None:
        """Move a damaged store aside. Others notice at their next write, as for a deleted one."""
        try:
            aside = environment.set_aside()
        except Fault as fault:
            self._count_fault(fault.kind, fault)
            return
        if aside:
            log_quarantine(self._directory, str(why), aside)
        self._leave(environment)

    def _leave(self, environment: Environment) -> None:
        """Let go of an environment that is of no more use; the next write opens a new one."""
        with self._lock:
            if self._environment is not environment:
                return
            self._environment = None
            self._condemned = frozenset()
        environment.release()

    def _follow(self) -> None:
        """Go over to the file that took the place of the one that is open."""
        environment = self._hold()
        if environment is None:
            return
        try:
            is_replaced = environment.is_replaced
        finally:
            environment.release()
        if not is_replaced:
            return
        self._leave(environment)
        found = self._reopen()
        if found is not None:
            found.release()

    def _reopen(self) -> Environment | None:
        """A new environment, held, in place of one that was left; None if there can't be one."""
        if self._closed or self._environment is not None:
            return None
        try:
            environment = open_for_writing(self._directory, self._wanted_cap)
        except ColdTierUnavailable as error:
            self._count_fault("unavailable", error)
            return None
        with self._lock:
            taken = not self._closed and self._environment is None
            if taken:
                self._environment = environment
        if not taken:
            environment.release()
        return self._hold()


def _until(blocks: Sequence[Foreign], n_bytes: int) -> Sequence[Foreign]:
    """The leading blocks up to the one with which they are of so many bytes."""
    total = 0
    for i, foreign in enumerate(blocks):
        total += len(foreign.blob)
        if total >= n_bytes:
            return blocks[: i + 1]
    return blocks


def _terms(
    judge: Judge[BlockKey], blocks: Sequence[Block], known: Sequence[bool], cap_bytes: int
) -> _Terms:
    new_bytes = sum(block.n_bytes for block, here in zip(blocks, known, strict=True) if not here)
    spared = frozenset(key for block in blocks for key in (block.key, block.parent))
    fits = new_bytes <= budget_bytes(cap_bytes)
    return _Terms(judge, spared, _MAX_EVICTED_BYTES if fits else 0)


def _ends(blocks: Sequence[Block]) -> list[bool]:
    """For each block whether its child isn't the next one: only such may be left to a cover."""
    return [block.key != after.parent for block, after in pairwise(blocks)] + [True]


def _is_held(rows: Rows, block: Block, is_last: bool) -> bool:
    if rows.has(block.key):
        return True
    return is_last and (_covering(rows, block.root, block.parent, block.tokens) is not None)


def _has_parent(ledger: Ledger, block: Block) -> bool:
    if block.parent == block.root:
        return True
    parent = ledger.record(block.parent)
    return parent is not None and parent.root == block.root


def _evict(ledger: Ledger, limit: int, terms: _Terms, done: _Done) -> bool:
    """Evict leaves, least worth first, until ``limit`` live bytes; whether that was reached."""
    while ledger.live_bytes() > limit:
        if done.evicted_bytes >= terms.evictable_bytes:
            return False
        gone = ledger.evict(terms.judge, terms.spared)
        if gone is None:
            return False
        record, used = gone
        done.evicted_bytes += ledger.cost_bytes(record.blob_bytes)
        done.counts["evictions"] += 1
        done.left.append((terms.reason, used))
    return True


def _expire(now: int, ledger: Ledger, done: _Done) -> None:
    """Delete leaves that have expired, some of them."""
    while done.counts["expired"] < _MAX_EXPIRED_BLOCKS:
        key = ledger.first_due(now)
        if key is None:
            return
        done.left.append(("ttl", ledger.use(key).used))
        ledger.remove(key)
        done.counts["expired"] += 1


def _prune(victims: Sequence[Victim], criteria: Criteria, ledger: Ledger, done: _Done) -> None:
    """Delete those that are still to go. Sets ``done.reason`` once no more has to."""
    for victim in victims:
        if criteria.to_bytes is not None and ledger.live_bytes() <= criteria.to_bytes:
            done.reason = "enough"
            return
        if _is_still_due(ledger, victim, criteria):
            ledger.remove(victim.key)
            done.pruned.append(victim)
            done.left.append(("prune", victim.last_use))


def _is_still_due(ledger: Ledger, victim: Victim, criteria: Criteria) -> bool:
    """Whether a block is as it was planned: others write meanwhile."""
    if not ledger.has(victim.key):
        return False
    if not criteria.pinned and ledger.is_pinned(victim.key):
        return False
    use = ledger.use(victim.key)
    is_later = criteria.to_bytes is not None and use.used > victim.last_use
    return not (use.children or is_later or criteria.spares(use.used))


def _supersede(ledger: Ledger, beside: Sequence[Node], block: Block) -> int:
    """Delete the tail that a block covers, if there is one; how many were deleted. The block is
    pinned if it was, and expires no sooner.

    There is at most one, and it is the neighbour before. Whatever is ordered between a tail and
    what continues it begins with that tail too, so it would have superseded the tail when it
    was stored, or kept it out.
    """
    covered = [
        node.key
        for node in beside
        if node.record.tokens
        and block.tokens.startswith(node.record.tokens)
        # It may have been evicted to make room.
        and ledger.has(node.key)
        and not ledger.use(node.key).children
    ]
    for key in covered:
        ledger.outlive(block.key, ledger.use(key).expires)
        ledger.hand_on_pin(key, block.key)
        ledger.remove(key)
    return len(covered)
