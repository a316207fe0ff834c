"""Writers and readers of one cold directory, as processes that may be killed at any time.

A writer notes a prompt in a log of its own once it was told that the prompt is committed. A
reader looks up prompts from all logs and compares every row of what it gets.
"""

from __future__ import annotations

import logging
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cold_blocks import NAMESPACE, chain, content
from lmdb.verify import verify

from tieredkv.codec import PlaneCodec
from tieredkv.core import Block, BlockKey, Chain, TensorSpec
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.writer import Writer

from .failpoints import Failpoint, arm

TURNS = 4
FLUSH_S = 20.0
_QUEUE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ``i``-th prompt of a stream. Every process computes the same tokens from the two."""

    stream: int
    i: int

    def tokens(self) -> list[int]:
        """A conversation under one of a few system prompts, which grows from turn to turn."""
        conversation, turn = divmod(self.i, TURNS)
        dice = random.Random(f"{self.stream}-{conversation}")
        system = dice.randrange(3)
        body = [dice.randrange(1000) for _ in range(7 * turn + 6)]
        return [*range(2000 + 10 * system, 2010 + 10 * system), *body]


@dataclass(frozen=True, slots=True)
class Job:
    """What a child does. ``keeps`` says that the cap is large enough for nothing to be evicted,
    so that whatever was acknowledged must be found. ``stream`` is never used twice.
    """

    directory: Path
    logs: Path
    cap_bytes: int
    kind: str
    slot: int
    stream: int
    keeps: bool
    failpoint: Failpoint | None = None


class Logs:
    """Acknowledged prompts, reports and signs of life of all processes, in a folder of their own.

    Each line is one write to a file opened for appending, so that a kill tears none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def append(self, name: str, line: str) -> None:
        """Add a line to a file; on disk when this returns."""
        fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, f"{line}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)

    def acknowledge(self, slot: int, prompt: Prompt) -> None:
        """Note that a prompt is committed."""
        self.append(f"acks-{slot}", f"{prompt.stream} {prompt.i}")

    def acknowledged(self) -> list[Prompt]:
        """Every prompt that was ever noted."""
        lines = (
            line for path in self._folder.glob("acks-*") for line in path.read_text().splitlines()
        )
        return [Prompt(*map(int, line.split())) for line in lines]

    def report(self, what: str) -> None:
        """Note what must not happen, by its kind and a detail."""
        self.append("reports", what)

    def reports(self) -> list[str]:
        """Every report."""
        path = self._folder / "reports"
        return path.read_text().splitlines() if path.exists() else []

    def beat(self, slot: int) -> None:
        """Show that a process makes progress."""
        path = self._folder / f"beat-{slot}"
        path.touch()

    def last_beat(self, slot: int) -> float:
        """Unix time of the last progress, 0 if there was none."""
        path = self._folder / f"beat-{slot}"
        return path.stat().st_mtime if path.exists() else 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """Leading tokens of a prompt that were found, and whether their state is the right one."""

    n_tokens: int
    is_right: bool


class Party(Protocol):
    """A store under load, opened by one process."""

    def store(self, tokens: list[int]) -> bool:
        """Store a prompt; whether it was acknowledged as committed."""

    def find(self, tokens: list[int]) -> Found:
        """Look up a prompt."""

    def faults(self) -> dict[str, int]:
        """Errors that were counted, by kind."""

    def problems(self) -> list[str]:
        """What a recount of everything finds."""

    def close(self) -> None:
        """Let go of the store."""


def size_of(key: bytes) -> int:
    """Bytes of a block: mostly few, now and then several pieces."""
    return 70_000 + 900 * key[0] if key[1] < 12 else 300 + 40 * key[0]


def blocks_of(c: Chain) -> list[Block]:
    """The blocks of a chain; what each holds follows from its key."""
    return [_block(c, i, key) for i, key in enumerate(c.keys)]


def _block(c: Chain, i: int, key: BlockKey) -> Block:
    import numpy as np

    spec = TensorSpec("uint8", (1, 1, size_of(key), 1))
    tensor = np.frombuffer(content(key, size_of(key)), np.uint8).reshape(spec.shape)
    return Block(c.root, c.parent(i), key, c.tokens_of(i), (spec,), (tensor,))


def is_right(block: Block) -> bool:
    """Whether a loaded block has the content that belongs to its key."""
    return bytes(block.tensors[0]) == content(block.key, size_of(block.key))


class ColdParty:
    """Cold tier, codec and writer, without mlx: starts fast."""

    def __init__(self, directory: Path, cap_bytes: int) -> None:
        self.tier = ColdTier(directory, cap_bytes, PlaneCodec())
        self.tier.register(NAMESPACE)
        self._writer = Writer(self.tier, _QUEUE_BYTES, self._written)
        self._held = 0

    def _written(self, _keys: object, n: int) -> None:
        self._held += n

    def store(self, tokens: list[int]) -> bool:
        c = chain(tokens)
        blocks = blocks_of(c)[self.tier.missing(c) :]
        self._held = 0
        taken = self._writer.submit(blocks)
        return self._writer.flush(FLUSH_S) and taken == self._held == len(blocks)

    def find(self, tokens: list[int]) -> Found:
        c = chain(tokens)
        keys = list(c.keys[: self.tier.lookup(c)])
        i = len(keys)
        if i < len(c.keys):
            near = self.tier.nearest(c.parent(i), c.tokens_of(i))
            keys += [near.key] if near else []
        blocks = self.tier.load(keys)
        found = right = 0
        for i, block in enumerate(blocks):
            wanted = c.tokens_of(i)
            shared = _common(block.tokens, wanted)
            sound = is_right(block) and block.parent == c.parent(i) and block.key == keys[i]
            found += shared
            right += shared if sound else 0
            if block.tokens != wanted:
                break
        if blocks:
            self._writer.touch(blocks[-1].key)
        return Found(found, found == right)

    def faults(self) -> dict[str, int]:
        return self.tier.counters().faults

    def problems(self) -> list[str]:
        return [str(problem) for problem in self.tier.verify()]

    def close(self) -> None:
        self._writer.close(FLUSH_S)
        self.tier.close()


def _common(one: bytes, other: bytes) -> int:
    pairs = zip(*(memoryview(b).cast("q") for b in (one, other)), strict=False)
    n = 0
    for a, b in pairs:
        if a != b:
            break
        n += 1
    return n


def open_party(kind: str, directory: Path, cap_bytes: int) -> Party:
    """The party of a kind: ``cold``, or ``full`` for the whole prompt cache."""
    if kind == "cold":
        return ColdParty(directory, cap_bytes)
    # Imports mlx, which takes seconds where nobody has done it before.
    from .full import FullParty

    return FullParty(directory, cap_bytes)


def _start(job: Job) -> tuple[Logs, Party]:
    logging.basicConfig(filename=job.logs / "log", format=f"{job.slot}/{job.stream} %(message)s")
    if job.failpoint:
        arm(job.failpoint)
    logs = Logs(job.logs)
    party = open_party(job.kind, job.directory, job.cap_bytes)
    logs.beat(job.slot)
    return logs, party


def _look(job: Job, logs: Logs, party: Party, prompt: Prompt) -> None:
    """Look up an acknowledged prompt and report what is wrong with the answer."""
    tokens = prompt.tokens()
    # The next turn's block may take the place of a tail between the look and the load: a shorter
    # hit, once for each turn that can come. What is lost is not there at the last look either.
    for _ in range(TURNS):
        found = party.find(tokens)
        if not found.is_right:
            logs.report(f"wrong {prompt}")
        if not job.keeps or found.n_tokens == len(tokens):
            return
    logs.report(f"lost {prompt}: {found.n_tokens} of {len(tokens)} tokens")


def write(job: Job) -> None:
    """Store the prompts of a stream for ever, and look up one of one's own now and then."""
    logs, party = _start(job)
    own: list[Prompt] = []
    told: set[str] = set()
    dice = random.Random(job.stream)
    i = 0
    while True:
        prompt = Prompt(job.stream, i)
        if party.store(prompt.tokens()):
            logs.acknowledge(job.slot, prompt)
            own.append(prompt)
        if own and not i % 3:
            _look(job, logs, party, dice.choice(own))
        # A full store may be too scattered for a large block.
        allowed = set() if job.keeps else {"map_full"}
        for kind in party.faults().keys() - told - allowed:
            told.add(kind)
            logs.report(f"fault {kind}")
        logs.beat(job.slot)
        i += 1


def read(job: Job) -> None:
    """Look up prompts that anybody has stored, for ever."""
    logs, party = _start(job)
    dice = random.Random(job.stream)
    while True:
        known = logs.acknowledged()
        for prompt in dice.choices(known, k=20) if known else ():
            _look(job, logs, party, prompt)
            logs.beat(job.slot)
        logs.beat(job.slot)
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a look at everything gave: prompts acknowledged, lost and wrong, and a recount."""

    acknowledged: int
    lost: int
    wrong: int
    problems: tuple[str, ...]


def judge(job: Job) -> Verdict:
    """Look up everything that was ever acknowledged."""
    logging.basicConfig(filename=job.logs / "log", format="judge %(message)s")
    party = open_party(job.kind, job.directory, job.cap_bytes)
    prompts = Logs(job.logs).acknowledged()
    lost = wrong = 0
    for tokens in (prompt.tokens() for prompt in prompts):
        found = party.find(tokens)
        wrong += not found.is_right
        lost += job.keeps and found.n_tokens != len(tokens)
    problems = (*party.problems(), *(f"fault {kind}" for kind in party.faults()))
    if not problems:
        problems = tuple(verify(str(job.directory)))
    party.close()
    return Verdict(len(prompts), lost, wrong, problems)


def standard(directory: Path) -> None:
    """A load that goes every way a block can go, in this process."""
    for cap_bytes in (64 << 20, 32 << 20):
        _store_and_find(open_party("full", directory / "full", cap_bytes), 40)
    # A cap that this many prompts exceed.
    _store_and_find(open_party("cold", directory / "cold", 1 << 20), 120)


def _store_and_find(party: Party, n: int) -> None:
    prompts = [Prompt(1, i) for i in range(n)]
    for prompt in prompts:
        party.store(prompt.tokens())
    for prompt in prompts:
        party.find(prompt.tokens())
    party.close()
