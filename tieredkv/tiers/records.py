"""Keys and values of the cold tier's databases as bytes. ``docs/format.md`` pins every one.

Integers are little-endian, except inside keys, where big-endian makes byte order their order.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tieredkv.core import FORMAT_VERSION, GRADES, Block, BlockKey, CorruptBlob, Namespace
from tieredkv.hazard import STATE, Counters, Standing, shelf_of
from tieredkv.keys import block_key, ordered

# An LMDB value takes its size and a 16-byte header in whole pages: this fills 16 pages of
# 4 KiB and 4 of 16 KiB. A multiple of 64 KiB would waste most of one more page.
PIECE_BYTES = 65536 - 24
MAX_PIECES = 1 << 16
MAX_RAW_BYTES = 1 << 32
MAX_TOKENS = 4096
SEGMENT_BYTES = 400
CHILD_ID_BYTES = 8
TICK_BYTES = 8
TIME_BYTES = 8

_RECORD = struct.Struct("<II32s32s16sIIQQQ")
_CRC = struct.Struct("<I")
_STANDING = struct.Struct("<QIIIIBB2x")
_USE = struct.Struct("<QIIQ")
_LEFT = struct.Struct("<Q")
_NAMESPACE = struct.Struct("<QQQ32s")
_NUMBER = struct.Struct("<Q")
_MAX_COUNT = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Record:
    """What ``index`` holds of a block; written once. Sizes in bytes, ``created`` in Unix ns."""

    root: BlockKey
    parent: BlockKey
    tokens: bytes
    raw_bytes: int
    blob_bytes: int
    checksum: bytes
    created: int

    @property
    def n_pieces(self) -> int:
        """Values that the blob is cut into."""
        return -(-self.blob_bytes // PIECE_BYTES)

    def pack(self) -> bytes:
        """120 bytes and the token ids; the CRC-32 in front covers all that follows it."""
        body = _RECORD.pack(
            0,
            FORMAT_VERSION,
            self.root,
            self.parent,
            self.checksum,
            len(self.tokens) // 8,
            self.n_pieces,
            self.raw_bytes,
            self.blob_bytes,
            self.created,
        )
        rest = body[_CRC.size :] + self.tokens
        return _CRC.pack(zlib.crc32(rest)) + rest

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        """The record that ``pack`` made.

        Raises:
            CorruptBlob: it isn't one, or a size in it is out of bounds.
        """
        if len(data) < _RECORD.size:
            raise CorruptBlob("index record is too short")
        crc, version, root, parent, checksum, n_tokens, n_pieces, raw, blob, created = (
            _RECORD.unpack_from(data)
        )
        tokens = data[_RECORD.size :]
        if crc != zlib.crc32(memoryview(data)[_CRC.size :]) or version != FORMAT_VERSION:
            raise CorruptBlob("index record fails its CRC or has another version")
        record = cls(BlockKey(root), BlockKey(parent), tokens, raw, blob, checksum, created)
        sound = (
            len(tokens) == n_tokens * 8
            and n_tokens <= MAX_TOKENS
            and n_pieces == record.n_pieces
            and 0 < n_pieces <= MAX_PIECES
            and raw <= MAX_RAW_BYTES
        )
        if not sound:
            raise CorruptBlob("index record has a size out of bounds")
        return record

    def names(self, key: bytes) -> bool:
        """Whether ``key`` is the content address of this parent and these tokens."""
        return block_key(self.parent, self.tokens) == key


def record_of(block: Block, blob_bytes: int, checksum: bytes, created: int) -> Record:
    """The record of ``block`` once encoded."""
    return Record(
        block.root, block.parent, block.tokens, block.n_bytes, blob_bytes, checksum, created
    )


def pack_standing(standing: Standing) -> bytes:
    """28 bytes."""
    return _STANDING.pack(
        standing.last,
        min(standing.turn, _MAX_COUNT),
        min(standing.fresh, _MAX_COUNT),
        min(standing.refs, _MAX_COUNT),
        min(standing.branches, _MAX_COUNT),
        standing.kind,
        standing.awaited,
    )


def unpack_standing(data: bytes) -> Standing:
    """The standing that ``pack_standing`` made; CorruptBlob if it isn't one."""
    if len(data) != _STANDING.size:
        raise CorruptBlob("standing has another size")
    last, turn, fresh, refs, branches, kind, awaited = _STANDING.unpack(data)
    if kind > STATE or awaited > 1:
        raise CorruptBlob("standing has a value out of bounds")
    return Standing(last, kind, turn, fresh, refs, branches, bool(awaited))


@dataclass(frozen=True, slots=True)
class Use:
    """What ``use`` holds of a block: its standing, when it was used last in Unix ns, its children,
    the grade of its ageing, and when it expires in Unix ns, 0 for never.
    """

    standing: Standing
    used: int = 0
    children: int = 0
    grade: int = 0
    expires: int = 0

    @property
    def last(self) -> int:
        """The last use, in ticks of the store's clock."""
        return self.standing.last

    @property
    def shelf(self) -> int:
        """Where it stands in ``order``, if it is a leaf."""
        return shelf_of(self.standing.of_class, self.grade)

    def pack(self) -> bytes:
        """52 bytes."""
        numbers = _USE.pack(self.used, self.children, self.grade, self.expires)
        return pack_standing(self.standing) + numbers

    @classmethod
    def unpack(cls, data: bytes) -> Use:
        """The value that ``pack`` made; CorruptBlob if it isn't one."""
        if len(data) != _STANDING.size + _USE.size:
            raise CorruptBlob("use record has another size")
        use = cls(unpack_standing(data[: _STANDING.size]), *_USE.unpack(data[_STANDING.size :]))
        if use.grade >= GRADES:
            raise CorruptBlob("use record has a grade out of bounds")
        return use


@dataclass(frozen=True, slots=True)
class Ghost:
    """What ``ghost`` holds of a block that left and is awaited: when it left, and its standing."""

    left: int
    standing: Standing

    def pack(self) -> bytes:
        """36 bytes."""
        return _LEFT.pack(self.left) + pack_standing(self.standing)

    @classmethod
    def unpack(cls, data: bytes) -> Ghost:
        """The value that ``pack`` made; CorruptBlob if it isn't one."""
        if len(data) != _LEFT.size + _STANDING.size:
            raise CorruptBlob("ghost has another size")
        (left,) = _LEFT.unpack_from(data)
        return cls(left, unpack_standing(data[_LEFT.size :]))


@dataclass(frozen=True, slots=True)
class Totals:
    """What a namespace holds: blocks, their raw bytes and their encoded bytes."""

    blocks: int = 0
    raw_bytes: int = 0
    blob_bytes: int = 0

    def plus(self, record: Record) -> Totals:
        """With one block more."""
        return Totals(
            self.blocks + 1,
            self.raw_bytes + record.raw_bytes,
            self.blob_bytes + record.blob_bytes,
        )

    def minus(self, record: Record) -> Totals:
        """With one block less; never below zero."""
        return Totals(
            max(0, self.blocks - 1),
            max(0, self.raw_bytes - record.raw_bytes),
            max(0, self.blob_bytes - record.blob_bytes),
        )


def pack_namespace(totals: Totals, base: bytes, description: bytes) -> bytes:
    """56 bytes of counters and base key, then the description as JSON."""
    return _NAMESPACE.pack(totals.blocks, totals.raw_bytes, totals.blob_bytes, base) + description


def unpack_namespace(data: bytes) -> tuple[Totals, bytes, bytes]:
    """Counters, base key and JSON of a namespace row; CorruptBlob if it isn't one."""
    if len(data) < _NAMESPACE.size:
        raise CorruptBlob("namespace row is too short")
    blocks, raw_bytes, blob_bytes, base = _NAMESPACE.unpack_from(data)
    return Totals(blocks, raw_bytes, blob_bytes), base, data[_NAMESPACE.size :]


def describe(namespace: Namespace) -> bytes:
    """The namespace as JSON with sorted keys: all but the salt, of which only that there is one."""
    fields: dict[str, object] = {
        "name": namespace.name,
        "model": namespace.model,
        "adapter": namespace.adapter,
        "draft": namespace.draft,
        "host": namespace.host,
        "shard": namespace.shard,
        "salted": bool(namespace.salt),
        "block_tokens": namespace.block_tokens,
        "layout": namespace.layout,
    }
    if namespace.cold_quantize != "none":
        fields["cold_quantize"] = namespace.cold_quantize
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def described(description: bytes) -> dict[str, object]:
    """The fields of ``describe``; CorruptBlob if they aren't."""
    try:
        fields = json.loads(description or b"{}")
    except ValueError as error:
        raise CorruptBlob("namespace description is not JSON") from error
    if not isinstance(fields, dict):
        raise CorruptBlob("namespace description is not an object")
    return fields


def namespace_of(fields: Mapping[str, object], salt: bytes) -> Namespace:
    """The namespace that ``fields`` of ``described`` describe, if ``salt`` is its salt: whether it
    is shows in its key.
    """
    texts = {
        name: str(fields.get(name, ""))
        for name in ("model", "adapter", "draft", "host", "shard", "layout", "name")
    }
    tokens = fields.get("block_tokens")
    return Namespace(
        **texts,
        salt=salt,
        block_tokens=tokens if isinstance(tokens, int) and 0 <= tokens <= MAX_TOKENS else 0,
        cold_quantize=str(fields.get("cold_quantize", "none")),
    )


def label(description: bytes) -> str:
    """A namespace's name for people; CorruptBlob if it isn't described as it must be."""
    fields = described(description)
    name = str(fields.get("name") or fields.get("model") or "(not described)")
    return f"{name}{' (salted)' * bool(fields.get('salted'))}"


def pack_number(value: int) -> bytes:
    """A value of ``meta``: 8 bytes."""
    return _NUMBER.pack(value)


def unpack_number(data: bytes) -> int:
    """The value that ``pack_number`` made; CorruptBlob if it isn't one."""
    if len(data) != _NUMBER.size:
        raise CorruptBlob("meta value has another size")
    return int(_NUMBER.unpack(data)[0])


def piece_key(key: bytes, number: int) -> bytes:
    """Key of one piece in ``blob``."""
    return key + number.to_bytes(2, "big")


def pack_counters(counters: Counters) -> bytes:
    """The counters, behind their CRC-32."""
    data = counters.to_bytes()
    return _CRC.pack(zlib.crc32(data)) + data


def unpack_counters(data: bytes) -> Counters:
    """The counters that ``pack_counters`` packed; CorruptBlob if they aren't."""
    body = data[_CRC.size :]
    if data[: _CRC.size] != _CRC.pack(zlib.crc32(body)):
        raise CorruptBlob("counters fail their CRC")
    try:
        return Counters.from_bytes(body)
    except ValueError as error:
        raise CorruptBlob(str(error)) from error


def order_key(use: Use, key: bytes) -> bytes:
    """Key of a leaf in ``order``: on each shelf the least recently used first."""
    return order_place(use.shelf, use.last) + key


def order_place(shelf: int, last: int) -> bytes:
    """What the keys of leaves last used at ``last`` start with."""
    return bytes((shelf,)) + last.to_bytes(TICK_BYTES, "big")


def unpack_order(row: bytes) -> tuple[int, int, BlockKey]:
    """Shelf, last use and block key of a row of ``order``."""
    last = int.from_bytes(row[1 : 1 + TICK_BYTES], "big")
    return row[0], last, BlockKey(row[1 + TICK_BYTES :])


def due_key(expires: int, key: bytes) -> bytes:
    """Key of a leaf in ``due``: the first that expires first."""
    return expires.to_bytes(TIME_BYTES, "big") + key


def unpack_due(row: bytes) -> tuple[int, BlockKey]:
    """When a leaf expires, and its key, of a row of ``due``."""
    return int.from_bytes(row[:TIME_BYTES], "big"), BlockKey(row[TIME_BYTES:])


def left_key(left: int, key: bytes) -> bytes:
    """Key of a ghost in ``left``: the first that left first."""
    return left.to_bytes(TICK_BYTES, "big") + key


def unpack_left(row: bytes) -> tuple[int, BlockKey]:
    """When a ghost left, and its key, of a row of ``left``."""
    return int.from_bytes(row[:TICK_BYTES], "big"), BlockKey(row[TICK_BYTES:])


def child_group(parent: bytes, level: int, before: bytes) -> bytes:
    """What all ``child`` keys of ``parent`` start with that share the bytes ``before`` a level.

    A collision of this digest only puts strangers side by side: whoever searches compares the
    token ids of what was found.
    """
    digest = hashlib.blake2b(before, digest_size=8).digest() if level else bytes(8)
    return parent + bytes((level,)) + digest


def segments(tokens: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Level, bytes before it and segment of ``ordered(tokens)``; the last segment is short.

    An ordered token is at most 20 bytes, so 4096 of them make at most 205 levels.
    """
    encoded = ordered(tokens)
    for level in range(len(encoded) // SEGMENT_BYTES + 1):
        start = level * SEGMENT_BYTES
        yield level, encoded[:start], encoded[start : start + SEGMENT_BYTES]


def child_rows(parent: bytes, key: bytes, tokens: bytes) -> list[bytes]:
    """Keys of a block in ``child``, one a level, each at most 450 bytes (LMDB allows 511)."""
    return [
        child_group(parent, level, before) + segment + b"\0" + key[:CHILD_ID_BYTES]
        for level, before, segment in segments(tokens)
    ]
