"""The short form of the damages; ``make crash`` runs the long one. And files that aren't there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cold_blocks import PlainCodec, blocks, chain
from crash import ROOT, damage
from crash.damage import DAMAGES

from tieredkv.tiers import health
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.ledger import DATABASES

CAP = 64 << 20
COUNT = 3 * len(DAMAGES)


@pytest.fixture(scope="module")
def tally() -> damage.Tally:
    """What came of all damages, several times each."""
    with tempfile.TemporaryDirectory(dir=damage.fast_folder()) as folder:
        return damage.run(range(COUNT), Path(folder), seed=2)


def test_damage_is_never_an_answer_and_never_the_end_of_the_server(tally):
    """If this failed, a bad disk would change answers, or end the server with a signal."""
    assert tally.bad == []
    assert tally.outcomes.total() == COUNT


def test_damage_is_detected(tally):
    """If this failed, the damages would not reach what is read, and prove nothing."""
    assert tally.outcomes["detected"] > COUNT // 4
    assert tally.by_damage["truncate"]["detected"]
    assert tally.by_damage["lengthen"] == {"harmless": COUNT // len(DAMAGES)}


OTHER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from cold_blocks import PlainCodec, blocks, chain
from tieredkv.tiers.cold import ColdTier
tier = ColdTier(Path(sys.argv[1]), 1 << 26, PlainCodec())
assert tier.put(blocks(range(100, 108))) == 2
print("open", flush=True)
sys.stdin.readline()
assert tier.lookup(chain(range(50, 58))) == 2
assert tier.put(blocks(range(200, 208))) == 2
print(tier.counters().faults)
"""


def test_a_lock_file_removed_under_a_running_tier_parts_nobody(tmp_path):
    """If this failed, two servers would each use pages again that the other still reads."""
    tier = ColdTier(tmp_path, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    (tmp_path / health.LOCK_NAME).unlink()
    command = [sys.executable, "-c", OTHER, str(tmp_path), str(ROOT / "tests")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "open\n"
        assert tier.put(blocks(range(50, 58))) == 2
        assert tier.counters().faults == {"lost": 1}
        said, _ = other.communicate("go on\n")
    assert said == "{}\n"
    assert all(tier.lookup(chain(range(i, i + 8))) == 2 for i in (0, 50, 100, 200))
    assert tier.check() == []
    tier.close()


AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from caches import MODEL, holds, make
from tieredkv import TieredPromptCache
os.setgid(65534)
os.setuid(65534)
with TieredPromptCache(Path(sys.argv[1])) as cache:
    tokens = list(range(20))
    cache.insert_cache(MODEL, tokens, make(tokens))
    caches, rest = cache.fetch_nearest_cache(MODEL, [*tokens, 7])
    assert rest == [7] and holds(caches, tokens)
    assert cache.stats().faults == {"cold_dir": 1}, cache.stats().faults
"""


@pytest.mark.parametrize("mode", [0o700, 0o555])
def test_a_directory_of_another_user_leaves_the_memory_tier(tmp_path, mode):
    """If this failed, a server would not start on it, or break another user's store."""
    if os.geteuid():
        pytest.skip("only root may become another user")
    folder = tmp_path / "cold"
    ColdTier(folder, CAP, PlainCodec()).close()
    for path in (folder, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path.is_relative_to(tmp_path.parent.parent):
            path.chmod(0o755)
    folder.chmod(mode)
    before = (folder / health.DATA_NAME).read_bytes()
    command = [sys.executable, "-c", AS_NOBODY, str(folder), str(ROOT / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("serving from memory only") == 1
    assert (folder / health.DATA_NAME).read_bytes() == before


def test_the_walk_knows_our_databases():
    """If this failed, sound stores would be set aside, or damaged ones refused."""
    assert {name.encode() for name in DATABASES} == health.OURS


def test_a_file_without_one_of_our_databases_is_set_aside(tmp_path):
    """If this failed, a flipped bit in a name would turn the tier off until somebody deletes it."""
    tier = ColdTier(tmp_path, CAP, PlainCodec())
    tier.put(blocks(range(8)))
    tier.close()
    data = (tmp_path / health.DATA_NAME).read_bytes()
    (tmp_path / health.DATA_NAME).write_bytes(data.replace(b"order", b"ordes"))
    tier = ColdTier(tmp_path, CAP, PlainCodec())
    assert tier.put(blocks(range(8))) == 2
    assert len(list(tmp_path.glob("quarantine-*"))) == 1
    tier.close()
