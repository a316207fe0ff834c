"""The note that a data file is as the last writer left it, so that it needn't be looked through.

A store of 100,000 blocks takes over a second to be looked through before it is opened. That is
spared if the file is the same one, of the same size and modification time, as after the last
commit, and the machine has not been started since: whatever is damaged on a running machine is
written to. A writer that is killed between its commit and its note costs a look.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

STAMP_NAME = "intact"

_LINUX_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# CRC of what follows; device, inode, size and time of the data file; what names this boot.
_STAMP = struct.Struct("<IQQQQ64s")


@cache
def _boot() -> bytes:
    """What is other after each start of the machine; empty if nothing can be found."""
    if _LINUX_BOOT_ID.exists():
        return _LINUX_BOOT_ID.read_bytes().strip()[:64]
    if sys.platform != "darwin":
        return b""
    command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.stdout.strip()[:64] if not done.returncode else b""


def _packed(data: os.stat_result) -> bytes:
    fields = (data.st_dev, data.st_ino, data.st_size, data.st_mtime_ns, _boot())
    body = _STAMP.pack(0, *fields)[4:]
    return struct.pack("<I", zlib.crc32(body)) + body


def is_intact(directory: Path, data_name: str) -> bool:
    """Whether the data file is as the last writer left it. Keep writers out meanwhile."""
    if not _boot():
        return False
    try:
        data = (directory / data_name).stat()
        return (directory / STAMP_NAME).read_bytes() == _packed(data)
    except FileNotFoundError:
        return False


class Stamp:
    """The note in one directory, open for writing. One thread at a time."""

    def __init__(self, directory: Path, data_name: str) -> None:
        self._data = directory / data_name
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(directory / STAMP_NAME, flags, 0o600)

    def write(self) -> None:
        """Note that the data file is as it is. While no other writer may change it.

        If that can't be done the next opener looks through the file.
        """
        with suppress(OSError):
            os.pwrite(self._fd, _packed(self._data.stat()), 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)
