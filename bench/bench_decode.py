"""A decode step while the writer has all the work it can take, over one while it has none."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import nothing
from bench.load import BLOCK_TOKENS, Saturated, save
from bench.state import SMALL, caches_of, model
from tieredkv import TieredPromptCache, keys

# No folder of that name: its files would stand for a model.
KEY = ("a model", None, None)
PROMPT_TOKENS = 8
# Company changes every few steps and comes in another order in each round, so that whatever else
# the machine does meets all alike.
STEPS = 8
SETTLING = 2
# By streams: a step of several takes longer.
ROUNDS = {1: 14, 4: 4}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real state of one block, in a file."""
    path = tmp_path_factory.mktemp("blocks") / "block.npy"
    tokens = list(range(BLOCK_TOKENS))
    with TieredPromptCache() as cache:
        cache.insert_cache(KEY, tokens, caches_of(SMALL, BLOCK_TOKENS))
        namespace, _ = cache._known_namespace(KEY)
        (block,) = cache._store.hot.load(cache._chain(namespace, keys.as_tokens(tokens)).keys)
        save(path, block)
    return path


class Decoding:
    """So many streams that are decoded as mlx-lm's server does it."""

    def __init__(self, model: Any, n_streams: int) -> None:
        self._generator = BatchGenerator(model, max_tokens=1 << 20)
        self._generator.insert([[1 + i] * PROMPT_TOKENS for i in range(n_streams)])
        while not self._generator.next()[1]:
            pass

    def seconds(self, between: Callable[[], None]) -> list[float]:
        """Durations of some steps, each with ``between`` before it."""
        found = []
        for _ in range(SETTLING + STEPS):
            # MLX computes meanwhile, so that all but this would be too short a time.
            start = time.perf_counter()
            between()
            self._generator.next()
            found.append(time.perf_counter() - start)
        return found[SETTLING:]

    def close(self) -> None:
        """End them."""
        self._generator.close()


class Alone:
    """No company."""

    def __enter__(self) -> Callable[[], None]:
        """What is to be called between steps."""
        return nothing

    def __exit__(self, *_: object) -> None:
        pass


class BesideWriter:
    """A writer on a thread of this process, with work until the end of the block."""

    def __init__(self, blocks: Path, folder: Path) -> None:
        self._writer = Saturated(blocks, folder)
        self._n_bytes = 0
        self._seconds = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Encoded bytes, while it had work."""
        return self._n_bytes / self._seconds

    def __enter__(self) -> Callable[[], None]:
        """See `Alone`."""
        self._writer.prepare()
        self._n_bytes -= self._writer.bytes_written
        self._seconds -= time.perf_counter()
        return self._writer.feed

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter()
        self._n_bytes += self._writer.bytes_written
        self._writer.rest()

    def close(self) -> None:
        """End it."""
        self._writer.close()


class BesideProcess:
    """A process that works, stopped but for the block."""

    def __init__(self, kind: str, blocks: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "bench.load", kind, str(blocks), str(folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        # Its line says that it is under way.
        self._process.stdout.readline()
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> Callable[[], None]:
        """See `Alone`."""
        self._process.send_signal(signal.SIGCONT)
        return nothing

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def quantiles(seconds: list[float]) -> dict[str, float]:
    """In seconds."""
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return {"p50": float(p50), "p99": float(p99), "max": max(seconds)}


@pytest.mark.parametrize("n_streams", ROUNDS)
def test_decode_beside_the_writer(
    benchmark: BenchmarkFixture, blocks: Path, tmp_path: Path, n_streams: int
) -> None:
    """Also beside the same work in a process of its own, and beside plain copies in one: what
    those cost is the price of cores and memory, not of the interpreter.
    """
    rounds = ROUNDS[n_streams]
    with ExitStack() as stack:
        decoding = stack.enter_context(closing(Decoding(model()[0], n_streams)))
        ours = stack.enter_context(closing(BesideWriter(blocks, tmp_path / "thread")))
        others = {
            f"{kind} process": stack.enter_context(
                closing(BesideProcess(kind, blocks, tmp_path / kind))
            )
            for kind in ("writer", "memcpy")
        }
        company = {"idle": Alone(), "writer": ours, **others}
        found: dict[str, list[float]] = {name: [] for name in company}
        names = list(company)
        dice = random.Random(1)
        for _ in range(rounds):
            for name in names:
                with company[name] as between:
                    found[name] += decoding.seconds(between)
            dice.shuffle(names)
    benchmark.pedantic(nothing, rounds=1)
    idle = quantiles(found.pop("idle"))
    benchmark.extra_info |= {f"idle, {name}, ms": 1e3 * v for name, v in idle.items()}
    benchmark.extra_info["written meanwhile, MB/s"] = ours.bytes_per_second / 1e6
    for who, seconds in found.items():
        for name, value in quantiles(seconds).items():
            benchmark.extra_info[f"{who} / idle, {name}"] = value / idle[name]
