"""How much of sliding windows is worth keeping: a block trace, replayed in a cold tier of a size.

    python -m bench.windows TRACE [--capacity 0.03 0.1 0.3]

A trace has a JSON object a line with ``hash_ids``: the ids of a prompt's blocks, each of which
stands for all that comes before it. What is kept, and what goes first, is decided as the tiers do
it; the sizes are those of the models.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tieredkv import policy

BLOCK = 512
CHECKPOINT = 2048 // BLOCK


@dataclass(frozen=True, slots=True)
class Model:
    """Layers of full and of sliding attention, all with rows of one size, and the window."""

    name: str
    full: int
    sliding: int
    window: int

    @property
    def block(self) -> int:
        """Size of a block; a row is 1."""
        return self.full * BLOCK

    @property
    def snapshot(self) -> int:
        """Size of the rings of all layers."""
        return self.sliding * self.window

    @property
    def piece(self) -> int:
        """Size of a window."""
        return self.sliding * min(self.window, BLOCK)

    @property
    def n_windows(self) -> int:
        """Windows that a boundary needs before it."""
        return -(-self.window // BLOCK)


MODELS = (
    Model("gemma3-27b", 10, 52, 1024),
    Model("gemma3-1b", 4, 22, 512),
    Model("gpt-oss-20b", 12, 12, 128),
)

# What is kept of windows: none, all in the order of their last use, or all by their worth.
KEPT = ("none", "by use", "by worth")

Key = tuple[str, int]


class Tier:
    """A tree of blocks with what hangs on them, in a limited room."""

    def __init__(self, model: Model, kept: str, capacity: float) -> None:
        self._model = model
        self._kept = kept
        self._room = capacity
        self._clock = 0
        self._nodes: dict[Key, tuple[Key | None, int, int]] = {}
        self._children: dict[Key, int] = {}
        self._last: dict[Key, int] = {}
        self._leaves: dict[int, OrderedDict[Key, None]] = {}

    def serve(self, path: Sequence[int]) -> int:
        """Blocks reused of a prompt, which then is stored."""
        held = next((i for i, b in enumerate(path) if ("block", b) not in self._nodes), len(path))
        reused = next((i for i in range(held, 0, -1) if self._restores(path, i)), 0)
        spared = {("block", b) for b in path}
        for key in self._used(path, reused):
            self._use(key)
        for key, parent, size, grade in self._made(path, reused):
            self._put(key, parent, size, grade, spared)
        return reused

    def _restores(self, path: Sequence[int], i: int) -> bool:
        if ("snapshot", path[i - 1]) in self._nodes:
            return True
        run = path[max(0, i - self._model.n_windows) : i]
        return self._kept != "none" and all(("window", b) in self._nodes for b in run)

    def _used(self, path: Sequence[int], reused: int) -> Iterator[Key]:
        if not reused:
            return
        if ("snapshot", path[reused - 1]) in self._nodes:
            yield "snapshot", path[reused - 1]
            return
        for b in path[max(0, reused - self._model.n_windows) : reused]:
            yield "window", b

    def _made(self, path: Sequence[int], reused: int) -> Iterator[tuple[Key, Key | None, int, int]]:
        """What the prefill stores, with parents, sizes and grades."""
        model = self._model
        parent: Key | None = None
        for i, b in enumerate(path, 1):
            block = ("block", b)
            yield block, parent, model.block, 0
            parent = block
            if i > reused and self._kept != "none":
                yield ("window", b), block, model.piece, self._window_grade(i)
            elif i > reused and i % CHECKPOINT == 0:
                yield ("snapshot", b), block, model.snapshot, self._grade(i)
        yield ("snapshot", path[-1]), parent, model.snapshot, 0

    def _grade(self, i: int) -> int:
        spared = policy.spared_between(i * BLOCK, BLOCK)
        return policy.grade(self._model.snapshot, spared, self._model.full)

    def _window_grade(self, i: int) -> int:
        if self._kept == "by use":
            return 0
        every = self._model.n_windows
        spared = policy.spared_between((i - 1) // every + 1, 1) * every * BLOCK
        return policy.grade(self._model.piece * every, spared, self._model.full)

    def _put(self, key: Key, parent: Key | None, size: int, grade: int, spared: set[Key]) -> None:
        if key in self._nodes:
            self._use(key)
            return
        if parent is not None and parent not in self._nodes:
            return
        while self._room < size:
            if not self._evict_one(spared):
                return
        self._room -= size
        self._nodes[key] = (parent, size, grade)
        self._children[key] = 0
        if parent is not None:
            self._children[parent] += 1
            self._leaves.get(self._nodes[parent][2], OrderedDict()).pop(parent, None)
        self._use(key)

    def _use(self, key: Key) -> None:
        self._clock += 1
        self._last[key] = self._clock
        if not self._children[key]:
            leaves = self._leaves.setdefault(self._nodes[key][2], OrderedDict())
            leaves[key] = None
            leaves.move_to_end(key)

    def _evict_one(self, spared: set[Key]) -> bool:
        heads = {}
        for grade, leaves in self._leaves.items():
            head = next((key for key in leaves if key not in spared), None)
            if head is not None:
                heads[grade] = head
        if not heads:
            return False
        uses = {grade: self._last[key] for grade, key in heads.items()}
        self._remove(heads[_first_to_leave(uses, self._clock)])
        return True

    def _remove(self, key: Key) -> None:
        parent, size, grade = self._nodes.pop(key)
        self._leaves[grade].pop(key)
        self._room += size
        del self._children[key], self._last[key]
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            # It leaves in its turn; its own use, if older, would put it first, which is right too.
            self._leaves.setdefault(self._nodes[parent][2], OrderedDict())[parent] = None


def _first_to_leave(last_uses: Mapping[int, int], now: int) -> int:
    """Of the grades' oldest leaves, by their last use, the grade of that which leaves first."""
    return max(last_uses, key=lambda g: ((now - last_uses[g]) << g, g))


def replay(paths: Sequence[Sequence[int]], model: Model, kept: str, share: float) -> float:
    """Share of the tokens of a trace's second half that are reused."""
    unique = len({b for path in paths for b in path})
    rows = model.full + model.sliding
    tier = Tier(model, kept, share * unique * rows * BLOCK)
    reused = [tier.serve(path) for path in paths]
    half = len(paths) // 2
    return sum(reused[half:]) / sum(map(len, paths[half:]))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids")
    parser.add_argument("--capacity", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    args = parser.parse_args()
    lines = args.trace.read_text(encoding="utf-8").splitlines()
    paths = [ids for line in lines if (ids := json.loads(line)["hash_ids"])]
    print(f"{'model':12} {'windows':10}", *(f"{c:8.0%}" for c in args.capacity))
    for model in MODELS:
        for kept in KEPT:
            rates = [replay(paths, model, kept, c) for c in args.capacity]
            print(f"{model.name:12} {kept:10}", *(f"{r:8.3f}" for r in rates), flush=True)


if __name__ == "__main__":
    main()
