"""The tier on disk: what it keeps, what it gives up, and what it does when the disk fails."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
from cold_blocks import (
    NAMESPACE,
    PlainCodec,
    blocks,
    blocks_of,
    chain,
    content,
    is_right,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv import keys
from tieredkv.core import (
    BlockKey,
    ColdTierUnavailable,
    CorruptBlob,
    Namespace,
    Partial,
    Tier,
)
from tieredkv.hazard import TAIL, Standing
from tieredkv.tiers import cold, environment, health, ledger
from tieredkv.tiers.cold import ColdReader, ColdTier
from tieredkv.tiers.environment import map_bytes
from tieredkv.tiers.gate import GATE_NAME, Gate
from tieredkv.tiers.ledger import DATABASES, Databases, Rows
from tieredkv.tiers.records import (
    MAX_RAW_BYTES,
    PIECE_BYTES,
    Ghost,
    Record,
    Totals,
    Use,
    child_rows,
    due_key,
    left_key,
    order_key,
    pack_namespace,
    pack_number,
    piece_key,
)
from tieredkv.tiers.stamp import STAMP_NAME, Stamp

CAP = 64 << 20


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cold"


@pytest.fixture
def tier(folder):
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.register(NAMESPACE)
    yield tier
    assert tier.check() == []
    tier.close()


def holds(tier, tokens):
    """Whether all blocks of the prompt are there and right."""
    c = chain(tokens)
    loaded = tier.load(c.keys)
    return len(loaded) == len(c.keys) and all(map(is_right, loaded))


def edit(folder, program):
    """Change the store from a process of its own: LMDB can't be opened twice in one."""
    code = (
        "import sys, lmdb\n"
        "env = lmdb.open(sys.argv[1], max_dbs=16, map_size=1 << 30)\n"
        "with env.begin() as txn: names = [name for name, _ in txn.cursor()]\n"
        "db = {name: env.open_db(name, create=False) for name in names}\n"
        f"{program}\nenv.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def set_meta(folder, name, value):
    """Write a number of ``meta``."""
    row = f"{name.encode()!r}, {value.to_bytes(8, 'little')!r}"
    edit(folder, f"with env.begin(write=True) as txn: txn.put({row}, db=db[b'meta'])")


# ---- what it keeps


def test_it_is_a_tier(tier):
    """If this failed, the store could not use it."""
    assert isinstance(tier, Tier)


def test_what_was_put_is_loaded_bit_for_bit(tier):
    """If this failed, nothing else would matter."""
    put = blocks(range(10), n_bytes=200_000)
    assert tier.put(put) == 3
    loaded = tier.load([block.key for block in put])
    assert [(b.root, b.parent, b.key, b.tokens, b.specs) for b in loaded] == [
        (b.root, b.parent, b.key, b.tokens, b.specs) for b in put
    ]
    assert all(map(is_right, loaded))


def test_a_new_process_finds_it(folder):
    """If this failed, a restart would begin cold."""
    first = ColdTier(folder, CAP, PlainCodec())
    first.put(blocks(range(10)))
    first.close()
    second = ColdTier(folder, CAP, PlainCodec())
    assert holds(second, range(10))
    second.close()


@pytest.mark.parametrize("n_bytes", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3_000_000])
def test_blobs_of_any_size_survive_their_cutting(tier, n_bytes):
    """If this failed, a blob that just fills its pieces would lose or gain one."""
    tier.put(blocks(range(4), n_bytes))
    assert holds(tier, range(4))


def test_lookup_counts_full_blocks_from_start(tier):
    """If this failed, a hit would be longer or shorter than what is stored."""
    tier.put(blocks(range(10)))
    c = chain(range(20))
    assert [tier.lookup(c, start) for start in range(4)] == [2, 2, 2, 3]


def test_lookup_compares_token_ids(tier):
    """If this failed, a prompt whose key collides would get another one's state."""
    tier.put(blocks(range(8)))
    c = chain(range(8))
    forged = replace(c, tokens=c.tokens + 1)
    assert tier.lookup(forged) == 0


def test_missing_counts_the_tail_and_what_covers_it(tier):
    """If this failed, the writer would be given blocks again, or never."""
    tier.put(blocks(range(11)))
    assert tier.missing(chain(range(11))) == 3
    assert tier.missing(chain(range(10))) == 3
    assert tier.missing(chain(range(12))) == 2
    assert tier.missing(chain([9, *range(11)])) == 0


def test_a_block_without_its_parent_is_refused(tier):
    """If this failed, a chain would have a hole and presence would not be monotone."""
    assert tier.put(blocks(range(8))[1:]) == 0
    assert tier.counters().dropped == {"orphan": 1}


def test_a_block_of_another_namespace_than_its_parent_is_refused(tier):
    """If this failed, a damaged block could join the states of two tenants."""
    first, second = blocks(range(8))
    assert tier.put([first, replace(second, root=BlockKey(bytes(32)))]) == 1


def test_a_known_block_costs_nothing(tier):
    """If this failed, every turn of a conversation would write its whole history again."""
    tier.put(blocks(range(8)))
    before = tier.counters().bytes_written
    assert tier.put(blocks(range(12))) == 3
    assert tier.counters().bytes_written == before + 100
    assert tier.n_blocks == 3


def test_a_growing_conversation_writes_linearly(tier):
    """If this failed, 100 turns of 100 tokens would store a quadratic number of bytes."""
    for n in range(1, 101):
        tier.put(blocks(range(4 * n)))
    assert tier.counters().bytes_written == 100 * 100
    assert tier.n_blocks == 100


def test_a_longer_sibling_takes_the_place_of_a_tail(tier):
    """If this failed, every turn would leave the tail of the one before behind."""
    tier.put(blocks(range(6)))
    tier.put(blocks(range(7)))
    assert not holds(tier, range(6))
    assert holds(tier, range(7))
    assert (tier.n_blocks, tier.counters().superseded) == (2, 1)


def test_a_tail_that_is_covered_is_held_without_being_stored(tier):
    """If this failed, the writer would count a block as lost that is there in full."""
    tier.put(blocks(range(8)))
    assert tier.put(blocks(range(6))) == 2
    assert tier.n_blocks == 2


def test_load_ends_before_what_is_absent(tier):
    """If this failed, a hit would have a hole."""
    tier.put(blocks(range(8)))
    c = chain([*range(4), 9, 9, 9, 9])
    assert len(tier.load(c.keys)) == 1


def brute_force(candidates, tokens):
    shared = [keys.common_prefix(c.tokens, tokens) for c in candidates]
    return max(shared, default=0)


token_ids = st.one_of(
    st.integers(0, 2),
    st.integers((1 << 20) - 2, (1 << 20) + 2),
    st.integers(0x10FFFB, 0x110001),
    st.integers(-(1 << 60), -(1 << 60) + 1),
    st.sampled_from([-1, 0xD7FF, 0xD800, (1 << 63) - 1, 1 - (1 << 63)]),
)
sibling_tokens = st.lists(token_ids, min_size=1, max_size=6)
# Long common runs, so that siblings differ only after several segments of their rows.
runs = st.builds(
    lambda head, n, rest: [*(head * n), *rest], sibling_tokens, st.integers(1, 60), sibling_tokens
)


@settings(max_examples=60, deadline=None)
@given(st.lists(runs | sibling_tokens, min_size=1, max_size=25), st.lists(runs, min_size=1))
def test_nearest_agrees_with_a_scan_of_all_siblings(siblings, queries):
    """If this failed, a prompt would reuse fewer tokens than are stored, or claim too many."""
    with tempfile.TemporaryDirectory() as directory:
        tier = ColdTier(Path(directory), CAP, PlainCodec())
        stored = [blocks_of(chain(tokens, block_tokens=400))[0] for tokens in siblings]
        for block in stored:
            assert tier.put([block]) == 1
        assert tier.check() == []
        for query in [*queries, *siblings]:
            tokens = chain(query, block_tokens=400).tokens_of(0)
            found = tier.nearest(stored[0].root, tokens)
            best = brute_force(stored, tokens)
            assert (found.n_tokens if found else 0) == best
            if found:
                (block,) = tier.load([found.key])
                assert keys.common_prefix(block.tokens, tokens) == best
        tier.close()


class CountedCursor:
    """A cursor that counts its moves."""

    def __init__(self, cursor, moves):
        self.cursor, self.moves = cursor, moves

    def __getattr__(self, name):
        if name in ("set_range", "set_key", "prev", "next", "last", "first"):
            self.moves.append(name)
        return getattr(self.cursor, name)


class CountedTxn:
    """A transaction whose cursors count their moves."""

    def __init__(self, txn):
        self.txn, self.moves = txn, []

    def cursor(self, db):
        return CountedCursor(self.txn.cursor(db), self.moves)

    def __getattr__(self, name):
        return getattr(self.txn, name)


def test_thousands_of_siblings_cost_a_few_steps(folder):
    """If this failed, a busy system prompt would make every match slower, without limit."""
    dice = random.Random(1)
    shared = [dice.randrange(150_000) for _ in range(230)]
    stored = [
        blocks_of(chain([*shared, *(dice.randrange(50) for _ in range(26))], block_tokens=256))[0]
        for _ in range(3000)
    ]
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(stored[:1])
    assert sum(tier.put([block]) for block in stored[:1]) == 1
    assert tier.put(stored) == len(stored)
    queries = [
        chain([*shared, *(dice.randrange(50) for _ in range(26))], block_tokens=256).tokens_of(0)
        for _ in range(50)
    ]
    for query in queries:
        assert tier.nearest(stored[0].root, query).n_tokens == brute_force(stored, query)
    tier.close()
    with lmdb.open(str(folder), readonly=True, max_dbs=16) as env:
        dbs = Databases(**{name: env.open_db(name.encode(), create=False) for name in DATABASES})
        with env.begin() as txn:
            counted = CountedTxn(txn)
            Rows(counted, dbs).neighbours(stored[0].root, queries[0])
    assert len(counted.moves) <= 5


def test_nearest_of_an_unknown_parent_is_none(tier):
    """If this failed, a miss would be an error."""
    tier.put(blocks(range(8)))
    assert tier.nearest(BlockKey(b"x" * 32), chain(range(4)).tokens_of(0)) is None
    assert tier.nearest(chain([0]).root, chain([77]).tokens_of(0)) is None


def test_nearest_says_how_many_tokens_are_shared(tier):
    """If this failed, a restored cache would be cut at the wrong token."""
    tier.put(blocks(range(8)))
    c = chain(range(4))
    wanted = Partial(chain(range(8)).keys[1], 2)
    assert tier.nearest(c.keys[0], chain([4, 5, 99]).tokens_of(0)) == wanted


# ---- recency and the cap


def test_the_least_recently_used_leaf_goes_first(tier):
    """If this failed, eviction would cut prompts that are in use."""
    for first in (100, 200, 300):
        tier.put(blocks(range(first, first + 8), n_bytes=70_000))
    tier.touch([chain(range(100, 108)).keys[-1]])
    tier.trim_to(tier.n_bytes - 1)
    assert holds(tier, range(100, 108))
    assert not holds(tier, range(200, 208))
    assert holds(tier, range(200, 204))
    assert holds(tier, range(300, 308))


def test_an_ancestor_inherits_the_use_of_a_leaf_that_left(tier):
    """If this failed, a shared prefix would go before prompts that were used long before it."""
    tier.put(blocks(range(8), n_bytes=70_000))
    tier.put(blocks(range(50, 54), n_bytes=70_000))
    tier.touch([chain(range(8)).keys[-1]])
    # The first to go is 50…, then the leaf 4…, and its parent only after both.
    tier.trim_to(tier.n_bytes - 1)
    assert not holds(tier, range(50, 54))
    assert holds(tier, range(8))


def test_recency_survives_a_clock_that_goes_back(tier, monkeypatch):
    """If this failed, a corrected clock would make the newest prompt the first to go."""
    tier.put(blocks(range(4), n_bytes=70_000))
    monkeypatch.setattr(ledger.time, "time_ns", lambda: 5)
    tier.put(blocks(range(50, 54), n_bytes=70_000))
    tier.trim_to(tier.n_bytes - 1)
    assert holds(tier, range(50, 54))
    assert not holds(tier, range(4))


def fill(tier):
    """Put prompts of one large block until one more would evict; how many there are."""
    n = 0
    while not tier.counters().evictions:
        n += tier.put(blocks([n, n, n, n], n_bytes=1_000_000))
    return n - 1


def test_the_parent_of_what_is_put_is_never_the_victim(tmp_path):
    """If this failed, making room for a block would drop the chain that it continues."""
    other = ColdTier(tmp_path / "other", 16 << 20, PlainCodec())
    n = fill(other)
    other.close()
    tier = ColdTier(tmp_path / "cold", 16 << 20, PlainCodec())
    for i in range(n):
        tier.put(blocks([i, i, i, i], n_bytes=1_000_000))
    assert tier.counters().evictions == 0
    # The oldest leaf of all is the parent of this.
    assert tier.put(blocks([0, 0, 0, 0, 1], n_bytes=1_000_000)) == 2
    assert tier.counters().evictions == 1
    assert holds(tier, [0, 0, 0, 0, 1])
    assert not holds(tier, [1, 1, 1, 1])
    assert tier.check() == []
    tier.close()


def churn(tier, folder, n_bytes, total):
    """Put prompts that share prefixes until ``total`` bytes are written; the largest file size."""
    dice = random.Random(n_bytes)
    recent: list[list[int]] = []
    peak = 0
    while tier.counters().page_bytes_written < total:
        head = dice.choice(recent) if recent and dice.random() < 0.5 else []
        tokens = [*head, *(dice.randrange(1 << 17) for _ in range(dice.randrange(1, 30)))]
        recent = [*recent[-40:], tokens]
        known = tier.missing(chain(tokens))
        c = chain(tokens)
        batch = [replace(sized(b, dice, n_bytes)) for b in blocks_of(c, 16)[known:]]
        tier.put(batch)
        peak = max(peak, (folder / health.DATA_NAME).stat().st_size)
    return peak


def sized(block, dice, n_bytes):
    size = int(n_bytes * dice.uniform(0.8, 1))
    (made,) = blocks_of(chain([1]), size)
    return replace(block, specs=made.specs, tensors=made.tensors)


@pytest.mark.parametrize(
    ("mib", "n_bytes"),
    [(16, 50_000), (16, 300_000), (16, 2_000_000), (32, 1_000_000), (64, 300_000), (64, 2_000_000)],
)
def test_the_file_stays_within_the_cap(folder, mib, n_bytes):
    """If this failed, the disk would fill although a cap was set."""
    cap = mib << 20
    tier = ColdTier(folder, cap, PlainCodec())
    peak = churn(tier, folder, n_bytes, 10 * cap)
    assert peak <= cap
    assert tier.counters().evictions > 0
    assert tier.n_bytes > cap // 2
    assert tier.check() == []
    tier.close()


def test_a_block_larger_than_the_cap_leaves_the_others(folder):
    """If this failed, one oversized prompt would empty the store."""
    tier = ColdTier(folder, 16 << 20, PlainCodec())
    tier.put(blocks(range(40), n_bytes=100_000))
    assert tier.put(blocks(range(100, 104), n_bytes=17 << 20)) == 0
    assert holds(tier, range(40))
    assert tier.counters().dropped == {"too_large": 1}
    tier.close()


def test_a_prompt_larger_than_the_cap_leaves_the_others(folder):
    """If this failed, a prompt of twice the cap would evict everybody for a part of itself."""
    tier = ColdTier(folder, 16 << 20, PlainCodec())
    tier.put(blocks(range(40), n_bytes=500_000))
    held = tier.put(blocks(range(100, 300), n_bytes=500_000))
    assert 0 < held < 50
    assert holds(tier, range(40))
    assert tier.check() == []
    tier.close()


def test_a_lower_cap_evicts_in_bounded_steps_and_says_so(folder, caplog, monkeypatch):
    """If this failed, a changed setting would stall the writer, or delete without a word."""
    tier = ColdTier(folder, 64 << 20, PlainCodec())
    for first in range(0, 400, 4):
        tier.put(blocks(range(1000 + first, 1004 + first), n_bytes=500_000))
    tier.close()
    monkeypatch.setattr("tieredkv.tiers.cold._MAX_EVICTED_BYTES", 4 << 20)
    with caplog.at_level(logging.WARNING, "tieredkv"):
        tier = ColdTier(folder, 32 << 20, PlainCodec())
    assert "evict the blocks of least worth" in caplog.text
    before = tier.counters().evictions
    steps = []
    for first in range(0, 60, 4):
        tier.put(blocks(range(first, first + 4), n_bytes=50_000))
        steps.append(tier.counters().evictions - before)
        before += steps[-1]
    assert max(steps) <= 9
    assert tier.n_bytes < 32 << 20
    assert tier.check() == []
    tier.close()


def test_the_newer_cap_wins_for_all(folder):
    """If this failed, two servers would evict each other's blocks down to the smaller cap."""
    old = ColdTier(folder, 16 << 20, PlainCodec())
    new = ColdTier(folder, 80 << 20, PlainCodec())
    assert old.cap_bytes == 80 << 20
    for first in range(0, 160, 4):
        assert old.put(blocks(range(1000 + first, 1004 + first), n_bytes=1_000_000)) == 1
    assert old.counters().evictions == 0
    old.close()
    new.close()


def test_trim_to_nothing_leaves_nothing(tier):
    """If this failed, memory pressure could not be answered."""
    tier.put(blocks(range(40), n_bytes=70_000))
    tier.trim_to(-1)
    assert tier.n_blocks == 0
    assert tier.usage().namespaces == ()


# ---- LMDB's rules


def test_the_engine_is_lmdb_0_9(monkeypatch, folder):
    """If this failed, another engine with another file format and crash behaviour would be used."""
    assert lmdb.version()[:2] == (0, 9)
    monkeypatch.setattr(lmdb, "version", lambda: (1, 0, 0))
    with pytest.raises(ColdTierUnavailable, match=r"0\.9"):
        ColdTier(folder, CAP, PlainCodec())


def test_the_environment_is_opened_durably(folder, monkeypatch):
    """If this failed, a power cut could ruin the store, or a full disk end the server."""
    opened = []
    real = lmdb.open

    def spy(*args, **options):
        env = real(*args, **options)
        opened.append((options, env.flags()))
        return env

    monkeypatch.setattr(environment.lmdb, "open", spy)
    ColdTier(folder, CAP, PlainCodec()).close()
    ((options, flags),) = opened
    assert (flags["sync"], flags["metasync"], flags["writemap"], flags["map_async"]) == (
        True,
        False,
        False,
        False,
    )
    assert flags["readahead"]
    assert options["map_size"] == map_bytes(CAP)


def test_the_file_can_not_outgrow_the_map_nor_the_map_the_cap():
    """If this failed, a reader that stays, or scattered free pages, would lift the cap."""
    assert map_bytes(CAP) == CAP


def test_a_piece_fills_its_pages_exactly(tmp_path):
    """If this failed, each piece would waste up to a page: a quarter of it at 16 KiB pages."""
    with lmdb.open(str(tmp_path), map_size=1 << 24) as env:
        with env.begin(write=True) as txn:
            txn.put(b"k", bytes(PIECE_BYTES))
        stat = env.stat()
    assert stat["overflow_pages"] * stat["psize"] == 65536


def test_files_are_private(folder):
    """If this failed, other users of the machine could read everybody's prompts."""
    tier = ColdTier(folder, CAP, PlainCodec())
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    names = ("data.mdb", "lock.mdb", GATE_NAME, STAMP_NAME)
    assert modes == dict.fromkeys(names, 0o600)
    tier.close()


def test_one_transaction_holds_all_of_a_block(tier, monkeypatch):
    """If this failed, a crash could leave pieces without an index, or an index without pieces."""
    before = tier.n_bytes
    tier.put(blocks(range(4)))
    monkeypatch.setattr(ledger.Ledger, "_count_in", failing_at(0, OSError(errno.EIO, "no")))
    assert tier.put(blocks(range(50, 54), n_bytes=300_000)) == 0
    monkeypatch.undo()
    assert tier.n_bytes < before + 100_000
    assert tier.check() == []


def failing_at(n, error):
    """A method that does nothing and raises at its n-th call."""
    calls = []

    def method(*_args):
        calls.append(1)
        if len(calls) > n:
            raise error

    return method


@pytest.mark.parametrize("n", range(5))
def test_an_error_inside_a_transaction_changes_nothing(tier, monkeypatch, n):
    """If this failed, a store that failed half-way would stay visible, or be counted."""
    tier.put(blocks(range(100, 108)))
    before = tier.n_bytes, tier.n_blocks, tier.usage().namespaces
    add, calls = ledger.Ledger.add, []

    def fail(self, *args):
        if len(calls) == n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        calls.append(1)
        add(self, *args)

    monkeypatch.setattr(ledger.Ledger, "add", fail)
    assert tier.put(blocks(range(20))) == 0
    monkeypatch.undo()
    assert (tier.n_bytes, tier.n_blocks, tier.usage().namespaces) == before
    assert tier.counters().dropped == {"fault": 5}
    assert tier.counters().faults == {"disk_full": 1}
    assert tier.put(blocks(range(20))) == 5


class FailingCodec(PlainCodec):
    """Raises at its n-th call."""

    def __init__(self, encode=1 << 30, decode=1 << 30, error=None):
        self.left = {"encode": encode, "decode": decode}
        self.error = error or RuntimeError("no")

    def _count(self, what):
        self.left[what] -= 1
        if self.left[what] < 0:
            raise self.error

    def encode(self, block):
        self._count("encode")
        return super().encode(block)

    def decode_parsed(self, parsed, into=None):
        self._count("decode")
        return super().decode_parsed(parsed, into)


@pytest.mark.parametrize("n", range(5))
def test_a_block_that_cannot_be_encoded_ends_the_put_before_it(folder, n):
    """If this failed, an exception would end the writer, or a chain have a hole."""
    tier = ColdTier(folder, CAP, FailingCodec(encode=n))
    assert tier.put(blocks(range(20))) == n
    assert tier.n_blocks == n
    assert tier.counters().dropped == {"encode": 5 - n}
    assert tier.check() == []
    tier.close()


@pytest.mark.parametrize("error", [RuntimeError("no"), CorruptBlob("no")])
def test_a_block_that_cannot_be_decoded_ends_the_hit_before_it(folder, monkeypatch, error):
    """If this failed, a failed read would be counted as loaded, and the answer be wrong."""
    monkeypatch.setattr("tieredkv.tiers.loader._MAX_THREADS", 1)
    tier = ColdTier(folder, CAP, FailingCodec(decode=2, error=error))
    tier.put(blocks(range(20)))
    assert [block.key for block in tier.load(chain(range(20)).keys)] == list(chain(range(8)).keys)
    tier.close()


def test_a_full_map_drops_the_write_and_nothing_else(folder, monkeypatch):
    """If this failed, a map filled by a stuck reader would end the tier."""
    monkeypatch.setattr(environment, "map_bytes", lambda _cap: 4 << 20)
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(4)))
    assert tier.put(blocks(range(50, 54), n_bytes=5 << 20)) == 0
    assert tier.counters().faults == {"map_full": 1}
    assert holds(tier, range(4))
    assert tier.put(blocks(range(60, 64))) == 1
    assert tier.check() == []
    tier.close()


def test_a_map_grown_by_another_process_is_followed(folder):
    """If this failed, a server would stop reading once one with a larger cap had written."""
    tier = ColdTier(folder, 1 << 20, PlainCodec())
    tier.put(blocks(range(4)))
    edit(
        folder,
        "env.set_mapsize(1 << 28)\n"
        "with env.begin(write=True) as txn:\n"
        "    for i in range(3000): txn.put(b'x%d' % i, bytes(60000), db=db[b'blob'])\n"
        "with env.begin(write=True) as txn:\n"
        "    for i in range(3000): txn.delete(b'x%d' % i, db=db[b'blob'])\n",
    )
    assert holds(tier, range(4))
    tier.put(blocks(range(50, 54)))
    assert holds(tier, range(50, 54))
    tier.close()


def test_a_gate_that_stays_shut_drops_the_write(tier, folder, monkeypatch):
    """If this failed, one stuck process would block the writers of all others for ever."""
    monkeypatch.setattr(environment, "GATE_TIMEOUT_S", 0.05)
    with Gate(folder).hold(1):
        assert tier.put(blocks(range(4))) == 0
    assert tier.counters().faults == {"gate": 1}
    assert tier.put(blocks(range(4))) == 1


def test_readers_that_died_are_looked_for_every_20_commits(folder, monkeypatch):
    """If this failed, a killed reader would pin pages and the file grow for good."""
    checks = []
    real = lmdb.open

    class Spy:
        def __init__(self, env):
            self.env = env

        def reader_check(self):
            checks.append(1)
            return self.env.reader_check()

        def __getattr__(self, name):
            return getattr(self.env, name)

    monkeypatch.setattr(environment.lmdb, "open", lambda *a, **o: Spy(real(*a, **o)))
    tier = ColdTier(folder, CAP, PlainCodec())
    assert len(checks) == 1
    for first in range(0, 160, 4):
        tier.put(blocks(range(first, first + 4)))
    assert len(checks) == 3
    tier.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB."""
    if os.geteuid() or sys.platform != "linux":
        pytest.skip("mounting a small file system takes root on Linux")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_drops_writes_and_nothing_else(small_disk):
    """If this failed, a full disk would end the server, or the tier until its restart."""
    tier = ColdTier(small_disk / "cold", CAP, PlainCodec())
    held = [tier.put(blocks(range(i, i + 4), n_bytes=500_000)) for i in range(0, 80, 4)]
    assert 1 in held
    assert 0 in held
    assert tier.counters().faults.keys() <= {"disk_full", "disk"}
    assert all(holds(tier, range(4 * i, 4 * i + 4)) for i, n in enumerate(held) if n)
    assert tier.check() == []
    tier.trim_to(0)
    assert tier.put(blocks(range(4))) == 1
    tier.close()


# ---- sharing, forking, closing


def test_two_tiers_of_one_process_share_the_environment(tier, folder, tmp_path):
    """If this failed, closing one would drop the other's locks."""
    (tmp_path / "link").symlink_to(folder)
    other = ColdTier(tmp_path / "link", CAP, PlainCodec())
    other.put(blocks(range(8)))
    assert holds(tier, range(8))
    other.close()
    assert holds(tier, range(8))
    assert tier.put(blocks(range(50, 58))) == 2


def test_after_close_nothing_is_found_and_nothing_fails(folder):
    """If this failed, a late call at shutdown would crash the server."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    tier.close()
    tier.close()
    c = chain(range(8))
    assert tier.put(blocks(range(8))) == 0
    tier.touch(c.keys)
    tier.trim_to(0)
    assert (tier.n_bytes, tier.n_blocks, tier.lookup(c), tier.load(c.keys)) == (0, 0, 0, [])
    assert (tier.nearest(c.root, c.tokens_of(0)), tier.layouts(c.root)) == (None, [])
    assert tier.check() == []


def test_closing_waits_for_nobody_and_breaks_nothing(folder):
    """If this failed, closing under a busy thread would be a crash in LMDB."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(80), n_bytes=200_000))
    stop = threading.Event()
    wrong = []

    def read():
        while not stop.is_set():
            wrong.extend(b for b in tier.load(chain(range(80)).keys) if not is_right(b))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    tier.close()
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert folder.stat().st_ino not in {inode for _, inode in environment._OPEN}


def test_a_load_leaves_no_reader_behind_that_keeps_the_store_open(folder, monkeypatch):
    """If this failed, a store that was closed would be open for a moment, if the disk is slow."""
    monkeypatch.setattr(cold, "announce", lambda _pieces: time.sleep(0.2))
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    assert len(tier.load(chain(range(8)).keys)) == len(chain(range(8)).keys)
    tier.close()
    assert folder.stat().st_ino not in {inode for _, inode in environment._OPEN}


def test_threads_may_do_everything_at_once(tier):
    """If this failed, counters would drift, or a reader see a block that is half there."""
    wrong = []

    def work(seed):
        dice = random.Random(seed)
        for _ in range(25):
            tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 20))]
            tier.put(blocks(tokens, n_bytes=70_000))
            wrong.extend(b for b in tier.load(chain(tokens).keys) if not is_right(b))
            tier.nearest(chain(tokens).root, chain(tokens).tokens_of(0))
            if dice.random() < 0.2:
                tier.trim_to(tier.n_bytes // 2)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.counters().faults == {}


def test_a_forked_child_finds_nothing_and_harms_nothing(tier):
    """If this failed, a fork would corrupt the store or hang its parent."""
    tier.put(blocks(range(8)))
    pid = os.fork()
    if not pid:
        c = chain(range(8))
        found = [tier.n_blocks, tier.lookup(c), len(tier.load(c.keys)), tier.put(blocks(range(4)))]
        tier.close()
        os._exit(sum(found))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert holds(tier, range(8))
    assert tier.put(blocks(range(50, 58))) == 2


# ---- damage


def flip_payload(folder, key):
    """Flip a bit in the middle of a block's blob, in the file itself."""
    data = bytearray((folder / health.DATA_NAME).read_bytes())
    at = data.index(content(key, 3000)[1000:2000])
    data[at + 500] ^= 1
    (folder / health.DATA_NAME).write_bytes(data)


def test_a_flipped_bit_is_a_miss_and_is_stored_anew(folder, caplog):
    """If this failed, damage on disk would become a wrong answer, or a miss for ever."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(12), n_bytes=3000))
    tier.close()
    c = chain(range(12))
    flip_payload(folder, c.keys[1])
    tier = ColdTier(folder, CAP, PlainCodec())
    assert [problem.where for problem in tier.verify()] == [c.keys[1].hex()]
    with caplog.at_level(logging.WARNING, "tieredkv"):
        assert len(tier.load(c.keys)) == 1
        assert len(tier.load(c.keys)) == 1
    assert caplog.text.count("checksum") == 1
    assert tier.counters().corrupt == 1
    assert (tier.lookup(c), tier.missing(c)) == (1, 1)
    assert tier.put(blocks(range(12), n_bytes=3000)) == 3
    assert holds(tier, range(12))
    assert tier.check() == []
    tier.close()


def test_a_damaged_subtree_is_deleted_in_bounded_steps(folder, monkeypatch):
    """If this failed, one flipped bit below a large system prompt would stall the writer."""
    monkeypatch.setattr("tieredkv.tiers.cold._MAX_PURGED_BLOCKS", 5)
    tier = ColdTier(folder, CAP, PlainCodec())
    for last in range(12):
        tier.put(blocks([0, 1, 2, 3, last, 7, 7, 7], n_bytes=3000))
    tier.close()
    flip_payload(folder, chain(range(4)).keys[0])
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.load(chain(range(4)).keys)
    assert tier.put(blocks(range(4), n_bytes=3000)) == 0
    assert tier.n_blocks == 3
    assert tier.counters().dropped == {"corrupt": 1}
    tier.touch([BlockKey(b"x" * 32)])
    assert tier.put(blocks(range(4), n_bytes=3000)) == 1
    assert tier.n_blocks == 1
    assert tier.check() == []
    tier.close()


def test_a_parent_inherits_the_use_of_a_damaged_leaf(folder):
    """If this failed, losing a damaged block would make its whole chain the next to go."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8), n_bytes=70_000))
    tier.put(blocks(range(50, 54), n_bytes=70_000))
    c = chain(range(8))
    tier.touch([c.keys[1]])
    tier.close()
    flip_payload(folder, c.keys[1])
    tier = ColdTier(folder, CAP, PlainCodec())
    assert len(tier.load(c.keys)) == 1
    tier.touch([BlockKey(b"x" * 32)])
    assert tier.n_blocks == 2
    tier.trim_to(tier.n_bytes - 1)
    assert holds(tier, range(4))
    assert not holds(tier, range(50, 54))
    tier.close()


def test_a_truncated_store_is_moved_aside_and_a_new_one_started(folder, caplog):
    """If this failed, a file cut by a full disk would end every server that opens it."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(40), n_bytes=100_000))
    tier.close()
    os.truncate(folder / health.DATA_NAME, 200_000)
    with caplog.at_level(logging.ERROR, "tieredkv"):
        tier = ColdTier(folder, CAP, PlainCodec())
    assert len(caplog.records) == 1
    assert "quarantine-" in caplog.text
    assert (tier.n_blocks, tier.put(blocks(range(4)))) == (0, 1)
    assert len(list(folder.glob("quarantine-*/data.mdb"))) == 1
    tier.close()


def test_a_store_found_damaged_while_in_use_is_started_over(folder):
    """If this failed, a damaged row would make every later write fail."""
    tier = ColdTier(folder, CAP, PlainCodec())
    other = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    edit(
        folder,
        "with env.begin(write=True) as txn:\n"
        "    for key, value in txn.cursor(db[b'index']):\n"
        "        txn.put(key, value[:-1], db=db[b'index'])\n",
    )
    assert tier.lookup(chain(range(8))) == 0
    assert tier.put(blocks(range(50, 58))) == 2
    assert other.put(blocks(range(60, 68))) == 2
    assert holds(tier, range(60, 68))
    assert tier.check() == []
    assert len(list(folder.glob("quarantine-*"))) == 1
    tier.close()
    other.close()


def test_a_deleted_directory_is_made_again(folder, caplog):
    """If this failed, the tier would stay dead until a restart."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING, "tieredkv"):
        assert tier.put(blocks(range(50, 58))) == 2
    assert holds(tier, range(50, 58))
    assert tier.lookup(chain(range(8))) == 0
    assert len(caplog.records) == 1
    assert (folder / health.DATA_NAME).exists()
    tier.close()


@pytest.mark.parametrize("what", ["index", "use", "order", "child", "blob", "namespace"])
def test_check_finds_a_row_that_is_gone(folder, what):
    """If this failed, check would pass a store whose rows contradict each other."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    edit(
        folder,
        "with env.begin(write=True) as txn:\n"
        f"    txn.delete(next(iter(txn.cursor(db[b'{what}'])))[0], db=db[b'{what}'])\n",
    )
    assert tier.check() != []
    tier.close()


@pytest.mark.parametrize("what", ["use", "order", "child", "blob"])
def test_check_finds_a_row_of_no_block(folder, what):
    """If this failed, rows could leak without anybody noticing."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    edit(
        folder,
        "with env.begin(write=True) as txn:\n"
        f"    txn.put(b'stray' * 8, bytes(16), db=db[b'{what}'])\n",
    )
    assert tier.check() != []
    tier.close()


# ---- directories that can't be used


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    """If this failed, the error would not say what to do, or the file be lost."""
    (tmp_path / "cold").write_text("mine")
    for path in (tmp_path / "cold", tmp_path / "cold" / "deeper"):
        with pytest.raises(ColdTierUnavailable, match="no directory"):
            ColdTier(path, CAP, PlainCodec())
    assert (tmp_path / "cold").read_text() == "mine"


def test_an_unwritable_directory_is_refused(folder):
    """If this failed, a server would not start, or not say why it has no cold tier."""
    if not os.geteuid():
        pytest.skip("root may write everywhere")
    folder.mkdir(mode=0o500)
    with pytest.raises(ColdTierUnavailable, match="writable"):
        ColdTier(folder, CAP, PlainCodec())


@pytest.mark.parametrize("content", [b"someone's notes", b""])
def test_a_data_file_of_somebody_else_is_refused_and_kept(folder, content):
    """If this failed, a wrong path would destroy another program's data."""
    folder.mkdir()
    (folder / health.DATA_NAME).write_bytes(content)
    with pytest.raises(ColdTierUnavailable, match="not made by"):
        ColdTier(folder, CAP, PlainCodec())
    assert [path.name for path in folder.iterdir()] == [health.DATA_NAME]
    assert (folder / health.DATA_NAME).read_bytes() == content


def test_an_lmdb_environment_of_somebody_else_is_refused_and_kept(folder):
    """If this failed, our databases would be created inside another program's."""
    with lmdb.open(str(folder), max_dbs=2) as env:
        theirs = env.open_db(b"theirs")
        with env.begin(write=True) as txn:
            txn.put(b"a", b"b", db=theirs)
    Gate(folder).close()
    with pytest.raises(ColdTierUnavailable, match="another program"):
        ColdTier(folder, CAP, PlainCodec())
    with lmdb.open(str(folder), max_dbs=2) as env, env.begin() as txn:
        assert [name for name, _ in txn.cursor()] == [b"theirs"]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("lacking", "version", "said"),
    [
        (("ghost", "left", "due", "pin"), 2, "of format 2"),
        (("due", "pin"), 3, "never released"),
    ],
)
def test_a_store_of_an_earlier_format_is_refused_and_kept(folder, lacking, version, said, is_known):
    """If this failed, an update would move a sound store aside, or not say what to do about it."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    tier.close()
    edit(
        folder,
        "with env.begin(write=True) as txn:\n"
        f"    for name in {lacking}: txn.drop(db[name.encode()])\n"
        f"    txn.put(b'format', ({version}).to_bytes(8, 'little'), db=db[b'meta'])\n",
    )
    if is_known:
        stamp = Stamp(folder, health.DATA_NAME)
        stamp.write()
        stamp.close()
    for open_tier in (ColdTier, lambda path, _, codec: ColdReader(path, codec)):
        with pytest.raises(ColdTierUnavailable, match=rf"{said}.*delete this one"):
            open_tier(folder, CAP, PlainCodec())
    assert not list(folder.glob("quarantine-*"))


def test_another_format_version_is_refused_and_kept(folder):
    """If this failed, an older version would misread a newer store, or delete it."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    tier.close()
    set_meta(folder, "format", 99)
    with pytest.raises(ColdTierUnavailable, match="format 99"):
        ColdTier(folder, CAP, PlainCodec())
    assert list(folder.glob("quarantine-*")) == []


def test_a_store_whose_cap_is_damaged_is_set_aside(folder):
    """If this failed, one flipped bit would keep a server from starting."""
    ColdTier(folder, CAP, PlainCodec()).close()
    set_meta(folder, "cap", 1 << 50)
    tier = ColdTier(folder, CAP, PlainCodec())
    assert tier.put(blocks(range(8))) == 2
    assert tier.cap_bytes == CAP
    assert len(list(folder.glob("quarantine-*"))) == 1
    tier.close()


@pytest.mark.parametrize("name", ["clock", "encoded"])
def test_a_store_whose_counts_are_at_their_end_is_set_aside(folder, name):
    """If this failed, every write from then on would raise, and nothing be stored any more."""
    ColdTier(folder, CAP, PlainCodec()).close()
    set_meta(folder, name, (1 << 64) - 1)
    tier = ColdTier(folder, CAP, PlainCodec())
    for start in range(3):
        tier.put(blocks(range(start, start + 8)))
    assert tier.put(blocks(range(8))) == 2
    assert len(list(folder.glob("quarantine-*"))) == 1
    tier.close()


def test_a_cap_that_cannot_be_mapped_is_a_fault(folder):
    """If this failed, a cap raised by a process with more memory could end another one."""
    ColdTier(folder, CAP, PlainCodec()).close()
    set_meta(folder, "cap", 1 << 47)
    tier = ColdTier(folder, CAP, PlainCodec())
    # Where addresses are longer, it can be mapped.
    if not tier.put(blocks(range(8))):
        assert set(tier.counters().faults) == {"lost"}
    assert not list(folder.glob("quarantine-*"))
    tier.close()


# ---- namespaces and reports


def test_layouts_are_listed_by_base(tier):
    """If this failed, a match before the first insert would not know what to look for."""
    other = replace(NAMESPACE, layout='{"layers":2}')
    foreign = replace(NAMESPACE, model="another")
    for namespace in (other, foreign):
        tier.register(namespace)
    for namespace in (NAMESPACE, other, foreign):
        tier.put(blocks_of(chain(range(4), namespace)))
    base = keys.base_key(NAMESPACE)
    assert sorted(tier.layouts(base)) == ['{"layers":1}', '{"layers":2}']
    tier.trim_to(0)
    assert tier.layouts(base) == []
    tier.put(blocks(range(4)))
    assert tier.layouts(base) == ['{"layers":1}']


def test_usage_adds_up_and_names_no_salt(folder):
    """If this failed, the report would be wrong, or betray the secret that separates tenants."""
    salt = b"a secret that must not be on disk"
    namespace = Namespace(model="m", adapter="a", salt=salt, block_tokens=4, layout="{}")
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.register(namespace)
    tier.put(blocks_of(chain(range(12), namespace), n_bytes=70_000))
    usage = tier.usage()
    (row,) = usage.namespaces
    assert (row.model, row.adapter, row.salted, row.block_tokens) == ("m", "a", True, 4)
    assert (row.blocks, row.raw_bytes, row.blob_bytes) == (3, 210_000, 210_000)
    assert 0 < row.oldest_use < row.newest_use
    assert (usage.blocks, usage.cap_bytes, usage.live_bytes) == (3, CAP, tier.n_bytes)
    assert usage.file_bytes == (folder / health.DATA_NAME).stat().st_size
    tier.close()
    assert all(salt not in path.read_bytes() for path in folder.iterdir())


def test_a_reader_sees_all_and_changes_nothing(tier, folder):
    """If this failed, a report could not be made while a server runs."""
    tier.put(blocks(range(8)))
    reader = ColdReader(folder, PlainCodec())
    assert reader.usage() == tier.usage()
    assert len(reader.load(chain(range(8)).keys)) == 2
    assert reader.verify() == []
    assert not hasattr(reader, "put")
    reader.close()


def test_a_reader_of_nothing_says_so_and_creates_nothing(folder):
    """If this failed, a mistyped path would be created and reported as empty."""
    with pytest.raises(ColdTierUnavailable, match="no cold tier"):
        ColdReader(folder, PlainCodec())
    assert not folder.exists()


def test_each_kind_of_fault_is_logged_once(tier, monkeypatch, caplog):
    """If this failed, a full disk would fill the log as well."""
    monkeypatch.setattr(ledger.Ledger, "add", failing_at(0, OSError(errno.EIO, "gone")))
    with caplog.at_level(logging.WARNING, "tieredkv"):
        for first in range(0, 40, 4):
            tier.put(blocks(range(first, first + 4)))
    assert len(caplog.records) == 1
    assert tier.counters().faults == {"disk": 10}
    monkeypatch.undo()


# ---- bytes


def test_a_record_is_these_bytes():
    """If this failed, stores written by an earlier version would be unreadable."""
    tokens = chain([1, -2]).tokens_of(0)
    record = Record(
        BlockKey(b"r" * 32), BlockKey(b"p" * 32), tokens, 1000, 65_513, b"c" * 16, 0x0102
    )
    packed = record.pack()
    assert packed.hex() == (
        "0ec0780e"
        "03000000" + "72" * 32 + "70" * 32 + "63" * 16 + "02000000" + "02000000"
        "e803000000000000" + "e9ff000000000000" + "0201000000000000"
        "0100000000000000" + "feffffffffffffff"
    )
    assert Record.unpack(packed) == record


def test_a_damaged_record_is_recognised_whatever_bit_flipped():
    """If this failed, a damaged size would be believed and that much memory allocated."""
    packed = blocks(range(4))[0]
    record = Record(packed.root, packed.parent, packed.tokens, 10, 10, b"c" * 16, 5).pack()
    for at in range(len(record)):
        damaged = bytearray(record)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptBlob):
            Record.unpack(bytes(damaged))
    for n in (0, 50, len(record) - 1):
        with pytest.raises(CorruptBlob):
            Record.unpack(record[:n])


@pytest.mark.parametrize(
    "change",
    [
        {"raw_bytes": MAX_RAW_BYTES + 1},
        {"blob_bytes": 0},
        {"blob_bytes": 65_537 * PIECE_BYTES},
        {"tokens": bytes(8 * 4097)},
    ],
)
def test_sizes_out_of_bounds_are_refused_even_with_a_right_crc(change):
    """If this failed, a hostile file could make us allocate without limit."""
    record = Record(BlockKey(bytes(32)), BlockKey(bytes(32)), bytes(8), 1, 1, bytes(16), 1)
    with pytest.raises(CorruptBlob, match="bounds"):
        Record.unpack(replace(record, **change).pack())


def test_small_rows_are_these_bytes():
    """If this failed, stores written by an earlier version would be unreadable."""
    key = bytes(range(32))
    standing = Standing(258, TAIL, turn=3, fresh=4, refs=5, branches=6, awaited=True)
    packed = "0201000000000000" + "03000000" + "04000000" + "05000000" + "06000000" + "01010000"
    use = Use(standing, used=7, children=8, grade=3, expires=258)
    numbers = "0700000000000000" + "08000000" + "03000000" + "0201000000000000"
    assert use.pack().hex() == packed + numbers
    assert Use.unpack(use.pack()) == use
    assert order_key(use, key) == bytes.fromhex("3c" + "0000000000000102") + key
    assert due_key(258, key) == bytes.fromhex("0000000000000102") + key
    assert pack_number(258) == bytes.fromhex("0201000000000000")
    ghost = Ghost(9, standing)
    assert ghost.pack().hex() == "0900000000000000" + packed
    assert Ghost.unpack(ghost.pack()) == ghost
    assert left_key(258, key) == bytes.fromhex("0000000000000102") + key
    assert piece_key(key, 258) == key + b"\x01\x02"
    assert pack_namespace(Totals(1, 2, 3), key, b"{}") == (
        bytes.fromhex("010000000000000002000000000000000300000000000000") + key + b"{}"
    )


def test_child_rows_are_these_bytes():
    """If this failed, partial matches of an earlier version's store would be lost."""
    parent, key = b"p" * 32, bytes(range(32))
    (row,) = child_rows(parent, key, chain([1, 300]).tokens_of(0))
    assert row == parent + b"\0" + bytes(8) + b"\x02" + "\u012d".encode() + b"\0" + key[:8]
    before = hashlib.blake2b(b"\x01" * 400, digest_size=8).digest()
    first, second = child_rows(parent, key, chain([0] * 400, block_tokens=400).tokens_of(0))
    assert first == parent + b"\0" + bytes(8) + b"\x01" * 400 + b"\0" + key[:8]
    assert second == parent + b"\x01" + before + b"\0" + key[:8]
    assert max(map(len, (first, second))) == 450


def test_the_longest_block_of_the_longest_tokens_has_rows():
    """If this failed, a prompt of image tokens could overflow the level's byte."""
    rows = child_rows(b"p" * 32, b"k" * 32, chain([-1] * 4096, block_tokens=4096).tokens_of(0))
    assert len(rows) == 205
    assert max(map(len, rows)) == 450


def test_a_thousand_records_digest_as_ever():
    """If this failed, some key or record would have changed that the examples don't show."""
    digest = hashlib.blake2b(digest_size=16)
    dice = random.Random(7)
    for i in range(1000):
        ids = [dice.randrange(-(1 << 60), 1 << 60) >> dice.randrange(60) for _ in range(1 + i % 9)]
        block = blocks(ids)[0]
        record = Record(block.root, block.parent, block.tokens, i, i + 1, bytes(16), i)
        digest.update(block.key + record.pack() + order_key(Use(Standing(i)), block.key))
        for row in child_rows(block.parent, block.key, block.tokens):
            digest.update(row)
    assert digest.hexdigest() == "5248e22f78274f83c2df5b567d55f6c5"


def test_the_description_of_a_namespace_is_this_json(folder):
    """If this failed, reports and layouts of an earlier version's store would be lost."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.register(replace(NAMESPACE, salt=b"s"))
    tier.put(blocks_of(chain(range(4), replace(NAMESPACE, salt=b"s"))))
    tier.close()
    with lmdb.open(str(folder), readonly=True, max_dbs=16) as env:
        db = env.open_db(b"namespace", create=False)
        with env.begin() as txn:
            ((root, data),) = list(txn.cursor(db))
    assert root == keys.namespace_key(replace(NAMESPACE, salt=b"s"))
    assert data[24:56] == keys.base_key(replace(NAMESPACE, salt=b"s"))
    assert json.loads(data[56:]) == {
        "adapter": "",
        "block_tokens": 4,
        "draft": "",
        "host": "",
        "layout": '{"layers":1}',
        "model": "test-model",
        "name": "",
        "salted": True,
        "shard": "0/1",
    }


def test_the_file_stops_growing_where_the_disk_is_to_be_left_free(folder):
    """If this failed, a cap set on an empty disk would fill it for everybody else."""
    tier = ColdTier(folder, CAP, PlainCodec())
    tier.put(blocks(range(80), n_bytes=100_000))
    tier.close()
    size = (folder / "data.mdb").stat().st_size
    disk = os.statvfs(folder)
    tier = ColdTier(folder, CAP, PlainCodec(), disk.f_blocks * disk.f_frsize)
    for i in range(1, 40):
        tier.put(blocks(range(1000 * i, 1000 * i + 8), n_bytes=100_000))
        # Rows of the index may take a page or two more.
        assert (folder / "data.mdb").stat().st_size <= size + (1 << 18)
    counters = tier.counters()
    assert counters.faults == {}
    assert set(counters.dropped) <= {"disk_reserve", "no_room", "settling"}
    assert tier.check() == []
    tier.close()


def test_pages_too_scattered_for_a_block_are_gathered(folder):
    """If this failed, large blocks would be dropped once a full store has small ones in it."""
    tier = ColdTier(folder, 4 << 20, PlainCodec())
    dice = random.Random(3)
    kept = 0
    for i in range(300):
        n_bytes = dice.choice([2_000, 2_000, 30_000, 200_000])
        kept += tier.put(blocks(range(1000 * i, 1000 * i + 4), n_bytes=n_bytes))
    assert kept >= 299
    assert tier.check() == []
    tier.close()


def test_namespaces_that_clients_make_up_take_no_memory_without_end(tier):
    """If this failed, a client could fill the server's memory with a new salt for each request."""
    for i in range(5000):
        tier.register(replace(NAMESPACE, salt=b"%d" % i))
    assert len(tier._origins) < 5000
    tier.register(NAMESPACE)
    tier.put(blocks(range(4)))
    assert [n.model for n in tier.usage().namespaces] == [NAMESPACE.model]
