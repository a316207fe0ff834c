"""Bytes that really go to a disk, as far as the system tells."""

from __future__ import annotations

from pathlib import Path

# What this thread has passed to write calls. The file's other count, ``write_bytes``, is of whole
# folios of the page cache, of which the disk gets a part.
_COUNTERS = Path("/proc/thread-self/io")
_FIELD = b"wchar: "


def thread_bytes() -> int | None:
    """Bytes that the calling thread has written to files so far; None where nobody counts them.

    LMDB writes each page that a transaction changed once, when it commits, and the sync behind it
    takes just those to the disk. So what this grows by over a commit is what the disk gets of it,
    but for what the file system adds.
    """
    try:
        lines = _COUNTERS.read_bytes().splitlines()
    except OSError:
        return None
    return next((int(x.removeprefix(_FIELD)) for x in lines if x.startswith(_FIELD)), None)
