"""One cold directory and several processes: killed at any point, or at work at the same time."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from cold_blocks import PlainCodec, blocks, chain, is_right

from tieredkv.tiers.cold import ColdReader, ColdTier

CAP = 256 << 20
SMALL_CAP = 4 << 20

# Spawned processes would spend a second each on imports; those of the fork server have them.
# It never opens a store itself, so nothing of LMDB is carried across its forks.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["cold_blocks", "tieredkv.tiers.cold"])


def prompt(seed: int, i: int) -> list[int]:
    """The i-th prompt of a stream: conversations that grow by a few tokens, with tails."""
    conversation, turn = divmod(i, 5)
    dice = random.Random(f"{seed}-{conversation}")
    return [dice.randrange(1000) for _ in range(3 * turn + 5)]


def write_stream(folder, cap, seed, pipe):
    """Put prompts for ever and report each by its number once it is committed."""
    tier = ColdTier(folder, cap, PlainCodec())
    i = 0
    while True:
        batch = blocks(prompt(seed, i), n_bytes=20_000)
        if tier.put(batch) == len(batch):
            pipe.send(i)
        i += 1


@contextmanager
def writing(folder, cap, seed):
    """A process that writes a stream, and the pipe that it reports on; killed at the end."""
    mine, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=write_stream, args=(folder, cap, seed, theirs))
    process.start()
    theirs.close()
    try:
        yield process, mine
    finally:
        process.kill()
        process.join()


def reported(pipe):
    """What was committed according to a process that is dead by now."""
    done = []
    try:
        while True:
            done.append(pipe.recv())
    except (EOFError, OSError):
        return done


def kill_at_random(folder, cap, seed):
    """Let a writer run for a moment, kill it, and return what it had reported."""
    with writing(folder, cap, seed) as (process, pipe):
        assert pipe.poll(20), "the writer did not get to its first commit"
        time.sleep(random.Random(seed).uniform(0, 0.08))
        process.kill()
        return reported(pipe)


def test_whatever_was_committed_survives_kill_9(tmp_path):
    """If this failed, a crash would lose prompts that insert had returned from, or their bytes."""
    committed = 0
    for seed in range(50):
        done = kill_at_random(tmp_path, CAP, seed)
        committed += len(done)
        tier = ColdTier(tmp_path, CAP, PlainCodec())
        assert tier.check() == []
        for i in done:
            c = chain(prompt(seed, i))
            assert tier.missing(c) == len(c.keys)
            assert all(map(is_right, tier.load(c.keys)))
            assert len(tier.load(c.keys)) >= c.n_full
        tier.close()
    assert committed > 50
    assert list(tmp_path.glob("quarantine-*")) == []


def test_a_kill_amid_evictions_leaves_a_valid_store(tmp_path):
    """If this failed, a crash while blocks are deleted would leave orphans, or foreign bytes."""
    for seed in range(12):
        kill_at_random(tmp_path, SMALL_CAP, seed)
        tier = ColdTier(tmp_path, SMALL_CAP, PlainCodec())
        assert tier.verify() == []
        assert 0 < tier.n_bytes <= SMALL_CAP
        tier.close()
    assert (tmp_path / "data.mdb").stat().st_size <= SMALL_CAP


def test_killed_writers_hold_up_nobody(tmp_path):
    """If this failed, one killed server would hang the writers of all others."""
    tier = ColdTier(tmp_path, CAP, PlainCodec())
    slowest = 0.0
    for seed in range(10):
        kill_at_random(tmp_path, CAP, seed)
        started = time.monotonic()
        assert tier.put(blocks(range(1000 * seed, 1000 * seed + 4))) == 1
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 5
    assert tier.counters().faults == {}
    tier.close()


def write_some(folder, own, barrier):
    """Put prompts that only this process has, between ones that all have."""
    tier = ColdTier(folder, CAP, PlainCodec())
    barrier.wait()
    for i in range(30):
        for seed in (own, 0):
            batch = blocks(prompt(seed, i), n_bytes=20_000)
            assert tier.put(batch) == len(batch)
    wrong = [i for i in range(30) for b in tier.load(chain(prompt(own, i)).keys) if not is_right(b)]
    assert wrong == []
    assert tier.counters().faults == {}
    tier.close()


def test_two_processes_keep_their_own_and_share_what_is_equal(tmp_path):
    """If this failed, processes would overwrite each other's blocks, or store equal ones twice."""
    barrier = PROCESSES.Barrier(2)
    writers = [
        PROCESSES.Process(target=write_some, args=(tmp_path, own, barrier)) for own in (1, 2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]

    alone = ColdTier(tmp_path / "alone", CAP, PlainCodec())
    for i in range(30):
        for seed in (0, 1, 2):
            alone.put(blocks(prompt(seed, i), n_bytes=20_000))
    both = ColdTier(tmp_path, CAP, PlainCodec())
    assert both.verify() == []
    assert both.n_blocks == alone.n_blocks
    assert both.usage().namespaces[0].raw_bytes == alone.usage().namespaces[0].raw_bytes
    alone.close()
    both.close()


def answer(folder, pipe):
    """Do to the store what is asked, until nothing more is."""
    tier = ColdTier(folder, CAP, PlainCodec())
    while (question := pipe.recv()) is not None:
        what, tokens = question
        if what == "lookup":
            pipe.send(tier.lookup(chain(tokens)))
        if what == "empty":
            tier.trim_to(0)
            pipe.send(tier.n_blocks)
    tier.close()


@pytest.fixture
def other(tmp_path):
    """Ask another process that has the same store open."""
    mine, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=answer, args=(tmp_path, theirs))
    process.start()

    def ask(what, tokens=()):
        mine.send((what, list(tokens)))
        assert mine.poll(20)
        return mine.recv()

    yield ask
    mine.send(None)
    process.join(20)
    assert process.exitcode == 0


def test_a_commit_is_seen_by_another_process_at_once(tmp_path, other):
    """If this failed, servers that share a directory would recompute each other's prompts."""
    tier = ColdTier(tmp_path, CAP, PlainCodec())
    for first in range(0, 400, 8):
        tokens = range(first, first + 8)
        assert other("lookup", tokens) == 0
        tier.put(blocks(tokens))
        assert other("lookup", tokens) == 2
    tier.close()


def test_blocks_evicted_between_match_and_load_are_a_miss(tmp_path, other):
    """If this failed, an eviction by another process would be an error, or foreign bytes."""
    tier = ColdTier(tmp_path, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    c = chain(range(8))
    assert tier.lookup(c) == 2
    assert other("empty") == 0
    assert tier.load(c.keys) == []
    tier.touch(c.keys)
    assert tier.counters().faults == {}
    tier.close()


def test_a_running_store_can_be_reported_on(tmp_path):
    """If this failed, an operator could not look at a store while a server writes to it."""
    with writing(tmp_path, CAP, 1) as (_process, pipe):
        assert pipe.poll(20)
        for _ in range(20):
            reader = ColdReader(tmp_path, PlainCodec())
            assert reader.check() == []
            assert reader.usage().blocks > 0
            reader.close()


FORK_AND_EXIT = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from cold_blocks import PlainCodec, blocks, chain
from tieredkv.tiers.cold import ColdTier
tier = ColdTier(Path(sys.argv[1]), 1 << 26, PlainCodec())
tier.put(blocks(range(8)))
tier.n_blocks
if not os.fork():
    sys.exit(0)
os.wait()
assert len(tier.load(chain(range(8)).keys)) == 2
assert tier.put(blocks(range(50, 58))) == 2
assert tier.counters().faults == {}, tier.counters()
tier.close()
"""


def test_a_forked_child_that_ends_takes_nothing_from_its_parent(tmp_path):
    """If this failed, a child's exit would free its parent's reader slot or locks."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", FORK_AND_EXIT, str(tmp_path), here]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
