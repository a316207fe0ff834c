"""Work for the cold tier without end, to measure what else is going on beside it.

``python -m bench.load {writer,memcpy} BLOCKS FOLDER`` does the same in a process of its own, until
it is killed: it tells, apart from a measurement beside a thread, what sharing an interpreter costs
and what sharing cores and memory does. ``BLOCKS`` is a file that `save` wrote.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from tieredkv import Namespace, keys
from tieredkv.codec import PlaneCodec
from tieredkv.core import Block, TensorSpec
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.writer import Writer

BLOCK_TOKENS = 256
# Small: nearly all the time old blocks make room, as in a store that has been used for a while.
CAP_BYTES = 512 << 20
# What may wait: some batches, so that the writer never does.
QUEUE_BYTES = 256 << 20
# Made before they are needed: to hash prompts takes milliseconds.
_READY = 200
# What is in the queue lasts longer.
_PATIENCE_SECONDS = 0.05
_COPIED_BYTES = 64 << 20


def save(path: Path, block: Block) -> None:
    """Write a block's only tensor, of bfloat16, as words."""
    (spec,), (tensor,) = block.specs, block.tensors
    np.save(path, np.frombuffer(memoryview(tensor), np.uint16).reshape(spec.shape))


def prompts(path: Path, n_blocks: int = 8) -> Iterator[list[Block]]:
    """Prompts of so many blocks that have never been before, all with the content of a file."""
    root = keys.namespace_key(Namespace("load"))
    dice = np.random.default_rng()
    words = np.load(path)
    while True:
        c = keys.chain(root, dice.integers(0, 50_000, n_blocks * BLOCK_TOKENS), BLOCK_TOKENS)
        block = Block(
            root, root, c.keys[0], c.tokens_of(0), (TensorSpec("bfloat16", words.shape),), (words,)
        )
        yield [
            replace(block, parent=c.parent(i), key=c.keys[i], tokens=c.tokens_of(i))
            for i in range(n_blocks)
        ]


class Saturated:
    """A writer on a cold tier of its own that is kept busy by whoever calls `feed` often."""

    def __init__(self, blocks: Path, folder: Path) -> None:
        self._prompts = prompts(blocks)
        self._ready: deque[list[Block]] = deque()
        self._tier = ColdTier(folder, CAP_BYTES, PlaneCodec())
        self._writer = Writer(self._tier, QUEUE_BYTES, lambda _keys, _n: None)

    @property
    def bytes_written(self) -> int:
        """Encoded bytes committed so far."""
        return self._tier.counters().bytes_written

    def prepare(self) -> None:
        """Make prompts that last for some seconds, and start on them."""
        self._ready.extend(islice(self._prompts, _READY - len(self._ready)))
        self.feed()

    def feed(self) -> None:
        """Fill the queue up to its limit, of what is prepared. Takes microseconds."""
        while self._writer.n_bytes < QUEUE_BYTES // 2 and self._ready:
            self._writer.submit(self._ready.popleft())

    def rest(self) -> None:
        """Wait until nothing is left to write."""
        self._writer.flush()

    def close(self) -> None:
        """End the writer and its tier."""
        self._writer.close()
        self._tier.close()


def _write_for_ever(blocks: Path, folder: Path) -> Iterator[None]:
    writer = Saturated(blocks, folder)
    while True:
        writer.prepare()
        yield
        time.sleep(_PATIENCE_SECONDS)


def _copy_for_ever() -> Iterator[None]:
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    while True:
        np.copyto(target, source)
        yield


def main() -> None:
    """Print a line once it works, and work until killed."""
    kind, blocks, folder = sys.argv[1:]
    work = _copy_for_ever() if kind == "memcpy" else _write_for_ever(Path(blocks), Path(folder))
    next(work)
    print("under way", flush=True)
    for _ in work:
        pass


if __name__ == "__main__":
    main()
