"""Values and contracts that every other module shares. Imports nothing of the package."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NewType, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 3
BLOCK_TOKENS = 256
CACHE_TYPES = ("assistant", "user", "system")
# How the cold tier keeps rows of tokens: exactly, or in eight bits a value.
COLD_QUANTIZE = ("none", "q8")
# Which blocks go to the cold tier: all, or those that came back.
COLD_ADMIT = ("all", "reused")
# Which blocks go to the remote tier: all that the cold tier takes, those that came back, or those
# that are pinned.
REMOTE_UPLOAD = ("all", "reused", "pinned")
# The most of the cold tier's cap that pinned prefixes may take.
PIN_SHARE = 0.5

# Stands for the tokens of a window; no tokenizer and no hash of an image makes it.
WINDOW = -(1 << 63)
GRADES = 8

BlockKey = NewType("BlockKey", bytes)
Tokens = NDArray[np.int64]
_T = TypeVar("_T")

# Bytes per element of every dtype a block may hold, under MLX's own names.
ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
}


class TieredKVError(Exception):
    """Base of every error the package raises."""


class Refused(TieredKVError):
    """State that can't be stored without risking a wrong answer; ``reason`` labels its counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class CorruptBlob(TieredKVError):
    """An encoded block that is not what the format allows, or not what its record says."""


class ColdTierUnavailable(TieredKVError):
    """The cold directory can't be used; the message says why and what to do."""


class PinRefused(TieredKVError):
    """A prefix can't be pinned or unpinned; the message says why and what to do.

    ``reason`` is "absent", "ambiguous", "share", "id" or "no_cold".
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def __reduce__(self) -> tuple[type[PinRefused], tuple[str, str]]:
        return PinRefused, (self.reason, str(self))


@dataclass(frozen=True, slots=True)
class Namespace:
    """What blocks are never shared across.

    ``model``, ``adapter`` and ``draft`` are content fingerprints, ``host`` the versions of
    mlx and mlx-lm and the device, ``shard`` this rank's share of the model ("rank/world/mode"),
    ``layout`` the canonical JSON of the cache layout, or "" where it isn't known yet: such a
    namespace is a *base*, the parent of one namespace per layout. ``cold_quantize`` is one of
    `COLD_QUANTIZE`: state that may have lost something is never found by who wants it exact.
    ``name`` is what people call the model: shown, and no part of the identity.
    """

    model: str
    adapter: str = ""
    draft: str = ""
    host: str = ""
    shard: str = "0/1"
    salt: bytes = b""
    block_tokens: int = BLOCK_TOKENS
    layout: str = ""
    name: str = ""
    cold_quantize: str = "none"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of one stacked tensor of a block: ``(leaves, heads, tokens, width)``.

    Equal-shaped leaves of all layers are stacked on axis 0; tokens are on axis 2.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        size = ITEMSIZE[self.dtype]
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The state of all layers at consecutive tokens. Immutable, shared by every prompt that has it.

    ``tensors`` are C-contiguous and support the buffer protocol: ``mx.array`` in the hot tier,
    ``numpy`` words (bfloat16 and float16 as uint16) when decoded from the cold tier. ``specs``
    gives the true dtypes. ``tokens`` is little-endian int64, 8 bytes a token.

    A block without tokens is a *snapshot*: the state, at the end of its parent, of the layers
    that can't be sliced by token. One of the single token `WINDOW` is a *window*: the rows of
    sliding-window layers at its parent's tokens. ``grade`` is how many times over, as a power of
    two, such a block ages faster than others; see `policy.grade`. From ``expires`` on, Unix time
    in ns, it isn't to be found any more, unless a block below it is; 0 stands for never.
    """

    root: BlockKey
    parent: BlockKey
    key: BlockKey
    tokens: bytes
    specs: tuple[TensorSpec, ...]
    tensors: tuple[Any, ...]
    grade: int = 0
    expires: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens in the block, 1 to ``block_tokens``; 0 for a snapshot."""
        return len(self.tokens) // 8

    @property
    def n_bytes(self) -> int:
        """Raw bytes of the tensors."""
        return sum(spec.n_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A token sequence cut into blocks under one namespace: ``keys[i]`` covers ``tokens_of(i)``.

    All blocks are full but the last, which may be a tail. One key more is that of a snapshot at
    the end of the tokens.
    """

    root: BlockKey
    tokens: Tokens
    block_tokens: int
    keys: tuple[BlockKey, ...]

    @property
    def n_full(self) -> int:
        """Blocks that hold exactly ``block_tokens`` tokens."""
        return len(self.tokens) // self.block_tokens

    @property
    def ends_at_block(self) -> bool:
        """Whether the tokens are whole blocks, without a tail."""
        return len(self.tokens) == self.n_full * self.block_tokens

    def parent(self, i: int) -> BlockKey:
        """Key of the block before block ``i``; the namespace root for the first."""
        return self.keys[i - 1] if i else self.root

    def span(self, i: int) -> tuple[int, int]:
        """First token of block ``i`` and one past its last; equal for a snapshot."""
        start = min(i * self.block_tokens, len(self.tokens))
        return start, min(start + self.block_tokens, len(self.tokens))

    def tokens_of(self, i: int) -> bytes:
        """Tokens of block ``i`` as little-endian int64."""
        start, stop = self.span(i)
        return self.tokens[start:stop].astype("<i8", copy=False).tobytes()


@dataclass(frozen=True, slots=True)
class Partial:
    """A child block that shares its first ``n_tokens`` tokens with a query."""

    key: BlockKey
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest restorable prefix found, before anything is read.

    ``keys`` are the blocks in order, ``n_tokens`` the hit length: the last block may be used
    only in part. The first ``n_hot`` keys are in the hot tier. ``windows`` are those that the end
    needs, in order. The last ``n_remote`` keys are in the remote tier alone.
    """

    keys: tuple[BlockKey, ...] = ()
    n_tokens: int = 0
    n_hot: int = 0
    windows: tuple[BlockKey, ...] = ()
    n_remote: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """Blocks loaded for a prompt: their first ``n_tokens`` tokens are its prefix.

    ``snapshot`` is the one at their end, or ``windows`` those before it, if the match asked for
    them. ``n_hot``, ``n_cold`` and ``n_remote`` say how many of the tokens came from which tier.
    """

    blocks: tuple[Block, ...]
    n_tokens: int
    snapshot: Block | None = None
    windows: tuple[Block, ...] = ()
    n_hot: int = 0
    n_cold: int = 0
    n_remote: int = 0

    @property
    def n_used(self) -> int:
        """Tokens of the last block that belong to the hit."""
        return self.n_tokens - sum(b.n_tokens for b in self.blocks[:-1])


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault that ``check()`` found: where, and what is wrong there."""

    tier: str
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Remote:
    """Settings of a remote tier. ``key`` are the contents of a file that holds a key, None for
    objects that whoever can read the engine can read. ``timeout`` in seconds for all that one
    request asks of it, ``rate`` in bytes a second for uploads, 0 for as fast as they go, ``upload``
    one of `REMOTE_UPLOAD`.
    """

    url: str = field(repr=False)
    upload: str = "all"
    timeout: float = 2.0
    rate: int = 0
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.upload not in REMOTE_UPLOAD:
            raise ValueError(f"upload must be one of {', '.join(REMOTE_UPLOAD)}")
        if not 0 < self.timeout < 3600 or self.rate < 0:
            raise ValueError("timeout must be between 0 and 3600 seconds, and rate 0 or more")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a store. Sizes are bytes; ``cold_dir`` None means memory only.

    ``queue_bytes`` bounds the blocks that wait for their commit; they are held in the hot tier
    and counted there. None means three quarters of ``hot_bytes``. ``reserve_bytes`` of the disk
    stay free. ``cold_quantize`` is one of `COLD_QUANTIZE`, ``cold_admit`` one of
    `COLD_ADMIT`. ``ttl`` is how many seconds after its last use a prompt expires that says
    nothing of it; None is never. ``pin_share`` is the most of ``cold_bytes`` that pinned prefixes
    may take.
    """

    cold_dir: Path | None = None
    hot_bytes: int = 2 << 30
    cold_bytes: int = 16 << 30
    block_tokens: int = BLOCK_TOKENS
    salt: bytes = b""
    max_entries: int | None = None
    queue_bytes: int | None = None
    reserve_bytes: int = 0
    cold_quantize: str = "none"
    cold_admit: str = "all"
    ttl: float | None = None
    pin_share: float = PIN_SHARE
    remote: Remote | None = None

    def __post_init__(self) -> None:
        numbers = (self.hot_bytes, self.cold_bytes, self.block_tokens, self.reserve_bytes)
        optional = (self.max_entries, self.queue_bytes)
        if any(type(n) is not int for n in (*numbers, *(n for n in optional if n is not None))):
            raise TypeError("sizes and numbers must be ints")
        if not isinstance(self.salt, bytes):
            raise TypeError("salt must be bytes")
        if self.cold_quantize not in COLD_QUANTIZE:
            raise ValueError(f"cold_quantize must be one of {', '.join(COLD_QUANTIZE)}")
        if self.cold_admit not in COLD_ADMIT:
            raise ValueError(f"cold_admit must be one of {', '.join(COLD_ADMIT)}")
        if min(self.hot_bytes, self.reserve_bytes) < 0 or self.cold_bytes <= 0:
            raise ValueError("sizes must be 0 or more, and cold_bytes positive")
        if not 1 <= self.block_tokens <= 4096:
            raise ValueError("block_tokens must be between 1 and 4096")
        if any(n is not None and n < 0 for n in optional):
            raise ValueError("max_entries and queue_bytes must be 0 or more")
        if self.ttl is not None and not 0 < self.ttl < math.inf:
            raise ValueError("ttl must be a number of seconds, more than 0")
        if not 0 <= self.pin_share <= 1:
            raise ValueError("pin_share must be between 0 and 1")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the host quantizes the state of a prompt while it computes it: to ``bits`` in groups of
    ``group_size``, at the end of the first prefill step at which it has ``start`` tokens or more.
    Steps are of ``step`` tokens, counted from the prompt's start; the last is shorter.
    """

    bits: int
    group_size: int
    start: int
    step: int

    @property
    def settled(self) -> int:
        """Tokens after which every prompt that has more of them is quantized."""
        return max(1, -(-self.start // self.step)) * self.step


@dataclass(frozen=True, slots=True)
class Distribution:
    """Observations in buckets: ``counts[i]`` are at most ``bounds[i]`` and above the bound before
    it, the last count is of those above all bounds. ``total`` is the sum of all.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0

    @property
    def n(self) -> int:
        """How many observations there were."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that went wrong: when, in seconds of Unix time, its kind, and a text for people."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What one fetch found: tokens of the prompt, those of them from each tier, and the seconds
    that promotes took. ``miss`` is the reason if nothing was found.
    """

    n_prompt: int
    n_hot: int = 0
    n_cold: int = 0
    promote_seconds: float = 0.0
    miss: str | None = None
    n_remote: int = 0

    @property
    def n_reused(self) -> int:
        """Tokens that need not be computed."""
        return self.n_hot + self.n_cold + self.n_remote


@dataclass(frozen=True, slots=True)
class TierStats:
    """Size of one tier: bytes held against its cap, and blocks."""

    n_bytes: int = 0
    cap_bytes: int = 0
    n_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """What a remote tier did since the store was opened. Bytes are those of objects.

    ``skipped`` counts requests that didn't ask it, or didn't fetch what was there, ``dropped``
    blocks that were not uploaded, ``faults`` calls that failed and objects that were absent or
    damaged; each by reason.
    """

    blocks_read: int = 0
    bytes_read: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    queue_blocks: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A reading of a store. Counters run from its opening; tiers and queue are as of now.

    ``disk_bytes`` over ``bytes_written`` is the write amplification, see `ColdCounters`.
    ``unadmitted`` are new blocks that were kept from the disk, see ``Config.cold_admit``.
    ``expired`` are blocks that were deleted from either tier since their time had passed.
    ``unshared_tokens`` could have been restored here, but not by another rank.
    """

    hot: TierStats = TierStats()
    cold: TierStats = TierStats()
    entries: int = 0
    queue_bytes: int = 0
    queue_blocks: int = 0
    hits: int = 0
    hit_tokens_hot: int = 0
    hit_tokens_cold: int = 0
    hit_tokens_remote: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    inserts: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    promotes: int = 0
    demotes: int = 0
    evictions_hot: int = 0
    evictions_cold: int = 0
    yielded_bytes: int = 0
    recomputed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    commits: int = 0
    bytes_written: int = 0
    disk_bytes: int = 0
    unadmitted: int = 0
    unshared_tokens: int = 0
    expired: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    remote: RemoteStats | None = None


@dataclass(frozen=True, slots=True)
class StoreDetails:
    """What an operator wants to know of a store beyond `StoreStats`. Counted from its opening.

    ``hits`` by the tier that was needed: "cold" if anything was promoted. ``promote_seconds`` of
    each read from the cold tier, ``commit_seconds`` of each write transaction, waiting included.
    ``departures`` by tier and reason: seconds from a block's last use until it left.
    ``raw_bytes`` of the blocks whose encoded bytes are ``StoreStats.bytes_written``.
    ``saved_seconds`` see `Pace.saved_seconds`. ``faults`` are the last ones, newest first.
    """

    hits: dict[str, int]
    promote_seconds: Distribution
    commit_seconds: Distribution
    departures: dict[str, dict[str, Distribution]]
    raw_bytes: int
    saved_seconds: float
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the state of a prompt may be: ``chain``, and how many windows a match needs that ends
    at one of its blocks without a snapshot there; None if it may end at any token.
    """

    chain: Chain
    n_windows: int | None = None


@dataclass(frozen=True, slots=True)
class Pinned:
    """A prefix that was pinned or unpinned. ``id`` is what people call it by, see `keys.prefix_id`;
    ``n_bytes`` are those on disk of all its blocks, others' prefixes among them.
    """

    id: str
    n_tokens: int
    n_bytes: int


@runtime_checkable
class Tier(Protocol):
    """Where blocks live. One contract, one test suite, for every implementation.

    Invariant: a tier never holds a block without all of its ancestors, so presence along a
    chain is monotone. Any thread may call; no method raises for a block that is absent,
    damaged or too large. Such a block is simply not there. Nor is one, for those methods that
    look for blocks, that has *expired*: its time is past, and that of all below it.
    """

    @property
    def n_bytes(self) -> int:
        """Bytes in use, what the cap is kept against."""

    @property
    def n_blocks(self) -> int:
        """Blocks held."""

    def lookup(self, chain: Chain, start: int = 0) -> int:
        """Index one past the last full block of ``chain`` held without a gap from ``start`` on.

        Compares parent and token ids, not only keys. Writes nothing.
        """

    def nearest(self, parent: BlockKey, tokens: bytes) -> Partial | None:
        """Child of ``parent`` sharing the longest run of leading ``tokens``, if any shares one."""

    def prefixes(self, parent: BlockKey, tokens: bytes) -> list[Partial]:
        """Children of ``parent`` all of whose tokens lead ``tokens``, longest first."""

    def present(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Which of ``keys`` are here."""

    def load(self, keys: Sequence[BlockKey]) -> list[Block]:
        """The leading blocks of ``keys`` that could be read and verified, in order, also those
        that have expired and are still here.
        """

    def put(self, blocks: Sequence[Block]) -> int:
        """Store blocks, parents first, evicting others to stay under the cap.

        Returns how many leading blocks are held afterwards; stops at the first that can't be
        (parent absent, larger than the cap). Known blocks cost nothing; one that a chain ends at
        is used now, but by no other request than the one that was matched, and expires no sooner
        than the one that is put. A block covered by a longer sibling counts as held, unless its
        child comes right behind it; a shorter sibling that a new block covers is dropped, unless
        it has a child, and leaves its pin and the later expiry to that block.
        """

    def touch(self, keys: Sequence[BlockKey], expires: int = 0) -> None:
        """Record a request whose match ended at each of these: of a chain only its deepest whole
        block, the tail behind it, and state. Before what the request adds is put. They expire no
        sooner than ``expires``, Unix time in ns; 0 is never. Ignores unknown keys.
        """

    def expire(self, now: int) -> int:
        """Delete the leaves that have expired at ``now``, Unix time in ns, and what became a leaf
        by that and has expired too; how many. If they are very many only some: 0 means that none
        is left, or none can be deleted. A block whose child leaves, for whatever reason, takes over
        the child's expiry if that is later.
        """

    def saw(self, keys: Sequence[BlockKey], n_held: int) -> None:
        """Be told of a request for the chain ``keys`` of which the first ``n_held`` were here, or
        were on their way: what the eviction policy is judged by. Changes no block.
        """

    def trim_to(self, n_bytes: int) -> None:
        """Evict leaves, least worth first, until at most ``n_bytes`` are in use."""

    def check(self) -> list[Problem]:
        """Recount everything; an empty list means the invariants hold."""

    def close(self) -> None:
        """Release resources. Idempotent; afterwards every call finds nothing."""


# Called, on the thread that loads and maybe several times, with keys and specs of blocks to come.
# Gives for each either one writable, C-contiguous piece of memory for each tensor, which then is
# the block's tensor, or None: the block gets its own. It may make one while the last is used.
Allocate = Callable[
    [Sequence[BlockKey], Sequence[tuple[TensorSpec, ...]]], Iterable[Sequence[Any] | None]
]


@dataclass(frozen=True, slots=True)
class ColdCounters:
    """What a cold tier did since it was opened by this process, as far as the store reports it.

    ``bytes_written`` are encoded bytes of new blocks, ``disk_bytes`` what went to the disk for them
    and for all else: whole pages, rows, touches. By the system's count where it has one (Linux),
    else by our own of pages, which leaves out what is rewritten. ``raw_bytes`` are those of the
    tensors of new blocks. ``departures`` and ``commit_seconds`` see `StoreDetails`; ``recent`` are
    the last faults, newest first.
    """

    commits: int = 0
    evictions: int = 0
    expired: int = 0
    bytes_written: int = 0
    disk_bytes: int = 0
    raw_bytes: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    commit_seconds: Distribution = Distribution()
    departures: dict[str, Distribution] = field(default_factory=dict)
    recent: tuple[Fault, ...] = ()


@runtime_checkable
class LowerTier(Tier, Protocol):
    """A tier below the hot one: persistent, shared with other processes, fed by the writer."""

    @property
    def cap_bytes(self) -> int:
        """The byte cap; 0 for a tier that takes nothing."""

    def load(self, keys: Sequence[BlockKey], allocate: Allocate = ...) -> list[Block]:
        """As ``Tier.load``. ``allocate`` may give memory for the tensors of blocks that are about
        to be decoded: see `Allocate`.
        """

    def missing(self, chain: Chain) -> int:
        """Index of the first block of ``chain`` that should be put here; ``len(keys)`` if none."""

    def register(self, namespace: Namespace) -> None:
        """Remember what a namespace is; described durably with its first block."""

    def consult(self, work: Callable[[Any], _T]) -> _T | None:
        """Result of ``work`` on the tier's rows (`tiers.ledger.Rows`) in one short read
        transaction; None if they can't be read.
        """

    def layouts(self, base: BlockKey) -> list[str]:
        """Layout JSON of every namespace here whose base key is ``base``."""

    def counters(self) -> ColdCounters:
        """A reading of the counters."""

    def prune(self, criteria: Any) -> Iterator[Any]:
        """Delete the blocks that a `pruning.Criteria` means, leaves first; yields a
        `pruning.Victim` for each, once it is gone for good.

        Raises:
            ColdTierUnavailable: the store can't be read or written.
        """

    def meant(self, criteria: Any) -> frozenset[BlockKey]:
        """Roots of the namespaces here that a `pruning.Criteria` means."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pieces of all blocks that pins protect: pinned ones and their ancestors."""

    def pin(self, places: Sequence[Place]) -> Pinned:
        """Protect the longest prefix of any of ``places`` that is here, with the state that a match
        needs at its end, from eviction, expiry and pruning until it is unpinned, in all processes
        and for good. The longer block that replaces its tail some day is pinned in its place.

        Raises:
            PinRefused: none is here, or pins would take more than their share.
        """

    def unpin(self, places: Sequence[Place]) -> Pinned:
        """Let go of the longest pinned prefix of any of ``places``.

        Raises:
            PinRefused: none is pinned.
        """

    def pin_id(self, prefix_id: str) -> Pinned:
        """`pin` of the prefix whose last block's key begins with these 6 hex digits or more, with
        the state that is there.

        Raises:
            PinRefused: as `pin`, or there is more than one.
        """

    def unpin_id(self, prefix_id: str) -> Pinned:
        """`unpin` of the pinned prefix whose last block's key begins with these digits.

        Raises:
            PinRefused: there is none, or more than one.
        """


@runtime_checkable
class SharedTier(Protocol):
    """A tier that machines share, on somebody else's server: narrower than `Tier`, for what it has
    room for, what leaves and when is that server's business.

    A block is put when its ancestors are there, so presence along a chain is monotone as a rule;
    where a lifetime has broken that, what is found is shorter, never wrong. Any thread may call.
    No method raises, and none takes longer than until ``by``, a reading of the monotonic clock, or
    for the tier's own timeout if that is None.
    """

    def lookup(self, chain: Chain, start: int = 0, by: float | None = None) -> int:
        """Index one past the last full block of ``chain`` held without a gap from ``start`` on."""

    def nearest(self, parent: BlockKey, tokens: bytes, by: float | None = None) -> Partial | None:
        """A child of ``parent`` that shares leading ``tokens``, at least as many as it says: all
        of its own, or up to the last of sixteen places in a block. None shares more places.
        """

    def prefixes(self, parent: BlockKey, tokens: bytes, by: float | None = None) -> list[Partial]:
        """Children of ``parent`` all of whose tokens lead ``tokens``, longest first."""

    def present(self, keys: Sequence[BlockKey], by: float | None = None) -> frozenset[BlockKey]:
        """Which of ``keys`` are here."""

    def load(
        self,
        root: BlockKey,
        keys: Sequence[BlockKey],
        allocate: Allocate = ...,
        by: float | None = None,
    ) -> list[Block]:
        """The leading blocks of ``keys``, of the namespace ``root``, that came in time and could be
        verified, in order. ``allocate``: see `Allocate`.
        """

    def close(self) -> None:
        """Let go of connections. Idempotent; afterwards every call finds nothing."""


class Codec(Protocol):
    """Block to bytes and back, bit for bit unless it says otherwise. Stateless as seen from
    outside; any thread may call.
    """

    def encode(self, block: Block) -> bytes:
        """One self-contained blob. Never touches an mlx op: reads tensors as buffers."""

    def decode(
        self, blob: bytes | memoryview, n_bytes: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[NDArray[Any], ...]]:
        """Specs and tensors of a blob whose raw size the caller knows to be ``n_bytes``.

        Raises:
            CorruptBlob: the blob is anything but one that ``encode`` can make of ``n_bytes``
                raw bytes. Nothing larger than ``n_bytes`` is allocated to find out.
        """

    def parse(self, blob: bytes | memoryview, n_bytes: int) -> Any:
        """What a blob says that it holds: ``specs``, and what `decode_parsed` needs.

        Raises:
            CorruptBlob: as `decode`, as far as the header shows it.
        """

    def decode_parsed(
        self, parsed: Any, into: Sequence[Any] | None = None
    ) -> tuple[NDArray[Any], ...]:
        """Tensors of a parsed blob, written into the memory given for each if there is some.

        Raises:
            CorruptBlob: as `decode`.
        """


# Where `default_cold_dir` is, for people: the same text on every machine.
DEFAULT_COLD_DIR = "~/.cache/tieredkv, on macOS ~/Library/Caches/tieredkv"


def later(a: int, b: int) -> int:
    """The later of two expiries: 0 is never."""
    return max(a, b) if a and b else 0


def default_cold_dir() -> Path:
    """Where this platform keeps a user's caches: the cold directory if none is given."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tieredkv"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tieredkv"
