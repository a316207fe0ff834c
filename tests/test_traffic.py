"""What is said to go to the disk is what goes there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cold_blocks import NAMESPACE, PlainCodec, blocks_of, chain

from tieredkv.cli import main
from tieredkv.tiers import cold
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.traffic import thread_bytes

N_BYTES = 200_000


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ColdTier]:
    opened = ColdTier(tmp_path / "cold", 64 << 20, PlainCodec())
    opened.register(NAMESPACE)
    yield opened
    opened.close()


def put(tier: ColdTier, start: int, n_blocks: int = 4) -> None:
    blocks = blocks_of(chain(range(start, start + 4 * n_blocks)), n_bytes=N_BYTES)
    assert tier.put(blocks) == n_blocks


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it for us")
def test_the_count_is_of_bytes_that_this_thread_writes_to_files(tmp_path: Path) -> None:
    """If it failed, the count would be of reads, of other threads or of something else."""
    before = thread_bytes()
    (tmp_path / "file").write_bytes(bytes(123_457))
    (tmp_path / "file").read_bytes()
    after = thread_bytes()

    assert before is not None
    assert after is not None
    assert after - before == 123_457


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it for us")
def test_a_commit_counts_all_pages_that_it_writes(tier: ColdTier) -> None:
    """If it failed, the write amplification would leave out rows, or count a page many times."""
    put(tier, 0)
    new = tier.counters()
    tier.touch([chain(range(16)).keys[-1]])
    touched = tier.counters()

    assert new.bytes_written == 4 * N_BYTES
    # Whole pages for each piece, and the rows' pages once for all four blocks.
    assert 1 < new.disk_bytes / new.bytes_written < 1.2
    assert 0 < touched.disk_bytes - new.disk_bytes <= 16 * os.sysconf("SC_PAGE_SIZE")
    assert touched.bytes_written == new.bytes_written


def test_where_nobody_counts_it_is_our_own_count(
    tier: ColdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it failed, macOS would be told that nothing is written."""
    monkeypatch.setattr(cold, "thread_bytes", lambda: None)
    put(tier, 0)

    assert tier.counters().disk_bytes == tier.counters().page_bytes_written > 4 * N_BYTES


def test_the_store_remembers_what_went_into_it(
    tier: ColdTier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If it failed, nobody could tell the wear of a disk but from a running server's counters."""
    for i in range(3):
        put(tier, 100 * i)
    # What the last commit took is noted by the next one.
    tier.touch([chain(range(16)).keys[-1]])
    count = tier.counters()
    usage = tier.usage()

    assert usage.encoded_bytes == count.bytes_written == 12 * N_BYTES
    assert usage.encoded_bytes < usage.disk_bytes <= count.disk_bytes
    assert main(["stats", "--dir", str(tmp_path / "cold")]) == 0
    assert "MB written to disk for 2.4 MB of new blocks" in capsys.readouterr().out


def test_two_tiers_on_one_store_add_to_one_total(tier: ColdTier, tmp_path: Path) -> None:
    """If it failed, servers that share a directory would forget each other's writes."""
    other = ColdTier(tmp_path / "cold", 64 << 20, PlainCodec())
    put(tier, 0)
    put(other, 100)
    for each in (tier, other):
        each.touch([chain(range(16)).keys[-1]])

    assert tier.usage().encoded_bytes == 8 * N_BYTES
    assert tier.counters().bytes_written == other.counters().bytes_written == 4 * N_BYTES
    other.close()
