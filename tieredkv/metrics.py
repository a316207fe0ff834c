"""Counts, distributions and faults of a store, as they happen. Any thread may call."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from tieredkv.core import Distribution, Fault

# Upper bounds of buckets: of what a request waits for, and of how long a block was not used.
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
AGES = (1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0, 259200.0, 604800.0, 2592000.0)

_FAULTS = 50
_FAULT_CHARACTERS = 500


class Counters:
    """Named counts, each with an optional label (a reason, a kind)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, name: str, n: int = 1, label: str = "") -> int:
        """Raise a count by ``n`` and return its new value."""
        with self._lock:
            self._counts[name][label] += n
            return self._counts[name][label]

    def total(self, name: str) -> int:
        """Sum of a count over its labels."""
        with self._lock:
            return sum(self._counts[name].values())

    def by_label(self, name: str) -> dict[str, int]:
        """A count split by label."""
        with self._lock:
            return dict(self._counts[name])


class Histogram:
    """Observations, counted in buckets with fixed upper ``bounds``."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._lock = threading.Lock()
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation; a clock that was set back makes no negative ones."""
        value = max(0.0, value)
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._total += value

    def reading(self) -> Distribution:
        """All observations so far."""
        with self._lock:
            return Distribution(self._bounds, tuple(self._counts), self._total)


class Departures:
    """Blocks that left a tier: for which reason, and how many seconds after their last use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ages: dict[str, Histogram] = {}

    def note(self, reason: str, age: float) -> None:
        """Count a block that left."""
        with self._lock:
            ages = self._ages.setdefault(reason, Histogram(AGES))
        ages.observe(age)

    def reading(self) -> dict[str, Distribution]:
        """Ages by reason."""
        with self._lock:
            ages = dict(self._ages)
        return {reason: histogram.reading() for reason, histogram in ages.items()}


class Faults:
    """The last faults. One that comes again takes its old one's place, so that a flood of one
    kind leaves room for others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[tuple[str, str], float] = {}

    def note(self, kind: str, text: str) -> None:
        """Remember a fault; of a long text only the beginning."""
        fault = kind, text[:_FAULT_CHARACTERS]
        with self._lock:
            self._faults.pop(fault, None)
            self._faults[fault] = time.time()
            if len(self._faults) > _FAULTS:
                del self._faults[next(iter(self._faults))]

    def recent(self) -> tuple[Fault, ...]:
        """Newest first."""
        with self._lock:
            faults = list(self._faults.items())
        return tuple(Fault(when, kind, text) for (kind, text), when in reversed(faults))
