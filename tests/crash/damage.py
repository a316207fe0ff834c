"""Damages the data file of a store in every way a disk may, and uses the store as a server does.

Usage: ``python -m tests.crash.damage [--count N] [--seed N]``
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cold_blocks import NAMESPACE, chain, content

from tieredkv.codec import PlaneCodec
from tieredkv.core import Block, Chain, ColdTierUnavailable, TensorSpec
from tieredkv.tiers import health
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.gate import GATE_NAME, MARK

from .kill import processes

CAP = 2 << 20
PAGE = 4096
HUNG_S = 60.0
_BATCH = 200
_PROMPTS = 300
_BRANCH_OR_LEAF = (1, 2)
# LMDB's page header: page number, padding, flags at 10, bounds of the free space.
_FLAGS_AT = 10


def size_of(key: bytes) -> int:
    """Bytes of a block: in its row mostly, in pages of its own now and then, in pieces rarely."""
    if key[1] < 5:
        return 66_000 + 30 * key[0]
    return 2_000 + 20 * key[0] if key[1] < 40 else 60 + 4 * key[0]


def blocks_of(c: Chain) -> list[Block]:
    """The blocks of a chain; what each holds follows from its key."""
    made = []
    for i, key in enumerate(c.keys):
        spec = TensorSpec("uint8", (1, 1, size_of(key), 1))
        tensor = np.frombuffer(content(key, size_of(key)), np.uint8).reshape(spec.shape)
        made.append(Block(c.root, c.parent(i), key, c.tokens_of(i), (spec,), (tensor,)))
    return made


def is_right(block: Block) -> bool:
    """Whether a loaded block has the content that belongs to its key."""
    return bytes(block.tensors[0]) == content(block.key, size_of(block.key))


def prompts(n: int, first: int = 0) -> list[list[int]]:
    """Prompts that branch and share prefixes, with tails."""
    made = []
    for i in range(first, first + n):
        dice = random.Random(i // 3)
        made.append([i % 2, 1, 2, 3, *(dice.randrange(99) for _ in range(4 + 5 * (i % 3)))])
    return made


@dataclass(frozen=True, slots=True)
class Sound:
    """A store that nothing is wrong with: its data file now, and as it was some commits ago."""

    now: bytes
    before: bytes
    held: tuple[tuple[int, ...], ...]


def make_sound(folder: Path) -> Sound:
    """Fill a store until it evicts, so that there are free pages and stale ones."""
    tier = ColdTier(folder, CAP, PlaneCodec())
    tier.register(NAMESPACE)
    before = b""
    tokens = prompts(_PROMPTS)
    for i, prompt in enumerate(tokens):
        tier.put(blocks_of(chain(prompt)))
        if i % 7 == 3:
            tier.touch(chain(tokens[i // 2]).keys[-1:])
        if i == _PROMPTS * 3 // 4:
            before = (folder / health.DATA_NAME).read_bytes()
    # The last of each three has all blocks of the two before.
    held = tuple(tuple(p) for p in tokens[2::3] if tier.missing(c := chain(p)) == len(c.keys))
    assert tier.verify() == []
    assert tier.counters().evictions
    tier.close()
    return Sound((folder / health.DATA_NAME).read_bytes(), before, held)


def _pages(data: bytes | bytearray) -> range:
    return range(len(data) // PAGE)


def _trees(data: bytes | bytearray) -> list[int]:
    return [p for p in _pages(data) if data[p * PAGE + _FLAGS_AT] in _BRANCH_OR_LEAF]


def _flip(data: bytearray, dice: random.Random, start: int, stop: int, n: int) -> None:
    for _ in range(n):
        data[dice.randrange(start, stop)] ^= 1 << dice.randrange(8)


def flip_anywhere(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """One bit, anywhere."""
    _flip(data, dice, 0, len(data), 1)


def flip_in_tree(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """One bit in a page of keys, of any tree."""
    page = dice.choice(_trees(data))
    _flip(data, dice, page * PAGE, page * PAGE + PAGE, 1)


def flip_in_page_header(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """One bit among the first bytes of a page of keys: its header and offsets."""
    page = dice.choice(_trees(data))
    _flip(data, dice, page * PAGE, page * PAGE + 64, 1)


def flip_in_meta(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """A few bits in the headers of the file."""
    page = dice.randrange(2)
    _flip(data, dice, page * PAGE, page * PAGE + 160, dice.choice((1, 1, 1, 4)))


def flip_many(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """Many bits in one page."""
    page = dice.choice(_pages(data))
    _flip(data, dice, page * PAGE, page * PAGE + PAGE, dice.randrange(2, 300))


def zero_page(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """A page of zeros."""
    page = dice.choice((dice.choice(_pages(data)), dice.choice(_trees(data))))
    data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)


def zero_sectors(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """A run of sectors of zeros."""
    start = dice.randrange(len(data) // 512) * 512
    length = 512 * dice.randrange(1, 40)
    data[start : start + length] = bytes(len(data[start : start + length]))


def noise_page(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """A page of noise."""
    page = dice.choice((dice.choice(_pages(data)), dice.choice(_trees(data))))
    data[page * PAGE : (page + 1) * PAGE] = dice.randbytes(PAGE)


def swap_pages(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """Two pages in each other's place."""
    choices = dice.choice((_pages(data), _trees(data)))
    a, b = (slice(p * PAGE, (p + 1) * PAGE) for p in dice.sample(choices, 2))
    data[a], data[b] = data[b], data[a]


def misdirect(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """A page written over another."""
    choices = dice.choice((_pages(data), _trees(data)))
    a, b = (slice(p * PAGE, (p + 1) * PAGE) for p in dice.sample(choices, 2))
    data[a] = data[b]


def stale_page(data: bytearray, sound: Sound, dice: random.Random) -> None:
    """A page as it was some commits ago: a write that got lost."""
    n = min(len(data), len(sound.before)) // PAGE
    changed = [
        slice(p * PAGE, (p + 1) * PAGE)
        for p in range(n)
        if data[p * PAGE : (p + 1) * PAGE] != sound.before[p * PAGE : (p + 1) * PAGE]
    ]
    page = dice.choice(changed)
    data[page] = sound.before[page]


def truncate(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """A file that ends early."""
    unit = dice.choice((1, PAGE))
    del data[dice.randrange(len(data) // unit) * unit :]


def lengthen(data: bytearray, _sound: Sound, dice: random.Random) -> None:
    """Noise behind the end."""
    data += dice.randbytes(dice.randrange(1, 5 * PAGE))


Damage = Callable[[bytearray, Sound, random.Random], None]
DAMAGES: tuple[Damage, ...] = (
    flip_anywhere,
    flip_in_tree,
    flip_in_page_header,
    flip_in_meta,
    flip_many,
    zero_page,
    zero_sectors,
    noise_page,
    swap_pages,
    misdirect,
    stale_page,
    truncate,
    lengthen,
)


def damaged(sound: Sound, number: int, seed: int) -> tuple[str, bytes]:
    """The name and the result of one damage; the same for the same number and seed."""
    dice = random.Random(f"{seed}-{number}")
    damage = DAMAGES[number % len(DAMAGES)]
    data = bytearray(sound.now)
    damage(data, sound, dice)
    return damage.__name__, bytes(data)


def walk_in_fork(directory: Path, what: str, _timeout_s: float) -> str | None:
    """What `health` does in a new interpreter, in a forked child: the same walk, without the
    fifth of a second that an interpreter takes to start.
    """
    mine, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(theirs, 1)
        status = health.main([str(directory), what])
        sys.stdout.flush()
        os._exit(status)
    os.close(theirs)
    with open(mine) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return health.verdict(code, said)


def use(folder: Path, sound: Sound) -> str:
    """Use the store in ``folder`` as a server does; what the damage came to."""
    try:
        tier = ColdTier(folder, CAP, PlaneCodec())
    except ColdTierUnavailable as error:
        return f"refused: {error}"
    tier.register(NAMESPACE)
    found = [_find(tier, list(prompt)) for prompt in sound.held]
    for prompt in prompts(4, first=_PROMPTS):
        tier.put(blocks_of(chain(prompt)))
    # Whatever was lost is stored again.
    for prompt in sound.held[:8]:
        tier.put(blocks_of(chain(prompt)))
    tier.touch([chain(prompt).keys[-1] for prompt in sound.held[-5:]])
    tier.trim_to(tier.n_bytes // 2)
    for prompt in prompts(20, first=_PROMPTS + 20):
        tier.put(blocks_of(chain(prompt)))
    found += [_find(tier, list(prompt)) for prompt in sound.held[::4]]
    problems = tier.verify()
    # A full store may be too scattered for a large block, damaged or not.
    faults = tier.counters().faults.keys() - {"map_full"}
    tier.close()
    if "wrong" in found:
        return "wrong"
    if list(folder.glob("quarantine-*")):
        return "detected"
    missed = "missed" in found[: len(sound.held)]
    return "detected" if faults or problems or missed else "harmless"


def _find(tier: ColdTier, prompt: list[int]) -> str:
    c = chain(prompt)
    keys = list(c.keys[: tier.lookup(c)])
    i = len(keys)
    near = tier.nearest(c.parent(i), c.tokens_of(i)) if i < len(c.keys) else None
    blocks = tier.load([*keys, near.key] if near else keys)
    for i, block in enumerate(blocks):
        if not is_right(block) or block.parent != c.parent(i) or block.root != c.root:
            return "wrong"
    whole = len(blocks) == len(c.keys) and blocks[-1].tokens == c.tokens_of(len(blocks) - 1)
    return "right" if whole else "missed"


def _try_batch(pipe: Any, folder: Path, sound: Sound, numbers: range, seed: int) -> None:
    logging.disable()
    health._walk_apart = walk_in_fork
    for number in numbers:
        pipe.send((number, "begun"))
        place = folder / str(number)
        place.mkdir()
        (place / GATE_NAME).write_bytes(MARK)
        (place / health.DATA_NAME).write_bytes(damaged(sound, number, seed)[1])
        outcome = use(place, sound)
        shutil.rmtree(place)
        pipe.send((number, outcome))


@dataclass(slots=True)
class Tally:
    """Outcomes, in all and by damage, and the numbers of those that must not happen."""

    outcomes: Counter[str] = field(default_factory=Counter)
    by_damage: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def add(self, name: str, number: int, outcome: str) -> None:
        """Count one damage."""
        self.outcomes[outcome] += 1
        self.by_damage.setdefault(name, Counter())[outcome] += 1
        if outcome not in ("harmless", "detected"):
            self.bad.append(f"damage {number} ({name}): {outcome}")

    def line(self) -> str:
        """The numbers in one line."""
        counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(self.outcomes.items()))
        return f"{self.outcomes.total()} damages: {counts}"


def run(numbers: range, folder: Path, seed: int) -> Tally:
    """Try damages by their numbers, each batch in a process that may die of one."""
    sound = make_sound(folder / "sound")
    tally = Tally()
    for number, outcome in _outcomes(numbers, folder, sound, seed):
        tally.add(DAMAGES[number % len(DAMAGES)].__name__, number, outcome)
    return tally


def _outcomes(numbers: range, folder: Path, sound: Sound, seed: int) -> Iterator[tuple[int, str]]:
    context = processes()
    while numbers:
        batch = numbers[:_BATCH]
        mine, theirs = context.Pipe(duplex=False)
        arguments = (theirs, folder, sound, batch, seed)
        process = context.Process(target=_try_batch, args=arguments)
        process.start()
        theirs.close()
        number = batch[0]
        for number in batch:
            outcome = _outcome(process, mine)
            yield number, outcome
            if outcome.startswith(("died", "hung")):
                break
        process.kill()
        process.join()
        numbers = numbers[number - batch[0] + 1 :]


def _outcome(process: Any, pipe: Any) -> str:
    try:
        while pipe.poll(HUNG_S):
            _, outcome = pipe.recv()
            if outcome != "begun":
                return str(outcome)
    except EOFError:
        process.join()
        return f"died {process.exitcode}"
    return "hung"


def fast_folder() -> Path | None:
    """A file system in memory, if there is one: nothing here is to survive, and syncs are free."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else None


def main() -> int:
    """Try the damages and print what came of them; 1 if anything was wrong, died or hung."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first damage")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tieredkv-damage-", dir=fast_folder()) as folder:
        numbers = range(arguments.first, arguments.first + arguments.count)
        tally = run(numbers, Path(folder), arguments.seed)
    for name, counts in tally.by_damage.items():
        print(f"{name}: {dict(counts)}")
    for line in tally.bad[:40]:
        print(line)
    print(f"{tally.line()}, in {time.monotonic() - started:.0f} s")
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
