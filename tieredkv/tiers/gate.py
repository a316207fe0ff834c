"""One writer at a time across processes, however the last one died.

LMDB has a writer lock of its own. Where that is a robust mutex (Linux) the next writer inherits
it from a dead one; where it is a POSIX semaphore (macOS) a writer killed inside a transaction
hangs all others for good. The kernel drops a ``flock`` with its owner, so whoever holds the gate
and finds the semaphore taken knows that its owner is dead, and may give it back.
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
LOCK_NAME = "lock.mdb"
# In the gate file: tells a directory of ours from one that holds somebody else's data.mdb.
MARK = b"tieredkv cold tier\n"

_SHORTEST_WAIT_S = 0.0005
_LONGEST_WAIT_S = 0.01
# LMDB names its writer semaphore in the header of lock.mdb, which is far shorter than this.
_HEADER_BYTES = 512
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
        self.repairs = 0
        if not os.fstat(self._fd).st_size:
            os.pwrite(self._fd, MARK, 0)

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
                self._repair()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def watch(self) -> None:
        """Have every later ``hold`` repair LMDB's writer lock; call once its environment is open.

        The descriptor stays open as long as the environment does: POSIX drops all of a process's
        record locks on a file, LMDB's own on lock.mdb among them, when *any* descriptor of it is
        closed. Hence also ``close`` only after the environment's.
        """
        self._lock_fd = os.open(self._directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Release the files. Only after LMDB's environment is closed (see ``watch``)."""
        fds, self._fd, self._lock_fd = (self._fd, self._lock_fd), -1, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)

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

    def _repair(self) -> None:
        if self._lock_fd is None:
            return
        found = _WRITER_SEMAPHORE.search(os.pread(self._lock_fd, _HEADER_BYTES, 0))
        if found and release_abandoned(found.group()):
            self.repairs += 1


def release_abandoned(name: bytes) -> bool:
    """Give back the POSIX semaphore ``name`` if it is taken; whether it was.

    Only for the holder of the gate, who knows that no living process can have taken it.
    """
    lib = ctypes.CDLL(None, use_errno=True)
    lib.sem_open.restype = ctypes.c_void_p
    for function in (lib.sem_trywait, lib.sem_post, lib.sem_close):
        function.argtypes = [ctypes.c_void_p]
    semaphore = lib.sem_open(name, 0)
    # SEM_FAILED is a null pointer with glibc and -1 on macOS.
    if semaphore in (None, ctypes.c_void_p(-1).value):
        return False
    try:
        taken = bool(lib.sem_trywait(semaphore))
        if taken and ctypes.get_errno() != errno.EAGAIN:
            return False
        lib.sem_post(semaphore)
        return taken
    finally:
        lib.sem_close(semaphore)
