"""Objects of the remote tier: nothing but the right block, whole, comes out of one."""

from __future__ import annotations

from collections.abc import Callable

import caches
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from remotes import parcel

from tieredkv.core import BlockKey, CorruptBlob
from tieredkv.engines.base import RemoteRefused
from tieredkv.keys import block_key, common_prefix
from tieredkv.tiers.objects import (
    Plain,
    Sealed,
    Wrap,
    leads,
    marks,
    member_name,
    members,
    pack,
    secret_of,
    shared_marks,
    step_of,
    unpack,
)

CHAIN = caches.chain(range(8))
BLOCK, OTHER = caches.blocks(CHAIN)
WRAPS = {"plain": Plain(), "sealed": Sealed(b"k" * 32)}


@pytest.fixture(params=WRAPS)
def wrap(request: pytest.FixtureRequest) -> Wrap:
    return WRAPS[request.param]


def test_what_is_packed_is_unpacked(wrap: Wrap) -> None:
    """The whole of it: record, blob, grade."""
    p = parcel(BLOCK)
    found = unpack("name", BLOCK.key, pack("name", p, wrap), wrap)
    assert (found.record, bytes(found.blob), found.grade) == (p.record, bytes(p.blob), p.grade)


@pytest.mark.parametrize("kind", WRAPS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_damage_goes_unseen(kind: str, data: st.DataObject) -> None:
    """A flipped bit, a part cut off, something added: all of it must be a miss."""
    wrap = WRAPS[kind]
    good = pack("name", parcel(BLOCK), wrap)
    place = data.draw(st.integers(0, len(good) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    bad = data.draw(
        st.sampled_from(
            [
                good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :],
                good[:place],
                good + bytes([bit]),
                b"",
            ]
        )
    )
    with pytest.raises(CorruptBlob):
        unpack("name", BLOCK.key, bad, wrap)


def test_one_blocks_object_is_not_taken_for_anothers(wrap: Wrap) -> None:
    """Whoever can write to the engine could answer one prompt with another's state."""
    good = pack("name", parcel(OTHER), wrap)
    for name, key in (("name", BLOCK.key), ("other", OTHER.key)):
        with pytest.raises(CorruptBlob):
            unpack(name, key, good, wrap)


@pytest.mark.parametrize("other", [Plain(), Sealed(b"x" * 32)], ids=["no key", "another key"])
def test_without_the_key_nothing_is_read_and_nothing_taken(other: Wrap) -> None:
    """What is encrypted must say nothing, and what isn't must not get in among it."""
    sealed = WRAPS["sealed"]
    for one, two in ((sealed, other), (other, sealed)):
        with pytest.raises(CorruptBlob):
            unpack("name", BLOCK.key, pack("name", parcel(BLOCK), one), two)
    assert sealed.name(BLOCK.key) != other.name(BLOCK.key)
    name = member_name(parcel(BLOCK), BLOCK.key, 1, sealed)
    assert [*members([name], other)] == []


def test_sealed_objects_and_names_do_not_show_tokens_or_keys() -> None:
    """Else prompts could be read, or guessed and confirmed."""
    sealed, p = WRAPS["sealed"], parcel(BLOCK)
    raw = pack("name", p, sealed)
    assert BLOCK.tokens not in raw
    names = sealed.name(BLOCK.key) + member_name(p, BLOCK.key, 1, sealed)
    assert BLOCK.key.hex() not in names
    plain = "".join(marks(BLOCK.parent, BLOCK.tokens, 1, Plain()))
    assert plain not in names
    # The same block twice is other bytes, under one name.
    assert raw != pack("name", p, sealed)


@settings(deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
)
def test_names_tell_how_far_a_child_goes_on_as_a_query_does(
    child: list[int], query: list[int]
) -> None:
    """Children are chosen by their names alone: reading each would take a trip for each."""
    step = step_of(64)
    a, b = (caches.chain(tokens, 64).tokens_of(0) for tokens in (child, query))
    root = caches.chain(child, 64).root
    key = block_key(root, a)
    n = shared_marks(marks(root, a, step, Plain()), marks(root, b, step, Plain())) * step
    assert n == common_prefix(a, b) // step * step
    name = f"{''.join(marks(root, a, step, Plain()))}.{key.hex()}.{len(child)}"
    (member,) = members([name], Plain())
    assert member.key == key
    assert leads(member, root, b) == (query[: len(child)] == child)


@pytest.mark.parametrize(
    "name", ["", "..", "0011", "ab.zz.3", f"ab.{'0' * 64}.x", f"ab.{'0' * 62}.3", "é.00.1"]
)
def test_strange_names_among_the_children_are_left_out(wrap: Wrap, name: str) -> None:
    """A bucket is other people's too."""
    good = member_name(parcel(BLOCK), BLOCK.key, 1, wrap)
    assert [m.key for m in members([name, good], wrap)] == [BLOCK.key]


@pytest.mark.parametrize("n", [0, 31, 33, 200])
def test_a_key_file_holds_enough_or_is_refused(n: int) -> None:
    """A short password under AES is a short password."""
    content = b"a" * n + b"\n"
    made: Callable[[], bytes] = lambda: secret_of(content)  # noqa: E731 - called twice below
    if n < 31:
        with pytest.raises(RemoteRefused, match="openssl rand"):
            made()
    else:
        assert len(made()) == 32
        assert made() == (content if n == 31 else secret_of(b" " + content))


def test_an_object_of_another_namespace_format_is_refused(wrap: Wrap) -> None:
    """After an update of the format old objects are misses."""
    raw = bytearray(pack("name", parcel(BLOCK), wrap))
    raw[4] += 1
    with pytest.raises(CorruptBlob, match="version"):
        unpack("name", BlockKey(BLOCK.key), bytes(raw), wrap)
