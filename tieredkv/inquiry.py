"""What a fetch would find, told without reading or computing any state.

Any thread may call: no mlx op, and nothing is counted, touched or promoted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from tieredkv import explain, keys, matching
from tieredkv.core import BlockKey, Chain, Match, Namespace, Quantization, Tokens
from tieredkv.explain import (
    PACE,
    STATE,
    STEPS,
    UNREADABLE,
    Evidence,
    Explanation,
    Found,
    Stored,
    Wanted,
)
from tieredkv.layout import Layout
from tieredkv.tiers.ledger import Rows

_T = TypeVar("_T")

_SEVERAL = (
    "{} sets of prompts are stored for this model that only differ in what shows when it is loaded "
    "(weights in memory, dtype); this is the one that has most of the prompt"
)


class Memory(matching.Index, Protocol):
    """A memory tier, as far as it is asked."""

    def beside(self, parent: BlockKey, tokens: bytes) -> list[bytes]:
        """Token ids of the children of ``parent`` beside the place of ``tokens`` among them."""


class Disk(matching.Index, Protocol):
    """A cold tier, as far as it is asked."""

    def consult(self, work: Callable[[Rows], _T]) -> _T | None:
        """Result of ``work`` in one read transaction; None if there is nothing to read."""


@dataclass(frozen=True, slots=True)
class Form:
    """A namespace whose layout is known: where to look for a prompt."""

    namespace: Namespace
    shape: Layout


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What is looked through, and how the host would use it.

    ``is_worth`` says of a namespace's root, tokens and bytes whether they are promoted rather than
    computed. ``directory`` is the cold tier's, None without one.
    """

    hot: Memory
    cold: Disk
    directory: Path | None = None
    quantization: Quantization | None = None
    is_worth: Callable[[BlockKey, int, int], bool] = lambda _root, _n_tokens, _n_bytes: True

    def explain(
        self, wanted: Wanted, tokens: Tokens, forms: Sequence[Form] | None = None
    ) -> Explanation:
        """Why ``tokens`` would hit as far as they do.

        ``forms`` are where a fetch would look; None for wherever the store has what is wanted, of
        which the best is taken.
        """
        survey = self.cold.consult(lambda rows: explain.survey(rows, wanted, tokens))
        stored: tuple[Stored, ...] = survey or ()
        looked = _forms(stored) if forms is None else forms
        found = max((self._found(f, tokens) for f in self._each(looked)), key=_worth, default=None)
        if survey is None and self.directory and not (found and found.n_stored):
            why = f"{self.directory} can't be read; tieredkv verify tells what is wrong with it"
            return explain.missed(UNREADABLE, why, len(tokens))
        evidence = self._evidence(tokens, found) if found else Evidence()
        explained = explain.explain(tokens, found, stored, evidence)
        n_fitting = sum(there.is_wanted for there in stored)
        if forms is not None or n_fitting < 2:
            return explained
        return replace(explained, note=_SEVERAL.format(n_fitting))

    def _each(self, forms: Iterable[Form]) -> list[Form]:
        """Where to look: with a host that quantizes on its way, for both forms of its state."""
        how = self.quantization
        if how is None:
            return list(forms)
        each: dict[str, Form] = {}
        for form in forms:
            for shape in (form.shape, form.shape.quantized(how.group_size, how.bits)):
                layout = shape.to_json()
                each[layout] = Form(replace(form.namespace, layout=layout), shape)
        return list(each.values())

    def _evidence(self, tokens: Tokens, found: Found) -> Evidence:
        cold = self.cold.consult(partial(explain.gather, tokens=tokens, found=found)) or Evidence()
        parent, query = explain.next_block(tokens, found)
        warm = self.hot.beside(parent, query) if query else []
        return replace(cold, beside=(*warm, *cold.beside))

    def _found(self, form: Form, tokens: Tokens) -> Found:
        whole = self._at_token(form, tokens[:-1])
        how = self.quantization
        return whole if how is None else self._at_step(form, tokens[:-1], whole, how)

    def _at_token(self, form: Form, tokens: Tokens) -> Found:
        root = keys.namespace_key(form.namespace)
        chain = keys.chain(root, tokens, form.namespace.block_tokens)
        blocks = match = matching.match(self.hot, self.cold, chain)
        if not form.shape.is_sliced:
            n_windows = form.shape.n_windows(chain.block_tokens)
            match = matching.match_state(self.hot, self.cold, chain, n_windows)
        limit = STATE
        if not self._is_worth(form, chain, match):
            limit = PACE
            match = matching.only_hot(match, chain) if form.shape.is_sliced else Match()
        return Found(chain, match.n_tokens, blocks.n_tokens, _last_block(match), limit)

    def _is_worth(self, form: Form, chain: Chain, match: Match) -> bool:
        n_cold, n_whole = matching.cold_tokens(match, chain)
        return not n_cold or self.is_worth(chain.root, n_cold, form.shape.bytes_of(n_whole))

    def _at_step(self, form: Form, tokens: Tokens, whole: Found, how: Quantization) -> Found:
        """The longest hit that ends with a step at which the state would have this form."""
        packed = form.shape.is_quantized
        least, most = (how.settled, len(tokens)) if packed else (1, how.start - 1)
        n = min(most, len(tokens)) // how.step * how.step
        while n >= least:
            found = self._at_token(form, tokens[:n])
            if found.n_tokens == n:
                return replace(whole, n_tokens=n, key=found.key, limit=STEPS)
            n = found.n_tokens // how.step * how.step
        return replace(whole, n_tokens=0, key=None, limit=STEPS)


def _worth(found: Found) -> tuple[int, int]:
    return found.n_tokens, found.n_stored


def _forms(stored: Iterable[Stored]) -> Iterator[Form]:
    """Those namespaces that are wanted and whose layout can be read."""
    for there in stored:
        if not there.is_wanted:
            continue
        try:
            yield Form(there.namespace, Layout.from_json(there.namespace.layout))
        except (ValueError, KeyError, TypeError):
            continue


def _last_block(match: Match) -> BlockKey | None:
    """The block of tokens that a match ends in."""
    if not match.n_tokens:
        return None
    *before, last = match.keys
    return before[-1] if before and last == keys.snapshot_key(before[-1]) else last
