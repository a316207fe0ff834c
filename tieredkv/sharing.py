"""The remote tier's part in a hit, and what goes there: when it is asked, and for how much.

Below the cold tier in all: it is asked for what comes behind the longest prefix found on this
machine, if that is worth the wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tieredkv.core import Allocate, Block, BlockKey, Chain, Codec, Remote, RemoteStats
from tieredkv.engines.base import Timeouts
from tieredkv.engines.opening import open_engine
from tieredkv.keys import snapshot_key, window_key
from tieredkv.metrics import Counters
from tieredkv.pace import Pace
from tieredkv.tiers.objects import Plain, Sealed, Wrap, secret_of
from tieredkv.tiers.remote import RemoteTier
from tieredkv.tiers.uploader import Source, Uploader

_LOG = logging.getLogger("tieredkv")

# An upload may take its time.
_WRITE_SECONDS = 60.0
# How many blocks back from the end it is looked for state.
_STATES = 64

Present = Callable[[Sequence[BlockKey]], Collection[BlockKey]]


@dataclass(frozen=True, slots=True)
class Path:
    """What a prefix is restored from: blocks and maybe a snapshot, and windows."""

    keys: tuple[BlockKey, ...]
    n_tokens: int
    windows: tuple[BlockKey, ...] = ()


class Sharing:
    """A remote tier, and the uploads to it. Any thread may call."""

    def __init__(
        self,
        config: Remote,
        codec: Codec,
        block_tokens: int,
        pace: Pace,
        counters: Counters,
    ) -> None:
        """Connect to nothing yet, and upload nothing before `feed`.

        Args:
            config: where, and how.
            codec: of the blobs.
            block_tokens: of full blocks.
            pace: how fast models compute.
            counters: where everything is counted.

        Raises:
            RemoteRefused: it can't be done as it was asked for.
        """
        engine = open_engine(config.url, Timeouts(config.timeout, _WRITE_SECONDS))
        wrap: Wrap = Plain() if config.key is None else Sealed(secret_of(config.key))
        self._policy = config.upload
        self._rate = config.rate
        self._pace = pace
        self._counters = counters
        self.tier = RemoteTier(engine, codec, wrap, config.timeout, block_tokens, counters)
        self.uploader: Uploader | None = None

    def feed(self, source: Source | None) -> None:
        """Upload from the cold tier ``source``; None for not at all."""
        if source is None:
            _LOG.warning(
                "tieredkv: nothing is uploaded to %s: that needs a cold tier", self.tier.title
            )
            return
        self.uploader = Uploader(self.tier, source, self._rate, self._counters)

    # ---- a hit

    def extend(self, chain: Chain, n_near: int, n_tokens: int, by: float) -> Path | None:
        """The longest prefix of ``chain`` with the help of the remote tier, if that is longer
        than the ``n_tokens`` of which there are ``n_near`` full blocks on this machine.
        """
        if not self._is_worth_asking(chain, n_tokens, by):
            return None
        n = self.tier.lookup(chain, n_near, by)
        path = Path(chain.keys[:n], n * chain.block_tokens)
        if n < len(chain.keys):
            last = self.tier.nearest(chain.parent(n), chain.tokens_of(n), by)
            if last is not None:
                path = Path((*path.keys, last.key), path.n_tokens + last.n_tokens)
        return self._worth_fetching(chain, path, n_tokens)

    def extend_state(
        self,
        chain: Chain,
        n_near: int,
        n_tokens: int,
        n_windows: int,
        present: Present,
        by: float,
    ) -> Path | None:
        """As `extend`, for what ends at a snapshot, or at a block with so many windows before its
        end; ``present`` tells what there is on this machine.
        """
        if not self._is_worth_asking(chain, n_tokens, by):
            return None
        n = self.tier.lookup(chain, n_near, by)
        path = self._at_tail(chain, n, present, by)
        path = path or self._at_block(chain, n, n_tokens, n_windows, present, by)
        return self._worth_fetching(chain, path, n_tokens) if path else None

    def _at_tail(self, chain: Chain, n: int, present: Present, by: float) -> Path | None:
        if n == len(chain.keys):
            return None
        tails = self.tier.prefixes(chain.parent(n), chain.tokens_of(n), by)
        snapshots = [snapshot_key(tail.key) for tail in tails]
        held = self._either(snapshots, present, by)
        for tail, snapshot in zip(tails, snapshots, strict=True):
            if snapshot in held:
                keys = (*chain.keys[:n], tail.key, snapshot)
                return Path(keys, n * chain.block_tokens + tail.n_tokens)
        return None

    def _at_block(
        self, chain: Chain, n: int, n_tokens: int, n_windows: int, present: Present, by: float
    ) -> Path | None:
        least = max(n_tokens // chain.block_tokens, n - _STATES)
        if least >= n:
            return None
        whole = chain.keys[:n]
        states = [snapshot_key(key) for key in whole[least:]]
        windows = [window_key(key) for key in whole]
        first = max(0, least - n_windows) if n_windows else n
        held = self._either([*states, *windows[first:]], present, by)
        for i in range(n, least, -1):
            if states[i - 1 - least] in held:
                return Path((*whole[:i], states[i - 1 - least]), i * chain.block_tokens)
            wanted = tuple(windows[max(0, i - n_windows) : i])
            if n_windows and held.issuperset(wanted):
                return Path(whole[:i], i * chain.block_tokens, wanted)
        return None

    def _either(self, keys: Sequence[BlockKey], present: Present, by: float) -> frozenset[BlockKey]:
        """Which of ``keys`` are on this machine or in the remote tier."""
        near = frozenset(present(keys))
        return near | self.tier.present([key for key in keys if key not in near], by)

    def _is_worth_asking(self, chain: Chain, n_tokens: int, by: float) -> bool:
        n_more = len(chain.tokens) - n_tokens
        if not by or n_more <= 0:
            return False
        prefill = self._pace.prefill_seconds(chain.root, n_more)
        if self.tier.link.is_worth_asking(chain.root, n_more, prefill):
            return True
        self._counters.add("remote_skipped", label="not_worth_asking")
        return False

    def _worth_fetching(self, chain: Chain, path: Path, n_tokens: int) -> Path | None:
        n_more = path.n_tokens - n_tokens
        self.tier.link.found(max(0, n_more) / max(1, len(chain.tokens) - n_tokens))
        if n_more <= 0:
            return None
        prefill = self._pace.prefill_seconds(chain.root, n_more)
        if self.tier.link.is_worth_fetching(chain.root, n_more, prefill):
            return path
        self._counters.add("remote_skipped", label="not_worth_fetching")
        return None

    def load(
        self, root: BlockKey, keys: Sequence[BlockKey], allocate: Allocate, by: float
    ) -> list[Block]:
        """The leading blocks of ``keys`` that came in time and are sound, in order."""
        blocks = self.tier.load(root, keys, allocate, by)
        if self.uploader is not None:
            # Its ancestors were there too, at least where it was looked for them.
            self.uploader.know(b.key for b in blocks)
            self.uploader.forget(keys[len(blocks) :])
        return blocks

    # ---- uploads

    def written(self, keys: Sequence[BlockKey]) -> None:
        """Be told of blocks that are new in the cold tier."""
        if self._policy == "all":
            self._upload(keys)

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Be told of blocks that a request has used."""
        if self._policy != "pinned":
            self._upload(keys)

    def pinned(self) -> None:
        """Be told that something has been pinned. What other processes pin is found in time."""
        if self.uploader is not None:
            self.uploader.look()

    def _upload(self, keys: Sequence[BlockKey]) -> None:
        if self.uploader is not None:
            self.uploader.submit(keys)

    def stats(self) -> RemoteStats:
        """A reading of the counters."""
        count = self._counters
        return RemoteStats(
            blocks_read=count.total("remote_blocks_read"),
            bytes_read=count.total("remote_bytes_read"),
            blocks_written=count.total("remote_blocks_written"),
            bytes_written=count.total("remote_bytes_written"),
            queue_blocks=self.uploader.n_waiting if self.uploader else 0,
            skipped=count.by_label("remote_skipped"),
            dropped=count.by_label("remote_dropped"),
            faults=count.by_label("remote_faults"),
        )

    def close(self) -> None:
        """Upload what can be in a short time, and let go. Idempotent."""
        if self.uploader is not None:
            self.uploader.close()
        self.tier.close()
