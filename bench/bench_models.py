"""What is reused of a second prompt by models whose state can't all be cut, against mlx-lm's cache.

Tiny random models, served as mlx-lm's server does: an insert at the end of the system prompt, of
the user's turn and of the reply; for ours also at every checkpoint.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    LRUPromptCache,
    RotatingKVCache,
    make_prompt_cache,
)
from pytest_benchmark.fixture import BenchmarkFixture

from bench import architectures
from tieredkv import TieredPromptCache, layout

MODELS = {"sliding window": "gemma3_text", "hybrid": "falcon_h1", "recurrent": "mamba"}
CHECKPOINT = 64
REPLY = 8
# No folder of that name: its files would stand for a model.
KEY = ("a model", None, None)

_RNG = random.Random(5)
SYSTEM, DOCUMENT, QUESTION, OTHER, NEXT, EDITED = (
    [_RNG.randrange(128) for _ in range(n)] for n in (200, 600, 20, 20, 30, 30)
)


class Host:
    """The least of a server: prefill in segments, greedy reply, inserts where a server has them."""

    def __init__(self, model: Any, cache: Any, every: int) -> None:
        self._model = model
        self._cache = cache
        self._every = every

    def serve(self, prompt: list[int]) -> tuple[int, list[int]]:
        """Tokens reused of ``prompt``, and the reply."""
        caches, rest = self._cache.fetch_nearest_cache(KEY, prompt)
        done = reused = len(prompt) - len(rest)
        live = caches or make_prompt_cache(self._model)
        for end in self._ends(len(prompt)):
            if end > done:
                self._step(prompt[done:end], live)
                self._insert(prompt[:end], live, "system" if end == len(SYSTEM) else "user")
                done = end
        tokens = prompt[-1:]
        for _ in range(REPLY):
            logits = self._step(tokens[-1:], live)
            tokens.append(int(mx.argmax(logits[0, -1]).item()))
        reply = tokens[1:]
        self._insert(prompt + reply[:-1], live, "assistant")
        return reused, reply

    def _ends(self, n: int) -> list[int]:
        cuts = range(self._every, n, self._every) if self._every else ()
        return sorted({len(SYSTEM), n - 1, *cuts})

    def _step(self, tokens: list[int], live: list[Any]) -> mx.array:
        logits = self._model(mx.array([tokens]), cache=live)
        mx.eval(logits, [c.state for c in live])
        layout.vouch(live)
        return logits

    def _insert(self, tokens: list[int], live: list[Any], kind: str) -> None:
        # The server gives away an extract of its batch, and goes on with the batch.
        self._cache.insert_cache(KEY, tokens, copy.deepcopy(live), cache_type=kind)


@contextmanager
def ours(model: Any, folder: Path) -> Iterator[Host]:
    with TieredPromptCache(folder, block_tokens=CHECKPOINT) as cache:
        cache.bind(KEY, model)
        yield Host(model, cache, CHECKPOINT)
        assert cache.flush(30)


def upstream(model: Any) -> Host:
    return Host(model, LRUPromptCache(), 0)


def scenarios(host: Host) -> dict[str, tuple[int, int]]:
    """(reused, shared) tokens of the second request of each kind."""
    first = SYSTEM + DOCUMENT + QUESTION
    _, reply = host.serve(first)
    turn = first + reply + NEXT
    host.serve(turn)
    return {
        "same prompt": (host.serve(first)[0], len(first) - 1),
        "another question": (host.serve(SYSTEM + DOCUMENT + OTHER)[0], len(SYSTEM + DOCUMENT)),
        "edited last message": (host.serve(first + reply + EDITED)[0], len(first + reply)),
    }


@pytest.mark.parametrize("kind", MODELS)
def test_reuse(benchmark: BenchmarkFixture, tmp_path: Path, kind: str) -> None:
    """Tokens reused over tokens shared, for both, in one run; ours also after a restart."""
    model = architectures.build(MODELS[kind])
    first = SYSTEM + DOCUMENT + QUESTION

    def run() -> dict[str, tuple[int, int]]:
        with ours(model, tmp_path) as host:
            found = scenarios(host)
        with ours(model, tmp_path) as host:
            return {**found, "after a restart": (host.serve(first)[0], len(first) - 1)}

    mine = benchmark.pedantic(run, rounds=1)
    theirs = {**scenarios(upstream(model)), "after a restart": (0, len(first) - 1)}
    for name, (reused, shared) in mine.items():
        benchmark.extra_info[name] = reused / shared
        benchmark.extra_info[f"{name}, mlx-lm"] = theirs[name][0] / theirs[name][1]
    assert all(reused / shared >= 0.9 for reused, shared in mine.values())


# Layers with full attention, with a sliding window, the window; recurrent layers, and how many
# tokens of the full ones weigh as much as their state.
LAYERS = {
    "plain (Qwen3-8B)": (36, 0, 0, 0, 0),
    "sliding window (Gemma3-27B)": (10, 52, 1024, 0, 0),
    "sliding window (Gemma3-1B)": (4, 22, 512, 0, 0),
    "sliding window (gpt-oss-20b)": (12, 12, 128, 0, 0),
    "hybrid (Qwen3-Next)": (12, 0, 0, 36, 12 * 256),
}
ROW = 32
STEP = 2048
PROMPT_TOKENS = 2 * STEP + 300


def rows(n: int) -> mx.array:
    return mx.random.normal((1, 1, n, ROW)).astype(mx.bfloat16)


@pytest.mark.parametrize("kind", LAYERS)
def test_bytes_per_token(benchmark: BenchmarkFixture, tmp_path: Path, kind: str) -> None:
    """Disk per token of a prompt with a checkpoint every 2,048, as a share of what plain attention
    in all layers would take raw. The layers of real models, with short rows of random numbers.
    """
    full, sliding, window, recurrent, weight = LAYERS[kind]
    live: list[Any] = [KVCache() for _ in range(full)]
    live += [RotatingKVCache(window) for _ in range(sliding)]
    live += [ArraysCache(1) for _ in range(recurrent)]
    raw = (full + sliding or 1) * 2 * 2 * ROW

    def run() -> int:
        tokens = [_RNG.randrange(1000) for _ in range(PROMPT_TOKENS)]
        with TieredPromptCache(tmp_path, hot_bytes=1 << 30) as cache:
            for start in range(0, PROMPT_TOKENS, STEP):
                stop = min(start + STEP, PROMPT_TOKENS)
                for c in live:
                    if isinstance(c, ArraysCache):
                        c[0] = rows(weight * full * 2 // recurrent)
                    else:
                        c.update_and_fetch(rows(stop - start), rows(stop - start))
                layout.vouch(live)
                cache.insert_cache(KEY, tokens[:stop], live, cache_type="user")
            assert cache.flush(60)
            return cache.stats().cold.n_bytes

    n_bytes = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info["disk bytes / raw bytes of plain attention"] = (
        n_bytes / PROMPT_TOKENS / raw
    )
    assert n_bytes > 0
