"""All rows of the cold tier as one transaction sees and changes them.

A block is one row each in ``index`` (immutable), ``use`` (small, rewritten on every touch),
``order`` (leaves only) and maybe in ``due`` (leaves that expire), its rows in ``child`` and its
pieces in ``blob``; its namespace counts it. One that is pinned has a row in ``pin``, and none in
``order`` and ``due``, so that nothing that chooses among leaves sees it. One that left and is
awaited is one row each in ``ghost`` and ``left``: see `hazard`.
Every method that changes rows leaves all of them consistent, so that whatever part of a
transaction's work was done before its commit is a valid store.

Nothing here knows how a transaction begins or ends, or LMDB beyond its transaction objects.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from tieredkv import hazard
from tieredkv.core import BlockKey, CorruptBlob, later
from tieredkv.hazard import Choice, Counters, Judge, Standing
from tieredkv.keys import common_start
from tieredkv.tiers.records import (
    CHILD_ID_BYTES,
    PIECE_BYTES,
    SEGMENT_BYTES,
    Ghost,
    Record,
    Totals,
    Use,
    child_group,
    child_rows,
    due_key,
    left_key,
    order_key,
    order_place,
    pack_counters,
    pack_namespace,
    pack_number,
    piece_key,
    segments,
    unpack_counters,
    unpack_due,
    unpack_left,
    unpack_namespace,
    unpack_number,
    unpack_order,
)

FORMAT = b"format"
PIECE = b"piece"
CAP = b"cap"
CLOCK = b"clock"
FREED = b"freed"
ENCODED = b"encoded"
DISK = b"disk"
ADDED = b"added"
COUNTERS = b"counters"

# A value in pages of its own starts behind a header of this size.
_PAGE_HEADER_BYTES = 16
# Rows of a block other than its pieces, and what they make the trees grow by: rounded up.
_ROW_PAGES = 4

# Ghosts take at most some 256 bytes each, and all together so small a part of the cap.
_GHOST_BYTES = 256
_GHOST_PART = 64
# Ghosts forgotten in a transaction, beyond twice those that it added.
_FORGOTTEN = 64

# Blocks that are looked at to find out whether all that is below one has expired.
_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class Databases:
    """LMDB's handles of the named databases."""

    meta: Any
    namespace: Any
    index: Any
    use: Any
    order: Any
    child: Any
    blob: Any
    ghost: Any
    left: Any
    due: Any
    pin: Any


DATABASES = tuple(field.name for field in fields(Databases))


@dataclass(frozen=True, slots=True)
class Node:
    """A block found by its tokens."""

    key: BlockKey
    record: Record


@dataclass(frozen=True, slots=True)
class Origin:
    """What a namespace's row says of it: its base key and its description as JSON."""

    base: bytes
    description: bytes


_UNKNOWN = Origin(bytes(32), b"{}")


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """One row of ``namespace``."""

    root: BlockKey
    totals: Totals
    origin: Origin


class Rows:
    """What a transaction sees. Valid until the transaction ends, on the thread that began it."""

    def __init__(self, txn: Any, dbs: Databases) -> None:
        self._txn = txn
        self._dbs = dbs
        self._index = txn.cursor(dbs.index)

    @property
    def n_blocks(self) -> int:
        """Blocks in the store."""
        return int(self._txn.stat(self._dbs.index)["entries"])

    @property
    def page_bytes(self) -> int:
        """LMDB's page size."""
        return int(self._txn.stat(self._dbs.meta)["psize"])

    def live_bytes(self) -> int:
        """Bytes of all pages in use, counted exactly as of this transaction. Microseconds."""
        stats = map(self._txn.stat, (None, *(getattr(self._dbs, name) for name in DATABASES)))
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return int(pages) * self.page_bytes

    def cost_bytes(self, blob_bytes: int) -> int:
        """What a block of ``blob_bytes`` encoded bytes adds to ``live_bytes``, at most."""
        return self.piece_bytes(blob_bytes) + _ROW_PAGES * self.page_bytes

    def piece_bytes(self, blob_bytes: int) -> int:
        """What the pieces of ``blob_bytes`` encoded bytes take in whole pages."""
        page = self.page_bytes
        whole, rest = divmod(blob_bytes, PIECE_BYTES)
        pages = whole * -(-(PIECE_BYTES + _PAGE_HEADER_BYTES) // page)
        pages += -(-(rest + _PAGE_HEADER_BYTES) // page)
        return pages * page

    def number(self, name: bytes) -> int | None:
        """A value of ``meta``."""
        data = self._txn.get(name, db=self._dbs.meta)
        return None if data is None else unpack_number(data)

    def counters(self) -> Counters:
        """What was counted of returns; nothing yet if that is damaged or of quite another cap."""
        cap = max(1, self.number(CAP) or 0)
        data = self._txn.get(COUNTERS, db=self._dbs.meta)
        try:
            found = unpack_counters(bytes(data)) if data is not None else None
        except CorruptBlob:
            found = None
        if found is not None and cap / 2 <= found.span <= cap * 2:
            return found
        return Counters(cap, self.number(CLOCK) or 0)

    def has(self, key: bytes) -> bool:
        """Whether the block is here. Reads no value."""
        return bool(self._index.set_key(key))

    def record(self, key: bytes) -> Record | None:
        """The block's index record. Raises CorruptBlob if it is damaged."""
        data = self._txn.get(key, db=self._dbs.index)
        return None if data is None else Record.unpack(bytes(data))

    def use(self, key: bytes) -> Use:
        """The block's use record. Raises CorruptBlob if it is damaged or missing."""
        data = self._txn.get(key, db=self._dbs.use)
        if data is None:
            raise CorruptBlob("block without a use record")
        return Use.unpack(data)

    def is_ghost(self, key: bytes) -> bool:
        """Whether the block was evicted while it was awaited, and still is."""
        return self._txn.get(key, db=self._dbs.ghost) is not None

    def records(self) -> Iterator[tuple[BlockKey, bytes]]:
        """Every key and packed record of ``index``."""
        for key, data in self._txn.cursor(self._dbs.index):
            yield BlockKey(bytes(key)), bytes(data)

    def rows(self, database: str) -> Iterator[tuple[bytes, bytes]]:
        """Every key and value of one database, in order."""
        for key, data in self._txn.cursor(getattr(self._dbs, database)):
            yield bytes(key), bytes(data)

    def piece_sizes(self) -> Iterator[tuple[bytes, int]]:
        """Every key of ``blob`` and the size of its value. In a transaction with buffers."""
        for key, data in self._txn.cursor(self._dbs.blob):
            yield bytes(key), len(data)

    def blob(self, key: bytes, record: Record) -> bytes | None:
        """The encoded block, copied; None if its pieces are not those that the record counts.

        Allocates what is stored, never what a record claims.
        """
        pieces = list(self.pieces(key, record))
        return b"".join(pieces) if sum(map(len, pieces)) == record.blob_bytes else None

    def pieces(self, key: bytes, record: Record) -> Iterator[Any]:
        """The pieces of a block that are there, from the first without a gap, as buffers of this
        transaction.
        """
        cursor = self._txn.cursor(self._dbs.blob)
        found = cursor.set_key(piece_key(key, 0))
        for number in range(record.n_pieces):
            if not found or bytes(cursor.key()) != piece_key(key, number):
                return
            yield cursor.value()
            found = cursor.next()

    def has_pieces(self, key: bytes, record: Record) -> bool:
        """Whether the first and the last piece are there; reads neither."""
        ends = (0, record.n_pieces - 1)
        cursor = self._txn.cursor(self._dbs.blob)
        return all(cursor.set_key(piece_key(key, number)) for number in ends)

    def neighbours(self, parent: bytes, tokens: bytes) -> list[Node]:
        """Children of ``parent`` beside the place of ``tokens`` among them, at most two.

        The child that shares the longest run of leading tokens is one of them: see
        ``keys.ordered``. Each level costs one search in the tree and one step back, however
        many siblings share however much.
        """
        cursor = self._txn.cursor(self._dbs.child)
        beside: list[Node] = []
        for level, before, segment in segments(tokens):
            group = child_group(parent, level, before)
            found = cursor.set_range(group + segment)
            if not found or not _has_segment(cursor.key(), group, segment):
                beside = self._beside(cursor, found, group)
                break
            # Children that have all of this segment share more than any beside them.
        return beside

    def leading(self, parent: bytes, tokens: bytes) -> list[Node]:
        """Children of ``parent`` all of whose tokens lead ``tokens``, longest first; no snapshot.

        Whatever leads a string stands before it, and is not longer than what the string shares
        with its neighbour: so each step finds one, or cuts the string.
        """
        cursor = self._txn.cursor(self._dbs.child)
        found: list[Node] = []
        for level, before, segment in reversed(list(segments(tokens))):
            group = child_group(parent, level, before)
            # A child ends in the row whose segment isn't full.
            probe = segment[: SEGMENT_BYTES - 1]
            while (row := _last_upto(cursor, group, probe)) is not None:
                other, key = row
                if not probe.startswith(other):
                    probe = common_start(probe, other)
                    continue
                node = Node(BlockKey(key), self._child(key))
                if node.record.tokens and tokens.startswith(node.record.tokens):
                    found.append(node)
                if not other:
                    break
                probe = other[:-1]
        return found

    def children(self, parent: bytes) -> Iterator[BlockKey]:
        """The children of ``parent``."""
        group = child_group(parent, 0, b"")
        cursor = self._txn.cursor(self._dbs.child)
        found = cursor.set_range(group)
        while found and bytes(cursor.key()).startswith(group):
            yield BlockKey(bytes(cursor.value()))
            found = cursor.next()

    def is_pinned(self, key: bytes) -> bool:
        """Whether the block itself is pinned."""
        return self._txn.get(key, db=self._dbs.pin) is not None

    @property
    def n_pins(self) -> int:
        """Rows of ``pin``."""
        return int(self._txn.stat(self._dbs.pin)["entries"])

    def pins(self) -> dict[BlockKey, int]:
        """When each block that is pinned was, in Unix ns; 0 where that is damaged."""
        found: dict[BlockKey, int] = {}
        for key, data in self.rows("pin"):
            try:
                found[BlockKey(key)] = unpack_number(data)
            except CorruptBlob:
                # It is for people only.
                found[BlockKey(key)] = 0
        return found

    def first_due(self, now: int) -> BlockKey | None:
        """The leaf that expires first, if it has at ``now``, Unix time in ns."""
        cursor = self._txn.cursor(self._dbs.due)
        if not cursor.first():
            return None
        expires, key = unpack_due(bytes(cursor.key()))
        return key if expires <= now else None

    def has_expired(self, key: BlockKey, now: int, gone: Container[BlockKey] = ()) -> bool:
        """Whether a block that is here has expired at ``now``: it and all below it, of which
        those in ``gone`` are known to have. In doubt it has, if there is very much below it.
        """
        pending = [key]
        for _ in range(_LOOKED_AT):
            if not pending:
                return True
            at = pending.pop()
            expires = self.use(at).expires
            if not expires or expires > now or self.is_pinned(at):
                return False
            below = (child for child in self.children(at) if child not in gone)
            pending += islice(below, _LOOKED_AT)
        return True

    def expired_end(self, keys: Sequence[BlockKey], now: int) -> int:
        """How many of ``keys``, leading blocks of a chain that are here, are left without those
        at its end that have expired at ``now``.
        """
        n = len(keys)
        if self.first_due(now) is None:
            return n
        gone: set[BlockKey] = set()
        while n and self.has_expired(keys[n - 1], now, gone):
            n -= 1
            gone.add(keys[n])
        return n

    def starting(self, digits: str) -> Iterator[BlockKey]:
        """The blocks whose keys begin with these hex digits."""
        found = self._index.set_range(bytes.fromhex(digits[: len(digits) // 2 * 2]))
        while found and (key := bytes(self._index.key())).hex() < digits + "g":
            if key.hex().startswith(digits):
                yield BlockKey(key)
            found = self._index.next()

    def origin(self, root: bytes) -> Origin | None:
        """What a namespace's row says of it; None if it has no block."""
        data = self._txn.get(root, db=self._dbs.namespace)
        if data is None:
            return None
        _totals, base, description = unpack_namespace(bytes(data))
        return Origin(base, description)

    def has_leaves(self) -> bool:
        """Whether there is a block that can be evicted."""
        return bool(self._txn.cursor(self._dbs.order).first())

    def namespaces(self) -> Iterator[NamespaceRow]:
        """Every namespace that has a block."""
        for root, data in self.rows("namespace"):
            totals, base, description = unpack_namespace(data)
            yield NamespaceRow(BlockKey(root), totals, Origin(base, description))

    def _beside(self, cursor: Any, found: bool, group: bytes) -> list[Node]:
        keys: list[bytes] = []
        if found and bytes(cursor.key()).startswith(group):
            keys.append(bytes(cursor.value()))
        stepped = cursor.prev() if found else cursor.last()
        if stepped and bytes(cursor.key()).startswith(group):
            keys.append(bytes(cursor.value()))
        return [Node(BlockKey(key), self._child(key)) for key in keys]

    def _child(self, key: bytes) -> Record:
        record = self.record(key)
        if record is None:
            raise CorruptBlob("child row without a block")
        return record


class Ledger(Rows):
    """What a write transaction does. ``finish`` must be called before the commit.

    Recency: a touch records the block alone, not its ancestors, which would be a write for
    every block of a chain. Nothing is lost by that: only leaves are ever compared, and whenever
    a block goes its parent takes over its last use if that is later. So when an ancestor becomes
    a leaf, its last use is the latest of its own and all its descendants', exactly as if every
    touch had touched all ancestors.

    Time: the clock counts the bytes of blocks that were added, and one for each other use.

    Room in the file: pages freed by this transaction or the one before can't be used yet, for
    LMDB may have to go back to the state before. `fits_file` therefore looks up what the last
    transaction freed, whichever process made it.
    """

    def __init__(self, txn: Any, dbs: Databases, file_bytes: int) -> None:
        """``file_bytes`` is the size of the data file as of the last commit."""
        super().__init__(txn, dbs)
        self._clock = self.number(CLOCK) or 0
        self._file_bytes = file_bytes
        self._reusable = file_bytes - self.live_bytes() - (self.number(FREED) or 0)
        self._freed = 0
        self._added = 0
        self._n_added = 0
        self._n_ghosts_added = 0
        # As they are now, of blocks that were looked at: a block's parent is, again and again.
        self._uses: dict[bytes, Use] = {}
        self._counted: Counters | None = None
        self._choice: Choice[BlockKey] | None = None
        self._spared: Container[BlockKey] = ()
        # Shelves of which the choice has yet to be told that they changed.
        self._stirred: set[int] = set()

    def use(self, key: bytes) -> Use:
        """See `Rows.use`."""
        found = self._uses.get(key)
        if found is None:
            found = self._uses[key] = super().use(key)
        return found

    def set_number(self, name: bytes, value: int) -> None:
        """Write a value of ``meta``."""
        self._txn.put(name, pack_number(value), db=self._dbs.meta)

    def finish(self) -> None:
        """Write what was gathered in memory."""
        if self._n_ghosts_added:
            self._forget()
        self.set_number(CLOCK, self._clock)
        self.set_number(FREED, self._freed)
        if self._n_added:
            self.set_number(ADDED, (self.number(ADDED) or 0) + self._n_added)
        if self._counted is not None:
            self._txn.put(COUNTERS, pack_counters(self._counted), db=self._dbs.meta)

    @property
    def file_bytes(self) -> int:
        """Size of the data file as of the last commit."""
        return self._file_bytes

    def fits_file(self, cost: int, cap_bytes: int, lost: int) -> bool:
        """Whether ``cost`` bytes more can be added without the file growing beyond the cap.

        ``lost`` is how many of the free bytes are too scattered to be used.
        """
        usable = max(0, self._reusable - lost)
        growth = max(0, self._added + cost - usable)
        return not growth or self._file_bytes + growth <= cap_bytes

    def add(
        self,
        key: bytes,
        record: Record,
        blob: bytes,
        kind: int,
        grade: int,
        origin: Origin | None,
        expires: int = 0,
    ) -> None:
        """Insert a block that isn't here and whose parent is.

        ``kind`` is that of its standing, ``grade`` says how it ages, ``expires`` until when it is
        kept. ``origin`` describes its namespace; None leaves the description that is there.
        """
        self._insert_rows(key, record, blob, origin)
        above = None if record.parent == record.root else record.parent
        ghost = self._pop_ghost(key)
        n_tokens = len(record.tokens) // 8
        standing = hazard.arrive(self, above, kind, n_tokens, ghost, self._clock, self._counters)
        use = Use(standing, time.time_ns(), grade=grade, expires=expires)
        self._put_use(key, None, use)
        self._clock += self.piece_bytes(record.blob_bytes)
        self._n_added += 1

    def insert(
        self, key: bytes, record: Record, blob: bytes, use: Use, origin: Origin | None
    ) -> None:
        """`add` with the use of another time, which counts no children yet; nothing is learned."""
        self._insert_rows(key, record, blob, origin)
        self._put_use(key, None, use)

    def _insert_rows(self, key: bytes, record: Record, blob: bytes, origin: Origin | None) -> None:
        self._added += self.cost_bytes(len(blob))
        view = memoryview(blob)
        for number in range(record.n_pieces):
            start = number * PIECE_BYTES
            piece = view[start : start + PIECE_BYTES]
            self._txn.put(piece_key(key, number), piece, db=self._dbs.blob)
        self._txn.put(key, record.pack(), db=self._dbs.index)
        for row in child_rows(record.parent, key, record.tokens):
            self._txn.put(row, key, db=self._dbs.child)
        if record.parent != record.root:
            parent = self.use(record.parent)
            self._put_use(record.parent, parent, replace(parent, children=parent.children + 1))
        self._count_in(record, origin)

    def touch(self, key: bytes, expires: int = 0) -> None:
        """Record that a request's match ended here, and keep it until ``expires`` at least;
        nothing if the block isn't here.
        """
        if not self.has(key):
            return
        use = self.use(key)
        self._set_used(key, use, hazard.touch(use.standing, self._tick(), self._counters), expires)

    def renew(self, key: bytes, expires: int = 0) -> None:
        """Record that a block that is here was put again, to be kept until ``expires``."""
        use = self.use(key)
        self._set_used(key, use, hazard.renew(use.standing, self._tick(), self._counters), expires)

    def _set_used(self, key: bytes, use: Use, standing: Standing, expires: int) -> None:
        until = later(use.expires, expires)
        self._put_use(key, use, replace(use, standing=standing, used=time.time_ns(), expires=until))

    def outlive(self, key: bytes, expires: int) -> None:
        """Let a block that is here expire no sooner than ``expires``."""
        use = self.use(key)
        until = later(use.expires, expires)
        if until != use.expires:
            self._put_use(key, use, replace(use, expires=until))

    def pin(self, key: bytes, when: int) -> None:
        """Protect a block that is here; one that is pinned stays as it is."""
        if not self.is_pinned(key):
            use = self.use(key)
            self._list(key, use, None)
            self._txn.put(key, pack_number(when), db=self._dbs.pin)

    def hand_on_pin(self, old: bytes, new: bytes) -> None:
        """If one block is pinned let another that is here be so too, since then."""
        when = self._txn.get(old, db=self._dbs.pin)
        if when is not None and not self.is_pinned(new):
            self._list(new, self.use(new), None)
            self._txn.put(new, bytes(when), db=self._dbs.pin)

    def unpin(self, key: bytes) -> None:
        """Protect a block no longer, if it was."""
        if self._txn.delete(key, db=self._dbs.pin) and self.has(key):
            self._list(key, None, self.use(key))

    def recall(self, key: bytes, before: Use) -> None:
        """Give a block that was just added what it was in another store; of when only for people,
        since clocks differ.
        """
        use = self.use(key)
        standing = hazard.recall(use.standing, before.standing, self._counters)
        self._put_use(key, use, replace(use, standing=standing, used=min(use.used, before.used)))

    def standing(self, key: bytes) -> Standing:
        """See `hazard.Places.standing`."""
        return self.use(key).standing

    def stand(self, key: bytes, standing: Standing) -> None:
        """See `hazard.Places.stand`."""
        use = self.use(key)
        self._put_use(key, use, replace(use, standing=standing))

    def parent(self, key: bytes) -> BlockKey | None:
        """See `hazard.Places.parent`."""
        record = self.record(key)
        if record is None:
            raise CorruptBlob("parent is absent")
        return None if record.parent == record.root else record.parent

    def set_use(self, key: bytes, use: Use) -> None:
        """Give a block that is here another use, but leave the number of its children."""
        old = self.use(key)
        new = replace(use, children=old.children)
        if new != old:
            self._put_use(key, old, new)

    def advance(self, clock: int) -> None:
        """Give out no last use before ``clock`` any more."""
        self._clock = max(self._clock, clock)

    def take_over(
        self, counters: Counters, ghosts: dict[BlockKey, Ghost], pins: dict[BlockKey, int]
    ) -> None:
        """Replace what was learned, who is awaited, and which of the blocks here are pinned."""
        self._counted = counters
        for let_go in self.pins().keys() - pins.keys():
            self.unpin(let_go)
        for pinned, when in pins.items():
            if self.has(pinned):
                self.pin(pinned, when)
        for key, data in list(self.rows("ghost")):
            ghost = ghosts.get(BlockKey(key))
            if ghost is None or ghost.pack() != data:
                self._pop_ghost(key)
        for key, ghost in ghosts.items():
            self._txn.put(key, ghost.pack(), db=self._dbs.ghost)
            self._txn.put(left_key(ghost.left, key), b"", db=self._dbs.left)

    def remove(self, key: bytes) -> Record:
        """Delete a leaf that is here, for another reason than room, and return its record."""
        use = self.use(key)
        hazard.drop(use.standing, self._counters)
        return self._delete(key, use)

    def evict(
        self, judge: Judge[BlockKey], spared: Container[BlockKey]
    ) -> tuple[Record, int] | None:
        """Delete, of the leaves that aren't among ``spared``, the one that the policy gives up
        first; its record and its last use in Unix ns, None if there is none.
        """
        choice = self._chosen_by(judge, spared)
        key = choice.first()
        if key is None:
            return None
        use = self.use(key)
        record = self._delete(key, use)
        if use.standing.awaited:
            self._add_ghost(key, use.standing)
        self._stirred.clear()
        choice.left(use.shelf, use.last, self._heir(record))
        return record, use.used

    def _heir(self, record: Record) -> tuple[int, int, BlockKey] | None:
        """The place of the parent of a block that left, if it can be evicted now."""
        if record.parent == record.root or self.is_pinned(record.parent):
            return None
        use = self.use(record.parent)
        return None if use.children else (use.shelf, use.last, record.parent)

    def _chosen_by(self, judge: Judge[BlockKey], spared: Container[BlockKey]) -> Choice[BlockKey]:
        if self._choice is None or self._spared is not spared:
            table = judge.table(self._counters, self._clock)
            leaves = _Order(self._txn.cursor(self._dbs.order))
            self._choice = Choice(leaves, table, self._clock, spared)
            self._spared = spared
            self._stirred.clear()
        for shelf in self._stirred:
            self._choice.changed(shelf)
        self._stirred.clear()
        return self._choice

    def _delete(self, key: bytes, use: Use) -> Record:
        record = self.record(key)
        if record is None or use.children:
            raise CorruptBlob("block to remove is absent or no leaf")
        for number in range(record.n_pieces):
            self._txn.delete(piece_key(key, number), db=self._dbs.blob)
        self._txn.delete(key, db=self._dbs.index)
        self._list(key, use, None)
        self._txn.delete(key, db=self._dbs.pin)
        self._txn.delete(key, db=self._dbs.use)
        self._uses.pop(key, None)
        for row in child_rows(record.parent, key, record.tokens):
            self._txn.delete(row, db=self._dbs.child)
        if record.parent != record.root:
            self._orphaned_by(record.parent, use)
        self._count_out(record)
        self._freed += self.cost_bytes(record.blob_bytes)
        return record

    def remove_subtree(self, key: bytes, limit: int) -> int:
        """Delete up to ``limit`` blocks among ``key`` and its descendants, leaves first.

        Returns how many; ``key`` itself is the last to go.
        """
        path = [key]
        removed = 0
        while path and removed < limit and self.has(key):
            child = next(self.children(path[-1]), None)
            if child is not None:
                path.append(child)
                continue
            self.remove(path.pop())
            removed += 1
        return removed

    @property
    def _counters(self) -> Counters:
        """What was counted; written with the rest."""
        if self._counted is None:
            self._counted = self.counters()
        return self._counted

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _add_ghost(self, key: bytes, standing: Standing) -> None:
        self._txn.put(key, Ghost(self._clock, standing).pack(), db=self._dbs.ghost)
        self._txn.put(left_key(self._clock, key), b"", db=self._dbs.left)
        self._n_ghosts_added += 1

    def _pop_ghost(self, key: bytes) -> Standing | None:
        data = self._txn.pop(key, db=self._dbs.ghost)
        if data is None:
            return None
        try:
            ghost = Ghost.unpack(bytes(data))
        except CorruptBlob:
            # Only something to learn is lost; its other row goes when its time has come.
            return None
        self._txn.delete(left_key(ghost.left, key), db=self._dbs.left)
        return ghost.standing

    def _forget(self) -> None:
        """Let go of ghosts that are awaited no more, some at a time."""
        room = (self.number(CAP) or 0) // (hazard.GHOSTS_PER_BLOCK * _GHOST_PART * _GHOST_BYTES)
        n_blocks = min(self.n_blocks, room)
        cursor = self._txn.cursor(self._dbs.left)
        for _ in range(2 * self._n_ghosts_added + _FORGOTTEN):
            if not cursor.first():
                return
            left, key = unpack_left(bytes(cursor.key()))
            n_ghosts = int(self._txn.stat(self._dbs.ghost)["entries"])
            if not hazard.is_forgotten(left, n_ghosts, self._counters, self._clock, n_blocks):
                return
            self._txn.delete(key, db=self._dbs.ghost)
            cursor.delete()

    def _put_use(self, key: bytes, old: Use | None, new: Use) -> None:
        """Write a use record and keep ``order`` and ``due`` to it."""
        self._list(key, old, new)
        self._txn.put(key, new.pack(), db=self._dbs.use)
        self._uses[key] = new

    def _list(self, key: bytes, old: Use | None, new: Use | None) -> None:
        """Take a block from among the leaves as which it has one use, and put it there with
        another: one that has children or is pinned doesn't stand there.
        """
        if (old is None or old.children) and (new is None or new.children):
            return
        if self.is_pinned(key):
            return
        listed = order_key(old, key) if old and not old.children else None
        wanted = order_key(new, key) if new and not new.children else None
        if listed != wanted:
            if listed:
                self._txn.delete(listed, db=self._dbs.order)
                self._stirred.add(listed[0])
            if wanted:
                self._txn.put(wanted, b"", db=self._dbs.order)
                self._stirred.add(wanted[0])
        due = due_key(old.expires, key) if old and listed and old.expires else None
        coming = due_key(new.expires, key) if new and wanted and new.expires else None
        if due != coming:
            if due:
                self._txn.delete(due, db=self._dbs.due)
            if coming:
                self._txn.put(coming, b"", db=self._dbs.due)

    def _orphaned_by(self, parent: bytes, child: Use) -> None:
        use = self.use(parent)
        if not use.children:
            raise CorruptBlob("parent that counts no children")
        standing = hazard.inherit(use.standing, child.standing, self._counters)
        left = replace(
            use,
            standing=standing,
            used=max(use.used, child.used),
            children=use.children - 1,
            expires=later(use.expires, child.expires),
        )
        self._put_use(parent, use, left)

    def _count_in(self, record: Record, origin: Origin | None) -> None:
        totals, known = Totals(), _UNKNOWN
        data = self._txn.get(record.root, db=self._dbs.namespace)
        if data is not None:
            totals, base, description = unpack_namespace(data)
            known = Origin(base, description)
        known = origin or known
        row = pack_namespace(totals.plus(record), known.base, known.description)
        self._txn.put(record.root, row, db=self._dbs.namespace)

    def _count_out(self, record: Record) -> None:
        data = self._txn.get(record.root, db=self._dbs.namespace)
        if data is None:
            raise CorruptBlob("block of a namespace that has no row")
        totals, base, description = unpack_namespace(data)
        left = totals.minus(record)
        if not left.blocks:
            self._txn.delete(record.root, db=self._dbs.namespace)
            return
        self._txn.put(record.root, pack_namespace(left, base, description), db=self._dbs.namespace)


class _Order:
    """The leaves of a store, as `hazard.Leaves`."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def shelves(self) -> Iterable[int]:
        """See `hazard.Leaves.shelves`."""
        found = self._cursor.first()
        while found:
            shelf = bytes(self._cursor.key())[0]
            yield shelf
            found = shelf < 255 and self._cursor.set_range(bytes((shelf + 1,)))

    def newer(self, shelf: int, last: int) -> Iterator[tuple[int, BlockKey]]:
        """See `hazard.Leaves.newer`."""
        found = self._cursor.set_range(order_place(shelf, max(0, last)))
        while found:
            row = unpack_order(bytes(self._cursor.key()))
            if row[0] != shelf:
                return
            yield row[1:]
            found = self._cursor.next()

    def older(self, shelf: int, last: int) -> Iterator[tuple[int, BlockKey]]:
        """See `hazard.Leaves.older`."""
        cursor = self._cursor
        at_end = not cursor.set_range(order_place(shelf, max(0, last)))
        found = cursor.last() if at_end else cursor.prev()
        while found:
            row = unpack_order(bytes(cursor.key()))
            if row[0] != shelf:
                return
            yield row[1:]
            found = cursor.prev()


def _last_upto(cursor: Any, group: bytes, segment: bytes) -> tuple[bytes, bytes] | None:
    """Segment and child of the last row of ``group`` whose segment is at most ``segment``."""
    found = cursor.set_range(group + segment + b"\x00" + b"\xff" * (CHILD_ID_BYTES + 1))
    stepped = cursor.prev() if found else cursor.last()
    row = bytes(cursor.key()) if stepped else b""
    if not row.startswith(group):
        return None
    return row[len(group) : -CHILD_ID_BYTES - 1], bytes(cursor.value())


def _has_segment(row: Any, group: bytes, segment: bytes) -> bool:
    """Whether a row of ``group`` goes on beyond this segment, as only full ones do.

    A stored segment is never longer than a full one, so a row that starts with it has just it.
    """
    return len(segment) == SEGMENT_BYTES and bytes(row).startswith(group + segment)
