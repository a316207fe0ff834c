"""Eviction policies, replayed on a block trace in a tier of a size.

    python -m bench.sim TRACE [--capacity 0.01 0.03 0.1] [--policy default leaf-lru] [--json]

A trace has a JSON object a line: ``timestamp`` (ms), ``input_length`` (tokens), ``output_length``
and ``hash_ids``, the ids of the prompt's blocks, each of which stands for all that comes before
it; the last may be a short one, a tail. Capacity is a share of the trace's unique blocks. A
request reuses its leading blocks that are there, then all its blocks are there, and leaves that
aren't its own make room.

Figures, for each policy and capacity:

    token_hit              tokens reused, of all tokens of prompts
    token_hit_second_half  the same in the second half of the requests, warmed by the first
    flop_saved             prefill FLOPs saved, of all: see `flops`
    written                blocks written, for each unique block: 1 is each block once
    ms_per_request         of this program, all it does for the policy

Policies:

    default       what the tiers ship, which learns when leaves return: ``tieredkv.hazard``
    untried       the same without the trial against leaf-lru
    leaf-lru      the leaf used least recently
    whole-lru     whole prompts, nothing shared, the one used least recently
    gdsf          greedy dual size frequency: the leaf with the fewest FLOPs times uses, aged
    s3fifo        S3-FIFO over leaves: a small queue, a main one, and ghosts
    clairvoyant   the leaf whose next use is furthest away: no policy can do much better
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from tieredkv import hazard

CAPACITIES = (0.01, 0.03, 0.1, 0.3)
PROGRESS_SECONDS = 5.0

# An 8B model with 32 layers of width 4096: each token takes 2 FLOPs a parameter, and attends to
# every token before it with two products of that width in each layer.
LINEAR_FLOPS = 2 * 8e9
ATTENTION_FLOPS = 4 * 32 * 4096


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt: its length in tokens, its blocks, and how many of those are whole."""

    n_tokens: int
    path: tuple[int, ...]
    n_whole: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their time, and what a whole block holds."""

    requests: tuple[Request, ...]
    block_tokens: int

    @property
    def n_unique(self) -> int:
        """Blocks that are different."""
        return len({block for request in self.requests for block in request.path})


@dataclass(frozen=True, slots=True)
class Result:
    """What a policy reached: see the module."""

    token_hit: float
    token_hit_second_half: float
    flop_saved: float
    written: float
    ms_per_request: float


def flops(n_tokens: int) -> float:
    """FLOPs of the prefill of so many tokens: one part is linear in them, one quadratic."""
    return LINEAR_FLOPS * n_tokens + ATTENTION_FLOPS * n_tokens * n_tokens / 2


def parse(lines: Iterable[str]) -> Trace:
    """A trace from its JSON lines."""
    return trace_of_rows(rows_of(lines))


def rows_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The requests that have blocks, in the order of their time."""
    rows = [json.loads(line) for line in lines if line.strip()]
    return sorted((row for row in rows if row["hash_ids"]), key=lambda row: row["timestamp"])


def trace_of_rows(rows: Sequence[dict[str, Any]]) -> Trace:
    """A trace from its rows. The block size is the power of two that fits them all."""
    longest = max((-(-row["input_length"] // len(row["hash_ids"])) for row in rows), default=1)
    block_tokens = 1 << (longest - 1).bit_length()
    return trace_of(((row["input_length"], row["hash_ids"]) for row in rows), block_tokens)


def trace_of(prompts: Iterable[tuple[int, Sequence[int]]], block_tokens: int) -> Trace:
    """A trace from lengths and blocks of prompts, in their order."""
    requests = tuple(
        Request(n, tuple(path), min(len(path), n // block_tokens)) for n, path in prompts
    )
    return Trace(requests, block_tokens)


# ---- policies


class Cache(Protocol):
    """A tier with room for a number of blocks."""

    written: int

    def serve(self, request: Request) -> int:
        """Blocks reused of a prompt, all of whose blocks then are there."""


class Tree:
    """Blocks as the tiers keep them: a child never outlives its parent. Policies subclass it."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.written = 0
        self.parents: dict[int, int | None] = {}
        self.children: dict[int, int] = {}

    def match(self, path: Sequence[int]) -> int:
        """Leading blocks that are here."""
        return next((i for i, b in enumerate(path) if b not in self.parents), len(path))

    def is_leaf(self, block: int) -> bool:
        """Whether a block that is here can leave."""
        return not self.children[block]

    def place(self, path: Sequence[int], matched: int) -> None:
        """Put the blocks after the matched ones where they belong."""
        for i in range(matched, len(path)):
            self.parents[path[i]] = path[i - 1] if i else None
            self.children[path[i]] = int(i + 1 < len(path))
        if 0 < matched < len(path):
            self.children[path[matched - 1]] += 1
        self.written += len(path) - matched

    def unlink(self, block: int) -> int | None:
        """Take a leaf out; its parent if that is a leaf now."""
        parent = self.parents.pop(block)
        del self.children[block]
        if parent is None:
            return None
        self.children[parent] -= 1
        return None if self.children[parent] else parent


class LeafLru(Tree):
    """The least recently used of the leaves. A prompt uses all its blocks, the deepest first, so
    the least recently used block of all is a leaf.
    """

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._used: OrderedDict[int, None] = OrderedDict()

    def serve(self, request: Request) -> int:
        """See `Cache.serve`."""
        path = request.path[: self.room]
        matched = self.match(path)
        self.place(path, matched)
        for block in reversed(path):
            self._used[block] = None
            self._used.move_to_end(block)
        while len(self._used) > self.room:
            self.unlink(self._used.popitem(last=False)[0])
        return matched


class WholeLru:
    """Whole prompts, each with all its blocks, as a cache without shared blocks keeps them. One
    that leads another is replaced by it.
    """

    def __init__(self, room: int) -> None:
        self.written = 0
        self._room = room
        self._free = room
        self._prompts: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._having: dict[int, dict[tuple[int, ...], None]] = {}

    def serve(self, request: Request) -> int:
        """See `Cache.serve`."""
        path = request.path[: self._room]
        matched = next((i for i, b in enumerate(path) if b not in self._having), len(path))
        if matched:
            self._prompts.move_to_end(next(reversed(self._having[path[matched - 1]])))
        for n in range(1, len(path)):
            if path[:n] in self._prompts:
                self._forget(path[:n])
        self._keep(path)
        return matched

    def _keep(self, path: tuple[int, ...]) -> None:
        if path in self._prompts:
            self._prompts.move_to_end(path)
            return
        while self._free < len(path):
            self._forget(next(iter(self._prompts)))
        self._free -= len(path)
        self.written += len(path)
        self._prompts[path] = None
        for block in path:
            self._having.setdefault(block, {})[path] = None

    def _forget(self, path: tuple[int, ...]) -> None:
        del self._prompts[path]
        self._free += len(path)
        for block in path:
            del self._having[block][path]
            if not self._having[block]:
                del self._having[block]


class Ranked(Tree, ABC):
    """Leaves by a number that is set when they are used, or become one: the smallest leaves."""

    # Whether the blocks of the prompt that is served may be the ones that leave.
    spares_own = True

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._heap: list[tuple[float, int, int]] = []
        self._stamps: dict[int, int] = {}
        self._n_stamps = 0
        self.n_served = 0
        # The largest number of those that left.
        self.floor = -math.inf
        self.depths: dict[int, int] = {}
        self.uses: Counter[int] = Counter()

    @abstractmethod
    def rank(self, block: int) -> float:
        """The number of a leaf."""

    def serve(self, request: Request) -> int:
        """See `Cache.serve`."""
        path = request.path[: self.room]
        matched = self.match(path)
        self.place(path, matched)
        self.depths.update((b, i) for i, b in enumerate(path))
        self.uses.update(path)
        self.n_served += 1
        self.offer(path[-1])
        self._evict(frozenset(path) if self.spares_own else frozenset())
        return matched

    def _evict(self, spared: frozenset[int]) -> None:
        waiting = []
        while len(self.parents) > self.room:
            item = heapq.heappop(self._heap)
            rank, stamp, block = item
            if self._stamps.get(block) != stamp or not self.is_leaf(block):
                continue
            if block in spared:
                waiting.append(item)
                continue
            orphan = self.unlink(block)
            self.floor = max(self.floor, rank)
            del self.uses[block], self._stamps[block]
            if orphan is not None:
                self.offer(orphan)
        for item in waiting:
            heapq.heappush(self._heap, item)

    def offer(self, block: int) -> None:
        """Rank a block anew, if it is a leaf."""
        if self.is_leaf(block):
            self._n_stamps += 1
            self._stamps[block] = self._n_stamps
            heapq.heappush(self._heap, (self.rank(block), self._n_stamps, block))


class Gdsf(Ranked):
    """Uses times FLOPs, on top of the rank of what left last."""

    def __init__(self, room: int, block_tokens: int) -> None:
        super().__init__(room)
        self._block_tokens = block_tokens

    def rank(self, block: int) -> float:
        """See `Ranked.rank`."""
        start = self.depths[block] * self._block_tokens
        cost = flops(start + self._block_tokens) - flops(start)
        return max(0.0, self.floor) + self.uses[block] * cost / flops(self._block_tokens)


class S3Fifo(Tree):
    """Leaves of a small queue, unless used again, before those of the main one, which go round as
    long as they are used. A ghost that comes back goes into the main queue at once.
    """

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._small: list[tuple[int, int]] = []
        self._main: list[tuple[int, int]] = []
        # Place in its queue, and whether that is the main one.
        self._places: dict[int, tuple[int, bool]] = {}
        self._uses: dict[int, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._n_small = 0
        self._clock = 0

    def serve(self, request: Request) -> int:
        """See `Cache.serve`."""
        path = request.path[: self.room]
        matched = self.match(path)
        self.place(path, matched)
        for block in path[:matched]:
            self._uses[block] = min(3, self._uses[block] + 1)
        for block in path[matched:]:
            self._uses[block] = 0
            self._enter(block, block in self._ghosts)
        spared = frozenset(path)
        while len(self.parents) > self.room:
            self._evict_one(spared)
        return matched

    def _enter(self, block: int, to_main: bool) -> None:
        self._clock += 1
        self._places[block] = (self._clock, to_main)
        self._n_small += not to_main
        self._offer(block)

    def _offer(self, block: int) -> None:
        if self.is_leaf(block):
            place, in_main = self._places[block]
            heapq.heappush(self._main if in_main else self._small, (place, block))

    def _evict_one(self, spared: frozenset[int]) -> None:
        small = self._n_small > self.room // 10
        for queue in (self._small, self._main) if small else (self._main, self._small):
            waiting = []
            done = False
            while queue and not done:
                place, block = heapq.heappop(queue)
                if self._places.get(block) != (place, queue is self._main):
                    continue
                if not self.is_leaf(block):
                    continue
                if block in spared:
                    waiting.append((place, block))
                    continue
                done = self._judge(block)
            for item in waiting:
                heapq.heappush(queue, item)
            if done:
                return

    def _judge(self, block: int) -> bool:
        """Whether the block at the head of its queue has left it for good."""
        in_main = self._places[block][1]
        if self._uses[block] > (0 if in_main else 1):
            self._n_small -= not in_main
            self._uses[block] = self._uses[block] - 1 if in_main else 0
            self._enter(block, True)
            return False
        del self._places[block], self._uses[block]
        self._n_small -= not in_main
        if not in_main:
            self._ghosts[block] = None
            if len(self._ghosts) > self.room:
                self._ghosts.popitem(last=False)
        orphan = self.unlink(block)
        if orphan is not None:
            self._offer(orphan)
        return True


class Clairvoyant(Ranked):
    """Knows the trace."""

    spares_own = False

    def __init__(self, room: int, trace: Trace) -> None:
        super().__init__(room)
        # When each block is used, counted from 1, the last time first.
        self._times: dict[int, list[int]] = {}
        for i in range(len(trace.requests), 0, -1):
            for block in trace.requests[i - 1].path:
                self._times.setdefault(block, [len(trace.requests) + 1]).append(i)

    def rank(self, block: int) -> float:
        """See `Ranked.rank`."""
        times = self._times[block]
        while times[-1] <= self.n_served:
            times.pop()
        return -times[-1]


class Learning(Tree):
    """The policy of the tiers, ``tieredkv.hazard``, with blocks that all have one size."""

    # Ticks in a block. Every use takes one more, so that no two are at one time.
    _BLOCK_TICKS = 1 << 10

    def __init__(self, room: int, block_tokens: int, trial: hazard.Trial[int] | None) -> None:
        super().__init__(room)
        self._block_tokens = block_tokens
        self._now = 0
        self._standings: dict[int, hazard.Standing] = {}
        self._leaves: hazard.Shelves[int] = hazard.Shelves()
        self._ghosts: hazard.Ghosts[int] = hazard.Ghosts()
        self._counters = hazard.Counters(room * self._BLOCK_TICKS)
        self._judge: hazard.Judge[int] = hazard.Judge(trial)

    def serve(self, request: Request) -> int:
        """See `Cache.serve`."""
        path = request.path[: self.room]
        matched = self.match(path)
        if matched:
            block = path[matched - 1]
            self._now += 1
            used = hazard.touch(self._standings[block], self._now, self._counters)
            self.stand(block, used)
        self._judge.saw(path, matched, max(1, len(self.parents)))
        self._evict(len(path) - matched, frozenset(path))
        for i in range(matched, len(path)):
            self._add(path, i, hazard.BLOCK if i < request.n_whole else hazard.TAIL)
        return matched

    def standing(self, block: int) -> hazard.Standing:
        """See `hazard.Places.standing`."""
        return self._standings[block]

    def stand(self, block: int, standing: hazard.Standing) -> None:
        """See `hazard.Places.stand`."""
        if self.is_leaf(block):
            old = self._standings[block]
            self._leaves.remove(old.of_class, old.last, block)
            self._leaves.add(standing.of_class, standing.last, block)
        self._standings[block] = standing

    def parent(self, block: int) -> int | None:
        """See `hazard.Places.parent`."""
        return self.parents[block]

    def _add(self, path: Sequence[int], i: int, kind: int) -> None:
        block = path[i]
        above = path[i - 1] if i else None
        ghost = self._ghosts.pop(block)
        new = hazard.arrive(self, above, kind, self._block_tokens, ghost, self._now, self._counters)
        if above is not None and self.is_leaf(above):
            old = self._standings[above]
            self._leaves.remove(old.of_class, old.last, above)
        self.place(path[: i + 1], i)
        self._standings[block] = new
        self._leaves.add(new.of_class, new.last, block)
        self._now += self._BLOCK_TICKS

    def _evict(self, n_new: int, spared: frozenset[int]) -> None:
        excess = len(self.parents) + n_new - self.room
        if excess <= 0:
            return
        table = self._judge.table(self._counters, self._now)
        choice = hazard.Choice(self._leaves, table, self._now, spared)
        for _ in range(excess):
            block = choice.first()
            if block is None:
                break
            self._leave(block, choice)
        self._ghosts.trim(self._counters, self._now, self.room)

    def _leave(self, block: int, choice: hazard.Choice[int]) -> None:
        gone = self._standings.pop(block)
        self._leaves.remove(gone.of_class, gone.last, block)
        self._ghosts.add(block, gone, self._now)
        parent = self.parents[block]
        orphan = self.unlink(block)
        if parent is not None:
            heir = hazard.inherit(self._standings[parent], gone, self._counters)
            self._standings[parent] = heir
            if orphan is not None:
                self._leaves.add(heir.of_class, heir.last, orphan)
                choice.left(gone.of_class, gone.last, (heir.of_class, heir.last, orphan))
                return
        choice.left(gone.of_class, gone.last, None)


def _default(room: int, trace: Trace) -> Cache:
    return Learning(room, trace.block_tokens, hazard.Trial())


def _untried(room: int, trace: Trace) -> Cache:
    return Learning(room, trace.block_tokens, None)


POLICIES: dict[str, Callable[[int, Trace], Cache]] = {
    "default": _default,
    "untried": _untried,
    "leaf-lru": lambda room, _trace: LeafLru(room),
    "whole-lru": lambda room, _trace: WholeLru(room),
    "gdsf": lambda room, trace: Gdsf(room, trace.block_tokens),
    "s3fifo": lambda room, _trace: S3Fifo(room),
    "clairvoyant": Clairvoyant,
}


# ---- replaying


def replay(trace: Trace, policy: str, room: int, progress: Progress | None = None) -> Result:
    """What a policy reaches in a tier with room for so many blocks, at least 1."""
    cache = POLICIES[policy](room, trace)
    half = len(trace.requests) // 2
    asked = [0, 0]
    reused = [0, 0]
    work = saved = 0.0
    start = time.perf_counter()
    for i, request in enumerate(trace.requests):
        n = min(cache.serve(request) * trace.block_tokens, request.n_tokens)
        asked[i >= half] += request.n_tokens
        reused[i >= half] += n
        work += flops(request.n_tokens)
        saved += flops(n)
        if progress is not None:
            progress.at(policy, room, i, len(trace.requests))
    seconds = time.perf_counter() - start
    return Result(
        token_hit=sum(reused) / max(1, sum(asked)),
        token_hit_second_half=reused[1] / max(1, asked[1]),
        flop_saved=saved / max(1.0, work),
        written=cache.written / max(1, trace.n_unique),
        ms_per_request=1e3 * seconds / max(1, len(trace.requests)),
    )


class Progress:
    """A line on stderr every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_SECONDS

    def at(self, policy: str, room: int, done: int, of: int) -> None:
        """Say so, if it is time to."""
        if done % 256 or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PROGRESS_SECONDS
        print(f"{policy}, {room} blocks: {done} of {of} requests", file=sys.stderr, flush=True)


def compare(
    trace: Trace, capacities: Sequence[float], policies: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """All figures by policy and capacity."""
    progress = Progress()
    rooms = {f"{share:g}": max(1, int(share * trace.n_unique)) for share in capacities}
    return {
        policy: {
            share: asdict(replay(trace, policy, room, progress)) for share, room in rooms.items()
        }
        for policy in policies
    }


def _print(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    columns = [field.name for field in fields(Result)]
    print(f"{'policy':12} {'capacity':>8}", *(f"{column:>21}" for column in columns))
    for policy, by_share in figures.items():
        for share, row in by_share.items():
            print(f"{policy:12} {share:>8}", *(f"{row[column]:21.4f}" for column in columns))


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="JSON lines")
    parser.add_argument("--capacity", type=float, nargs="+", default=CAPACITIES)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    with args.trace.open(encoding="utf-8") as lines:
        trace = parse(lines)
    figures = compare(trace, args.capacity, args.policy)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        _print(figures)


if __name__ == "__main__":
    main()
