"""Prefixes that people protect from eviction, expiry and pruning: found, counted, let go of.

A prefix is pinned by a row for its last block, whose ancestors can't leave before it, and rows for
the state that a match needs to end there: a snapshot, or the windows before it.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tieredkv.core import BlockKey, Chain, CorruptBlob, Pinned, PinRefused, Place
from tieredkv.keys import (
    LEAST_ID_DIGITS,
    WINDOW_TOKENS,
    common_prefix,
    prefix_id,
    snapshot_key,
    window_key,
)
from tieredkv.tiers.ledger import Ledger, Rows
from tieredkv.tiers.records import Record, described, label

# The class of layers that windows have rows of.
_RING = "RotatingKVCache"
_KEY_DIGITS = 64


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pinned prefix, for people: whose it is, and when it was pinned in Unix ns. ``key`` is that
    of its last block in hex digits, ``n_bytes`` are those on disk of all its blocks.
    """

    id: str
    key: str
    name: str
    n_tokens: int
    n_bytes: int
    pinned: int


def protected(rows: Rows, more: Iterable[BlockKey] = ()) -> dict[BlockKey, int]:
    """Encoded bytes of all blocks that can't leave since they, or one below, are pinned or among
    ``more``. Time and memory grow with their number.
    """
    found: dict[BlockKey, int] = {}
    for pinned in (*rows.pins(), *more):
        for key, record in _upwards(rows, pinned):
            if key in found:
                break
            found[key] = record.blob_bytes
    return found


def pinned_bytes(rows: Rows, more: Iterable[BlockKey] = ()) -> int:
    """Bytes that the pieces of `protected` blocks take in whole pages."""
    return sum(map(rows.piece_bytes, protected(rows, more).values()))


def pin(ledger: Ledger, keys: Sequence[BlockKey], limit: int, when: int) -> Pinned:
    """Pin the prefix that ends in the first of ``keys``, all of which are here; the others are its
    state.

    Raises:
        PinRefused: all pinned ones would take more than ``limit`` bytes.
    """
    after = pinned_bytes(ledger, keys)
    if after > limit and after > pinned_bytes(ledger):
        raise PinRefused(
            "share",
            f"pinned prompts would take {after} bytes on disk, and may take {limit}: unpin some, "
            "or raise the pin share or the cap",
        )
    for key in keys:
        ledger.pin(key, when)
    return told(ledger, keys[0])


def unpin(ledger: Ledger, key: BlockKey) -> Pinned:
    """Unpin the prefix that ends in a pinned block, with the state that no other one needs."""
    unpinned = told(ledger, key)
    state = set(_pinned_state(ledger, key))
    for other in ends(ledger):
        if other != key:
            state.difference_update(_pinned_state(ledger, other))
    for each in (key, *state):
        ledger.unpin(each)
    return unpinned


def ends(rows: Rows) -> list[BlockKey]:
    """The last blocks of all pinned prefixes."""
    return [key for key in rows.pins() if _is_prefix(rows.record(key))]


@dataclass(frozen=True, slots=True)
class Prefix:
    """One that was found: how many of the tokens asked for it has, its last block, and the state
    that a match needs there.
    """

    n_tokens: int
    key: BlockKey
    state: tuple[BlockKey, ...] = ()


def longest(found: Iterable[Prefix | None]) -> Prefix | None:
    """The one with the most tokens."""
    return max(filter(None, found), key=lambda prefix: prefix.n_tokens, default=None)


def stored(rows: Rows, place: Place, damaged: Container[BlockKey], now: int) -> Prefix | None:
    """The longest prefix that a match can end at, of sound blocks that have not expired."""
    chain, n = place.chain, 0
    while n < chain.n_full and _is_sound(rows, chain, n) and chain.keys[n] not in damaged:
        n += 1
    n = rows.expired_end(chain.keys[:n], now)
    if place.n_windows is not None:
        found = _stored_state(rows, chain, n, place.n_windows, now)
        return None if found and found.key in damaged else found
    is_end = n == len(chain.keys)
    nodes = [] if is_end else rows.neighbours(chain.parent(n), chain.tokens_of(n))
    beside = [
        _sharing(chain, n, node.key, node.record.tokens)
        for node in nodes
        if node.key not in damaged and _lasts(rows, node.key, now)
    ]
    whole = Prefix(n * chain.block_tokens, chain.keys[n - 1]) if n else None
    return longest((whole, *beside))


def along(rows: Rows, chain: Chain) -> Prefix | None:
    """The longest prefix of ``chain`` that is pinned."""
    places = {chain.parent(i): i for i in range(len(chain.keys))}
    found: list[Prefix | None] = []
    for key in ends(rows):
        record = rows.record(key)
        i = places.get(record.parent) if record else None
        if record is not None and i is not None:
            found.append(_sharing(chain, i, key, record.tokens))
    return longest(found)


def _stored_state(rows: Rows, chain: Chain, n: int, n_windows: int, now: int) -> Prefix | None:
    """The longest prefix that ends at a snapshot, or at a block with its windows."""
    for i in range(n, -1, -1):
        start = i * chain.block_tokens
        tails = rows.leading(chain.parent(i), chain.tokens_of(i)) if i < len(chain.keys) else []
        for node in tails:
            if _lasts(rows, snapshot_key(node.key), now):
                n_tokens = start + len(node.record.tokens) // 8
                return Prefix(n_tokens, node.key, (snapshot_key(node.key),))
        if not i:
            break
        key = chain.keys[i - 1]
        if _lasts(rows, snapshot_key(key), now):
            return Prefix(start, key, (snapshot_key(key),))
        windows = tuple(map(window_key, chain.keys[max(0, i - n_windows) : i]))
        if n_windows and all(_lasts(rows, window, now) for window in windows):
            return Prefix(start, key, windows)
    return None


def _is_sound(rows: Rows, chain: Chain, i: int) -> bool:
    record = rows.record(chain.keys[i])
    return (
        record is not None
        and (record.root, record.parent) == (chain.root, chain.parent(i))
        and record.tokens == chain.tokens_of(i)
    )


def _lasts(rows: Rows, key: BlockKey, now: int) -> bool:
    """Whether a block is here and has not expired."""
    if not rows.has(key):
        return False
    return rows.first_due(now) is None or not rows.has_expired(key, now)


def _sharing(chain: Chain, i: int, key: BlockKey, tokens: bytes) -> Prefix | None:
    """What ``chain`` shares with the block with these tokens in place of its block ``i``, if that
    is what who names the chain means: one has all tokens of the other, or they share at least half
    of the block's. Prompts that have nothing to do with each other begin alike.
    """
    wanted = chain.tokens_of(i)
    shared = common_prefix(tokens, wanted)
    if not shared or (shared * 8 < len(wanted) and shared * 16 < len(tokens)):
        return None
    return Prefix(i * chain.block_tokens + shared, key)


def named(rows: Rows, text: str, among: Iterable[BlockKey] | None = None) -> BlockKey:
    """The last block of the only prefix, of all or ``among`` some, whose key begins so.

    Raises:
        PinRefused: these are no digits of a key, or there is no such prefix, or more than one.
    """
    digits = text.strip().lower()
    well_formed = LEAST_ID_DIGITS <= len(digits) <= _KEY_DIGITS
    if not well_formed or not set(digits) <= set("0123456789abcdef"):
        raise PinRefused("id", f"{text!r} is not an id: {LEAST_ID_DIGITS} hex digits or more")
    keys = rows.starting(digits) if among is None else among
    found = [key for key in keys if key.hex().startswith(digits) and _is_prefix(rows.record(key))]
    if len(found) == 1:
        return found[0]
    if found:
        raise PinRefused("ambiguous", f"{len(found)} prefixes have an id like {text}: give more")
    what = "stored" if among is None else "pinned"
    raise PinRefused("absent", f"no prefix with the id {text} is {what} here")


def with_state(rows: Rows, key: BlockKey) -> list[BlockKey]:
    """``key``, and of the state that a match needs to end there, what is here."""
    n_windows = _n_windows(rows, key)
    snapshot = snapshot_key(key)
    windows = [window_key(above) for above, _ in _upwards(rows, key)][:n_windows]
    return [key, *filter(rows.has, (snapshot, *windows))]


def told(rows: Rows, key: BlockKey) -> Pinned:
    """What to tell people of the prefix that ends in a block."""
    records = [record for _, record in _upwards(rows, key)]
    n_bytes = sum(rows.piece_bytes(record.blob_bytes) for record in records)
    return Pinned(prefix_id(key), sum(len(record.tokens) for record in records) // 8, n_bytes)


def listed(rows: Rows) -> list[PinnedPrefix]:
    """All pinned prefixes, the first pinned first."""
    names = {row.root: label(row.origin.description) for row in rows.namespaces()}
    when = rows.pins()
    found: list[PinnedPrefix] = []
    for key in sorted(ends(rows), key=lambda key: when[key]):
        record, prefix = rows.record(key), told(rows, key)
        name = names.get(record.root, "") if record else ""
        found.append(
            PinnedPrefix(prefix.id, key.hex(), name, prefix.n_tokens, prefix.n_bytes, when[key])
        )
    return found


def among(rows: Rows, ids: Iterable[str]) -> frozenset[str]:
    """Those of ``ids`` whose prefixes are pinned themselves, and not just kept by a longer one."""
    return frozenset(prefix for prefix in ids if any(map(rows.is_pinned, rows.starting(prefix))))


def absent() -> PinRefused:
    """That there is nothing to pin."""
    return PinRefused(
        "absent", "nothing of this prompt is stored on disk: have it computed first, then pin it"
    )


def _is_prefix(record: Record | None) -> bool:
    return record is not None and record.tokens not in (b"", WINDOW_TOKENS)


def _upwards(rows: Rows, key: BlockKey) -> Iterator[tuple[BlockKey, Record]]:
    """A block and its ancestors, as far as they are here."""
    while (record := rows.record(key)) is not None:
        yield key, record
        if record.parent == record.root:
            return
        key = record.parent


def _pinned_state(rows: Rows, key: BlockKey) -> Iterator[BlockKey]:
    """The state that was pinned with a block, and maybe some of a block close above it."""
    if rows.is_pinned(snapshot_key(key)):
        yield snapshot_key(key)
    for above, _ in _upwards(rows, key):
        if not rows.is_pinned(window_key(above)):
            return
        yield window_key(above)


def _n_windows(rows: Rows, key: BlockKey) -> int:
    """Windows that a match needs to end at a block, as the layout of its namespace says."""
    record = rows.record(key)
    origin = rows.origin(record.root) if record else None
    fields = described(origin.description) if origin else {}
    tokens = fields.get("block_tokens")
    try:
        layers = json.loads(str(fields.get("layout", "")))["layers"]
        rings = [x["constants"] for x in layers if x["kind"] == _RING]
        most = max((size for keep, size in rings if not keep), default=0)
        return -(-int(most) // int(str(tokens)))
    except (ValueError, KeyError, TypeError, ZeroDivisionError, CorruptBlob):
        # A layout of another version: only its snapshot can be told.
        return 0
