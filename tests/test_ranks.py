"""Ranks that restore the same tokens, whatever each of them has lost."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import rank_losses
from caches import make
from hypothesis import given, settings
from hypothesis import strategies as st
from server import Endpoint, Reply, free_port

from tieredkv import TieredPromptCache
from tieredkv.core import Remote
from tieredkv.ranks import Alone, Attempt, agreed

# A rank that waits longer for the others waits for ever.
_HUNG_SECONDS = 10


class Party:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=_HUNG_SECONDS)

    def told(self, rank: int, own: Any) -> list[Any]:
        self._given[rank] = own
        self._barrier.wait()
        given = [*self._given]
        self._barrier.wait()
        return given

    def run(self, work: Callable[[Member], Any]) -> list[Any]:
        """What work comes to on each rank: a result, or what it raised."""

        def one(rank: int) -> Any:
            try:
                return work(Member(self, rank))
            except threading.BrokenBarrierError:
                raise
            except Exception as e:  # noqa: BLE001 - that is what it came to
                return e

        with ThreadPoolExecutor(self.size) as pool:
            return [*pool.map(one, range(self.size))]


@dataclass
class Member:
    """One of a party's ranks."""

    party: Party
    rank: int
    n_exchanges: int = 0

    @property
    def size(self) -> int:
        return self.party.size

    @property
    def shard(self) -> str:
        return f"{self.rank}/{self.size}/tensor"

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        self.n_exchanges += 1
        return [list(each) for each in self.party.told(self.rank, numbers)]

    def gather(self, data: bytes) -> list[bytes]:
        return list(self.party.told(self.rank, data))


@dataclass
class Holdings:
    """What one rank can restore: any length up to ``longest``, or only those at ``points``.

    Of the loads the first ones come out as ``damage`` says: that many tokens shorter, or, for
    None, as a fault.
    """

    longest: int
    points: frozenset[int] | None
    damage: list[int | None] = field(default_factory=list)
    found: int = 0

    def has(self, n: int) -> bool:
        return n <= self.longest if self.points is None else n in self.points

    def find(self, most: int) -> int:
        self.found = next((n for n in range(most, 0, -1) if self.has(n)), 0)
        return self.found

    def load(self) -> tuple[str | None, int]:
        lost = self.damage.pop(0) if self.damage else 0
        if lost is None:
            raise OSError("the disk is gone")
        n = max(0, self.found - lost)
        return (f"state of {n}", n) if n and self.has(n) else (None, n)


holdings = st.builds(
    Holdings,
    st.integers(0, 40),
    st.none() | st.frozensets(st.integers(1, 40), max_size=12),
    st.lists(st.none() | st.integers(0, 5), max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(holdings, min_size=1, max_size=3))
def test_ranks_restore_the_same_tokens_after_the_same_exchanges(all_holdings):
    """If this failed, one rank would wait for the others for ever, or compute what they don't."""
    n_exchanges = set()

    def fetch(member: Member) -> Any:
        try:
            return agreed(member, 40, Attempt(lambda: all_holdings[member.rank]))
        finally:
            n_exchanges.add(member.n_exchanges)

    is_sound = not any(h.damage for h in all_holdings)
    results = Party(len(all_holdings)).run(fetch)
    assert len(n_exchanges) == 1
    if any(isinstance(r, OSError) for r in results):
        assert all(r is None or isinstance(r, OSError) for r in results)
        return
    assert len(set(results)) == 1
    common = [n for n in range(1, 41) if all(h.has(n) for h in all_holdings)]
    if is_sound:
        assert results[0] == (f"state of {common[-1]}" if common else None)


def test_one_process_restores_what_it_finds_at_once():
    """If this failed, a server without other ranks would look for each prompt several times."""
    assert agreed(Alone(), 40, Attempt(lambda: Holdings(30, None))) == "state of 30"


def test_a_search_that_cannot_begin_is_a_miss_of_all():
    """If this failed, a rank whose files were changed would leave the others waiting."""

    def begin(rank: int) -> Holdings | None:
        if rank == 1:
            raise ValueError("no such file")
        return Holdings(30, None) if rank else None

    results = Party(3).run(lambda member: agreed(member, 40, Attempt(lambda: begin(member.rank))))
    assert [type(r) for r in results] == [type(None), ValueError, type(None)]


class Model:
    """Counts how often it is run."""

    def __init__(self) -> None:
        self.n_runs = 0
        self.layers = [None]

    def parameters(self) -> dict[str, Any]:
        return {}

    def __call__(self, _: Any, cache: list[Any]) -> Any:
        self.n_runs += 1
        cache[0].update_and_fetch(*make([0])[0].state[:2])
        return cache[0].keys


def test_no_rank_runs_a_new_model_alone():
    """If this failed, a rank that can't read a model's files would stop all others at its load."""

    class Unreadable(TieredPromptCache):
        def _names(self, _: Any) -> list[str]:
            raise OSError("not readable")

    models = [Model(), Model()]

    def bind(member: Member) -> None:
        kind = Unreadable if member.rank else TieredPromptCache
        with kind(ranks=member) as cache:
            cache.bind(("model", None, None), models[member.rank])

    Party(2).run(bind)
    assert [m.n_runs for m in models] == [0, 0]


def test_ranks_have_no_remote_tier():
    """If this failed, each rank would wait for what the others didn't get in time."""
    with pytest.raises(ValueError, match="several ranks"):
        TieredPromptCache(ranks=Member(Party(2), 0), remote=Remote("redis://localhost/0"))


def test_what_cannot_be_sent_to_other_ranks_comes_as_its_text():
    """If this failed, an exception of its own kind would end every rank's generation thread."""
    from tieredkv.generation import _pickled

    class Odd(Exception):
        def __init__(self, n: int, text: str) -> None:
            super().__init__(f"{n} {text}")

    result = pickle.loads(_pickled(Odd(3, "blocks")))
    assert str(result) == "Odd: 3 blocks"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> rank_losses.Report:
    # Of the four the one in which the ranks' layers are unlike; ``make crash`` serves them all.
    return rank_losses.run("hybrid", 3, 3, tmp_path_factory.mktemp("lossy"))


def test_two_ranks_that_lose_their_state_answer_right(report):
    """If this failed, a rank that lost a block alone would give nonsense, or hang for ever."""
    assert (report.wrong, report.hung) == (0, 0)
    assert all(report.losses)
    assert 0 < report.reused <= report.lesser


def test_what_is_asked_of_the_first_rank_is_done_on_all(report):
    """If this failed, a pinned prompt would be evicted on the other ranks, and deleted ones stay
    on their disks.
    """
    assert all(report.pinned_bytes)
    assert report.left_blocks == [0, 0]


class Job(Endpoint):
    """``tieredkv serve`` on two ranks that share a directory, with nobody who watches over them."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.logs = [folder / "log0", folder / "log1"]
        serve = ["-m", "tieredkv", "serve", "--model", str(folder / "model")]
        serve += ["--port", str(self.port), "--prompt-cache-dir", str(folder / "cold")]
        # To which nothing answers, and nothing is to be sent.
        serve += ["--prompt-cache-remote", "redis://127.0.0.1:1/0"]
        self.ranks = rank_losses.start_ranks(serve, self.logs)
        deadline = time.monotonic() + 60
        while not self._is_up():
            if any(r.poll() is not None for r in self.ranks) or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError([log.read_text() for log in self.logs])
            time.sleep(0.1)

    def _is_up(self) -> bool:
        try:
            return self.health() == 200
        except OSError:
            return False

    def ended(self) -> list[int]:
        """Exit statuses of the ranks, which are to end now."""
        return [r.wait(20) for r in self.ranks]

    def kill(self) -> None:
        for r in self.ranks:
            r.kill()
            r.wait()


QUESTION = [{"role": "user", "content": "what is the sea made of " * 12}]


@dataclass
class Served:
    """An answer, how the ranks that gave it ended on an interrupt, and their successors."""

    first: Reply
    statuses: list[int]
    logs: list[str]
    job: Job


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    rank_losses.make_model(folder / "model", "tensor")
    job = Job(folder)
    try:
        first = job.chat(QUESTION, seed=1)
        for r in job.ranks:
            r.send_signal(signal.SIGINT)
        statuses = job.ended()
        logs = [log.read_text() for log in job.logs]
        job = Job(folder)
        yield Served(first, statuses, logs, job)
    finally:
        job.kill()


def test_ranks_end_together_on_an_interrupt(served):
    """If this failed, a rank would wait for one that has ended until it is killed."""
    assert served.statuses == [0, 0], served.logs
    assert not any("didn't end" in log for log in served.logs), served.logs


def test_a_remote_tier_is_refused_aloud(served):
    """If this failed, a server would do without what it was told to use, and say nothing."""
    assert all("no remote tier with more than one rank" in log for log in served.logs)
    assert not any("redis" in log for log in served.logs)


def test_a_prompt_outlives_a_restart_of_two_ranks(served):
    """If this failed, models on several machines would be served without the cold tier."""
    again = served.job.chat(QUESTION, seed=1)
    assert again.n_cached >= again.n_prompt - 1
    assert again.text == served.first.text


def test_a_client_that_leaves_stops_its_request_on_all_ranks(served):
    """If this failed, ranks would wait for ever for the one whose client has left."""
    body = {"messages": QUESTION, "seed": 1, "stream": True, "max_tokens": 100_000}
    connection = served.job.send(body)
    assert connection.recv(1)
    connection.close()
    assert served.job.chat(QUESTION, seed=1).text == served.first.text


def test_a_rank_ends_when_another_is_killed(served):
    """If this failed, the others would hold their memory and answer nobody for ever."""
    served.job.ranks[1].kill()
    assert served.job.ended()[0] == 1
