"""A store that nobody touched is opened without being looked through."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cold_blocks import PlainCodec, blocks_of, chain

from tieredkv.tiers import health, stamp
from tieredkv.tiers.cold import ColdTier

CAP = 64 << 20
BLOCKS = blocks_of(chain(range(40)), 2000)

PROGRAM = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from cold_blocks import PlainCodec, blocks_of, chain
from tieredkv.tiers.cold import ColdTier
tier = ColdTier(Path(sys.argv[1]), 64 << 20, PlainCodec())
tier.put(blocks_of(chain(range(40)), 2000))
print("stored", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cold directory whose owner was killed."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cold")]
    owner = subprocess.Popen(
        command,
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"stored\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    return tmp_path / "cold"


class Looks:
    """How often a store is looked through while this is in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        finding = health.finding

        def counted(directory: Path) -> str | None:
            self.n += 1
            return finding(directory)

        monkeypatch.setattr(health, "finding", counted)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def n_blocks(folder: Path) -> int:
    tier = ColdTier(folder, CAP, PlainCodec())
    try:
        assert tier.check() == []
        return len(tier.load([b.key for b in BLOCKS]))
    finally:
        tier.close()


def test_after_a_kill_and_after_a_close_it_is_opened_at_once(folder: Path, looks: Looks) -> None:
    """The larger the store, the longer a restart would take."""
    assert [n_blocks(folder) for _ in range(3)] == [len(BLOCKS)] * 3
    assert looks.n == 0


def test_after_any_write_of_others_it_is_looked_through(folder: Path, looks: Looks) -> None:
    """Damage that isn't found before the store is opened can end the process."""
    with (folder / "data.mdb").open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(byte)
    assert n_blocks(folder) == len(BLOCKS)
    assert looks.n == 1
    os.truncate(folder / "data.mdb", (folder / "data.mdb").stat().st_size // 2)
    assert n_blocks(folder) == 0
    assert looks.n == 2


def test_after_a_start_of_the_machine_it_is_looked_through(
    folder: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut left on the disk isn't what the processes saw."""
    monkeypatch.setattr(stamp, "_boot", lambda: b"another boot")
    assert n_blocks(folder) == len(BLOCKS)
    assert looks.n == 1


def test_a_copy_is_looked_through(folder: Path, looks: Looks) -> None:
    """The note is about a file, not about its content."""
    copied = folder.with_name("copied")
    shutil.copytree(folder, copied, copy_function=shutil.copy2)
    assert n_blocks(copied) == len(BLOCKS)
    assert looks.n == 1


@pytest.mark.parametrize("content", [b"", b"\0" * 100, None], ids=["empty", "zeros", "absent"])
def test_without_a_sound_note_it_is_looked_through(
    folder: Path, looks: Looks, content: bytes | None
) -> None:
    """A note that was cut off in the middle of being written says nothing."""
    note = folder / stamp.STAMP_NAME
    if content is None:
        note.unlink()
    else:
        note.write_bytes(content)
    assert n_blocks(folder) == len(BLOCKS)
    assert looks.n == 1


def test_where_boots_have_no_names_it_is_looked_through(
    folder: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two boots without a name would look alike."""
    monkeypatch.setattr(stamp, "_boot", lambda: b"")
    assert [n_blocks(folder) for _ in range(2)] == [len(BLOCKS)] * 2
    assert looks.n == 2


def test_a_store_that_was_opened_to_be_mended_is_looked_through(folder: Path, looks: Looks) -> None:
    """What is to be mended may be damaged, and the damage is still there."""
    tier = ColdTier(folder, None, PlainCodec())
    tier.put(blocks_of(chain(range(100, 104)), 100))
    tier.close()
    before = looks.n
    assert n_blocks(folder) == len(BLOCKS)
    assert looks.n == before + 1
