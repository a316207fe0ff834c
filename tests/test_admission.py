"""What goes to the disk where only that should which comes back, and what that spares it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import caches
import pytest
from caches import MODEL
from test_windows import serve

from tieredkv import TieredPromptCache
from tieredkv.admission import AdmitReused
from tieredkv.core import BlockKey

PROMPT = [*range(10)]


def opened(folder: Path, **kw: Any) -> TieredPromptCache:
    return TieredPromptCache(folder, block_tokens=4, cold_admit="reused", **kw)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TieredPromptCache]:
    with opened(tmp_path) as c:
        yield c
        assert c.check() == []
        assert c.stats().faults == {}


def insert(cache: TieredPromptCache, tokens: list[int], make: Any = caches.make) -> None:
    cache.insert_cache(MODEL, tokens, make(tokens))
    assert cache.flush(10)


def use(cache: TieredPromptCache, tokens: list[int]) -> int:
    """Ask for a prompt that begins with ``tokens``; how many of them were found."""
    _, rest = cache.fetch_nearest_cache(MODEL, [*tokens, 99])
    assert cache.flush(10)
    return len(tokens) + 1 - len(rest)


def survives(tmp_path: Path, tokens: list[int], **kw: Any) -> int:
    """How many of ``tokens`` another process would find."""
    with TieredPromptCache(tmp_path, block_tokens=4, **kw) as other:
        found, rest = other.fetch_nearest_cache(MODEL, [*tokens, 99])
        assert found is None or not other.stats().hit_tokens_hot
        return len(tokens) + 1 - len(rest)


def test_prompts_that_nobody_uses_again_are_not_written(
    cache: TieredPromptCache, tmp_path: Path
) -> None:
    """If it failed, the option would spare the disk nothing."""
    for i in range(20):
        insert(cache, [*range(100 * i, 100 * i + 10)])

    assert cache.stats().bytes_written == 0
    assert cache.stats().disk_bytes == 0
    assert cache.stats().unadmitted == 60
    with TieredPromptCache(tmp_path / "all", block_tokens=4) as everything:
        insert(everything, PROMPT)
        assert everything.stats().bytes_written > 0
        assert everything.stats().unadmitted == 0


def test_what_a_prompt_uses_is_written_and_the_rest_is_not(
    cache: TieredPromptCache, tmp_path: Path
) -> None:
    """If it failed, prompts that come back would be lost with the process."""
    insert(cache, PROMPT)
    assert survives(tmp_path, PROMPT) == 0
    assert use(cache, PROMPT[:8]) == 8

    assert survives(tmp_path, PROMPT) == 8


def test_a_block_of_which_little_is_used_is_not_written(
    cache: TieredPromptCache, tmp_path: Path
) -> None:
    """If it failed, the few tokens that all prompts begin with would have them all written."""
    insert(cache, PROMPT)
    assert use(cache, [*PROMPT[:5], 50, 51, 52]) == 5

    assert survives(tmp_path, PROMPT) == 4


def test_a_conversation_loses_its_last_turn_only(cache: TieredPromptCache, tmp_path: Path) -> None:
    """If it failed, a restart would cost a conversation more than one turn."""
    turns = [[*range(n)] for n in (9, 21, 33)]
    for turn in turns:
        use(cache, turn)
        insert(cache, turn)

    assert survives(tmp_path, turns[2]) == 21


def test_what_has_to_be_computed_again_is_written(cache: TieredPromptCache, tmp_path: Path) -> None:
    """If it failed, prompts that return after memory has lost them would never be kept."""
    insert(cache, PROMPT)
    cache.trim_to(n_bytes=0)
    assert survives(tmp_path, PROMPT) == 0
    insert(cache, PROMPT)

    assert survives(tmp_path, PROMPT) == 10


def test_checkpoints_of_one_prefill_are_not_a_second_time(
    cache: TieredPromptCache, tmp_path: Path
) -> None:
    """If it failed, every long prompt would be written, whoever wants it."""
    for n in (4, 8, 12, 14):
        insert(cache, [*range(n)])

    assert survives(tmp_path, [*range(14)]) == 0
    assert cache.stats().bytes_written == 0


def test_a_snapshot_is_written_with_its_blocks(cache: TieredPromptCache, tmp_path: Path) -> None:
    """If it failed, recurrent models would store blocks that no hit can end at."""
    insert(cache, PROMPT, caches.make_hybrid)
    assert use(cache, PROMPT) == 10

    assert survives(tmp_path, PROMPT) == 10


def test_windows_are_written_with_their_blocks(cache: TieredPromptCache, tmp_path: Path) -> None:
    """If it failed, models with sliding windows would store blocks that no hit can end at."""
    tokens = [*range(16)]
    serve(cache, tokens, [8, 16])
    assert cache.stats().bytes_written == 0
    assert use(cache, tokens[:12]) == 12

    assert survives(tmp_path, tokens) == 12


def test_what_was_written_comes_back_right(tmp_path: Path) -> None:
    """If it failed, a hit would change the output."""
    with opened(tmp_path) as cache:
        insert(cache, PROMPT)
        use(cache, PROMPT)
    with opened(tmp_path) as cache:
        found, rest = cache.fetch_nearest_cache(MODEL, [*PROMPT, 99])
    assert rest == [99]
    assert found is not None
    assert caches.holds(found, PROMPT)


def test_what_is_remembered_is_bounded() -> None:
    """If it failed, a server's memory would grow with every prompt."""
    admission = AdmitReused(n_blocks=3)
    names = [BlockKey(bytes([i])) for i in range(5)]

    assert [admission.inserted([name], {name}) for name in names] == [0] * 5

    assert [admission.inserted([name], {name}) for name in reversed(names)] == [1, 1, 1, 0, 0]


def test_another_way_is_an_error() -> None:
    """If it failed, a typing error would turn the option off in silence."""
    with pytest.raises(ValueError, match="cold_admit"):
        TieredPromptCache(cold_admit="some")
