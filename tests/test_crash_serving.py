"""The short form of the faults while a real server answers; ``make crash`` runs the long one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from crash import serving
from crash.failpoints import ERRORS, IN_MEMORY, POINTS, Failpoint
from crash.serving import Conversation, Oracle, Tally, ask
from server import Server

FAILURES = 14
# In the middle of a commit, and of a promote: the server dies of each.
KILLS = (Failpoint("commit.ready", 1), Failpoint("promote.decode", 1))


def failures() -> list[Failpoint]:
    """A sample of the points, each with another error; opening again is always among them."""
    dice = random.Random(4)
    names = [n for n in POINTS if n not in IN_MEMORY and not n.startswith("open")]
    names = ["open.map", *dice.sample(names, FAILURES - 1)]
    actions = sorted(ERRORS)
    return [Failpoint(n, dice.choice((1, 2)), actions[i % 4]) for i, n in enumerate(names)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, the store and the log."""
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def conversations(folder: Path) -> list[Conversation]:
    """Conversations and what a server without a cache answers in them."""
    return serving.asked(folder, 8, seed=3)


@pytest.fixture(scope="module")
def tally(folder: Path, conversations: list[Conversation]) -> Tally:
    """What came of all faults and kills."""
    return serving.run(folder, failures(), KILLS, conversations)


def test_no_fault_of_the_store_is_seen_by_a_client(tally: Tally) -> None:
    """If this failed, a full disk or a bug in the cache would end answers, or change them."""
    assert tally.problems == []
    assert (tally.wrong, tally.failed) == (0, 0)
    # Some points are only passed now and then.
    assert len(tally.struck) > FAILURES * 2 // 3


def test_a_killed_server_goes_on_with_what_it_had(tally: Tally) -> None:
    """If this failed, a crash in the middle of a write or a promote would cost the store."""
    assert tally.killed.keys() == {failpoint.name for failpoint in KILLS}
    assert tally.warm > 0


def test_most_prompts_were_known(tally: Tally) -> None:
    """If this failed, the answers would be right because nothing was cached."""
    assert tally.known > tally.asked // 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    if os.geteuid() or sys.platform != "linux":
        pytest.skip("mounting a small file system takes root on Linux")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill_up(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_server_whose_disk_fills_up_answers_on(
    folder: Path, conversations: list[Conversation], small_disk: Path
) -> None:
    """If this failed, a full disk would be SIGBUS in the server, or last until a restart."""
    cold, log = small_disk / "cold", folder / "small-disk-log"
    flags = ("--prompt-cache-bytes", "2MiB", "--prompt-cache-reserve", "0")
    with Server(folder / "model", cold, log, *flags) as server:
        answers = [ask(server, c.first) for c in conversations[:2]]
        fill_up(small_disk / "ballast")
        answers += [ask(server, c.first) for c in conversations]
        assert "No space left on device" in log.read_text()
        (small_disk / "ballast").unlink()
        answers += [ask(server, conversations[0].then) for _ in range(2)]
        assert [answer.fault for answer in answers if answer.fault] == []
        assert answers[-1].is_known
        assert server.health() == 200


def test_another_answer_is_noticed(folder: Path, conversations: list[Conversation]) -> None:
    """If this failed, no wrong answer would ever be counted."""
    question = conversations[0].first
    other = replace(question, answer=(*question.answer[:-1], question.answer[-1] + 1))
    assert len({c.first.answer for c in conversations}) > 1
    with Oracle(folder / "model") as oracle:
        assert ask(oracle.server, question).fault == ""
        assert ask(oracle.server, other).fault.startswith("wrong")
