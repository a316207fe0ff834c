"""Which blocks are to go when people say which: by model, salt, age, or down to a size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from tieredkv.core import BlockKey, Namespace
from tieredkv.hazard import Choice, Counters, Shelves, Table, inherit
from tieredkv.keys import base_key, namespace_key
from tieredkv.tiers.ledger import CLOCK, NamespaceRow, Origin, Rows
from tieredkv.tiers.records import (
    Record,
    Totals,
    Use,
    describe,
    described,
    label,
    namespace_of,
)


@dataclass(frozen=True, slots=True)
class Criteria:
    """What is to go: blocks for which all of these hold that aren't None.

    ``model`` is a name as people know it, a pattern of such names, or an identity. ``salt`` is
    that of the namespace, empty for the unsalted ones. ``unused_since`` is a time in Unix ns: the
    last use is before it. ``to_bytes`` ends it as soon as no more than that is in use. What is
    pinned stays, with all that it needs, unless ``pinned`` says that it goes as well.
    """

    model: str | None = None
    salt: bytes | None = None
    unused_since: int | None = None
    to_bytes: int | None = None
    pinned: bool = False

    @property
    def means_whole_namespaces(self) -> bool:
        """Whether all blocks of a namespace are meant, or none."""
        return self.unused_since is None and not self.to_bytes

    def means(self, namespace: Namespace) -> bool:
        """Whether this namespace is meant."""
        return self.names(
            NamespaceRow(
                namespace_key(namespace), Totals(), Origin(base_key(namespace), describe(namespace))
            )
        )

    def names(self, row: NamespaceRow) -> bool:
        """Whether a namespace is meant. One that isn't described has no name and no known salt."""
        fields = described(row.origin.description)
        model = str(fields.get("model", ""))
        name = str(fields.get("name", "")) or model
        if self.model is not None and not _is_like(self.model, name, model):
            return False
        return self.salt is None or namespace_key(namespace_of(fields, self.salt)) == row.root

    def spares(self, last_use: int) -> bool:
        """Whether a block was used too lately."""
        return self.unused_since is not None and last_use >= self.unused_since


@dataclass(frozen=True, slots=True)
class Victim:
    """A block that is to go: ``last_use`` of it and its descendants in Unix ns, ``n_bytes`` in
    pages.
    """

    key: BlockKey
    root: BlockKey
    last_use: int
    blob_bytes: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """What went: blocks, and the bytes that they took, encoded on disk and raw in memory."""

    blocks: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Who is to go, children before parents. ``live_bytes`` are in use before; ``labels`` are
    the names of their namespaces for people.
    """

    victims: tuple[Victim, ...]
    live_bytes: int
    labels: Mapping[BlockKey, str]

    def until(self, to_bytes: int | None) -> Iterator[Victim]:
        """Those after whose going about ``to_bytes`` are in use."""
        live = self.live_bytes
        for victim in self.victims:
            if to_bytes is not None and live <= to_bytes:
                return
            live -= victim.n_bytes
            yield victim


def plan(rows: Rows, criteria: Criteria) -> Plan:
    """The blocks that ``criteria`` mean, in the order in which an eviction would take them.

    Reads every index record: memory and time grow with the number of blocks, about 1 KB and
    30 µs each. Raises CorruptBlob if a row is damaged.
    """
    labels = {
        row.root: label(row.origin.description) for row in rows.namespaces() if criteria.names(row)
    }
    blocks: dict[BlockKey, tuple[Record, Use]] = {}
    for key, data in rows.records():
        record = Record.unpack(data)
        if record.root in labels:
            blocks[key] = record, rows.use(key)
    fixed = frozenset[BlockKey]() if criteria.pinned else rows.pins().keys()
    order = _leaves_first(blocks, criteria, fixed, rows.counters(), rows.number(CLOCK) or 0)
    victims = (
        Victim(key, record.root, last, record.blob_bytes, rows.piece_bytes(record.blob_bytes))
        for key, last, record in order
    )
    return Plan(tuple(victims), rows.live_bytes(), labels)


def _leaves_first(
    blocks: dict[BlockKey, tuple[Record, Use]],
    criteria: Criteria,
    fixed: Collection[BlockKey],
    counters: Counters,
    clock: int,
) -> Iterator[tuple[BlockKey, int, Record]]:
    """Key, last use and record of each in turn; a parent inherits the use of who left before.
    Those that are ``fixed`` stay.
    """
    children = Counter(record.parent for record, _ in blocks.values())
    uses = {key: use for key, (_, use) in blocks.items()}
    leaves: Shelves[BlockKey] = Shelves()
    for key, use in uses.items():
        if not children[key] and key not in fixed and not criteria.spares(use.used):
            leaves.add(use.shelf, use.last, key)
    choice = Choice(leaves, Table.learned(counters, clock), clock)
    while (first := choice.first()) is not None:
        use, record = uses.pop(first), blocks[first][0]
        leaves.remove(use.shelf, use.last, first)
        yield first, use.used, record
        parent = uses.get(record.parent)
        heir = None
        if parent is not None:
            children[record.parent] -= 1
            # What is counted here is forgotten with the plan.
            standing = inherit(parent.standing, use.standing, counters)
            parent = replace(parent, standing=standing, used=max(parent.used, use.used))
            uses[record.parent] = parent
            free = not children[record.parent] and record.parent not in fixed
            if free and not criteria.spares(parent.used):
                heir = (parent.shelf, parent.last, record.parent)
                leaves.add(*heir)
        choice.left(use.shelf, use.last, heir)


def _is_like(wanted: str, name: str, model: str) -> bool:
    return wanted in (name, model) or fnmatchcase(name, wanted)
