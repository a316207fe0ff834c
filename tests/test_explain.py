"""Why a prompt hits or misses: each cause planted in a real store, and told for what it is."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import caches
import mlx.core as mx
import pytest
import test_windows
import tiny
from caches import MODEL

from bench.architectures import build
from tieredkv import Quantization, SaltedPrompt, TieredPromptCache, prompt_cache
from tieredkv.explain import Explanation

BLOCK = 4
PROMPT = [*range(20)]


def opened(folder: Path | None, **more: Any) -> TieredPromptCache:
    return TieredPromptCache(folder, block_tokens=BLOCK, **more)


def put(cache: TieredPromptCache, tokens: Sequence[int], model: Any = MODEL) -> None:
    cache.insert_cache(model, tokens, caches.make(tokens))
    assert cache.flush()


def explained(folder: Path, tokens: Sequence[int], model: Any = MODEL, **more: Any) -> Explanation:
    """By a cache that is opened for it, as after a restart."""
    with opened(folder, **more) as cache:
        found = cache.explain(model, tokens)
        _, rest = cache.fetch_nearest_cache(model, tokens)
        assert found.n_tokens == len(tokens) - len(rest)
    return found


def fields(found: Explanation) -> list[str]:
    return [difference.field for difference in found.differences]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cold tier that has `PROMPT`."""
    with opened(tmp_path) as cache:
        put(cache, PROMPT)
    return tmp_path


def test_a_prompt_that_is_all_there(folder: Path) -> None:
    """It must not look for a fault where there is none."""
    found = explained(folder, PROMPT)
    assert (found.reason, found.n_tokens, found.n_prompt) == ("hit", 19, 20)
    assert found.id is not None
    assert len(found.id) == 16


def test_a_prompt_that_goes_on(folder: Path) -> None:
    """The next turn of a conversation is no fault either."""
    found = explained(folder, [*PROMPT, 50, 51, 52])
    assert (found.reason, found.n_tokens, found.divergence) == ("ended", 20, None)


@pytest.mark.parametrize("n", [0, 3, 8, 10])
def test_a_prompt_that_parts_from_what_is_stored(folder: Path, n: int) -> None:
    """What people look for is the one token by which a template or a document differs, whether
    that is at a block's start or in it.
    """
    found = explained(folder, [*PROMPT[:n], 50, 51])
    assert (found.reason, found.n_tokens) == ("diverged", n)
    assert found.divergence is not None
    assert found.divergence.index == n
    assert found.divergence.before == tuple(PROMPT[:n])
    assert found.divergence.prompt == (50, 51)
    assert found.divergence.stored[:1] == (n,)


def test_nothing_for_this_model(folder: Path) -> None:
    """The first request to another model, in a store that others have filled."""
    found = explained(folder, PROMPT, ("another", None, None))
    assert (found.reason, found.n_tokens, fields(found)) == ("absent", 0, ["model"])


def test_nothing_at_all(tmp_path: Path) -> None:
    """A new store."""
    assert explained(tmp_path, PROMPT).reason == "empty"


def test_weights_that_changed(tmp_path: Path) -> None:
    """A model that was trained on, or downloaded again, under its old path."""
    key = (str(tiny.save(tmp_path / "model")), None, None)
    with opened(tmp_path / "cold") as cache:
        put(cache, PROMPT, key)
    tiny.save(tmp_path / "model", seed=1)
    found = explained(tmp_path / "cold", PROMPT, key)
    assert (found.reason, found.n_elsewhere, fields(found)) == ("other_weights", 20, ["weights"])
    assert found.differences[0].stored.startswith("dir:")


def test_weights_that_were_cast_after_loading(tmp_path: Path) -> None:
    """The files are the same, and what is in memory is not."""
    model = build("llama")
    with opened(tmp_path) as cache:
        cache.bind(MODEL, model)
        put(cache, PROMPT)
    model.set_dtype(mx.bfloat16)
    with opened(tmp_path) as cache:
        cache.bind(MODEL, model)
        found = cache.explain(MODEL, PROMPT)
    assert (found.reason, fields(found)[0]) == ("other_weights", "weights")


def test_an_adapter(folder: Path) -> None:
    """State of the plain model is of no use with an adapter."""
    found = explained(folder, PROMPT, ("model", "an adapter", None))
    assert (found.reason, fields(found)) == ("other_adapter", ["adapter"])


def test_another_version_of_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade all is cold, and this must say that it was the upgrade."""
    real = prompt_cache.version
    with monkeypatch.context() as patched:
        patched.setattr(prompt_cache, "version", lambda p: "0.31.0" if p == "mlx" else real(p))
        with opened(tmp_path) as cache:
            put(cache, PROMPT)
    found = explained(tmp_path, PROMPT)
    assert (found.reason, fields(found)) == ("other_mlx", ["mlx"])
    assert f"stored by mlx 0.31.0, this is {real('mlx')}" in found.text


def test_another_salt(tmp_path: Path) -> None:
    """A tenant's prompts are nobody else's; how much of one they have is not told."""
    with opened(tmp_path) as cache:
        put(cache, SaltedPrompt(PROMPT, b"alice"))
    found = explained(tmp_path, SaltedPrompt(PROMPT, b"bob"))
    assert (found.reason, found.n_elsewhere, fields(found)) == ("other_salt", 0, ["salt"])
    assert explained(tmp_path, PROMPT).reason == "other_salt"
    assert explained(tmp_path, SaltedPrompt(PROMPT, b"alice")).reason == "hit"


def test_another_size_of_blocks(tmp_path: Path) -> None:
    """Two programs with other settings share nothing."""
    with TieredPromptCache(tmp_path, block_tokens=8) as cache:
        put(cache, PROMPT)
    found = explained(tmp_path, PROMPT)
    assert (found.reason, found.n_elsewhere) == ("other_block_tokens", 20)


def test_lossy_blocks_where_exact_ones_are_wanted(tmp_path: Path) -> None:
    """A server that was started with --cold-quantize once, and without it now."""
    with opened(tmp_path, cold_quantize="q8") as cache:
        put(cache, PROMPT)
    assert explained(tmp_path, PROMPT).reason == "other_cold_quantize"


def test_blocks_that_were_evicted(tmp_path: Path) -> None:
    """The cap is too low: the one cause that more disk would mend."""
    with opened(tmp_path) as cache:
        cache.insert_cache(MODEL, PROMPT, caches.make(PROMPT, layers=64))
        cache.flush()
        cache._store.cold.trim_to(cache._store.cold.n_bytes - 1)
    found = explained(tmp_path, [*PROMPT, 50])
    assert found.reason == "evicted"
    assert 0 < found.n_tokens < 20


def test_all_that_was_evicted(folder: Path) -> None:
    """Of a model that is bound even then."""
    with opened(folder) as cache:
        cache.fetch_nearest_cache(MODEL, PROMPT)
        cache.insert_cache(MODEL, [90, 91], caches.make([90, 91]))
        cache.flush()
        cache.trim_to(n_bytes=0)
        cache._store.cold.trim_to(0)
        assert cache.explain(MODEL, [*PROMPT, 50]).reason == "evicted"


def test_blocks_that_have_expired(tmp_path: Path) -> None:
    """They are there for some seconds yet, and are not to be found."""
    with opened(tmp_path) as cache:
        put(cache, SaltedPrompt(PROMPT[:12]))
        put(cache, SaltedPrompt(PROMPT, ttl=0.05))
    time.sleep(0.06)
    found = explained(tmp_path, [*PROMPT, 50])
    assert (found.reason, found.n_tokens) == ("expired", 12)


def test_a_block_that_has_expired_and_is_not_full(tmp_path: Path) -> None:
    """Most prompts end in one, which is found by its tokens: its key is another."""
    with opened(tmp_path) as cache:
        put(cache, SaltedPrompt(PROMPT[:3], ttl=0.05))
    time.sleep(0.06)
    found = explained(tmp_path, PROMPT[:3])
    assert (found.reason, found.n_tokens) == ("expired", 0)
    assert explained(tmp_path, [*PROMPT[:3], 50]).reason == "expired"


def test_layers_that_can_only_be_restored_where_their_state_was_kept(tmp_path: Path) -> None:
    """The blocks are all there, and of no use before the snapshot."""
    with opened(tmp_path) as cache:
        for n in (6, 20):
            cache.insert_cache(MODEL, PROMPT[:n], caches.make_hybrid(PROMPT[:n]))
    found = explained(tmp_path, [*PROMPT[:17], 50])
    assert (found.reason, found.n_tokens, found.n_stored) == ("state", 6, 17)
    assert found.divergence is not None
    assert found.divergence.index == 17
    found = explained(tmp_path, [*PROMPT[:5], 50])
    assert (found.reason, found.n_tokens, found.n_stored) == ("state", 0, 5)


def test_hits_that_end_with_a_step(tmp_path: Path) -> None:
    """With --kv-bits, two tokens after a step are there and can't be used."""
    how = Quantization(bits=4, group_size=32, start=20, step=8)
    with opened(tmp_path, quantization=how) as cache:
        put(cache, PROMPT[:18])
    found = explained(tmp_path, [*PROMPT[:18], 50], quantization=how)
    assert (found.reason, found.n_tokens, found.n_stored) == ("steps", 16, 18)
    found = explained(tmp_path, PROMPT[:18])
    assert (found.reason, fields(found)) == ("other_kv_bits", ["kv_bits"])
    assert "with --kv-bits 4" in found.text


def test_a_disk_that_is_slower_than_the_model(folder: Path) -> None:
    """A stalled disk makes misses of what is stored."""
    with opened(folder) as cache:
        for tokens in ([90, 91], [92, 93]):
            put(cache, tokens)
        cache.fetch_nearest_cache(MODEL, PROMPT)
        cache._store.hot.trim_to(0)
        cache._store.pace.promoted(1 << 20, 1000.0)
        (root,) = {fetched.root for fetched in cache._fetched}
        cache._store.pace.prefilled(root, 1000, 0.001)
        found = cache.explain(MODEL, PROMPT)
        assert (found.reason, found.n_tokens, found.n_stored) == ("pace", 0, 19)
        assert cache.fetch_nearest_cache(MODEL, PROMPT)[0] is None


def test_files_that_change_under_a_loaded_model(tmp_path: Path) -> None:
    """Until it is loaded again, nobody knows which weights are in memory."""
    key = (str(tiny.save(tmp_path / "model")), None, None)
    with opened(tmp_path / "cold") as cache:
        put(cache, PROMPT, key)
        tiny.save(tmp_path / "model", seed=1)
        assert cache.explain(key, PROMPT).reason == "changed"


def test_a_model_of_two_layouts(tmp_path: Path) -> None:
    """Without a model that is bound, nobody knows which of them is its own."""
    with opened(tmp_path) as cache:
        put(cache, PROMPT)
        cache.insert_cache(MODEL, PROMPT, caches.make(PROMPT, mx.bfloat16))
    assert explained(tmp_path, PROMPT).reason == "ambiguous"


def test_a_store_that_cant_be_used(tmp_path: Path) -> None:
    """Served from memory only, with a warning that nobody has read."""
    (tmp_path / "data.mdb").write_bytes(b"of another program")
    assert explained(tmp_path, PROMPT).reason == "unreadable"


def test_after_the_end(folder: Path) -> None:
    """A closed cache must neither raise nor say that nothing is stored."""
    cache = opened(folder)
    cache.close()
    assert cache.explain(MODEL, PROMPT).reason == "unreadable"


def test_memory_alone_is_looked_through() -> None:
    """What waits for the disk, or has none, is found by a fetch, so it must be found here."""
    with opened(None) as cache:
        cache.insert_cache(MODEL, PROMPT, caches.make(PROMPT))
        assert cache.explain(MODEL, PROMPT).reason == "hit"
        found = cache.explain(MODEL, [*PROMPT[:6], 50, 51])
        assert found.divergence is not None
        assert found.divergence.stored[:2] == (6, 7)


@pytest.mark.parametrize("tokens", [[], [7]])
def test_a_prompt_of_no_use(folder: Path, tokens: list[int]) -> None:
    """One token is always computed."""
    assert explained(folder, tokens).reason == "short"


def test_nothing_is_changed_by_it(folder: Path) -> None:
    """People ask about prompts that they don't send; that must not look like use."""
    with opened(folder) as cache:
        before = cache.stats(), cache.prefixes(9)
        for tokens in (PROMPT, PROMPT[:9], [50, 51]):
            cache.explain(MODEL, tokens)
        assert (cache.stats(), cache.prefixes(9)) == before


def test_it_is_plain_data(folder: Path) -> None:
    """It goes out as JSON."""
    import json

    found = asdict(explained(folder, [*PROMPT[:6], 50, 51]))
    assert json.loads(json.dumps(found))["divergence"]["prompt"] == [50, 51]


@pytest.mark.parametrize("kind", ["plain", "hybrid", "windows"])
def test_it_finds_what_a_fetch_finds(tmp_path: Path, kind: str) -> None:
    """An explanation of a hit that no fetch would make is worse than none."""
    dice = random.Random(7)
    prompts: list[list[int]] = []
    kept = opened(tmp_path)
    for _ in range(60):
        stem = dice.choice(prompts)[: dice.randrange(40)] if prompts else []
        tokens = stem + [dice.randrange(5) for _ in range(dice.randrange(1, 20))]
        prompts.append(tokens)
        with opened(tmp_path, hot_bytes=1 << 20) as fresh:
            for cache in (kept, fresh):
                found = cache.explain(MODEL, tokens)
                assert found.n_tokens <= found.n_stored or not found.n_tokens
                _, rest = cache.fetch_nearest_cache(MODEL, tokens)
                assert found.n_tokens == len(tokens) - len(rest), (tokens, found)
        if kind == "windows":
            test_windows.serve(kept, tokens, [*range(7, len(tokens), 7), len(tokens)])
        else:
            make = caches.make if kind == "plain" else caches.make_hybrid
            kept.insert_cache(MODEL, tokens, make(tokens))
        kept.flush()
    kept.close()
