"""One prompt's state in a cold tier, and in the files that people use instead."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import zstandard
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from bench.state import Shape, caches_of
from tieredkv import TieredPromptCache

# No folder of that name: its files would stand for a model.
KEY = ("a model", None, None)


class Entry:
    """A prompt of so many tokens of a model of a shape, stored in three ways under ``folder``."""

    def __init__(self, folder: Path, shape: Shape, n_tokens: int) -> None:
        self._shape = shape
        self._tokens = list(range(n_tokens))
        self._folder = folder / "cold"
        self._plain = folder / "entry.safetensors"
        self._packed = folder / "entry.zst"
        self._step = mx.zeros((1, shape.heads, 1, shape.width), mx.bfloat16)
        live = caches_of(shape, n_tokens)
        save_prompt_cache(str(self._plain), live)
        self._packed.write_bytes(zstandard.compress(self._plain.read_bytes(), 3))
        self.cache = self._opened()
        self.cache.insert_cache(KEY, self._tokens, live)
        assert self.cache.flush(120)
        self.encoded_bytes = self.cache.stats().bytes_written

    @property
    def n_bytes(self) -> int:
        """Raw bytes of the state."""
        return self._shape.bytes_per_token * len(self._tokens)

    def _opened(self) -> TieredPromptCache:
        return TieredPromptCache(self._folder, hot_bytes=4 << 30)

    def reopen(self, between: Callable[[Path], object]) -> None:
        """Close the cold tier and open it again; do something to its file before and after."""
        self.cache.close()
        between(self._folder / "data.mdb")
        self.cache = self._opened()
        between(self._folder / "data.mdb")

    def demote(self) -> None:
        """Leave it on disk alone, and MLX without memory to reuse."""
        self.cache.trim_to(n_bytes=0)
        mx.clear_cache()

    def from_safetensors(self) -> None:
        """Load the plain file, and go on by a token."""
        self._go_on(load_prompt_cache(str(self._plain)))

    def from_zstd(self) -> None:
        """Load the compressed file, and go on by a token."""
        content = io.BytesIO(zstandard.decompress(self._packed.read_bytes()))
        arrays = mx.load(content, format="safetensors")
        layers = range(self._shape.layers)
        pairs = ((arrays[f"{i}.0"], arrays[f"{i}.1"], len(self._tokens)) for i in layers)
        self._go_on([KVCache.from_state(pair) for pair in pairs])

    def from_cold_tier(self) -> None:
        """Promote, restore, and go on by a token."""
        live, _ = self.cache.fetch_nearest_cache(KEY, [*self._tokens, 7])
        assert live is not None
        self._go_on(live)

    def _go_on(self, live: list[Any]) -> None:
        for c in live:
            c.update_and_fetch(self._step, self._step)
        mx.eval([c.state for c in live])
