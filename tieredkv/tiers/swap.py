"""A new data file in place of the old one, so that a kill at any point leaves one or the other.

LMDB's two files belong together: `lock.mdb` knows readers and the last transaction of one
`data.mdb`. Two renames are not one step, so the new lock file waits in the folder of the new
store for as long as the data file has moved and it hasn't. Whoever opens a store, and holds the
gate for it, looks whether one waits, and moves it. Processes that have the old files open go on
reading those, and notice at their next write.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tieredkv.tiers.health import DATA_NAME, LOCK_NAME

# In the cold directory: the new store while it is made.
FOLDER = "rebuild"
_NEXT_LOCK = "next.lock"


class Busy(Exception):
    """Another process is making a new store for this directory."""


@contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """An empty folder for a new store, this process's alone; removed at the end.

    What a killed process left there is removed first. Enter it with the gate held, so that no
    `replace` of another process is half done; what follows needs no gate.

    Raises:
        Busy: another process has it.
        OSError: it can't be made.
    """
    finish(directory)
    folder = directory / FOLDER
    fd = _claim(folder)
    try:
        _clear(folder)
        yield folder
    finally:
        if not _is_moved(folder):
            _clear(folder)
            folder.rmdir()
        os.close(fd)


def _claim(folder: Path) -> int:
    """The folder, made if need be, open and locked. The kernel unlocks it with its owner."""
    folder.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The one who had it may have removed it in between.
        if os.path.samestat(folder.stat(), os.fstat(fd)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    raise Busy


def _clear(folder: Path) -> None:
    for leftover in folder.iterdir():
        leftover.unlink()


def replace(directory: Path) -> None:
    """Put the data file in the workplace into the place of the directory's own.

    Nobody may have the new one open. The caller holds the gate.
    """
    folder = directory / FOLDER
    _sync(folder / DATA_NAME)
    os.close(os.open(folder / _NEXT_LOCK, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        os.replace(folder / DATA_NAME, directory / DATA_NAME)
    finally:
        finish(directory)


def finish(directory: Path) -> None:
    """Do what is left of a `replace` that was interrupted. The caller holds the gate."""
    folder = directory / FOLDER
    if _is_moved(folder):
        os.replace(folder / _NEXT_LOCK, directory / LOCK_NAME)
        _sync(directory)


def _is_moved(folder: Path) -> bool:
    """Whether the data file has been moved and its lock file hasn't."""
    return (folder / _NEXT_LOCK).exists() and not (folder / DATA_NAME).exists()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
