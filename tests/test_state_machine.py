"""Anything that may happen to a prompt cache, in any order, against what was inserted."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import caches
from caches import MODEL
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tieredkv import PinRefused, SaltedPrompt, TieredPromptCache
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.records import piece_key

BLOCK = 4
ONE = BLOCK * 128
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=18)
TENANTS = st.sampled_from([b"", b"t"])
KINDS = st.sampled_from(["assistant", "user", "system"])
HANDLES = st.integers(0, 1)
TTLS = st.sampled_from([None, 1e-3, 1e6])


class Caches(RuleBasedStateMachine):
    """Two caches on one directory, which models of attention and hybrid ones are served from.

    A hit must be state that somebody inserted for that tenant, at exactly its tokens; how long it
    is depends on what was evicted, so of that only what can't be is checked.
    """

    @initialize(hot_blocks=st.integers(3, 40))
    def open(self, hot_blocks: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.hot_bytes = hot_blocks * ONE
        self.handles = [self.opened(), self.opened()]
        self.inserted: dict[bytes, set[tuple[int, ...]]] = {b"": set(), b"t": set()}
        self.damaged = 0

    def opened(self) -> TieredPromptCache:
        return TieredPromptCache(
            self.folder, hot_bytes=self.hot_bytes, cold_bytes=8 << 20, block_tokens=BLOCK
        )

    def teardown(self) -> None:
        for cache in getattr(self, "handles", ()):
            cache.close()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    @rule(i=HANDLES, tokens=PROMPTS, tenant=TENANTS, kind=KINDS, ttl=TTLS)
    def insert(
        self, i: int, tokens: list[int], tenant: bytes, kind: str, ttl: float | None
    ) -> None:
        self.handles[i].insert_cache(
            MODEL, SaltedPrompt(tokens, tenant, ttl), caches.make(tokens), cache_type=kind
        )
        self.inserted[tenant].add(tuple(tokens))

    @rule(i=HANDLES, tokens=PROMPTS, tenant=TENANTS, ttl=TTLS)
    def insert_hybrid(self, i: int, tokens: list[int], tenant: bytes, ttl: float | None) -> None:
        prompt = SaltedPrompt(tokens, tenant + b"h", ttl)
        self.handles[i].insert_cache(("hybrid", None, None), prompt, caches.make_hybrid(tokens))
        self.inserted.setdefault(tenant + b"h", set()).add(tuple(tokens))

    @rule(i=HANDLES, tokens=PROMPTS, tenant=TENANTS, ttl=TTLS)
    def fetch(self, i: int, tokens: list[int], tenant: bytes, ttl: float | None) -> None:
        prompt = SaltedPrompt(tokens, tenant, ttl)
        found, rest = self.handles[i].fetch_nearest_cache(MODEL, prompt)
        n = len(tokens) - len(rest)
        assert rest == tokens[n:]
        assert len(rest) >= 1
        assert (found is None) == (n == 0)
        if found is not None:
            assert caches.holds(found, tokens[:n])
            assert any(list(p[:n]) == tokens[:n] for p in self.inserted[tenant])

    @rule(i=HANDLES, tokens=PROMPTS, tenant=TENANTS)
    def fetch_hybrid(self, i: int, tokens: list[int], tenant: bytes) -> None:
        prompt = SaltedPrompt(tokens, tenant + b"h")
        found, rest = self.handles[i].fetch_nearest_cache(("hybrid", None, None), prompt)
        n = len(tokens) - len(rest)
        if found is not None:
            assert caches.holds_hybrid(found, tokens[:n])
            assert tuple(tokens[:n]) in self.inserted[tenant + b"h"]

    @rule(i=HANDLES, n_bytes=st.integers(0, 20 * ONE), n=st.none() | st.integers(0, 4))
    def trim(self, i: int, n_bytes: int, n: int | None) -> None:
        self.handles[i].trim_to(n_sequences=n, n_bytes=n_bytes)

    @rule(i=HANDLES, n_bytes=st.integers(1 << 16, 4 << 20))
    def evict_from_disk(self, i: int, n_bytes: int) -> None:
        self.handles[i]._store.cold.trim_to(n_bytes)

    @rule(i=HANDLES)
    def sweep(self, i: int) -> None:
        self.handles[i]._store.cold.expire(time.time_ns())

    @rule(i=HANDLES, tokens=PROMPTS, tenant=TENANTS, hybrid=st.booleans())
    def pin(self, i: int, tokens: list[int], tenant: bytes, hybrid: bool) -> None:
        model = ("hybrid", None, None) if hybrid else MODEL
        prompt = SaltedPrompt(tokens, tenant + b"h" * hybrid)
        with suppress(PinRefused):
            pinned = self.handles[i].pin(model, prompt)
            self.handles[1 - i]._store.cold.trim_to(0)
            assert pinned.id in {p.id for p in self.handles[i]._store.cold.pins()}
            assert self.handles[1 - i]._store.cold.n_blocks >= pinned.n_tokens // BLOCK

    @rule(i=HANDLES, tokens=PROMPTS, tenant=TENANTS)
    def unpin(self, i: int, tokens: list[int], tenant: bytes) -> None:
        with suppress(PinRefused):
            self.handles[i].unpin(MODEL, SaltedPrompt(tokens, tenant))

    @rule(i=HANDLES, model=st.sampled_from([None, "model", "hybrid"]), pinned=st.booleans())
    def prune(self, i: int, model: str | None, pinned: bool) -> None:
        self.handles[i].prune(Criteria(model=model, pinned=pinned))

    @rule(i=HANDLES)
    def flush(self, i: int) -> None:
        self.handles[i].flush(10)
        assert self.handles[i].stats().queue_blocks == 0

    @rule(i=HANDLES)
    def reopen(self, i: int) -> None:
        self.handles[i].close()
        self.handles[i] = self.opened()

    @rule(i=HANDLES, seed=st.integers(0, 1 << 16))
    def damage(self, i: int, seed: int) -> None:
        """Turn over a byte of a block on disk, behind everybody's back."""
        dice = random.Random(seed)
        cold = self.handles[i]._store.cold

        def flip(ledger, _done):
            found = [(key, record) for key, record in _records(ledger)]
            if not found:
                return
            key, record = dice.choice(found)
            blob = bytearray(ledger.blob(key, record) or b"\0")
            blob[dice.randrange(len(blob))] ^= 1 << dice.randrange(8)
            ledger._txn.put(piece_key(key, 0), bytes(blob), db=ledger._dbs.blob)

        cold._write(flip)
        self.damaged += 1

    @invariant()
    def books_are_right(self) -> None:
        for cache in getattr(self, "handles", ()):
            assert cache.check() == []
            assert cache.nbytes <= self.hot_bytes
            stats = cache.stats()
            assert stats.cold.n_bytes <= stats.cold.cap_bytes
            faults = dict(stats.faults)
            assert faults.pop("corrupt", 0) <= self.damaged
            assert faults == {}


def _records(ledger):
    for key, _ in ledger.records():
        yield key, ledger.record(key)


Caches.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestCaches = Caches.TestCase
