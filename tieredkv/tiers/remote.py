"""The tier that machines share: a client of an engine that other people run.

It only ever makes a hit longer. Whatever is absent, late, damaged or somebody else's is a miss,
counted; what an engine that fails can cost a request is bounded in time, and after a few requests
it costs nothing until it has been found to answer again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tieredkv.breaker import Breaker
from tieredkv.core import (
    Allocate,
    Block,
    BlockKey,
    Chain,
    Codec,
    CorruptBlob,
    Partial,
)
from tieredkv.engines.base import Engine, EngineFault
from tieredkv.keys import WINDOW_TOKENS
from tieredkv.metrics import Counters
from tieredkv.pace import Link
from tieredkv.tiers.loader import own_memory
from tieredkv.tiers.objects import (
    Member,
    Parcel,
    Wrap,
    leads,
    marks,
    member_name,
    members,
    pack,
    shared_marks,
    step_of,
    unpack,
)

_LOG = logging.getLogger("tieredkv")
_T = TypeVar("_T")

# Calls under way at a time, and encoded bytes that a load may have under way.
_THREADS = 32
_AHEAD_BYTES = 256 << 20
# Larger objects are neither put nor taken: Redis has this limit.
MAX_OBJECT_BYTES = 512 << 20
# What an object is taken to be as long as none was seen.
_OBJECT_BYTES = 4 << 20
# Children of one block that are looked at.
_CHILDREN = 1000
# No object has this name.
_PROBE = "probe"

# Kinds of calls, for the breaker.
_ASK, _FETCH = "ask", "fetch"


@dataclass(frozen=True, slots=True)
class _Fetched:
    """An object as it came, sound as far as its digest, checksum and header show."""

    parcel: Parcel
    parsed: Any
    n_bytes: int


class RemoteTier:
    """See `core.SharedTier`. Any thread may call; none waits longer than until ``by``."""

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        wrap: Wrap,
        timeout: float,
        block_tokens: int,
        counters: Counters,
        breaker: Breaker | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            engine: where objects are.
            codec: of the blobs.
            wrap: how they are sealed.
            timeout: seconds that a request may spend here.
            block_tokens: of full blocks.
            counters: where faults, bytes and blocks are counted.
            breaker: when to do without the engine.
        """
        self._engine = engine
        self._codec = codec
        self._wrap = wrap
        self._timeout = timeout
        self._step = step_of(block_tokens)
        self._counters = counters
        self._breaker = breaker or Breaker()
        self.link = Link()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tieredkv-remote")
        self._object_bytes = _OBJECT_BYTES
        self._closed = False

    @property
    def title(self) -> str:
        """What to call the engine in messages."""
        return self._engine.title

    # ---- time

    def by(self) -> float:
        """When a request that begins now must be done here; 0, which is never, while the engine
        is left alone.
        """
        if self._closed:
            return 0.0
        if not self._breaker.is_open:
            return time.monotonic() + self._timeout
        if self._breaker.is_due():
            self._pool.submit(self._probe)
        self._counters.add("remote_skipped", label="breaker")
        return 0.0

    def _probe(self) -> None:
        """Find out, while no request waits, whether an engine that failed answers again."""
        try:
            self._engine.exists([_PROBE])
        except EngineFault:
            self._breaker.still_fails()
            return
        if self._breaker.recovered():
            _LOG.warning("tieredkv: %s answers again", self._engine.title)

    # ---- looking

    def lookup(self, chain: Chain, start: int = 0, by: float | None = None) -> int:
        """See `core.SharedTier.lookup`. O(log n) questions, several at a time."""

        def held(indices: Sequence[int]) -> list[bool]:
            return self._exist([chain.keys[i] for i in indices], deadline)

        deadline = self._until(by)
        width = _THREADS * self._engine.batch
        return self._ask(lambda: first_absent(start, chain.n_full, width, held), start, deadline)

    def nearest(self, parent: BlockKey, tokens: bytes, by: float | None = None) -> Partial | None:
        """See `core.SharedTier.nearest`."""
        query = marks(parent, tokens, self._step, self._wrap)
        best: Partial | None = None
        for member in self._children(parent, query, by):
            if leads(member, parent, tokens):
                n = member.n_tokens
            else:
                n = shared_marks(member.marks, query) * self._step
            if n and (best is None or n > best.n_tokens):
                best = Partial(member.key, n)
        return best

    def prefixes(self, parent: BlockKey, tokens: bytes, by: float | None = None) -> list[Partial]:
        """See `core.SharedTier.prefixes`."""
        query = marks(parent, tokens, self._step, self._wrap)
        found = [
            Partial(member.key, member.n_tokens)
            for member in self._children(parent, query, by)
            if leads(member, parent, tokens)
        ]
        return sorted(found, key=lambda p: -p.n_tokens)

    def present(self, keys: Sequence[BlockKey], by: float | None = None) -> frozenset[BlockKey]:
        """See `core.SharedTier.present`."""
        deadline = self._until(by)
        nothing: frozenset[BlockKey] = frozenset()

        def ask() -> frozenset[BlockKey]:
            here = self._exist(keys, deadline)
            return frozenset(key for key, is_here in zip(keys, here, strict=True) if is_here)

        return self._ask(ask, nothing, deadline) if keys else nothing

    def _children(self, parent: BlockKey, query: Sequence[str], by: float | None) -> list[Member]:
        deadline = self._until(by)
        folder = self._folder(parent)

        def ask() -> list[str]:
            (names,) = self._gather([lambda: self._engine.members(folder, "", _CHILDREN)], deadline)
            if len(names) < _CHILDREN or not query:
                return names
            # Too many to see them all: those that begin as the query does.
            near = query[0]
            (more,) = self._gather(
                [lambda: self._engine.members(folder, near, _CHILDREN)], deadline
            )
            return [*names, *more]

        nothing: list[str] = []
        return list(members(self._ask(ask, nothing, deadline), self._wrap))

    def _exist(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        names = [self._name(key) for key in keys]
        size = self._engine.batch
        groups = [names[i : i + size] for i in range(0, len(names), size)]
        calls = [partial(self._engine.exists, group) for group in groups]
        return [is_here for found in self._gather(calls, deadline) for is_here in found]

    def _ask(self, question: Callable[[], _T], otherwise: _T, deadline: float) -> _T:
        """The answer to a question that may take several calls; ``otherwise`` if it has none."""
        # That there is no time left is no fault of a call that wasn't made.
        if self._closed or self._breaker.is_open or time.monotonic() >= deadline:
            return otherwise
        try:
            return question()
        except EngineFault as fault:
            self._fail(_ASK, fault)
            return otherwise

    def _gather(self, calls: Sequence[Callable[[], _T]], deadline: float) -> list[_T]:
        """What calls return that are made at once.

        Raises:
            EngineFault: one of them failed, or the time was over.
        """
        if not calls:
            return []
        start = time.monotonic()
        futures = self._start(calls)
        try:
            found = [_result(future, deadline) for future in futures]
        finally:
            for future in futures:
                future.cancel()
        self._breaker.succeeded(_ASK)
        rounds = -(-len(calls) // _THREADS)
        self.link.answered((time.monotonic() - start) / rounds)
        return found

    def _start(self, calls: Iterable[Callable[[], _T]]) -> list[Future[_T]]:
        try:
            return [self._pool.submit(call) for call in calls]
        except RuntimeError as e:
            # Closed, or without memory for a thread.
            raise EngineFault("closed", str(e)) from e

    def _until(self, by: float | None) -> float:
        return time.monotonic() + self._timeout if by is None else by

    # ---- fetching

    def load(
        self,
        root: BlockKey,
        keys: Sequence[BlockKey],
        allocate: Allocate = own_memory,
        by: float | None = None,
    ) -> list[Block]:
        """See `core.SharedTier.load`. Objects are fetched ahead, within a budget of bytes, while
        those that came are decoded on this thread.
        """
        deadline = self._until(by)
        start = time.monotonic()
        if self._closed or self._breaker.is_open or not keys or start >= deadline:
            return []
        blocks: list[Block] = []
        n_bytes = 0
        waiting: deque[Future[_Fetched | None]] = deque()
        rest = iter(keys)
        try:
            while True:
                self._fill(waiting, rest)
                if not waiting:
                    break
                fetched = _result(waiting.popleft(), deadline)
                block = self._decode(root, keys[len(blocks)], fetched, allocate)
                if fetched is None or block is None:
                    break
                blocks.append(block)
                n_bytes += fetched.n_bytes
        except EngineFault as fault:
            self._fail(_FETCH, fault, is_grave=not blocks)
        else:
            self._breaker.succeeded(_FETCH)
        finally:
            for future in waiting:
                future.cancel()
        self._count(root, blocks, n_bytes, time.monotonic() - start)
        return blocks

    def _fill(self, waiting: deque[Future[_Fetched | None]], rest: Iterable[BlockKey]) -> None:
        """Have as many fetches under way as the budget allows."""
        depth = max(2, min(_THREADS, _AHEAD_BYTES // self._object_bytes))
        for key in rest if len(waiting) < depth else ():
            waiting += self._start([partial(self._fetch, key)])
            if len(waiting) >= depth:
                break

    def _fetch(self, key: BlockKey) -> _Fetched | None:
        """An object, checked against everything that its name promises; None if it isn't that."""
        name = self._name(key)
        data = self._engine.get(name, MAX_OBJECT_BYTES)
        if data is None:
            self._counters.add("remote_faults", label="absent")
            return None
        try:
            parcel = unpack(name, key, data, self._wrap)
            return _Fetched(
                parcel, self._codec.parse(parcel.blob, parcel.record.raw_bytes), len(data)
            )
        except CorruptBlob as error:
            self._condemn(key, error)
            return None

    def _decode(
        self, root: BlockKey, key: BlockKey, fetched: _Fetched | None, allocate: Allocate
    ) -> Block | None:
        if fetched is None:
            return None
        record = fetched.parcel.record
        try:
            if record.root != root:
                raise CorruptBlob("it is of another namespace")
            (into,) = allocate([key], [fetched.parsed.specs])
            tensors = self._codec.decode_parsed(fetched.parsed, into)
        except CorruptBlob as error:
            self._condemn(key, error)
            return None
        return Block(
            root,
            record.parent,
            key,
            record.tokens,
            fetched.parsed.specs,
            tensors if into is None else tuple(into),
            fetched.parcel.grade,
        )

    def _count(self, root: BlockKey, blocks: Sequence[Block], n_bytes: int, seconds: float) -> None:
        if not blocks:
            return
        self._object_bytes = max(1, n_bytes // len(blocks))
        self._counters.add("remote_blocks_read", len(blocks))
        self._counters.add("remote_bytes_read", n_bytes)
        self.link.moved(root, sum(b.n_tokens for b in blocks), n_bytes, seconds)

    # ---- putting

    def put(self, key: BlockKey, parcel: Parcel) -> int:
        """Make a block's object, whose ancestors' are there, and list it among its parent's
        children. Returns the object's bytes; 0 for one that is too large.

        Raises:
            EngineFault: it isn't there, or isn't listed.
        """
        name = self._name(key)
        data = pack(name, parcel, self._wrap)
        if len(data) > MAX_OBJECT_BYTES:
            return 0
        self._engine.put(name, data)
        if is_listed(parcel.record.tokens):
            member = member_name(parcel, key, self._step, self._wrap)
            self._engine.enlist(self._folder(parcel.record.parent), member)
        return len(data)

    def held(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """As `present`, for an upload: takes its time.

        Raises:
            EngineFault: nobody knows.
        """
        found = self._engine.exists([self._name(key) for key in keys])
        return frozenset(key for key, is_here in zip(keys, found, strict=True) if is_here)

    def refresh(self, keys: Sequence[BlockKey]) -> None:
        """Have blocks live on as if they were put now, where the engine can do that.

        Raises:
            EngineFault: it could, but didn't.
        """
        self._engine.refresh([self._name(key) for key in keys])

    def close(self) -> None:
        """See `core.SharedTier.close`."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    # ---- names and faults

    def _name(self, key: BlockKey) -> str:
        name = self._wrap.name(key)
        # Folders of a reasonable size, for engines that keep objects as files.
        return f"3/b/{name[:2]}/{name}"

    def _folder(self, parent: BlockKey) -> str:
        name = self._wrap.name(parent)
        return f"3/c/{name[:2]}/{name}"

    def _fail(self, kind: str, fault: EngineFault, *, is_grave: bool = True) -> None:
        self._counters.add("remote_faults", label=fault.kind)
        if is_grave and self._breaker.failed(kind):
            _LOG.warning(
                "tieredkv: %s fails (%s: %s); done without, and tried again in %.0f s",
                self._engine.title,
                fault.kind,
                fault,
                self._breaker.pause,
            )

    def _condemn(self, key: BlockKey, error: CorruptBlob) -> None:
        if self._counters.add("remote_faults", label="corrupt") == 1:
            _LOG.warning(
                "tieredkv: %s: block %s: %s (further ones are only counted)",
                self._engine.title,
                key.hex(),
                error,
            )


def first_absent(
    low: int, high: int, width: int, held: Callable[[Sequence[int]], Sequence[bool]]
) -> int:
    """The first index from ``low`` on that isn't held, of those below ``high``; ``high`` if none.

    Asks for up to ``width`` at a time; if one is held, so are all before it.
    """
    while low < high:
        n = min(width, high - low)
        asked = sorted({low + k * (high - low) // n for k in range(n)})
        found = held(asked)
        known = next((k for k, is_held in enumerate(found) if not is_held), len(asked))
        if known < len(asked):
            high = asked[known]
        if known:
            low = asked[known - 1] + 1
    return low


def is_listed(tokens: bytes) -> bool:
    """Whether a block is found among its parent's children: it has tokens, and not a window's."""
    return bool(tokens) and tokens != WINDOW_TOKENS


def _result(future: Future[_T], deadline: float) -> _T:
    """What a call returned.

    Raises:
        EngineFault: it failed, or the time was over.
    """
    try:
        error = future.exception(max(0.0, deadline - time.monotonic()))
    except StillRunning as e:
        raise EngineFault("timeout", "no answer in time") from e
    except CancelledError as e:
        raise EngineFault("closed", "the tier is closed") from e
    if error is None:
        return future.result()
    if isinstance(error, EngineFault):
        raise error
    # Also what is no `Exception`, as a library's panic in Rust.
    raise EngineFault("fault", repr(error)) from error
