"""The named points at which the crash tests kill: that they are all passed, and that a call that
fails at one costs a miss or a drop, and nothing else.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from crash import ROOT
from crash.failpoints import ERRORS, IN_MEMORY, POINTS, Failpoint, arm
from crash.full import FullParty
from crash.load import Prompt

CAP = 64 << 20

COUNT = """
import json, sys
from pathlib import Path
import tests.crash
from tests.crash import failpoints, load
counts = failpoints.count_all()
load.standard(Path(sys.argv[1]))
print(json.dumps(counts))
"""

# Where a call can fail. Errors of opening are told to whoever opens; between two steps in memory
# there is nothing that fails.
RAISING = [name for name in POINTS if not name.startswith(("open.", *IN_MEMORY))]
# The numbers that are read between the calls come from the store too, and hide no plain fault.
ACTIONS = {"commit.done": "lmdb"}


def test_every_point_is_passed_by_the_standard_load(tmp_path):
    """If this failed, a renamed function would silently disable the kills at it."""
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert [name for name in POINTS if not counts.get(name)] == []


def prompts(first, n):
    return [Prompt(7, i).tokens() for i in range(first, first + n)]


@pytest.mark.parametrize("name", RAISING)
def test_a_call_that_fails_costs_a_miss_or_a_drop(tmp_path, name, caplog):
    """If this failed, one failed call would end the server, leak memory or stop the writer."""
    caplog.set_level(logging.CRITICAL, "tieredkv")
    actions = sorted(ERRORS)
    action = ACTIONS.get(name, actions[RAISING.index(name) % len(actions)])
    party = FullParty(tmp_path, CAP)
    known = [tokens for tokens in prompts(0, 12) if party.store(tokens)]
    undo = arm(Failpoint(name, 2, action))
    try:
        for tokens in prompts(12, 6):
            party.store(tokens)
        found = [party.find(tokens) for tokens in known]
    finally:
        undo()
    assert all(f.is_right for f in found)
    assert sum(f.n_tokens != len(tokens) for f, tokens in zip(found, known, strict=True)) <= 1
    goes_on_as_ever(party, known)


def goes_on_as_ever(party, known):
    """Everything works that worked before, and nothing is left of what failed."""
    # What was recorded as a use meanwhile is written first.
    for tokens in prompts(40, 3):
        assert party.store(tokens)
        known.append(tokens)
    for tokens in known:
        found = party.find(tokens)
        assert (found.n_tokens, found.is_right) == (len(tokens), True)
    assert party.problems() == []
    stats = party.cache.stats()
    assert (stats.queue_blocks, stats.queue_bytes) == (0, 0)
    party.cache.trim_to(n_bytes=0)
    assert party.cache.nbytes == 0
    party.close()
