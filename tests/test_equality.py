"""The one law on a real model: a hit never changes the output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from tieredkv import TieredPromptCache

TEXT = (
    "The lighthouse keeper wrote down every ship that passed. In the winter of the great storm "
    "there were none for nineteen days, and on the twentieth three came at once, without lights. "
)
BLOCK, PROMPT = 16, 36


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> tuple[Any, list[int], tuple[str, None, None]]:
    model, tokenizer = load(str(smollm2))
    return model, tokenizer.encode(TEXT), (str(smollm2), None, None)


def logits(model: Any, tokens: list[int], cache: list[Any]) -> mx.array:
    out = model(mx.array([tokens]), cache=cache)[:, -1]
    mx.eval(out, [c.state for c in cache])
    return out


def greedy(model: Any, first: mx.array, cache: list[Any], n: int) -> list[int]:
    out = [int(mx.argmax(first).item())]
    while len(out) < n:
        out.append(int(mx.argmax(logits(model, out[-1:], cache)).item()))
    return out


@pytest.fixture(params=["hot", "cold", "restarted"])
def fetched(
    request: pytest.FixtureRequest, loaded: Any, tmp_path: Path
) -> Iterator[tuple[list[Any], list[int]]]:
    """Caches and rest of the prompt, from memory, from disk, and from disk in a new cache."""
    model, tokens, key = loaded
    folder = None if request.param == "hot" else tmp_path
    with TieredPromptCache(folder, block_tokens=BLOCK) as cache:
        cache.bind(key, model)
        live = make_prompt_cache(model)
        logits(model, tokens, live)
        cache.insert_cache(key, tokens, live)
        assert cache.flush(30)
        if request.param == "hot":
            yield cache.fetch_nearest_cache(key, tokens[:PROMPT])
            return
        if request.param == "cold":
            cache.trim_to(n_bytes=0)
            yield cache.fetch_nearest_cache(key, tokens[:PROMPT])
            return
    with TieredPromptCache(folder, block_tokens=BLOCK) as cache:
        cache.bind(key, model)
        yield cache.fetch_nearest_cache(key, tokens[:PROMPT])


def test_logits_are_bit_equal_and_tokens_the_same(loaded: Any, fetched: Any) -> None:
    """Anything but equality here is a wrong answer to a user."""
    model, tokens, _ = loaded
    caches, rest = fetched
    assert rest == tokens[PROMPT - 1 : PROMPT]
    cold = make_prompt_cache(model)
    logits(model, tokens[: PROMPT - 1], cold)
    want = logits(model, rest, cold)
    got = logits(model, rest, caches)
    assert mx.array_equal(want, got).item()
    assert greedy(model, got, caches, 8) == greedy(model, want, cold, 8)


def test_a_wrong_state_would_be_noticed(loaded: Any, fetched: Any) -> None:
    """The control: if logits didn't depend on the state, the test above would prove nothing."""
    model, tokens, _ = loaded
    caches, rest = fetched
    layer = caches[3]
    layer.keys[:, :, [7, 31]] = layer.keys[:, :, [31, 7]]
    cold = make_prompt_cache(model)
    logits(model, tokens[: PROMPT - 1], cold)
    assert not mx.array_equal(logits(model, rest, cold), logits(model, rest, caches)).item()
