"""Contestants timed in turn, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pytest_benchmark.fixture import BenchmarkFixture

Work = Callable[[], object]


def nothing() -> None:
    """What most contestants need before they are timed."""


def fastest(
    contestants: Mapping[str, Work], rounds: int, before: Work = nothing
) -> dict[str, float]:
    """The shortest time of each in seconds, of as many rounds, in each of which all take part;
    ``before`` each time comes some work that isn't timed.
    """
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, work in contestants.items():
            before()
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def record(
    benchmark: BenchmarkFixture,
    contestants: Mapping[str, Work],
    rounds: int,
    before: Work = nothing,
) -> dict[str, float]:
    """Time contestants, of which the first is ours, and note ours over each of the others."""
    times = fastest(contestants, rounds, before)
    (ours, mine), *others = times.items()
    before()
    benchmark.pedantic(contestants[ours], rounds=1)
    benchmark.extra_info["seconds"] = mine
    ratios = {name: mine / seconds for name, seconds in others}
    benchmark.extra_info |= {f"ours / {name}": ratio for name, ratio in ratios.items()}
    return ratios
