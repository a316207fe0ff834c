"""Texts of token ids: asked for on any thread, made on the one that has the tokenizer.

A tokenizer's answers change with settings that its own calls make, so no other thread may use it
beside the one that generates. Who asks isn't kept waiting either: a step may take a minute.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

_LOG = logging.getLogger("tieredkv")

_KNOWN = 256
_WANTED = 32

_Name = tuple[str, str]


class Texts:
    """Texts by the name of a model and an id of the tokens. Bounded: the oldest are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[_Name, str | None] = {}
        self._wanted: dict[_Name, tuple[int, ...]] = {}

    def of(self, model: str, name: str, tokens: Sequence[int]) -> str | None:
        """The text of ``tokens``, which are always the same for a name; None if it can't be made,
        or hasn't been yet: ask again some time later. Any thread may call.
        """
        with self._lock:
            if (model, name) not in self._known and len(self._wanted) < _WANTED:
                self._wanted[model, name] = tuple(tokens)
            return self._known.get((model, name))

    def make(self, model: str, decode: Callable[[list[int]], str]) -> None:
        """Make those that are wanted of a model. On the thread that has its tokenizer."""
        if not self._wanted:
            return
        with self._lock:
            wanted, self._wanted = self._wanted, {}
        for name, tokens in wanted.items():
            if name[0] == model:
                self._keep(name, _decoded(decode, tokens))

    def _keep(self, name: _Name, text: str | None) -> None:
        with self._lock:
            self._known[name] = text
            if len(self._known) > _KNOWN:
                del self._known[next(iter(self._known))]


def _decoded(decode: Callable[[list[int]], str], tokens: Sequence[int]) -> str | None:
    try:
        # What stands for images isn't the tokenizer's.
        return decode([token for token in tokens if token >= 0])
    except Exception:  # noqa: BLE001 - a foreign tokenizer, on the thread that must not end
        _LOG.warning("tieredkv: the text of %d tokens can't be made", len(tokens), exc_info=True)
        return None
