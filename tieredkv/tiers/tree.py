"""What a cold tier holds as trees of shared prefixes, one a namespace, for people.

Runs of blocks without a branch are one node, and state that hangs on a block counts with it. Memory
is about 300 bytes a block, whatever the blocks hold: token ids are read for nodes that are shown.
"""

from __future__ import annotations

import threading
import time
from array import array as Array  # noqa: N812 - as a class
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

import numpy as np

from tieredkv.core import BlockKey, later
from tieredkv.hazard import BLOCK, STATE
from tieredkv.keys import prefix_id
from tieredkv.tiers.ledger import NamespaceRow, Rows
from tieredkv.tiers.records import Record, described, namespace_of

# By what branches are sorted: the last use, size, or hits.
BY_USE, BY_SIZE, BY_HITS = SORTS = ("used", "size", "hits")

# Token ids at each end of a prefix that are told with its use.
_SHOWN_TOKENS = 24

# What takes no longer is done whenever it is asked for; else so many times its time passes first.
_SHORT_SECONDS = 0.01
_PAUSE = 20


@dataclass(frozen=True, slots=True)
class Node:
    """A run of blocks that no prompt parts from, below ``parent`` (an id, None at the root).

    ``id`` is that of the prefix that ends with it, which has ``prefix_tokens`` tokens, ``tokens``
    of them in the run. ``blob_bytes`` are the encoded bytes of the run, with ``n_snapshots`` and
    ``n_windows`` that hang on it; ``freed_bytes``, in pages, is what would be free if it went, with
    all below it. ``last_use``, in Unix ns, and ``uses``, the later requests that found it, are of
    it and of all below it. So are ``pinned``, whether a pin keeps it, and ``expires``, in Unix ns,
    None for never.
    """

    id: str
    parent: str | None
    level: int
    blocks: int
    tokens: int
    prefix_tokens: int
    n_snapshots: int
    n_windows: int
    blob_bytes: int
    prefix_bytes: int
    freed_bytes: int
    last_use: int
    uses: int
    pinned: bool
    expires: int | None
    n_children: int
    first: BlockKey
    last: BlockKey


@dataclass(frozen=True, slots=True)
class Tree:
    """One namespace: how it is described, and its nodes, each behind its parent and its elder
    siblings with all that is below them.
    """

    root: BlockKey
    name: str
    model: str
    adapter: str
    draft: str
    host: str
    salted: bool
    cold_quantize: str
    block_tokens: int
    blocks: int
    blob_bytes: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class PrefixUsage:
    """A prefix that prompts share, or a whole prompt: ``tokens`` from the start, ``bytes`` of all
    its blocks encoded, ``uses`` the later requests that found it or more. ``last_use`` and
    ``expires`` are in Unix ns; the latter is None for never. ``pinned`` says that a pin keeps it.

    ``start`` and ``end`` are the first and last token ids of what it adds to the prefix above it,
    none if it is ``salted``: those are not for everybody.
    """

    id: str
    model: str
    tokens: int
    bytes: int
    uses: int
    last_use: int
    pinned: bool
    expires: int | None
    salted: bool
    start: tuple[int, ...]
    end: tuple[int, ...]


def grow(rows: Rows, wanted: Callable[[NamespaceRow], bool], sort: str = BY_USE) -> list[Tree]:
    """The trees of the namespaces that are ``wanted``, the largest first; branches by ``sort``.

    Reads every index record. Raises CorruptBlob if a row is damaged.
    """
    spaces = [row for row in rows.namespaces() if wanted(row)]
    table = _Table(rows, frozenset(row.root for row in spaces))
    trees = [_tree(row, table, sort) for row in spaces]
    return sorted(trees, key=lambda tree: -tree.blob_bytes)


def most_used(rows: Rows, n: int) -> list[PrefixUsage]:
    """The ``n`` prefixes that most requests found, of all namespaces; see `grow`."""
    nodes = (
        (node, tree) for tree in grow(rows, lambda _row: True) for node in tree.nodes if node.uses
    )
    best = nlargest(n, nodes, key=lambda found: (found[0].uses, found[0].last_use))
    return [_usage(rows, node, tree) for node, tree in best]


def ends(rows: Rows, node: Node, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first and the last ``n`` token ids of a node; together all, if it has no more. None of
    blocks that have left.
    """
    first, last = rows.record(node.first), rows.record(node.last)
    if first is None or last is None:
        return (), ()
    start = np.frombuffer(first.tokens, "<i8")[:n].tolist()
    left = max(0, node.tokens - len(start))
    end = np.frombuffer(last.tokens, "<i8")[-min(n, left) :].tolist() if left else []
    return tuple(start), tuple(end)


def _usage(rows: Rows, node: Node, tree: Tree) -> PrefixUsage:
    start, end = ((), ()) if tree.salted else ends(rows, node, _SHOWN_TOKENS)
    return PrefixUsage(
        id=node.id,
        model=tree.name or tree.model,
        tokens=node.prefix_tokens,
        bytes=node.prefix_bytes,
        uses=node.uses,
        last_use=node.last_use,
        pinned=node.pinned,
        expires=node.expires,
        salted=tree.salted,
        start=start,
        end=end,
    )


class Ranking:
    """The most used prefixes of a tier, for who asks again and again. Any thread may call."""

    def __init__(self, consult: Callable[[Callable[[Rows], list[PrefixUsage]]], Any]) -> None:
        """``consult`` gives the result of its argument in a read transaction, or None."""
        self._consult = consult
        self._lock = threading.Lock()
        self._known: list[PrefixUsage] = []
        self._n = 0
        self._due = 0.0

    def first(self, n: int) -> list[PrefixUsage]:
        """See `most_used`. None if they can't be read. Where it takes long they are those of some
        time ago: at most a twentieth of the time is spent on it.
        """
        with self._lock:
            start = time.monotonic()
            if n > self._n or start >= self._due:
                self._known = self._consult(lambda rows: most_used(rows, n)) or []
                taken = time.monotonic() - start
                self._due = start + taken + (_PAUSE * taken if taken > _SHORT_SECONDS else 0)
                self._n = n
            return self._known[:n]


class _Table:
    """The blocks of some namespaces as columns, children of each behind one another.

    ``used``, ``uses``, ``freed``, ``pinned`` and ``expires`` are of a block and of all below it,
    ``blob`` of a block and of the state that hangs on it.
    """

    def __init__(self, rows: Rows, roots: frozenset[BlockKey]) -> None:
        self.keys: list[BlockKey] = []
        self.tokens, self.blob, self.freed, self.used, self.uses = (Array("q") for _ in range(5))
        self.snapshots, self.windows = Array("q"), Array("q")
        self.pinned, self.expires = Array("q"), Array("q")
        self._pins = rows.pins().keys()
        self.tops: dict[BlockKey, list[int]] = {root: [] for root in roots}
        self._kinds = bytearray()
        parents = self._read(rows)
        self.children = self._branches(parents)
        self._add_up(parents)

    def _read(self, rows: Rows) -> Array[int]:
        """Fill the columns; for each block the index of its parent, -1 at the root."""
        above: list[BlockKey] = []
        for key, data in rows.records():
            record = Record.unpack(data)
            if record.root not in self.tops:
                continue
            if record.parent == record.root:
                self.tops[record.root].append(len(self.keys))
            self._append(rows, key, record)
            above.append(record.parent)
        places = {key: i for i, key in enumerate(self.keys)}
        return Array("q", (places.get(key, -1) for key in above))

    def _append(self, rows: Rows, key: BlockKey, record: Record) -> None:
        use = rows.use(key)
        is_state = use.standing.kind == STATE
        self.keys.append(key)
        self._kinds.append(use.standing.kind)
        self.tokens.append(0 if is_state else len(record.tokens) // 8)
        self.blob.append(record.blob_bytes)
        self.freed.append(rows.piece_bytes(record.blob_bytes))
        self.used.append(use.used)
        self.uses.append(use.standing.refs)
        self.snapshots.append(is_state and not record.tokens)
        self.windows.append(is_state and bool(record.tokens))
        self.pinned.append(key in self._pins)
        self.expires.append(use.expires)

    def _branches(self, parents: Array[int]) -> dict[int, list[int]]:
        """Children of each block that has some, state left out."""
        children: dict[int, list[int]] = {}
        for i, parent in enumerate(parents):
            if parent >= 0 and self._kinds[i] != STATE:
                children.setdefault(parent, []).append(i)
        return children

    def _add_up(self, parents: Array[int]) -> None:
        state = [i for i, kind in enumerate(self._kinds) if kind == STATE]
        for i in state:
            for column in (self.blob, self.snapshots, self.windows):
                column[parents[i]] += column[i]
        # State has nothing below it, and so comes first.
        for i in (*state, *reversed(list(self._downwards()))):
            parent = parents[i]
            if parent < 0:
                continue
            self.freed[parent] += self.freed[i]
            self.used[parent] = max(self.used[parent], self.used[i])
            self.pinned[parent] |= self.pinned[i]
            if self._kinds[i] != STATE:
                self.expires[parent] = later(self.expires[parent], self.expires[i])
            if self._kinds[i] == BLOCK:
                # A request that ended in a tail is counted in the block before it, too.
                self.uses[parent] += self.uses[i]

    def _downwards(self) -> Iterator[int]:
        """Every block of tokens, parents first."""
        stack = [i for tops in self.tops.values() for i in tops]
        while stack:
            i = stack.pop()
            yield i
            stack.extend(self.children.get(i, ()))


def _tree(row: NamespaceRow, table: _Table, sort: str) -> Tree:
    fields = described(row.origin.description)
    there = namespace_of(fields, b"")
    return Tree(
        root=row.root,
        name=there.name,
        model=there.model,
        adapter=there.adapter,
        draft=there.draft,
        host=there.host,
        salted=bool(fields.get("salted")),
        cold_quantize=there.cold_quantize,
        block_tokens=there.block_tokens,
        blocks=row.totals.blocks,
        blob_bytes=row.totals.blob_bytes,
        nodes=tuple(_nodes(table, row.root, sort)),
    )


def _nodes(table: _Table, root: BlockKey, sort: str) -> Iterator[Node]:
    column = {BY_USE: table.used, BY_SIZE: table.freed, BY_HITS: table.uses}[sort]

    def least_first(places: list[int]) -> list[int]:
        return sorted(places, key=lambda i: (column[i], table.keys[i]))

    # Of each branch its first block, and what it hangs on: id, level, tokens and bytes.
    stack: list[tuple[int, str | None, int, int, int]] = [
        (i, None, 0, 0, 0) for i in least_first(table.tops[root])
    ]
    while stack:
        first, parent, level, n_tokens, n_bytes = stack.pop()
        run = [first]
        while len(below := table.children.get(run[-1], ())) == 1:
            run.extend(below)
        node = _node(table, run, parent, level, n_tokens, n_bytes)
        yield node
        under = (node.id, level + 1, node.prefix_tokens, node.prefix_bytes)
        stack.extend((i, *under) for i in least_first(list(below)))


def _node(
    table: _Table, run: list[int], parent: str | None, level: int, n_tokens: int, n_bytes: int
) -> Node:
    first, last = run[0], run[-1]
    tokens = sum(table.tokens[i] for i in run)
    blob_bytes = sum(table.blob[i] for i in run)
    return Node(
        id=prefix_id(table.keys[last]),
        parent=parent,
        level=level,
        blocks=len(run),
        tokens=tokens,
        prefix_tokens=n_tokens + tokens,
        n_snapshots=sum(table.snapshots[i] for i in run),
        n_windows=sum(table.windows[i] for i in run),
        blob_bytes=blob_bytes,
        prefix_bytes=n_bytes + blob_bytes,
        freed_bytes=table.freed[first],
        last_use=table.used[first],
        uses=table.uses[first],
        pinned=bool(table.pinned[first]),
        expires=None if table.pinned[first] else table.expires[first] or None,
        n_children=len(table.children.get(last, ())),
        first=table.keys[first],
        last=table.keys[last],
    )
