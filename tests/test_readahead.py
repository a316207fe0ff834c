"""What the kernel is told about pages that are to be read."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tieredkv.tiers import readahead

N_BYTES = 8 << 20


def n_resident(mapped: mmap.mmap) -> int:
    """Pages of a mapping that are in memory."""
    address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    pages = (ctypes.c_ubyte * (-(-len(mapped) // mmap.PAGESIZE)))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(address, len(mapped), ctypes.addressof(pages)) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system can't drop its cache")
def test_what_is_announced_comes_into_memory_before_it_is_read(tmp_path: Path) -> None:
    """If this failed, a promote would wait for the disk page by page."""
    path = tmp_path / "blobs"
    path.write_bytes(os.urandom(N_BYTES))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    half = len(mapped) // 2
    wanted = half // mmap.PAGESIZE * 0.9
    if n_resident(mapped) >= wanted:
        pytest.skip("files of this file system stay in memory")
    readahead.announce([memoryview(mapped)[a + 16 : a + 65000] for a in range(0, half, 65536)])
    deadline = time.monotonic() + 10
    while n_resident(mapped) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_neighbours_are_announced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this failed, each piece of a blob would be a call and a request of its own."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(
        readahead, "_madvise", lambda: lambda start, n, _advice: calls.append((start, n))
    )
    page = mmap.PAGESIZE
    mapped = mmap.mmap(-1, 40 * page)
    view = memoryview(mapped)
    pieces = [view[i * 4 * page + 16 : (i + 1) * 4 * page - 8] for i in (0, 1, 2, 5, 6)]
    readahead.announce(pieces)
    base = calls[0][0]
    assert [(start - base, n) for start, n in calls] == [(0, 12 * page), (20 * page, 8 * page)]
    assert base % page == 0


def test_nothing_to_announce_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this failed, a block that is gone would be an error."""
    monkeypatch.setattr(readahead, "_madvise", lambda: pytest.fail)
    readahead.announce([])
