"""Checkpoints: long prompts are stored while they are being computed, every so many tokens.

What a crash, an abort or a client that leaves interrupts is then lost only since the last
checkpoint, and layers that can't be sliced get positions to restore at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from tieredkv import layout
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


def with_caches(models: Sequence[Any], caches: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Target and maybe draft, each with its layers' caches: mlx-lm has them in one list."""
    target, *draft = models
    if not draft:
        return [(target, caches)]
    n = len(target.layers)
    return [(target, caches[:n]), (draft[0], caches[n:])]


class SequentialPrefill:
    """The prefill of one request that is served alone: stored as it goes, stopped on demand.

    All of the prompt but its last token, which `stream_generate` is left with. On the
    generation thread.
    """

    def __init__(
        self,
        cache: TieredPromptCache,
        model: Hashable,
        prompt: list[int],
        segments: Sequence[list[int]],
        types: Sequence[str],
        n_cached: int,
        should_stop: Callable[[], bool],
    ) -> None:
        """Compute ``prompt``, which ``segments`` make up, from its token ``n_cached`` on.

        The state is stored for the key ``model`` at the end of each segment, under its type.
        """
        self._cache = cache
        self._model = model
        self._prompt = prompt[:]
        self._start = n_cached
        self._should_stop = should_stop
        last = len(self._prompt) - 1
        # Backwards, so that of two that end before the last token the first one's type counts.
        ends = accumulate(len(segment) for segment in segments)
        self._kinds = {min(e, last): kind for e, kind in [*zip(ends, types, strict=True)][::-1]}

    def run(
        self,
        models: Sequence[tuple[Any, list[Any]]],
        step: int,
        report: Callable[[int, int], None],
    ) -> mx.array:
        """Feed each model's caches in steps that end at multiples of ``step`` and at segments'.

        Args:
            models: target and maybe draft, each with its own layers' caches.
            step: most tokens of a step.
            report: called after each step with the tokens done and to do, cached ones apart.

        Returns:
            The prompt's last token, shape (1,).

        Raises:
            Cancelled: the request is to stop; what is done has been stored.
        """
        live = [c for _, caches in models for c in caches]
        layout.vouch(live)
        total = len(self._prompt) - self._start
        done = self._start
        report(0, total)
        for end in self._ends(step):
            if self._should_stop():
                raise Cancelled("the client is gone")
            tokens = mx.array(self._prompt[done:end])[None]
            for model, caches in models:
                model(tokens, cache=caches)
            mx.eval([c.state for c in live])
            mx.clear_cache()
            done = end
            report(done - self._start, total)
            # A request that stops at the next step keeps this one too.
            kind = self._kinds.get(end) or ("user" if self._should_stop() else None)
            if kind:
                self._cache.insert_cache(self._model, self._prompt[:end], live, cache_type=kind)
        if self._should_stop():
            raise Cancelled("the client is gone")
        return mx.array(self._prompt[-1:])

    def _ends(self, step: int) -> list[int]:
        last = len(self._prompt) - 1
        first = (self._start // step + 1) * step
        ends = {*range(first, last, step), *self._kinds, last}
        return sorted(e for e in ends if e > self._start)

    def seeing_all(self, processors: Sequence[Processor]) -> list[Processor]:
        """Logits processors that see all of the prompt, as they would without this prefill."""
        before = mx.array(self._prompt[:-1])
        return [self._preceded(before, p) for p in processors]

    @staticmethod
    def _preceded(before: mx.array, processor: Processor) -> Processor:
        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            return processor(mx.concatenate([before.astype(tokens.dtype), tokens]), logits)

        return process
