"""How fast state comes from disk and how fast it is computed, learned from what has been done.

Where computing is faster, as on a disk that stalls, a hit in the cold tier isn't worth its while.
Any thread may call.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

# Weight of the latest observation in the mean.
_LATEST = 0.3
# A rate that was learned from less than this says little: it is mostly overhead.
_LEAST_TOKENS = 32
_LEAST_BYTES = 1 << 20
# What takes no longer than this is not worth a thought.
_SHORT_SECONDS = 0.05
# Every so many times that a promote isn't worth it one is made all the same, to learn anew.
_PROBE = 16
# Rates of models that were used last are kept, so many.
_MODELS = 64


class Pace:
    """Seconds a byte of promotes and, for each model, seconds a token of prefill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Tokens that hits spared a model, and seconds of their promotes; and what was saved by
        # those models that aren't kept any more.
        self._spared: dict[Hashable, tuple[int, float]] = {}
        self._saved_before = 0.0
        self._per_byte: float | None = None
        self._per_token: dict[Hashable, float] = {}
        self._skipped = 0

    def promoted(self, n_bytes: int, seconds: float) -> None:
        """Note that so many raw bytes came from the cold tier in so much time."""
        if n_bytes < _LEAST_BYTES:
            return
        with self._lock:
            self._per_byte = _mean(self._per_byte, seconds / n_bytes)

    def prefilled(self, model: Hashable, n_tokens: int, seconds: float) -> None:
        """Note that a model computed so many tokens in so much time."""
        if n_tokens < _LEAST_TOKENS or seconds <= 0:
            return
        with self._lock:
            known = self._per_token.pop(model, None)
            self._per_token[model] = _mean(known, seconds / n_tokens)
            if len(self._per_token) > _MODELS:
                del self._per_token[next(iter(self._per_token))]

    def prefill_seconds(self, model: Hashable, n_tokens: int) -> float | None:
        """How long a model takes to compute so many tokens; None if that isn't known."""
        with self._lock:
            per_token = self._per_token.get(model)
            return None if per_token is None else n_tokens * per_token

    def spared(self, model: Hashable, n_tokens: int, promote_seconds: float) -> None:
        """Note that a hit of a model spared it so many tokens, for so much time of promotes."""
        with self._lock:
            tokens, seconds = self._spared.pop(model, (0, 0.0))
            self._spared[model] = tokens + n_tokens, seconds + promote_seconds
            if len(self._spared) > _MODELS:
                self._saved_before += self._saved(next(iter(self._spared)))
                del self._spared[next(iter(self._spared))]

    def saved_seconds(self) -> float:
        """What hits have saved, as an estimate: for each model the tokens that it was spared times
        its pace as of now, less the promotes. Nothing for a model whose pace isn't known yet.
        """
        with self._lock:
            return self._saved_before + sum(map(self._saved, self._spared))

    def _saved(self, model: Hashable) -> float:
        per_token = self._per_token.get(model)
        tokens, seconds = self._spared[model]
        return 0.0 if per_token is None else tokens * per_token - seconds

    def is_worth_promoting(self, model: Hashable, n_tokens: int, n_bytes: int) -> bool:
        """Whether to read ``n_bytes`` of state rather than to compute its ``n_tokens`` tokens.

        As long as one of the rates isn't known, it is.
        """
        with self._lock:
            if self._is_faster_read(model, n_tokens, n_bytes):
                return True
            self._skipped += 1
            return self._skipped % _PROBE == 0

    def is_faster_read(self, model: Hashable, n_tokens: int, n_bytes: int) -> bool:
        """As `is_worth_promoting`, for who only wants to know: without a probe now and then."""
        with self._lock:
            return self._is_faster_read(model, n_tokens, n_bytes)

    def _is_faster_read(self, model: Hashable, n_tokens: int, n_bytes: int) -> bool:
        per_token = self._per_token.get(model)
        if self._per_byte is None or per_token is None:
            return True
        return n_bytes * self._per_byte <= max(n_tokens * per_token, _SHORT_SECONDS)


class Link:
    """How fast state comes over a network, and how often what is asked for is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latency: float | None = None
        self._per_byte: float | None = None
        self._per_token: dict[Hashable, float] = {}
        self._found = 1.0
        self._skipped = 0

    @property
    def latency(self) -> float | None:
        """Seconds from a question to its answer; None if none was asked."""
        return self._latency

    def answered(self, seconds: float) -> None:
        """Note how long an answer took."""
        with self._lock:
            self._latency = _mean(self._latency, seconds)

    def moved(self, model: Hashable, n_tokens: int, n_bytes: int, seconds: float) -> None:
        """Note that the state of so many tokens, so many encoded bytes, came in so much time."""
        if n_tokens <= 0 or n_bytes < _LEAST_BYTES:
            return
        with self._lock:
            self._per_token.pop(model, None)
            self._per_token[model] = n_bytes / n_tokens
            if len(self._per_token) > _MODELS:
                del self._per_token[next(iter(self._per_token))]
            spent = max(0.0, seconds - (self._latency or 0.0))
            self._per_byte = _mean(self._per_byte, spent / n_bytes)

    def found(self, share: float) -> None:
        """Note which share of the tokens that were asked for was there."""
        with self._lock:
            self._found = _mean(self._found, share)

    def is_worth_asking(self, model: Hashable, n_tokens: int, prefill: float | None) -> bool:
        """Whether to look for ``n_tokens`` tokens, which take ``prefill`` seconds to compute.

        Two answers are waited for, and what is found as often as before is fetched.
        """
        with self._lock:
            if prefill is None or self._latency is None:
                return True
            won = self._found * (prefill - (self._transfer(model, n_tokens) or 0.0))
            return self._decide(won - 2 * self._latency)

    def is_worth_fetching(self, model: Hashable, n_tokens: int, prefill: float | None) -> bool:
        """Whether to fetch ``n_tokens`` tokens that are there rather than to compute them."""
        with self._lock:
            transfer = self._transfer(model, n_tokens)
            if prefill is None or transfer is None:
                return True
            return self._decide(prefill - transfer - (self._latency or 0.0))

    def _transfer(self, model: Hashable, n_tokens: int) -> float | None:
        per_token = self._per_token.get(model)
        if per_token is None or self._per_byte is None:
            return None
        return n_tokens * per_token * self._per_byte

    def _decide(self, won: float) -> bool:
        if won > 0:
            return True
        self._skipped += 1
        return self._skipped % _PROBE == 0


def _mean(known: float | None, latest: float) -> float:
    return latest if known is None else known + _LATEST * (latest - known)
