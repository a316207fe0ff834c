"""Prompts that are forgotten some time after their last use."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import caches
import cold_blocks
import pytest
import tiny
from caches import MODEL
from cold_blocks import PlainCodec
from server import Local

from tieredkv import SaltedPrompt, TieredPromptCache
from tieredkv.core import Block
from tieredkv.tiers import cold, writer
from tieredkv.tiers.cold import ColdTier

TOKENS = list(range(10))
YEAR = 365 * 86400.0


class Clock:
    """Time that goes on when it is told to, for all that asks what time it is."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._ahead = 0
        real = time.time_ns
        patch.setattr(time, "time_ns", lambda: real() + self._ahead)

    def go_on(self, seconds: float) -> None:
        self._ahead += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(writer, "_SWEEP_SECONDS", 0.05)
    return Clock(monkeypatch)


class Watched(ColdTier):
    """Has blocks queued while it deletes others, and tells when it gets them."""

    submit: Callable[[], object] | None = None
    n_left = 0

    def expire(self, now: int) -> int:
        n = super().expire(now)
        if n and self.submit is not None:
            self.submit()
            self.submit = None
        return n

    def put(self, blocks: Sequence[Block]) -> int:
        self.n_left = self.n_blocks
        return super().put(blocks)


def test_what_waits_is_written_before_all_that_has_expired_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all of a large store expires at once its deletion takes minutes, in which the queue
    would be full and what is computed lost.
    """
    monkeypatch.setattr(writer, "_SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(cold, "_MAX_EXPIRED_BLOCKS", 5)
    with closing(Watched(tmp_path, 64 << 20, PlainCodec())) as tier:
        past = [replace(b, expires=1) for i in range(40) for b in cold_blocks.blocks([i])]
        fresh = cold_blocks.blocks([1000])
        assert tier.put(past) == 40
        writing = writer.Writer(tier, 1 << 20, lambda _keys, _n: None)
        tier.submit = lambda: writing.submit(fresh)
        until(lambda: tier.n_blocks == 1)
        assert writing.close(10) == 0
        assert 30 < tier.n_left <= 35
        assert tier.present([fresh[0].key])
        assert tier.check() == []


Open = Callable[..., TieredPromptCache]


@pytest.fixture(params=["memory", "disk"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    made: list[TieredPromptCache] = []

    def open_cache(**more: Any) -> TieredPromptCache:
        folder = tmp_path if request.param == "disk" else None
        made.append(TieredPromptCache(folder, block_tokens=4, **more))
        return made[-1]

    yield open_cache
    for cache in made:
        assert cache.check() == []
        assert cache.stats().faults == {}
        cache.close()


def insert(cache: TieredPromptCache, tokens: list[int], ttl: float | None = None) -> None:
    cache.insert_cache(MODEL, SaltedPrompt(tokens, ttl=ttl), caches.make(tokens))


def hit(cache: TieredPromptCache, tokens: list[int], ttl: float | None = None) -> int:
    found, rest = cache.fetch_nearest_cache(MODEL, SaltedPrompt([*tokens, 7777], ttl=ttl))
    n = len(tokens) + 1 - len(rest)
    assert found is None or caches.holds(found, tokens[:n])
    return n


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_empty(cache: TieredPromptCache) -> bool:
    # What waited to be written is freed by a call.
    cache.flush()
    return cache.stats().cold.n_blocks == cache.stats().hot.n_blocks == 0


def test_a_prompt_is_a_miss_once_its_time_has_passed(opened: Open, clock: Clock) -> None:
    """What somebody wants forgotten would go on being answered faster than the rest."""
    cache = opened()
    insert(cache, TOKENS, ttl=60)
    clock.go_on(59)
    assert cache.fetch_nearest_cache(MODEL, [7777])[0] is None
    clock.go_on(2)
    assert hit(cache, TOKENS, ttl=60) == 0
    until(lambda: is_empty(cache))
    assert cache.stats().expired >= 3


def test_a_hit_renews(opened: Open, clock: Clock) -> None:
    """A conversation in use would vanish while it goes on."""
    cache = opened()
    insert(cache, TOKENS, ttl=60)
    for _ in range(3):
        clock.go_on(40)
        assert hit(cache, TOKENS, ttl=60) == 10
    clock.go_on(61)
    assert hit(cache, TOKENS) == 0


def test_the_cache_has_a_time_for_all_prompts(opened: Open, clock: Clock) -> None:
    """An operator could not promise that prompts are gone after a while."""
    cache = opened(ttl=60)
    cache.insert_cache(MODEL, TOKENS, caches.make(TOKENS))
    insert(cache, [50, 51, 52], ttl=YEAR)
    clock.go_on(61)
    assert [hit(cache, TOKENS), hit(cache, [50, 51, 52], ttl=YEAR)] == [0, 3]


def test_who_says_nothing_keeps_what_others_would_forget(opened: Open, clock: Clock) -> None:
    """Somebody's prompt would be lost because another has asked the same for a moment."""
    cache = opened()
    insert(cache, TOKENS, ttl=60)
    insert(cache, TOKENS)
    cache.flush()
    clock.go_on(YEAR)
    assert hit(cache, TOKENS) == 10
    cache.flush()
    cache.trim_to(n_bytes=0)
    assert hit(cache, TOKENS) == (10 if cache.stats().cold.cap_bytes else 0)


@pytest.mark.parametrize("seconds", [0, 61])
@pytest.mark.parametrize("n", [8, 10])
def test_what_is_computed_again_is_kept_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, seconds: float
) -> None:
    """What is there, but not for long, counts as there: what is put again would go with it."""
    monkeypatch.setattr(writer, "_SWEEP_SECONDS", 1000)
    clock = Clock(monkeypatch)
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, TOKENS[:8], ttl=60)
        cache.flush()
        cache.trim_to(n_bytes=0)
        clock.go_on(seconds)
        insert(cache, TOKENS[:n])
        assert cache.flush()
        clock.go_on(61)
        cache._store.cold.expire(time.time_ns())
        cache.trim_to(n_bytes=0)
        assert hit(cache, TOKENS[:n]) == n
        assert cache.check() == []


def test_what_was_promoted_lives_in_memory_as_long_as_on_disk(tmp_path: Path, clock: Clock) -> None:
    """Each hit would read from disk what memory had until a moment ago."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, TOKENS, ttl=60)
        cache.flush()
        cache.trim_to(n_bytes=0)
        clock.go_on(40)
        assert hit(cache, TOKENS, ttl=60) == 10
        promotes = cache.stats().promotes
        clock.go_on(40)
        assert hit(cache, TOKENS, ttl=60) == 10
        assert cache.stats().promotes == promotes > 0


def test_windows_and_snapshots_expire_with_their_prompt(opened: Open, clock: Clock) -> None:
    """Half of a prompt would stay for ever; or it would be found and not be restorable."""
    cache = opened()
    prompt = SaltedPrompt([*TOKENS, 1], ttl=60)
    cache.insert_cache(MODEL, prompt[:-1], caches.make_hybrid(TOKENS))
    for _ in range(2):
        clock.go_on(40)
        found, rest = cache.fetch_nearest_cache(MODEL, prompt)
        assert (found is not None, rest) == (True, [1])
    clock.go_on(61)
    assert cache.fetch_nearest_cache(MODEL, [*TOKENS, 1])[0] is None
    until(lambda: is_empty(cache))


def test_what_expires_while_it_waits_is_not_found_and_goes(tmp_path: Path, clock: Clock) -> None:
    """A slow disk would bring back what was to be forgotten."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        tier = cache._store.cold
        put, asked = tier.put, []

        def slow(blocks: Any) -> int:
            asked.append(len(blocks))
            until(lambda: "go" in asked)
            return put(blocks)

        tier.put = slow  # type: ignore[method-assign] # as slow as a disk can be
        insert(cache, TOKENS, ttl=60)
        until(lambda: bool(asked))
        clock.go_on(61)
        assert hit(cache, TOKENS) == 0
        assert cache.check() == []
        asked.append("go")
        cache.flush()
        assert hit(cache, TOKENS) == 0
        until(lambda: is_empty(cache))


def test_memory_of_expiries_does_not_grow_with_what_has_left() -> None:
    """A server that runs for months would fill with the names of what it has evicted."""
    with TieredPromptCache(block_tokens=4, hot_bytes=8 << 10, ttl=YEAR) as cache:
        for i in range(400):
            cache.insert_cache(MODEL, [i, i + 1, i + 2], caches.make([i, i + 1, i + 2]))
        assert cache.stats().hot.n_blocks < 30
        assert len(cache._store.hot._due) < 200


@pytest.mark.parametrize("ttl", [0, -1, math.nan, math.inf])
def test_a_time_that_makes_no_sense_is_refused(ttl: float) -> None:
    """Prompts would expire at once, or never, without a word."""
    with pytest.raises(ValueError, match="ttl"):
        SaltedPrompt([1], ttl=ttl)
    with pytest.raises(ValueError, match="ttl"):
        TieredPromptCache(ttl=ttl)


def test_the_longest_time_has_room_in_a_row(tmp_path: Path) -> None:
    """A client could end the writing of all others with a number."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, TOKENS, ttl=sys.float_info.max)
        assert cache.flush()
        assert hit(cache, TOKENS, ttl=sys.float_info.max) == 10


def test_a_slice_of_a_prompt_lives_as_long() -> None:
    """Hosts insert slices of what they fetched."""
    assert SaltedPrompt([1, 2, 3], b"s", 5)[1:].ttl == 5


# ---- through a server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "qwen3", head_dim=32)


TEXT = "one two three " * 60


def test_a_request_says_when_its_prompt_is_to_be_forgotten(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client could not keep its prompts from staying on somebody's disk."""
    monkeypatch.setattr(writer, "_SWEEP_SECONDS", 0.1)
    with Local(model, tmp_path) as server:
        # One prompt is served alone, the other in a batch.
        assert server.chat(TEXT, cache_ttl=1, seed=1).n_cached == 0
        assert server.chat("batched " + TEXT, cache_ttl=1).n_cached < 20
        kept = "other " + TEXT
        assert server.chat(kept, cache_ttl="30m").n_cached < 20
        server.cache.flush()
        time.sleep(1.1)
        assert server.chat(TEXT, cache_ttl=1, seed=1).n_cached < 20
        assert server.chat("batched " + TEXT, cache_ttl=1).n_cached < 20
        assert server.chat(kept).n_cached > 500
        server.cache.flush()
        until(lambda: server.cache.stats().expired > 0)
        assert server.cache.check() == []


def test_a_server_forgets_what_was_not_used_for_so_long(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag would do nothing, and everything stay on disk."""
    monkeypatch.setattr(writer, "_SWEEP_SECONDS", 0.1)
    with Local(model, tmp_path, "--prompt-cache-ttl", "1s") as server:
        server.chat(TEXT)
        server.cache.flush()
        until(lambda: server.cache.stats().cold.n_blocks == 0)
        assert server.chat(TEXT).n_cached == 0


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Local]:
    with Local(model, "none") as server:
        yield server


@pytest.mark.parametrize("ttl", [0, -5, "soon", "", "0s", True, [60], {"s": 1}, math.inf, 10**400])
def test_a_time_that_is_none_is_the_clients_error(served: Local, ttl: object) -> None:
    """A prompt that was to be forgotten would be kept, since nobody understood for how long."""
    reply = served.post({"messages": [{"role": "user", "content": "a"}], "cache_ttl": ttl})
    assert reply.status == 400
    assert "cache_ttl" in reply.body["error"]
