"""What the remote tier costs and wins, on real engines behind a proxy that delays.

    python tests/measure_remote.py [objects | serving | faults] [--model tiny | smollm2]

``objects``: one block an object against several, at 1, 20 and 100 ms. ``serving``: time to first
token of a server that has a prefix from the remote tier, over that of one that computes it.
``faults``: the longest that a request is delayed by an engine that fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tiny
from engines import S3, Proxy, Redis
from server import Local, Reply

from bench.model import ensure
from tieredkv.engines.base import Engine, Timeouts
from tieredkv.engines.opening import open_engine

TRIPS = (0.001, 0.020, 0.100)
BLOCK_BYTES = 2 << 20
N_BLOCKS = 32
GROUPS = (1, 4, 16)
THREADS = 16
ROUNDS = 3
LONG = "".join(f"{i}: {i * 7919 % 1000}; " for i in range(100))


@contextmanager
def servers() -> Iterator[dict[str, S3 | Redis]]:
    """One of each kind."""
    with tempfile.TemporaryDirectory() as folder, S3(Path(folder)) as s3, Redis() as redis:
        yield {"s3": s3, "redis": redis}


# ---- objects


def put_groups(engine: Engine, size: int) -> None:
    """As many bytes in objects of so many blocks."""
    for i in range(0, N_BLOCKS, size):
        engine.put(f"{size}/{i}", os.urandom(BLOCK_BYTES * size))


def fetch(engine: Engine, size: int, n_blocks: int) -> float:
    """Seconds to have the first ``n_blocks``."""
    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        names = [f"{size}/{i}" for i in range(0, n_blocks, size)]
        got = pool.map(lambda name: engine.get(name, 1 << 30), names)
        assert all(data is not None for data in got)
    return time.perf_counter() - start


def objects() -> None:
    print("Seconds for the first 3, 8 and 32 blocks of 2 MiB, by blocks an object (best of 3)")
    print("| engine | trip | blocks an object | 3 | 8 | 32 |\n|---|---|---|---|---|---|")
    with servers() as running:
        for kind, server in running.items():
            prefix = "measured"
            direct = open_engine(server.url(prefix=prefix), Timeouts(60, 60))
            for size in GROUPS:
                put_groups(direct, size)
            for trip in TRIPS:
                with Proxy(server.port, trip / 2) as proxy:
                    engine = open_engine(server.url(proxy.port, prefix), Timeouts(60, 60))
                    fetch(engine, 1, N_BLOCKS)
                    for size in GROUPS:
                        best = [
                            min(fetch(engine, size, n) for _ in range(ROUNDS)) for n in (3, 8, 32)
                        ]
                        cells = " | ".join(f"{s:.3f}" for s in best)
                        print(f"| {kind} | {trip * 1e3:.0f} ms | {size} | {cells} |", flush=True)


# ---- serving


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": LONG}, {"role": "user", "content": question}]


def timed(server: Local, question: str) -> tuple[Reply, float]:
    """One token: what it takes is the time to the first."""
    start = time.perf_counter()
    reply = server.chat(messages(question), max_tokens=1)
    return reply, time.perf_counter() - start


def settle(server: Local) -> None:
    sharing = server.cache._store.sharing
    assert server.cache.flush(60)
    assert sharing is not None
    assert sharing.uploader is not None
    assert sharing.uploader.flush(60)


def serving(model: Path) -> None:
    print("| engine | trip | prefix | cached | computed, s | from remote, s | ratio | skipped |")
    print("|---|---|---|---|---|---|---|---|")
    with servers() as running, tempfile.TemporaryDirectory() as text:
        for kind, server in running.items():
            folder = Path(text) / kind
            folder.mkdir()
            url = server.url(prefix="measured")
            with Local(model, folder / "one", "--prompt-cache-remote", url) as one:
                prefix, computed = timed(one, "What is the first?")
                settle(one)
            for trip in TRIPS:
                with Proxy(server.port, trip / 2) as proxy:
                    flags = ("--prompt-cache-remote", server.url(proxy.port, "measured"))
                    more = ("--prompt-cache-remote-upload", "pinned")
                    where = folder / f"two-{trip}"
                    with Local(model, where, *flags, *more) as two:
                        # What a server learns of itself from its first prompts.
                        timed(two, "?" * 3)
                        two.cache.trim_to(n_bytes=0)
                        two.cache._store.cold.trim_to(0)
                        reply, seconds = timed(two, "And the last one?")
                        skipped = two.cache.stats().remote
                print(
                    f"| {kind} | {trip * 1e3:.0f} ms | {prefix.n_prompt} | {reply.n_cached} | "
                    f"{computed:.2f} | {seconds:.2f} | {seconds / computed:.3f} | "
                    f"{skipped.skipped if skipped else ''} |",
                    flush=True,
                )


# ---- faults


def time_fetches(server: Local) -> list[float]:
    """Seconds that each request spends on finding and having its prefix; filled as they come."""
    seconds: list[float] = []
    fetch = server.cache.fetch_nearest_cache

    def timed_fetch(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return fetch(*args)
        finally:
            seconds.append(time.perf_counter() - start)

    server.cache.fetch_nearest_cache = timed_fetch  # type: ignore[method-assign]
    return seconds


def hang(proxy: Proxy) -> None:
    proxy.hang = True


def refuse(proxy: Proxy) -> None:
    proxy.refuse = True


def cut(proxy: Proxy) -> None:
    proxy.cut = 2000


def damage(proxy: Proxy) -> None:
    proxy.damage = 300


def slow(proxy: Proxy) -> None:
    proxy.rate = 20_000


FAULTS: tuple[Callable[[Proxy], None], ...] = (hang, refuse, cut, damage, slow)


def faults(model: Path) -> None:
    print("| engine | fault | requests | wrong | longest wait, s | sum of waits, s | faults |")
    print("|---|---|---|---|---|---|---|")
    questions = [f"{c}?" for c in "abcdefghijklmnop"]
    with servers() as running, tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with Local(model, folder / "alone") as alone:
            want = [timed(alone, q)[0].text for q in questions]
        for kind, server in running.items():
            url = server.url(prefix="measured")
            with Local(model, folder / kind, "--prompt-cache-remote", url) as one:
                timed(one, "What is the first?")
                settle(one)
            for fault in FAULTS:
                with Proxy(server.port) as proxy:
                    fault(proxy)
                    flags = ("--prompt-cache-remote", server.url(proxy.port, "measured"))
                    more = ("--prompt-cache-remote-upload", "pinned")
                    name = fault.__name__
                    with Local(model, folder / f"{kind}-{name}", *flags, *more) as two:
                        waits = time_fetches(two)
                        wrong = 0
                        for q, right in zip(questions, want, strict=True):
                            wrong += timed(two, q)[0].text != right
                            two.cache.trim_to(n_bytes=0)
                            two.cache._store.cold.trim_to(0)
                        remote = two.cache.stats().remote
                print(
                    f"| {kind} | {name} | {len(waits)} | {wrong} | {max(waits):.2f} | "
                    f"{sum(waits):.2f} | {remote.faults if remote else ''} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("objects", "serving", "faults"))
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = args.model
        model = ensure("bfloat16") if name == "smollm2" else tiny.save(Path(folder) / "tiny")
        if args.what in (None, "objects"):
            objects()
        if args.what in (None, "serving"):
            serving(model)
        if args.what in (None, "faults"):
            faults(model)


if __name__ == "__main__":
    main()
