"""Everything that can be done to a cold tier, in any order, by two processes, against a model."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from cold_blocks import NAMESPACE, PlainCodec, blocks_of, chain, content, is_right
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tieredkv import hazard, keys
from tieredkv.core import Block, BlockKey, Chain, PinRefused, TensorSpec, later
from tieredkv.tiers import health
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.rebuild import rebuild
from tieredkv.tiers.records import Ghost, Use, piece_key

# Room for some thirty blocks.
CAP = 1 << 20
N_BYTES = 20_000
NAMESPACES = (NAMESPACE, replace(NAMESPACE, model="another"))
NOBODY = BlockKey(b"n" * 32)
# A block's pieces in whole pages, and how many blocks pins may protect.
PIECE_BYTES = 20480
PIN_SHARE = 0.3
# Expiries lie in the future, so that only who is told of a later time deletes by them.
LATER = 1 << 62

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["cold_blocks", "tieredkv.tiers.cold"])


def settle(patch):
    """Make openings fast."""
    # A start of the interpreter for each opening would leave no time for anything else.
    patch.setattr(health, "_walk_apart", lambda *_: None)


def open_tier(folder):
    tier = ColdTier(folder, CAP, PlainCodec(), block_tokens=4, pin_share=PIN_SHARE)
    for namespace in NAMESPACES:
        tier.register(namespace)
    return tier


def serve(pipe):
    """Do to a tier of this process what is asked."""
    settle(pytest.MonkeyPatch())
    tier = None
    while (question := pipe.recv()) is not None:
        name, arguments = question
        if name == "open":
            tier = open_tier(*arguments)
            pipe.send(None)
            continue
        pipe.send(ask(tier, name, *arguments))


def ask(tier, name, *arguments):
    """What a method returns, as it can be sent; why, if a pin is refused."""
    try:
        found = getattr(tier, name)(*arguments)
    except PinRefused as refusal:
        return refusal.reason
    return list(found) if name == "prune" else found


class Remote:
    """A tier in another process; its methods, not its properties."""

    pipe = None

    def __init__(self, folder):
        if Remote.pipe is None:
            Remote.pipe, theirs = PROCESSES.Pipe()
            PROCESSES.Process(target=serve, args=(theirs,), daemon=True).start()
        self._ask("open", folder)

    def _ask(self, name, *arguments):
        Remote.pipe.send((name, arguments))
        assert Remote.pipe.poll(30)
        return Remote.pipe.recv()

    def __getattr__(self, name):
        return lambda *arguments: self._ask(name, *arguments)


def state_of(parent, key, tokens, grade):
    """A snapshot or window, with the content of its key."""
    spec = TensorSpec("uint8", (1, 1, N_BYTES, 1))
    data = np.frombuffer(content(key, N_BYTES), np.uint8).reshape(spec.shape)
    return Block(parent.root, parent.key, key, tokens, (spec,), (data,), grade)


def snapshot_of(parent, grade):
    return state_of(parent, keys.snapshot_key(parent.key), b"", grade)


def window_of(parent, grade):
    return state_of(parent, keys.window_key(parent.key), keys.WINDOW_TOKENS, grade)


def leads(shorter, longer):
    """Whether a block has the first tokens of a sibling, but not all."""
    return (
        shorter.parent == longer.parent
        and shorter.tokens
        and len(longer.tokens) > len(shorter.tokens)
        and longer.tokens.startswith(shorter.tokens)
    )


@dataclass
class Model:
    """What a tier must hold: blocks in a dict."""

    blocks: dict[BlockKey, Block] = field(default_factory=dict)
    # At most one: which of several a load comes across is left to its threads.
    damaged: set[BlockKey] = field(default_factory=set)
    expires: dict[BlockKey, int] = field(default_factory=dict)
    pinned: set[BlockKey] = field(default_factory=set)

    def protected(self):
        """What is pinned, and all above it."""
        found = set()
        for key in self.pinned:
            while key in self.blocks:
                found.add(key)
                key = self.blocks[key].parent
        return found

    def raise_expiry(self, key, expires):
        if key in self.blocks:
            self.expires[key] = later(self.expires[key], expires)

    def expire(self, now):
        """Remove what has expired; how many."""
        n = len(self.blocks)
        while due := [k for k in self.blocks if self.is_due(k, now)]:
            for key in due:
                self.remove(key)
        return n - len(self.blocks)

    def is_due(self, key, now):
        is_leaf = not self.children(key) and key not in self.pinned
        return is_leaf and 0 < self.expires[key] <= now

    def children(self, key):
        return [k for k, block in self.blocks.items() if block.parent == key]

    def remove(self, key):
        """With all that is below it."""
        for child in self.children(key):
            self.remove(child)
        if key in self.blocks:
            self.raise_expiry(self.blocks[key].parent, self.expires[key])
            del self.blocks[key]
        self.damaged.discard(key)
        self.pinned.discard(key)

    def put(self, batch, n_held):
        """Put the first ``n_held`` blocks of a batch; the tails that may have been superseded."""
        covered = set()
        for i, block in enumerate(batch[:n_held]):
            is_last = i + 1 == len(batch) or batch[i + 1].parent != block.key
            covers = [b for b in self.blocks.values() if leads(block, b)]
            if block.key in self.blocks or (covers and is_last):
                if block.key in self.blocks and is_last:
                    self.raise_expiry(block.key, block.expires)
                continue
            assert block.parent == block.root or block.parent in self.blocks
            covered |= {b.key for b in self.blocks.values() if leads(b, block)}
            self.blocks[block.key] = block
            self.expires[block.key] = block.expires
        return covered

    def leave(self, gone, spared=frozenset(), optional=frozenset()):
        """Let ``gone`` go, each of which must have been a leaf by then; any of ``optional`` may
        have gone before.
        """
        assert not gone & spared, "a block was evicted to make room for its own chain"
        assert not gone & self.protected(), "a pinned block was evicted"
        for key in gone:
            assert gone | optional >= set(self.children(key)), "a block left before its child"
        for key in gone:
            self.remove(key)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
namespaces = st.sampled_from(NAMESPACES)
handles = st.integers(0, 1)
grades = st.integers(0, 3)
indices = st.integers(0, 1000)
expiries = st.just(0) | st.integers(LATER, LATER + 9)


class ColdMachine(RuleBasedStateMachine):
    """A tier of this process and one of another on one directory, against one model.

    A tier is *stale* from when the store was made anew to its next write: until then it reads
    the old file. At most one is at a time.
    """

    @initialize(all_tokens=st.lists(prompts, min_size=4, max_size=10))
    def start(self, all_tokens):
        self.patch = pytest.MonkeyPatch()
        settle(self.patch)
        self.folder = Path(tempfile.mkdtemp())
        self.tiers = [open_tier(self.folder), Remote(self.folder)]
        self.stale = [False, False]
        self.condemned = [set(), set()]
        self.model = Model()
        self.miscounted = False
        self.crowded = False
        for at, tokens in enumerate(all_tokens):
            self.put(at % 2, tokens, NAMESPACES[at % 3 == 0], at % 4, at % 2 == 0)

    # ---- what a handle knows

    def write(self, i):
        """What any write of a tier does first: change over, and delete what it found damaged."""
        if self.stale[i]:
            self.stale[i] = False
        else:
            for key in self.condemned[i]:
                self.model.remove(key)
        self.condemned[i] = set()

    def refresh(self, i):
        self.tiers[i].touch([NOBODY])
        self.write(i)

    def fresh(self):
        return self.tiers[self.stale.index(False)]

    def present(self):
        """Of the blocks in the model those that are there, condemned or not."""
        known = list(self.model.blocks)
        i = self.stale.index(False)
        return self.tiers[i].present(known) | (self.condemned[i] & self.model.blocks.keys())

    # ---- rules

    @rule(
        i=handles,
        tokens=prompts,
        namespace=namespaces,
        grade=grades,
        snapshot=st.booleans(),
        expires=expiries,
    )
    def put(self, i, tokens, namespace, grade, snapshot, expires=0):
        batch = blocks_of(chain(tokens, namespace), N_BYTES)
        if snapshot:
            batch.append(snapshot_of(batch[-1], grade))
        self.store(i, [replace(block, expires=expires) for block in batch])

    @rule(i=handles, tokens=prompts, namespace=namespaces, grade=grades)
    def put_windows(self, i, tokens, namespace, grade):
        full = blocks_of(chain(tokens, namespace), N_BYTES)[: len(tokens) // 4]
        for block in full:
            if block.key in self.model.blocks:
                self.store(i, [window_of(block, grade)])

    def store(self, i, batch):
        if i and self.stale[0]:
            # By its rows it is seen what the other one did.
            self.refresh(0)
        was_stale = self.stale[i]
        held = self.tiers[i].put(batch)
        self.write(i)
        orphaned = batch[0].parent != batch[0].root and batch[0].parent not in self.model.blocks
        if orphaned:
            assert held == 0
        elif not was_stale:
            # A stale tier may have taken for known what is no longer there.
            assert held == len(batch)
        covered = self.model.put(batch, held)
        present = self.present()
        spared = {key for block in batch for key in (block.key, block.parent)}
        gone = self.model.blocks.keys() - present - covered
        self.model.leave(gone, spared, covered - present)
        for key in covered - present:
            assert not self.model.children(key), "a block with a child was superseded"
            self.hand_on(key, batch)
            self.model.remove(key)
        self.see_who_was_raised(batch)

    def hand_on(self, key, batch):
        """A tail was superseded, or evicted before it could be."""
        (by,) = (b.key for b in batch if leads(self.model.blocks[key], b))
        if key in self.model.pinned:
            self.model.pinned.add(by)
        kept = {self.model.expires[by], later(self.model.expires[by], self.model.expires[key])}
        self.model.expires[by] = self.expiry_of(by)
        assert self.model.expires[by] in kept

    def see_who_was_raised(self, batch):
        """Of those that cover the end of a batch one was put again; which is the tier's choice."""
        covers = [b.key for b in self.model.blocks.values() if leads(batch[-1], b)]
        if batch[-1].key in self.model.blocks:
            return
        for key in covers:
            before = self.model.expires[key]
            self.model.expires[key] = self.expiry_of(key)
            assert self.model.expires[key] in (before, later(before, batch[-1].expires))

    def expiry_of(self, key):
        return Use.unpack(self.rows("use")[key]).expires

    @rule(i=handles, tokens=prompts, namespace=namespaces)
    def touch_in_vain(self, i, tokens, namespace):
        self.touch_one(i, chain(tokens, namespace).keys[-1])

    @rule(i=handles, at=indices, expires=expiries)
    @precondition(lambda self: self.model.blocks)
    def touch(self, i, at, expires):
        self.touch_one(i, self.known(at), expires)

    def touch_one(self, i, key, expires=0):
        self.tiers[i].touch([key], expires)
        self.write(i)
        self.model.raise_expiry(key, expires)

    @rule(i=handles, now=st.integers(LATER, LATER + 9))
    @precondition(lambda self: self.model.blocks)
    def expire(self, i, now):
        self.refresh(i)
        n = self.model.expire(now)
        assert self.tiers[i].expire(now) == n

    @rule(i=handles, at=indices)
    @precondition(lambda self: self.model.blocks)
    def pin(self, i, at):
        self.refresh(i)
        ends = [key for key, block in sorted(self.model.blocks.items()) if self.is_prefix(block)]
        if not ends:
            return
        key = ends[at % len(ends)]
        state = {keys.snapshot_key(key)} & self.model.blocks.keys()
        before = self.model.protected()
        pinned = self.model.pinned | {key, *state}
        after = replace(self.model, pinned=pinned).protected()
        found = ask(self.tiers[i], "pin_id", key.hex())
        is_refused = len(after) * PIECE_BYTES > max(len(before) * PIECE_BYTES, PIN_SHARE * CAP)
        if is_refused:
            assert found == "share"
            return
        assert found.id == keys.prefix_id(key)
        assert found.n_tokens == len(self.path(key).tokens)
        self.model.pinned = pinned

    @rule(i=handles, at=indices)
    @precondition(lambda self: self.model.pinned)
    def unpin(self, i, at):
        self.refresh(i)
        ends = [key for key in sorted(self.model.pinned) if self.is_prefix(self.model.blocks[key])]
        if not ends:
            return
        key = ends[at % len(ends)]
        assert ask(self.tiers[i], "unpin_id", key.hex()).id == keys.prefix_id(key)
        self.model.pinned -= {key, keys.snapshot_key(key)}

    def is_prefix(self, block):
        return block.tokens not in (b"", keys.WINDOW_TOKENS)

    @rule(i=handles, part=st.floats(0.2, 1))
    @precondition(lambda self: self.model.blocks)
    def trim(self, i, part):
        self.refresh(i)
        self.tiers[i].trim_to(int(self.tiers[0].n_bytes * part))
        self.model.leave(self.model.blocks.keys() - self.present())

    @rule(i=handles, tokens=prompts, namespace=namespaces)
    def look_for(self, i, tokens, namespace):
        self.look(i, keys.with_snapshot(chain(tokens, namespace)))

    @rule(i=handles, at=indices)
    @precondition(lambda self: self.model.blocks)
    def look_at(self, i, at):
        self.look(i, self.path(self.known(at)))

    def look(self, i, c):
        tier = self.tiers[i]
        loaded = tier.load(c.keys)
        assert [block.key for block in loaded] == list(c.keys[: len(loaded)])
        assert all(map(is_right, loaded))
        if self.stale[i]:
            return
        there = [key in self.model.blocks and key not in self.condemned[i] for key in c.keys]
        leading = c.keys[: there.index(False) if False in there else len(there)]
        damaged = self.model.damaged & set(leading)
        for key in damaged:
            leading = leading[: leading.index(key)]
        assert len(loaded) == len(leading)
        self.condemned[i] |= damaged
        assert tier.lookup(c) == min(len(leading), c.n_full)
        assert tier.missing(c) >= len(leading)

    @rule(i=handles)
    @precondition(lambda self: self.model.blocks)
    def reopen(self, i):
        self.tiers[i].close()
        self.tiers[i] = Remote(self.folder) if i else open_tier(self.folder)
        self.stale[i] = False
        self.condemned[i] = set()

    @rule(i=handles, at=indices, pinned=st.booleans())
    @precondition(lambda self: self.model.blocks)
    def prune_by_age(self, i, at, pinned):
        for handle in (0, i):
            self.refresh(handle)
        if not self.model.blocks:
            return
        uses = {k: Use.unpack(v) for k, v in self.rows("use").items()}
        cutoff = sorted(use.used for use in uses.values())[at % len(uses)]
        latest = {key: use.used for key, use in uses.items()}
        for key in uses:
            below = key
            while below in self.model.blocks:
                below = self.model.blocks[below].parent
                if below in latest:
                    latest[below] = max(latest[below], uses[key].used)
        pruned = list(self.tiers[i].prune(Criteria(unused_since=cutoff, pinned=pinned)))
        spared = set() if pinned else self.model.protected()
        wanted = {k for k, v in latest.items() if v < cutoff} - spared
        assert {victim.key for victim in pruned} == wanted
        for victim in pruned:
            self.model.remove(victim.key)

    @rule(i=handles, namespace=namespaces, pinned=st.booleans())
    @precondition(lambda self: self.model.blocks)
    def prune_by_model(self, i, namespace, pinned):
        self.refresh(i)
        criteria = Criteria(model=namespace.model, salt=b"", pinned=pinned)
        pruned = list(self.tiers[i].prune(criteria))
        root = keys.namespace_key(namespace)
        mine = {key for key, block in self.model.blocks.items() if block.root == root}
        mine -= set() if pinned else self.model.protected()
        assert {victim.key for victim in pruned} == mine
        for key in mine:
            self.model.remove(key)

    @rule(first=handles)
    @precondition(lambda self: self.model.blocks)
    def make_anew(self, first):
        done = rebuild(self.folder, PlainCodec())
        # What was waited for in vain with damaged blocks goes on being counted.
        self.miscounted |= bool(self.model.damaged)
        expires = self.model.expires.copy()
        for key in list(self.model.damaged):
            self.model.remove(key)
        # They aren't removed, but never copied: nobody inherits.
        self.model.expires = expires
        assert done.kept == len(self.model.blocks)
        self.stale = [True, True]
        self.refresh(first)

    @rule(at=indices, byte=st.integers(0, N_BYTES - 1))
    @precondition(lambda self: self.model.blocks and not self.model.damaged)
    def damage(self, at, byte):
        self.refresh(0)
        if not self.model.blocks:
            return
        key = self.known(at)

        def flip(rows):
            txn, db = rows._txn, rows._dbs.blob
            piece = bytearray(txn.get(piece_key(key, 0), db=db))
            piece[byte] ^= 1
            txn.put(piece_key(key, 0), bytes(piece), db=db)

        self.tiers[0]._environment.write(flip)
        self.model.damaged.add(key)

    def known(self, at):
        return sorted(self.model.blocks)[at % len(self.model.blocks)]

    def path(self, key):
        """The chain that ends in a block."""
        found = []
        while key in self.model.blocks:
            found.insert(0, self.model.blocks[key])
            key = found[0].parent
        if found[-1].tokens == keys.WINDOW_TOKENS:
            found.pop()
        tokens = b"".join(block.tokens for block in found)
        c = Chain(found[0].root, np.frombuffer(tokens, "<i8"), 4, ())
        return replace(c, keys=tuple(block.key for block in found))

    def rows(self, database):
        return self.tiers[0]._read(lambda rows: dict(rows.rows(database)), None)

    # ---- what always holds

    @invariant()
    def agrees(self):
        tier = self.fresh()
        assert tier.check() == []
        assert self.present() == self.model.blocks.keys()
        usage = tier.usage()
        assert usage.blocks == sum(n.blocks for n in usage.namespaces) == len(self.model.blocks)
        assert 0 < usage.live_bytes <= CAP
        assert (self.folder / health.DATA_NAME).stat().st_size <= CAP
        assert usage.pinned_blocks == len(self.model.protected())
        assert usage.pinned_bytes == usage.pinned_blocks * PIECE_BYTES
        if not self.stale[0]:
            assert self.rows("pin").keys() == self.model.pinned
            uses = {key: Use.unpack(row).expires for key, row in self.rows("use").items()}
            assert uses == {key: self.model.expires[key] for key in self.model.blocks}
        assert self.is_counted_right()
        parents = {block.parent for block in self.model.blocks.values()}
        assert parents <= self.model.blocks.keys() | {*map(keys.namespace_key, NAMESPACES)}

    def is_counted_right(self):
        """Whether as many waits are counted, by class, as there are standings that are awaited:
        of blocks, of those that left, and of those among them that were forgotten since.
        """
        tier = self.tiers[0]
        if self.stale[0] or self.miscounted:
            self.crowded = True
            return True
        counters = tier._read(lambda rows: rows.counters(), None)
        here = [Use.unpack(row).standing for row in self.rows("use").values()]
        gone = [Ghost.unpack(row).standing for row in self.rows("ghost").values()]
        counts = np.zeros(hazard.CLASSES)
        for standing in (*here, *gone):
            is_lost = counters._cohort_of(standing.last) <= counters.cohort - hazard.COHORTS
            counts[standing.of_class] += standing.awaited and not is_lost
        counted = counters.waiting.sum(axis=1)
        forgotten = counted - counts
        # So many are kept at least, however few blocks are here.
        self.crowded |= len(gone) >= hazard.GHOSTS_PER_BLOCK
        return (forgotten > -0.01).all() and (self.crowded or forgotten.sum() < 0.01)

    def teardown(self):
        if not hasattr(self, "tiers"):
            return
        found = {BlockKey(bytes.fromhex(p.where)) for p in self.fresh().verify()}
        for tier in self.tiers:
            tier.close()
        self.patch.undo()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert found == self.model.damaged


ColdMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, phases=(Phase.reuse, Phase.generate)
)
TestColdMachine = ColdMachine.TestCase
