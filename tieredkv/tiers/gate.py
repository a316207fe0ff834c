"""One writer at a time across processes, however the last one died.

LMDB has a lock of its own for writers, and another for its table of readers. Where those are
robust mutexes (Linux) the next in line inherits them from a dead owner; where they are POSIX
semaphores (macOS) a process killed inside one hangs all others for good. The kernel drops a
``flock`` with its owner, so whoever holds the gate and finds the semaphore taken knows that its
owner is dead, and may give it back.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GATE_NAME = "writer.gate"
READER_GATE_NAME = "reader.gate"
LOCK_NAME = "lock.mdb"
# In the gate file: tells a directory of ours from one that holds somebody else's data.mdb.
MARK = b"tieredkv cold tier\n"

_SHORTEST_WAIT_S = 0.0005
_LONGEST_WAIT_S = 0.01
# LMDB names its semaphores in the header of lock.mdb, which is far shorter than this.
_HEADER_BYTES = 512
_READER_SEMAPHORE = re.compile(rb"/MDBr[^\0]+")
_WRITER_SEMAPHORE = re.compile(rb"/MDBw[^\0]+")


class GateTimeout(Exception):
    """Another writer held the gate for the whole time given."""


def is_marked(directory: Path) -> bool:
    """Whether a gate was ever opened in ``directory``."""
    try:
        return (directory / GATE_NAME).read_bytes().startswith(MARK)
    except OSError:
        return False


class Gate:
    """An exclusive lock of a directory, among threads and processes. Not reentrant.

    Never used across a fork: the child would share the lock, not contend for it.
    """

    def __init__(self, directory: Path) -> None:
        """Open or create the gate file (mode 0600). OSError if that can't be done."""
        self._directory = directory
        self._threads = threading.Lock()
        self._fd = os.open(directory / GATE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock_fd: int | None = None
        self._reader_turn = threading.Lock()
        self._reader_fd: int | None = None
        self._writer_lock: Semaphore | None = None
        self._reader_lock: Semaphore | None = None
        self.repairs = 0
        if not os.fstat(self._fd).st_size:
            os.pwrite(self._fd, MARK, 0)
            # Before there is a data file: one without the mark is taken for somebody else's, and
            # so would be all that was stored, if the power failed before the mark was on disk.
            os.fsync(self._fd)

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        """Keep all other writers out for the length of a ``with`` block.

        Raises:
            GateTimeout: another one stayed in for ``timeout_s`` seconds.
            OSError: the lock can't be had at all.
        """
        deadline = time.monotonic() + timeout_s
        if not self._threads.acquire(timeout=timeout_s):
            raise GateTimeout
        try:
            self._lock(deadline)
            try:
                self._repair(self._writer_lock)
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around every call that takes LMDB's lock of readers: the beginning of a read, a look
        for dead readers. For nothing longer: all others wait meanwhile. Free of cost where
        that lock is a robust mutex.
        """
        if self._reader_fd is None:
            yield
            return
        with self._reader_turn:
            fcntl.flock(self._reader_fd, fcntl.LOCK_EX)
            try:
                self._repair(self._reader_lock)
                yield
            finally:
                fcntl.flock(self._reader_fd, fcntl.LOCK_UN)

    def mend(self) -> None:
        """Give back the locks that the dead have left taken; opening the environment needs them.

        Call inside of `hold`, and not while this process has the environment open: see `watch`.
        """
        try:
            fd = os.open(self._directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            self._find_locks(fd)
            self._repair(self._writer_lock)
            with self.reading():
                pass
        finally:
            os.close(fd)

    def watch(self) -> None:
        """Have `hold` and `reading` repair LMDB's locks; call once its environment is open.

        The descriptor stays open as long as the environment does: POSIX drops all of a process's
        record locks on a file, LMDB's own on lock.mdb among them, when *any* descriptor of it is
        closed. Hence also ``close`` only after the environment's.
        """
        self._lock_fd = os.open(self._directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        self._find_locks(self._lock_fd)

    def close(self) -> None:
        """Release the files. Only after LMDB's environment is closed (see ``watch``)."""
        fds = (self._fd, self._lock_fd, self._reader_fd)
        self._fd, self._lock_fd, self._reader_fd = -1, None, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)
        self._forget_locks()

    def _lock(self, deadline: float) -> None:
        wait = _SHORTEST_WAIT_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise GateTimeout from None
            time.sleep(wait)
            wait = min(wait * 1.5, _LONGEST_WAIT_S)

    def _find_locks(self, lock_fd: int) -> None:
        """Open the semaphores that lock.mdb names, if LMDB was built with them."""
        self._forget_locks()
        header = os.pread(lock_fd, _HEADER_BYTES, 0)
        self._writer_lock = Semaphore.named_in(header, _WRITER_SEMAPHORE)
        self._reader_lock = Semaphore.named_in(header, _READER_SEMAPHORE)
        if self._reader_lock and self._reader_fd is None:
            path = self._directory / READER_GATE_NAME
            self._reader_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _forget_locks(self) -> None:
        for lock in (self._writer_lock, self._reader_lock):
            if lock:
                lock.close()
        self._writer_lock = self._reader_lock = None

    def _repair(self, lock: Semaphore | None) -> None:
        if lock and lock.release_abandoned():
            self.repairs += 1


class Semaphore:
    """A POSIX semaphore that exists: one of LMDB's locks."""

    def __init__(self, lib: ctypes.CDLL, handle: int) -> None:
        self._lib = lib
        self._handle = handle

    @classmethod
    def named_in(cls, header: bytes, name: re.Pattern[bytes]) -> Semaphore | None:
        """The one that the header of lock.mdb names; None if it names none."""
        found = name.search(header)
        if not found:
            return None
        lib = ctypes.CDLL(None, use_errno=True)
        lib.sem_open.restype = ctypes.c_void_p
        for function in (lib.sem_trywait, lib.sem_post, lib.sem_close):
            function.argtypes = [ctypes.c_void_p]
        handle = lib.sem_open(found.group(), 0)
        # SEM_FAILED is a null pointer with glibc and -1 on macOS.
        return None if handle in (None, ctypes.c_void_p(-1).value) else cls(lib, handle)

    def release_abandoned(self) -> bool:
        """Give it back if it is taken; whether it was. Only for who knows its owner to be dead."""
        taken = bool(self._lib.sem_trywait(self._handle))
        if taken and ctypes.get_errno() != errno.EAGAIN:
            return False
        self._lib.sem_post(self._handle)
        return taken

    def close(self) -> None:
        """Let go of it; it stays as it is for all others."""
        self._lib.sem_close(self._handle)
