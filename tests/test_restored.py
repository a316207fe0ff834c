"""Caches whose rows are copied from the blocks when they are first used."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import caches
import mlx.core as mx
import pytest
from caches import MODEL
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from tieredkv import TieredPromptCache

TOKENS = list(range(11))


@pytest.fixture
def store() -> TieredPromptCache:
    cache = TieredPromptCache(block_tokens=4)
    cache.insert_cache(MODEL, TOKENS, caches.make(TOKENS))
    return cache


def restored(store: TieredPromptCache, n: int = len(TOKENS)) -> list[Any]:
    found, rest = store.fetch_nearest_cache(MODEL, [*TOKENS[:n], 77])
    assert rest == [77]
    assert found is not None
    return found


def rows_of(batch: BatchKVCache, i: int = 0) -> list[Any]:
    """What the batch would give back of its sequence ``i``."""
    return batch.extract(i)


def test_a_prefix_alone_in_a_batch_is_the_batch(store: TieredPromptCache) -> None:
    """The way of most requests to a server."""
    merged = [type(c).merge([c]) for c in restored(store)]
    assert all(type(batch) is BatchKVCache for batch in merged)
    assert caches.holds([rows_of(batch) for batch in merged], TOKENS)
    upstreams = BatchKVCache.merge([caches.make(TOKENS)[0]])
    assert merged[0]._idx == upstreams._idx
    assert mx.array_equal(merged[0].offset, upstreams.offset).item()
    assert mx.array_equal(merged[0].left_padding, upstreams.left_padding).item()


@pytest.mark.parametrize("n_left", [0, 1])
def test_without_threads_the_rows_are_copied_all_the_same(
    store: TieredPromptCache, n_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this failed, a host that has its hit would die once the system has no thread left."""
    left = iter(range(n_left))
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    found, other = restored(store), restored(store)
    monkeypatch.setattr(threading.Thread, "start", start_some)
    assert caches.holds(found, TOKENS)
    assert caches.holds([rows_of(type(c).merge([c])) for c in other], TOKENS)


def test_a_batch_grows_as_one_of_mlx_lms(store: TieredPromptCache) -> None:
    """Rows to spare must not be taken for tokens."""
    ours = type(restored(store)[0]).merge([restored(store)[0]])
    theirs = BatchKVCache.merge([caches.make(TOKENS)[0]])
    for n in (1, 5, 1, 300):
        x = mx.random.normal((1, caches.HEADS, n, caches.WIDTH), key=mx.random.key(n))
        got, want = ours.update_and_fetch(x, x + 1), theirs.update_and_fetch(x, x + 1)
        assert all(mx.array_equal(a, b).item() for a, b in zip(got, want, strict=True))
    other = BatchKVCache.merge([caches.make(TOKENS[:5])[0]])
    ours.extend(other)
    theirs.extend(BatchKVCache.merge([caches.make(TOKENS[:5])[0]]))
    for i in (0, 1):
        assert mx.array_equal(ours.extract(i).keys, theirs.extract(i).keys).item()


@pytest.mark.parametrize("others", [[5], [11, 3], [None]])
def test_prefixes_of_unlike_lengths_make_a_batch(
    store: TieredPromptCache, others: list[int | None]
) -> None:
    """Requests that start together are merged together, with hits or without."""
    lists = [restored(store)]
    lists += [[KVCache(), KVCache()] if n is None else restored(store, n) for n in others]
    for layer in (0, 1):
        members = [found[layer] for found in lists]
        batch = type(members[0]).merge(members)
        for i, n in enumerate([11, *others]):
            kept = [rows_of(batch, i)] if n else []
            want = caches.rows(TOKENS[: n or 0], 2 * layer)
            assert all(mx.array_equal(c.keys, mx.array(want)).item() for c in kept)


def test_what_was_trimmed_is_not_merged(store: TieredPromptCache) -> None:
    """A host may cut what it fetched before it uses it."""
    found = restored(store)
    assert trim_prompt_cache(found, 4) == 4
    assert caches.holds([rows_of(type(c).merge([c])) for c in found], TOKENS[:7])


def test_a_copy_is_independent(store: TieredPromptCache) -> None:
    """mlx-lm's users copy caches to branch a conversation."""
    found = restored(store)
    branch = copy.deepcopy(found)
    x = mx.ones((1, caches.HEADS, 1, caches.WIDTH))
    for c in found:
        c.update_and_fetch(x, x)
    assert caches.holds(branch, TOKENS)


def test_it_is_saved_as_one_of_mlx_lms(store: TieredPromptCache, tmp_path: Path) -> None:
    """The name of its class goes into the file."""
    save_prompt_cache(str(tmp_path / "saved.safetensors"), restored(store))
    loaded = load_prompt_cache(str(tmp_path / "saved.safetensors"))
    assert caches.holds(loaded, TOKENS)
    assert {type(c) for c in loaded} == {KVCache}


def test_it_is_not_empty_before_it_is_used(store: TieredPromptCache) -> None:
    """Hosts make new caches for empty ones."""
    found = restored(store)
    assert not any(c.empty() for c in found)
    assert [c.size() for c in found] == [len(TOKENS)] * len(found)
    assert all(c.nbytes > 0 for c in found)


def test_it_can_be_inserted_as_it_is(store: TieredPromptCache) -> None:
    """The sequential path inserts the very list that it fetched."""
    store.insert_cache(MODEL, TOKENS, restored(store))
    assert store.stats().refused == {}
    assert caches.holds(restored(store), TOKENS)


def test_the_first_write_copies_nothing_again() -> None:
    """A second reference to the rows would make mlx copy all of them to change one."""
    n = 4096
    cache = TieredPromptCache()
    live = [KVCache()]
    x = mx.zeros((1, 4, n, 64))
    live[0].update_and_fetch(x, x)
    cache.insert_cache(MODEL, list(range(n)), live)
    del live, x
    found, _ = cache.fetch_nearest_cache(MODEL, list(range(n + 1)))
    assert found is not None
    one = mx.zeros((1, 4, 1, 64))
    mx.eval(found[0].state)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found[0].update_and_fetch(one, one)
    mx.eval(found[0].state)
    assert mx.get_peak_memory() - before < n * 64


def test_merged_layers_take_the_memory_of_one_copy() -> None:
    """If this failed, a batch would hold a long prompt twice."""
    n = 4096
    cache = TieredPromptCache()
    live = [KVCache() for _ in range(4)]
    x = mx.zeros((1, 4, n, 64))
    for c in live:
        c.update_and_fetch(x, x)
    cache.insert_cache(MODEL, list(range(n)), live)
    del live, x, c
    found, _ = cache.fetch_nearest_cache(MODEL, list(range(n + 1)))
    assert found is not None
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    merged = [type(c).merge([c]) for c in found]
    taken = sum(b.keys.nbytes + b.values.nbytes for b in merged)
    assert mx.get_active_memory() - before <= taken * 1.01
    assert mx.get_peak_memory() - before <= taken * 1.01


def test_it_can_be_merged_again(store: TieredPromptCache) -> None:
    """mlx-lm says that the caches given to a batch aren't changed: hosts use them for several."""
    found = restored(store)
    batches = [[type(c).merge([c]) for c in found] for _ in range(2)]
    batches.append([type(c).merge([c, KVCache()]) for c in found])
    batches.append([type(c).merge([c]) for c in found])
    for merged in batches:
        assert caches.holds([rows_of(batch) for batch in merged], TOKENS)


def test_one_layer_may_be_looked_at_before_another_is_merged(store: TieredPromptCache) -> None:
    """The first look copies all layers at once."""
    first, second = restored(store)
    assert first.keys is not None
    assert caches.holds([first, rows_of(type(second).merge([second]))], TOKENS)


def test_it_copies_pickles_and_is_rebuilt_as_mlx_lms_does(store: TieredPromptCache) -> None:
    """Whatever works with mlx-lm's class is used somewhere."""
    copies = [copy.copy(c) for c in restored(store)]
    sent = pickle.loads(pickle.dumps([len(c.__reduce__()) for c in restored(store)]))
    rebuilt = [type(c).from_state(c.state) for c in restored(store)]
    assert sent == [2, 2]
    for live in (copies, rebuilt):
        assert caches.holds(live, TOKENS)
    assert type(restored(store)[0])().empty()


def test_its_size_is_known_without_a_copy(store: TieredPromptCache) -> None:
    """Servers ask all that waits for its size, again and again."""
    found = restored(store)
    sizes = [c.nbytes for c in found]
    assert all(c._prefix is not None and not c._prefix.is_taken for c in found)
    assert sizes == [c.keys.nbytes + c.values.nbytes for c in found]
