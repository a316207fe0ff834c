"""Which blocks an export takes: by model, salt, prefix or age, always with their ancestors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tieredkv.core import BlockKey, CorruptBlob, TieredKVError
from tieredkv.tiers.ledger import NamespaceRow, Origin, Rows
from tieredkv.tiers.portable import Row
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.records import Record, described


class UnknownPrefix(TieredKVError):
    """An id that is no block's, or that of several."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Blocks of the namespaces that ``criteria`` name: all, or those of the prefixes ``ids`` (the
    first digits of the keys of their last blocks), or those used at ``since`` or later (Unix ns).
    Always with all ancestors, and with the state that hangs on them. Salted namespaces only if
    ``salted``.
    """

    criteria: Criteria
    ids: tuple[str, ...] = ()
    since: int | None = None
    salted: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """Blocks in the order in which they are written: each chain in a row, what was used last first.
    ``hidden`` counts the blocks of salted namespaces that were passed over.
    """

    rows: tuple[Row, ...]
    origins: Mapping[BlockKey, Origin]
    hidden: int

    @property
    def blob_bytes(self) -> int:
        """Encoded bytes of all."""
        return sum(row.record.blob_bytes for row in self.rows)


def choose(rows: Rows, selection: Selection) -> Chosen:
    """What ``selection`` means. Reads every index record, about 1 KB of memory and 30 µs each.

    Raises:
        UnknownPrefix: an id is no block's, or that of several.
    """
    named = [row for row in rows.namespaces() if selection.criteria.names(row)]
    named = [row for row in named if "block_tokens" in described(row.origin.description)]
    shown = {row.root: row.origin for row in named if selection.salted or not _is_salted(row)}
    # Who names prefixes asks for nothing else.
    left_out = () if selection.ids else named
    hidden = sum(row.totals.blocks for row in left_out if row.root not in shown)
    entries = {row.key: row for row in _sound(rows) if row.record.root in shown}
    wanted = _wanted(entries, selection)
    return Chosen(tuple(_latest_first(entries, wanted)), shown, hidden)


def _is_salted(row: NamespaceRow) -> bool:
    return bool(described(row.origin.description).get("salted"))


def _sound(rows: Rows) -> Iterator[Row]:
    for key, data in rows.records():
        try:
            record, use = Record.unpack(data), rows.use(key)
        except CorruptBlob:
            continue
        if record.names(key):
            yield Row(key, record, use)


def _wanted(entries: Mapping[BlockKey, Row], selection: Selection) -> set[BlockKey]:
    since = selection.since or 0
    chosen = {key for key, row in entries.items() if row.use.used >= since}
    if selection.ids:
        chosen &= {_found(entries, prefix) for prefix in selection.ids}
    wanted: set[BlockKey] = set()
    for key in chosen:
        while key not in wanted and key in entries:
            wanted.add(key)
            key = entries[key].record.parent
    return wanted | {
        row.key for row in entries.values() if row.is_state and row.record.parent in wanted
    }


def _found(entries: Mapping[BlockKey, Row], prefix: str) -> BlockKey:
    found = [
        key for key, row in entries.items() if key.hex().startswith(prefix) and not row.is_state
    ]
    if len(found) != 1:
        raise UnknownPrefix(
            f"{prefix} is the id of {len(found) or 'no'} blocks that are meant here"
        )
    return found[0]


def _latest_first(entries: Mapping[BlockKey, Row], wanted: set[BlockKey]) -> Iterator[Row]:
    written: set[BlockKey] = set()
    for key in sorted(wanted, key=lambda k: entries[k].use.used, reverse=True):
        path: list[BlockKey] = []
        while key not in written and key in wanted:
            path.append(key)
            written.add(key)
            key = entries[key].record.parent
        yield from (entries[k] for k in reversed(path))
