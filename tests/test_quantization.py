"""A host that quantizes prompts while it computes them, as mlx-lm does for ``--kv-bits``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from bench.architectures import build
from tieredkv import Quantization, TieredPromptCache, layout

KEY = ("quantized", None, None)
HOW = Quantization(bits=4, group_size=32, start=20, step=16)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("qwen3", head_dim=64)


def opened(folder: Path, model: Any, how: Quantization = HOW) -> TieredPromptCache:
    cache = TieredPromptCache(folder, block_tokens=8, quantization=how)
    cache.bind(KEY, model)
    return cache


def answer(
    model: Any, prompt: list[int], cache: TieredPromptCache | None = None
) -> tuple[list[tuple[int, bytes]], int, list[int]]:
    """Tokens with their log probabilities, tokens reused, and the key under which it ended, of a
    request that is served as mlx-lm's sequential path does.
    """
    caches, rest = (None, prompt) if cache is None else cache.fetch_nearest_cache(KEY, prompt)
    n_cached = len(prompt) - len(rest)
    live = make_prompt_cache(model) if caches is None else caches

    def progress(done: int, total: int) -> None:
        if cache is not None and 0 < done < total:
            cache.insert_cache(KEY, prompt[: n_cached + done], live)

    steps = generate_step(
        mx.array(rest),
        model,
        max_tokens=6,
        prompt_cache=live,
        prefill_step_size=HOW.step,
        kv_bits=HOW.bits,
        kv_group_size=HOW.group_size,
        quantized_kv_start=HOW.start,
        prompt_progress_callback=progress,
    )
    found = [(token, bytes(memoryview(logprobs.astype(mx.float32)))) for token, logprobs in steps]
    key = (prompt + [token for token, _ in found])[: live[0].offset]
    if cache is not None:
        cache.insert_cache(KEY, key, live)
    return found, n_cached, key


def test_answers_are_those_without_the_cache(model: Any, tmp_path: Path) -> None:
    """When a prompt is quantized decides which of its tokens see quantized ones."""
    dice = random.Random(3)
    prompts: list[list[int]] = []
    reused = set()
    with opened(tmp_path, model) as cache:
        for _ in range(60):
            stem = dice.choice(prompts)[: dice.randrange(90)] if prompts else []
            prompt = stem + [dice.randrange(120) for _ in range(dice.randrange(1, 60))]
            want, _, _ = answer(model, prompt)
            got, n, key = answer(model, prompt, cache)
            assert got == want, (prompt, n)
            prompts.append(key)
            reused.add(n)
        assert cache.stats().faults == {}
        assert cache.check() == []
    assert {0, 16, 32, 48} <= reused
    assert all(n % HOW.step == 0 for n in reused)


def test_so_they_are_after_a_restart(model: Any, tmp_path: Path) -> None:
    """The layout that a model is bound with is not the one that its long prompts end in."""
    prompt = [(7 * i) % 113 for i in range(70)]
    with opened(tmp_path, model) as cache:
        want, n, _ = answer(model, prompt, cache)
        assert n == 0
    with opened(tmp_path, model) as cache:
        got, n, _ = answer(model, prompt, cache)
    assert (got, n) == (want, 64)


def test_state_that_was_quantized_early_is_refused(model: Any, tmp_path: Path) -> None:
    """A longer prompt would compute the same tokens before it is quantized."""
    prompt = [(5 * i) % 113 for i in range(25)]
    with opened(tmp_path, model) as cache:
        answer(model, prompt, cache)
        assert cache.stats().refused.keys() == {"quantized"}


def test_other_quantization_is_another_namespace(model: Any, tmp_path: Path) -> None:
    """State of another step, start or number of bits is another state."""
    prompt = [(7 * i) % 113 for i in range(70)]
    with opened(tmp_path, model) as cache:
        answer(model, prompt, cache)
    others = (
        Quantization(8, 32, 20, 16),
        Quantization(4, 32, 24, 16),
        Quantization(4, 32, 20, 8),
        None,
    )
    for how in others:
        with TieredPromptCache(tmp_path, block_tokens=8, quantization=how) as cache:
            cache.bind(KEY, model)
            assert cache.fetch_nearest_cache(KEY, prompt)[0] is None


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64), (3, 64)])
def test_the_layout_after_quantization_is_known_before(
    model: Any, bits: int, group_size: int
) -> None:
    """A fetch looks for state that its model hasn't made yet in this process."""
    live = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=live))
    packed = [c.to_quantized(group_size=group_size, bits=bits) for c in live]
    wanted = layout.inspect(live, 3).quantized(group_size, bits)
    assert layout.inspect(packed, 3) == wanted
