"""A decode step while the writer has all the work it can take, over one while it has none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from pytest_benchmark.fixture import BenchmarkFixture

from bench.load import BLOCK_TOKENS, Saturated, save
from bench.state import SMALL, caches_of, model
from tieredkv import TieredPromptCache, keys

KEY = ("bench", None, None)
PROMPT_TOKENS = 8
STEPS = 25
# By streams: a step of several takes longer.
ROUNDS = {1: 5, 4: 2}
# Steps after a change of company that aren't counted.
SETTLING = 3


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
    """So many streams that are decoded as mlx-lm's server does it, for ever the same tokens."""

    def __init__(self, model: Any, n_streams: int) -> None:
        self._model = model
        self._prompts = [[1 + i] * PROMPT_TOKENS for i in range(n_streams)]

    def seconds(self, between: Callable[[], None]) -> list[float]:
        """Durations of the steps after the prompts, each with ``between`` before it."""
        generator = BatchGenerator(self._model, max_tokens=SETTLING + STEPS + 2)
        generator.insert(self._prompts)
        while not generator.next()[1]:
            pass
        found = []
        for _ in range(SETTLING + STEPS):
            # MLX computes meanwhile, so that all but this would be too short a time.
            start = time.perf_counter()
            between()
            generator.next()
            found.append(time.perf_counter() - start)
        generator.close()
        return found[SETTLING:]


@contextmanager
def beside_process(kind: str, blocks: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that works, stopped at first."""
    command = [sys.executable, "-m", "bench.load", kind, str(blocks), str(folder)]
    process = subprocess.Popen(command)
    try:
        # Until it is under way; it works for as long as it isn't stopped.
        time.sleep(3)
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


def _alone() -> None:
    pass


def quantiles(seconds: list[float]) -> dict[str, float]:
    """In seconds."""
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return {"p50": float(p50), "p99": float(p99), "max": max(seconds)}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes are stopped as on Unix")
@pytest.mark.parametrize("n_streams", ROUNDS)
def test_decode_beside_the_writer(
    benchmark: BenchmarkFixture, blocks: Path, tmp_path: Path, n_streams: int
) -> None:
    """Also beside the same work in a process of its own, and beside plain copies in one: what
    those cost is the price of cores and memory, not of the interpreter.
    """
    decoding = Decoding(model()[0], n_streams)
    found: dict[str, list[float]] = {}
    written = spent = 0.0
    with ExitStack() as stack:
        ours = Saturated(blocks, tmp_path / "thread")
        stack.callback(ours.close)
        others = {
            f"{kind} process": stack.enter_context(beside_process(kind, blocks, tmp_path / kind))
            for kind in ("writer", "memcpy")
        }
        for _ in range(ROUNDS[n_streams]):
            found.setdefault("idle", []).extend(decoding.seconds(_alone))
            ours.prepare()
            before, start = ours.bytes_written, time.perf_counter()
            found.setdefault("writer", []).extend(decoding.seconds(ours.feed))
            written += ours.bytes_written - before
            spent += time.perf_counter() - start
            ours.rest()
            for name, process in others.items():
                process.send_signal(signal.SIGCONT)
                found.setdefault(name, []).extend(decoding.seconds(_alone))
                process.send_signal(signal.SIGSTOP)
    benchmark.pedantic(lambda: None, rounds=1)
    idle = quantiles(found.pop("idle"))
    benchmark.extra_info |= {f"idle, {name}, ms": 1e3 * v for name, v in idle.items()}
    benchmark.extra_info["written meanwhile, MB/s"] = written / spent / 1e6
    for who, seconds in found.items():
        for name, value in quantiles(seconds).items():
            benchmark.extra_info[f"{who} / idle, {name}"] = value / idle[name]
