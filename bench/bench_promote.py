"""From a disk whose pages aren't cached to the first new token's keys and values in place."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import Work, nothing
from bench.entries import Entry
from bench.state import SHAPES

N_TOKENS = 2048
ROUNDS = 5


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system can't drop its cache")
@pytest.mark.parametrize("name", ["SmolLM2", "8B"])
def test_promote_from_a_cold_page_cache(
    benchmark: BenchmarkFixture, tmp_path: Path, name: str
) -> None:
    """Against reading as many bytes, as they are stored, from a file of their own."""
    entry = Entry(tmp_path, SHAPES[name], N_TOKENS)
    encoded = tmp_path / "encoded"
    encoded.write_bytes(os.urandom(entry.encoded_bytes))
    ours = warm = pread = float("inf")
    for _ in range(ROUNDS):
        entry.reopen(forget)
        ours = min(ours, _timed(entry.from_cold_tier))
        entry.reopen(lambda _: None)
        warm = min(warm, _timed(entry.from_cold_tier))
        forget(encoded)
        pread = min(pread, _timed(lambda: _read(encoded)))
    entry.cache.close()
    benchmark.pedantic(nothing, rounds=1)
    benchmark.extra_info |= {
        "seconds": ours,
        "ours / pread": ours / pread,
        "ours / warm page cache": ours / warm,
    }


def _timed(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        for at in range(0, size, 1 << 20):
            os.pread(fd, 1 << 20, at)
    finally:
        os.close(fd)
