"""When to leave a server alone that fails, and when to try it again. No threads, no sockets."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

# Failures in a row after which it is left alone.
_FAILURES = 3
# For how long: at first, and at most, in seconds. Doubled whenever trying again fails.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 300.0


class Breaker:
    """Closed while a server answers, open while it doesn't; half-open while one call tries it.

    Failures are counted for each kind of call: one that is answered says nothing of another that
    isn't. After an attempt that went well the next failure opens it again, for twice as long, until
    a call of the kind that failed has succeeded. Any thread may call.
    """

    def __init__(
        self,
        failures: int = _FAILURES,
        first_pause: float = _FIRST_PAUSE,
        longest_pause: float = _LONGEST_PAUSE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._first = first_pause
        self._longest = longest_pause
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: Counter[str] = Counter()
        self._pause = first_pause
        # When to try again; None while closed.
        self._until: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether to do without the server."""
        return self._until is not None

    @property
    def pause(self) -> float:
        """For how many seconds it is left alone when it next opens, or is now."""
        return self._pause

    def is_due(self) -> bool:
        """Whether the caller is to try the server now, and to tell how that went. True once a
        pause, for one caller.
        """
        with self._lock:
            now = self._clock()
            if self._until is None or now < self._until:
                return False
            # Who was told to try may never come back.
            self._until = now + self._pause
            return True

    def recovered(self) -> bool:
        """Note that an attempt went well; whether that closed it."""
        with self._lock:
            if self._until is None:
                return False
            self._until = None
            self._pause = min(2 * self._pause, self._longest)
            self._failed = Counter(dict.fromkeys(self._failed, self._limit - 1))
            return True

    def succeeded(self, kind: str) -> None:
        """Note that a call of a kind went well."""
        with self._lock:
            if self._until is not None:
                # It was made before the last failures.
                return
            self._failed.pop(kind, None)
            if not self._failed:
                self._pause = self._first

    def failed(self, kind: str) -> bool:
        """Note that a call of a kind, or an attempt, failed; whether that opened it."""
        with self._lock:
            if self._until is not None:
                return False
            self._failed[kind] += 1
            if self._failed[kind] < self._limit:
                return False
            self._until = self._clock() + self._pause
            return True

    def still_fails(self) -> None:
        """Note that an attempt failed: the pause begins anew, twice as long."""
        with self._lock:
            if self._until is None:
                return
            self._pause = min(2 * self._pause, self._longest)
            self._until = self._clock() + self._pause
