"""What the cold tier costs its disk, and its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import record
from tieredkv import Namespace, keys
from tieredkv.codec import PlaneCodec
from tieredkv.core import Block, TensorSpec
from tieredkv.tiers.cold import ColdTier

_DICE = np.random.default_rng(1)
# A block of a small model once encoded; it doesn't shrink any further.
BLOCK_BYTES = 1_000_000
ROOT = keys.namespace_key(Namespace("bench"))


def chain_of(n_blocks: int, n_bytes: int) -> list[Block]:
    """A prompt of so many blocks of noise."""
    c = keys.chain(ROOT, _DICE.integers(0, 50_000, n_blocks * 16), 16)
    spec = (TensorSpec("uint8", (1, 1, 1, n_bytes)),)
    return [
        Block(
            ROOT,
            c.parent(i),
            c.keys[i],
            c.tokens_of(i),
            spec,
            (_DICE.integers(0, 256, spec[0].shape, np.uint8),),
        )
        for i in range(len(c.keys))
    ]


DISKS = Path("/proc/diskstats")


def written_bytes(path: Path) -> int:
    """What was written so far to the disk that ``path`` is on, by all processes.

    A process' own count is of whole folios of the page cache, of which the disk gets a part.
    """
    os.sync()
    device = path.stat().st_dev
    for line in DISKS.read_text(encoding="ascii").splitlines():
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
            return int(fields[9]) * 512
    pytest.skip(f"{path} is on no disk that the system counts")


@pytest.mark.skipif(not DISKS.exists(), reason="only Linux counts it for us")
def test_churn(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Ten times as much as fits: bytes written over those of new blocks, file over live bytes."""
    cap = 128 << 20
    tier = ColdTier(tmp_path / "cold", cap, PlaneCodec())
    prompts = [chain_of(8, BLOCK_BYTES) for _ in range(4)]

    def churn() -> None:
        for i in range(10 * cap // (8 * BLOCK_BYTES)):
            fresh = prompts[i % 4]
            c = keys.chain(ROOT, _DICE.integers(0, 50_000, 8 * 16), 16)
            tier.put(
                [
                    Block(ROOT, c.parent(j), c.keys[j], c.tokens_of(j), b.specs, b.tensors)
                    for j, b in enumerate(fresh)
                ]
            )

    before = written_bytes(tmp_path)
    benchmark.pedantic(churn, rounds=1)
    written = written_bytes(tmp_path) - before
    encoded = tier.counters().bytes_written
    counted = tier.counters().disk_bytes
    file_bytes = (tmp_path / "cold" / "data.mdb").stat().st_size
    benchmark.extra_info |= {
        "bytes written / encoded bytes of new blocks": written / encoded,
        "our count of bytes written / the disk's": counted / written,
        "file / live bytes": file_bytes / tier.n_bytes,
        "file / cap": file_bytes / cap,
    }
    tier.close()
    assert file_bytes <= cap


_FILL = """
import sys
from pathlib import Path
from bench.bench_disk import chain_of
from tieredkv.codec import PlaneCodec
from tieredkv.tiers.cold import ColdTier
tier = ColdTier(Path(sys.argv[1]), 4 << 30, PlaneCodec())
while tier.n_blocks < int(sys.argv[2]):
    tier.put([b for _ in range(16) for b in chain_of(32, 200)])
"""


def test_open(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """A store of 100,000 blocks that another process has filled, against one of 1,000."""
    for n in (1_000, 100_000):
        subprocess.run([sys.executable, "-c", _FILL, str(tmp_path / str(n)), str(n)], check=True)

    def opened(n: int) -> None:
        ColdTier(tmp_path / str(n), 4 << 30, PlaneCodec()).close()

    contestants = {
        "100k blocks": lambda: opened(100_000),
        "1k blocks": lambda: opened(1_000),
    }
    record(benchmark, contestants, rounds=5)
    assert benchmark.extra_info["seconds"] <= 0.1
