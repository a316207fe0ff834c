"""The memory tier: immutable shared blocks of mlx arrays under a byte cap.

Blocks form a tree; leaves are evicted, by type and then as `hazard` has it. A block that waits
for its commit is *held*: it stays, and its bytes count, until the writer lets go of it, so that
the tier's bytes are all that MLX holds because of the store.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

import mlx.core as mx

from tieredkv import hazard, keys, layout, policy
from tieredkv.core import (
    BLOCK_TOKENS,
    CACHE_TYPES,
    Block,
    BlockKey,
    Chain,
    Distribution,
    Partial,
    Problem,
    TensorSpec,
    later,
)
from tieredkv.metrics import Departures

# Metal rounds buffers larger than a page up to whole pages; the CPU allocator does not round.
_GRANULE = mmap.PAGESIZE if mx.metal.is_available() else 1


def held_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes that MLX's allocator holds for tensors of these specs."""
    sizes = (spec.n_bytes for spec in specs)
    return sum(n if n <= _GRANULE else -(-n // _GRANULE) * _GRANULE for n in sizes)


# Expiries of blocks that have left are kept so many at least.
_STALE = 64

# Greater than any key of 32 bytes.
_AFTER_ALL = BlockKey(b"\xff" * 33)


class _Node:
    """A resident block: its place in the tree and its standing."""

    __slots__ = (
        "block",
        "children",
        "entries",
        "holds",
        "kind",
        "n_bytes",
        "place",
        "standing",
        "stored",
        "used",
    )

    def __init__(self, block: Block, kind: str, standing: hazard.Standing) -> None:
        self.block = block
        self.n_bytes = held_bytes(block.specs)
        self.kind = kind
        self.standing = standing
        # The last use, in seconds of the system's clock.
        self.used = time.monotonic()
        # Type, shelf and last use under which it can be evicted, None if it can't.
        self.place: tuple[str, int, int] | None = None
        self.children = 0
        self.holds = 0
        self.stored = False
        self.entries: dict[BlockKey, int] = {}


class HotTier:
    """Memory tier. Any thread may call, but `put` runs mlx ops on blocks that aren't mlx arrays
    yet: give it those on the generation thread only. The lock is never held across an mlx op.
    """

    def __init__(self, cap_bytes: int, block_tokens: int = BLOCK_TOKENS) -> None:
        """Blocks with fewer than ``block_tokens`` are tails."""
        self._cap = cap_bytes
        self._block_tokens = block_tokens
        self._lock = threading.Lock()
        self._nodes: dict[BlockKey, _Node] = {}
        # Children in the order of `_place_of`, which is computed when it is needed: most blocks
        # have one child, and keeping it would take half as much as the token ids.
        self._siblings: dict[BlockKey, list[BlockKey]] = {}
        # Leaves that can be evicted, by type, and places that changed in the midst of a choice.
        self._leaves: dict[str, hazard.Shelves[BlockKey]] = _no_leaves()
        self._stirred: set[tuple[str, int]] = set()
        self._ghosts: hazard.Ghosts[BlockKey] = hazard.Ghosts()
        self._returns = hazard.Counters(max(1, cap_bytes))
        self._judge: hazard.Judge[BlockKey] = hazard.Judge(hazard.Trial())
        # Blocks that were added, and those among them that the judge is shown.
        self._n_added = self._n_shown = 0
        self._n_leaves = dict.fromkeys(CACHE_TYPES, 0)
        # Replaced by a longer sibling while held: can't be found, but still takes memory.
        self._replaced: dict[BlockKey, _Node] = {}
        self._held: dict[BlockKey, _Node] = {}
        # Ends of forgotten entries that were held then: their branches leave once released.
        self._leaving: set[BlockKey] = set()
        self._entries: dict[BlockKey, tuple[BlockKey, str]] = {}
        # Bytes of blocks that memory was given for and that have yet to be put.
        self._reserved: dict[BlockKey, int] = {}
        # When blocks expire, or did before that was put off, as a heap: one entry at least for
        # each leaf that does.
        self._due: list[tuple[int, BlockKey]] = []
        self._expired = 0
        # Bytes that were added, and one for each other use.
        self._clock = 0
        self._n_bytes = 0
        self._evictions = 0
        self._demotes = 0
        self._departures = Departures()

    # ---- reading

    @property
    def n_bytes(self) -> int:
        """Bytes that MLX holds for the blocks here, held and reserved ones included."""
        return self._n_bytes + sum(list(self._reserved.values()))

    @property
    def cap_bytes(self) -> int:
        """The byte cap."""
        return self._cap

    @property
    def n_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._nodes)

    @property
    def n_entries(self) -> int:
        """Inserted prompts that are still here whole."""
        return len(self._entries)

    @property
    def evictions(self) -> int:
        """Blocks that left and were held nowhere else, since the tier was made."""
        return self._evictions

    @property
    def demotes(self) -> int:
        """Blocks that left and live on in the cold tier, since the tier was made."""
        return self._demotes

    def departures(self) -> dict[str, Distribution]:
        """Blocks that left since the tier was made, demoted ones included: see `Departures`."""
        return self._departures.reading()

    @property
    def expired(self) -> int:
        """Blocks that were deleted since their time had passed, since the tier was made."""
        return self._expired

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Entries and bytes by cache type; a shared block counts once, for its highest type."""
        with self._lock:
            stats = {kind: {"n_sequences": 0, "n_bytes": 0} for kind in reversed(CACHE_TYPES)}
            for _, kind in self._entries.values():
                stats[kind]["n_sequences"] += 1
            for node in (*self._nodes.values(), *self._replaced.values()):
                stats[node.kind]["n_bytes"] += node.n_bytes
            return stats

    def lookup(self, chain: Chain, start: int = 0) -> int:
        """See `core.Tier.lookup`."""
        with self._lock:
            n = max(start, chain.n_full)
            for i in range(start, chain.n_full):
                node = self._nodes.get(chain.keys[i])
                if node is None or not _is(node.block, chain, i):
                    n = i
                    break
            now = time.time_ns()
            gone: set[BlockKey] = set()
            while n > start and self._has_expired(chain.keys[n - 1], now, gone):
                n -= 1
                gone.add(chain.keys[n])
            return n

    def nearest(self, parent: BlockKey, tokens: bytes) -> Partial | None:
        """See `core.Tier.nearest`."""
        with self._lock:
            best: Partial | None = None
            now = time.time_ns()
            for key in self._neighbours(parent, keys.ordered(tokens)):
                shared = keys.common_prefix(self._nodes[key].block.tokens, tokens)
                is_best = shared > (best.n_tokens if best else 0)
                if is_best and not self._has_expired(key, now):
                    best = Partial(key, shared)
            return best

    def beside(self, parent: BlockKey, tokens: bytes) -> list[bytes]:
        """Tokens of the children of ``parent`` beside the place of ``tokens`` among them: at most
        two, and one of them shares the longest run with it.
        """
        with self._lock:
            near = self._neighbours(parent, keys.ordered(tokens))
            return [self._nodes[key].block.tokens for key in near]

    def prefixes(self, parent: BlockKey, tokens: bytes) -> list[Partial]:
        """See `core.Tier.prefixes`."""
        found: list[Partial] = []
        with self._lock:
            now = time.time_ns()
            siblings = self._siblings.get(parent, [])
            order = keys.ordered(tokens)
            # Whatever leads the query stands before it, and before all else that shares as much:
            # a neighbour that doesn't lead it says how much shorter the next candidate must be.
            while order:
                i = bisect_left(siblings, (order, _AFTER_ALL), key=self._place_of)
                if not i:
                    break
                other, key = self._place_of(siblings[i - 1])
                if order.startswith(other):
                    if other and not self._has_expired(key, now):
                        found.append(Partial(key, self._nodes[key].block.n_tokens))
                    order = other[:-1]
                else:
                    order = keys.common_start(order, other)
            return found

    def present(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """See `core.Tier.present`."""
        with self._lock:
            now = time.time_ns()
            return frozenset(
                key for key in keys if key in self._nodes and not self._has_expired(key, now)
            )

    def load(self, keys: Sequence[BlockKey]) -> list[Block]:
        """See `core.Tier.load`."""
        with self._lock:
            blocks: list[Block] = []
            for key in keys:
                node = self._nodes.get(key)
                if node is None:
                    break
                blocks.append(node.block)
            return blocks

    def _has_expired(self, key: BlockKey, now: int, gone: Container[BlockKey] = ()) -> bool:
        """Whether a block that is here has expired, and all below it, of which those in ``gone``
        are known to have. Few are found here that have: those that wait for their commit.
        """
        if not self._due or self._due[0][0] > now:
            return False
        pending = [key]
        while pending:
            at = pending.pop()
            expires = self._nodes[at].block.expires
            if not expires or expires > now:
                return False
            pending += (child for child in self._siblings.get(at, []) if child not in gone)
        return True

    def _outlive(self, node: _Node, expires: int) -> None:
        """Let a block expire no sooner than that."""
        until = later(node.block.expires, expires)
        if until != node.block.expires:
            # Whoever has the block keeps it as it was.
            node.block = replace(node.block, expires=until)

    def _neighbours(self, parent: BlockKey, order: bytes) -> list[BlockKey]:
        siblings = self._siblings.get(parent, [])
        i = bisect_left(siblings, (order, b""), key=self._place_of)
        return siblings[max(i - 1, 0) : i + 1]

    def _place_of(self, key: BlockKey) -> tuple[bytes, BlockKey]:
        return keys.ordered(self._nodes[key].block.tokens), key

    # ---- writing

    def make_room(self, own: Sequence[BlockKey], sizes: Sequence[int]) -> int:
        """Evict for new blocks of these sizes; how many of them, from the first, may be put now.
        Never evicts one of ``own``.
        """
        with self._lock:
            return self._make_room(set(own), sizes)

    def reserve(
        self,
        own: Sequence[BlockKey],
        keys: Sequence[BlockKey],
        specs: Sequence[tuple[TensorSpec, ...]],
    ) -> Iterator[tuple[mx.array, ...] | None]:
        """Make room for blocks with these keys and specs, without evicting any of ``own``, and
        give the tensors that they will have once they have been written to. None for those that
        there is no room for. They count until they are put or `unreserve` is called, and are made
        one after another, as they are taken.
        """
        with self._lock:
            sizes = [held_bytes(s) for s in specs]
            n = self._make_room({*own, *keys}, sizes)
            self._reserved.update(zip(keys[:n], sizes, strict=False))
        none = itertools.repeat(None, len(keys) - n)
        return itertools.chain(map(layout.blank, specs[:n]), none)

    def unreserve(self, keys: Iterable[BlockKey]) -> None:
        """Give up what was reserved and not put."""
        with self._lock:
            for key in keys:
                self._reserved.pop(key, None)

    def _make_room(self, own: set[BlockKey], sizes: Sequence[int]) -> int:
        self._reap()
        cap = self._cap - sum(self._reserved.values())
        free = cap - self._n_bytes
        reclaimable = self._reclaimable(own) if sum(sizes) > free else 0
        n = policy.admit(sizes, free=free, reclaimable=reclaimable)
        if not self._evict_until(cap - sum(sizes[:n]), own, "room"):
            return policy.admit(sizes, free=cap - self._n_bytes, reclaimable=0)
        return n

    def _reclaimable(self, own: set[BlockKey]) -> int:
        """Bytes of the blocks that can be evicted: not held, not own, nor an ancestor of such."""
        fixed: dict[BlockKey, int] = {}
        for key in (*own, *self._held):
            node = self._nodes.get(key)
            while node is not None and node.block.key not in fixed:
                fixed[node.block.key] = node.n_bytes
                node = self._nodes.get(node.block.parent)
        replaced = sum(node.n_bytes for node in self._replaced.values())
        return self._n_bytes - replaced - sum(fixed.values())

    def put(self, blocks: Sequence[Block], kind: str = "assistant") -> int:
        """See `core.Tier.put`. Decoded tensors are turned into mlx arrays once room is made."""
        with self._lock:
            unknown = [b for b in blocks if b.key not in self._nodes]
            new = [b for b in unknown if b.key not in self._reserved]
            own = {key for b in blocks for key in (b.key, b.parent)}
            n = self._make_room(own, [held_bytes(b.specs) for b in new])
            admitted = {b.key for b in new[:n]} | {b.key for b in unknown} & self._reserved.keys()
        arrays = {b.key: b for b in layout.adopt(new[:n])}
        with self._lock:
            for block in unknown:
                # From here on it counts as what it is, or not at all.
                self._reserved.pop(block.key, None)
            for i, block in enumerate(blocks):
                if block.key not in self._nodes and block.key not in admitted:
                    return i
                ends = i + 1 == len(blocks) or blocks[i + 1].parent != block.key
                cover = self._cover(block.parent, block.tokens) if ends else None
                known = cover or self._nodes.get(block.key)
                if known is not None:
                    self._rise(known, kind)
                    if ends:
                        self._renew(known)
                        self._outlive(known, block.expires)
                elif not self._place(arrays.get(block.key, block), kind):
                    return i
            return len(blocks)

    def _cover(self, parent: BlockKey, tokens: bytes) -> _Node | None:
        """The child of ``parent`` that has all of ``tokens`` and more."""
        if not tokens:
            return None
        order = keys.ordered(tokens)
        for key in self._neighbours(parent, order):
            node = self._nodes[key]
            other = node.block.tokens
            if len(other) > len(tokens) and other.startswith(tokens):
                return node
        return None

    def _place(self, block: Block, kind: str) -> bool:
        if block.parent != block.root and block.parent not in self._nodes:
            return False
        covered: list[_Node] = []
        for key in self._neighbours(block.parent, keys.ordered(block.tokens)):
            sibling = self._nodes[key]
            shorter = sibling.block.tokens
            if shorter and block.tokens.startswith(shorter) and not sibling.children:
                covered.append(sibling)
                kind = policy.protect(kind, sibling.kind)
        if self._n_bytes + held_bytes(block.specs) > self._cap:
            return False
        node = self._add(block, kind)
        for sibling in covered:
            self._replace(sibling, node)
        return True

    def _add(self, block: Block, kind: str) -> _Node:
        node = self._nodes[block.key] = _Node(block, kind, self._arrival(block))
        self._schedule(block)
        siblings = self._siblings.setdefault(block.parent, [])
        place = bisect_left(siblings, self._place_of(block.key), key=self._place_of)
        siblings.insert(place, block.key)
        self._n_bytes += node.n_bytes
        self._clock += max(1, node.n_bytes)
        parent = self._nodes.get(block.parent)
        if parent is not None:
            parent.children += 1
            if parent.children == 1:
                self._n_leaves[parent.kind] -= 1
                self._list(parent)
        self._n_leaves[kind] += 1
        self._list(node)
        return node

    def _schedule(self, block: Block) -> None:
        """Look at a leaf once it has expired."""
        if block.expires:
            heappush(self._due, (block.expires, block.key))
        if len(self._due) > 2 * len(self._nodes) + _STALE:
            leaves = (node.block for node in self._nodes.values() if not node.children)
            self._due = [(leaf.expires, leaf.key) for leaf in leaves if leaf.expires]
            heapify(self._due)

    def _arrival(self, block: Block) -> hazard.Standing:
        kind = hazard.kind_of(block.tokens, self._block_tokens)
        self._n_added += 1
        self._n_shown += kind != hazard.STATE
        above = None if block.parent == block.root else block.parent
        ghost = self._ghosts.pop(block.key)
        return hazard.arrive(self, above, kind, block.n_tokens, ghost, self._clock, self._returns)

    def _rise(self, node: _Node, kind: str) -> None:
        """Give a known block the higher of its type and the new one."""
        kind = policy.protect(node.kind, kind)
        if kind == node.kind:
            return
        if not node.children:
            self._n_leaves[node.kind] -= 1
            self._n_leaves[kind] += 1
        node.kind = kind
        self._list(node)

    def _renew(self, node: _Node) -> None:
        self._clock += 1
        node.standing = hazard.renew(node.standing, self._clock, self._returns)
        node.used = time.monotonic()
        self._list(node)

    def _list(self, node: _Node) -> None:
        """Let a block stand where its type, its standing and its children have it stand."""
        place = None
        if not node.children and not node.holds:
            shelf = hazard.shelf_of(node.standing.of_class, node.block.grade)
            place = (node.kind, shelf, node.standing.last)
        if place == node.place:
            return
        self._unlist(node)
        if place is not None:
            self._leaves[place[0]].add(*place[1:], node.block.key)
            self._stirred.add(place[:2])
        node.place = place

    def _unlist(self, node: _Node) -> None:
        if node.place is not None:
            self._leaves[node.place[0]].remove(*node.place[1:], node.block.key)
            self._stirred.add(node.place[:2])
            node.place = None

    def touch(self, keys: Sequence[BlockKey], expires: int = 0) -> None:
        """See `core.Tier.touch`. A block that becomes a leaf inherits its last child's use, so
        touching the deepest block of a chain keeps them all.
        """
        with self._lock:
            for key in keys:
                node = self._nodes.get(key)
                if node is None:
                    continue
                self._clock += 1
                node.standing = hazard.touch(node.standing, self._clock, self._returns)
                node.used = time.monotonic()
                self._list(node)
                self._outlive(node, expires)

    def extend(self, keys: Iterable[BlockKey], expires: int) -> list[Block]:
        """Let those of ``keys`` that are here expire no sooner than that; those that were to."""
        with self._lock:
            changed: list[Block] = []
            for key in keys:
                node = self._nodes.get(key)
                before = node.block if node else None
                if node is not None:
                    self._outlive(node, expires)
                    changed += [node.block] * (node.block is not before)
            return changed

    def end_of(self, chain: Chain) -> BlockKey | None:
        """The block at the end of ``chain``, or what covers it, if that is here."""
        with self._lock:
            node = self._anchor(chain) if chain.keys else None
            return node.block.key if node else None

    def saw(self, keys: Sequence[BlockKey], n_held: int) -> None:
        """See `core.Tier.saw`."""
        with self._lock:
            # What isn't shown, windows, takes a part of the room.
            room = len(self._nodes) * (self._n_shown + 1) // (self._n_added + 1)
            self._judge.saw(keys, n_held, max(1, room))

    # ---- standings, as `hazard.Places`

    def standing(self, key: BlockKey) -> hazard.Standing:
        """That of a block that is here. For the policy, which has the lock."""
        return self._nodes[key].standing

    def stand(self, key: BlockKey, standing: hazard.Standing) -> None:
        """Give a block another standing. For the policy, which has the lock."""
        node = self._nodes[key]
        node.standing = standing
        self._list(node)

    def parent(self, key: BlockKey) -> BlockKey | None:
        """Key of a block's parent, None at the root. For the policy, which has the lock."""
        block = self._nodes[key].block
        return None if block.parent == block.root else block.parent

    # ---- holding

    def hold(self, blocks: Sequence[Block]) -> list[Block]:
        """Keep the leading blocks that are here from leaving, until `release`; returns them."""
        with self._lock:
            held = []
            for block in blocks:
                node = self._nodes.get(block.key)
                if node is None:
                    break
                node.holds += 1
                self._held[block.key] = node
                self._list(node)
                held.append(block)
            return held

    def release(self, keys: Iterable[BlockKey]) -> None:
        """Undo one `hold`. Frees nothing itself, since the writer calls it: memory that came back
        between two allocations of the generation thread would be handed out again in buffers
        larger than what is counted. `reap` frees it.
        """
        with self._lock:
            for key in keys:
                # A key that was replaced, forgotten and put again has two blocks, and the
                # replaced one was held first.
                old = self._replaced.get(key)
                node = old if old is not None and old.holds else self._nodes.get(key)
                if node is None or not node.holds:
                    continue
                node.holds -= 1
                if node.holds:
                    continue
                if self._held.get(key) is node:
                    del self._held[key]
                if node is not old:
                    self._list(node)

    def reap(self) -> None:
        """Free what was to leave while it was held. Everything that frees does it first."""
        with self._lock:
            self._reap()

    def _reap(self) -> None:
        for key in [key for key, node in self._replaced.items() if not node.holds]:
            self._n_bytes -= self._replaced.pop(key).n_bytes
        for key in [key for key in self._leaving if key not in self._held]:
            self._leaving.discard(key)
            self._drop_branch(key)

    def mark_stored(self, keys: Iterable[BlockKey]) -> None:
        """Note that the cold tier has these blocks: when they leave, they are demoted."""
        with self._lock:
            for key in keys:
                node = self._nodes.get(key)
                if node is not None:
                    node.stored = True

    # ---- entries

    def enter(self, chain: Chain, kind: str) -> None:
        """Note that a whole prompt is here, in place of the entries that are its prefixes."""
        with self._lock:
            anchor = self._anchor(chain)
            if anchor is None:
                return
            for key in chain.keys[:-1]:
                for entry in list(self._nodes[key].entries):
                    self._forget(entry)
            for entry, length in list(anchor.entries.items()):
                if length <= len(chain.tokens):
                    self._forget(entry)
            self._rise(anchor, kind)
            entry = chain.keys[-1]
            if entry in self._entries:
                # Known from when another block covered it.
                self._forget(entry)
            anchor.entries[entry] = len(chain.tokens)
            self._entries[entry] = (anchor.block.key, kind)

    def limit_entries(self, n: int) -> None:
        """Let go of the oldest entries of the least protected type until ``n`` are left; their
        blocks leave as far as no other block or entry needs them.
        """
        with self._lock:
            self._reap()
            while len(self._entries) > n:
                counts = dict.fromkeys(CACHE_TYPES, 0)
                for _, kind in self._entries.values():
                    counts[kind] += 1
                kind = next(k for k in policy.victim_order(counts) if counts[k])
                oldest = min(
                    (self._nodes[key].standing.last, key, entry)
                    for entry, (key, k) in self._entries.items()
                    if k == kind
                )
                self._forget(oldest[2])
                self._drop_branch(oldest[1])

    def _anchor(self, chain: Chain) -> _Node | None:
        """The block that holds the end of ``chain``: its last one, or a longer one covering it."""
        last = len(chain.keys) - 1
        node = self._nodes.get(chain.keys[last])
        if node is not None:
            return node
        return self._cover(chain.parent(last), chain.tokens_of(last))

    def _forget(self, entry: BlockKey) -> None:
        anchor, _ = self._entries.pop(entry)
        del self._nodes[anchor].entries[entry]

    def _drop_branch(self, key: BlockKey) -> None:
        node = self._nodes.get(key)
        while node and not node.entries:
            self._drop_state(node)
            if node.children:
                return
            if node.holds:
                self._leaving.add(node.block.key)
                return
            parent = self._nodes.get(node.block.parent)
            self._drop(node)
            node = parent

    def _drop_state(self, node: _Node) -> None:
        """Let go of the snapshot and the window at a block, if it has no other children."""
        state = (keys.snapshot_key(node.block.key), keys.window_key(node.block.key))
        children = [self._nodes[key] for key in self._siblings.get(node.block.key, [])]
        if any(c.block.key not in state or c.entries for c in children):
            return
        for child in children:
            if child.holds:
                self._leaving.add(child.block.key)
            else:
                self._drop(child)

    # ---- leaving

    def expire(self, now: int) -> int:
        """See `core.Tier.expire`. What is held leaves at a later call."""
        with self._lock:
            self._reap()
            n, held = 0, []
            while self._due and self._due[0][0] <= now:
                _, key = heappop(self._due)
                node = self._nodes.get(key)
                if node is None or node.children:
                    # Once it is a leaf it gets another entry.
                    continue
                if not node.block.expires or node.block.expires > now:
                    self._schedule(node.block)
                elif node.holds:
                    held.append(node.block)
                else:
                    self._discard(node, "ttl")
                    n += 1
            for block in held:
                self._schedule(block)
            self._expired += n
            return n

    def discard(self, keys: Iterable[BlockKey]) -> int:
        """Let go for good of those, children first, that are here, have no children and aren't
        held; the bytes that they had.
        """
        with self._lock:
            self._reap()
            before = self._n_bytes
            for key in keys:
                node = self._nodes.get(key)
                if node is not None and not node.children and not node.holds:
                    self._discard(node, "prune")
            return before - self._n_bytes

    def under(self, roots: Container[BlockKey]) -> list[BlockKey]:
        """The blocks of some namespaces, children before their parents."""
        with self._lock:
            # No block is older than its parent.
            found = reversed(self._nodes.items())
            return [key for key, node in found if node.block.root in roots]

    def roots(self) -> frozenset[BlockKey]:
        """The namespaces of all blocks here."""
        with self._lock:
            return frozenset(node.block.root for node in self._nodes.values())

    def trim_to(self, n_bytes: int, spared: Sequence[BlockKey] = ()) -> None:
        """See `core.Tier.trim_to`. What is held stays, for it is still being read, and so does
        what is spared.
        """
        with self._lock:
            self._reap()
            self._evict_until(n_bytes, frozenset(spared), "trim")

    def _evict_until(self, n_bytes: int, spared: Container[BlockKey], reason: str) -> bool:
        """Evict until at most ``n_bytes`` are in use; whether that was reached."""
        choices: dict[str, hazard.Choice[BlockKey]] = {}
        n_before = len(self._nodes)
        self._stirred.clear()
        while self._n_bytes > n_bytes:
            if not self._evict_one(choices, spared, reason):
                return False
        self._ghosts.trim(self._returns, self._clock, n_before)
        return True

    def _evict_one(
        self,
        choices: dict[str, hazard.Choice[BlockKey]],
        spared: Container[BlockKey],
        reason: str,
    ) -> bool:
        """Evict the first leaf of the type that gives way first; ``choices`` are those made since
        the places were last stirred, by type.
        """
        for kind, shelf in self._stirred:
            if kind in choices:
                choices[kind].changed(shelf)
        self._stirred.clear()
        for kind in policy.victim_order(self._n_leaves):
            if kind not in choices:
                table = self._judge.table(self._returns, self._clock)
                choices[kind] = hazard.Choice(self._leaves[kind], table, self._clock, spared)
            key = choices[kind].first()
            if key is not None:
                self._evict(self._nodes[key], reason)
                return True
        return False

    def _evict(self, node: _Node, reason: str) -> None:
        """A block leaves to make room."""
        self._ghosts.add(node.block.key, node.standing, self._clock)
        self._leave(node, reason)

    def _drop(self, node: _Node) -> None:
        """A block leaves with its entry."""
        hazard.drop(node.standing, self._returns)
        self._leave(node, "entries")

    def _discard(self, node: _Node, reason: str) -> None:
        """A block leaves since nobody is to find it any more."""
        self._departures.note(reason, time.monotonic() - node.used)
        hazard.drop(node.standing, self._returns)
        self._n_bytes -= node.n_bytes
        self._unlink(node)

    def _leave(self, node: _Node, reason: str) -> None:
        self._departures.note(reason, time.monotonic() - node.used)
        if node.stored:
            self._demotes += 1
        else:
            self._evictions += 1
        self._n_bytes -= node.n_bytes
        self._unlink(node)

    def _replace(self, node: _Node, longer: _Node) -> None:
        """Take a tail out in favour of a sibling that has all its tokens, entries included."""
        for entry, length in node.entries.items():
            longer.entries[entry] = length
            self._entries[entry] = (longer.block.key, self._entries[entry][1])
        node.entries.clear()
        self._outlive(longer, node.block.expires)
        if node.holds:
            self._replaced[node.block.key] = node
        else:
            self._n_bytes -= node.n_bytes
        hazard.drop(node.standing, self._returns)
        self._unlink(node)

    def _unlink(self, node: _Node) -> None:
        key, parent_key = node.block.key, node.block.parent
        for entry in list(node.entries):
            self._forget(entry)
        siblings = self._siblings[parent_key]
        del siblings[bisect_left(siblings, self._place_of(key), key=self._place_of)]
        del self._nodes[key]
        self._unlist(node)
        if not siblings:
            del self._siblings[parent_key]
        self._n_leaves[node.kind] -= 1
        parent = self._nodes.get(parent_key)
        if parent is None:
            return
        parent.children -= 1
        parent.standing = hazard.inherit(parent.standing, node.standing, self._returns)
        parent.used = max(parent.used, node.used)
        self._outlive(parent, node.block.expires)
        if not parent.children:
            self._schedule(parent.block)
            self._n_leaves[parent.kind] += 1
            self._list(parent)

    def close(self) -> None:
        """See `core.Tier.close`."""
        with self._lock:
            self._nodes.clear()
            self._siblings.clear()
            self._replaced.clear()
            self._held.clear()
            self._leaving.clear()
            self._reserved.clear()
            self._entries.clear()
            self._due.clear()
            self._leaves = _no_leaves()
            self._ghosts = hazard.Ghosts()
            self._n_leaves = dict.fromkeys(CACHE_TYPES, 0)
            self._n_bytes = self._cap = 0

    # ---- checking

    def check(self) -> list[Problem]:
        """See `core.Tier.check`."""
        with self._lock:
            found = [
                *self._check_counts(),
                *self._check_tree(),
                *self._check_places(),
                *self._check_entries(),
            ]
            return [Problem("hot", where, what) for where, what in found]

    def _check_counts(self) -> Iterable[tuple[str, str]]:
        nodes = (*self._nodes.values(), *self._replaced.values())
        total = sum(node.n_bytes for node in nodes)
        if total != self._n_bytes:
            yield "bytes", f"{self._n_bytes} counted, {total} held"
        held = {id(node) for node in nodes if node.holds}
        if held - {id(node) for node in (*self._held.values(), *self._replaced.values())}:
            yield "held", "a held block isn't listed as such"
        if any(not node.holds for node in self._held.values()):
            yield "held", "a block is listed as held that isn't"
        if self._n_bytes > self._cap:
            yield "bytes", f"{self._n_bytes} over the cap of {self._cap}"
        leaves = dict.fromkeys(CACHE_TYPES, 0)
        for node in self._nodes.values():
            leaves[node.kind] += not node.children
        if leaves != self._n_leaves:
            yield "leaves", f"{self._n_leaves} counted, {leaves} found"

    def _check_tree(self) -> Iterable[tuple[str, str]]:
        children: dict[BlockKey, list[BlockKey]] = {}
        for key, node in self._nodes.items():
            children.setdefault(node.block.parent, []).append(key)
            if node.block.parent != node.block.root and node.block.parent not in self._nodes:
                yield key.hex(), "its parent is absent"
        for parent, rows in children.items():
            rows.sort(key=self._place_of)
            if rows != self._siblings.get(parent):
                yield parent.hex(), "its list of children is wrong"
            if parent in self._nodes and self._nodes[parent].children != len(rows):
                yield parent.hex(), "its number of children is wrong"
        if self._siblings.keys() != children.keys():
            yield "children", "lists of children without a child"

    def _check_places(self) -> Iterable[tuple[str, str]]:
        listed = {
            (kind, shelf, last, key)
            for kind, leaves in self._leaves.items()
            for shelf in leaves.shelves()
            for last, key in leaves.newer(shelf, 0)
        }
        wanted = {
            (node.kind, hazard.shelf_of(node.standing.of_class, node.block.grade), last, key)
            for key, node in self._nodes.items()
            if not node.children and not node.holds
            for last in (node.standing.last,)
        }
        for *_, key in wanted - listed:
            yield key.hex(), "a leaf that can't be evicted"
        for *_, key in listed - wanted:
            yield key.hex(), "stands among the leaves that can be evicted, at a wrong place"
        scheduled = {key for _, key in self._due}
        for key, node in self._nodes.items():
            if key in self._ghosts:
                yield key.hex(), "is here, and among those that left"
            if node.block.expires and not node.children and key not in scheduled:
                yield key.hex(), "expires, and nobody will look"

    def _check_entries(self) -> Iterable[tuple[str, str]]:
        for entry, (anchor, _) in self._entries.items():
            if anchor not in self._nodes or entry not in self._nodes[anchor].entries:
                yield entry.hex(), "an entry without its last block"
        if sum(len(node.entries) for node in self._nodes.values()) != len(self._entries):
            yield "entries", "a block knows an entry that the tier does not"


def _no_leaves() -> dict[str, hazard.Shelves[BlockKey]]:
    return {kind: hazard.Shelves() for kind in CACHE_TYPES}


def _is(block: Block, chain: Chain, i: int) -> bool:
    return block.parent == chain.parent(i) and block.tokens == chain.tokens_of(i)
