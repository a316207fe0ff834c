"""The short form of the kills; ``make crash`` runs the long one."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from cold_blocks import chain, content
from crash import ROOT, posix_lmdb
from crash.kill import MODES, Mode, Round, Tally
from crash.load import Job, Logs, Prompt, judge, open_party, size_of


def is_clean(tally: Tally) -> bool:
    assert tally.is_clean, f"{tally.line()}\n" + "\n".join(tally.problems[:10])
    return True


@pytest.mark.parametrize(
    ("mode", "kills"),
    [pytest.param(mode, n, id=mode.name) for mode, n in zip(MODES, (8, 7, 4, 3), strict=True)],
)
def test_kills_lose_nothing_and_hang_nobody(tmp_path, mode: Mode, kills: int):
    """If this failed, a killed server would lose prompts, give wrong ones, or stop the others."""
    tally = Round(tmp_path, mode, random.Random(3)).run(kills)
    assert is_clean(tally)
    assert tally.kills >= kills
    assert tally.acknowledged
    assert tally.file_per_cap <= 1.0


@pytest.fixture
def as_on_macos():
    """Run a program with LMDB's locks as they are on macOS; the finished process."""
    if posix_lmdb.compiler() is None:
        pytest.skip("there is no C compiler to build LMDB with POSIX semaphores")
    try:
        environment = posix_lmdb.environment()
    except subprocess.CalledProcessError:
        pytest.skip("LMDB with POSIX semaphores could not be built: no package index, or headers")

    def run(*arguments):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )

    return run


KILLS = """
import random, sys
from pathlib import Path
from tests.crash import kill, posix_lmdb
assert posix_lmdb.is_in_use()
tally = kill.Round(Path(sys.argv[1]), kill.MODES[0], random.Random(5)).run(15)
print(tally.line(), *tally.problems[:10], sep="\\n")
sys.exit(not tally.is_clean)
"""


def test_kills_on_the_lock_path_of_macos(tmp_path, as_on_macos):
    """If this failed, a writer killed on macOS would hang every other one for good."""
    done = as_on_macos("-c", KILLS, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_locks_left_by_the_dead_on_macos_hold_up_nobody(tmp_path, as_on_macos):
    """If this failed, a server killed at the wrong moment would stop all others on macOS, and
    also the next one to start.
    """
    done = as_on_macos("-m", "tests.crash.abandoned", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_harness_sees_what_is_lost_and_what_is_wrong(tmp_path):
    """If this failed, the kills could lose or mix up prompts and nobody would notice."""
    logs = Logs(tmp_path)
    job = Job(tmp_path / "cold", tmp_path, 64 << 20, "cold", 0, 1, keeps=True)
    party = open_party("cold", job.directory, job.cap_bytes)
    for prompt in (Prompt(1, 0), Prompt(1, 5)):
        assert party.store(prompt.tokens())
        logs.acknowledge(0, prompt)
    party.close()
    assert (judge(job).acknowledged, judge(job).lost) == (2, 0)
    logs.acknowledge(0, Prompt(1, 9))
    assert judge(job).lost == 1
    key = chain(Prompt(1, 0).tokens()).keys[-1]
    block = content(key, size_of(key))[:200]
    data = (job.directory / "data.mdb").read_bytes()
    (job.directory / "data.mdb").write_bytes(data.replace(block, bytes(len(block))))
    verdict = judge(job)
    assert (verdict.lost, verdict.wrong) == (2, 0)
