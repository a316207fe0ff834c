"""TieredPromptCache: the drop-in for mlx-lm's LRUPromptCache.

The boundary to the host: whatever goes wrong in here is a miss, a count and a log line, because
an exception in a cache method kills the server's generation thread.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, SupportsIndex, overload

import mlx.core as mx
import numpy as np

from tieredkv import keys, layout, matching, policy
from tieredkv.core import (
    BLOCK_TOKENS,
    CACHE_TYPES,
    PIN_SHARE,
    Block,
    BlockKey,
    Chain,
    Config,
    FetchReport,
    Hit,
    Match,
    Namespace,
    Pinned,
    Place,
    Problem,
    Quantization,
    Refused,
    StoreDetails,
    StoreStats,
    TensorSpec,
    Tokens,
)
from tieredkv.explain import AMBIGUOUS, CHANGED, UNREADABLE, Explanation, Wanted, missed
from tieredkv.identity import Fingerprints, IdentityChanged
from tieredkv.inquiry import Form, Inquiry
from tieredkv.layout import Layout, SnapshotPlan
from tieredkv.restored import Copiers
from tieredkv.store import TieredStore
from tieredkv.tiers import pins, pruning
from tieredkv.tiers.pruning import Criteria, Pruned
from tieredkv.tiers.tree import PrefixUsage, Ranking

_LOG = logging.getLogger("tieredkv")

# Prompts that may be computed at once without their pace being lost.
_FETCHED = 32

# A prompt's state in the restored caches, and in the batch that they are merged into.
_COPIES = 2

# What was evicted or found damaged after a match isn't matched again.
_TRIES = 2

# How long who pins or prunes waits for what is to be written before.
_DRAIN_SECONDS = 60.0

# Seconds; what is kept for longer is kept for so long. A row has room for no more than 64 bits.
_LONGEST_TTL = 1e9


def host_of(quantization: Quantization | None) -> str:
    """What computes the state: other kernels may round otherwise, so they never share it."""
    device = str(mx.default_device().type).rpartition(".")[2]
    kind = mx.device_info().get("architecture", "")
    host = f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}, {device} {kind}"
    return f"{host}, {quantization}" if quantization else host


def _recommended_bytes() -> int | None:
    """What Metal takes to be the most that this process should use."""
    if not mx.metal.is_available():
        return None
    return int(mx.device_info()["max_recommended_working_set_size"])


class SaltedPrompt(list[int]):
    """A prompt of one tenant among others: token ids, what its state is kept apart by, and how many
    seconds after its last use it expires; None for the cache's own ``ttl``.

    Slices have both too, so that what a host cuts out and appends to stays that tenant's.
    """

    def __init__(
        self, tokens: Iterable[int] = (), salt: bytes = b"", ttl: float | None = None
    ) -> None:
        """Raises ValueError if ``ttl`` is no number of seconds above 0."""
        if ttl is not None and not 0 < ttl < math.inf:
            raise ValueError("ttl must be a number of seconds, more than 0")
        super().__init__(tokens)
        self.salt = salt
        self.ttl = ttl

    @overload
    def __getitem__(self, i: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, i: slice) -> SaltedPrompt: ...

    def __getitem__(self, i: SupportsIndex | slice) -> int | SaltedPrompt:
        found = super().__getitem__(i)
        return SaltedPrompt(found, self.salt, self.ttl) if isinstance(found, list) else found


@dataclass(frozen=True, slots=True, eq=False)
class _Fetched:
    """A prompt that is being computed since then, but for its first ``n_cached`` tokens."""

    root: BlockKey
    tokens: Tokens
    n_cached: int
    since: float

    def begins_with(self, tokens: Tokens) -> bool:
        return np.array_equal(self.tokens[: len(tokens)], tokens)


class TieredPromptCache:
    """A prompt cache in two tiers, memory and disk, for use where mlx-lm takes an LRUPromptCache.

    Differs from upstream's contract on purpose in one point: a hit always leaves at least one
    token to compute, since an empty rest breaks both of upstream's serving paths.

    `fetch_nearest_cache`, `insert_cache` and `bind` run mlx ops: call them on the thread that
    generates. The other methods may be called from any thread. Calls are serialised. After
    `close`, every fetch is a miss and inserts are ignored.
    """

    def __init__(
        self,
        cold_dir: str | Path | None = None,
        *,
        hot_bytes: int = 2 << 30,
        cold_bytes: int = 16 << 30,
        block_tokens: int = BLOCK_TOKENS,
        salt: bytes = b"",
        max_entries: int | None = None,
        queue_bytes: int | None = None,
        quantization: Quantization | None = None,
        memory_bytes: int | None = None,
        reserve_bytes: int = 0,
        cold_quantize: str = "none",
        cold_admit: str = "all",
        ttl: float | None = None,
        pin_share: float = PIN_SHARE,
    ) -> None:
        """Open the tiers.

        Args:
            cold_dir: directory of the cold tier, made if absent; several caches, in one process
                or several, may share it. None keeps everything in memory. A directory that
                can't be used is logged and done without.
            hot_bytes: cap on the memory that MLX holds because of this cache, in bytes. Blocks
                pass through it on their way to disk, so with less than a block nothing is
                stored; 0 turns storing off.
            cold_bytes: cap on the cold tier's file, in bytes.
            block_tokens: tokens per block. Caches share blocks only if they agree on it.
            salt: a secret; caches with different salts never see each other's prompts. Nor do
                different salts of a `SaltedPrompt` in one cache.
            max_entries: inserted prompts kept in memory; None for as many as fit.
            queue_bytes: cap on what waits to be written; None for three quarters of hot_bytes.
            quantization: how the host quantizes prompts on its way, if it does. Hits then end
                where one of its steps does, since anywhere else they would change which tokens
                are computed before it. Serve one prompt at a time, and `bind` models.
            memory_bytes: what MLX may hold in all, weights and live prompts included, before this
                cache gives memory back, below hot_bytes if need be. None for what Metal
                recommends as the most, and no limit elsewhere.
            reserve_bytes: the cold tier's file doesn't grow while less of its disk is free.
            cold_quantize: "none", or "q8" to keep rows of tokens in 8 bits in the cold tier. THEN A
                HIT CAN CHANGE THE OUTPUT: what comes back from there is close to what was computed,
                and not equal. Caches share blocks only if they agree on it.
            cold_admit: "all", or "reused" to write only what comes back: fewer writes, but a prompt
                that nothing has used yet is lost with the process.
            ttl: seconds after its last use that a prompt is found, if a `SaltedPrompt` doesn't say
                otherwise; None for as long as there is room. Shared prefixes live as long as any
                prompt that has them.
            pin_share: the most of cold_bytes that pinned prompts may take.

        Raises:
            TypeError, ValueError: an argument that makes no sense.
        """
        self._store = TieredStore(
            Config(
                Path(cold_dir).expanduser() if cold_dir is not None else None,
                hot_bytes,
                cold_bytes,
                block_tokens,
                salt,
                max_entries,
                queue_bytes,
                reserve_bytes,
                cold_quantize,
                cold_admit,
                ttl,
                pin_share,
            )
        )
        self._host = host_of(quantization)
        self._quantization = quantization
        self._memory_bytes = _recommended_bytes() if memory_bytes is None else memory_bytes
        self._n_prompt = 0
        self._last_fetch = FetchReport(0)
        self._copiers = Copiers()
        self._ranking = Ranking(self._store.cold.consult)
        self._chains = keys.Chains()
        self._fingerprints = Fingerprints()
        self._layouts: dict[BlockKey, Layout] = {}
        self._fetched: deque[_Fetched] = deque(maxlen=_FETCHED)
        self._weights: dict[Hashable, str] = {}
        self._objects: dict[Hashable, str] = {}
        self._bound: dict[Hashable, tuple[weakref.ref[Any], ...]] = {}
        self._lock = threading.RLock()
        # The store, not self: the finalizer must not keep the cache alive.
        self._close = weakref.finalize(self, self._store.close)

    # ---- upstream's contract

    def fetch_nearest_cache(
        self, model: Hashable, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """Private caches holding the longest known prefix of ``tokens``, and the tokens left.

        ``(None, tokens)`` on a miss. At least one token is always left.
        """
        with self._lock, self._contained("fetch"):
            ids = keys.as_tokens(tokens)
            self._last_fetch = FetchReport(len(ids))
            self._store.expire()
            caches, n = self._fetch(model, ids, _tenant(tokens), self._expiry(tokens))
            return caches, ids[n:].tolist()
        self._miss("fault")
        return None, list(tokens) if isinstance(tokens, list | tuple) else []

    def insert_cache(
        self,
        model: Hashable,
        tokens: Sequence[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Store the state of ``tokens``. Takes ownership of ``prompt_cache``.

        State that doesn't fit the key, or that can't be stored safely, is refused: counted, and
        logged once for each reason.
        """
        if not self._store.config.hot_bytes or not self._close.alive:
            return
        with self._lock, self._contained("insert"):
            self._store.expire()
            self._insert(model, tokens, prompt_cache, cache_type)
            return
        self._store.lose("fault")

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Give memory back: keep at most so many prompts and bytes hot. The data stays cold."""
        with self._lock, self._contained("trim"):
            if n_sequences is not None:
                self._store.hot.limit_entries(max(0, n_sequences))
            if n_bytes is not None:
                self._store.trim_to(n_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes that MLX holds because of this cache, blocks that wait to be written included."""
        return self._store.hot.n_bytes

    def __len__(self) -> int:
        """Inserted prompts that the hot tier still knows whole."""
        return self._store.hot.n_entries

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """``{"system" | "user" | "assistant": {"n_sequences", "n_bytes"}}`` of the hot tier."""
        return self._store.hot.stats_by_type()

    # ---- ours

    def bind(self, key: Hashable, *models: Any) -> None:
        """Tell the cache that ``models``, a target and maybe a draft, have just been loaded
        under ``key``.

        Takes their identity anew, from their files and from the weights in memory, and finds
        their cache layout by running them on one token, so that a fetch can only be answered
        with state of exactly this kind. Without it identity is that of the files, and the layout
        is that of the last insert or, after a restart, the only one stored. What was inserted
        before is not found any more under this key. On the generation thread.
        """
        with self._lock, self._contained("bind"):
            self._bound.pop(key, None)
            for name in filter(None, self._names(key)):
                self._fingerprints.renew(name)
            self._weights[key] = layout.digest(models)
            self._bound[key] = tuple(map(weakref.ref, models))
            try:
                self._layouts[_unsalted(self._base(key))] = layout.probe(models)
            except Refused as e:
                self._refuse(e)

    def key_of(self, *models: Any) -> Hashable | None:
        """The key under which these very objects, a target and maybe a draft, were bound last;
        None if they weren't.
        """
        with self._lock:
            for key, refs in reversed(self._bound.items()):
                if len(refs) == len(models) and all(
                    ref() is model for ref, model in zip(refs, models, strict=True)
                ):
                    return key
        return None

    @property
    def quantization(self) -> Quantization | None:
        """How the host is to quantize prompts on its way, as this cache was told."""
        return self._quantization

    def found(self, model: Hashable, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt are stored, maybe all, in a way that a fetch can use;
        reads no state. With a ``quantization`` it isn't known without reading: 0.
        """
        with self._lock, self._contained("found"):
            known = self._known_namespace(model, _tenant(tokens))
            if known is None or self._quantization is not None:
                return 0
            namespace, shape = known
            return self._match(self._chain(namespace, keys.as_tokens(tokens)), shape).n_tokens
        return 0

    def yield_memory(self, n_bytes: int, spared: Sequence[BlockKey] = ()) -> bool:
        """Demote until MLX can take ``n_bytes`` more within ``memory_bytes``; whether it can then.
        Blocks that are ``spared`` stay.

        `fetch_nearest_cache` and `insert_cache` do it for the prompt they are given. On the
        generation thread.
        """
        if self._memory_bytes is None:
            return True
        over = mx.get_active_memory() + n_bytes - self._memory_bytes
        if over <= 0:
            return True
        before = self.nbytes
        self._store.trim_to(max(0, before - over), spared)
        freed = before - self.nbytes
        self._store.counters.add("yielded", freed)
        # MLX keeps what is freed for its own use, and Metal counts it.
        mx.clear_cache()
        return freed >= over

    @property
    def directory(self) -> Path | None:
        """Where the cold tier is; None if there is none."""
        return self._store.config.cold_dir if self._store.cold.cap_bytes else None

    @property
    def last_fetch(self) -> FetchReport:
        """What the last `fetch_nearest_cache` found. On the thread that fetches: others may have
        fetched something else meanwhile.
        """
        return self._last_fetch

    def explain(self, model: Hashable, tokens: Sequence[int]) -> Explanation:
        """Why ``tokens`` would hit as far as they would if they were fetched now, or why they
        would miss. Reads no state, changes and counts nothing.

        Raises:
            TypeError, ValueError, OverflowError: ``tokens`` are not token ids.
        """
        ids = keys.as_tokens(tokens)
        with self._contained("explain"):
            return self._explain(model, ids, _tenant(tokens))
        return missed(UNREADABLE, "a fault that the log tells of", len(ids))

    def prefixes(self, n: int) -> list[PrefixUsage]:
        """The ``n`` prefixes in the cold tier that most requests found, the first the most.

        Reads the whole index, so of a large store it is what was found up to a few minutes ago.
        """
        return self._ranking.first(n)

    def stats(self) -> StoreStats:
        """A reading of tiers, queue and counters."""
        return self._store.stats()

    def details(self) -> StoreDetails:
        """A reading of what `stats` has no room for: distributions, and the last faults."""
        return self._store.details()

    def check(self) -> list[Problem]:
        """Faults in the tiers' books; an empty list if all is well. Reads the whole index."""
        return self._store.check()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty. True when all that was inserted since the last flush
        is committed, so False also if something had to be dropped; of what `cold_admit` keeps from
        the disk nothing is said.
        """
        done = self._store.flush(timeout)
        with self._lock:
            self._store.expire()
        return done

    def pin(self, model: Hashable, tokens: Sequence[int]) -> Pinned:
        """Protect the longest stored prefix of ``tokens`` from eviction, expiry and pruning, in all
        processes and for good, once what waits to be written is. In memory it may still give way.

        Any thread; waits for the disk.

        Raises:
            PinRefused: nothing of it is stored on disk, pins would take more than their share, or
                there is no cold tier.
            ColdTierUnavailable: the cold tier can't be written.
        """
        self._store.drain(_DRAIN_SECONDS)
        return self._store.pin(self._places(model, tokens))

    def unpin(self, model: Hashable, tokens: Sequence[int]) -> Pinned:
        """Protect the longest pinned prefix of ``tokens`` no longer. Any thread.

        Raises:
            PinRefused: nothing of it is pinned, or there is no cold tier.
            ColdTierUnavailable: the cold tier can't be written.
        """
        return self._store.unpin(self._places(model, tokens))

    def pin_id(self, prefix_id: str) -> Pinned:
        """`pin` by the id of the prefix: the first 6 hex digits or more of its last block's key."""
        self._store.drain(_DRAIN_SECONDS)
        return self._store.cold.pin_id(prefix_id)

    def unpin_id(self, prefix_id: str) -> Pinned:
        """`unpin` by the id of the prefix."""
        return self._store.cold.unpin_id(prefix_id)

    @property
    def pinned_bytes(self) -> int:
        """Bytes on disk that pinned prefixes take. Reads the index record of each of their blocks;
        nothing else waits meanwhile.
        """
        return self._store.cold.pinned_bytes

    def pinned_among(self, ids: Sequence[str]) -> frozenset[str]:
        """Those of these ids that can be unpinned. Any thread."""
        return self._store.cold.consult(lambda rows: pins.among(rows, ids)) or frozenset()

    def would_prune(self, criteria: Criteria) -> Pruned:
        """What `prune` would delete on disk as of now. Reads the whole index. Any thread."""
        plan = self._store.cold.consult(lambda rows: pruning.plan(rows, criteria))
        victims = list(plan.until(criteria.to_bytes)) if plan else []
        return Pruned(len(victims), sum(victim.blob_bytes for victim in victims))

    def prune(self, criteria: Criteria) -> Pruned:
        """Delete from both tiers what ``criteria`` mean, once what waits to be written is: see
        `TieredStore.prune`. Any thread; prompts are served meanwhile, and those that come may be
        stored.

        Raises:
            ColdTierUnavailable: the cold tier can't be read or written.
        """
        self._store.drain(_DRAIN_SECONDS)
        return self._store.prune(criteria, self._lock)

    def close(self) -> None:
        """Write what is queued, for at most ten seconds, and release everything. Idempotent."""
        self._close()

    def __enter__(self) -> TieredPromptCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the two paths

    def _fetch(
        self, model: Hashable, tokens: Tokens, tenant: bytes, expires: int
    ) -> tuple[list[Any] | None, int]:
        self._n_prompt = len(tokens)
        before = self._store.promote_seconds
        found = self._known_namespace(model, tenant)
        if found is None:
            return None, 0
        namespace, shape = found
        chain = self._chain(namespace, tokens[:-1])
        self.yield_memory(_COPIES * shape.bytes_of(len(tokens)), chain.keys)
        if self._quantization is None:
            hit = self._load(chain, shape, expires)
        else:
            how = self._quantization
            shape, hit = self._load_at_step(namespace, shape, tokens[:-1], how, expires)
        promote_seconds = self._store.promote_seconds - before
        if hit is None:
            self._note_fetch(namespace, tokens, 0)
            self._miss("absent", promote_seconds)
            return None, 0
        caches = layout.restore(shape, hit, len(tokens), self._copiers)
        self._note_fetch(namespace, tokens, hit.n_tokens)
        self._last_fetch = FetchReport(len(tokens), hit.n_hot, hit.n_cold, promote_seconds)
        root = keys.namespace_key(namespace)
        self._store.pace.spared(root, hit.n_tokens, promote_seconds)
        self._store.counters.add("hits", label="cold" if hit.n_cold else "hot")
        self._store.counters.add("hit_tokens_hot", hit.n_hot)
        self._store.counters.add("hit_tokens_cold", hit.n_cold)
        return caches, hit.n_tokens

    def _match(self, chain: Chain, shape: Layout) -> Match:
        if shape.is_sliced:
            return self._store.match(chain)
        return self._store.match_state(chain, shape.n_windows(chain.block_tokens))

    def _load(self, chain: Chain, shape: Layout, expires: int) -> Hit | None:
        for _ in range(_TRIES):
            match = self._match(chain, shape)
            if not self._is_worth(chain, shape, match):
                self._store.counters.add("recomputed")
                match = matching.only_hot(match, chain) if shape.is_sliced else Match()
            hit = self._store.load(chain, match, expires)
            if hit is None or layout.fits(shape, hit):
                return hit
        return None

    def _is_worth(self, chain: Chain, shape: Layout, match: Match) -> bool:
        """Whether what a match would promote is faster read than computed."""
        n_cold, n_whole = matching.cold_tokens(match, chain)
        if not n_cold:
            return True
        return self._store.pace.is_worth_promoting(chain.root, n_cold, shape.bytes_of(n_whole))

    def _load_at_step(
        self,
        namespace: Namespace,
        plain: Layout,
        tokens: Tokens,
        how: Quantization,
        expires: int,
    ) -> tuple[Layout, Hit | None]:
        """The longest hit that ends where a step of the prefill would, in the form that the state
        would have there.
        """
        packed = plain.quantized(how.group_size, how.bits)
        forms = ((packed, how.settled, len(tokens)), (plain, 1, how.start - 1))
        for shape, least, most in forms:
            form = replace(namespace, layout=shape.to_json())
            n = min(most, len(tokens)) // how.step * how.step
            while n >= least:
                hit = self._load(self._chain(form, tokens[:n]), shape, expires)
                found = hit.n_tokens if hit else 0
                if found == n:
                    return shape, hit
                n = found // how.step * how.step
        return plain, None

    def _explain(self, model: Hashable, ids: Tokens, tenant: bytes) -> Explanation:
        if not self._close.alive:
            return missed(UNREADABLE, "the cache is closed", len(ids))
        with self._lock:
            try:
                base = self._base(model, tenant)
            except (IdentityChanged, OSError, ValueError) as e:
                return missed(CHANGED, str(e), len(ids))
            shape = self._layouts.get(_unsalted(base))
        shapes = [shape] if shape else self._stored_layouts(base)
        if len(shapes) > 1:
            why = "several layouts are stored for this model, and which is its own isn't known yet"
            return missed(AMBIGUOUS, why, len(ids))
        forms = [Form(replace(base, layout=shape.to_json()), shape) for shape in shapes]
        inquiry = Inquiry(
            self._store.hot,
            self._store.cold,
            self._store.config.cold_dir,
            self._quantization,
            self._store.pace.is_faster_read,
        )
        return inquiry.explain(Wanted(forms[0].namespace if forms else base), ids, forms)

    def _insert(self, model: Hashable, tokens: Sequence[int], caches: list[Any], kind: str) -> None:
        try:
            if kind not in CACHE_TYPES:
                raise Refused("type", f"cache type {kind!r} is not one of {CACHE_TYPES}")
            shape = layout.inspect(caches, len(tokens))
            quantized = self._quantized(shape)
            base = self._base(model, _tenant(tokens))
            known = self._layouts.get(_unsalted(base))
            if known == shape:
                # It has its JSON, and all else that takes time to make.
                shape = known
            namespace = replace(base, layout=shape.to_json())
            chain = self._chain(namespace, keys.as_tokens(tokens))
            self._note_prefill(chain)
            if self._needs_snapshot(chain, shape, caches):
                chain = keys.with_snapshot(chain)
            lacking = self._store.lacking(chain)
            start = chain.span(lacking.start)[0]
            missing = shape.bytes_of(len(chain.tokens) - start)
            if lacking and not self.yield_memory(missing, chain.keys):
                raise Refused("memory", "MLX holds as much as it may without this prompt")
            # Windows may be lacking where blocks are not.
            if lacking or shape.window:
                layout.settle(caches, start, len(chain.tokens))
        except Refused as e:
            self._refuse(e)
            return
        except IdentityChanged as e:
            self._refuse(Refused("identity", str(e)))
            return
        if not quantized:
            self._layouts[_unsalted(base)] = shape
        self._store.register(namespace)
        expires = self._expiry(tokens)
        blocks = self._captured(chain, lacking, shape, caches, expires)
        self._store.put(chain, blocks, kind, expires)
        if shape.window:
            self._put_windows(chain, shape, caches, kind, expires)
        self._store.counters.add("inserts")

    def _quantized(self, shape: Layout) -> bool:
        """Whether state has been quantized by a host that does so on its way.

        Raises:
            Refused: it was while a shorter prompt was computed. Tokens that longer ones compute
                before they are quantized came after it here.
        """
        how = self._quantization
        if how is None or not shape.is_quantized:
            return False
        if self._n_prompt <= how.settled:
            raise Refused("quantized", "state was quantized before a whole step of the prefill")
        return True

    def _note_fetch(self, namespace: Namespace, tokens: Tokens, n_cached: int) -> None:
        root = keys.namespace_key(namespace)
        self._fetched.append(_Fetched(root, tokens, n_cached, time.monotonic()))

    def _note_prefill(self, chain: Chain) -> None:
        """Learn how fast a model computes from the first state of a prompt that comes back."""
        done = chain.tokens
        for fetched in self._fetched:
            n_new = len(done) - fetched.n_cached
            if n_new > 0 and fetched.root == chain.root and fetched.begins_with(done):
                self._fetched.remove(fetched)
                self._store.pace.prefilled(chain.root, n_new, time.monotonic() - fetched.since)
                return

    def _needs_snapshot(self, chain: Chain, shape: Layout, caches: list[Any]) -> bool:
        """Whether neither cutting nor windows will restore the end of ``chain``."""
        if shape.is_sliced:
            return False
        return not (shape.window and chain.ends_at_block) or layout.is_rotated(caches)

    def _captured(
        self, chain: Chain, lacking: range, shape: Layout, caches: list[Any], expires: int
    ) -> list[Block]:
        """New blocks of the chain, and its snapshot if it needs one, as far as there is room."""
        plan = SnapshotPlan(caches)
        specs = [shape.specs(b - a) if b > a else plan.specs() for a, b in map(chain.span, lacking)]
        wanted = lacking[: self._store.admit(chain, specs)]
        spans = [chain.span(i) for i in wanted]
        tensors = layout.capture(caches, shape, [(a, b) for a, b in spans if b > a])
        if spans and spans[-1][0] == spans[-1][1]:
            tensors.append(plan.capture())
        return [
            Block(
                chain.root,
                chain.parent(i),
                chain.keys[i],
                chain.tokens_of(i),
                spec,
                t,
                0 if chain.tokens_of(i) else _grade(chain, shape, spec),
                expires,
            )
            for i, spec, t in zip(wanted, specs, tensors, strict=False)
        ]

    def _put_windows(
        self, chain: Chain, shape: Layout, caches: list[Any], kind: str, expires: int
    ) -> None:
        """Store windows at the blocks of ``chain`` of which the rings still have the rows."""
        size = chain.block_tokens
        specs = shape.window_specs(size)
        first = -(-max(0, layout.first_held(caches) + min(size, shape.window) - size) // size)
        lacking = self._store.windowless(chain, first)
        wanted = self._store.admit_windows(chain, lacking, specs)
        stops = [chain.span(i)[1] for i in wanted]
        tensors = layout.capture_windows(caches, shape, size, stops)
        # What the end of a block needs is one thing, and in the whole of it worth something.
        every = shape.n_windows(size)
        n_bytes = every * sum(spec.n_bytes for spec in specs)
        grades = [
            policy.grade(n_bytes, policy.spared_between(g, 1) * every * size, shape.bytes_per_token)
            for g in range(1, chain.n_full // every + 2)
        ]
        windows = [
            Block(
                chain.root,
                chain.keys[i],
                keys.window_key(chain.keys[i]),
                keys.WINDOW_TOKENS,
                specs,
                t,
                grades[i // every],
                expires,
            )
            for i, t in zip(wanted, tensors, strict=True)
        ]
        self._store.put_windows(chain, windows, kind, n_windows=every, expires=expires)

    # ---- names

    def _base(self, model: Hashable, tenant: bytes = b"") -> Namespace:
        names = self._names(model)
        name, adapter, draft, *more = (*names, "", "", "")[: max(3, len(names))]
        prints = [self._fingerprints.of(n) if n else "" for n in (name, adapter, draft)]
        weights = self._weights.get(model, "")
        return Namespace(
            model=json.dumps([prints[0], weights, *more]) if weights or more else prints[0],
            adapter=prints[1],
            draft=prints[2],
            host=self._host,
            salt=keys.tenant_salt(self._store.config.salt, tenant),
            block_tokens=self._store.config.block_tokens,
            name=name,
            cold_quantize=self._store.config.cold_quantize,
        )

    def _names(self, model: Hashable) -> list[str]:
        """A model key's parts as names: upstream's are ``(path, adapter | None, draft | None)``.

        What is neither a path nor a string gets a name that holds in this cache only: its text
        could be another thing's in another process, or in this one later.
        """
        parts = model if isinstance(model, tuple) else (model,)
        names = []
        for part in parts:
            if part is None:
                names.append("")
            elif isinstance(part, str | os.PathLike):
                names.append(os.fsdecode(part))
            else:
                names.append(self._objects.setdefault(part, f"object {uuid.uuid4()}"))
        return names

    def _known_namespace(
        self, model: Hashable, tenant: bytes = b""
    ) -> tuple[Namespace, Layout] | None:
        """Where to look for a model's prompts: under the layout it was bound or last inserted
        with, else under the only one that the cold tier has for it.
        """
        try:
            base = self._base(model, tenant)
        except IdentityChanged as e:
            self._store.faults.note("identity", str(e))
            if self._miss("identity") == 1:
                _LOG.warning("tieredkv: %s; its prompts are misses until it is loaded again", e)
            return None
        shape = self._layouts.get(_unsalted(base))
        if shape is None:
            stored = self._stored_layouts(base)
            if len(stored) != 1:
                self._miss("ambiguous" if stored else "absent")
                return None
            shape = stored[0]
        return replace(base, layout=shape.to_json()), shape

    def _stored_layouts(self, base: Namespace) -> list[Layout]:
        """Those that the cold tier has for a model."""
        return [*map(Layout.from_json, self._store.cold.layouts(keys.base_key(base)))]

    def _places(self, model: Hashable, tokens: Sequence[int]) -> list[Place]:
        """Where the state of a prompt may be stored."""
        with self._lock:
            ids = keys.as_tokens(tokens)
            try:
                base = self._base(model, _tenant(tokens))
            except IdentityChanged:
                return []
            known = self._layouts.get(_unsalted(base))
            stored = [known.to_json()] if known else self._store.cold.layouts(keys.base_key(base))
            shapes = [Layout.from_json(text) for text in stored]
            if self._quantization is not None:
                how = self._quantization
                shapes += [s.quantized(how.group_size, how.bits) for s in shapes if known]
            return [
                Place(
                    self._chain(replace(base, layout=shape.to_json()), ids),
                    None if shape.is_sliced else shape.n_windows(base.block_tokens),
                )
                for shape in shapes
            ]

    def _expiry(self, tokens: Sequence[int]) -> int:
        """When a prompt that is used now expires, in Unix ns; 0 for never."""
        ttl = tokens.ttl if isinstance(tokens, SaltedPrompt) else None
        if ttl is None:
            ttl = self._store.config.ttl
        return 0 if ttl is None else time.time_ns() + int(min(ttl, _LONGEST_TTL) * 1e9)

    def _chain(self, namespace: Namespace, tokens: Tokens) -> Chain:
        root = keys.namespace_key(namespace)
        return self._chains.chain(root, tokens, namespace.block_tokens)

    # ---- faults

    def _miss(self, reason: str, promote_seconds: float = 0.0) -> int:
        """Count a miss; how many of the kind there were."""
        self._last_fetch = FetchReport(self._n_prompt, promote_seconds=promote_seconds, miss=reason)
        return self._store.counters.add("misses", label=reason)

    def _refuse(self, refusal: Refused) -> None:
        self._store.faults.note("refused", str(refusal))
        if self._store.counters.add("refused", label=refusal.reason) == 1:
            _LOG.warning("tieredkv: not stored: %s; only counted from here on", refusal)

    @contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        """The one place where any fault ends: told, counted, and a miss."""
        try:
            yield
        except Exception as e:  # noqa: BLE001 - the boundary: one here would kill the host
            self._store.faults.note(what, f"{what} failed: {type(e).__name__}: {e}")
            if self._store.counters.add("faults", label=what) == 1:
                _LOG.exception(
                    "tieredkv: %s failed; served without, only counted from here on", what
                )


def _tenant(tokens: Sequence[int]) -> bytes:
    return tokens.salt if isinstance(tokens, SaltedPrompt) else b""


def _unsalted(base: Namespace) -> BlockKey:
    """What the layout of a model's state depends on."""
    return keys.base_key(replace(base, salt=b""))


def _grade(chain: Chain, shape: Layout, specs: Sequence[TensorSpec]) -> int:
    """How the snapshot at the end of ``chain`` ages: as a checkpoint at a block's end, where
    messages seldom end.
    """
    n = len(chain.tokens)
    spared = policy.spared_between(n, chain.block_tokens) if chain.ends_at_block else n
    return policy.grade(sum(s.n_bytes for s in specs), spared, shape.bytes_per_token)
