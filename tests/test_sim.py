"""The eviction simulator, and what the default policy must reach on traces of all kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import sim, traces
from tieredkv import hazard

BLOCK = 512


@cache
def made(kind: str, n: int = 1200, seed: int = 7) -> sim.Trace:
    """A made trace."""
    rows = traces.rows(traces.KINDS[kind](Random(seed), n))
    return sim.parse(json.dumps(row) for row in rows)


# Prompts as paths in a small tree: a block is named by the choices that lead to it.
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40)


def _trace(choices: list[list[int]]) -> sim.Trace:
    numbers: dict[tuple[int, ...], int] = {}
    paths = [
        [numbers.setdefault(tuple(path[: i + 1]), len(numbers)) for i in range(len(path))]
        for path in choices
    ]
    return sim.trace_of([(len(path) * BLOCK - 100, path) for path in paths], BLOCK)


def _brute_force_leaf_lru(trace: sim.Trace, room: int) -> list[int]:
    """Blocks matched by each request, by the definition: the leaf whose use is oldest leaves."""
    here: dict[int, tuple[int, int | None]] = {}
    matched = []
    for now, request in enumerate(trace.requests):
        path = request.path[:room]
        n = 0
        while n < len(path) and path[n] in here:
            n += 1
        matched.append(n)
        for i, block in enumerate(path):
            here[block] = (now, path[i - 1] if i else None)
        while len(here) > room:
            parents = {parent for _, parent in here.values()}
            leaves = [block for block in here if block not in parents]
            del here[min(leaves, key=lambda block: here[block][0])]
    return matched


@settings(deadline=None)
@given(prompts, st.integers(1, 12))
def test_leaf_lru_is_what_its_definition_says(choices: list[list[int]], room: int) -> None:
    """Otherwise the others would be compared with something else."""
    trace = _trace(choices)
    tier = sim.LeafLru(room)
    assert [tier.serve(r) for r in trace.requests] == _brute_force_leaf_lru(trace, room)


@pytest.mark.parametrize("policy", [p for p in sim.POLICIES if p != "whole-lru"])
@settings(max_examples=40, deadline=None)
@given(choices=prompts, room=st.integers(1, 12))
def test_no_policy_exceeds_the_room_or_leaves_a_child_alone(
    policy: str, choices: list[list[int]], room: int
) -> None:
    """Otherwise it would win by cheating, or hit what can't be restored."""
    trace = _trace(choices)
    tier = sim.POLICIES[policy](room, trace)
    assert isinstance(tier, sim.Tree)
    for request in trace.requests:
        tier.serve(request)
        assert len(tier.parents) <= room
        assert all(parent is None or parent in tier.parents for parent in tier.parents.values())


class _Watched(sim.Learning):
    """Tells what is awaited, by itself and by its counters."""

    def waiting(self) -> list[int]:
        """Who is awaited, here and gone, by class; but for those that are lost by now."""
        ghosts = (standing for _, standing in self._ghosts._rows.values())
        counts = [0] * hazard.CLASSES
        for standing in (*self._standings.values(), *ghosts):
            cohort = self._counters._cohort_of(standing.last)
            if standing.awaited and cohort > self._counters.cohort - hazard.COHORTS:
                counts[standing.of_class] += 1
        return counts

    def counted(self) -> list[int]:
        """The same by the counters."""
        counts: list[int] = self._counters.waiting.sum(axis=1).round().astype(int).tolist()
        return counts


@settings(deadline=None)
@given(prompts, st.integers(1, 12))
def test_every_wait_is_counted_once(choices: list[list[int]], room: int) -> None:
    """Otherwise chances of a return would drift away from what happens."""
    trace = _trace(choices)
    tier = _Watched(room, BLOCK, None)
    for request in trace.requests:
        tier.serve(request)
        tier._counters.advance(tier._now)
        assert tier.waiting() == tier.counted()


@pytest.mark.parametrize("kind", traces.KINDS)
def test_default_is_never_below_leaf_lru(kind: str) -> None:
    """Otherwise somebody's use of the cache would be served worse than by the simplest policy."""
    trace = made(kind)
    for share in (0.03, 0.1, 0.3):
        room = int(share * trace.n_unique)
        plain = sim.replay(trace, "leaf-lru", room)
        ours = sim.replay(trace, "default", room)
        assert ours.token_hit >= 0.99 * plain.token_hit, (share, ours, plain)


def test_default_keeps_conversations_that_leaf_lru_loses() -> None:
    """Otherwise it would be leaf-LRU by another name."""
    trace = made("bursts")
    room = int(0.05 * trace.n_unique)
    plain = sim.replay(trace, "leaf-lru", room).token_hit
    assert sim.replay(trace, "default", room).token_hit > 1.04 * plain


def test_a_scan_of_more_than_the_room_hits() -> None:
    """Otherwise a loop over a bit too much would reuse nothing at all."""
    trace = made("scan", 1500)
    room = int(0.15 * trace.n_unique)
    plain = sim.replay(trace, "leaf-lru", room).token_hit_second_half
    assert sim.replay(trace, "default", room).token_hit_second_half > 2 * plain


@pytest.mark.parametrize("kind", ["chat", "agents", "rag", "mixed"])
def test_nobody_beats_the_clairvoyant(kind: str) -> None:
    """Otherwise the bound would not be one, or a policy would count hits it had not."""
    trace = made(kind)
    room = int(0.05 * trace.n_unique)
    hits = {policy: sim.replay(trace, policy, room).token_hit for policy in sim.POLICIES}
    assert max(hits, key=lambda policy: hits[policy]) == "clairvoyant"
    assert hits["whole-lru"] < hits["leaf-lru"]


@pytest.mark.parametrize("room", [60, 600])
@pytest.mark.parametrize("n_users", [6, 60])
@pytest.mark.parametrize("length", [1, 10])
def test_a_burst_of_single_prompts_never_evicts_the_system_prompt(
    room: int, n_users: int, length: int
) -> None:
    """Otherwise every conversation would wait for its prefill after a batch job."""
    system = [10, 11, 12, 13]
    users = [[*system, *range(100 + 3 * i, 103 + 3 * i)] for i in range(n_users)]
    starts = range(1000, 1000 + 6 * room, length)
    burst = [list(range(10_000 + start, 10_000 + start + length)) for start in starts]
    after = [*system, 1, 2]
    paths = [*users, *burst, after]
    trace = sim.trace_of([(len(path) * BLOCK, path) for path in paths], BLOCK)
    tier = sim.POLICIES["default"](room, trace)
    assert [tier.serve(request) for request in trace.requests][-1] == len(system)


class _Inverted(hazard.Table):
    """Gives up what it should keep."""

    def score(self, of_class: int, age: int) -> float:
        return -super().score(of_class, age)


def test_the_trial_saves_a_policy_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise uses of a kind that nobody thought of could be served far worse than before."""
    trace = made("chat", 4000)
    room = int(0.1 * trace.n_unique)
    plain = sim.replay(trace, "leaf-lru", room).token_hit
    by_age = hazard.Table.by_age
    monkeypatch.setattr(hazard, "Table", _Inverted)
    monkeypatch.setattr(_Inverted, "by_age", by_age)
    assert sim.replay(trace, "untried", room).token_hit < 0.8 * plain
    assert sim.replay(trace, "default", room).token_hit > 0.9 * plain


def test_a_trace_is_read_in_the_order_of_time() -> None:
    """Otherwise recency would be that of the file; and a block's size would have to be told."""
    rows = [
        {"timestamp": 2, "input_length": 700, "output_length": 1, "hash_ids": [0, 1]},
        {"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [0, 2]},
        {"timestamp": 3, "input_length": 0, "output_length": 1, "hash_ids": []},
    ]
    trace = sim.parse(json.dumps(row) for row in rows)
    assert trace.block_tokens == BLOCK
    assert trace.requests == (sim.Request(1024, (0, 2), 2), sim.Request(700, (0, 1), 1))


def test_flops_grow_faster_than_tokens() -> None:
    """Otherwise a hit at the end of a long prompt would count no more than one at its start."""
    assert flops_between(0, 1000) < flops_between(30_000, 31_000)


def flops_between(start: int, end: int) -> float:
    """FLOPs of the tokens from ``start`` to ``end``."""
    return sim.flops(end) - sim.flops(start)


def test_the_command_gives_its_figures_as_json(tmp_path: Path) -> None:
    """Otherwise nothing could be made of them but a table."""
    path = tmp_path / "trace.jsonl"
    rows = traces.rows(traces.KINDS["mixed"](Random(1), 200))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "bench.sim", str(path), "--capacity", "0.1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    figures = json.loads(done.stdout)
    assert set(figures) == set(sim.POLICIES)
    for by_share in figures.values():
        row = by_share["0.1"]
        assert 0 <= row["token_hit"] <= 1
        assert 0 <= row["token_hit_second_half"] <= 1
        assert 0 <= row["flop_saved"] <= 1
        assert row["written"] > 0
