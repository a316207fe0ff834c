"""The tier that holds nothing: what a store without a cold directory has below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tieredkv.core import (
    Allocate,
    Block,
    BlockKey,
    Chain,
    ColdCounters,
    Namespace,
    Partial,
    Pinned,
    PinRefused,
    Place,
    Problem,
)
from tieredkv.tiers.ledger import Rows


def _no_disk() -> PinRefused:
    return PinRefused(
        "no_cold",
        "prompts are kept in memory only here, where none can be pinned: give a directory",
    )


class NullTier:
    """Finds nothing and takes nothing. Any thread may call."""

    cap_bytes = 0
    n_bytes = 0
    n_blocks = 0
    pinned_bytes = 0

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

    def touch(self, keys: Sequence[BlockKey], expires: int = 0) -> None:
        """Nothing to touch."""

    def expire(self, now: int) -> int:  # noqa: ARG002 - as above
        """Nothing expires."""
        return 0

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

    def prune(self, criteria: Any) -> Iterator[Any]:  # noqa: ARG002 - as above
        """Nothing goes."""
        return iter(())

    def meant(self, criteria: Any) -> frozenset[BlockKey]:  # noqa: ARG002 - as above
        """None."""
        return frozenset()

    def pin(self, places: Sequence[Place]) -> Pinned:  # noqa: ARG002 - as above
        """Refuses."""
        raise _no_disk()

    def unpin(self, places: Sequence[Place]) -> Pinned:  # noqa: ARG002 - as above
        """Refuses."""
        raise _no_disk()

    def pin_id(self, prefix_id: str) -> Pinned:  # noqa: ARG002 - as above
        """Refuses."""
        raise _no_disk()

    def unpin_id(self, prefix_id: str) -> Pinned:  # noqa: ARG002 - as above
        """Refuses."""
        raise _no_disk()

    def close(self) -> None:
        """Nothing to release."""
