"""Tenants of one server: prompts that are salted apart."""

from __future__ import annotations

from pathlib import Path

import caches
import pytest
from caches import MODEL
from hypothesis import given
from hypothesis import strategies as st

from tieredkv import SaltedPrompt, TieredPromptCache, keys

TOKENS = list(range(9))


def insert(cache: TieredPromptCache, salt: bytes) -> None:
    cache.insert_cache(MODEL, SaltedPrompt(TOKENS, salt), caches.make(TOKENS))


def hit(cache: TieredPromptCache, salt: bytes) -> int:
    prompt = SaltedPrompt([*TOKENS, 50], salt)
    _, rest = cache.fetch_nearest_cache(MODEL, prompt)
    return len(prompt) - len(rest)


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


def test_tenants_see_their_own_prompts_only(folder: Path | None) -> None:
    """A hit's speed tells that somebody has asked the same."""
    with TieredPromptCache(folder, block_tokens=4) as cache:
        insert(cache, b"a")
        assert [hit(cache, salt) for salt in (b"a", b"b", b"")] == [9, 0, 0]
        insert(cache, b"")
        assert [hit(cache, salt) for salt in (b"a", b"b", b"")] == [9, 0, 9]


def test_tenants_of_caches_with_other_salts_are_others(tmp_path: Path) -> None:
    """Where one salt ends and the other begins must not be guessable."""
    with TieredPromptCache(tmp_path, block_tokens=4, salt=b"ab") as cache:
        insert(cache, b"c")
    for salt, tenant in ((b"a", b"bc"), (b"abc", b""), (b"", b"abc"), (b"ab", b"c")):
        with TieredPromptCache(tmp_path, block_tokens=4, salt=salt) as cache:
            cache.insert_cache(MODEL, [77, 78], caches.make([77, 78]))  # its layout
            assert hit(cache, tenant) == (9 if (salt, tenant) == (b"ab", b"c") else 0)


@given(st.lists(st.integers(0, 9)), st.integers(-12, 12), st.integers(-12, 12))
def test_a_slice_of_a_salted_prompt_is_salted(tokens: list[int], start: int, stop: int) -> None:
    """Hosts insert slices of what they fetched."""
    part = SaltedPrompt(tokens, b"x")[start:stop]
    assert (part, part.salt) == (tokens[start:stop], b"x")
    part += [1]
    assert part.salt == b"x"


def test_a_prompt_without_a_tenant_has_the_caches_own_salt() -> None:
    """Else everybody's prompts would be cold after an update."""
    assert keys.tenant_salt(b"s", b"") == b"s"
