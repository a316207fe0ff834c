"""What a server did: its last requests, and how their tokens came about. Any thread may call."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tieredkv.core import Distribution, Fault, FetchReport
from tieredkv.metrics import Faults, Histogram

_REQUESTS = 50
_MINUTES = 60
_MODEL_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request that was answered, or failed with its HTTP ``status`` (499: its client left).

    ``time`` is when it came, in seconds of Unix time. ``prompt_tokens`` are ``hot_tokens``,
    ``cold_tokens`` and ``remote_tokens``, reused from each tier, and ``computed_tokens``; of a
    request that ended before its first token, those that were not computed are in none of them.
    Milliseconds are None for what did not happen: ``promote_ms`` reading from the lower tiers,
    ``prefill_ms`` from then to the first token, ``first_token_ms`` and ``total_ms`` from the
    request's coming.
    """

    time: float
    id: str
    model: str
    status: int
    prompt_tokens: int
    hot_tokens: int
    cold_tokens: int
    computed_tokens: int
    generated_tokens: int
    promote_ms: float | None
    prefill_ms: float | None
    first_token_ms: float | None
    total_ms: float
    remote_tokens: int = 0

    def log_line(self) -> str:
        """The report as logfmt, without any of the prompt."""
        fields = {name.removesuffix("_tokens"): value for name, value in asdict(self).items()}
        del fields["time"]
        return " ".join(f"{name}={_logfmt(value)}" for name, value in fields.items())


def _logfmt(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "=\\')
    return text if plain and text else json.dumps(text)


class Course:
    """How one request goes, noted as it happens: by the thread that generates, and read by the
    one that answers its client.
    """

    def __init__(self) -> None:
        self.time = time.time()
        self.fetch: FetchReport | None = None
        self._start = time.monotonic()
        self._fetched: float | None = None
        self._first: float | None = None
        self._n_computed = 0
        self._n_generated = 0

    def note_fetch(self, fetch: FetchReport) -> None:
        """Its prompt was looked up just now."""
        self.fetch = fetch
        self._fetched = time.monotonic()

    def note_progress(self, n_computed: int) -> None:
        """So many tokens of its prompt are computed by now."""
        self._n_computed = n_computed

    def note_token(self) -> None:
        """A token was generated."""
        self._n_generated += 1
        if self._first is None:
            self._first = time.monotonic()

    def report(self, request_id: str, model: str, status: int) -> RequestReport:
        """All of it, at its end."""
        fetch = self.fetch or FetchReport(0)
        whole = fetch.n_prompt - fetch.n_reused
        first, fetched = self._first, self._fetched
        return RequestReport(
            time=self.time,
            id=request_id,
            model=model[:_MODEL_CHARACTERS],
            status=status,
            prompt_tokens=fetch.n_prompt,
            hot_tokens=fetch.n_hot,
            cold_tokens=fetch.n_cold,
            computed_tokens=whole if first is not None else min(self._n_computed, whole),
            generated_tokens=self._n_generated,
            promote_ms=_ms(fetch.promote_seconds) if fetch.n_cold or fetch.n_remote else None,
            prefill_ms=None if first is None or fetched is None else _ms(first - fetched),
            first_token_ms=None if first is None else _ms(first - self._start),
            total_ms=_ms(time.monotonic() - self._start),
            remote_tokens=fetch.n_remote,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


@dataclass(frozen=True, slots=True)
class Minute:
    """Requests that ended in the minute that began at ``time``, in seconds of Unix time, and
    tokens of their prompts by where they came from.
    """

    time: int
    requests: int = 0
    hot: int = 0
    cold: int = 0
    computed: int = 0
    remote: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """All requests since the server's start. ``tokens`` by source: hot, cold, remote,
    computed."""

    requests: dict[int, int]
    tokens: dict[str, int]
    generated: int
    first_token_seconds: Distribution
    prefill_seconds: Distribution


class Journal:
    """The last requests, their tokens by minute for an hour, their totals and their faults."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """``now`` gives seconds of Unix time."""
        self._now = now
        self.started = now()
        self._lock = threading.Lock()
        self._requests: deque[RequestReport] = deque(maxlen=_REQUESTS)
        self._minutes: deque[Minute] = deque(maxlen=_MINUTES)
        self._statuses: Counter[int] = Counter()
        self._tokens: Counter[str] = Counter(hot=0, cold=0, remote=0, computed=0)
        self._generated = 0
        self._first_tokens = Histogram()
        self._prefills = Histogram()
        self._faults = Faults()

    def add(self, report: RequestReport) -> None:
        """Write down a request that has ended."""
        with self._lock:
            self._requests.append(report)
            self._statuses[report.status] += 1
            self._tokens["hot"] += report.hot_tokens
            self._tokens["cold"] += report.cold_tokens
            self._tokens["remote"] += report.remote_tokens
            self._tokens["computed"] += report.computed_tokens
            self._generated += report.generated_tokens
            self._add_to_minute(report)
        if report.first_token_ms is not None:
            self._first_tokens.observe(report.first_token_ms / 1000)
        if report.prefill_ms is not None:
            self._prefills.observe(report.prefill_ms / 1000)

    def _add_to_minute(self, report: RequestReport) -> None:
        begun = int(self._now() // 60) * 60
        last = Minute(begun)
        # A clock that was set back goes on with the minute that it was in.
        if self._minutes and self._minutes[-1].time >= begun:
            last = self._minutes.pop()
        self._minutes.append(
            Minute(
                last.time,
                last.requests + 1,
                last.hot + report.hot_tokens,
                last.cold + report.cold_tokens,
                last.computed + report.computed_tokens,
                last.remote + report.remote_tokens,
            )
        )

    def note_fault(self, kind: str, text: str) -> None:
        """Remember a fault of the server's own."""
        self._faults.note(kind, text)

    def requests(self) -> list[RequestReport]:
        """The last fifty, newest first."""
        with self._lock:
            return list(reversed(self._requests))

    def history(self) -> list[Minute]:
        """The minutes of the last hour since the start, oldest first, the present one last."""
        with self._lock:
            busy = {minute.time: minute for minute in self._minutes}
        last = int(self._now() // 60) * 60
        first = max(last - (_MINUTES - 1) * 60, int(self.started // 60) * 60)
        return [busy.get(t, Minute(t)) for t in range(first, last + 60, 60)]

    def faults(self) -> tuple[Fault, ...]:
        """The last ones, newest first."""
        return self._faults.recent()

    def totals(self) -> Totals:
        """Since the start."""
        with self._lock:
            statuses, tokens, generated = dict(self._statuses), dict(self._tokens), self._generated
        return Totals(
            statuses, tokens, generated, self._first_tokens.reading(), self._prefills.reading()
        )
