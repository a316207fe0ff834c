"""Content keys: the same everywhere and for ever, and never one for two things."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import caches
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv import TieredPromptCache, keys
from tieredkv.core import Namespace

TOKEN = st.one_of(
    st.integers(0, 3), st.integers(0, 200_000), st.integers(-(2**60), -1), st.integers(2**20, 2**62)
)
TOKENS = st.lists(TOKEN, max_size=12)


def raw(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i8").tobytes()


GOLDEN_ROOT = "544ce5376ada8e1301890bc7e9e764ded1a1582054da68a74c3ea1cec32ae237"
GOLDEN_KEYS = [
    "ea604967b58ab000431b7025e7dbebcc59320cd2c881ad9e587bfb0cd5060c7f",
    "32f8f09c0d57587c6e9a8cccff6e5e1cfcd0d09c0c42419091c78e8af5986720",
]
PROGRAM = """
from tieredkv import TieredPromptCache, keys
from tieredkv.core import Namespace
root = keys.namespace_key(Namespace("dir:00", "a", "d", "h", "0/1", b"s", 4, "[]"))
print(root.hex(), *(k.hex() for k in keys.chain(root, keys.as_tokens([1, 2, 3, -4, 5]), 4).keys))
"""


def chain_in_process(hash_seed: str) -> list[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    return out.stdout.split()


def test_keys_are_the_golden_ones_in_every_process() -> None:
    """A key that depended on the process, or changed with a release, would orphan the store."""
    first, second = chain_in_process("1"), chain_in_process("2")
    assert first == second == [GOLDEN_ROOT, *GOLDEN_KEYS]


@pytest.mark.parametrize(
    "field", ["model", "adapter", "draft", "host", "shard", "salt", "block_tokens", "layout"]
)
def test_every_field_of_a_namespace_separates(field: str) -> None:
    """A field left out of the digest would share state across adapters, dtypes or tenants."""
    base = Namespace("m", "a", "d", "h", "0/1", b"s", 4, "l")
    value: object = {"salt": b"other", "block_tokens": 8}.get(field, "other")
    assert keys.namespace_key(replace(base, **{field: value})) != keys.namespace_key(base)


def test_a_value_in_another_field_is_another_namespace() -> None:
    """Without tags and lengths an adapter named like a salt would collide with it."""
    a = Namespace("m", adapter="xy", draft="")
    b = Namespace("m", adapter="x", draft="y")
    c = Namespace("m", adapter="", salt=b"xy")
    assert len({keys.namespace_key(n) for n in (a, b, c)}) == 3


def test_token_ids_are_64_bit() -> None:
    """Image tokens are negative 60-bit ids: narrower ones would make two images equal."""
    root = keys.namespace_key(Namespace("m"))
    a = keys.chain(root, keys.as_tokens([-(2**59) - 1]), 4)
    b = keys.chain(root, keys.as_tokens([-(2**59) - 1 + 2**32]), 4)
    assert a.keys != b.keys


@pytest.mark.parametrize("bad", [["a"], [[1, 2]], [2**64], [None]])
def test_tokens_that_are_no_ids_are_an_error(bad: list[object]) -> None:
    """Tokens cast in silence would be stored under another prompt's key."""
    with pytest.raises((ValueError, OverflowError, TypeError)):
        keys.as_tokens(bad)  # type: ignore[arg-type]  # that is the point


def test_as_tokens_is_a_private_copy() -> None:
    """The host appends to its list, or writes to its array, after the call."""
    source = np.array([1, 2, 3])
    taken = keys.as_tokens(source)
    source[0] = 9
    assert taken.tolist() == [1, 2, 3]


def test_floats_are_refused_rather_than_rounded() -> None:
    """1.5 rounded to 1 would hit the prompt of token 1."""
    with pytest.raises((ValueError, TypeError)):
        keys.as_tokens([1.5])  # type: ignore[list-item]  # that is the point


@given(TOKENS, TOKENS)
def test_common_prefix_counts_equal_leading_tokens(a: list[int], b: list[int]) -> None:
    """A count one too high would restore a token that the prompt doesn't have."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert keys.common_prefix(raw(a), raw(b)) == n


@given(TOKENS, TOKENS)
def test_ordered_is_injective_and_keeps_prefixes(a: list[int], b: list[int]) -> None:
    """Two token strings with one encoding, or a prefix that isn't, would give wrong neighbours."""
    x, y = keys.ordered(raw(a)), keys.ordered(raw(b))
    assert (x == y) == (a == b)
    assert x.startswith(y) == (a[: len(b)] == b)
    assert 0 not in x


@given(st.lists(TOKENS, min_size=1, max_size=12), TOKENS)
def test_the_longest_common_prefix_is_a_neighbour(many: list[list[int]], query: list[int]) -> None:
    """If it weren't, a hit would be shorter than the longest prefix in the store."""
    place = sorted(keys.ordered(raw(t)) for t in many)
    by_order = {keys.ordered(raw(t)): t for t in many}
    at = sum(x < keys.ordered(raw(query)) for x in place)
    near = [by_order[x] for x in place[max(at - 1, 0) : at + 1]]
    best = max(keys.common_prefix(raw(t), raw(query)) for t in many)
    assert max(keys.common_prefix(raw(t), raw(query)) for t in near) == best


ROOTS = [keys.namespace_key(Namespace("m", salt=salt)) for salt in (b"", b"s")]
# Prompts that share starts of all lengths, and parts further on.
PROMPTS = st.lists(
    st.tuples(
        st.sampled_from(ROOTS),
        st.sampled_from([2, 4]),
        st.integers(0, 24),
        st.lists(st.integers(0, 1), max_size=9),
    ),
    max_size=20,
)


@given(PROMPTS, st.integers(1, 3), st.integers(0, 60))
def test_a_chain_that_goes_on_from_another_is_the_one_hashed_anew(
    prompts: list[tuple[keys.BlockKey, int, int, list[int]]], n_chains: int, n_tokens: int
) -> None:
    """If it failed, state of one prompt, or of one tenant, would be taken for another's."""
    chains = keys.Chains(n_chains, n_tokens)
    for root, size, stem, rest in prompts:
        tokens = keys.as_tokens([*range(stem), *rest])
        ours, fresh = chains.chain(root, tokens, size), keys.chain(root, tokens, size)
        assert ours.keys == fresh.keys
        assert (ours.root, ours.block_tokens) == (root, size)
        assert np.array_equal(ours.tokens, tokens)
        assert chains.n_tokens <= n_tokens


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The token strings of all blocks that are hashed."""
    seen: list[bytes] = []
    real = keys.block_key

    def counting(parent: keys.BlockKey, tokens: bytes) -> keys.BlockKey:
        seen.append(tokens)
        return real(parent, tokens)

    monkeypatch.setattr(keys, "block_key", counting)
    return seen


def test_checkpoints_of_a_prompt_hash_each_full_block_once(hashed: list[bytes]) -> None:
    """If it failed, a prefill with checkpoints would hash a long prompt again and again."""
    chains = keys.Chains()
    tokens = np.arange(42)
    for n in (41, 8, 16, 24, 42):
        chains.chain(ROOTS[0], keys.as_tokens(tokens[:n]), 4)

    full = [block for block in hashed if len(block) == 4 * 8]
    assert len(full) == len(set(full)) == 10


def test_prompts_served_together_do_not_push_each_other_out(hashed: list[bytes]) -> None:
    """If it failed, a batch of prompts would be hashed twice each."""
    chains = keys.Chains()
    prompts = [[*range(20), i, i + 1, i + 2, i + 3] for i in range(30, 36)]
    for prompt in prompts:
        chains.chain(ROOTS[0], keys.as_tokens(prompt), 4)
    n = len(hashed)
    for prompt in prompts:
        chains.chain(ROOTS[0], keys.as_tokens([*prompt, 7]), 4)

    # The stem once, one block and one tail of each.
    assert n == 5 + 6
    assert len(hashed) == n + 6


def test_from_fetch_to_insert_each_block_is_hashed_once(hashed: list[bytes]) -> None:
    """If it failed, each request would pay for the hashing of its prompt at least twice."""
    cache = TieredPromptCache(block_tokens=4)
    cache.insert_cache(caches.MODEL, [1, 2], caches.make([1, 2]))
    hashed.clear()

    prompt, reply = [*range(100, 142)], [7, 8, 9]
    cache.fetch_nearest_cache(caches.MODEL, prompt)
    for n in (16, 32, 42):
        cache.insert_cache(caches.MODEL, prompt[:n], caches.make(prompt[:n]))
    cache.insert_cache(caches.MODEL, prompt + reply, caches.make(prompt + reply))
    cache.fetch_nearest_cache(caches.MODEL, [*prompt, *reply, 5])

    full = [block for block in hashed if len(block) == 4 * 8]
    assert len(full) == len(set(full)) == 11
    assert cache.stats().hit_tokens_hot == 45
