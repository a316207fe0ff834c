"""What the eviction policy costs a request in a cold store of 100,000 blocks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import nothing
from tieredkv import hazard, keys
from tieredkv.core import BlockKey, Chain, Namespace
from tieredkv.hazard import Judge, Standing, Trial
from tieredkv.tiers import environment
from tieredkv.tiers.environment import Environment, open_for_writing
from tieredkv.tiers.ledger import Ledger, Rows
from tieredkv.tiers.records import Record, Use, unpack_order

BLOCKS = 100_000
BLOCK_TOKENS = 16
# A turn of a conversation: the end of a chain is used, and so many blocks are added and leave.
TURN = 8
ROUNDS = 200
# Turns that evict before it is measured, so that there are ghosts.
WARM = 2048
BLOB = b"x" * 64
ROOT = keys.namespace_key(Namespace("bench"))


def record(chain: Chain, i: int) -> Record:
    """The record of a block of 64 bytes."""
    return Record(ROOT, chain.parent(i), chain.tokens_of(i), 64, len(BLOB), bytes(16), 1)


def add(chain: Chain, start: int, ledger: Ledger) -> None:
    """Add the blocks of a chain from ``start`` on."""
    for i in range(start, len(chain.keys)):
        ledger.add(chain.keys[i], record(chain, i), BLOB, hazard.BLOCK, 0, None)


def turn(judge: Judge[BlockKey], chain: Chain, start: int, ledger: Ledger) -> None:
    """Use the block before ``start``, and put those from there on in place of others."""
    spared = frozenset(chain.keys)
    if start:
        ledger.touch(chain.keys[start - 1])
    judge.saw(chain.keys, start, BLOCKS)
    for _ in range(start, len(chain.keys)):
        ledger.evict(judge, spared)
    add(chain, start, ledger)


class LeafLru(Ledger):
    """The rows that leaf-LRU needs: a last use for each block, and an order of leaves by it."""

    def renew(self, key: bytes) -> None:
        """Record a use."""
        use = self.use(key)
        self._put_use(key, use, replace(use, standing=Standing(self._tick()), used=1))

    def evict_oldest(self) -> None:
        """Delete the first leaf in order."""
        cursor = self._txn.cursor(self._dbs.order)
        cursor.first()
        key = unpack_order(bytes(cursor.key()))[2]
        self._delete(key, self.use(key))

    def add_one(self, chain: Chain, i: int) -> None:
        """Add a block."""
        self.insert(chain.keys[i], record(chain, i), BLOB, Use(Standing(self._tick()), 1), None)

    def _orphaned_by(self, parent: bytes, child: Use) -> None:
        use = self.use(parent)
        standing = replace(use.standing, last=max(use.last, child.last))
        self._put_use(parent, use, replace(use, standing=standing, children=use.children - 1))


def lru_turn(chain: Chain, start: int, ledger: Ledger) -> None:
    """As `turn`."""
    assert isinstance(ledger, LeafLru)
    if start:
        ledger.renew(chain.keys[start - 1])
    for _ in range(start, len(chain.keys)):
        ledger.evict_oldest()
    for i in range(start, len(chain.keys)):
        ledger.add_one(chain, i)


def conversations(dice: random.Random) -> Iterator[Chain]:
    """Chains, of which most go on by a turn each time, and some are new."""
    tokens: list[list[int]] = []
    while True:
        if not tokens or dice.random() < 0.2:
            tokens.append([])
        mine = dice.choice(tokens[-4000:])
        mine += [dice.randrange(150_000) for _ in range(TURN * BLOCK_TOKENS)]
        if len(mine) > 64 * BLOCK_TOKENS:
            tokens.remove(mine)
        yield keys.chain(ROOT, keys.as_tokens(mine), BLOCK_TOKENS)


def held(chain: Chain, rows: Rows) -> int:
    """How many leading blocks of a chain are there."""
    return next((i for i, key in enumerate(chain.keys) if not rows.has(key)), len(chain.keys))


def timed(work: Callable[[Ledger], None], environment: Environment) -> float:
    """Seconds that a processor has with ``work`` and with what is written at the end of its
    transaction; without the commit.
    """
    seconds: list[float] = []

    def run(ledger: Ledger) -> None:
        start = time.thread_time()
        work(ledger)
        ledger.finish()
        seconds.append(time.thread_time() - start)

    environment.write(run)
    return seconds[-1]


def fill(judge: Judge[BlockKey], turns: Iterator[Chain], ledger: Ledger) -> None:
    """Some turns; blocks leave once there are enough."""
    for _ in range(64):
        chain = next(turns)
        start = held(chain, ledger)
        if ledger.n_blocks >= BLOCKS:
            turn(judge, chain, start, ledger)
            continue
        if start:
            ledger.touch(chain.keys[start - 1])
        add(chain, start, ledger)


def test_policy_of_a_request(
    benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that uses one block, adds eight and evicts eight, with all rows that these have but
    their pieces; and what of it leaf-LRU would cost as well.
    """
    opened = open_for_writing(tmp_path, 4 << 30)
    judge: Judge[BlockKey] = Judge(Trial())
    turns = conversations(random.Random(1))
    while opened.read(lambda rows: rows.n_blocks) < BLOCKS:
        opened.write(partial(fill, judge, turns))
    for _ in range(WARM // 64):
        opened.write(partial(fill, judge, turns))
    ours, theirs = [], []
    while len(theirs) < ROUNDS:
        for ledger, work, seconds in (
            (Ledger, partial(turn, judge), ours),
            (LeafLru, lru_turn, theirs),
        ):
            monkeypatch.setattr(environment, "Ledger", ledger)
            # Not one that lost its blocks, and adds them all again.
            chain, start = next(
                (chain, n)
                for chain in turns
                if (n := opened.read(partial(held, chain))) + TURN == len(chain.keys)
            )
            seconds.append(timed(partial(work, chain, start), opened))
    opened.release()
    benchmark.pedantic(nothing, rounds=1)
    ms = {"in all": statistics.mean(ours) * 1e3, "leaf-lru": statistics.mean(theirs) * 1e3}
    ms["beyond leaf-lru"] = ms["in all"] - ms["leaf-lru"]
    benchmark.extra_info |= {f"ms, {name}": value for name, value in ms.items()}
    assert ms["beyond leaf-lru"] <= 1
