"""Which blocks are worth a write to the cold tier."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tieredkv.core import BlockKey

# Blocks that are remembered though they may have left the hot tier, some 150 bytes each.
_SEEN_BLOCKS = 1 << 15


class Admission(Protocol):
    """Decides what is written. Called on the generation thread only."""

    def inserted(self, keys: Sequence[BlockKey], computed: Collection[BlockKey]) -> int:
        """How many of ``keys``, a chain from its start, may be written, now that those of them in
        ``computed`` have been.
        """

    def used(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys``, a chain from its start, may be written now that a prompt has used
        them.
        """


class AdmitAll:
    """All at once: what an insert returned from is on its way to the disk."""

    def inserted(
        self,
        keys: Sequence[BlockKey],
        computed: Collection[BlockKey],  # noqa: ARG002 - the contract's name
    ) -> int:
        """All."""
        return len(keys)

    def used(self, keys: Sequence[BlockKey]) -> int:  # noqa: ARG002 - as above
        """Nothing more."""
        return 0


class AdmitReused:
    """Only what comes back: a block goes to the disk when a later prompt uses it, or when it has to
    be computed again because memory has lost it meanwhile.
    """

    def __init__(self, n_blocks: int = _SEEN_BLOCKS) -> None:
        """Remember the last ``n_blocks`` that were computed."""
        self._limit = n_blocks
        self._seen: dict[BlockKey, None] = {}

    def inserted(self, keys: Sequence[BlockKey], computed: Collection[BlockKey]) -> int:
        """Up to the last that was computed before."""
        again = [i for i, key in enumerate(keys) if key in computed and key in self._seen]
        self._seen |= dict.fromkeys(computed)
        for key in list(self._seen)[: max(0, len(self._seen) - self._limit)]:
            del self._seen[key]
        return again[-1] + 1 if again else 0

    def used(self, keys: Sequence[BlockKey]) -> int:
        """All."""
        return len(keys)
