"""The tier that holds nothing: what a store without a cold directory has below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tieredkv.core import (
    Allocate,
    Block,
    BlockKey,
    Chain,
    ColdCounters,
    Namespace,
    Partial,
    Problem,
)
from tieredkv.tiers.ledger import Rows


class NullTier:
    """Finds nothing and takes nothing. Any thread may call."""

    cap_bytes = 0
    n_bytes = 0
    n_blocks = 0

    def lookup(self, chain: Chain, start: int = 0) -> int:  # noqa: ARG002 - the contract's names
        """Nothing beyond ``start``."""
        return start

    def nearest(self, parent: BlockKey, tokens: bytes) -> Partial | None:  # noqa: ARG002
        """None."""
        return None

    def prefixes(self, parent: BlockKey, tokens: bytes) -> list[Partial]:  # noqa: ARG002
        """None."""
        return []

    def beside(self, parent: BlockKey, tokens: bytes) -> list[bytes]:  # noqa: ARG002
        """None."""
        return []

    def consult(self, work: Callable[[Rows], object]) -> None:
        """There are no rows."""

    def present(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:  # noqa: ARG002
        """None."""
        return frozenset()

    def load(
        self,
        keys: Sequence[BlockKey],  # noqa: ARG002
        allocate: Allocate | None = None,  # noqa: ARG002
    ) -> list[Block]:
        """No blocks."""
        return []

    def put(self, blocks: Sequence[Block]) -> int:  # noqa: ARG002
        """None held."""
        return 0

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Nothing to touch."""

    def saw(self, keys: Sequence[BlockKey], n_held: int) -> None:
        """Nothing to judge."""

    def trim_to(self, n_bytes: int) -> None:
        """Always within."""

    def check(self) -> list[Problem]:
        """No books, no faults."""
        return []

    def missing(self, chain: Chain) -> int:
        """Wants nothing."""
        return len(chain.keys)

    def register(self, namespace: Namespace) -> None:
        """Describes nothing."""

    def layouts(self, base: BlockKey) -> list[str]:  # noqa: ARG002
        """Knows none."""
        return []

    def counters(self) -> ColdCounters:
        """All zero."""
        return ColdCounters()

    def close(self) -> None:
        """Nothing to release."""
