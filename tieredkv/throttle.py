"""A cap on bytes a second, as a token bucket. No threads, no sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable

# What may go out at once after a rest, in seconds of the rate.
_BURST_SECONDS = 1.0


class Throttle:
    """How long to wait so that no more than ``rate`` bytes a second go out. For one thread."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``rate`` in bytes a second; 0 for as fast as it goes."""
        self._rate = rate
        self._clock = clock
        self._free = rate * _BURST_SECONDS
        self._since = clock()

    def delay(self, n_bytes: int) -> float:
        """Take ``n_bytes``; seconds to wait before they go out."""
        if not self._rate:
            return 0.0
        now = self._clock()
        earned = (now - self._since) * self._rate
        self._free = min(self._free + earned, self._rate * _BURST_SECONDS) - n_bytes
        self._since = now
        return max(0.0, -self._free / self._rate)
