"""Prefixes that people pin: kept on disk whatever happens, within their share."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import caches
import pytest
from caches import MODEL
from cold_blocks import NAMESPACE, PlainCodec, blocks, blocks_of, chain
from test_maintenance import N_BYTES, plant, rows, run, state_of

from tieredkv import PinRefused, TieredPromptCache, keys
from tieredkv.codec import PlaneCodec
from tieredkv.core import BlockKey, Place
from tieredkv.tiers import cold
from tieredkv.tiers.cold import ColdReader, ColdTier
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.rebuild import rebuild
from tieredkv.tiers.records import piece_key

CAP = 64 << 20
A = chain(range(10))
B = chain(range(100, 110))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def tier(folder: Path) -> Iterator[ColdTier]:
    tier = ColdTier(folder, CAP, PlaneCodec(), block_tokens=4)
    tier.register(NAMESPACE)
    for c in (A, B):
        assert tier.put(blocks_of(c, N_BYTES)) == 3
    yield tier
    assert tier.check() == []
    tier.close()


def there(tier: ColdTier, *chains: Any) -> list[int]:
    """How many blocks of each chain are there."""
    return [len(tier.load(c.keys)) for c in chains]


def pins_of(tier: ColdTier) -> set[bytes]:
    return set(rows(tier, "pin"))


# ---- what a pin withstands


def test_a_pinned_prefix_outlives_an_eviction_that_takes_all_else(tier: ColdTier) -> None:
    """What people want to keep would go as soon as it is idle."""
    pinned = tier.pin([Place(A)])
    assert (pinned.id, pinned.n_tokens) == (keys.prefix_id(A.keys[-1]), 10)
    assert pinned.n_bytes == tier.pinned_bytes == 3 * 4096
    tier.trim_to(0)
    assert there(tier, A, B) == [3, 0]


def test_after_unpin_it_is_a_leaf_like_others(tier: ColdTier) -> None:
    """Room that was given once would never come back."""
    tier.pin([Place(A)])
    assert tier.unpin([Place(A)]).id == keys.prefix_id(A.keys[-1])
    assert tier.check() == []
    tier.trim_to(0)
    assert there(tier, A, B) == [0, 0]


def test_a_pin_of_the_middle_of_a_chain_keeps_no_more(tier: ColdTier) -> None:
    """A pinned system prompt would keep every conversation that began with it."""
    tier.pin([Place(chain(range(8)))])
    tier.trim_to(0)
    assert there(tier, A) == [2]
    assert tier.check() == []


def test_pins_of_one_process_hold_in_the_evictions_of_another(folder: Path, tier: ColdTier) -> None:
    """A second server would evict what was pinned through the first."""
    tier.pin([Place(A)])
    apart(folder, "tier.trim_to(0)")
    assert there(tier, A, B) == [3, 0]


APART = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from cold_blocks import blocks_of, chain
from tieredkv.codec import PlaneCodec
from tieredkv.core import Place
from tieredkv.tiers.cold import ColdTier
tier = ColdTier(Path(sys.argv[1]), 64 << 20, PlaneCodec(), block_tokens=4)
"""


def apart(folder: Path, code: str) -> int:
    """Exit status of another process that does this with a ``tier`` of its own."""
    tests = str(Path(__file__).parent)
    command = [sys.executable, "-c", APART + code, str(folder), tests]
    return subprocess.run(command, check=False).returncode


def evict_all(folder: Path) -> None:
    other = ColdTier(folder, CAP, PlaneCodec(), block_tokens=4)
    other.trim_to(0)
    other.close()


def test_a_pin_does_not_expire(tier: ColdTier) -> None:
    """A server's default lifetime would end what somebody asked to keep."""
    until = [replace(b, expires=1) for b in blocks(range(50, 58), N_BYTES)]
    c = chain(range(50, 58))
    tier.put(until[:1])
    tier.touch([c.keys[0]], 1 << 62)
    tier.put(until)
    tier.touch([c.keys[1]], 1 << 62)
    tier.pin([Place(c)])
    assert tier.expire(1 << 62) == 0
    assert [b.expires for b in tier.load(c.keys)][1:] == [0]
    tier.unpin([Place(c)])
    assert tier.expire(1 << 62) == 2


def test_a_pin_that_is_past_its_time_is_found(tier: ColdTier) -> None:
    """It would be kept for nothing."""
    until = time.time_ns() + 10**9
    c = chain(range(50, 58))
    tier.put([replace(b, expires=until) for b in blocks_of(c, N_BYTES)])
    tier.pin([Place(c)])
    while time.time_ns() < until:
        time.sleep(0.05)
    assert tier.lookup(c) == 2
    tier.unpin([Place(c)])
    assert tier.lookup(c) == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_prune_leaves_pins_alone_unless_it_is_told(tier: ColdTier, pinned: bool) -> None:
    """What was pinned would go with the rest, or never be got rid of."""
    tier.pin([Place(A)])
    assert len(list(tier.prune(Criteria(pinned=pinned)))) == (6 if pinned else 3)
    assert there(tier, A, B) == [0 if pinned else 3, 0]
    assert bool(pins_of(tier)) != pinned


def test_what_is_pinned_between_plan_and_prune_stays(tier: ColdTier) -> None:
    """Whoever pins while others prune would be told so in vain."""
    plan = tier.plan(Criteria())
    tier.pin([Place(A)])
    done = cold._Done()
    tier._environment.write(lambda ledger: cold._prune(plan.victims, Criteria(), ledger, done))
    assert there(tier, A, B) == [3, 0]


def test_the_longer_block_takes_over_the_pin_of_a_tail(tier: ColdTier) -> None:
    """A conversation that goes on would lose its pin with its next word."""
    tier.pin([Place(A)])
    longer = chain(range(11))
    tier.put(blocks_of(longer, N_BYTES))
    assert pins_of(tier) == {longer.keys[-1]}
    tier.trim_to(0)
    assert there(tier, longer) == [3]
    assert tier.unpin([Place(A)]).id == keys.prefix_id(longer.keys[-1])
    assert pins_of(tier) == set()


def test_pins_are_in_a_store_that_is_made_anew(folder: Path, tier: ColdTier) -> None:
    """Compaction would let go of everything."""
    tier.pin([Place(A)])
    before = rows(tier, "pin")
    rebuild(folder, PlaneCodec())
    tier.trim_to(0)
    assert there(tier, A, B) == [3, 0]
    assert rows(tier, "pin") == before


def test_a_damaged_block_takes_its_pin_along(tier: ColdTier) -> None:
    """A pin of nothing would keep its key from ever being evicted again."""
    tier.pin([Place(A)])
    piece = piece_key(A.keys[1], 0)
    plant(tier, lambda txn, dbs: txn.put(piece, bytes(N_BYTES), db=dbs.blob))
    assert there(tier, A) == [1]
    tier.touch([B.keys[0]])
    assert pins_of(tier) == set()
    assert tier.put(blocks_of(A, N_BYTES)) == 3
    tier.trim_to(0)
    assert there(tier, A) == [0]


def test_what_was_found_damaged_is_not_pinned(tier: ColdTier) -> None:
    """Somebody would believe that it is kept."""
    piece = piece_key(A.keys[0], 0)
    plant(tier, lambda txn, dbs: txn.put(piece, bytes(N_BYTES), db=dbs.blob))
    assert there(tier, A) == [0]
    for pin in (lambda: tier.pin([Place(A)]), lambda: tier.pin_id(A.keys[2].hex())):
        with pytest.raises(PinRefused, match="stored"):
            pin()
    tier.touch([B.keys[0]])


# ---- which prefix is meant


def test_the_longest_prefix_is_meant_that_is_stored(tier: ColdTier) -> None:
    """A prompt that was longer than what is stored could not be pinned."""
    assert tier.pin([Place(chain([*range(10), 77, 78, 79]))]).n_tokens == 10


def test_a_block_that_goes_on_stands_for_its_beginning(tier: ColdTier) -> None:
    """A system prompt never ends where a block does."""
    first = tier.pin([Place(chain(range(7)))])
    assert first.id == keys.prefix_id(A.keys[1])
    tier.put(blocks([0, 1, 2, 3, 4, 5, 6, 99], N_BYTES))
    assert tier.pin([Place(chain(range(7)))]) == first
    assert len(pins_of(tier)) == 1


@pytest.mark.parametrize("act", ["pin", "unpin"])
def test_what_only_begins_alike_is_not_meant(tier: ColdTier, act: str) -> None:
    """All prompts begin with the same token: a stranger's would be pinned or let go."""
    tier.pin([Place(B)])
    with pytest.raises(PinRefused) as refusal:
        getattr(tier, act)([Place(chain([0, 50, 51])), Place(chain([100, 51, 52, 53]))])
    assert refusal.value.reason == "absent"
    assert pins_of(tier) == {B.keys[-1]}


def test_what_has_expired_is_not_pinned(tier: ColdTier) -> None:
    """It would come back to life for ever."""
    c = chain(range(50, 58))
    tier.put([replace(b, expires=1) for b in blocks_of(c, N_BYTES)])
    with pytest.raises(PinRefused):
        tier.pin([Place(c)])


def test_unpin_means_the_longest_prefix_that_is_pinned(tier: ColdTier) -> None:
    """Whoever pinned a prefix would have to remember how long it was."""
    tier.pin([Place(chain(range(4)))])
    tier.pin([Place(A)])
    assert [tier.unpin([Place(A)]).n_tokens for _ in range(2)] == [10, 4]
    with pytest.raises(PinRefused, match="pinned"):
        tier.unpin([Place(A)])


def test_the_state_that_a_match_needs_is_pinned_too(tier: ColdTier) -> None:
    """The blocks of a hybrid model are worth nothing without their snapshot."""
    snapshot = state_of(A.keys[1], keys.snapshot_key(A.keys[1]), 3)
    tier.put([snapshot])
    assert tier.pin([Place(A, 0)]).n_tokens == 8
    tier.trim_to(0)
    assert tier.present([*A.keys, snapshot.key]) == {*A.keys[:2], snapshot.key}
    tier.unpin([Place(A, 0)])
    assert pins_of(tier) == set()


def test_windows_are_let_go_when_no_other_pin_needs_them(tier: ColdTier) -> None:
    """An unpinned prefix would leave its windows pinned, or take those of another."""
    c = chain(range(200, 216))
    windows = [keys.window_key(key) for key in c.keys]
    tier.put(blocks_of(c, N_BYTES))
    for key, window in zip(c.keys, windows, strict=True):
        tier.put([state_of(key, window, 2)])
    tier.pin([Place(chain(range(200, 208)), 2)])
    tier.pin([Place(c, 2)])
    assert pins_of(tier) == {c.keys[1], c.keys[3], *windows}
    tier.unpin([Place(c, 2)])
    assert pins_of(tier) == {c.keys[1], *windows[:2]}
    tier.unpin([Place(c, 2)])
    assert pins_of(tier) == set()


def test_an_id_pins_the_windows_that_its_layout_asks_for(folder: Path) -> None:
    """A prefix that was pinned by its id could not be restored."""
    ring = {"kind": "RotatingKVCache", "constants": [0, 8], "leaves": []}
    namespace = replace(NAMESPACE, layout=json.dumps({"layers": [ring]}))
    c = chain(range(200, 216), namespace)
    tier = ColdTier(folder, CAP, PlaneCodec(), block_tokens=4)
    tier.register(namespace)
    tier.put(blocks_of(c, N_BYTES))
    windows = [keys.window_key(key) for key in c.keys]
    for key, window in zip(c.keys, windows, strict=True):
        tier.put([replace(state_of(key, window, 2), root=c.root)])
    tier.pin_id(c.keys[2].hex()[:16])
    assert pins_of(tier) == {c.keys[2], *windows[1:3]}
    tier.close()


def test_an_id_is_any_prefix_of_a_key_that_only_one_has(tier: ColdTier) -> None:
    """People copy a part of what they see."""
    assert tier.pin_id(A.keys[-1].hex()[:6].upper()).n_tokens == 10
    assert tier.unpin_id(A.keys[-1].hex()).n_tokens == 10
    for text, reason in (("12345", "id"), ("zzzzzz", "id"), ("f" * 64, "absent")):
        with pytest.raises(PinRefused) as refusal:
            tier.pin_id(text)
        assert refusal.value.reason == reason
    with pytest.raises(PinRefused, match="pinned"):
        tier.unpin_id(A.keys[-1].hex())


def test_an_id_that_two_have_is_refused(tier: ColdTier) -> None:
    """The wrong one of two would be kept."""

    def copy(txn: Any, dbs: Any) -> None:
        twin = A.keys[0][:5] + bytes(27)
        txn.put(twin, bytes(txn.get(A.keys[0], db=dbs.index)), db=dbs.index)

    plant(tier, copy)
    with pytest.raises(PinRefused) as refusal:
        tier.pin_id(A.keys[0].hex()[:9])
    assert refusal.value.reason == "ambiguous"
    plant(tier, lambda txn, dbs: txn.delete(A.keys[0][:5] + bytes(27), db=dbs.index))


# ---- how much


def test_pins_take_at_most_their_share_of_the_cap(folder: Path) -> None:
    """Somebody could pin the whole disk, and nothing new would ever be stored."""
    tier = ColdTier(folder, 4 << 20, PlainCodec(), pin_share=0.25, block_tokens=4)
    prompts = [chain(range(1000 * i, 1000 * i + 36)) for i in range(3)]
    for c in prompts:
        assert tier.put(blocks_of(c, 50_000)) == 9
    tier.pin([Place(prompts[0])])
    tier.pin([Place(prompts[1])])
    with pytest.raises(PinRefused, match="unpin some") as refusal:
        tier.pin([Place(prompts[2])])
    assert refusal.value.reason == "share"
    # What is kept anyway costs nothing.
    tier.pin([Place(chain(range(20)))])
    assert 900_000 < tier.pinned_bytes == tier.usage().pinned_bytes <= 1 << 20
    assert tier.usage().pinned_blocks == 18
    assert [p.n_tokens for p in tier.pins()] == [36, 36, 20]
    assert tier.check() == []
    tier.close()


def test_a_cap_below_what_is_pinned_is_said_once_and_served_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server with a smaller disk would not start, or would drop what must be kept."""
    tier = ColdTier(folder, 8 << 20, PlainCodec(), block_tokens=4)
    kept, other = chain(range(200)), chain(range(1000, 1040))
    for c in (kept, other):
        assert tier.put(blocks_of(c, 50_000)) == len(c.keys)
    tier.pin([Place(kept)])
    tier.close()
    tier = ColdTier(folder, 1 << 20, PlainCodec(), block_tokens=4)
    for i in range(3):
        assert tier.put(blocks_of(chain(range(5000 + i, 5004 + i)), 50_000)) == 0
    assert there(tier, kept, other) == [50, 0]
    assert [text.count("until some of them are unpinned") for text in caplog.messages].count(1) == 1
    assert tier.check() == []
    tier.unpin([Place(kept)])
    assert tier.put(blocks_of(other, 50_000)) == len(other.keys)
    assert tier.counters().faults == {}
    tier.close()


# ---- through the cache


@pytest.fixture
def cache(folder: Path) -> Iterator[TieredPromptCache]:
    with TieredPromptCache(folder, block_tokens=4, hot_bytes=1 << 20) as cache:
        yield cache
        assert cache.check() == []


def insert(cache: TieredPromptCache, tokens: list[int]) -> None:
    cache.insert_cache(MODEL, tokens, caches.make(tokens))


def hit(cache: TieredPromptCache, tokens: list[int]) -> int:
    found, rest = cache.fetch_nearest_cache(MODEL, [*tokens, 7777])
    n = len(tokens) + 1 - len(rest)
    assert found is None or caches.holds(found, tokens[:n])
    return n


def test_what_was_just_inserted_can_be_pinned(cache: TieredPromptCache) -> None:
    """A pin right after an answer would be refused, since the block waits to be written."""
    tokens = list(range(600))
    insert(cache, tokens)
    assert cache.pin(MODEL, tokens).n_tokens == 600
    cache._store.cold.trim_to(0)
    cache.trim_to(n_bytes=0)
    assert hit(cache, tokens) == 600
    assert cache.pinned_bytes > 0


@pytest.mark.parametrize("make", [caches.make_hybrid, caches.make])
def test_every_kind_of_state_can_be_pinned_and_restored(
    cache: TieredPromptCache, make: Callable[[list[int]], Any]
) -> None:
    """A pin of blocks without their state would be worth nothing."""
    tokens = list(range(11))
    cache.insert_cache(MODEL, tokens, make(tokens))
    pinned = cache.pin(MODEL, tokens)
    cache._store.cold.trim_to(0)
    cache.trim_to(n_bytes=0)
    _, rest = cache.fetch_nearest_cache(MODEL, [*tokens, 7777])
    assert rest == [7777]
    assert cache.unpin_id(pinned.id) == pinned
    cache._store.cold.trim_to(0)
    assert cache.stats().cold.n_blocks == 0


def test_what_is_not_stored_is_refused(cache: TieredPromptCache) -> None:
    """Somebody would believe that it is kept."""
    for act in (cache.pin, cache.unpin):
        with pytest.raises(PinRefused):
            act(MODEL, [1, 2, 3])
    insert(cache, [1, 2, 3])
    with pytest.raises(PinRefused, match="computed first"):
        cache.pin(("another", None, None), [1, 2, 3])


def test_without_a_disk_nothing_is_pinned() -> None:
    """A pin that a restart forgets is none."""
    with TieredPromptCache(block_tokens=4) as cache:
        insert(cache, [1, 2, 3])
        for act in (
            lambda: cache.pin(MODEL, [1, 2, 3]),
            lambda: cache.unpin(MODEL, [1, 2, 3]),
            lambda: cache.pin_id("abcdef"),
            lambda: cache.unpin_id("abcdef"),
        ):
            with pytest.raises(PinRefused, match="memory only") as refusal:
                act()
            assert refusal.value.reason == "no_cold"


def test_prune_takes_both_tiers(cache: TieredPromptCache) -> None:
    """What somebody wants gone would still be answered from memory, and written again."""
    kept, gone = list(range(8)), list(range(100, 109))
    insert(cache, kept)
    cache.pin(MODEL, kept)
    insert(cache, gone)
    pruned = cache.prune(Criteria())
    assert pruned.blocks == 3
    assert pruned.n_bytes > 0
    assert [hit(cache, kept), hit(cache, gone)] == [8, 0]
    assert cache.prune(Criteria(pinned=True)).blocks == 2
    assert cache.stats().hot.n_blocks == cache.stats().cold.n_blocks == 0


@pytest.mark.parametrize(
    ("criteria", "left"),
    [
        (Criteria(), 0),
        (Criteria(model="model"), 0),
        (Criteria(salt=b""), 0),
        (Criteria(to_bytes=0), 0),
        (Criteria(model="another"), 8),
        (Criteria(salt=b"s"), 8),
        (Criteria(unused_since=1 << 62), 8),
        (Criteria(to_bytes=1), 8),
    ],
)
def test_memory_alone_is_pruned_by_what_it_knows(criteria: Criteria, left: int) -> None:
    """A server without a disk could not forget; nor must it forget what it can't judge."""
    with TieredPromptCache(block_tokens=4) as cache:
        insert(cache, list(range(8)))
        assert cache.prune(criteria).blocks == (0 if left else 2)
        assert hit(cache, list(range(8))) == left
        assert cache.check() == []


def test_prune_by_age_takes_from_memory_what_it_took_from_disk(cache: TieredPromptCache) -> None:
    """A prompt that was pruned for its age would go on being answered."""
    insert(cache, list(range(9)))
    assert cache.prune(Criteria(unused_since=time.time_ns() + 10**9)).blocks == 3
    assert hit(cache, list(range(9))) == 0


# ---- commands


def test_commands_pin_list_and_unpin(
    folder: Path, tier: ColdTier, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator would have no way to keep what matters."""
    a, b = keys.prefix_id(A.keys[-1]), B.keys[-1].hex()
    assert run(folder, "pin", a, b[:8], "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [(p["id"], p["n_tokens"]) for p in report["pinned"]] == [(a, 10), (b[:16], 10)]
    assert run(folder, "pin") == 0
    assert "10 tokens, 12.3 KB, test-model, since 20" in capsys.readouterr().out
    assert run(folder, "stats") == 0
    assert "6 blocks, 24.6 KB, are kept for prompts that are pinned" in capsys.readouterr().out
    assert run(folder, "unpin", a) == 0
    assert f"{a} unpinned: 10 tokens" in capsys.readouterr().out
    tier.trim_to(0)
    assert there(tier, A, B) == [0, 3]
    assert run(folder, "unpin", "--all") == 0
    assert run(folder, "pin", "--json") == 0
    assert '"pinned": []' in capsys.readouterr().out


def test_a_command_that_is_refused_says_why_and_does_the_rest(
    folder: Path, tier: ColdTier, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script would believe that all is pinned."""
    assert run(folder, "pin", "ffffffff", keys.prefix_id(A.keys[-1])) == 1
    told = capsys.readouterr()
    assert "ffffffff: no prefix with the id ffffffff is stored here" in told.err
    assert "10 tokens" in told.out
    assert run(folder, "pin", keys.prefix_id(B.keys[-1]), "--pin-share", "0") == 1
    assert "unpin some" in capsys.readouterr().err
    assert pins_of(tier) == {A.keys[-1]}
    for misuse in ([], ["--all", "abcdef"]):
        with pytest.raises(SystemExit):
            run(folder, "unpin", *misuse)


def test_prune_takes_pins_only_on_request(
    folder: Path, tier: ColdTier, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is pinned would go by accident; or with no condition at all, everything."""
    tier.pin([Place(A)])
    assert run(folder, "prune", "--to", "0", "--yes") == 0
    assert there(tier, A, B) == [3, 0]
    with pytest.raises(SystemExit):
        run(folder, "prune", "--pinned", "--yes")
    assert "--pinned is no condition" in capsys.readouterr().err
    assert run(folder, "prune", "--to", "0", "--pinned", "--yes") == 0
    assert there(tier, A) == [0]


KILLED = """
for start in (0, 100):
    tier.put(blocks_of(chain(range(start, start + 10)), 3000))
tier.pin([Place(chain(range(10)))])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_pin_outlives_a_kill_an_eviction_and_compact(folder: Path) -> None:
    """A pin would hold only until the first accident."""
    assert apart(folder, KILLED) == -signal.SIGKILL
    evict_all(folder)
    assert run(folder, "compact") == 0
    reader = ColdReader(folder, PlaneCodec())
    assert [p.key for p in reader.pins()] == [A.keys[-1].hex()]
    assert len(reader.load(A.keys)) == reader.n_blocks == 3
    assert asdict(reader.usage())["pinned_blocks"] == 3
    assert reader.verify() == []
    reader.close()


def test_rows_of_pins_that_are_damaged_end_nothing(tier: ColdTier) -> None:
    """When somebody pinned is for people: a flipped bit there must not cost the store."""
    tier.pin([Place(A)])
    plant(tier, lambda txn, dbs: txn.put(A.keys[-1], b"short", db=dbs.pin))
    plant(tier, lambda txn, dbs: txn.put(BlockKey(b"s" * 32), bytes(8), db=dbs.pin))
    tier.trim_to(0)
    assert there(tier, A, B) == [3, 0]
    assert [p.pinned for p in tier.pins()] == [0]
    assert tier.unpin([Place(A)]).n_tokens == 10
    plant(tier, lambda txn, dbs: txn.delete(b"s" * 32, db=dbs.pin))
    assert tier.counters().faults == {}
