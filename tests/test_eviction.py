"""The policy as the tiers run it: the simulator's victims, and what it knows in a store."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random

import caches
import pytest
from cold_blocks import NAMESPACE, PlainCodec, blocks_of, chain

from bench import sim, traces
from tieredkv import TieredPromptCache, hazard
from tieredkv.core import Block, BlockKey, Tier
from tieredkv.hazard import BLOCK, TAIL, Judge, Trial, kind_of
from tieredkv.tiers import ledger
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.environment import open_for_writing
from tieredkv.tiers.hot import HotTier
from tieredkv.tiers.ledger import CAP, CLOCK, COUNTERS, Ledger, Rows
from tieredkv.tiers.records import record_of

ROOM = 150
# A block's pages in the cold tier, and what fits them.
PAGE_TICKS, PAGE_BYTES = 4096, 4000
TICKS = 1024

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["cold_blocks", "tieredkv.tiers.cold"])


@cache
def trace(kind: str, n: int = 400) -> sim.Trace:
    """A made trace."""
    rows = traces.rows(traces.KINDS[kind](Random(3), n))
    return sim.parse(json.dumps(row) for row in rows)


class Simulated(sim.Learning):
    """The simulator's policy with as many ticks in a block as a tier has bytes."""

    def __init__(self, ticks: int, room: int = ROOM) -> None:
        self._BLOCK_TICKS = ticks
        super().__init__(room, 4, Trial())


def prompts(traced: sim.Trace) -> Iterator[tuple[sim.Request, list[Block]]]:
    """Requests that are shorter than the room, and their blocks: a tail is one token."""
    for request in traced.requests:
        path = request.path[: ROOM // 2]
        n_whole = min(request.n_whole, len(path))
        tokens = [t for id_ in path[:n_whole] for t in (id_, 1, 2, 3)]
        found = blocks_of(chain([*tokens, *path[n_whole:]]), TICKS)
        yield sim.Request(4 * len(path), path, n_whole), found


def leading(keys: Sequence[BlockKey], here: frozenset[BlockKey]) -> int:
    """How many keys from the first are there."""
    return next((i for i, key in enumerate(keys) if key not in here), len(keys))


def served(tier: Tier, found: Sequence[Block]) -> int:
    """Blocks that a tier had of a prompt, and now has all."""
    keys = [block.key for block in found]
    n = leading(keys, tier.present(keys))
    if n:
        tier.touch([keys[n - 1]])
    tier.saw(keys, n)
    if n < len(keys):
        assert tier.put(found) == len(keys)
    return n


@pytest.mark.parametrize("kind", ["bursts", "mixed", "scan", "phases"])
def test_the_memory_tier_evicts_what_the_simulator_does(kind: str) -> None:
    """If it failed, what is measured on traces would not be what is shipped."""
    tier, simulated = HotTier(ROOM * TICKS, block_tokens=4), Simulated(TICKS)
    for request, found in prompts(trace(kind)):
        assert served(tier, found) == simulated.serve(request)
    assert tier.n_blocks == len(simulated.parents) == ROOM
    assert tier.check() == []
    tier.close()


class Booked:
    """A ledger that is told how many blocks there may be."""

    def __init__(self, folder: Path) -> None:
        self._environment = open_for_writing(folder, 16 << 20)
        self._judge: Judge[BlockKey] = Judge(Trial())
        self._environment.write(lambda rows: rows.set_number(CAP, ROOM * PAGE_TICKS))

    def serve(self, found: Sequence[Block]) -> int:
        return self._environment.write(partial(self._serve, found))

    def _serve(self, found: Sequence[Block], rows: Ledger) -> int:
        keys = [block.key for block in found]
        n = leading(keys, frozenset(filter(rows.has, keys)))
        if n:
            rows.touch(keys[n - 1])
        self._judge.saw(keys, n, max(1, rows.n_blocks))
        spared = frozenset(keys)
        while rows.n_blocks + len(keys) - n > ROOM:
            assert rows.evict(self._judge, spared) is not None
        for block in found[n:]:
            record = record_of(block, PAGE_BYTES, bytes(16), 0)
            kind = kind_of(block.tokens, 4)
            rows.add(block.key, record, bytes(PAGE_BYTES), kind, 0, None)
        return n

    def close(self) -> None:
        self._environment.release()


@pytest.mark.parametrize("kind", ["bursts", "phases"])
def test_the_rows_on_disk_evict_what_the_simulator_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """If it failed, the order in the file would not be the policy's."""
    # The simulator's ghosts have no size.
    monkeypatch.setattr(ledger, "_GHOST_BYTES", 0.1)
    booked, simulated = Booked(tmp_path), Simulated(PAGE_TICKS)
    for request, found in prompts(trace(kind)):
        assert booked.serve(found) == simulated.serve(request)
    booked.close()


def test_the_tier_on_disk_finds_as_much_as_the_simulator(tmp_path: Path) -> None:
    """If it failed, batches, margins and pages would spoil the policy on their way."""
    tier = ColdTier(tmp_path, 4 << 20, PlainCodec(), block_tokens=4)
    requests = [
        (request, [replace_size(block, 12_000) for block in found])
        for request, found in prompts(trace("bursts"))
    ]
    hits, sizes = 0, []
    for _, found in requests:
        hits += served(tier, found)
        sizes.append(tier.n_blocks)
    room = sum(sizes[100:]) // len(sizes[100:])
    simulated, plain = Simulated(TICKS, room), sim.LeafLru(room)
    learned = sum(simulated.serve(request) for request, _ in requests)
    lru = sum(plain.serve(request) for request, _ in requests)
    assert tier.counters().evictions > 5 * room
    assert hits > 0.97 * learned
    assert hits > 1.02 * lru
    assert tier.check() == []
    tier.close()


def replace_size(block: Block, n_bytes: int) -> Block:
    """The same block with another amount of content."""
    (made,) = blocks_of(chain([1]), n_bytes)
    return replace(block, specs=made.specs, tensors=made.tensors)


# ---- what a store knows of returns


@pytest.fixture(params=["hot", "cold"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """A tier with room for some fifty blocks of 40,000 bytes."""
    if request.param == "hot":
        tier: Tier = HotTier(50 * 40_000, block_tokens=4)
    else:
        tier = ColdTier(tmp_path, 3 << 20, PlainCodec(), block_tokens=4)
    yield tier
    assert tier.check() == []
    tier.close()


def prompt(*numbers: int) -> list[Block]:
    """Blocks of a prompt, each named by a number."""
    return blocks_of(chain([t for n in numbers for t in (n, 1, 2, 3)]), 40_000)


def here(tier: Tier, found: Sequence[Block]) -> int:
    """How many of its blocks are there."""
    return len(tier.present([block.key for block in found]))


def test_a_shared_system_prompt_survives_a_burst_of_single_ones(small: Tier) -> None:
    """If it failed, every conversation would wait for its prefill after a batch job."""
    for user in range(12):
        served(small, prompt(1, 2, 3, 100 + user))
    for i in range(400):
        served(small, prompt(1000 + i))
    assert here(small, prompt(1, 2, 3)) == 3


def test_while_nothing_is_known_the_least_recently_used_leaves_first(small: Tier) -> None:
    """If it failed, the first days of a store would be worse than with the simplest policy."""
    dice = Random(5)
    put = [prompt(*range(100 * i, 100 * i + dice.randrange(1, 5))) for i in range(1, 12)]
    for found in put:
        served(small, found)
    while small.n_blocks:
        small.trim_to(small.n_bytes - 1)
        left = [here(small, found) for found in put]
        first = next((i for i, n in enumerate(left) if n), len(put))
        assert left[first + 1 :] == [len(found) for found in put[first + 1 :]]


def open_cold(folder: Path) -> ColdTier:
    """A tier of a process."""
    tier = ColdTier(folder, 3 << 20, PlainCodec(), block_tokens=4)
    tier.register(NAMESPACE)
    return tier


def learn(folder: Path, first: int) -> None:
    """Use prompts in a process of its own."""
    tier = open_cold(folder)
    for i in range(first, first + 10):
        served(tier, prompt(i, 7))
        served(tier, prompt(i, 7, 8))
    tier.close()


def counted(folder: Path) -> hazard.Counters:
    """What was counted in a store."""
    tier = open_cold(folder)
    found = tier._read(Rows.counters, None)
    tier.close()
    assert found is not None
    return found


def test_what_was_learned_survives_a_restart_and_adds_up_over_processes(tmp_path: Path) -> None:
    """If it failed, each process would learn alone, and each of its starts would be the first."""
    for first in (100, 200):
        process = PROCESSES.Process(target=learn, args=(tmp_path, first))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    # Ten each, a little faded.
    both = counted(tmp_path).returns.sum()
    assert 17 < both <= 20
    tier = open_cold(tmp_path)
    served(tier, prompt(209, 7, 8, 9))
    tier.close()
    assert counted(tmp_path).returns.sum() == pytest.approx(both + 1, abs=0.01)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:9] + bytes((data[9] ^ 1,)) + data[10:],
        lambda data: data[:-1],
        lambda _: b"",
    ],
)
def test_damaged_counters_are_begun_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """If it failed, a flipped bit would cost the store, or decide what leaves."""
    tier = open_cold(tmp_path)
    for i in range(60):
        served(tier, prompt(i, 7))

    def change(rows: Ledger) -> None:
        data = bytes(rows._txn.get(COUNTERS, db=rows._dbs.meta))
        rows._txn.put(COUNTERS, damage(data), db=rows._dbs.meta)

    environment = tier._environment
    assert environment is not None
    environment.write(change)
    clock = environment.read(lambda rows: rows.number(CLOCK))
    for i in range(60, 120):
        served(tier, prompt(i, 7))
    assert tier.counters().faults == {}
    assert environment.read(Rows.counters).since == clock
    assert tier.check() == []
    tier.close()


def test_counters_of_quite_another_cap_are_begun_anew(tmp_path: Path) -> None:
    """If it failed, ages would be told in turnovers of a tier that isn't that large."""
    learn(tmp_path, 100)
    tier = ColdTier(tmp_path, 64 << 20, PlainCodec(), block_tokens=4)
    found = tier._read(Rows.counters, None)
    assert (found.span, found.returns.sum()) == (64 << 20, 0)
    tier.close()


def standings(tier: ColdTier, keys: Sequence[BlockKey]) -> list[hazard.Standing]:
    """Of blocks in the cold tier."""
    return tier._read(lambda rows: [rows.use(key).standing for key in keys], [])


def test_each_request_of_a_conversation_is_one_turn_in_both_tiers(tmp_path: Path) -> None:
    """If it failed, a request with checkpoints, a tail and a reply would look like several, or
    the next turn like none.
    """
    cache = TieredPromptCache(tmp_path, hot_bytes=1 << 20, cold_bytes=8 << 20, block_tokens=4)
    tokens = list(range(10))
    for turn in range(1, 6):
        cache.fetch_nearest_cache(caches.MODEL, [*tokens])
        for n in (8, len(tokens), len(tokens) + 7):
            part = [*tokens, *range(100 * turn, 100 * turn + 7)][:n]
            cache.insert_cache(caches.MODEL, part, caches.make(part))
        tokens = [*part, 50 + turn]
        assert cache.flush(10)
        store = cache._store
        (entry,) = store.hot._entries
        path = [entry]
        while (above := store.hot.parent(path[-1])) is not None:
            path.append(above)
        for tail, end, *inner in (
            [store.hot.standing(key) for key in path],
            standings(store.cold, path),
        ):
            assert tail.kind == TAIL
            assert (end.kind, end.turn, end.awaited) == (BLOCK, turn, True)
            assert not any(standing.awaited or standing.branches for standing in inner)
    cache.close()


def test_a_state_that_is_used_leaves_its_block_at_its_turn(tmp_path: Path) -> None:
    """If it failed, conversations with models that need snapshots would never get on."""
    cache = TieredPromptCache(tmp_path, hot_bytes=1 << 20, cold_bytes=8 << 20, block_tokens=4)
    tokens = list(range(8))
    for turn in range(1, 4):
        cache.fetch_nearest_cache(caches.MODEL, [*tokens, 1])
        cache.insert_cache(caches.MODEL, tokens, caches.make_hybrid(tokens))
        hot = cache._store.hot
        turns = [n.standing.turn for n in hot._nodes.values() if n.standing.kind == BLOCK]
        states = [n.standing for n in hot._nodes.values() if n.standing.kind == hazard.STATE]
        assert max(turns) == turn
        assert sorted(s.refs for s in states) == [0] + [1] * (turn - 1)
        tokens = [*tokens, *range(20 * turn, 20 * turn + 4)]
    cache.close()
