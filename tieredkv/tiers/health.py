"""Whether a cold directory can be opened without dying of it, found out before it is opened.

LMDB maps its file and believes it: a truncated one is SIGBUS at the first access beyond its end,
a zeroed page SIGABRT, a page in the wrong place either, maybe only once it is freed and used
again. None can be caught. So the file is read as plain bytes first, by the verifier that comes
with py-lmdb, and then walked, in a process of their own that may take long and may die.

This file is also that process's program. It runs by path and imports nothing of the package, so
that it starts fast and nothing else can fail in it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import lmdb
from lmdb.verify import VerifyError, verify

DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"
QUARANTINE_PREFIX = "quarantine-"

# Long enough to walk the rows of a million blocks; a slower walk says nothing about the file.
WALK_TIMEOUT_S = 30.0

# mdb.c, 64 bit: a page header of 16 bytes, then MDB_meta in the machine's own byte order: magic,
# version, address, map size, two MDB_db of 48 bytes (the first begins with the page size), last
# page, transaction number.
_META = struct.Struct("=16xIIQQI44x48xQQ")
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_PAGE_SIZES = (1 << 9, 1 << 16)
_FOUND = 3
# What a walk reads besides the structure: the index, and in a cut file every value's end.
ROWS, VALUES = "rows", "values"
_INDEX = b"index"
# `ledger.DATABASES`, which this program can't import.
OURS = frozenset(
    (
        *(b"meta", b"namespace", b"index", b"use", b"order", b"child", b"blob"),
        *(b"ghost", b"left", b"due", b"pin"),
    )
)
# Of these, what format 3 added: without them a store is one of format 2, and sound. Some were
# added last: without these alone it is one of an unfinished format 3, and sound too.
NEW = frozenset((b"ghost", b"left", b"due", b"pin"))
_LAST = frozenset((b"due", b"pin"))
# What LMDB says of a file that isn't what it must be. Its other errors, of memory say, tell
# nothing of the file.
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


@dataclass(frozen=True, slots=True)
class Header:
    """The newest meta page of a data file: sizes in bytes, ``last_page`` counted from 0."""

    page_bytes: int
    map_bytes: int
    last_page: int

    @property
    def n_bytes(self) -> int:
        """Size of the file if all its pages are there."""
        return (self.last_page + 1) * self.page_bytes


def read_header(data: Path) -> Header | None:
    """The header of an LMDB 0.9 file, None if ``data`` is none. OSError if it can't be read."""
    with data.open("rb") as file:
        first = _meta(file.read(_META.size))
        if first is None:
            return None
        file.seek(first[0].page_bytes)
        second = _meta(file.read(_META.size))
    metas = [first] if second is None else [first, second]
    return max(metas, key=lambda meta: meta[1])[0]


def _meta(data: bytes) -> tuple[Header, int] | None:
    if len(data) < _META.size:
        return None
    magic, version, _address, map_bytes, page_bytes, last_page, txn = _META.unpack(data)
    sized = _PAGE_SIZES[0] <= page_bytes <= _PAGE_SIZES[1] and not page_bytes & (page_bytes - 1)
    if magic != _MAGIC or version != _VERSION or not sized:
        return None
    return Header(page_bytes, map_bytes, last_page), txn


def in_use(directory: Path) -> bool:
    """Whether another process has the environment in ``directory`` open.

    LMDB keeps a shared lock on the first byte of lock.mdb for as long. Not to be asked while
    this process has it open: closing the descriptor would drop that lock.
    """
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(fd)
    return False


def finding(directory: Path, timeout_s: float = WALK_TIMEOUT_S) -> str | None:
    """What is wrong with the data file of ``directory``, None if nothing was found.

    Changes nothing. Keep writers out meanwhile, or what they do may look like damage. Costs one
    start of the interpreter and a read of all rows but the blobs, of these a page each: about
    0.2 s, and as much again for each GB. What takes longer than ``timeout_s`` finds nothing.
    """
    data = directory / DATA_NAME
    if not data.exists() or not data.stat().st_size:
        return None
    header = read_header(data)
    if header is None:
        return "it has no LMDB header"
    if header.n_bytes > max(header.map_bytes, data.stat().st_size):
        return "its header counts more pages than its map has"
    if data.stat().st_size >= header.n_bytes:
        return _walk_apart(directory, ROWS, timeout_s)
    # LMDB does not write a page that was allocated and freed in one transaction, so a few may
    # be missing at the end. Whether a used one is, only reading every value tells.
    return _walk_apart(directory, VALUES, timeout_s)


def fill_up(directory: Path) -> None:
    """Give a data file in which nothing was found the size that its header tells, so that no
    access to the map ends beyond it. Nobody may be writing.
    """
    data = directory / DATA_NAME
    header = read_header(data) if data.exists() else None
    if header is not None and data.stat().st_size < header.n_bytes:
        os.truncate(data, header.n_bytes)


def quarantine(directory: Path) -> Path:
    """Move the environment in ``directory`` aside and return where to.

    What an earlier call moved there is deleted: one copy is enough to look at, and without end
    they would fill the disk. Nobody may be writing.
    """
    for old in directory.glob(QUARANTINE_PREFIX + "*"):
        for name in (DATA_NAME, LOCK_NAME):
            (old / name).unlink(missing_ok=True)
        old.rmdir()
    aside = directory / f"{QUARANTINE_PREFIX}{time.time_ns()}"
    aside.mkdir(mode=0o700)
    for name in (DATA_NAME, LOCK_NAME):
        if (directory / name).exists():
            (directory / name).rename(aside / name)
    return aside


def _walk_apart(directory: Path, what: str, timeout_s: float) -> str | None:
    """Walk in a process of its own. Whatever is no sign of damage, a timeout say, is no finding."""
    if not sys.executable:
        # Embedded: there is no interpreter to start.
        return None
    # -P: the folder of this file holds modules, but none that the walk should import.
    command = [sys.executable, "-P", __file__, str(directory), what]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return verdict(done.returncode, done.stdout)


def verdict(status: int, said: str) -> str | None:
    """What a walk found, from its exit status and what it printed."""
    if status == _FOUND:
        return said.strip()
    if -status in (signal.SIGBUS, signal.SIGABRT, signal.SIGSEGV):
        return f"reading it ends in {signal.Signals(-status).name}"
    return None


def _structure(directory: str) -> None:
    """Raise CorruptedError unless every page is what some other says, and is said to be by one
    only, and all others are free. Reads the trees and the first page of each large value.
    """
    try:
        found = verify(directory)  # type: ignore[no-untyped-call] # py-lmdb doesn't annotate it
    except VerifyError as error:
        raise lmdb.CorruptedError(str(error)) from error
    if found:
        raise lmdb.CorruptedError(f"{found[0]}, and {len(found) - 1} findings more")


def _walk_index(txn: lmdb.Transaction, index: lmdb._Database) -> None:
    for _key, value in txn.cursor(index):
        # The first four bytes of an index record are the CRC-32 of the others.
        if value[:4] != zlib.crc32(value[4:]).to_bytes(4, "little"):
            raise lmdb.CorruptedError("index record fails its CRC")


def _walk_ends(txn: lmdb.Transaction, db: lmdb._Database) -> None:
    """The last byte of every value: the page that a cut file lacks first."""
    for _key, value in txn.cursor(db):
        if value:
            value[-1]


def _walk(directory: str, what: str) -> None:
    _structure(directory)
    # Without readahead, which would read the blobs between the rows; without lock, because
    # the caller keeps writers out and this process may die at any point.
    env = lmdb.open(directory, readonly=True, create=False, lock=False, readahead=False, max_dbs=16)
    with env.begin() as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
    if names and OURS - set(names) not in (frozenset(), _LAST, NEW, OURS):
        raise lmdb.CorruptedError("one of its databases has another name")
    for name in names:
        db = env.open_db(name, create=False)
        with env.begin(buffers=True) as txn:
            if name == _INDEX:
                _walk_index(txn, db)
            if what == VALUES:
                _walk_ends(txn, db)


def main(arguments: list[str]) -> int:
    """Walk the environment at the path given; print what is wrong and return 3, or return 0."""
    directory, what = arguments
    try:
        _walk(directory, what)
    except _DAMAGE as error:
        print(error)
        return _FOUND
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
