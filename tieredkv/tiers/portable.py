"""A part of a cold tier as one file: an archive that any unzip opens, of blocks as they are stored.

``docs/format.md`` describes it byte for byte. What is read here may come from anybody: every size
is looked at before anything of that size is made, and nothing is believed that can be recomputed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tieredkv.codec import checksum
from tieredkv.core import (
    COLD_QUANTIZE,
    FORMAT_VERSION,
    WINDOW,
    Block,
    BlockKey,
    Codec,
    CorruptBlob,
    TieredKVError,
)
from tieredkv.keys import KEY_BYTES, WINDOW_TOKENS, base_key, block_key, namespace_key
from tieredkv.tiers.ledger import Origin
from tieredkv.tiers.records import MAX_TOKENS, Record, Use, described, namespace_of

FORMAT = "tieredkv-portable"
VERSION = 1

_MANIFEST = "manifest.json"
_INDEX = "index"
_BLOBS = "blobs/"
_SUFFIX = ".safetensors"

MAX_BLOCKS = 1 << 18
MAX_MANIFEST_BYTES = 16 << 20
_SIZE = struct.Struct("<I")
# More than any record or use takes.
_MAX_PART_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20

# The ends of an archive without a comment: of the plain kind, the one for large archives, and what
# points to that.
_END = struct.Struct("<4s4H2LH")
_LARGE_END = struct.Struct("<4sQ2H2L4Q")
_LARGE_POINTER = struct.Struct("<4sLQL")
# More than a member of ours takes in the list of members.
_MEMBER_BYTES = 256

# What `zipfile` raises for an archive that isn't one, or is made to hurt.
_UNREADABLE = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, struct.error, OSError, EOFError),
    *(ValueError, KeyError, NotImplementedError, OverflowError, RuntimeError, IndexError),
)

_FLOATS = {"bfloat16": (0x7FFF, 0x7F80), "float16": (0x7FFF, 0x7C00)}


@dataclass(frozen=True, slots=True)
class Foreign:
    """A block that another store had: without tensors, encoded, and with its use there."""

    block: Block
    blob: bytes
    checksum: bytes
    use: Use


class BadFile(TieredKVError):
    """A file that is no portable part of a cold tier, was damaged or means to do harm; or one that
    can't be written. The message says which.
    """


@dataclass(frozen=True, slots=True)
class Row:
    """A block as the index of a store, or of a file, has it."""

    key: BlockKey
    record: Record
    use: Use

    @property
    def is_state(self) -> bool:
        """Whether it is a snapshot or a window."""
        return self.record.tokens in (b"", WINDOW_TOKENS)

    def pack(self) -> bytes:
        """Its place in the file's index: record and use, each behind its size."""
        parts = self.record.pack(), self.use.pack()
        return b"".join(_SIZE.pack(len(part)) + part for part in parts)


@dataclass(frozen=True, slots=True)
class Written:
    """What came of an export: blocks and encoded bytes, and blocks that were left out, as they were
    damaged or left the store meanwhile.
    """

    blocks: int
    blob_bytes: int
    left_out: int


# ---- writing


def write(
    path: Path,
    rows: Iterable[Row],
    origins: Mapping[BlockKey, Origin],
    read: Callable[[Row], bytes | None],
    progress: Callable[[int], None],
) -> Written:
    """Write a file of ``rows``, parents first, whose blobs ``read`` gives.

    It appears at ``path`` when it is complete and on the disk, in place of one that was there, and
    not at all if this raises. ``progress`` is told the encoded bytes that are done.

    Raises:
        OSError: it can't be written.
        BadFile: there are more blocks than a file may have.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            written = _write(file, rows, origins, read, progress)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync(path.parent)
    return written


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(
    file: IO[bytes],
    rows: Iterable[Row],
    origins: Mapping[BlockKey, Origin],
    read: Callable[[Row], bytes | None],
    progress: Callable[[int], None],
) -> Written:
    index: list[bytes] = []
    kept: set[BlockKey] = set()
    roots: set[BlockKey] = set()
    n_bytes = left_out = done = 0
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for row in rows:
            done += row.record.blob_bytes
            is_rooted = row.record.parent == row.record.root or row.record.parent in kept
            blob = read(row) if is_rooted else None
            if blob is None or checksum(blob) != row.record.checksum:
                left_out += 1
                continue
            if len(index) == MAX_BLOCKS:
                raise BadFile(f"more than {MAX_BLOCKS} blocks: export less at a time")
            archive.writestr(_member(_name(row.key)), blob)
            index.append(row.pack())
            kept.add(row.key)
            roots.add(row.record.root)
            n_bytes += len(blob)
            progress(done)
        packed = b"".join(index)
        archive.writestr(_member(_INDEX), packed)
        manifest = _manifest(packed, len(index), n_bytes, {r: origins[r] for r in sorted(roots)})
        archive.writestr(_member(_MANIFEST), manifest)
    return Written(len(index), n_bytes, left_out)


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.external_attr = 0o600 << 16
    return member


def _name(key: BlockKey) -> str:
    return f"{_BLOBS}{key.hex()}{_SUFFIX}"


def _manifest(
    index: bytes, n_blocks: int, n_bytes: int, origins: Mapping[BlockKey, Origin]
) -> bytes:
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "store_format": FORMAT_VERSION,
        "blocks": n_blocks,
        "blob_bytes": n_bytes,
        "index_bytes": len(index),
        "index_blake2b": _digest(index),
        "namespaces": {
            root.hex(): described(origin.description) for root, origin in origins.items()
        },
    }
    text = json.dumps(manifest, indent=1, sort_keys=True).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise BadFile("too many namespaces for one file: export less at a time")
    return text


def _digest(index: bytes) -> str:
    return hashlib.blake2b(index, digest_size=32).hexdigest()


# ---- reading


class Package:
    """A file opened for reading, its manifest and index looked through. Use it as a context."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` and check all but the blobs.

        Raises:
            BadFile: it isn't such a file; the message says why.
            OSError: it can't be opened.
        """
        self._file = path.open("rb")
        try:
            self._open()
        except BadFile:
            self._file.close()
            raise
        except _UNREADABLE as error:
            self._file.close()
            raise BadFile(f"no archive, or a damaged one: {error}") from error

    def _open(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        _check_end(self._file, size)
        self._archive = zipfile.ZipFile(self._file)
        self._members = {member.filename: member for member in self._archive.infolist()}
        _check_members(self._archive.infolist(), size)
        manifest = _parsed(self._read(_MANIFEST, MAX_MANIFEST_BYTES))
        self.n_blocks = _count(manifest, "blocks")
        self.blob_bytes = _count(manifest, "blob_bytes")
        self.origins = _origins(manifest)
        self._index_bytes = _count(manifest, "index_bytes")
        n_blocks = n_bytes = 0
        for row in self.rows():
            n_blocks += 1
            n_bytes += row.record.blob_bytes
        if self._index_digest() != manifest.get("index_blake2b"):
            raise BadFile("the index is not that of the manifest")
        if not n_blocks == self.n_blocks == len(self._members) - 2:
            raise BadFile("the numbers of blocks in manifest, index and archive differ")
        if n_bytes != self.blob_bytes:
            raise BadFile("the blobs are not of as many bytes as the manifest says")

    def rows(self) -> Iterator[Row]:
        """The blocks of the file, each behind its parent.

        Raises:
            BadFile: one of them isn't what a store may have.
        """
        with self._index() as index:
            yield from _rows(index, self.origins)

    def _index(self) -> IO[bytes]:
        member = self._members.get(_INDEX)
        if member is None or member.file_size != self._index_bytes:
            raise BadFile("the index is missing or of another size than the manifest says")
        return self._archive.open(member)

    def _index_digest(self) -> str:
        h = hashlib.blake2b(digest_size=32)
        with self._index() as index:
            while part := index.read(_CHUNK_BYTES):
                h.update(part)
        return h.hexdigest()

    def _read(self, name: str, limit: int) -> bytes:
        member = self._members.get(name)
        if member is None or member.file_size > limit:
            raise BadFile(f"{name} is missing or too large")
        return self._archive.read(member)

    def blob(self, row: Row) -> bytes:
        """The blob of one of the rows, exactly as the row says.

        Raises:
            BadFile: it is missing, cut off, another one, or was damaged.
        """
        try:
            blob = self._read(_name(row.key), row.record.blob_bytes)
        except _UNREADABLE as error:
            raise BadFile(f"block {row.key.hex()[:16]}: {error}") from error
        if checksum(blob) != row.record.checksum or len(blob) != row.record.blob_bytes:
            raise BadFile(f"block {row.key.hex()[:16]}: its blob is another one, or damaged")
        return blob

    def fields(self) -> dict[BlockKey, dict[str, object]]:
        """What describes each namespace, by root."""
        return {root: described(origin.description) for root, origin in self.origins.items()}

    def quantize(self, row: Row) -> str:
        """The ``cold_quantize`` of a row's namespace."""
        return _quantize(described(self.origins[row.record.root].description))

    def __enter__(self) -> Package:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()
        self._file.close()


def _check_end(file: IO[bytes], size: int) -> None:
    """Look at how much an archive's list of members is said to take, before it is read at once."""
    tail_bytes = _END.size + _LARGE_POINTER.size + _LARGE_END.size
    file.seek(max(0, size - tail_bytes))
    tail = file.read(tail_bytes)
    if len(tail) < _END.size:
        raise BadFile("too short to be an archive")
    mark, _, _, _, entries, listed, _, comment = _END.unpack(tail[-_END.size :])
    if mark != b"PK\x05\x06" or comment:
        raise BadFile("no archive, or one that was cut off")
    if len(tail) == tail_bytes and tail[:4] == b"PK\x06\x06":
        entries, listed = _LARGE_END.unpack(tail[: _LARGE_END.size])[7:9]
    if entries > MAX_BLOCKS + 2 or listed > entries * _MEMBER_BYTES:
        raise BadFile(f"more members than the {MAX_BLOCKS} blocks that a file may have")


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    if len({member.filename for member in members}) != len(members):
        raise BadFile("two members of one name")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise BadFile("a member that is compressed or encrypted")
        if member.file_size != member.compress_size:
            raise BadFile("a member of two sizes")
    # Members that share their bytes would be more than the file.
    if sum(member.file_size for member in members) > size:
        raise BadFile("members that overlap")


def _parsed(manifest: bytes) -> dict[str, Any]:
    try:
        found = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise BadFile("the manifest is not JSON") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise BadFile(f"no file of the format {FORMAT}")
    if found.get("version") != VERSION or found.get("store_format") != FORMAT_VERSION:
        raise BadFile(
            f"of version {found.get('version')!r:.20}, for stores of format "
            f"{found.get('store_format')!r:.20}; this is version {VERSION}, for format "
            f"{FORMAT_VERSION}"
        )
    return found


def _count(manifest: Mapping[str, Any], name: str) -> int:
    value = manifest.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise BadFile(f"the manifest has no number of {name}")
    return value


def _origins(manifest: Mapping[str, Any]) -> dict[BlockKey, Origin]:
    namespaces = manifest.get("namespaces")
    if not isinstance(namespaces, dict):
        raise BadFile("the manifest has no namespaces")
    return dict(_origin(root, fields) for root, fields in namespaces.items())


def _origin(name: str, fields: object) -> tuple[BlockKey, Origin]:
    """A namespace's root and origin. Where there is no salt the root is recomputed."""
    try:
        root = BlockKey(bytes.fromhex(name))
    except ValueError as error:
        raise BadFile("a namespace whose root is no key") from error
    if len(root) != KEY_BYTES or not isinstance(fields, dict):
        raise BadFile("a namespace whose root is no key, or that isn't described")
    tokens = fields.get("block_tokens")
    if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
        raise BadFile("a namespace without a size of blocks")
    if _quantize(fields) not in COLD_QUANTIZE:
        raise BadFile("a namespace that is quantized in an unknown way")
    description = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    if fields.get("salted"):
        # Under which base its layout is listed only the salt tells.
        return root, Origin(bytes(KEY_BYTES), description)
    unsalted = namespace_of(fields, b"")
    if namespace_key(unsalted) != root:
        raise BadFile("a namespace whose root is not that of its description")
    return root, Origin(base_key(unsalted), description)


def _quantize(fields: Mapping[str, Any]) -> str:
    return str(fields.get("cold_quantize", "none"))


def _rows(index: IO[bytes], origins: Mapping[BlockKey, Origin]) -> Iterator[Row]:
    """The rows of an index, each of which hangs on one before it."""
    sizes = {r: int(str(described(o.description)["block_tokens"])) for r, o in origins.items()}
    # Of each block before, its root and whether it is full.
    before: dict[BlockKey, tuple[BlockKey, bool]] = {}
    while (packed := _part(index)) is not None:
        row = _row(packed, _part(index) or b"")
        size = sizes.get(row.record.root)
        if size is None:
            raise BadFile("a block of a namespace that isn't described")
        _check_place(row, size, before)
        is_full = not row.is_state and len(row.record.tokens) == 8 * size
        before[row.key] = row.record.root, is_full
        if len(before) > MAX_BLOCKS:
            raise BadFile(f"more than {MAX_BLOCKS} blocks")
        yield row


def _part(index: IO[bytes]) -> bytes | None:
    """The next record or use; None at the end."""
    size = index.read(_SIZE.size)
    if not size:
        return None
    n = int.from_bytes(size, "little")
    part = index.read(n) if n <= _MAX_PART_BYTES else b""
    if len(part) != n or len(size) != _SIZE.size:
        raise BadFile("the index is cut off, or a row in it is too long")
    return part


def _row(packed: bytes, used: bytes) -> Row:
    try:
        record, use = Record.unpack(packed), Use.unpack(used)
    except CorruptBlob as error:
        raise BadFile(str(error)) from error
    return Row(block_key(record.parent, record.tokens), record, use)


def _check_place(
    row: Row, block_tokens: int, before: Mapping[BlockKey, tuple[BlockKey, bool]]
) -> None:
    record = row.record
    if row.key in before:
        raise BadFile("a block that is there twice")
    if len(record.tokens) > 8 * block_tokens:
        raise BadFile("a block of more tokens than its namespace allows")
    if not row.is_state and WINDOW in np.frombuffer(record.tokens, "<i8"):
        raise BadFile("a token that is none")
    if record.parent == record.root:
        if row.is_state:
            raise BadFile("state that hangs on no block")
        return
    root, is_full = before.get(record.parent, (None, False))
    if root != record.root:
        raise BadFile("a block without its parent, or before it")
    if not is_full and record.tokens:
        raise BadFile("a block behind one that isn't full")


# ---- what a blob holds


def checked(row: Row, blob: bytes, codec: Codec) -> Foreign:
    """A block whose blob has the right checksum, if it may be stored.

    Raises:
        BadFile: it doesn't decode to what the row says, or holds values that are not finite.
    """
    record = row.record
    try:
        parsed = codec.parse(blob, record.raw_bytes)
        tensors = codec.decode_parsed(parsed)
    except CorruptBlob as error:
        raise BadFile(f"block {row.key.hex()[:16]}: {error}") from error
    if not all(map(_is_finite, (spec.dtype for spec in parsed.specs), tensors)):
        raise BadFile(f"block {row.key.hex()[:16]}: it holds values that are not finite")
    use = row.use
    names = record.root, record.parent, row.key, record.tokens
    block = Block(*names, parsed.specs, (), use.grade, use.expires)
    return Foreign(block, blob, record.checksum, use)


def _is_finite(dtype: str, tensor: NDArray[Any]) -> bool:
    if dtype == "float32":
        return bool(np.isfinite(tensor).all())
    if dtype not in _FLOATS or not tensor.size:
        return True
    mask, infinity = _FLOATS[dtype]
    return bool((tensor & np.uint16(mask)).max() < infinity)
