"""The longest prefix of a prompt that two tiers hold together. Reads no state and writes nothing.

Any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tieredkv.core import BlockKey, Chain, Match, Partial
from tieredkv.keys import snapshot_key, window_key


class Index(Protocol):
    """What a tier can be asked for without reading a block: see `core.Tier`."""

    def lookup(self, chain: Chain, start: int = 0) -> int:
        """See `core.Tier.lookup`."""

    def nearest(self, parent: BlockKey, tokens: bytes) -> Partial | None:
        """See `core.Tier.nearest`."""

    def prefixes(self, parent: BlockKey, tokens: bytes) -> list[Partial]:
        """See `core.Tier.prefixes`."""

    def present(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """See `core.Tier.present`."""


def match(hot: Index, cold: Index, chain: Chain) -> Match:
    """The longest prefix of ``chain`` of which the blocks are there, exact to the token."""
    n_hot = hot.lookup(chain)
    n = cold.lookup(chain, n_hot)
    found, n_tokens = chain.keys[:n], n * chain.block_tokens
    if n == len(chain.keys):
        return Match(found, n_tokens, n_hot)
    parent, rest = chain.parent(n), chain.tokens_of(n)
    warm = hot.nearest(parent, rest) if n == n_hot else None
    whole = warm is not None and warm.n_tokens * 8 == len(rest)
    cool = None if whole else cold.nearest(parent, rest)
    if warm and (cool is None or warm.n_tokens >= cool.n_tokens):
        return Match((*found, warm.key), n_tokens + warm.n_tokens, n_hot + 1)
    if cool:
        return Match((*found, cool.key), n_tokens + cool.n_tokens, n_hot)
    return Match(found, n_tokens, n_hot)


def match_state(hot: Index, cold: Index, chain: Chain, n_windows: int) -> Match:
    """The longest prefix of ``chain`` that ends at a snapshot, whose key is then the last, or,
    if ``n_windows`` isn't 0, at a block with so many windows before its end, or as many as
    there are blocks.
    """
    n = cold.lookup(chain, hot.lookup(chain))
    whole = chain.keys[:n]
    state = [snapshot_key(k) for k in whole] + [window_key(k) for k in whole if n_windows]
    there = present(hot, cold, state)
    for i in range(n, -1, -1):
        for tail in _tails(hot, cold, chain, i):
            snapshot = snapshot_key(tail.key)
            if present(hot, cold, [snapshot]):
                path = (*whole[:i], tail.key, snapshot)
                return _matched(hot, path, i * chain.block_tokens + tail.n_tokens)
        if not i:
            break
        if state[i - 1] in there:
            return _matched(hot, (*whole[:i], state[i - 1]), i * chain.block_tokens)
        windows = state[n + max(0, i - n_windows) : n + i] if n_windows else []
        if windows and there.issuperset(windows):
            return _matched(hot, whole[:i], i * chain.block_tokens, windows)
    return Match()


def only_hot(match: Match, chain: Chain) -> Match:
    """The part of a match that needs no promote."""
    n_tokens = min(match.n_hot * chain.block_tokens, match.n_tokens)
    return Match(match.keys[: match.n_hot], n_tokens, match.n_hot)


def cold_tokens(match: Match, chain: Chain) -> tuple[int, int]:
    """Tokens of a match that the cold tier has, and those of the whole blocks that they are in."""
    n_near = min((len(match.keys) - match.n_remote) * chain.block_tokens, match.n_tokens)
    n_cold = n_near - min(match.n_hot * chain.block_tokens, n_near)
    return n_cold, -(-n_cold // chain.block_tokens) * chain.block_tokens


def _matched(
    hot: Index, path: tuple[BlockKey, ...], n_tokens: int, windows: Sequence[BlockKey] = ()
) -> Match:
    # A tier holds no block without its ancestors, so those that are there come first.
    return Match(path, n_tokens, len(hot.present(path)), tuple(windows))


def _tails(hot: Index, cold: Index, chain: Chain, i: int) -> list[Partial]:
    """Blocks in place of block ``i`` of ``chain`` all of whose tokens lead its own."""
    if i == len(chain.keys):
        return []
    parent, tokens = chain.parent(i), chain.tokens_of(i)
    found = (*hot.prefixes(parent, tokens), *cold.prefixes(parent, tokens))
    return sorted({p.key: p for p in found}.values(), key=lambda p: -p.n_tokens)


def present(hot: Index, cold: Index, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
    """Which of ``keys`` are in either tier."""
    warm = hot.present(keys)
    cool = [key for key in keys if key not in warm]
    return warm | cold.present(cool) if cool else warm
