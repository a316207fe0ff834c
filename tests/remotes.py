"""Remote tiers for tests, fed with blocks as they are."""

from __future__ import annotations

from collections.abc import Sequence

from tieredkv.codec import PlaneCodec, checksum
from tieredkv.core import Block, BlockKey, Chain, Partial, Problem
from tieredkv.engines.base import Timeouts
from tieredkv.engines.opening import open_engine
from tieredkv.metrics import Counters
from tieredkv.tiers.objects import Parcel, Plain, Wrap
from tieredkv.tiers.records import record_of
from tieredkv.tiers.remote import RemoteTier

SECONDS = 10.0


def parcel(block: Block) -> Parcel:
    """A block as the cold tier would hand it out."""
    blob = PlaneCodec().encode(block)
    return Parcel(record_of(block, len(blob), checksum(blob), 1), blob, block.grade)


class Shared:
    """A remote tier, with as much of `Tier` as its contract's tests need."""

    n_blocks = n_bytes = 0

    def __init__(
        self,
        url: str,
        *,
        wrap: Wrap | None = None,
        timeout: float = SECONDS,
        block_tokens: int = 4,
    ) -> None:
        self.counters = Counters()
        engine = open_engine(url, Timeouts(timeout, timeout))
        self.tier = RemoteTier(
            engine, PlaneCodec(), wrap or Plain(), timeout, block_tokens, self.counters
        )
        self._root = BlockKey(bytes(32))

    def put(self, blocks: Sequence[Block]) -> int:
        if not blocks or self.tier.by() == 0.0:
            return 0
        self._root = blocks[0].root
        for block in blocks:
            self.tier.put(block.key, parcel(block))
        return len(blocks)

    def lookup(self, chain: Chain, start: int = 0) -> int:
        return self.tier.lookup(chain, start)

    def nearest(self, parent: BlockKey, tokens: bytes) -> Partial | None:
        return self.tier.nearest(parent, tokens)

    def prefixes(self, parent: BlockKey, tokens: bytes) -> list[Partial]:
        return self.tier.prefixes(parent, tokens)

    def present(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        return self.tier.present(keys)

    def load(self, keys: Sequence[BlockKey]) -> list[Block]:
        return self.tier.load(self._root, keys)

    def faults(self) -> dict[str, int]:
        return self.counters.by_label("remote_faults")

    def check(self) -> list[Problem]:
        return []

    def close(self) -> None:
        self.tier.close()
