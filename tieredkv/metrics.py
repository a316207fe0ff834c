"""Counters of a store."""

from __future__ import annotations

import threading
from collections import defaultdict


class Counters:
    """Named counts, each with an optional label (a reason, a kind). Any thread may call."""

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
