"""Every cache layout that mlx-lm's architectures make comes back bit for bit.

By default one architecture for each combination of cache classes; all of them if the environment
variable TIEREDKV_ALL_MODELS is 1.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from bench import architectures
from bench.architectures import BLOCK_TOKENS, DECODED, PREFILL, Recording, build, key_of
from tieredkv import TieredPromptCache

# Each combination of cache classes and nesting once, and some with unlike shapes of one class.
REPRESENTATIVES = (
    "baichuan_m1",  # lists of a conv state and a ring or keys and values
    "deepseek_v3",  # keys and values of unlike widths
    "deepseek_v32",  # lists of two
    "falcon_h1",  # lists of a recurrent state and keys and values
    "gemma3_text",  # rings and keys and values
    "iquestloopcoder",  # more caches than layers
    "kimi_linear",  # recurrent with four arrays, and latent attention
    "llama4",  # chunks
    "longcat_flash_ngram",  # token ids as state
    "mamba",
    "minimax_m3_vl",  # lists of unlike lengths
    "nemotron_h",  # layers without a cache
    "qwen3",
    "recurrent_gemma",  # rings and recurrent
    "rwkv7",
)
REFUSED = ("deepseek_v41",)

EVERY_MODEL = os.environ.get("TIEREDKV_ALL_MODELS") == "1"
NAMES = [n for n in architectures.names() if n not in REFUSED] if EVERY_MODEL else REPRESENTATIVES

each = pytest.mark.parametrize("name", NAMES)


@lru_cache(maxsize=1)
def recorded(name: str) -> tuple[Any, Recording]:
    """A model and a prompt of it; the tests of one model follow each other."""
    model = build(name)
    return model, architectures.record(model, seed=1)


def opened(folder: Path | None, name: str, *models: Any) -> TieredPromptCache:
    cache = TieredPromptCache(folder, block_tokens=BLOCK_TOKENS)
    cache.bind(key_of(name), *models)
    return cache


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return all(mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


def assert_sound(cache: TieredPromptCache) -> None:
    stats = cache.stats()
    assert (stats.refused, stats.faults, stats.dropped, cache.check()) == ({}, {}, {}, [])


@each
class TestArchitecture:
    def test_hits_continue_bit_for_bit(self, name: str, tmp_path: Path) -> None:
        """From memory, then from disk: else a hit would change what the model says."""
        model, recording = recorded(name)
        with opened(tmp_path, name, model) as cache:
            architectures.store(cache, name, recording)
            assert architectures.differences(cache, name, model, recording) == []
            assert cache.flush(30)
            assert_sound(cache)
        with opened(tmp_path, name, model) as cache:
            assert architectures.differences(cache, name, model, recording) == []
            assert cache.stats().hit_tokens_cold > 0
            assert_sound(cache)

    def test_wrong_state_of_any_layer_shows(self, name: str) -> None:
        """The test above proves nothing about a layer whose state doesn't reach the logits."""
        model, recording = recorded(name)
        other = architectures.record(model, seed=2)
        for n in (PREFILL[-1], DECODED[-1]):
            right = architectures.feed(model, recording.at(n), [9, 8, 7])
            for i, wrong in enumerate(other.at(n)):
                caches = recording.at(n)
                caches[i] = wrong
                logits = architectures.feed(model, caches, [9, 8, 7])
                assert not mx.array_equal(right, logits).item(), f"layer {i} at {n}"


@pytest.mark.skipif(not EVERY_MODEL, reason="builds over a hundred models, `make models` does")
def test_representatives_have_every_combination_of_classes() -> None:
    """A new architecture could bring one that the default run doesn't have."""

    def signature(name: str) -> frozenset[Any]:
        def kinds(cache: Any) -> Any:
            nested = getattr(cache, "caches", None)
            return tuple(map(kinds, nested)) if nested else type(cache).__name__

        return frozenset(map(kinds, architectures.make_prompt_cache(build(name))))

    known = {signature(n) for n in (*REPRESENTATIVES, *REFUSED)}
    assert [n for n in architectures.names() if signature(n) not in known] == []


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_cache_class_is_refused(name: str, tmp_path: Path) -> None:
    """State that isn't understood must be a miss, never a guess."""
    model, recording = recorded(name)
    with opened(tmp_path, name, model) as cache:
        architectures.store(cache, name, recording)
        assert cache.fetch_nearest_cache(key_of(name), recording.tokens)[0] is None
        stats = cache.stats()
        # Once more than was inserted, since binding found it first.
        assert stats.refused == {"class": len(recording.live) + 1}
        assert (stats.faults, stats.cold.n_blocks) == ({}, 0)


_IN_NEW_PROCESS = """
import hashlib, sys
from bench import architectures as a
from tieredkv import TieredPromptCache

name, folder, *prompt = sys.argv[1:]
prompt = [int(t) for t in prompt]
model = a.build(name)
with TieredPromptCache(folder, block_tokens=a.BLOCK_TOKENS) as cache:
    cache.bind(a.key_of(name), model)
    caches, rest = cache.fetch_nearest_cache(a.key_of(name), prompt)
    logits = a.feed(model, caches, rest)
    print(len(prompt) - len(rest), hashlib.sha256(memoryview(logits)).hexdigest())
"""


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "falcon_h1"])
def test_a_new_process_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    """State that holds only as long as the process would make the disk useless."""
    model, recording = recorded(name)
    with opened(tmp_path, name, model) as cache:
        architectures.store(cache, name, recording)
    prompt = [*recording.tokens, 9, 8, 7]
    logits = architectures.feed(model, recording.at(DECODED[-1]), [9, 8, 7])
    tests = Path(__file__).parent
    found = subprocess.run(
        [sys.executable, "-c", _IN_NEW_PROCESS, name, str(tmp_path), *map(str, prompt)],
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
    )
    expected = hashlib.sha256(memoryview(logits)).hexdigest()
    assert found.stdout.split() == [str(DECODED[-1]), expected]


def test_a_draft_model_comes_back_beside_its_target(tmp_path: Path) -> None:
    """The host puts both models' layers into one list and takes them apart by count."""
    models = build("qwen3"), build("smollm3", num_hidden_layers=2)
    runs = [architectures.record(m, seed=1) for m in models]
    # Greedy answers differ, the prompt doesn't.
    n, prompt = PREFILL[-1], runs[0].tokens[: PREFILL[-1]]
    with opened(tmp_path, "pair", *models) as cache:
        cache.insert_cache(key_of("pair"), prompt, [*runs[0].at(n), *runs[1].at(n)])
    with opened(tmp_path, "pair", *models) as cache:
        got, rest = cache.fetch_nearest_cache(key_of("pair"), [*prompt, 5, 6])
        assert (rest, cache.stats().hit_tokens_cold) == ([5, 6], n)
        cut = len(runs[0].live[n])
        for model, run, part in zip(models, runs, (got[:cut], got[cut:]), strict=True):
            live = run.at(n)
            assert architectures.state(part) == architectures.state(live)
            assert same(
                architectures.continued(model, part, rest),
                architectures.continued(model, live, rest),
            )


def quantized(caches: list[KVCache], bits: int) -> list[Any]:
    return [c.to_quantized(group_size=32, bits=bits) for c in caches]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_state_comes_back_bit_for_bit(bits: int, tmp_path: Path) -> None:
    """Packed words, scales and biases must each go back to their place."""
    model, key = build("qwen3", head_dim=64), key_of("quantized")
    recording = architectures.record(model, seed=1)
    n, prompt = PREFILL[-1], [*recording.tokens[: PREFILL[-1]], 5, 6]
    with TieredPromptCache(tmp_path, block_tokens=BLOCK_TOKENS) as cache:
        cache.insert_cache(key, prompt[:n], quantized(recording.at(n), bits))
    with TieredPromptCache(tmp_path, block_tokens=BLOCK_TOKENS) as cache:
        got, rest = cache.fetch_nearest_cache(key, prompt)
        live = quantized(recording.at(n), bits)
        assert rest == [5, 6]
        assert [(c.bits, c.group_size) for c in got] == [(bits, 32)] * len(live)
        assert architectures.state(got) == architectures.state(live)
        assert same(
            architectures.continued(model, got, rest), architectures.continued(model, live, rest)
        )


def test_four_and_eight_bits_are_never_mixed(tmp_path: Path) -> None:
    """Their arrays can't be joined, and one's rows mean nothing in the other."""
    model, key = build("qwen3", head_dim=64), key_of("quantized")
    first, second = (architectures.record(model, seed) for seed in (1, 2))
    n = PREFILL[-1]
    with TieredPromptCache(tmp_path, block_tokens=BLOCK_TOKENS) as cache:
        cache.insert_cache(key, first.tokens[:n], quantized(first.at(n), 8))
        cache.insert_cache(key, second.tokens[:n], quantized(second.at(n), 4))
        assert cache.fetch_nearest_cache(key, first.tokens)[0] is None
        got, _ = cache.fetch_nearest_cache(key, second.tokens)
        assert got is not None
        assert {c.bits for c in got} == {4}
        assert cache.stats().faults == {}


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1", "llama4"])
def test_a_restored_cache_is_private(name: str) -> None:
    """One request's tokens would show up in the next one's state."""
    model, recording = recorded(name)
    with opened(None, name, model) as cache:
        architectures.store(cache, name, recording)
        prompt = [*recording.tokens, 9, 8, 7]
        first, rest = cache.fetch_nearest_cache(key_of(name), prompt)
        before = architectures.state(first)
        architectures.continued(model, first, rest)
        again, _ = cache.fetch_nearest_cache(key_of(name), prompt)
        assert architectures.state(again) == before
