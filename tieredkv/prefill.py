"""Checkpoints: long prompts are stored while they are being computed, every so many tokens.

What a crash, an abort or a client that leaves interrupts is then lost only since the last
checkpoint, and layers that can't be sliced get positions to restore at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from tieredkv.prompt_cache import TieredPromptCache

Processor = Callable[[mx.array, mx.array], mx.array]


class Cancelled(Exception):
    """The client of a request is gone."""


def cut(
    segments: Sequence[list[int]], types: Sequence[str], every: int
) -> tuple[list[list[int]], list[str]]:
    """Cut prompt segments at each multiple of ``every`` tokens from the prompt's start.

    mlx-lm's batch inserts into the cache at each segment's end, under the segment's type.
    """
    pieces: list[list[int]] = []
    kinds: list[str] = []
    start = 0
    for segment, kind in zip(segments, types, strict=True):
        stop = start + len(segment)
        ends = [*range((start // every + 1) * every, stop, every), stop]
        for a, b in zip([start, *ends], ends, strict=False):
            pieces.append(segment[a - start : b - start])
            kinds.append(kind)
        start = stop
    return pieces, kinds


class SequentialPrefill:
    """The prefill of one request that is served alone: stored as it goes, stopped on demand.

    On the generation thread.
    """

    def __init__(
        self,
        cache: TieredPromptCache,
        model: Hashable,
        prompt: Sequence[int],
        n_cached: int,
        live: list[Any],
        should_stop: Callable[[], bool],
        every: int,
    ) -> None:
        """Follow the prefill of ``prompt[n_cached:]`` into ``live``, for the key ``model``.

        ``every`` is the distance of checkpoints in tokens, 0 for none but the last.
        """
        self._cache = cache
        self._model = model
        self._prompt = list(prompt)
        self._start = self._stored = n_cached
        self._live = live
        self._should_stop = should_stop
        self._every = every

    def progress(self, processed: int, total: int) -> None:
        """To be called after each step, with the tokens of the rest that are done, and all.

        Raises:
            Cancelled: the request is to stop; what is done has been stored.
        """
        done = self._start + processed
        stop = self._should_stop()
        due = self._every and done - self._stored >= self._every
        if self._stored < done < len(self._prompt) and (due or stop or processed == total - 1):
            # Only the prompt's last token is left, or it is time for a checkpoint.
            self._cache.insert_cache(
                self._model, self._prompt[:done], self._live, cache_type="user"
            )
            self._stored = done
        if stop:
            raise Cancelled("the client is gone")

    def seeing_all(self, processors: Sequence[Processor]) -> list[Processor]:
        """Logits processors that see the cached tokens too, as they would without the cache."""
        if not self._start:
            return list(processors)
        cached = mx.array(self._prompt[: self._start])
        return [self._preceded(cached, p) for p in processors]

    @staticmethod
    def _preceded(cached: mx.array, processor: Processor) -> Processor:
        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            return processor(mx.concatenate([cached.astype(tokens.dtype), tokens]), logits)

        return process
