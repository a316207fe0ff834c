"""What the remote tier keeps: a block as an object of its own, and the names of objects.

``docs/format.md`` pins every byte. Integers are little-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tieredkv.codec import checksum
from tieredkv.core import FORMAT_VERSION, GRADES, BlockKey, CorruptBlob
from tieredkv.engines.base import RemoteRefused
from tieredkv.keys import KEY_BYTES, block_key
from tieredkv.tiers.records import Record

OBJECT_VERSION = 1
# Places in a block at which the name of a child tells whether it goes on as a query does.
SKETCH_PLACES = 16
_MARK_BYTES = 2
_MARK_DIGITS = 2 * _MARK_BYTES

_HEADER = struct.Struct("<4sHBBII")
_MAGIC = b"tkvo"
_PLAIN, _SEALED = 0, 1
_DIGEST_BYTES = 32
_NONCE_BYTES = 12
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Parcel:
    """A block as it travels: its record, its blob, and how it ages. When it expires, in Unix ns,
    doesn't travel: it is told to whom may not let it go.
    """

    record: Record
    blob: bytes | memoryview
    grade: int = 0
    expires: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """What the name of a child tells: its key, its tokens' number, and marks at its places."""

    key: BlockKey
    n_tokens: int
    marks: tuple[str, ...]


class Wrap(Protocol):
    """How objects are kept from damage, and maybe from other people's eyes. Any thread may call."""

    def name(self, what: bytes) -> str:
        """What to call a key to the outside, in hexadecimal digits."""

    def hide(self, key: bytes) -> str:
        """A key in hexadecimal digits that `reveal` gives back."""

    def reveal(self, text: str) -> bytes:
        """The key that `hide` was given.

        Raises:
            CorruptBlob: it was never given one to become that.
        """

    def seal(self, name: str, header: bytes, body: bytes) -> bytes:
        """``body``, so that `open` can tell whether it is that of this name and header."""

    def open(self, name: str, header: bytes, sealed: memoryview) -> memoryview:
        """The body.

        Raises:
            CorruptBlob: it isn't what was sealed.
        """

    @property
    def kind(self) -> int:
        """A byte of the header."""

    @property
    def secret(self) -> bytes:
        """What marks are keyed with."""


class Plain:
    """A digest over everything; names are the keys themselves."""

    kind = _PLAIN
    secret = b""

    def name(self, what: bytes) -> str:
        """See `Wrap.name`."""
        return what.hex()

    def hide(self, key: bytes) -> str:
        """See `Wrap.hide`."""
        return key.hex()

    def reveal(self, text: str) -> bytes:
        """See `Wrap.reveal`."""
        try:
            return bytes.fromhex(text)
        except ValueError as e:
            raise CorruptBlob("a child's name isn't hexadecimal") from e

    def seal(self, name: str, header: bytes, body: bytes) -> bytes:
        """See `Wrap.seal`: the digest, and the body behind it."""
        return _digest(name, header, body) + body

    def open(self, name: str, header: bytes, sealed: memoryview) -> memoryview:
        """See `Wrap.open`."""
        body = sealed[_DIGEST_BYTES:]
        if bytes(sealed[:_DIGEST_BYTES]) != _digest(name, header, body):
            raise CorruptBlob("its digest is wrong")
        return body


class Sealed:
    """AES-256-GCM by the package ``cryptography``, under a key of the user's. Names are keyed too,
    so that nobody without it can tell whether a prompt is there.
    """

    kind = _SEALED

    def __init__(self, secret: bytes) -> None:
        """Derive three keys from ``secret``, 32 bytes.

        Raises:
            RemoteRefused: the package isn't installed.
        """
        try:
            aead = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
            self._invalid = importlib.import_module("cryptography.exceptions").InvalidTag
        except ModuleNotFoundError as e:
            raise RemoteRefused(
                f"a key for the remote tier needs the package {e.name}: "
                "pip install 'tieredkv[remote]'"
            ) from e
        self._content: Any = aead.AESGCM(_derive(secret, b"content", _SECRET_BYTES))
        self._hidden: Any = aead.AESSIV(_derive(secret, b"hidden", 2 * _SECRET_BYTES))
        self.secret = _derive(secret, b"names", _SECRET_BYTES)

    def name(self, what: bytes) -> str:
        """See `Wrap.name`."""
        return hmac.digest(self.secret, what, "sha256").hex()

    def hide(self, key: bytes) -> str:
        """See `Wrap.hide`."""
        return bytes(self._hidden.encrypt(key, None)).hex()

    def reveal(self, text: str) -> bytes:
        """See `Wrap.reveal`."""
        try:
            return bytes(self._hidden.decrypt(bytes.fromhex(text), None))
        except (ValueError, self._invalid) as e:
            raise CorruptBlob("a child's name was made under another key") from e

    def seal(self, name: str, header: bytes, body: bytes) -> bytes:
        """See `Wrap.seal`: a nonce, the ciphertext and its tag."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + bytes(self._content.encrypt(nonce, body, header + name.encode()))

    def open(self, name: str, header: bytes, sealed: memoryview) -> memoryview:
        """See `Wrap.open`."""
        nonce, text = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return memoryview(self._content.decrypt(nonce, text, header + name.encode()))
        except (ValueError, self._invalid) as e:
            raise CorruptBlob("it was not sealed under this key and name") from e


def secret_of(content: bytes) -> bytes:
    """The key in a file: 32 bytes as they are, or any longer text, such as of ``openssl rand``.

    Raises:
        RemoteRefused: it is too short to keep a secret.
    """
    if len(content) == _SECRET_BYTES:
        return content
    text = content.strip()
    if len(text) < _SECRET_BYTES:
        raise RemoteRefused(
            "a key is 32 random bytes, or a line of at least 32 characters: "
            "openssl rand -hex 32 > FILE"
        )
    return hashlib.blake2b(text, digest_size=_SECRET_BYTES, person=b"tieredkv-file").digest()


def pack(name: str, parcel: Parcel, wrap: Wrap) -> bytes:
    """The object called ``name``."""
    record = parcel.record.pack()
    header = _HEADER.pack(
        _MAGIC, OBJECT_VERSION, wrap.kind, parcel.grade, FORMAT_VERSION, len(record)
    )
    return header + wrap.seal(name, header, b"".join((record, parcel.blob)))


def unpack(name: str, key: BlockKey, data: bytes | memoryview, wrap: Wrap) -> Parcel:
    """What is in the object called ``name``, if it is the block ``key`` in all its parts.

    Raises:
        CorruptBlob: it is anything else.
    """
    view = memoryview(data).cast("B")
    header = bytes(view[: _HEADER.size])
    if len(header) < _HEADER.size:
        raise CorruptBlob("it is too short")
    magic, version, kind, grade, format_version, n_record = _HEADER.unpack(header)
    if (magic, version, format_version) != (_MAGIC, OBJECT_VERSION, FORMAT_VERSION):
        raise CorruptBlob("it is no object of this version")
    if kind != wrap.kind or grade >= GRADES:
        raise CorruptBlob("it is sealed otherwise, or has a grade out of bounds")
    body = wrap.open(name, header, view[_HEADER.size :])
    record, blob = Record.unpack(bytes(body[:n_record])), body[n_record:]
    if not record.names(key):
        raise CorruptBlob("it is another block's")
    if len(blob) != record.blob_bytes or checksum(blob) != record.checksum:
        raise CorruptBlob("its checksum is wrong")
    return Parcel(record, blob, grade)


def step_of(block_tokens: int) -> int:
    """Tokens between two places of a block."""
    return -(-block_tokens // SKETCH_PLACES)


def marks(parent: BlockKey, tokens: bytes, step: int, wrap: Wrap) -> tuple[str, ...]:
    """For each place within a child's tokens, four digits that depend on all tokens before it."""
    digest = hashlib.blake2b(parent, digest_size=_MARK_BYTES, key=wrap.secret)
    found = []
    for stop in range(8 * step, len(tokens) + 1, 8 * step):
        digest.update(tokens[stop - 8 * step : stop])
        found.append(digest.copy().hexdigest())
    return tuple(found)


def member_name(parcel: Parcel, key: BlockKey, step: int, wrap: Wrap) -> str:
    """What a block is called among its parent's children."""
    tokens = parcel.record.tokens
    sketch = "".join(marks(parcel.record.parent, tokens, step, wrap))
    return f"{sketch}.{wrap.hide(key)}.{len(tokens) // 8}"


def members(names: Sequence[str], wrap: Wrap) -> Iterator[Member]:
    """What the names of children tell; those that aren't of this kind, or key, are left out."""
    for name in names:
        sketch, _, rest = name.partition(".")
        hidden, _, n_tokens = rest.partition(".")
        digits = range(0, len(sketch), _MARK_DIGITS)
        try:
            key, n = wrap.reveal(hidden), int(n_tokens)
        except (CorruptBlob, ValueError):
            continue
        if len(key) == KEY_BYTES and n > 0:
            yield Member(BlockKey(key), n, tuple(sketch[i : i + _MARK_DIGITS] for i in digits))


def leads(member: Member, parent: BlockKey, tokens: bytes) -> bool:
    """Whether all of a child's tokens lead ``tokens``."""
    n = 8 * member.n_tokens
    return n <= len(tokens) and block_key(parent, tokens[:n]) == member.key


def shared_marks(a: Sequence[str], b: Sequence[str]) -> int:
    """Leading marks that two children's names share."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _digest(name: str, header: bytes, body: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"tieredkv-object")
    for part in (len(name).to_bytes(4, "little"), name.encode(), header, body):
        digest.update(part)
    return digest.digest()


def _derive(secret: bytes, purpose: bytes, n_bytes: int) -> bytes:
    return hashlib.blake2b(purpose, digest_size=n_bytes, key=secret).digest()
