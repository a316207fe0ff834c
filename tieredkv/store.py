"""TieredStore: one prefix tree over a hot and a cold tier.

No mlx here: tensors are carried, not looked into. Any thread may call, except that `put` and
`load` run mlx ops inside the hot tier and so belong on the generation thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from tieredkv import matching
from tieredkv.admission import Admission, AdmitAll, AdmitReused
from tieredkv.codec import PlaneCodec
from tieredkv.core import (
    Block,
    BlockKey,
    Chain,
    Codec,
    ColdTierUnavailable,
    Config,
    Fault,
    Hit,
    LowerTier,
    Match,
    Namespace,
    Pinned,
    Place,
    Problem,
    StoreDetails,
    StoreStats,
    TensorSpec,
    TierStats,
)
from tieredkv.keys import WINDOW_TOKENS, common_prefix, namespace_key, window_key
from tieredkv.metrics import Counters, Faults, Histogram
from tieredkv.pace import Pace
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.hot import HotTier, held_bytes
from tieredkv.tiers.null import NullTier
from tieredkv.tiers.pruning import Criteria, Pruned
from tieredkv.tiers.writer import Writer

_LOG = logging.getLogger("tieredkv")

# How long closing waits for the queue. What is left then is recomputed some day, never wrong.
_CLOSE_SECONDS = 10.0

# Clients make new ones with every salt. Of those forgotten the hot tier's blocks can't be pruned by
# model or salt before they are on disk.
_MAX_NAMESPACES = 4096


def _open_cold(config: Config, counters: Counters, faults: Faults) -> LowerTier:
    if config.cold_dir is None:
        return NullTier()
    codec: Codec = QuantizingCodec() if config.cold_quantize == "q8" else PlaneCodec()
    try:
        return ColdTier(
            config.cold_dir,
            config.cold_bytes,
            codec,
            config.reserve_bytes,
            config.block_tokens,
            config.pin_share,
        )
    except ColdTierUnavailable as e:
        counters.add("faults", label="cold_dir")
        faults.note("cold_dir", str(e))
        _LOG.warning("tieredkv: %s; serving from memory only", e)
        return NullTier()


class TieredStore:
    """Blocks in two tiers: `match` and `load` find a prefix, `admit` and `put` store one."""

    def __init__(self, config: Config) -> None:
        """Open the tiers. A cold directory that can't be used is logged and done without."""
        self.config = config
        self.counters = Counters()
        self.faults = Faults()
        self._promotes = Histogram()
        self.hot = HotTier(config.hot_bytes, config.block_tokens)
        self.cold = _open_cold(config, self.counters, self.faults)
        limit = config.queue_bytes
        limit = config.hot_bytes * 3 // 4 if limit is None else limit
        self.writer = Writer(self.cold, limit, self._written)
        self.pace = Pace()
        self._admission: Admission = AdmitReused() if config.cold_admit == "reused" else AdmitAll()
        self._namespaces: dict[BlockKey, Namespace] = {}
        self._lost_before = 0

    # ---- a hit

    def match(self, chain: Chain) -> Match:
        """See `matching.match`."""
        return matching.match(self.hot, self.cold, chain)

    def match_state(self, chain: Chain, n_windows: int) -> Match:
        """See `matching.match_state`."""
        return matching.match_state(self.hot, self.cold, chain, n_windows)

    def load(self, chain: Chain, match: Match, expires: int = 0) -> Hit | None:
        """Read the blocks of a match, promoting the cold ones; None if none could be had. What
        the hit ends at expires no sooner than ``expires``, in Unix ns; 0 is never.

        What was evicted or found damaged since the match makes the hit shorter. The tokens of
        every block are compared with the prompt's: nothing else can be returned.
        """
        warm = self.hot.load(match.keys[: match.n_hot])
        found = _verified(chain, warm, len(warm))
        if found is not None:
            # Before what is promoted is put below.
            self.hot.touch(_ends(found, chain.block_tokens), expires)
        self.hot.saw(match.keys, len(warm))
        cool = (
            self._promote(match.keys, match.keys[match.n_hot :]) if len(warm) == match.n_hot else []
        )
        hit = _verified(chain, [*warm, *cool], len(warm)) if cool else found
        if hit is None:
            return None
        hit = replace(hit, windows=self._windows(match.windows, hit.blocks, expires))
        used = (*_ends(hit, chain.block_tokens), *(w.key for w in hit.windows))
        # What was promoted may have been about to expire.
        self.hot.extend(used, expires)
        for key in used:
            self.writer.touch(key, expires)
        self._submit_used(hit)
        return hit

    def _windows(
        self, wanted: Sequence[BlockKey], blocks: Sequence[Block], expires: int
    ) -> tuple[Block, ...]:
        """The windows of the last of ``blocks``, promoted where need be; none unless all."""
        warm = {key: b for key in wanted for b in self.hot.load([key])}
        self.hot.touch(list(warm), expires)
        cool = [key for key in wanted if key not in warm]
        path = (*wanted, *(b.key for b in blocks))
        found = warm | {b.key: b for b in self._promote(path, cool)} if cool else warm
        windows = [found[key] for key in wanted if key in found]
        if len(windows) < len(wanted) or len(blocks) < len(wanted):
            return ()
        sound = all(
            w.parent == b.key and w.tokens == WINDOW_TOKENS
            for w, b in zip(windows, blocks[len(blocks) - len(wanted) :], strict=True)
        )
        return tuple(windows) if sound else ()

    def _promote(self, path: Sequence[BlockKey], wanted: Sequence[BlockKey]) -> list[Block]:
        """Blocks from the cold tier, decoded straight into the hot tier's memory as far as there
        is room. None of ``path`` makes way for them.
        """
        start = time.monotonic()
        try:
            blocks = self.cold.load(wanted, partial(self.hot.reserve, path))
            n = self.hot.put(blocks)
        finally:
            self.hot.unreserve(wanted)
        seconds = time.monotonic() - start
        self.pace.promoted(sum(b.n_bytes for b in blocks), seconds)
        if wanted:
            self._promotes.observe(seconds)
        resident = self.hot.load([b.key for b in blocks[:n]])
        self.hot.mark_stored(b.key for b in resident)
        self.counters.add("promotes", len(blocks))
        # What the hot tier had no room for is used once, as decoded.
        return [*resident, *blocks[len(resident) :]]

    # ---- an insert

    def lacking(self, chain: Chain) -> range:
        """Indices of the blocks of ``chain`` that aren't in the hot tier."""
        start = self.hot.lookup(chain)
        if start == chain.n_full:
            # The tail and the snapshot aren't full blocks: those are found by key.
            start += len(self.hot.load(chain.keys[start:]))
        if start == len(chain.keys) or self._covers(chain, start):
            return range(start, start)
        return range(start, len(chain.keys))

    def admit(self, chain: Chain, specs: Sequence[tuple[TensorSpec, ...]]) -> int:
        """Make room in the hot tier for the last blocks of ``chain``, which have these specs.

        Returns how many of them, from the first, may be put.
        """
        n = self.hot.make_room(chain.keys, [held_bytes(s) for s in specs])
        self._lose("hot_full", len(specs) - n)
        return n

    def windowless(self, chain: Chain, start: int) -> list[int]:
        """Indices, from ``start`` on, of the full blocks of ``chain`` that are in the hot tier,
        but whose windows aren't.
        """
        known = self.hot.present(chain.keys[start : chain.n_full])
        window_of = {window_key(key): key for key in known}
        known -= {window_of[key] for key in self.hot.present(list(window_of))}
        return [i for i in range(start, chain.n_full) if chain.keys[i] in known]

    def admit_windows(
        self, chain: Chain, indices: Sequence[int], specs: Sequence[TensorSpec]
    ) -> Sequence[int]:
        """Make room in the hot tier for windows of these specs at these blocks of ``chain``; for
        which of them there is some. Those at the end are worth most.
        """
        own = [*chain.keys, *map(window_key, chain.keys[: chain.n_full])]
        n = self.hot.make_room(own, [held_bytes(specs)] * len(indices))
        self._lose("hot_full", len(indices) - n)
        return indices[len(indices) - n :]

    def put_windows(
        self,
        chain: Chain,
        windows: Sequence[Block],
        kind: str = "assistant",
        *,
        n_windows: int = 0,
        expires: int = 0,
    ) -> None:
        """Store captured windows at blocks of ``chain``, and queue what the cold tier lacks of all
        that it has. The last ``n_windows`` expire no sooner than ``expires``.
        """
        self._lose("hot_full", len(windows) - self.hot.put(windows, kind))
        parents = chain.keys[: chain.n_full]
        extended = self.hot.extend(
            map(window_key, parents[max(0, len(parents) - n_windows) :]), expires
        )
        if not self.cold.cap_bytes:
            return
        queued = self._queue_windows([*map(window_key, parents)], parents)
        again = windows[max(0, len(windows) - n_windows) :]
        self._tell_expiry([b for b in (*extended, *again) if b.key not in queued])

    def _covers(self, chain: Chain, i: int) -> bool:
        if i < len(chain.keys) - 1 or not chain.tokens_of(i):
            return False
        tail = chain.tokens_of(i)
        nearest = self.hot.nearest(chain.parent(i), tail)
        return nearest is not None and nearest.n_tokens * 8 == len(tail)

    def put(
        self, chain: Chain, blocks: Sequence[Block], kind: str = "assistant", expires: int = 0
    ) -> None:
        """Store captured blocks of ``chain``, and queue what the cold tier lacks of it. The last
        block of ``chain`` expires no sooner than ``expires``, in Unix ns; 0 is never.
        """
        known = self.hot.load(chain.keys)
        self.hot.saw(chain.keys, len(known))
        held = self.hot.put([*known, *blocks], kind)
        self._lose("hot_full", len(known) + len(blocks) - held)
        self.hot.enter(_entry(chain), kind)
        computed = {b.key for b in blocks}
        admitted = chain.keys[: self._admission.inserted(chain.keys, computed)]
        if self.cold.cap_bytes:
            self.counters.add("unadmitted", len(computed.difference(admitted)))
        end = self.hot.end_of(chain)
        extended = self.hot.extend([end] if end else [], expires)
        queued = self._submit(chain, len(admitted))
        # The cold tier may have had, for a shorter time, what was computed again.
        again = [b for b in blocks[-1:] if b.key == end]
        self._tell_expiry([b for b in (*extended, *again) if b.key not in queued])
        if self.config.max_entries is not None:
            self.hot.limit_entries(self.config.max_entries)

    def _submit(self, chain: Chain, stop: int) -> frozenset[BlockKey]:
        """Queue what the cold tier lacks of the blocks of ``chain`` before ``stop``; their keys."""
        n = self.cold.missing(chain)
        self.hot.mark_stored(chain.keys[:n])
        while n < stop and self.writer.waits(chain.keys[n]):
            n += 1
        # What isn't admitted is no business of the tier.
        self.cold.saw(chain.keys[: max(n, stop)], n)
        lacking = self.hot.load(chain.keys[n:stop])
        self._queue(lacking)
        return frozenset(b.key for b in lacking)

    def _tell_expiry(self, blocks: Sequence[Block]) -> None:
        """Have the cold tier keep blocks longer that it has, or is to have: put again."""
        there = self._submitted([b.key for b in blocks]) if blocks else frozenset()
        for block in blocks:
            if block.key in there:
                self._queue([block])

    def _submit_used(self, hit: Hit) -> None:
        """Queue what the cold tier lacks of the blocks of a hit, if they are admitted by now."""
        path = [b.key for b in (*_well_used(hit), *filter(None, [hit.snapshot]))]
        path = path[: self._admission.used(path)]
        if not path or not self.cold.cap_bytes:
            return
        written = self._submitted(path)
        self._queue(self.hot.load([key for key in path if key not in written]))
        self._queue_windows([w.key for w in hit.windows], [w.parent for w in hit.windows])

    def _queue_windows(
        self, windows: Sequence[BlockKey], parents: Sequence[BlockKey]
    ) -> Sequence[BlockKey]:
        """Queue the windows that the cold tier lacks at blocks that it has, or is to have; their
        keys.
        """
        rooted = self._submitted([*parents, *windows])
        pairs = zip(windows, parents, strict=True)
        fresh = [key for key, parent in pairs if parent in rooted and key not in rooted]
        self._queue([b for key in fresh for b in self.hot.load([key])])
        return fresh

    def _submitted(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Which of ``keys`` are in the cold tier or on their way there."""
        # In this order: what is written meanwhile is in one of the two.
        waiting = frozenset(key for key in keys if self.writer.waits(key))
        stored = self.cold.present(keys)
        self.hot.mark_stored(stored)
        return waiting | stored

    def _queue(self, blocks: Sequence[Block]) -> None:
        blocks = self.hot.hold(blocks)
        taken = 0
        try:
            taken = self.writer.submit(blocks)
        finally:
            # What nobody will write must not be held for ever.
            self.hot.release(b.key for b in blocks[taken:])
        self._lose("queue_full", len(blocks) - taken)

    def _written(self, keys: Sequence[BlockKey], n: int) -> None:
        try:
            self.hot.mark_stored(keys[:n])
        finally:
            self.hot.release(keys)
        self._lose("cold_refused", len(keys) - n)

    def lose(self, why: str) -> None:
        """Count a prompt that a fault kept from being put, so that `flush` tells of it."""
        self._lose(why, 1)

    def _lose(self, why: str, n: int) -> None:
        if not n:
            return
        self.faults.note("dropped", f"blocks not stored ({why})")
        if self.counters.add("dropped", n, why) == n:
            _LOG.warning("tieredkv: %d blocks not stored (%s); only counted from here on", n, why)

    def register(self, namespace: Namespace) -> None:
        """Remember what a namespace is, before its first block is put."""
        root = namespace_key(namespace)
        self._namespaces.pop(root, None)
        self._namespaces[root] = namespace
        if len(self._namespaces) > _MAX_NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]
        self.cold.register(namespace)

    # ---- upkeep

    def expire(self) -> None:
        """Free what has expired in the hot tier. The writer deletes it from the cold one."""
        self.hot.expire(time.time_ns())

    def drain(self, timeout: float | None = None) -> bool:
        """Wait for the queue; False if it isn't empty by then."""
        return self.writer.flush(timeout)

    def prune(self, criteria: Criteria, turn: AbstractContextManager[Any] | None = None) -> Pruned:
        """Delete what ``criteria`` mean from both tiers.

        The hot tier gives up what went from the cold one. If whole namespaces are meant, by model
        and salt or without any condition, it gives up all of them that the cold one hasn't; by age
        or down to a size it can't judge. What waits for its commit is not touched: `drain` first.
        ``turn`` is held while memory is freed, for whoever must not allocate any meanwhile.

        Raises:
            ColdTierUnavailable: the cold tier can't be read or written; the hot one is as it was.
        """
        roots = self._meant(criteria)
        victims = list(self.cold.prune(criteria))
        gone = {victim.key: None for victim in victims}
        with turn or nullcontext():
            mine = self.hot.under(roots)
            stay = self.cold.present(mine)
            doomed = [key for key in mine if key not in stay]
            n_bytes = self.hot.discard([*doomed, *gone])
        gone |= dict.fromkeys({*doomed} - self.hot.present(doomed))
        return Pruned(len(gone), n_bytes + sum(victim.blob_bytes for victim in victims))

    def _meant(self, criteria: Criteria) -> frozenset[BlockKey]:
        """Roots of the namespaces all of which is meant."""
        if not criteria.means_whole_namespaces:
            return frozenset()
        if criteria.model is None and criteria.salt is None:
            return self.hot.roots()
        # Copied: prompts are stored meanwhile.
        named = list(self._namespaces.items())
        known = [root for root, namespace in named if criteria.means(namespace)]
        return self.cold.meant(criteria).union(known)

    def pin(self, places: Sequence[Place]) -> Pinned:
        """See `core.LowerTier.pin`. What waits for its commit isn't there yet: `drain` first."""
        return self.cold.pin(places)

    def unpin(self, places: Sequence[Place]) -> Pinned:
        """See `core.LowerTier.unpin`."""
        return self.cold.unpin(places)

    def trim_to(self, n_bytes: int, spared: Sequence[BlockKey] = ()) -> None:
        """Demote from the hot tier until it holds at most ``n_bytes``, but none of ``spared``."""
        self.hot.trim_to(n_bytes, spared)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for the queue; True if all that was put since the last flush is committed."""
        done = self.writer.flush(timeout)
        lost, before = self.counters.total("dropped"), self._lost_before
        self._lost_before = lost
        return done and lost == before

    def check(self) -> list[Problem]:
        """Faults in the tiers' books; none if the invariants hold."""
        return [*self.hot.check(), *self.cold.check()]

    def stats(self) -> StoreStats:
        """A reading of tiers, queue and counters."""
        count, done = self.counters, self.cold.counters()
        return StoreStats(
            hot=TierStats(self.hot.n_bytes, self.hot.cap_bytes, self.hot.n_blocks),
            cold=TierStats(self.cold.n_bytes, self.cold.cap_bytes, self.cold.n_blocks),
            entries=self.hot.n_entries,
            queue_bytes=self.writer.n_bytes,
            queue_blocks=self.writer.n_blocks,
            hits=count.total("hits"),
            hit_tokens_hot=count.total("hit_tokens_hot"),
            hit_tokens_cold=count.total("hit_tokens_cold"),
            misses=count.by_label("misses"),
            inserts=count.total("inserts"),
            refused=count.by_label("refused"),
            promotes=count.total("promotes"),
            demotes=self.hot.demotes,
            evictions_hot=self.hot.evictions,
            evictions_cold=done.evictions,
            yielded_bytes=count.total("yielded"),
            recomputed=count.total("recomputed"),
            dropped=count.by_label("dropped"),
            commits=done.commits,
            bytes_written=done.bytes_written,
            disk_bytes=done.disk_bytes,
            unadmitted=count.total("unadmitted"),
            expired=self.hot.expired + done.expired,
            faults=count.by_label("faults") | done.faults,
        )

    @property
    def promote_seconds(self) -> float:
        """Time that promotes have taken so far."""
        return self._promotes.reading().total

    def details(self) -> StoreDetails:
        """A reading of what `stats` leaves out."""
        done = self.cold.counters()
        return StoreDetails(
            hits=self.counters.by_label("hits"),
            promote_seconds=self._promotes.reading(),
            commit_seconds=done.commit_seconds,
            departures={"hot": self.hot.departures(), "cold": done.departures},
            raw_bytes=done.raw_bytes,
            saved_seconds=self.pace.saved_seconds(),
            faults=_newest_first([*self.faults.recent(), *done.recent]),
        )

    def close(self) -> None:
        """Write what is queued, for a bounded time, and let go of everything. Idempotent."""
        self._lose("closed", self.writer.close(_CLOSE_SECONDS))
        self.hot.close()
        self.cold.close()


def _newest_first(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: -fault.time))


def _well_used(hit: Hit) -> Sequence[Block]:
    """The blocks of a hit without the last if less than half of it is used: many prompts share just
    the few tokens that all begin with.
    """
    *before, last = hit.blocks
    return hit.blocks if 2 * hit.n_used >= last.n_tokens else before


def _entry(chain: Chain) -> Chain:
    """What counts as a prompt: the blocks alone at a block's end, where checkpoints are, so that
    what goes on from there takes its place.
    """
    return replace(chain, keys=chain.keys[: chain.n_full]) if chain.ends_at_block else chain


def _ends(hit: Hit, block_tokens: int) -> list[BlockKey]:
    """Where a hit ends: its deepest whole block, the tail behind that, and the snapshot.

    What is left of a whole block that is used in part is not told: the prompt parts in it, and
    will bring a block of its own.
    """
    *before, last = hit.blocks
    ends = before[-1:]
    if last.n_tokens < block_tokens:
        ends.append(last)
    elif hit.n_used >= last.n_tokens - 1:
        # One token is always left to compute.
        ends = [last]
    if hit.snapshot is not None:
        ends.append(hit.snapshot)
    return [b.key for b in ends]


def _verified(chain: Chain, blocks: Sequence[Block], n_warm: int) -> Hit | None:
    """The hit that ``blocks`` prove to be: each hangs on the one before and has the prompt's
    tokens; only the last may go on differently, and counts up to there. A snapshot ends it.
    """
    tokens = chain.tokens.astype("<i8", copy=False).tobytes()
    used: list[Block] = []
    snapshot = None
    n_tokens = n_hot = 0
    parent = chain.root
    for i, block in enumerate(blocks):
        if block.parent != parent:
            break
        if not block.tokens:
            snapshot = block
            break
        shared = common_prefix(block.tokens, tokens[n_tokens * 8 :])
        if not shared:
            break
        used.append(block)
        n_tokens += shared
        n_hot += shared if i < n_warm else 0
        if shared < block.n_tokens:
            break
        parent = block.key
    if not used:
        return None
    return Hit(tuple(used), n_tokens, snapshot, (), n_hot, n_tokens - n_hot)
