"""Contestants timed in turn, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pytest_benchmark.fixture import BenchmarkFixture

Work = Callable[[], object]


def _nothing() -> None:
    pass


def fastest(
    contestants: Mapping[str, Work], rounds: int, before: Callable[[], object] = _nothing
) -> dict[str, float]:
    """The shortest time of each in seconds, of as many rounds, in each of which all take part.

    ``before`` is called before each, outside of its time.
    """
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, work in contestants.items():
            before()
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def note(benchmark: BenchmarkFixture, times: Mapping[str, float]) -> dict[str, float]:
    """Note the seconds of contestants, of which the first is ours, and ours over the others."""
    (_, mine), *others = times.items()
    benchmark.extra_info["seconds"] = mine
    benchmark.extra_info |= {f"seconds, {name}": seconds for name, seconds in others}
    ratios = {name: mine / seconds for name, seconds in others}
    benchmark.extra_info |= {f"ours / {name}": ratio for name, ratio in ratios.items()}
    return ratios


def record(
    benchmark: BenchmarkFixture, contestants: Mapping[str, Work], rounds: int
) -> dict[str, float]:
    """Time contestants and `note` it; the ratios by contestant."""
    times = fastest(contestants, rounds)
    benchmark.pedantic(_nothing, rounds=1)
    return note(benchmark, times)
