"""Four servers on one cold directory: what one has computed none of the others computes again."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crash import serving
from crash.serving import Answer, Oracle, Question, ask
from server import Server

# Room for the prefix and about half of what is asked.
COLD_BYTES = 6 << 20
# About a thousand tokens, which every question begins with.
PREFIX = {
    "role": "system",
    "content": "".join(f"Berth {i}: the pilot came, fog, nobody moved. " for i in range(27)),
}
PREFIX_TOKENS = 1000
ROUNDS = 3
# A question of a few hundred tokens, in words.
LONG = 80


@dataclass(frozen=True)
class Pool:
    """The servers, their directory, and what a server without a cache answers."""

    servers: tuple[Server, ...]
    folder: Path
    shared: tuple[Question, ...]
    own: tuple[tuple[Question, ...], ...]


def questions(oracle: Oracle, n: int, words: int, dice: random.Random) -> tuple[Question, ...]:
    """So many questions after the prefix."""
    found: list[Question] = []
    while len(found) < n:
        text = " ".join(str(dice.randrange(1000)) for _ in range(words))
        asked = oracle.question([PREFIX, {"role": "user", "content": text}])
        if asked:
            found.append(asked[0])
    return tuple(found)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four servers that have answered nothing yet; the tests go on from each other."""
    root = tmp_path_factory.mktemp("pool")
    model, folder = serving.model(root / "model"), root / "cold"
    flags = ["--prompt-cache-disk-bytes", str(COLD_BYTES), "--prompt-cache-bytes", "8MiB"]
    flags += ["--prompt-cache-reserve", "0"]

    def start(i: int) -> Server:
        return Server(model, folder, root / f"log-{i}", *flags)

    with ThreadPoolExecutor(4) as together:
        starting = [together.submit(start, i) for i in range(4)]
        with Oracle(model) as oracle:
            dice = random.Random(5)
            shared = questions(oracle, 4, 4, dice)
            own = tuple(questions(oracle, ROUNDS, LONG, dice) for _ in range(4))
        servers = tuple(s.result() for s in starting)
    yield Pool(servers, folder, shared, own)
    for server in servers:
        server.kill()


def tieredkv(*arguments: object) -> Any:
    """What a command says, as JSON; it must succeed."""
    command = [sys.executable, "-m", "tieredkv", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def stored(folder: Path) -> Any:
    """What is in the directory once nobody writes any more."""
    deadline, seen, now = time.monotonic() + 30, None, tieredkv("stats", "--dir", folder)
    while seen != now:
        assert time.monotonic() < deadline
        time.sleep(0.3)
        seen, now = now, tieredkv("stats", "--dir", folder)
    return now


def test_the_others_have_the_prefix_from_disk(pool: Pool) -> None:
    """If this failed, each server of a pool would compute the same system prompt for itself."""
    first, *others = pool.servers
    assert ask(first, pool.shared[0]) == Answer()
    (alone,) = stored(pool.folder)["namespaces"]
    for server, question in zip(others, pool.shared[1:], strict=True):
        reply = server.post(serving.body(question.messages))
        assert tuple(step["id"] for step in reply.logprobs) == question.answer
        assert reply.n_cached >= 0.95 * PREFIX_TOKENS
        # All that isn't the prefix is the question and the template's markers.
        assert reply.n_prompt - reply.n_cached < 40
    (together,) = stored(pool.folder)["namespaces"]
    # The full blocks are there once; each question adds a tail or two.
    assert alone["blocks"] >= PREFIX_TOKENS // 256
    assert together["blocks"] <= alone["blocks"] + 3 * 2


def until_it_dies(server: Server, asked: tuple[Question, ...]) -> list[Answer]:
    """Ask again and again, and kill the server in the middle of an answer."""
    threading.Timer(0.15, server.process.kill).start()
    answers = []
    for question in itertools.cycle(asked):
        answers.append(ask(server, question))
        if answers[-1].fault:
            return answers
    return answers


def test_one_that_is_killed_costs_the_others_nothing(pool: Pool) -> None:
    """If this failed, one crash would be everybody's, or the shared store's."""
    *others, doomed = pool.servers
    together = threading.Barrier(4)

    def serve(i: int) -> list[Answer]:
        server, asked = pool.servers[i], pool.own[i]
        answers = [ask(server, asked[0])]
        together.wait(60)
        if server is doomed:
            return answers + until_it_dies(server, asked)
        return answers + [ask(server, question) for question in asked[1:]]

    with ThreadPoolExecutor(4) as threads:
        *answers, last = threads.map(serve, range(4))
    assert doomed.process.wait(30) == -signal.SIGKILL
    assert [a.fault for each in answers for a in each if a.fault] == []
    assert all(a.n_cached >= 0.95 * PREFIX_TOKENS for each in answers for a in each)
    assert [a.fault[:6] for a in last if a.fault] == ["failed"]
    assert [server.health() for server in others] == [200] * 3


def test_what_they_share_is_whole_and_within_its_cap(pool: Pool) -> None:
    """If this failed, servers would count each other's blocks wrongly, or outgrow the cap."""
    stats = stored(pool.folder)
    assert stats["cap_bytes"] == COLD_BYTES
    assert stats["live_bytes"] <= stats["file_bytes"] <= COLD_BYTES
    (namespace,) = stats["namespaces"]
    assert namespace["blocks"] == stats["blocks"]
    assert tieredkv("verify", "--dir", pool.folder)["problems"] == []


def test_each_of_them_has_evicted_and_none_had_a_fault(pool: Pool) -> None:
    """If this failed, the cap would not have been tried, or the crash have been noticed."""
    ended = []
    for server in pool.servers[:3]:
        assert server.stop() == 0
        ended.append(server.log.read_text().rpartition("tieredkv: ended with")[2])
    assert all("faults={}" in stats for stats in ended)
    assert sum(int(n) for stats in ended for n in re.findall(r"evictions_cold=(\d+)", stats)) > 0
