"""Telling the kernel which parts of a mapped file are about to be read.

Reading a page that isn't cached waits for it, and a blob's pages are asked for a few at a time: the
disk idles between. Told of a whole blob, the kernel reads it in few, large requests.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np

_PAGE = mmap.PAGESIZE


def announce(buffers: Iterable[Any]) -> None:
    """Begin to read the pages of these buffers, which lie in a mapped file, and don't wait for it.

    Only advice: where the system takes none, nothing happens. Any thread may call, as long as the
    buffers stay mapped.
    """
    madvise = _madvise()
    if madvise is None:
        return
    for start, stop in _runs(buffers):
        madvise(start, stop - start, mmap.MADV_WILLNEED)


@cache
def _madvise() -> Any:
    """The system's, which also takes memory that Python hasn't mapped; None if it has none."""
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None or not hasattr(mmap, "MADV_WILLNEED"):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _runs(buffers: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Addresses of the whole pages that buffers lie in, neighbours joined."""
    start = stop = 0
    for buffer in buffers:
        first = int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
        page, end = first // _PAGE * _PAGE, -(-(first + len(buffer)) // _PAGE) * _PAGE
        if page == stop:
            stop = end
            continue
        if stop:
            yield start, stop
        start, stop = page, end
    if stop:
        yield start, stop
