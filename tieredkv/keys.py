"""Token ids to chains of block keys, and token ids to ordered bytes.

Keys are content addresses: equal in every process, on every machine, for ever.
"""

from __future__ import annotations

import hashlib
import threading
from array import array as Array  # noqa: N812 - as a class
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tieredkv.core import FORMAT_VERSION, WINDOW, BlockKey, Chain, Namespace, Tokens

KEY_BYTES = 32

# Hex digits of a key that people are shown, and the least that they may give.
PREFIX_ID_DIGITS = 16
LEAST_ID_DIGITS = 6

# The tokens of a window.
WINDOW_TOKENS = WINDOW.to_bytes(8, "little", signed=True)

# Token ids below this one take a single code point in `ordered`; all others are escaped.
_FIRST_ESCAPED = 0x10FFFD
_ESCAPE = chr(0x10FFFF)


def _digest(*fields: tuple[bytes, bytes]) -> BlockKey:
    """blake2b over fields, each tagged with its name and prefixed with both lengths."""
    h = hashlib.blake2b(digest_size=KEY_BYTES, person=b"tieredkv-ns")
    for name, value in fields:
        h.update(len(name).to_bytes(2, "little") + name)
        h.update(len(value).to_bytes(8, "little") + value)
    return BlockKey(h.digest())


def namespace_key(namespace: Namespace) -> BlockKey:
    """Root of every chain in ``namespace``: a digest of its fields and the format version.

    ``cold_quantize`` is one of them only where it isn't "none".
    """
    how = namespace.cold_quantize
    lossy = ((b"cold_quantize", how.encode()),) if how != "none" else ()
    return _digest(
        (b"format", FORMAT_VERSION.to_bytes(4, "little")),
        (b"model", namespace.model.encode()),
        (b"adapter", namespace.adapter.encode()),
        (b"draft", namespace.draft.encode()),
        (b"host", namespace.host.encode()),
        (b"shard", namespace.shard.encode()),
        (b"salt", namespace.salt),
        (b"block_tokens", namespace.block_tokens.to_bytes(4, "little")),
        (b"layout", namespace.layout.encode()),
        *lossy,
    )


def tenant(api_key: str, cache_salt: str) -> bytes:
    """What a request's API key and its own salt keep its prompts apart by; empty for neither."""
    if not api_key and not cache_salt:
        return b""
    return _digest((b"api_key", api_key.encode()), (b"cache_salt", cache_salt.encode()))


def tenant_salt(salt: bytes, tenant: bytes) -> bytes:
    """The salt of one tenant's namespaces among those of a cache's own ``salt``."""
    return _digest((b"salt", salt), (b"tenant", tenant)) if tenant else salt


def base_key(namespace: Namespace) -> BlockKey:
    """Key of the namespace with its layout left out, under which its layouts are listed."""
    return namespace_key(replace(namespace, layout=""))


def block_key(parent: BlockKey, tokens: bytes) -> BlockKey:
    """blake2b-256 of the parent's key and the block's token ids as little-endian int64."""
    return BlockKey(hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest())


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """A private int64 copy of ``tokens``.

    Raises:
        ValueError, OverflowError, TypeError: not a flat sequence of 64-bit integers.
    """
    # Of a list, half again as fast as numpy finds out what it holds.
    array = np.asarray(Array("q", tokens) if isinstance(tokens, list) else tokens)
    if array.ndim != 1:
        raise ValueError("tokens must be a flat sequence of integers")
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers of 64 bits, not {array.dtype}")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise OverflowError("tokens must fit 64 bits, signed")
    ids = array.astype(np.int64, copy=True)
    if ids.min() == WINDOW:
        raise OverflowError(f"{WINDOW} is no token")
    return ids


def chain(
    root: BlockKey, tokens: Tokens, block_tokens: int, known: Sequence[BlockKey] = ()
) -> Chain:
    """Cut ``tokens`` into blocks and name each by its whole prefix. O(tokens).

    ``known`` are the names of the leading full blocks, if the caller has them already.
    """
    keys = list(known)
    rest = tokens[len(keys) * block_tokens :]
    raw = rest.astype("<i8", copy=False).tobytes()
    parent = keys[-1] if keys else root
    step = block_tokens * 8
    for start in range(0, len(raw), step):
        parent = block_key(parent, raw[start : start + step])
        keys.append(parent)
    return Chain(root, tokens, block_tokens, tuple(keys))


class Chains:
    """The last few chains, so that a prompt that comes again, or goes on, is hashed from where it
    was left: on its way from fetch to insert, at each checkpoint, in the next turn.

    A name is used again only if root, block size and all tokens up to its block's end are equal.
    Any thread may call.
    """

    def __init__(self, n_chains: int = 8, n_tokens: int = 1 << 20) -> None:
        """Remember at most so many chains, and tokens of all of them together."""
        self._n_chains = n_chains
        self._n_tokens = n_tokens
        # The latest last.
        self._known: tuple[Chain, ...] = ()
        self._lock = threading.Lock()

    @property
    def n_tokens(self) -> int:
        """Tokens of all chains that are remembered, at 8 bytes each."""
        return sum(len(known.tokens) for known in self._known)

    def chain(self, root: BlockKey, tokens: Tokens, block_tokens: int) -> Chain:
        """As `chain`. Keeps ``tokens``, which nobody may write to any more."""
        if not len(tokens):
            return chain(root, tokens, block_tokens)
        names: tuple[BlockKey, ...] = ()
        nearest: Chain | None = None
        for known in reversed(self._known):
            if known.root != root or known.block_tokens != block_tokens:
                continue
            shared = _shared_start(known.tokens, tokens, block_tokens)
            if shared // block_tokens > len(names):
                names = known.keys[: shared // block_tokens]
            # None of those known is the start of another, so no other shares more.
            if shared == min(len(known.tokens), len(tokens)):
                nearest = known
                break
        made = chain(root, tokens, block_tokens, names)
        is_start = nearest is not None and len(nearest.tokens) > len(tokens)
        self._remember(nearest if nearest and is_start else made, nearest)
        return made

    def _remember(self, latest: Chain, replaced: Chain | None) -> None:
        with self._lock:
            kept = [known for known in self._known if known is not replaced]
            kept = [*kept[max(0, len(kept) - self._n_chains + 1) :], latest]
            while sum(len(known.tokens) for known in kept) > self._n_tokens:
                del kept[0]
            self._known = tuple(kept)


def _shared_start(a: Tokens, b: Tokens, block_tokens: int) -> int:
    """Leading tokens that two strings share."""
    n = min(len(a), len(b))
    # In ever longer parts: prompts that have little in common show it early.
    start, stop = 0, min(n, block_tokens)
    while start < n:
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, stop = stop, min(n, 4 * stop)
    return n


def with_snapshot(chain: Chain) -> Chain:
    """``chain`` with the key of the snapshot at its end."""
    return replace(chain, keys=(*chain.keys, snapshot_key(chain.keys[-1])))


def snapshot_key(parent: BlockKey) -> BlockKey:
    """Key of the snapshot at a block's end."""
    return block_key(parent, b"")


def window_key(parent: BlockKey) -> BlockKey:
    """Key of the window at a block's tokens."""
    return block_key(parent, WINDOW_TOKENS)


def prefix_id(key: BlockKey) -> str:
    """What people call the prefix that ends in a block."""
    return key.hex()[:PREFIX_ID_DIGITS]


def common_prefix(a: bytes, b: bytes) -> int:
    """Leading tokens that two little-endian int64 token strings share."""
    n = min(len(a), len(b)) // 8
    x = np.frombuffer(a, "<i8", count=n)
    y = np.frombuffer(b, "<i8", count=n)
    differ = np.flatnonzero(x != y)
    return int(differ[0]) if len(differ) else n


def common_start(a: bytes, b: bytes) -> bytes:
    """Leading bytes that two byte strings share."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return a[: min(n, len(b))]


def ordered(tokens: bytes) -> bytes:
    """Token ids as bytes whose order keeps long common prefixes adjacent.

    Each id becomes a code point one higher than itself in UTF-8, which is injective,
    prefix-free and never a zero byte; ids outside Unicode's range (negative ones among them)
    become U+10FFFF and four code points of 16 bits. Among sorted strings of this kind the one
    with the longest common prefix with a query is a neighbour of the query's place.
    """
    ids = np.frombuffer(tokens, "<i8").tolist()
    if ids and min(ids) >= 0 and max(ids) < _FIRST_ESCAPED:
        text = "".join([chr(i + 1) for i in ids])
    else:
        text = "".join(map(_code_points, ids))
    return text.encode("utf-8", "surrogatepass")


def _code_points(token: int) -> str:
    if 0 <= token < _FIRST_ESCAPED:
        return chr(token + 1)
    unsigned = token & 0xFFFFFFFFFFFFFFFF
    words = [(unsigned >> shift) & 0xFFFF for shift in (48, 32, 16, 0)]
    return _ESCAPE + "".join(chr(word + 1) for word in words)
