"""Who is admitted, which type gives way first and what state is worth: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log2

from tieredkv.core import CACHE_TYPES, GRADES

# A prompt diverges between two ends of messages that much more seldom than at one.
_SELDOM = 4

# State at every so many tokens stands like a block of tokens, whatever it weighs: a step of
# mlx-lm's prefill.
_STEP = 2048


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


def spared_between(position: int, every: int) -> float:
    """Tokens of prefill that a position in the middle of a prompt is expected to spare.

    Positions are the multiples of ``every``. Those that more powers of two divide spare more:
    so that, when the odd ones have gone, the others still lie evenly, at twice the distance.
    """
    n = position // every
    return every * (n & -n) / _SELDOM


def grade(n_bytes: int, spared: float, bytes_per_token: float) -> int:
    """How many times over, as a power of two, state ages faster than blocks of tokens.

    State of ``n_bytes`` that spares ``spared`` tokens of prefill stands like a block, at grade 0,
    if it takes no more bytes for each than a block does.
    """
    par = max(bytes_per_token, n_bytes / _STEP)
    return min(max(0, -round(log2(spared * par / n_bytes))), GRADES - 1)
