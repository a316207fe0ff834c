"""Who is admitted and who leaves first: pure functions over sizes and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tieredkv.core import CACHE_TYPES


def admit(sizes: Sequence[int], *, free: int, reclaimable: int) -> int:
    """How many leading blocks to take, given the bytes free and those that eviction could free.

    All of them if room can be made for all. A prompt that can't fit whole gets only the room
    that is free: evicting others for a part of it would lose more than it keeps.
    """
    room = free + reclaimable if sum(sizes) <= free + reclaimable else free
    taken = 0
    for n, size in enumerate(sizes):
        taken += size
        if taken > room:
            return n
    return len(sizes)


def protect(kind: str, other: str) -> str:
    """The more protected of two cache types: a block shared by both keeps the higher one."""
    return max(kind, other, key=CACHE_TYPES.index)


def victim_order(counts: Mapping[str, int]) -> list[str]:
    """Cache types by who gives way first, as mlx-lm's prompt cache decides it.

    The least protected type that has at least as many members as the next one goes first; so
    system prompts outlive a burst of one-off conversations.
    """
    for kind, above in pairwise(CACHE_TYPES):
        if counts[kind] and counts[kind] >= counts[above]:
            return [kind, *(k for k in CACHE_TYPES if k != kind)]
    return list(reversed(CACHE_TYPES))
