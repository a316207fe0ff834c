"""What is put in the place of mlx-lm's own where its server leaves no other way in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm import server as upstream
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

from tieredkv import layout

# The host whose contract the modules around the server were written against and are tested with.
UPSTREAM_VERSION = "0.32.2"


@contextmanager
def in_upstream(name: str, value: Any) -> Iterator[None]:
    """Put something else in the place of a global name of upstream's module."""
    before = getattr(upstream, name)
    setattr(upstream, name, value)
    try:
        yield
    finally:
        setattr(upstream, name, before)


class _ExactRings(BatchRotatingKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's batch of rings, whose padding is known to the row.

    There ``left_padding`` goes on falling once a ring is full, and what is rolled or padded in
    after that is counted against it: rows of padding then pass for tokens. Its masks never reach
    them, but what is extracted does. At 0 it means the same to the masks.
    """

    left_padding: mx.array

    def _clamp(self) -> None:
        self.left_padding = mx.maximum(self.left_padding, 0)

    def _update_concat(self, keys: mx.array, values: mx.array) -> Any:
        self._clamp()
        return super()._update_concat(keys, values)

    def finalize(self) -> None:
        self._clamp()
        super().finalize()

    def extend(self, other: Any) -> None:
        self._clamp()
        other.left_padding = mx.maximum(other.left_padding, 0)
        super().extend(other)

    def extract(self, idx: int) -> Any:
        self._clamp()
        ring = super().extract(idx)
        layout.vouch([ring])
        return ring


@classmethod  # type: ignore[misc]  # put into a class that isn't this module's
def _merge(_: Any, caches: list[Any]) -> Any:
    return _ExactRings.merge(caches)


def make_rings_exact() -> None:
    """Have mlx-lm's rings merge into batches from which all rows they have can be stored."""
    RotatingKVCache.merge = _merge
