"""Contestants timed in turn, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_benchmark.fixture import BenchmarkFixture

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spent:
    """The shortest time of some rounds, and the least that all threads had of the cores."""

    seconds: float
    cpu_seconds: float


def nothing() -> None:
    """What most contestants need before they are timed."""


def fastest(
    contestants: Mapping[str, Work], rounds: int, before: Work = nothing
) -> dict[str, Spent]:
    """What each spent, of as many rounds, in each of which all take part.

    ``before`` is called before each, outside of its time.
    """
    best = dict.fromkeys(contestants, Spent(float("inf"), float("inf")))
    for _ in range(rounds):
        for name, work in contestants.items():
            before()
            cpu, start = time.process_time(), time.perf_counter()
            work()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            best[name] = Spent(min(best[name].seconds, seconds), min(best[name].cpu_seconds, cpu))
    return best


def note(benchmark: BenchmarkFixture, spent: Mapping[str, Spent]) -> dict[str, float]:
    """Note the seconds of contestants, of which the first is ours, and ours over the others'; the
    latter by contestant.
    """
    (_, mine), *others = spent.items()
    benchmark.extra_info["seconds"] = mine.seconds
    benchmark.extra_info |= {f"seconds, {name}": s.seconds for name, s in others}
    benchmark.extra_info |= {
        f"CPU, ours / {name}": mine.cpu_seconds / s.cpu_seconds for name, s in others
    }
    ratios = {name: mine.seconds / s.seconds for name, s in others}
    benchmark.extra_info |= {f"ours / {name}": ratio for name, ratio in ratios.items()}
    return ratios


def record(
    benchmark: BenchmarkFixture,
    contestants: Mapping[str, Work],
    rounds: int,
    before: Work = nothing,
) -> dict[str, float]:
    """Time contestants and `note` it; the ratios by contestant."""
    spent = fastest(contestants, rounds, before)
    benchmark.pedantic(nothing, rounds=1)
    return note(benchmark, spent)
