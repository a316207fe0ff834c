"""Machines that share what they compute: through real engines, however those behave."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import caches
import pytest
import test_windows as windows
from caches import MODEL
from engines import S3, Proxy, Redis
from hypothesis import given
from hypothesis import strategies as st
from remotes import Shared, parcel

from tieredkv import Remote, SaltedPrompt, TieredPromptCache, keys
from tieredkv.core import BlockKey, Chain
from tieredkv.engines.base import EngineFault, RemoteRefused, Timeouts
from tieredkv.engines.opening import open_engine
from tieredkv.pace import Link
from tieredkv.tiers.remote import first_absent

TOKENS = list(range(100, 111))
PROMPT = [*TOKENS, 5, 6]
SECONDS = Timeouts(5.0, 5.0)
# What a request may take beyond its time limit: threads on a busy machine.
SLACK = 1.0

Url = Callable[..., str]


@pytest.fixture(params=["s3", "redis"])
def server(request: pytest.FixtureRequest) -> S3 | Redis:
    return request.getfixturevalue(request.param)


@pytest.fixture
def proxy(server: S3 | Redis) -> Iterator[Proxy]:
    with Proxy(server.port) as p:
        yield p


class Machine(TieredPromptCache):
    """A cache with a cold directory of its own."""

    def __init__(self, folder: Path, url: str, **more: Any) -> None:
        kinds = ("upload", "timeout", "rate", "key")
        remote = Remote(url, **{k: more.pop(k) for k in kinds if k in more})
        super().__init__(folder / uuid.uuid4().hex, block_tokens=4, remote=remote, **more)
        # A server probes the model for its layout; here the first insert tells.
        self.insert_cache(MODEL, [1], caches.make([1]))

    def compute(self, tokens: list[int], live: Sequence[Any] | None = None) -> None:
        self.insert_cache(MODEL, tokens, list(live or caches.make(tokens)))
        self.settle()

    def settle(self) -> None:
        assert self.flush(20)
        assert self._store.sharing is not None
        if self._store.sharing.uploader:
            assert self._store.sharing.uploader.flush(20)

    def hit(self, tokens: Sequence[int] = PROMPT) -> int:
        """Hit length, having checked the state."""
        found, rest = self.fetch_nearest_cache(MODEL, tokens)
        n = len(tokens) - len(rest)
        assert (found is None) == (n == 0)
        if found is not None:
            assert caches.holds(found, list(tokens)[:n])
        return n

    def timed_hit(self, tokens: Sequence[int] = PROMPT) -> tuple[int, float]:
        start = time.monotonic()
        return self.hit(tokens), time.monotonic() - start


# ---- what it is for


def test_what_one_machine_computes_all_others_have(server: S3 | Redis, tmp_path: Path) -> None:
    """The whole point. To the token where prompts part at the end of a stored one."""
    url = server.url()
    with Machine(tmp_path, url) as one:
        one.compute(TOKENS)
    with Machine(tmp_path, url) as two:
        assert two.hit() == 11
        assert two.hit([*TOKENS[:9], 7, 7]) == 9
        stats = two.stats()
        assert (stats.hit_tokens_remote, stats.hit_tokens_hot) == (11, 9)
        assert stats.remote.blocks_read == 3
        assert two.check() == []


def test_a_prompt_that_parts_inside_a_block_takes_what_is_before(
    server: S3 | Redis, tmp_path: Path
) -> None:
    """Tails grow with each turn: a system prompt's own tail is soon covered by a longer one."""
    url = server.url()
    with Machine(tmp_path, url) as one:
        one.compute(TOKENS)
    with Machine(tmp_path, url) as two:
        assert two.hit([*TOKENS[:7], 50, 51]) == 7


def test_what_came_from_there_is_kept_here_and_not_sent_back(
    server: S3 | Redis, tmp_path: Path
) -> None:
    """A second use must not cross the network, and a fleet must not upload each block N times."""
    url = server.url()
    with Machine(tmp_path, url) as one:
        one.compute(TOKENS)
    with Machine(tmp_path, url) as two:
        two.settle()
        before = two.stats().remote.blocks_written
        assert two.hit() == 11
        two.settle()
        two.trim_to(n_bytes=0)
        assert two.hit() == 11
        stats = two.stats()
        assert (stats.hit_tokens_remote, stats.hit_tokens_cold) == (11, 11)
        assert stats.remote.blocks_written == before


def test_a_prefix_partly_here_and_partly_there_is_one_hit(
    server: S3 | Redis, tmp_path: Path
) -> None:
    """Conversations move between machines: each has the turns that it answered."""
    url = server.url()
    with Machine(tmp_path, url) as one:
        one.compute(TOKENS)
    with Machine(tmp_path, url, upload="pinned") as two:
        two.compute(TOKENS[:4])
        two.trim_to(n_bytes=0)
        assert two.hit() == 11
        stats = two.stats()
        assert (stats.hit_tokens_cold, stats.hit_tokens_remote) == (4, 7)


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["plain", "sealed"])
def test_state_that_is_not_sliced_travels_too(
    redis: Redis, tmp_path: Path, key: bytes | None
) -> None:
    """Recurrent layers hit at snapshots only: those must be found and fetched."""
    url = redis.url()
    with Machine(tmp_path, url, key=key) as one:
        one.compute(TOKENS[:8], caches.make_hybrid(TOKENS[:8]))
        one.compute(TOKENS, caches.make_hybrid(TOKENS))
    with Machine(tmp_path, url, key=key) as two:
        two.compute([9, 9], caches.make_hybrid([9, 9]))
        for prompt, n in ((PROMPT, 11), ([*TOKENS[:9], 7], 8)):
            found, rest = two.fetch_nearest_cache(MODEL, prompt)
            assert len(prompt) - len(rest) == n
            assert caches.holds_hybrid(found, prompt[:n])


def test_windows_travel_too(server: S3 | Redis, tmp_path: Path) -> None:
    """Sliding windows hit at any block's end whose windows are there."""
    url, tokens = server.url(), [*range(40, 60)]
    with Machine(tmp_path, url) as one:
        windows.serve(one, tokens, [16, 20])
        one.settle()
    with Machine(tmp_path, url) as two:
        windows.serve(two, [1, 2, 3], [3])
        assert windows.hit(two, [*tokens[:14], 1, 2]) == 12
        assert two.stats().hit_tokens_remote == 12


def test_salts_keep_prompts_apart_there_too(server: S3 | Redis, tmp_path: Path) -> None:
    """A shared tier must not become the way around them."""
    url = server.url()
    with Machine(tmp_path, url) as one:
        prompt = SaltedPrompt(TOKENS, b"a")
        one.insert_cache(MODEL, prompt, caches.make(TOKENS))
        one.settle()
    with Machine(tmp_path, url) as two:
        assert two.hit() == two.hit(SaltedPrompt(PROMPT, b"b")) == 0
        assert two.hit(SaltedPrompt(PROMPT, b"a")) == 11


def test_only_who_has_the_key_finds_anything(server: S3 | Redis, tmp_path: Path) -> None:
    """And nobody is answered with what somebody without it put there."""
    url = server.url()
    with Machine(tmp_path, url, key=b"k" * 32) as one:
        one.compute(TOKENS)
    for key, n in ((b"x" * 32, 0), (None, 0), (b"k" * 32, 11)):
        with Machine(tmp_path, url, key=key, upload="pinned") as other:
            assert other.hit() == n


def test_a_prompt_that_is_here_asks_nobody(
    server: S3 | Redis, proxy: Proxy, tmp_path: Path
) -> None:
    """Most requests go on where the last one ended: those must not wait for a network."""
    with Machine(tmp_path, server.url(proxy.port)) as one:
        one.compute(TOKENS)
        proxy.hang = True
        n, seconds = one.timed_hit([*TOKENS, 5])
        assert n == 11
        assert seconds < SLACK
        assert one.stats().remote.skipped == {}


# ---- uploads


def test_on_second_use_uploads_nothing_before(redis: Redis, tmp_path: Path) -> None:
    """Most prompts never come back: whoever pays for the network sends the others alone."""
    url = redis.url()
    with Machine(tmp_path, url, upload="reused") as one:
        one.compute(TOKENS)
        assert one.stats().remote.blocks_written == 0
        assert one.hit() == 11
        one.settle()
        assert one.stats().remote.blocks_written == 3
    with Machine(tmp_path, url) as two:
        assert two.hit() == 11


def test_what_is_pinned_is_uploaded_whatever_the_policy(redis: Redis, tmp_path: Path) -> None:
    """Who pins a prefix says that it will be used: here or elsewhere."""
    url = redis.url()
    with Machine(tmp_path, url, upload="pinned") as one:
        one.compute(TOKENS)
        assert one.stats().remote.blocks_written == 0
        one.pin(MODEL, TOKENS)
        one.settle()
        assert one.stats().remote.blocks_written == 3
    with Machine(tmp_path, url) as two:
        assert two.hit() == 11


def test_what_is_to_be_forgotten_stays_on_its_machine(redis: Redis, tmp_path: Path) -> None:
    """No engine could be told in time; and what is fetched is forgotten when its user says so."""
    url = redis.url()
    with Machine(tmp_path, url) as one:
        one.insert_cache(MODEL, SaltedPrompt(TOKENS, ttl=3600), caches.make(TOKENS))
        one.settle()
        assert one.stats().remote.dropped == {"expires": 3}
        # Somebody else may keep it.
        longer = [*TOKENS, 7, 8, 9]
        one.compute(longer)
    with Machine(tmp_path, url) as two:
        assert two.hit(SaltedPrompt(PROMPT, ttl=2.0)) == 11
        time.sleep(2.05)
        two._store.sharing = None
        assert two.hit() == 0


def test_parents_that_are_gone_are_put_again(redis: Redis, tmp_path: Path) -> None:
    """A lifetime ends for the oldest first: without them what hangs on them can't be found."""
    url = redis.url()
    shared = Shared(url)
    shared.put(namespaced(TOKENS)[1:])
    shared.close()
    with Machine(tmp_path, url, upload="pinned") as other:
        assert other.hit() == 0
    with Machine(tmp_path, url) as one:
        one.compute(TOKENS)
    with Machine(tmp_path, url) as two:
        assert two.hit() == 11


def test_a_child_is_never_there_without_its_parents(tmp_path: Path) -> None:
    """What fails half-way must leave nothing that can't be reached."""
    with Redis("--maxmemory-policy", "noeviction") as full:
        url = full.url(prefix="p")
        shared = Shared(url)
        client = shared.tier._engine._reads
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 300_000)
        with Machine(tmp_path, url) as one:
            for i in range(40):
                tokens = [1000 + i] * 40
                one.insert_cache(MODEL, tokens, caches.make(tokens))
            assert one.flush(20)
            wait_for(lambda: one.stats().remote.faults.get("upload_full", 0) > 0)
            start = time.monotonic()
        # It doesn't wait for what can't be put.
        assert time.monotonic() - start < 5
        n_objects = len(client.keys("p/3/b/*"))
        assert 0 < n_objects < 41 * 10
        with Machine(tmp_path, url, upload="pinned") as two:
            reached = 0
            for i in range(40):
                tokens = [1000 + i] * 40
                reached += -(-two.hit([*tokens, 5]) // 4)
            # The others are the caches' first insert.
            assert n_objects - 1 <= reached + 1
        shared.close()


def test_a_rate_is_kept(redis: Redis, tmp_path: Path) -> None:
    """An office's line is for other things too."""
    with Machine(tmp_path, redis.url(), rate=4000) as one:
        start = time.monotonic()
        one.compute(list(range(200, 240)))
        seconds = time.monotonic() - start
        written = one.stats().remote.bytes_written
        # What may go out at once, and the last one's share.
        assert written - 2 * 4000 < 4000 * seconds


def test_without_a_cold_tier_it_is_only_read(redis: Redis, tmp_path: Path) -> None:
    """Blocks are read from there to be uploaded; a machine without a disk can still profit."""
    url = redis.url()
    with Machine(tmp_path, url) as one:
        one.compute(TOKENS)
    with TieredPromptCache(None, block_tokens=4, remote=Remote(url)) as two:
        two.insert_cache(MODEL, [1], caches.make([1]))
        found, rest = two.fetch_nearest_cache(MODEL, PROMPT)
        assert rest == [5, 6]
        assert caches.holds(found, TOKENS)


def test_redis_keys_expire_and_use_prolongs_them(redis: Redis) -> None:
    """Its server is the only one that clears up; and a parent must not go before its child."""
    shared = Shared(redis.url(ttl="100s", prefix="t"))
    c = caches.chain(TOKENS)
    shared.put(caches.blocks(c))
    client = shared.tier._engine._reads
    names = client.keys("t/3/*")
    # Three blocks, and what children each of their parents has.
    assert len(names) == 6
    assert all(0 < client.ttl(name) <= 200 for name in names)
    names = [k for k in names if k.startswith(b"t/3/b/")]
    for name in names:
        client.expire(name, 10)
    shared.tier.refresh(c.keys)
    assert all(client.ttl(name) > 90 for name in names)
    shared.close()


# ---- engines that fail


def fed(server: S3 | Redis, tokens: list[int], prefix: str = "") -> str:
    """A prefix that has the blocks of ``tokens``."""
    prefix = prefix or uuid.uuid4().hex
    shared = Shared(server.url(prefix=prefix))
    shared.put(namespaced(tokens))
    shared.close()
    return prefix


def namespaced(tokens: list[int]) -> list[Any]:
    """Blocks as a machine has them, made by one."""
    with TieredPromptCache(None, block_tokens=4) as cache:
        cache.insert_cache(MODEL, tokens, caches.make(tokens))
        return cache._store.hot.load(chain_of(cache, tokens).keys)


def chain_of(cache: TieredPromptCache, tokens: list[int]) -> Chain:
    found = cache._known_namespace(MODEL)
    assert found is not None
    return cache._chain(found[0], keys.as_tokens(tokens))


@pytest.mark.parametrize(("how", "n_here"), [("hang", 0), ("hang", 8), ("refuse", 0)])
def test_an_engine_that_does_not_answer_costs_a_bounded_time_and_then_none(
    server: S3 | Redis, proxy: Proxy, tmp_path: Path, how: str, n_here: int
) -> None:
    """Requests must be answered as if it weren't there, and almost as soon."""
    prefix = fed(server, TOKENS)
    with Machine(tmp_path, server.url(proxy.port, prefix), timeout=0.3, upload="pinned") as one:
        if n_here:
            # Then the first question needs no answer: that is no sign of life.
            one.compute(TOKENS[:n_here])
        setattr(proxy, how, True)
        waits = []
        for i in range(8):
            n, seconds = one.timed_hit([*TOKENS, i])
            assert n == n_here
            waits.append(seconds)
        assert max(waits) < 0.3 + SLACK
        assert sum(waits[3:]) < SLACK
        assert one.stats().remote.skipped["breaker"] >= 4
        setattr(proxy, how, False)
        wait_for(lambda: one.hit() == 11)


def test_an_engine_killed_in_the_middle_of_a_transfer_is_a_shorter_hit(
    server: S3 | Redis, proxy: Proxy, tmp_path: Path
) -> None:
    """What came before in order is used; what came in part must not be."""
    tokens = list(range(300, 340))
    prefix = fed(server, tokens)
    with Machine(tmp_path, server.url(proxy.port, prefix), timeout=2.0, upload="pinned") as one:
        for cut in (0, 500, 1500, 4000, 9000):
            proxy.cut = cut
            n, seconds = one.timed_hit([*tokens, 5])
            assert n in (0, *range(4, 44, 4))
            assert seconds < 2.0 + SLACK


def test_damage_in_transit_is_a_miss(server: S3 | Redis, proxy: Proxy, tmp_path: Path) -> None:
    """Neither TCP's checksum nor the engine's word is proof enough."""
    prefix = fed(server, TOKENS)
    with Machine(tmp_path, server.url(proxy.port, prefix), timeout=1.0, upload="pinned") as one:
        proxy.damage = 400
        assert one.hit() < 11
        assert sum(one.stats().remote.faults.values()) > 0


def test_damage_at_rest_is_a_miss_at_that_block(s3: S3, tmp_path: Path) -> None:
    """The blocks before it are good, and served."""
    prefix = fed(s3, TOKENS)
    last = namespaced(TOKENS)[1]
    (path,) = [p for p in s3.objects() if p.name == last.key.hex() and prefix in str(p)]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    with Machine(tmp_path, s3.url(prefix=prefix), upload="pinned") as one:
        assert one.hit() == 4
        assert one.stats().remote.faults == {"corrupt": 1}


def test_a_lying_engine_is_not_believed(redis: Redis, tmp_path: Path) -> None:
    """Objects under each other's names, of other namespaces, empty, huge: all misses."""
    prefix = fed(redis, TOKENS)
    url = redis.url(prefix=prefix)
    one, two, three = namespaced(TOKENS)
    shared = Shared(url)
    engine = shared.tier._engine
    names = [shared.tier._name(b.key) for b in (one, two, three)]
    good = [engine.get(name, 1 << 20) for name in names]
    foreign = replace(two, root=BlockKey(bytes(32)))
    lies = [good[0], b"", b"x" * 5000, good[2]]
    for lie, n in [(lie, 4) for lie in lies] + [(good[1], 11)]:
        engine.put(names[1], lie)
        with Machine(tmp_path, url, upload="pinned") as machine:
            assert machine.hit() == n
    shared.tier.put(two.key, parcel(foreign))
    with Machine(tmp_path, url, upload="pinned") as machine:
        assert machine.hit() == 4
    shared.close()


def test_a_library_that_panics_is_a_miss(redis: Redis, tmp_path: Path) -> None:
    """What Rust panics with is no `Exception`: it would end the thread that generates."""
    prefix = fed(redis, TOKENS)

    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic

    with Machine(tmp_path, redis.url(prefix=prefix)) as one:
        one.settle()
        engine = one._store.sharing.tier._engine
        get, engine.get, engine.exists = engine.get, panic, panic
        assert one.hit() == 0
        one.compute([*TOKENS, 7])
        del engine.exists
        engine.get = get
        assert one.hit([*TOKENS, 8, 9]) == 11
        assert one.stats().remote.faults["fault"] > 0


def test_a_slow_engine_gives_what_it_can_in_time(
    server: S3 | Redis, proxy: Proxy, tmp_path: Path
) -> None:
    """Blocks come in order: those that came are a prefix, and time is up when it is up."""
    tokens = list(range(400, 480))
    prefix = fed(server, tokens)
    with Machine(tmp_path, server.url(proxy.port, prefix), timeout=1.0, upload="pinned") as one:
        proxy.rate = 12_000
        n, seconds = one.timed_hit([*tokens, 5])
        assert n < 80
        assert seconds < 1.0 + SLACK


def test_a_full_bucket_is_read_all_the_same(tmp_path: Path) -> None:
    """What takes no uploads still has what others need."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "none", str(mount)], capture_output=True
    )
    if done.returncode:
        pytest.skip("a small disk can't be mounted here")
    try:
        with S3(mount) as server:
            prefix = fed(server, TOKENS)
            with Machine(tmp_path, server.url(prefix=prefix)) as one:
                tokens = list(range(600, 760))
                one.insert_cache(MODEL, tokens, caches.make(tokens))
                assert one.flush(20)
                wait_for(lambda: any("upload" in k for k in one.stats().remote.faults))
                assert one.hit() == 11
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_server_ends_quickly_though_its_engine_hangs(redis: Redis, tmp_path: Path) -> None:
    """An upload has a minute: a restart hasn't."""
    with Proxy(redis.port) as proxy:
        machine = Machine(tmp_path, redis.url(proxy.port), timeout=0.5)
        machine.settle()
        proxy.hang = True
        machine.insert_cache(MODEL, TOKENS, caches.make(TOKENS))
        assert machine.flush(20)
        start = time.monotonic()
        machine.close()
        assert time.monotonic() - start < 5


def wait_for(done: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- worth it or not


def test_what_is_faster_computed_is_not_asked_for(redis: Redis, tmp_path: Path) -> None:
    """At 100 ms a trip a short prompt is done before the first answer is back."""
    prefix = fed(redis, TOKENS)
    with (
        Proxy(redis.port, 0.05) as proxy,
        Machine(tmp_path, redis.url(proxy.port, prefix), upload="pinned") as one,
    ):
        chain = chain_of(one, TOKENS)
        assert one.hit([9, 9, 9]) == 0
        one._store.pace.prefilled(chain.root, 100, 0.1)
        assert (one.hit(), one.stats().remote.skipped) == (0, {"not_worth_asking": 1})
        # A slow model's are.
        for _ in range(20):
            one._store.pace.prefilled(chain.root, 100, 100.0)
        assert one.hit() == 11


def test_a_link_learns_what_is_worth_its_time() -> None:
    """What skips too much makes the tier useless, what skips too little makes it slow."""
    link = Link()
    assert link.is_worth_asking("m", 1000, 1.0)
    link.answered(0.1)
    link.moved("m", 1000, 10_000_000, 1.1)
    # A second for a thousand tokens, and two trips to ask.
    assert link.is_worth_asking("m", 1000, 2.0)
    assert not link.is_worth_asking("m", 1000, 1.1)
    assert link.is_worth_fetching("m", 1000, 1.2)
    assert not link.is_worth_fetching("m", 1000, 1.0)
    # Nothing is known of another model's state.
    assert link.is_worth_fetching("n", 1000, 0.2)


def test_a_link_on_which_nothing_is_ever_found_is_asked_now_and_then() -> None:
    """Asking costs each request its time; not asking at all would never learn better."""
    link = Link()
    link.answered(0.1)
    for _ in range(20):
        link.found(0.0)
    asked = [link.is_worth_asking("m", 1000, 10.0) for _ in range(64)]
    assert sum(asked) == 4


# ---- small parts


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.integers(2, 40))
def test_the_first_absent_is_found_in_few_rounds(
    low: int, size: int, n_held: int, width: int
) -> None:
    """A round is a trip: thirty for a long prompt would be seconds."""
    rounds = []

    def held(indices: Sequence[int]) -> list[bool]:
        assert len(indices) <= width
        assert indices[0] == low or rounds
        rounds.append(len(indices))
        return [i < low + n_held for i in indices]

    assert first_absent(low, low + size, width, held) == low + min(size, n_held)
    most = 1
    while width**most < size:
        most += 1
    assert len(rounds) <= (most if size else 0)


def test_engines_agree(server: S3 | Redis) -> None:
    """One contract, two servers."""
    engine = open_engine(server.url(), SECONDS)
    assert engine.get("a/b", 10) is None
    engine.put("a/b", b"12345")
    engine.put("a/b", b"1234")
    assert bytes(engine.get("a/b", 4) or b"") == b"1234"
    assert engine.get("a/b", 3) is None
    assert engine.exists(["a/b", "a/c", "a"]) == [True, False, False]
    assert engine.exists([]) == []
    assert engine.members("f", "", 10) == []
    for member in ("2b", "1a", ".x", "2a"):
        engine.enlist("f", member)
        engine.enlist("f", member)
    assert engine.members("f", "", 10) == [".x", "1a", "2a", "2b"]
    assert engine.members("f", "", 2) == [".x", "1a"]
    assert engine.members("f", "2", 10) == ["2a", "2b"]
    engine.refresh(["a/b", "a/c"])
    engine.close()


@pytest.mark.parametrize("kind", ["s3", "redis"])
def test_engines_raise_one_kind_of_error(kind: str, request: pytest.FixtureRequest) -> None:
    """What is not foreseen would end in the request's thread."""
    server = request.getfixturevalue(kind)
    with Proxy(server.port) as proxy:
        engine = open_engine(server.url(proxy.port), Timeouts(0.2, 0.2))
        for how in ("hang", "refuse"):
            setattr(proxy, how, True)
            calls: list[Callable[[], object]] = [
                lambda: engine.get("a", 1),
                lambda: engine.exists(["a"]),
                lambda: engine.put("a", b"x"),
                lambda: engine.enlist("f", "m"),
                lambda: engine.members("f", "", 1),
            ]
            for call in calls:
                with pytest.raises(EngineFault) as caught:
                    call()
                assert caught.value.kind in ("timeout", "unreachable")
            setattr(proxy, how, False)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://host/x", "no engine for ftp"),
        ("bucket", "no engine"),
        ("s3:///x", "not a URL like"),
        ("s3://b/x?endpoint=http://minio.example:9000", "allow_http"),
        ("s3://b/x?no_such_key=1", "no_such_key"),
        ("redis://u:secret@host/0", "rediss"),
        ("valkey://host/0", "valkeys"),
        ("redis://localhost/0?ttl=soon", "ttl"),
        ("redis://localhost/0?ttl=1d&ttl=2d", "not a URL like"),
        ("redis://localhost:port/0", "port"),
        ("redis://localhost/0?decode_responses=1", "decode_responses"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_with_what_to_do(url: str, says: str) -> None:
    """Found at the start, not in a log file a week later. Without its secrets."""
    with pytest.raises(RemoteRefused, match=says) as caught:
        open_engine(url, SECONDS)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module"), [("s3://b/x", "obstore"), ("redis://localhost", "redis")]
)
def test_a_missing_package_is_named(url: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are an extra: most people don't have them."""
    ours = ("tieredkv.engines.s3", "tieredkv.engines.redis")
    for name in [n for n in sys.modules if n.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    for name in [module, *(n for n in sys.modules if n.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RemoteRefused, match=r"pip install 'tieredkv\[remote\]'"):
        open_engine(url, SECONDS)
