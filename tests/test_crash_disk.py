"""A disk that is full or doesn't answer for a while; ``make crash`` runs the long form."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cold_blocks import PlainCodec, blocks
from crash import ROOT, disk, shim

from tieredkv.tiers.cold import ColdTier

needs_shim = pytest.mark.skipif(bool(shim.why_not()), reason=str(shim.why_not()))


@needs_shim
def test_a_stalled_disk_delays_no_request_and_is_got_over(tmp_path):
    """If this failed, a slow disk would slow down answers, hold memory, or need a restart."""
    report = disk.run("stall", 1.5, tmp_path)
    assert (report.wrong, report.problems) == (0, ())
    assert not report.flushed_meanwhile
    # Scheduling apart: a wait for the disk would take as long as the stall.
    assert report.slow < 0.4
    assert report.slow_worst < 1.3
    assert report.dropped > 0
    assert report.recovered


@needs_shim
def test_a_full_disk_costs_writes_only_and_is_got_over(tmp_path):
    """If this failed, a full disk would end the server, leak memory, or need a restart."""
    report = disk.run("full", 0.5, tmp_path)
    assert (report.wrong, report.problems) == (0, ())
    assert report.dropped > 0
    assert report.recovered


FILL = """
import os, sys
from pathlib import Path
from tests.crash.full import FullParty
from tests.crash.load import Prompt
party = FullParty(Path(sys.argv[1]) / "cold", 64 << 20)
prompts = [Prompt(5, i).tokens() for i in range(30)]
kept = [tokens for tokens in prompts[:10] if party.store(tokens)]
assert len(kept) == 10
ballast = Path(sys.argv[1]) / "ballast"
with open(ballast, "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
assert not all([party.store(tokens) for tokens in prompts[10:]])
assert party.faults().keys() <= {"disk", "disk_full"}, party.faults()
assert all(party.find(tokens).is_right for tokens in prompts)
ballast.unlink()
assert party.store(Prompt(6, 0).tokens())
party.cache.trim_to(n_bytes=0)
assert all(party.find(tokens).n_tokens == len(tokens) for tokens in kept)
assert party.problems() == []
"""


def test_a_file_system_that_fills_up_does_not_end_the_server(tmp_path):
    """If this failed, a write to a full file system would be SIGBUS in the server."""
    if os.geteuid() or sys.platform != "linux":
        pytest.skip("mounting a small file system takes root on Linux")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        command = [sys.executable, "-c", FILL, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert done.returncode == 0, done.stderr


def test_blocks_of_mixed_sizes_do_not_outgrow_the_cap(tmp_path):
    """If this failed, free pages too scattered for a large block would let the file grow on."""
    cap = 4 << 20
    tier = ColdTier(tmp_path, cap, PlainCodec())
    for i in range(500):
        tier.put(blocks([i] * 4, n_bytes=200_000 if i % 20 == 7 else 7_000 + 10 * (i % 97)))
    assert tier.counters().evictions > 100
    assert (tmp_path / "data.mdb").stat().st_size <= cap
    assert tier.check() == []
    tier.trim_to(0)
    assert tier.put(blocks(range(4))) == 1
    tier.close()
