"""A cold tier made anew from its sound blocks, in place of the old one, beside running servers.

Mends what is damaged, gives pages that are free back to the disk, and leaves behind the bytes of
what was deleted. Blocks are copied into a folder in the same directory while others go on
writing; what they changed meanwhile is copied while they wait, and then the files change places.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tieredkv.core import BlockKey, Codec, ColdTierUnavailable, CorruptBlob
from tieredkv.hazard import Counters, Standing, kind_of
from tieredkv.tiers import audit, swap
from tieredkv.tiers.environment import (
    Environment,
    Fault,
    open_for_writing,
    open_to_mend,
)
from tieredkv.tiers.ledger import CAP, CLOCK, Ledger, Origin, Rows
from tieredkv.tiers.records import Ghost, Record, Use, described, unpack_namespace

_T = TypeVar("_T")

# Blobs read, and written, in one transaction.
_BATCH_BYTES = 32 << 20
# Rows changed in one transaction: LMDB counts the pages.
_BATCH_ROWS = 10_000
# Room for rows that are written anew, of a small store.
_ROWS_BYTES = 1 << 20
# So little can be copied while all writers wait.
_LITTLE_BYTES = 32 << 20
# Against writers that are faster than the copy: it ends all the same.
_MAX_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What came of it: blocks kept, blocks left out as damaged or as children of such, and the
    sizes of the data file.
    """

    kept: int
    left_out: int
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A block of the old store. Sound as far as its row tells."""

    root: BlockKey
    parent: BlockKey
    blob_bytes: int
    use: Use


@dataclass(frozen=True, slots=True)
class _Survey:
    """The old store, less its blobs."""

    entries: dict[BlockKey, _Entry]
    origins: dict[bytes, Origin]
    ghosts: dict[BlockKey, Ghost]
    pins: dict[BlockKey, int]
    counters: Counters
    live_bytes: int
    cap: int
    clock: int


def rebuild(
    directory: Path, codec: Codec, progress: Callable[[int, int], None] | None = None
) -> Rebuilt:
    """Replace the store in ``directory`` by one of all its sound blocks.

    Sound is a block whose record and blob are, and all of whose ancestors are. It keeps its
    standing, last use, grade, expiry, pin and time of writing; what was learned of returns is kept
    too.
    ``progress`` is told the bytes copied, of how many.
    Needs as much free disk as the store has in use. Killed at any point it leaves the old store,
    or the new one. Other processes go on, and change over with their next write.

    Raises:
        ColdTierUnavailable: nothing was changed; the message says why.
    """
    source = open_to_mend(directory)
    try:
        return _Rebuild(source, codec, progress or _tell_nobody).run()
    except swap.Busy:
        raise ColdTierUnavailable(
            f"{directory}: another process is making it anew; wait until it is done"
        ) from None
    except Fault as fault:
        raise ColdTierUnavailable(f"{directory} was left as it is: {fault}") from fault
    except OSError as error:
        raise ColdTierUnavailable(f"{directory} was left as it is: {error.strerror}") from error
    finally:
        source.release()


class _Rebuild:
    """One run, on one thread."""

    def __init__(
        self, source: Environment, codec: Codec, progress: Callable[[int, int], None]
    ) -> None:
        self._source = source
        self._codec = codec
        self._progress = progress

    def run(self) -> Rebuilt:
        directory = self._source.directory
        before = self._source.file_bytes()
        with ExitStack() as stack:
            with self._source.alone():
                folder = stack.enter_context(swap.workplace(directory))
            room = _room(self._source.read(_survey), directory)
            with ExitStack() as opened:
                target = open_for_writing(folder, room)
                opened.callback(target.release)
                rounds = 1
                while self._copy_into(target) > _LITTLE_BYTES and rounds < _MAX_ROUNDS:
                    rounds += 1
                with self._source.alone():
                    self._copy_into(target)
                    kept = target.read(lambda rows: rows.n_blocks)
                    there = self._source.read(lambda rows: rows.n_blocks)
                    opened.close()
                    swap.replace(directory)
        return Rebuilt(kept, there - kept, before, self._source.file_bytes())

    def _copy_into(self, target: Environment) -> int:
        """Make ``target`` what the sound part of the old store is; bytes copied.

        Exact if nobody writes meanwhile.
        """
        survey = self._source.read(_survey)
        here = frozenset(target.read(lambda rows: [key for key, _ in rows.records()]))
        order = _parents_first(survey.entries)
        _in_parts(target, sorted(here.difference(order)), _remove)
        copied = self._copy_blobs(target, survey, [key for key in order if key not in here])
        uses = [(key, survey.entries[key].use) for key in order]
        _in_parts(target, uses, _set_uses)
        target.write(partial(_set_rest, survey))
        return copied

    def _copy_blobs(self, target: Environment, survey: _Survey, keys: Sequence[BlockKey]) -> int:
        total = sum(survey.entries[key].blob_bytes for key in keys)
        done = 0
        for batch in _batches(keys, survey):
            found = self._source.read(partial(_collect, batch))
            sound = [item for item in found if not audit.flaw(*item[1:], self._codec)]
            target.write(partial(_insert, sound, survey))
            done += sum(survey.entries[key].blob_bytes for key in batch)
            self._progress(done, total)
        return total


def _tell_nobody(_done: int, _total: int) -> None:
    pass


def _room(survey: _Survey, directory: Path) -> int:
    """The cap to make a new store with: what is there must fit, also if it is more than the cap.

    Raises:
        ColdTierUnavailable: the disk hasn't as much.
    """
    needed = survey.live_bytes + survey.live_bytes // 16
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ColdTierUnavailable(
            f"{directory} needs {needed} bytes of free disk to be made anew, there are {free}"
        )
    return max(survey.cap, survey.live_bytes + survey.live_bytes // 8 + _ROWS_BYTES)


def _survey(rows: Rows) -> _Survey:
    uses = dict(rows.rows("use"))
    clock = rows.number(CLOCK) or 0
    entries: dict[BlockKey, _Entry] = {}
    for key, data in rows.records():
        try:
            record = Record.unpack(data)
        except CorruptBlob:
            continue
        if record.names(key):
            use = _use(uses.get(key, b""), record, clock)
            entries[key] = _Entry(record.root, record.parent, record.blob_bytes, use)
    return _Survey(
        entries,
        dict(_origins(rows)),
        {key: ghost for key, ghost in _ghosts(rows, clock) if key not in entries},
        rows.pins(),
        rows.counters(),
        rows.live_bytes(),
        rows.number(CAP) or 0,
        clock,
    )


def _use(data: bytes, record: Record, clock: int) -> Use:
    """The use of a block that has no children yet; of a damaged one, that of one not used since
    the clock began.
    """
    try:
        use = Use.unpack(data)
    except CorruptBlob:
        return Use(Standing(0, kind_of(record.tokens, 1)), record.created)
    standing = replace(use.standing, last=min(use.last, clock))
    return replace(use, standing=standing, children=0)


def _ghosts(rows: Rows, clock: int) -> Iterator[tuple[BlockKey, Ghost]]:
    for key, data in rows.rows("ghost"):
        try:
            ghost = Ghost.unpack(data)
        except CorruptBlob:
            continue
        if ghost.standing.last <= ghost.left <= clock and ghost.standing.awaited:
            yield BlockKey(key), ghost


def _origins(rows: Rows) -> Iterator[tuple[bytes, Origin]]:
    for root, data in rows.rows("namespace"):
        try:
            _totals, base, description = unpack_namespace(data)
            described(description)
        except CorruptBlob:
            continue
        yield root, Origin(base, description)


def _parents_first(entries: dict[BlockKey, _Entry]) -> list[BlockKey]:
    """The blocks whose ancestors up to the root are all there, each chain in a row."""
    children: defaultdict[bytes, list[BlockKey]] = defaultdict(list)
    for key, entry in entries.items():
        children[entry.parent].append(key)
    pending = [key for key, entry in entries.items() if entry.parent == entry.root]
    order: list[BlockKey] = []
    while pending:
        key = pending.pop()
        order.append(key)
        root = entries[key].root
        pending += (child for child in children[key] if entries[child].root == root)
    return order


def _batches(keys: Sequence[BlockKey], survey: _Survey) -> Iterator[list[BlockKey]]:
    batch: list[BlockKey] = []
    n_bytes = 0
    for key in keys:
        batch.append(key)
        n_bytes += survey.entries[key].blob_bytes
        if n_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_ROWS:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _collect(keys: Sequence[BlockKey], rows: Rows) -> list[tuple[BlockKey, Record, bytes]]:
    """Record and blob of those that are there; others may have gone since they were listed."""
    found: list[tuple[BlockKey, Record, bytes]] = []
    for key in keys:
        record = rows.record(key)
        blob = rows.blob(key, record) if record else None
        if record is not None and blob is not None:
            found.append((key, record, blob))
    return found


def _insert(
    items: Sequence[tuple[BlockKey, Record, bytes]], survey: _Survey, ledger: Ledger
) -> None:
    for key, record, blob in items:
        if record.parent == record.root or ledger.has(record.parent):
            origin = survey.origins.get(record.root)
            ledger.insert(key, record, blob, survey.entries[key].use, origin)


def _in_parts(
    target: Environment,
    items: Sequence[_T],
    work: Callable[[Sequence[_T], Ledger], None],
) -> None:
    remaining = iter(items)
    while part := list(islice(remaining, _BATCH_ROWS)):
        target.write(partial(work, part))


def _remove(keys: Sequence[BlockKey], ledger: Ledger) -> None:
    for key in keys:
        while ledger.has(key):
            ledger.remove_subtree(key, _BATCH_ROWS)


def _set_uses(uses: Sequence[tuple[BlockKey, Use]], ledger: Ledger) -> None:
    for key, use in uses:
        if ledger.has(key):
            ledger.set_use(key, use)


def _set_rest(survey: _Survey, ledger: Ledger) -> None:
    ledger.advance(survey.clock)
    ledger.take_over(survey.counters, survey.ghosts, survey.pins)
    if survey.cap:
        ledger.set_number(CAP, survey.cap)
