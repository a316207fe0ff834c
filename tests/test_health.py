"""What is found out about a data file before it is mapped, and where a damaged one goes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import lmdb
import pytest
from cold_blocks import PlainCodec, blocks

from tieredkv.tiers import health
from tieredkv.tiers.cold import ColdTier

HOLD_OPEN = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=16)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path):
    """The directory of a closed store with some blocks in it."""
    tier = ColdTier(tmp_path / "cold", 64 << 20, PlainCodec())
    for i in range(40):
        assert tier.put(blocks(range(100 * i, 100 * i + 8), n_bytes=70_000)) == 2
    tier.close()
    return tmp_path / "cold"


def cut(directory, n_bytes):
    data = directory / health.DATA_NAME
    os.truncate(data, data.stat().st_size - n_bytes)


def test_a_sound_store_has_no_finding(store):
    """If this failed, every start would throw the store away."""
    assert health.finding(store) is None


def test_a_directory_without_a_store_has_no_finding(tmp_path):
    """If this failed, the first start would report damage."""
    assert health.finding(tmp_path) is None


def test_the_header_agrees_with_lmdb(store):
    """If this failed, the size check would compare with the wrong number."""
    header = health.read_header(store / health.DATA_NAME)
    with lmdb.open(str(store), readonly=True, max_dbs=16) as env:
        info, stat = env.info(), env.stat()
    assert (header.last_page, header.page_bytes) == (info["last_pgno"], stat["psize"])
    assert header.n_bytes == (store / health.DATA_NAME).stat().st_size


def test_a_file_without_a_header_is_found(store):
    """If this failed, LMDB would refuse the file at every start and the tier stay off."""
    (store / health.DATA_NAME).write_bytes(b"\0" * 8192)
    assert "header" in health.finding(store)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_found(store, part):
    """If this failed, opening the store would end the server with SIGBUS."""
    size = (store / health.DATA_NAME).stat().st_size
    cut(store, int(size * part) & ~4095)
    assert health.finding(store)


def test_unused_pages_missing_at_the_end_are_no_damage(store):
    """If this failed, a file that LMDB left short by a freed page would be thrown away."""
    # More commits, so that the pages freed by the first are known to be unused, and the list of
    # them has itself moved away from the end.
    tier = ColdTier(store, 64 << 20, PlainCodec())
    tier.trim_to(0)
    for first in (0, 100, 200):
        tier.put(blocks(range(first, first + 4)))
    tier.close()
    whole = (store / health.DATA_NAME).stat().st_size
    cut(store, 4096)
    assert health.finding(store) is None
    health.fill_up(store)
    assert (store / health.DATA_NAME).stat().st_size == whole


def test_looking_changes_nothing(store):
    """If this failed, a report on a running server's store could lengthen its file."""
    cut(store, 4096)
    before = (store / health.DATA_NAME).read_bytes()
    health.finding(store)
    assert (store / health.DATA_NAME).read_bytes() == before


def test_a_zeroed_page_is_found(store):
    """If this failed, the first search through that page would end the server with SIGABRT."""
    page = 4096
    data = bytearray((store / health.DATA_NAME).read_bytes())
    # Leaf and branch pages carry flags 2 and 1 at byte 10; zero the rows, leave the headers.
    for start in range(2 * page, len(data), page):
        if data[start + 10] in (1, 2):
            data[start : start + page] = bytes(page)
    (store / health.DATA_NAME).write_bytes(data)
    assert health.finding(store)


def test_a_damaged_index_record_is_found(store):
    """If this failed, a damaged record would be found only when its prompt is asked for."""
    with lmdb.open(str(store), max_dbs=16) as env:
        index = env.open_db(b"index", create=False)
        with env.begin(write=True) as txn:
            key, value = next(iter(txn.cursor(index)))
            txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=index)
    assert "CRC" in health.finding(store)


def test_the_check_stays_within_its_time(store):
    """If this failed, every start of a server would be noticeably later."""
    started = time.monotonic()
    health.finding(store)
    # 0.1 s on an idle machine; the bound only catches an import of something heavy.
    assert time.monotonic() - started < 2


def test_the_walk_imports_nothing_of_the_package(store):
    """If this failed, the walk would load mlx, which takes seconds and a device."""
    program = (
        "import runpy, sys; sys.argv[:] = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('tieredkv', 'mlx', 'numpy')])"
    )
    command = [sys.executable, "-c", program, health.__file__, str(store), "rows"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_store_open_elsewhere_is_in_use(store):
    """If this failed, a store would be moved away from under a running server."""
    assert not health.in_use(store)
    command = [sys.executable, "-c", HOLD_OPEN, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"open\n"
        assert health.in_use(store)
        other.stdin.close()
    assert not health.in_use(store)


def test_a_quarantined_store_is_whole_and_the_directory_free(store):
    """If this failed, the damaged data would be lost, or met again at the next start."""
    before = (store / health.DATA_NAME).read_bytes()
    aside = health.quarantine(store)
    assert (aside / health.DATA_NAME).read_bytes() == before
    assert aside.stat().st_mode & 0o777 == 0o700
    assert not (store / health.DATA_NAME).exists()
    assert not (store / health.LOCK_NAME).exists()


def test_only_the_latest_quarantine_is_kept(store):
    """If this failed, repeated damage would fill the disk beyond any cap."""
    health.quarantine(store)
    (store / health.DATA_NAME).write_bytes(b"later")
    aside = health.quarantine(store)
    assert [aside] == list(store.glob(health.QUARANTINE_PREFIX + "*"))
    assert (aside / health.DATA_NAME).read_bytes() == b"later"
