"""Which leaf of a tree of blocks leaves first, learned from which blocks came back.

A leaf is worth keeping for the chance that it is used again soon, and costs the room that it
takes until then. Its score is the best ratio, over all horizons, of the chance of a return within
the horizon to the time it is expected to be held: a Gittins index. The leaf with the smallest
score leaves. Chances are counted for each class of leaf (how many turns its conversation had, how
much the last one added, how many prompts share it) and each age since the last use. While too few
returns were seen, all classes share one table that falls with age, which is leaf-LRU.

Time is what was inserted: a *tick* is a byte, or any other unit of size, and a *turnover* is as
many ticks as the tier has room for. So downtime doesn't age anything, and a table holds for any
capacity.

State is local. A request writes the standing of the deepest block that it matched (`touch`) and of
those that it adds one by one (`arrive`), in however many steps; a block whose last child leaves
takes over from the child (`inherit`). So only leaves and the ends of requests have exact standings.

An *awaited* block is one that a request ended at: that it returns, or doesn't, is what is counted.
It stays awaited as a *ghost*, its standing alone, for `HORIZON` turnovers after it left. Without
ghosts late returns would be invisible, and the policy would learn that nothing old returns.
`Counters` are sums: several processes may change one set of them in turn.

All values are private to their caller: nothing here locks.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tieredkv.keys import WINDOW_TOKENS

K = TypeVar("K", bound=Hashable)
K_co = TypeVar("K_co", bound=Hashable, covariant=True)
Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

# Turnovers that a block is awaited for, and how many that have left may be, for each that is here.
HORIZON = 8
GHOSTS_PER_BLOCK = 8

# Ages in turnovers: bin 0 up to the first octave, then two bins an octave up to the horizon.
_FIRST_OCTAVE, _LAST_OCTAVE, _PER_OCTAVE = -7, 3, 2
BINS = 1 + (_LAST_OCTAVE - _FIRST_OCTAVE) * _PER_OCTAVE
_EDGES = np.array([0.0, *(2.0 ** (_FIRST_OCTAVE + b / _PER_OCTAVE) for b in range(BINS))])
_WIDTHS = np.diff(_EDGES)

# What is awaited is counted by when its wait began: so many cohorts a turnover, and one over.
_COHORTS_PER_TURNOVER = 2
COHORTS = HORIZON * _COHORTS_PER_TURNOVER + 1
# Turnovers after which what was counted weighs half.
_HALF_LIFE = 4
_FADE = 2.0 ** (-1 / (_HALF_LIFE * _COHORTS_PER_TURNOVER))

# Classes: tails and state that hangs on a block, blocks where prompts part by how many share
# them, then ends of chains by turn and by the tokens that the last turn added.
BLOCK, TAIL, STATE = range(3)
_SHARED, _N_SHARED = 2, 5
_PRIVATE = _SHARED + _N_SHARED
_FRESH_TOKENS = (1024, 4096, 16384)
_FIRST_TURNS = len(_FRESH_TOKENS) + 1
CLASSES = _PRIVATE + _FIRST_TURNS + 3 * len(_FRESH_TOKENS)

# Weights, in awaited blocks, of what is believed of a class before it is counted: the pool's
# hazard, and of the pool itself a hazard that falls as 1 / age.
_CLASS_WEIGHT = 20.0
_POOL_WEIGHT = 20.0
_POOL_HAZARD = 0.15 / _PER_OCTAVE
_POOL_FALL = 0.7
# Of the first bin, which is wider for its age than the next: as likely for each tick at least.
_FIRST_BIN = float(_WIDTHS[0] / _WIDTHS[1])
_MAX_HAZARD = 0.98
# What is believed of a block that four prompts or more share, whatever the pool does: it has to
# outlive a burst of prompts that never come again, before it was ever seen idle for so long.
_SHARED_HAZARD = np.zeros((CLASSES, 1))
_SHARED_HAZARD[_SHARED + 1 : _SHARED + _N_SHARED] = _POOL_HAZARD

# Scores are looked up on a finer grid of ages, which goes on beyond the horizon.
_STEPS_PER_OCTAVE = 4
_GRID_START = _FIRST_OCTAVE - 1
_GRID = _GRID_START + np.arange((_LAST_OCTAVE - _GRID_START + 4) * _STEPS_PER_OCTAVE) / float(
    _STEPS_PER_OCTAVE
)

_VERSION = 1
_HEAD = struct.Struct("<IQQQ")


# ---- standings


@dataclass(frozen=True, slots=True)
class Standing:
    """What a block carries of its past.

    ``last`` in ticks; ``turn`` counts the requests that made its conversation, ``fresh`` the
    tokens that the last of them added, ``refs`` the later requests that used it or what was below
    it, ``branches`` how often another prompt parted here.
    """

    last: int
    kind: int = BLOCK
    turn: int = 1
    fresh: int = 0
    refs: int = 0
    branches: int = 0
    awaited: bool = False

    @property
    def of_class(self) -> int:
        """Class of a leaf with this standing, below ``CLASSES``."""
        if self.kind != BLOCK:
            return self.kind - TAIL
        if self.branches:
            return _SHARED + min((max(1, self.refs).bit_length() - 1) // 2, _N_SHARED - 1)
        size = bisect_left(_FRESH_TOKENS, self.fresh)
        if self.turn <= 1:
            return _PRIVATE + size
        later = 0 if self.turn == 2 else 1 if self.turn < 5 else 2
        size = min(size, len(_FRESH_TOKENS) - 1)
        return _PRIVATE + _FIRST_TURNS + later * len(_FRESH_TOKENS) + size


def kind_of(tokens: bytes, block_tokens: int) -> int:
    """Kind of a block with these tokens, in a tier whose whole blocks have ``block_tokens``."""
    if not tokens or tokens == WINDOW_TOKENS:
        return STATE
    return BLOCK if len(tokens) >= 8 * block_tokens else TAIL


class Places(Protocol[K]):
    """Where the standings of the blocks of a tier are."""

    def standing(self, key: K) -> Standing:
        """That of a block that is here."""

    def stand(self, key: K, standing: Standing) -> None:
        """Give it another one."""

    def parent(self, key: K) -> K | None:
        """Key of its parent, None at the root."""


def touch(standing: Standing, now: int, counters: Counters) -> Standing:
    """The deepest block of a request's match, used. Before what the request adds is added.

    At the end of a conversation this is its next turn; elsewhere another prompt parts here.
    """
    _came_back(standing, now, counters)
    used = replace(standing, last=now, refs=standing.refs + 1, awaited=True)
    if standing.kind == BLOCK:
        if standing.awaited and not standing.branches:
            used = replace(used, turn=standing.turn + 1, fresh=0)
        else:
            used = replace(used, branches=standing.branches + 1, fresh=0)
    counters.begin(used.of_class, now)
    return used


def renew(standing: Standing, now: int, counters: Counters) -> Standing:
    """A block is used by a request that was counted here already, or of which no more is known:
    its wait begins anew, and nothing is learned.
    """
    if standing.awaited:
        counters.cancel(standing.of_class, standing.last)
        counters.begin(standing.of_class, now)
    return replace(standing, last=now)


def arrive(
    places: Places[K],
    above: K | None,
    kind: int,
    n_tokens: int,
    ghost: Standing | None,
    now: int,
    counters: Counters,
) -> Standing:
    """Standing of a new block of ``n_tokens`` below ``above`` (None at the root), where what is
    above it may get another one. It left with ``ghost``, if it was here before and was awaited.
    """
    if ghost is not None:
        _came_back(ghost, now, counters)
    if kind != BLOCK:
        new = Standing(now, kind, awaited=True)
        counters.begin(new.of_class, now)
        return new
    parent = None if above is None else places.standing(above)
    goes_on = parent is not None and parent.awaited and not parent.branches
    if parent is not None and above is not None and goes_on:
        places.stand(above, _unawaited(parent, counters))
    if ghost is not None:
        _rejoin(places, above, counters)
        turn = 1 if ghost.branches else ghost.turn + 1
        new = Standing(now, turn=turn, awaited=True)
    elif parent is not None and goes_on:
        # The request that ended at the parent goes on: it may add its blocks in several steps.
        new = Standing(now, turn=parent.turn, fresh=parent.fresh + n_tokens, awaited=True)
    else:
        new = Standing(now, fresh=n_tokens, awaited=True)
    counters.begin(new.of_class, now)
    return new


def _rejoin(places: Places[K], above: K | None, counters: Counters) -> None:
    """A block that is back shows that its request did not part where its match ended, up from
    ``above``, past blocks that it has added: it went on along a chain whose end had left.
    """
    while above is not None:
        standing = places.standing(above)
        if standing.branches:
            if standing.branches == 1 and standing.awaited:
                places.stand(above, replace(_unawaited(standing, counters), branches=0))
            return
        if standing.turn > 1 or standing.refs:
            return
        above = places.parent(above)


def recall(standing: Standing, before: Standing, counters: Counters) -> Standing:
    """What becomes of a new block that had a standing elsewhere, by which it was used before."""
    known = replace(
        standing,
        turn=before.turn,
        fresh=before.fresh,
        refs=before.refs,
        branches=before.branches,
    )
    return _reclassed(standing, known, counters)


def inherit(parent: Standing, child: Standing, counters: Counters) -> Standing:
    """What becomes of ``parent`` when ``child`` leaves: it was last used no earlier than that."""
    hangs = child.kind != BLOCK
    refs = parent.refs + (0 if hangs else child.refs)
    if not (hangs or parent.awaited or parent.branches) and child.last >= parent.last:
        # The child's ghost is awaited; this block waits for the same prompt.
        return replace(child, refs=refs, awaited=False)
    # More uses may make another class of it, and then its wait is one of that class.
    same = _reclassed(parent, replace(parent, refs=refs), counters)
    if child.last <= parent.last:
        return same
    if child.refs:
        _came_back(same, child.last, counters)
        used = replace(same, last=child.last)
        if used.awaited:
            counters.begin(used.of_class, used.last)
        return used
    # Nobody used the child since the request that added it, which is the one that ended here.
    return renew(same, child.last, counters)


def drop(standing: Standing, counters: Counters) -> None:
    """A block leaves for another reason than room: it is counted neither as returned nor not."""
    if standing.awaited:
        counters.cancel(standing.of_class, standing.last)


def _reclassed(old: Standing, new: Standing, counters: Counters) -> Standing:
    if old.awaited and new.of_class != old.of_class:
        counters.cancel(old.of_class, old.last)
        counters.begin(new.of_class, new.last)
    return new


def _unawaited(standing: Standing, counters: Counters) -> Standing:
    counters.cancel(standing.of_class, standing.last)
    return replace(standing, awaited=False)


def _came_back(standing: Standing, now: int, counters: Counters) -> None:
    if standing.awaited:
        counters.end(standing.of_class, standing.last, now)


# ---- what was counted


class Counters:
    """Returns by class and age, and waits that go on by class and beginning.

    ``span`` is the ticks of a turnover. What began before the tick ``since`` is not counted.
    """

    def __init__(self, span: int, since: int = 0) -> None:
        self.span = span
        self.since = since
        self.cohort = self._cohort_of(since)
        self.returns: Array = np.zeros((CLASSES, BINS), np.float32)
        self.lost: Array = np.zeros(CLASSES, np.float32)
        self.waiting: Array = np.zeros((CLASSES, COHORTS), np.float32)

    def begin(self, of_class: int, start: int) -> None:
        """A wait begins."""
        self._wait(of_class, start, 1)

    def cancel(self, of_class: int, start: int) -> None:
        """A wait that began counts no more."""
        self._wait(of_class, start, -1)

    def end(self, of_class: int, start: int, now: int) -> None:
        """A wait ends in a return. One that was lost before counts as a late return as well."""
        self.advance(now)
        if start < self.since:
            return
        self._wait(of_class, start, -1)
        self.returns[of_class, bin_of((now - start) / self.span)] += 1

    def advance(self, now: int) -> None:
        """Let time go on to ``now``: who waited longer than the horizon is lost."""
        self._advance(self._cohort_of(now))

    def to_bytes(self) -> bytes:
        """Under 4 KB, little-endian."""
        arrays = (self.returns, self.lost, self.waiting)
        head = _HEAD.pack(_VERSION, self.span, self.since, self.cohort)
        return head + b"".join(a.astype("<f4").tobytes() for a in arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Counters:
        """What `to_bytes` made. Raises ValueError if it is nothing that this version made."""
        if len(data) != _HEAD.size + 4 * (CLASSES * BINS + CLASSES + CLASSES * COHORTS):
            raise ValueError("counters of another size")
        version, span, since, cohort = _HEAD.unpack_from(data)
        numbers = np.frombuffer(data, "<f4", offset=_HEAD.size).astype(np.float32)
        if version != _VERSION or not span or not np.isfinite(numbers).all():
            raise ValueError("counters of another version, or none")
        counters = cls(span, since)
        counters.cohort = cohort
        returns, lost, waiting = np.split(numbers, (CLASSES * BINS, CLASSES * BINS + CLASSES))
        counters.returns[:] = returns.reshape(CLASSES, BINS)
        counters.lost[:] = lost
        counters.waiting[:] = waiting.reshape(CLASSES, COHORTS)
        return counters

    def _cohort_of(self, tick: int) -> int:
        return tick * _COHORTS_PER_TURNOVER // self.span

    def _wait(self, of_class: int, start: int, n: int) -> None:
        if start < self.since:
            return
        cohort = self._cohort_of(start)
        if cohort > self.cohort:
            self._advance(cohort)
        if cohort > self.cohort - COHORTS:
            self.waiting[of_class, cohort % COHORTS] += n

    def _advance(self, cohort: int) -> None:
        steps = cohort - self.cohort
        if steps <= 0:
            return
        for number in range(self.cohort + 1, self.cohort + 1 + min(steps, COHORTS)):
            self.returns *= _FADE
            self.lost *= _FADE
            self.lost += self.waiting[:, number % COHORTS]
            self.waiting[:, number % COHORTS] = 0
        rest = np.float32(_FADE ** max(0, steps - COHORTS))
        self.returns *= rest
        self.lost *= rest
        self.cohort = cohort


def bin_of(age: float) -> int:
    """Bin of an age in turnovers, below ``BINS``."""
    if age < _EDGES[1]:
        return 0
    return min(BINS - 1, 1 + int((math.log2(age) - _FIRST_OCTAVE) * _PER_OCTAVE))


# ---- scores


class Table:
    """Scores by class and age, and where in a class to look for its smallest."""

    def __init__(self, scores: Floats, span: int) -> None:
        self.span = span
        self._scores: list[list[float]] = scores.tolist()
        self._dips = [tuple(int(2.0**x * span) for x in _dips(row)) for row in scores]

    @classmethod
    def learned(cls, counters: Counters, now: int) -> Table:
        """Of what was counted up to ``now``. A millisecond or two: build it anew now and then."""
        hazard = hazards(counters, now)
        return cls(_on_grid(_indices(hazard)), counters.span)

    @classmethod
    def by_age(cls, span: int) -> Table:
        """The oldest first, whatever its class: leaf-LRU."""
        return cls(np.tile(-_GRID, (CLASSES, 1)), span)

    def score(self, of_class: int, age: int) -> float:
        """Logarithm of the score at an age in ticks."""
        row = self._scores[of_class]
        if age <= 0:
            return row[0]
        step = int((math.log2(age / self.span) - _GRID_START) * _STEPS_PER_OCTAVE)
        return row[min(max(step, 0), len(row) - 1)]

    def dips(self, of_class: int) -> tuple[int, ...]:
        """Ages in ticks at which the score is smaller than at those around, if any."""
        return self._dips[of_class]


def hazards(counters: Counters, now: int) -> Floats:
    """Chance to return within each age bin of who reached it: (``CLASSES``, ``BINS``)."""
    returns = _smooth(counters.returns.astype(np.float64))
    at_risk = _smooth(_exposures(counters, now))
    pool = np.empty(BINS)
    believed = _POOL_HAZARD * _FIRST_BIN
    for b in range(BINS):
        pool[b] = (returns[:, b].sum() + _POOL_WEIGHT * believed) / (
            at_risk[:, b].sum() + _POOL_WEIGHT
        )
        believed = pool[b] * _POOL_FALL / (1 if b else _FIRST_BIN)
    # A class differs from the pool first by a factor, then, as far as its counts say, in shape.
    expected = at_risk @ pool
    factor = (returns.sum(axis=1) + _CLASS_WEIGHT) / (expected + _CLASS_WEIGHT)
    typical = np.clip(factor[:, None] * pool, _SHARED_HAZARD, 0.9)
    seen = (returns + _CLASS_WEIGHT * typical) / (at_risk + _CLASS_WEIGHT)
    found: Floats = np.clip(seen, 0.0, _MAX_HAZARD)
    return found


def _exposures(counters: Counters, now: int) -> Floats:
    """How many reached each bin; those who left it in its midst count half."""
    returns = counters.returns.astype(np.float64)
    beyond = np.cumsum(returns[:, ::-1], axis=1)[:, ::-1] - returns
    lost = np.maximum(counters.lost.astype(np.float64), 0)
    waiting = np.maximum(counters.waiting.astype(np.float64), 0)
    columns = np.arange(COHORTS)
    began = counters.cohort - (counters.cohort - columns) % COHORTS
    oldest = now / counters.span - began / _COHORTS_PER_TURNOVER
    passed = np.zeros((COHORTS, BINS))
    parts = (1 / 6, 1 / 2, 5 / 6)
    for part in parts:
        age = np.maximum(oldest - part / _COHORTS_PER_TURNOVER, 0)
        passed += np.clip((age[:, None] - _EDGES[:-1]) / _WIDTHS, 0, 1) / len(parts)
    exposed: Floats = beyond + returns / 2 + lost[:, None] + waiting @ passed
    return exposed


def _smooth(counts: Floats) -> Floats:
    """Each bin with a quarter of either neighbour: ages of returns are no sharper than that."""
    wide = np.pad(counts, ((0, 0), (1, 1)), mode="edge")
    smooth: Floats = wide[:, :-2] / 4 + wide[:, 1:-1] / 2 + wide[:, 2:] / 4
    return smooth


def _indices(hazard: Floats) -> Floats:
    """Of who reached a bin: the best chance of a return per turnover held, over all horizons."""
    best = np.zeros_like(hazard)
    for b in range(BINS):
        stays = np.ones(len(hazard))
        held = np.zeros(len(hazard))
        for e in range(b, BINS):
            held += stays * (1 - hazard[:, e] / 2) * _WIDTHS[e]
            stays *= 1 - hazard[:, e]
            best[:, b] = np.maximum(best[:, b], (1 - stays) / held)
    return best


def _on_grid(indices: Floats) -> Floats:
    """Logarithms of ``indices`` on the finer grid. Beyond the horizon they fall as 1 / age."""
    low = np.maximum(_EDGES[:-1], 2.0**_GRID_START)
    middles = np.log2(low * _EDGES[1:]) / 2
    logs = np.log2(np.maximum(indices, 1e-12))
    rows = [np.interp(_GRID, middles, row) for row in logs]
    scores: Floats = np.stack(rows) - np.maximum(_GRID - middles[-1], 0)
    return scores


def _dips(row: Floats) -> Iterator[float]:
    """Grid ages at the older end of each minimum of a row, its last point apart."""
    falling = True
    for x, score, after in zip(_GRID, row, row[1:], strict=False):
        if after > score + 1e-6:
            if falling:
                yield float(x)
            falling = False
        elif after < score - 1e-6:
            falling = True


# ---- leaves


def shelf_of(of_class: int, grade: int = 0) -> int:
    """Number below 256 of where leaves of a class and a grade stand. See ``policy.grade``."""
    return grade * CLASSES + of_class


class Leaves(Protocol[K_co]):
    """Leaves on shelves, on each in the order of their last use and then of their keys. Keys can
    be compared.
    """

    def shelves(self) -> Iterable[int]:
        """Shelves that have a leaf, or had one."""

    def newer(self, shelf: int, last: int) -> Iterator[tuple[int, K_co]]:
        """Last use and key of the leaves last used at ``last`` or later, oldest first."""

    def older(self, shelf: int, last: int) -> Iterator[tuple[int, K_co]]:
        """Those last used before ``last``, newest first."""


class Choice(Generic[K]):
    """Who leaves, one after another, at one time. Looks at a few leaves of each shelf."""

    def __init__(
        self, leaves: Leaves[K], table: Table, now: int, spared: Container[K] = ()
    ) -> None:
        self._leaves = leaves
        self._table = table
        self._now = now
        self._spared = spared
        self._heads: dict[int, tuple[float, int, K]] = {}
        for shelf in leaves.shelves():
            self.changed(shelf)

    def first(self) -> K | None:
        """The leaf with the smallest score, the least recently used of equals; None if all are
        spared.
        """
        return min(self._heads.values())[2] if self._heads else None

    def changed(self, shelf: int) -> None:
        """To be called once a leaf has left a shelf or come to it."""
        head = min((self._rated(shelf, leaf) for leaf in self._candidates(shelf)), default=None)
        if head is None:
            self._heads.pop(shelf, None)
        else:
            self._heads[shelf] = head

    def left(self, shelf: int, last: int, heir: tuple[int, int, K] | None) -> None:
        """To be called instead once the first leaf has left this place; its parent, if that is a
        leaf now, has come to the place ``heir``: shelf, last use and key.
        """
        if heir is not None and heir[:2] == (shelf, last) and heir[2] not in self._spared:
            # The blocks of a chain take each other's place: nothing has to be looked for.
            self._heads[shelf] = (self._heads[shelf][0], *heir[1:])
            return
        self.changed(shelf)
        if heir is not None and heir[0] != shelf:
            self.changed(heir[0])

    def _candidates(self, shelf: int) -> Iterator[tuple[int, K]]:
        """The oldest leaf, and those next to where the score is smallest, older and newer."""
        yield from self._next(self._leaves.newer(shelf, 0))
        for age in self._table.dips(shelf % CLASSES):
            yield from self._next(self._leaves.newer(shelf, self._now - age))
            yield from self._next(self._leaves.older(shelf, self._now - age))

    def _next(self, leaves: Iterator[tuple[int, K]]) -> Iterator[tuple[int, K]]:
        for leaf in leaves:
            if leaf[1] not in self._spared:
                yield leaf
                return

    def _rated(self, shelf: int, leaf: tuple[int, K]) -> tuple[float, int, K]:
        grade, of_class = divmod(shelf, CLASSES)
        # A grade more is half the worth for its room.
        return self._table.score(of_class, self._now - leaf[0]) - grade, *leaf


class Shelves(Generic[K]):
    """`Leaves` in memory."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, K]]] = {}

    def add(self, shelf: int, last: int, key: K) -> None:
        """Put a leaf in its place."""
        insort(self._rows.setdefault(shelf, []), (last, key))

    def remove(self, shelf: int, last: int, key: K) -> None:
        """Take away a leaf that is there."""
        row = self._rows[shelf]
        del row[bisect_left(row, (last, key))]

    def shelves(self) -> Iterable[int]:
        """See `Leaves.shelves`."""
        return self._rows.keys()

    def newer(self, shelf: int, last: int) -> Iterator[tuple[int, K]]:
        """See `Leaves.newer`."""
        row = self._rows.get(shelf, [])
        for i in range(bisect_left(row, (last,)), len(row)):
            yield row[i]

    def older(self, shelf: int, last: int) -> Iterator[tuple[int, K]]:
        """See `Leaves.older`."""
        row = self._rows.get(shelf, [])
        for i in range(bisect_left(row, (last,)) - 1, -1, -1):
            yield row[i]


def is_forgotten(left: int, n_ghosts: int, counters: Counters, now: int, n_blocks: int) -> bool:
    """Whether the ghost that left first, at the tick ``left``, is awaited no more."""
    too_late = left < now - COHORTS * counters.span // _COHORTS_PER_TURNOVER
    return too_late or n_ghosts > GHOSTS_PER_BLOCK * max(1, n_blocks)


class Ghosts(Generic[K]):
    """Standings of blocks that left, in memory, in the order in which they left."""

    def __init__(self) -> None:
        self._rows: OrderedDict[K, tuple[int, Standing]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: K) -> bool:
        return key in self._rows

    def add(self, key: K, standing: Standing, now: int) -> None:
        """A block leaves. Only who is awaited is kept."""
        if standing.awaited:
            self._rows[key] = (now, standing)
            self._rows.move_to_end(key)

    def pop(self, key: K) -> Standing | None:
        """The standing of a block that is back, which is no ghost any more."""
        row = self._rows.pop(key, None)
        return row[1] if row else None

    def trim(self, counters: Counters, now: int, n_blocks: int) -> None:
        """Forget those that are awaited no more, beside ``n_blocks`` that are here: the first
        that left. Their waits go on in the counters until they are lost there.
        """
        while self._rows:
            key, (left, _) = next(iter(self._rows.items()))
            if not is_forgotten(left, len(self._rows), counters, now, n_blocks):
                return
            del self._rows[key]


# ---- the check on it all


# In rooms: how much fewer blocks may be found than leaf-LRU would, on balance, before it takes
# over; how large a lead is counted against that; and how long it stays, in blocks asked for.
_MAX_DEFICIT = 0.1
_MAX_LEAD = 0.2
_STAY, _LONGER, _MAX_STAY = 2.0, 4.0, 256.0
# The share of what leaf-LRU finds that nobody would miss.
_SLACK = 0.005


class Trial(Generic[K]):
    """Leaf-LRU in a room of the same size, beside the real tier: should that be better, `is_lost`
    says to do as it does (``Table.by_age``), each time for longer. Holds keys only.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[K, None] = OrderedDict()
        self._deficit = 0.0
        self._asked = 0.0
        self._until = 0.0
        self._stay = _STAY

    @property
    def is_lost(self) -> bool:
        """Whether leaves are to leave by their age alone."""
        return self._asked < self._until

    def saw(self, path: Sequence[K], n_matched: int, room: int) -> None:
        """A request for the blocks of ``path``, of which the tier had the first ``n_matched``.

        ``room`` is the number of blocks that the tier holds once they are added, at least 1.
        """
        would_match = self._use(path, room)
        self._asked += len(path) / room
        if self.is_lost:
            return
        deficit = self._deficit + ((1 - _SLACK) * would_match - n_matched) / room
        self._deficit = max(deficit, -_MAX_LEAD)
        if self._deficit > _MAX_DEFICIT:
            self._lose()

    def _use(self, path: Sequence[K], room: int) -> int:
        would_match = next((i for i, key in enumerate(path) if key not in self._used), len(path))
        # The deepest first: so a child never stays longer than its parent.
        for key in reversed(path):
            self._used[key] = None
            self._used.move_to_end(key)
        while len(self._used) > room:
            self._used.popitem(last=False)
        return would_match

    def _lose(self) -> None:
        again = self._until > 0 and self._asked - self._until < 2 * self._stay
        self._stay = min(self._stay * _LONGER, _MAX_STAY) if again else _STAY
        self._until = self._asked + self._stay
        self._deficit = 0.0


class Judge(Generic[K]):
    """Says by which table leaves are chosen: the one learned, or by age while the trial is lost.

    What a process needs for itself of the policy of a tier; nothing here has to outlive it.
    """

    # Choices that are made by one table at most, and turnovers that it is used for, in part;
    # learning another takes a millisecond or two.
    _PER_TABLE = 64
    _TABLES_PER_TURNOVER = 16

    def __init__(self, trial: Trial[K] | None) -> None:
        """Without a trial it is always the one learned."""
        self._trial = trial
        self._n_left = 0
        self._until = 0
        self._learned: Table | None = None
        self._by_age: Table | None = None

    def saw(self, path: Sequence[K], n_matched: int, room: int) -> None:
        """See `Trial.saw`."""
        if self._trial is not None:
            self._trial.saw(path, n_matched, room)

    def table(self, counters: Counters, now: int) -> Table:
        """The table for a choice at a time."""
        if self._trial is not None and self._trial.is_lost:
            if self._by_age is None or self._by_age.span != counters.span:
                self._by_age = Table.by_age(counters.span)
            return self._by_age
        self._n_left -= 1
        is_old = self._n_left < 0 or now > self._until
        if is_old or self._learned is None or self._learned.span != counters.span:
            self._learned = Table.learned(counters, now)
            self._n_left = self._PER_TABLE
            self._until = now + counters.span // self._TABLES_PER_TURNOVER
        return self._learned
