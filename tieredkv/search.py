"""The search of a fetch: the longest prefix of one prompt that can be restored here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tieredkv import keys, layout, matching
from tieredkv.core import BlockKey, Chain, Hit, Match, Tokens
from tieredkv.layout import Layout
from tieredkv.restored import Copiers
from tieredkv.store import TieredStore


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A form that a prompt's state may have: where it is stored, its layout, and the lengths at
    which it can be restored, multiples of ``step`` from ``least`` to ``most`` tokens.
    """

    root: BlockKey
    shape: Layout
    least: int
    most: int
    step: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """A hit, and private caches that hold it."""

    hit: Hit
    caches: list[Any]


def longest(store: TieredStore, chain: Chain, shape: Layout, by: float = 0.0) -> Match:
    """The longest prefix of ``chain`` that state of this layout can be restored at. The remote
    tier may be asked for more until ``by``.
    """
    if shape.is_sliced:
        return store.match(chain, by)
    return store.match_state(chain, shape.n_windows(chain.block_tokens), by)


class Search:
    """See `ranks.Search`. On the generation thread."""

    def __init__(
        self,
        store: TieredStore,
        chains: keys.Chains,
        copiers: Copiers,
        tokens: Tokens,
        forms: Sequence[Form],
        expires: int,
        by: float,
    ) -> None:
        """Search for ``tokens``, all but the last, in each of these forms; in the first of them
        that has anything. What is loaded lives until ``expires`` then, see `core.Tier.touch`. The
        remote tier may be waited for until ``by``, see `TieredStore.remote_by`, in all.
        """
        self._store = store
        self._chains = chains
        self._copiers = copiers
        self._tokens = tokens
        self._forms = forms
        self._expires = expires
        self._by = by
        self._found: tuple[Form, Chain, Match] | None = None

    def find(self, most: int) -> int:
        """See `ranks.Search.find`."""
        self._found = None
        most = min(most, len(self._tokens) - 1)
        for form in self._forms:
            n = min(most, form.most) // form.step * form.step
            while n >= form.least:
                chain = self._chains.chain(
                    form.root, self._tokens[:n], self._store.config.block_tokens
                )
                match = self._match(chain, form.shape)
                n = match.n_tokens // form.step * form.step
                if n == match.n_tokens and n >= form.least:
                    self._found = form, chain, match
                    return n
        return 0

    def load(self) -> tuple[Restored | None, int]:
        """See `ranks.Search.load`."""
        if self._found is None:
            return None, 0
        form, chain, match = self._found
        hit = self._store.load(chain, match, self._expires, self._by)
        if hit is None:
            return None, 0
        n = hit.n_tokens
        if not layout.fits(form.shape, hit) or n < form.least or n % form.step:
            return None, n
        caches = layout.restore(form.shape, hit, len(self._tokens), self._copiers)
        return Restored(hit, caches), n

    def _match(self, chain: Chain, shape: Layout) -> Match:
        match = longest(self._store, chain, shape, self._by)
        if self._is_worth(chain, shape, match):
            return match
        self._store.counters.add("recomputed")
        return matching.only_hot(match, chain) if shape.is_sliced else Match()

    def _is_worth(self, chain: Chain, shape: Layout, match: Match) -> bool:
        """Whether what a match would promote is faster read than computed."""
        n_cold, n_whole = matching.cold_tokens(match, chain)
        if not n_cold:
            return True
        return self._store.pace.is_worth_promoting(chain.root, n_cold, shape.bytes_of(n_whole))
