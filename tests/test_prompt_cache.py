"""The drop-in: upstream's documented behaviour, ours where it differs, and the one law."""

from __future__ import annotations

import gc
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import caches
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from caches import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from tieredkv import TieredPromptCache

PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredPromptCache]:
    folder = tmp_path / "cold" if request.param == "disk" else None
    with TieredPromptCache(folder, block_tokens=4) as c:
        yield c


def insert(cache: TieredPromptCache, tokens: list[int], kind: str = "assistant", **kw) -> None:
    cache.insert_cache(MODEL, tokens, caches.make(tokens, **kw), cache_type=kind)


def hit(cache: TieredPromptCache, tokens: list[int], **kw) -> int:
    """Hit length of a prompt, having checked that what came is its state and the rest is right."""
    found, rest = cache.fetch_nearest_cache(MODEL, tokens)
    n = len(tokens) - len(rest)
    assert rest == tokens[n:]
    if found is None:
        assert n == 0
    else:
        assert n > 0
        assert caches.holds(found, tokens[:n], **kw)
    return n


def longest(prompts: list[list[int]], tokens: list[int]) -> int:
    """Hit length by looking at every prompt."""
    best = 0
    for p in prompts:
        n = 0
        while n < min(len(p), len(tokens) - 1) and p[n] == tokens[n]:
            n += 1
        best = max(best, n)
    return best


# ---- upstream's documented behaviour


def test_a_miss_is_none_and_all_tokens(cache: TieredPromptCache) -> None:
    """The host tests for None; an empty list would be taken for a cache."""
    assert cache.fetch_nearest_cache(MODEL, [1, 2]) == (None, [1, 2])


def test_the_longest_prefix_wins(cache: TieredPromptCache) -> None:
    """A shorter one would be right but slow."""
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 3, 4, 5, 6])
    insert(cache, [1, 2, 9, 9, 9, 9, 9, 9])
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_a_longer_entry_is_cut_to_the_common_prefix(cache: TieredPromptCache) -> None:
    """Upstream trims it; so a prompt that was edited near its end hits."""
    insert(cache, list(range(20)))
    assert hit(cache, [*range(10), 99, 98]) == 10


def test_a_hit_can_be_extended_and_inserted_again(cache: TieredPromptCache) -> None:
    """The sequential path grows what it fetched, and inserts it."""
    insert(cache, [10] * 24)
    tokens = [10] * 24 + [20] * 5
    found, rest = cache.fetch_nearest_cache(MODEL, tokens)
    assert rest == [20] * 5
    for c, full in zip(found, caches.make(tokens), strict=True):
        c.update_and_fetch(full.keys[:, :, 24:29], full.values[:, :, 24:29])
    cache.insert_cache(MODEL, tokens, found)
    assert hit(cache, tokens[:26] + [40] * 8) == 26
    assert len(cache) == 1


def test_models_do_not_share(cache: TieredPromptCache) -> None:
    """State of other weights is another model's."""
    insert(cache, [1, 2, 3])
    assert cache.fetch_nearest_cache(("other", None, None), [1, 2, 3])[0] is None
    assert cache.fetch_nearest_cache(("model", "adapter", None), [1, 2, 3])[0] is None
    assert cache.fetch_nearest_cache(("model", None, "draft"), [1, 2, 3])[0] is None


def test_the_least_recently_used_entry_leaves() -> None:
    """And a hit counts as a use, which upstream forgets."""
    cache = TieredPromptCache(max_entries=2, block_tokens=4)
    insert(cache, [1, 2])
    insert(cache, [2, 3])
    assert hit(cache, [1, 2, 0]) == 2
    insert(cache, [3, 4])
    assert len(cache) == 2
    assert hit(cache, [2, 3, 0]) == 0
    assert hit(cache, [1, 2, 0]) == 2
    assert hit(cache, [3, 4, 0]) == 2


def test_entries_leave_by_type() -> None:
    """Replies first, then user turns, then system prompts, as upstream orders them."""
    cache = TieredPromptCache(max_entries=3, block_tokens=4)
    insert(cache, [1, 1], "system")
    insert(cache, [2, 2], "user")
    insert(cache, [3, 3], "assistant")
    insert(cache, [4, 4], "assistant")
    assert hit(cache, [3, 3, 0]) == 0
    assert [hit(cache, [t, t, 0]) for t in (1, 2, 4)] == [2, 2, 2]


def test_the_byte_cap_holds_and_trim_to_lowers_it() -> None:
    """Upstream's example: nine bytes of three entries, then six of two."""
    one = 2 * 2 * caches.HEADS * caches.WIDTH * 4 * 2
    cache = TieredPromptCache(hot_bytes=3 * one + one // 3, block_tokens=4)
    for t in ([1, 2], [3, 4], [4, 5], [6, 7]):
        insert(cache, t)
    assert (len(cache), cache.nbytes) == (3, 3 * one)
    cache.trim_to(n_bytes=2 * one + 1)
    assert (len(cache), cache.nbytes) == (2, 2 * one)
    assert hit(cache, [1, 2, 0]) == 0
    assert hit(cache, [3, 4, 0]) == 0
    assert hit(cache, [4, 5, 0]) == 2


def test_trim_to_takes_entries_and_negative_bytes(cache: TieredPromptCache) -> None:
    """The server passes cap minus what is active, which can be below zero."""
    insert(cache, [1, 2, 3])
    insert(cache, [4, 5, 6])
    cache.flush()
    cache.trim_to(n_sequences=1)
    assert len(cache) == 1
    cache.trim_to(n_bytes=-5)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_stats_by_type_name_all_types(cache: TieredPromptCache) -> None:
    """The server logs each of them at every request."""
    insert(cache, [1, 2], "user")
    assert cache.stats_by_type() == {
        "system": {"n_sequences": 0, "n_bytes": 0},
        "user": {"n_sequences": 1, "n_bytes": cache.nbytes},
        "assistant": {"n_sequences": 0, "n_bytes": 0},
    }


# ---- where we differ on purpose


def test_at_least_one_token_is_left(cache: TieredPromptCache) -> None:
    """An empty rest kills the batched server and drops the connection on the sequential one."""
    insert(cache, list(range(8)))
    assert hit(cache, list(range(8))) == 7
    assert hit(cache, [0]) == 0


def test_prefixes_of_one_token_are_found(cache: TieredPromptCache) -> None:
    """Upstream can't reach them."""
    insert(cache, [7])
    assert hit(cache, [7, 8]) == 1


def test_no_tokens_are_a_miss(cache: TieredPromptCache) -> None:
    """Nothing to look up is nothing found, not an error."""
    assert cache.fetch_nearest_cache(MODEL, []) == (None, [])


def test_memory_pressure_demotes_and_does_not_discard(tmp_path: Path) -> None:
    """What leaves memory is still on disk, and comes back."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, list(range(10)))
        assert cache.flush(10)
        cache.trim_to(n_bytes=0)
        assert cache.nbytes == 0
        assert hit(cache, list(range(10))) == 9
        stats = cache.stats()
        assert (stats.demotes, stats.evictions_hot, stats.promotes) == (3, 0, 3)
        assert stats.hit_tokens_cold == 9


# ---- the law


def test_what_is_fetched_is_private(cache: TieredPromptCache) -> None:
    """One request's state leaked into another's: mlx-lm 965 and 975."""
    insert(cache, [1, 2, 3, 4, 5])
    found, _ = cache.fetch_nearest_cache(MODEL, [1, 2, 3, 4, 5])
    for c in found:
        c.keys[...] = 0
        c.update_and_fetch(mx.ones((1, 2, 1, 4)), mx.ones((1, 2, 1, 4)))
        mx.eval(c.keys, c.values)
    assert hit(cache, [1, 2, 3, 4, 5]) == 4


def test_what_is_inserted_is_as_it_was_then(tmp_path: Path) -> None:
    """The host writes on while the writer reads: what counts is the moment of the insert."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        tokens = list(range(9))
        live = caches.make(tokens)
        for c in live:
            c.keys = c.keys * 1
        cache.insert_cache(MODEL, tokens, live)
        for c in live:
            c.keys[...] = 0
            c.values[...] = 0
            mx.eval(c.keys, c.values)
        assert cache.flush(10)
        cache.trim_to(n_bytes=0)
        assert hit(cache, tokens) == 8


def test_the_callers_list_may_change_afterwards(cache: TieredPromptCache) -> None:
    """The sequential path appends generated tokens to the list that it passed."""
    tokens = [1, 2, 3, 4, 5]
    live = caches.make(tokens)
    cache.insert_cache(MODEL, tokens, live)
    tokens += [6, 7]
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7]) == 5


def test_a_rest_is_a_list_of_its_own(cache: TieredPromptCache) -> None:
    """The host pops from it."""
    tokens = [1, 2, 3]
    _, rest = cache.fetch_nearest_cache(MODEL, tokens)
    rest.clear()
    assert tokens == [1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPT, max_size=10), st.lists(PROMPT, min_size=1, max_size=6))
def test_partial_hits_are_exact_to_the_token(
    prompts: list[list[int]], queries: list[list[int]]
) -> None:
    """A hit shorter than the longest common prefix wastes work, a longer one is wrong."""
    cache = TieredPromptCache(block_tokens=4)
    for p in prompts:
        insert(cache, p)
    for q in queries:
        assert hit(cache, q) == longest(prompts, q)
    assert cache.check() == []


@settings(max_examples=15, deadline=None)
@given(
    st.lists(PROMPT, min_size=1, max_size=8),
    st.lists(PROMPT, min_size=1, max_size=4),
    st.integers(0, 20),
)
def test_partial_hits_are_exact_across_both_tiers(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    queries: list[list[int]],
    kept: int,
) -> None:
    """A prefix half in memory and half on disk is as long, and as right, as a whole one."""
    with TieredPromptCache(tmp_path_factory.mktemp("cold"), block_tokens=4) as cache:
        for p in prompts:
            insert(cache, p)
        assert cache.flush(10)
        for q in queries:
            cache.trim_to(n_bytes=kept * 128)
            assert hit(cache, q) == longest(prompts, q)
        assert cache.check() == []


def test_a_promote_that_does_not_fit_is_a_right_hit_all_the_same(tmp_path: Path) -> None:
    """Room that runs out in the middle of a promote must not leave unfilled rows."""
    tokens = list(range(40))
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, tokens)
        assert cache.flush(10)
    with TieredPromptCache(tmp_path, block_tokens=4, hot_bytes=3 * 4 * 128) as cache:
        assert hit(cache, tokens) == 39
        assert cache.nbytes <= 3 * 4 * 128


def test_every_promote_is_the_prompts_own(tmp_path: Path) -> None:
    """A returning conversation once got another one's state from disk, in silence."""
    rng = random.Random(3)
    prompts = [[rng.randrange(4) for _ in range(rng.randrange(1, 24))] for _ in range(200)]
    with TieredPromptCache(tmp_path, block_tokens=4, hot_bytes=3 * 4 * 128) as cache:
        for p in prompts:
            insert(cache, p)
            cache.flush(10)
            hit(cache, rng.choice(prompts))
        assert all(hit(cache, p) for p in prompts if len(p) > 1)
        assert cache.stats().promotes > 100
        assert cache.stats().faults == {}


# ---- refusals and faults


def test_state_that_can_not_be_stored_is_refused_counted_and_logged_once(
    cache: TieredPromptCache, caplog: pytest.LogCaptureFixture
) -> None:
    """A hybrid model must run as without a cache, and its owner must be told why."""
    (unknown,) = caches.make([1, 2, 3], layers=1)
    unknown.__class__ = type("Unknown", (KVCache,), {})
    with caplog.at_level(logging.WARNING, "tieredkv"):
        for _ in range(3):
            cache.insert_cache(MODEL, [1, 2, 3], [unknown])
    assert cache.stats().refused == {"class": 3}
    assert len(caplog.records) == 1
    assert hit(cache, [1, 2, 3]) == 0


@pytest.mark.parametrize(
    ("tokens", "live", "kind"),
    [
        ([1, 2, 3], caches.make([1, 2]), "assistant"),
        ([], [], "assistant"),
        ([1], [KVCache()], "assistant"),
        ([1, 2], caches.make([1, 2]), "nobody"),
    ],
    ids=["longer key", "nothing", "empty cache", "unknown type"],
)
def test_inserts_that_make_no_sense_are_refused(
    cache: TieredPromptCache, tokens: list[int], live: list[KVCache], kind: str
) -> None:
    """An exception here would end the server's generation thread."""
    cache.insert_cache(MODEL, tokens, live, cache_type=kind)
    assert sum(cache.stats().refused.values()) == 1
    assert len(cache) == 0


@pytest.mark.parametrize("bad", [["x", "y"], [1.5, 2.5], [[1], [2]], [2**70, 1], [None, None]])
def test_tokens_that_are_no_tokens_are_a_miss(cache: TieredPromptCache, bad: list) -> None:
    """Hostile input must not reach the generation thread as an exception."""
    cache.insert_cache(MODEL, bad, caches.make([1, 2]))
    assert cache.fetch_nearest_cache(MODEL, bad) == (None, bad)
    assert cache.stats().inserts == 0


@pytest.mark.parametrize("bad", [None, 5, mx.array(3.5)])
def test_what_is_no_sequence_is_a_miss(cache: TieredPromptCache, bad: Any) -> None:
    """Nor must this one."""
    assert cache.fetch_nearest_cache(MODEL, bad) == (None, [])


@pytest.mark.parametrize("make", [np.array, mx.array, tuple])
def test_tokens_may_be_arrays(cache: TieredPromptCache, make: Any) -> None:
    """What is left are plain ints all the same."""
    insert(cache, [1, 2, 3])
    found, rest = cache.fetch_nearest_cache(MODEL, make([1, 2, 9, 9]))
    assert found is not None
    assert rest == [9, 9]
    assert all(type(t) is int for t in rest)


@pytest.mark.parametrize(
    "bad",
    [
        {"hot_bytes": -1},
        {"cold_bytes": 0},
        {"block_tokens": 0},
        {"max_entries": -1},
        {"cold_bytes": 64e9},
        {"block_tokens": 2.5},
        {"salt": "text"},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_an_error_at_once(bad: dict[str, Any]) -> None:
    """Found later, they would be a fault at every call."""
    with pytest.raises((TypeError, ValueError)):
        TieredPromptCache(**bad)


def test_no_memory_turns_storing_off(caplog: pytest.LogCaptureFixture) -> None:
    """A way to run without, that isn't reported as a loss."""
    with caplog.at_level(logging.WARNING, "tieredkv"), TieredPromptCache(hot_bytes=0) as cache:
        insert(cache, [1, 2, 3])
        assert hit(cache, [1, 2, 3]) == 0
        assert cache.flush()
    assert not caplog.records


def test_a_refused_insert_costs_nobody_his_place() -> None:
    """Room made before the state is looked at would be lost for nothing."""
    cache = TieredPromptCache(hot_bytes=3 * 128 * 4, block_tokens=4)
    insert(cache, list(range(12)))
    live = caches.make(list(range(50, 62)))
    live[0].keys[0, 0, 5, 0] = float("nan")
    cache.insert_cache(MODEL, list(range(50, 62)), live)
    assert cache.stats().refused == {"nonfinite": 1}
    assert hit(cache, list(range(12))) == 11


def test_another_dtype_is_another_namespace(tmp_path: Path) -> None:
    """Merging caches of two dtypes casts one of them in silence."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, list(range(9)), dtype=mx.bfloat16)
        cache.flush()
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, [50, 51], dtype=mx.float32)
        assert hit(cache, list(range(9))) == 0


def test_after_a_restart_the_only_layout_stored_is_used(tmp_path: Path) -> None:
    """The first fetch comes before any insert that would tell the layout."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, list(range(9)), dtype=mx.bfloat16)
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        assert hit(cache, list(range(9)), dtype=mx.bfloat16) == 8


def test_two_layouts_of_one_model_are_a_miss_until_one_is_known(tmp_path: Path) -> None:
    """Which of them this process computes can't be told, and the wrong one changes the output."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, list(range(9)), dtype=mx.bfloat16)
        insert(cache, list(range(9)), dtype=mx.float32)
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        assert hit(cache, list(range(9))) == 0
        assert cache.stats().misses == {"ambiguous": 1}
        insert(cache, [70, 71], dtype=mx.float32)
        assert hit(cache, list(range(9))) == 8


def test_salts_do_not_share(tmp_path: Path) -> None:
    """Tenants must not find each other's prompts, in content or in time."""
    with TieredPromptCache(tmp_path, block_tokens=4, salt=b"a") as cache:
        insert(cache, list(range(9)))
    with TieredPromptCache(tmp_path, block_tokens=4, salt=b"b") as cache:
        assert hit(cache, list(range(9))) == 0
    with TieredPromptCache(tmp_path, block_tokens=4, salt=b"a") as cache:
        assert hit(cache, list(range(9))) == 8


def test_two_caches_on_one_directory_share_what_is_committed(tmp_path: Path) -> None:
    """Several servers on one machine should compute a prompt once."""
    with (
        TieredPromptCache(tmp_path, block_tokens=4) as one,
        TieredPromptCache(tmp_path, block_tokens=4) as two,
    ):
        insert(one, list(range(9)))
        assert one.flush(10)
        assert hit(two, list(range(9))) == 8
        assert two.stats().hit_tokens_cold == 8
        one.close()
        insert(two, list(range(50, 59)))
        assert two.flush(10)
        assert hit(two, list(range(50, 59))) == 8


def test_another_process_finds_what_this_one_inserted(tmp_path: Path) -> None:
    """Keys, layout and bytes must mean the same in a process that starts from nothing."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import caches; from tieredkv import TieredPromptCache\n"
        "with TieredPromptCache(sys.argv[1], block_tokens=4) as c:\n"
        "    found, rest = c.fetch_nearest_cache(caches.MODEL, list(range(9)))\n"
        "assert rest == [8] and caches.holds(found, list(range(8)))\n"
    )
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        insert(cache, list(range(9)))
        assert cache.flush(10)
        here = str(Path(__file__).parent)
        subprocess.run([sys.executable, "-c", program, str(tmp_path), here], check=True)


def test_a_path_as_key_is_the_folder_that_it_names(tmp_path: Path) -> None:
    """A key that is looked at as text only would keep old weights' state alive."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with TieredPromptCache(block_tokens=4) as cache:
        cache.insert_cache((folder, None, None), [1, 2, 3], caches.make([1, 2, 3]))
        found, _ = cache.fetch_nearest_cache((str(folder), None, None), [1, 2, 3])
        assert found is not None
    (folder / "config.json").write_text('{"changed": 1}')
    with TieredPromptCache(block_tokens=4) as cache:
        assert cache.fetch_nearest_cache((folder, None, None), [1, 2, 3])[0] is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, None, None), ("1", None, None)),
        (("m", None, None, "x"), ('["m","x"]', None, None)),
        (("m", None, None, "x"), ("m", None, None, "y")),
        (("m", "x"), ("m", None, "x")),
        (object(), object()),
    ],
    ids=str,
)
def test_keys_that_differ_are_different_models(one: Hashable, other: Hashable) -> None:
    """Two keys with one text would share state."""
    with TieredPromptCache(block_tokens=4) as cache:
        cache.insert_cache(one, [1, 2, 3], caches.make([1, 2, 3]))
        assert cache.fetch_nearest_cache(one, [1, 2, 3])[0] is not None
        assert cache.fetch_nearest_cache(other, [1, 2, 3])[0] is None


class Model(nn.Module):
    """The least that can be bound: it fills caches as `caches.make` does."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = mx.full((64,), weight)
        self.layers = [None] * caches.LAYERS

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
        for own, made in zip(cache, caches.make(tokens[0].tolist()), strict=True):
            own.update_and_fetch(made.keys[:, :, :1], made.values[:, :, :1])
        return self.weight


def test_other_weights_under_a_bound_key_are_another_model(tmp_path: Path) -> None:
    """Weights are changed in memory too: cast, quantized, adapted."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        cache.bind(MODEL, Model(1.0))
        insert(cache, [1, 2, 3])
        cache.bind(MODEL, Model(2.0))
        assert hit(cache, [1, 2, 3]) == 0
        cache.bind(MODEL, Model(1.0))
        assert hit(cache, [1, 2, 3]) == 2
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        cache.bind(MODEL, Model(1.0))
        assert hit(cache, [1, 2, 3]) == 2


def test_a_bound_layout_is_the_one_looked_for(tmp_path: Path) -> None:
    """After a restart with another dtype the only layout stored is the wrong one."""
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        cache.bind(MODEL, Model(1.0))
        insert(cache, list(range(9)), dtype=mx.bfloat16)
    with TieredPromptCache(tmp_path, block_tokens=4) as cache:
        cache.bind(MODEL, Model(1.0))
        assert hit(cache, list(range(9))) == 0


def test_a_directory_that_can_not_be_used_leaves_the_memory_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server must start all the same, and say so."""
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "tieredkv"):
        cache = TieredPromptCache(tmp_path / "file", block_tokens=4)
    insert(cache, [1, 2, 3])
    assert hit(cache, [1, 2, 3]) == 2
    assert "memory only" in caplog.text


def test_after_close_everything_is_a_miss(cache: TieredPromptCache) -> None:
    """A server that is ending may still be generating."""
    insert(cache, [1, 2, 3])
    cache.close()
    cache.close()
    assert cache.fetch_nearest_cache(MODEL, [1, 2, 3]) == (None, [1, 2, 3])
    insert(cache, [4, 5, 6])
    assert (len(cache), cache.nbytes) == (0, 0)
    assert cache.flush(5)


def test_a_queue_that_is_full_drops_and_counts(tmp_path: Path) -> None:
    """A disk that can't follow must cost neither memory nor time."""
    with TieredPromptCache(tmp_path, block_tokens=4, queue_bytes=0) as cache:
        insert(cache, list(range(9)))
        assert cache.stats().dropped == {"queue_full": 3}
        assert not cache.flush(10)
        assert hit(cache, list(range(9))) == 8


def test_a_growing_conversation_takes_room_in_proportion(tmp_path: Path) -> None:
    """Whole copies per turn grow with the square of the length."""
    tokens: list[int] = []
    with TieredPromptCache(tmp_path, block_tokens=16) as cache:
        for turn in range(30):
            tokens += [turn * 7 % 50] * 10
            insert(cache, tokens)
        assert cache.flush(20)
        assert cache.nbytes == len(tokens) * 128
        assert cache.stats().cold.n_blocks == -(-len(tokens) // 16)


def test_memory_held_stays_under_the_cap(tmp_path: Path) -> None:
    """The cap is what MLX holds because of us, at every moment that can be observed."""
    cap = 64 * 1024
    rng = random.Random(1)
    with TieredPromptCache(tmp_path, block_tokens=8, hot_bytes=cap) as cache:
        prompts: list[list[int]] = []
        mx.synchronize()
        gc.collect()
        base = mx.get_active_memory()
        for _ in range(400):
            stem = rng.choice(prompts)[: rng.randrange(60)] if prompts else []
            tokens = stem + [rng.randrange(50) for _ in range(rng.randrange(1, 60))]
            prompts = [*prompts[-30:], tokens]
            insert(cache, tokens)
            hit(cache, rng.choice(prompts))
            assert mx.get_active_memory() - base <= cap
            assert cache.nbytes <= cap
        assert cache.check() == []


def test_accounting_survives_threads() -> None:
    """Counters that drift end in a cap that isn't kept."""
    cache = TieredPromptCache(block_tokens=4, hot_bytes=20_000)
    live = {t: caches.make([t, *range(20)]) for t in range(20)}
    mx.eval([(c.keys, c.values) for cs in live.values() for c in cs])

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            t = rng.randrange(20)
            cache.insert_cache(MODEL, [t, *range(20)], live[t])
            cache.trim_to(n_bytes=rng.randrange(20_000))
        mx.clear_streams()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert cache.check() == []
    assert cache.stats().faults == {}
