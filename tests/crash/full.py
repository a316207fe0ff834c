"""The whole prompt cache under load, with caches whose every row tells its tokens."""

from __future__ import annotations

from pathlib import Path

from caches import holds, holds_hybrid, make, make_hybrid

from tieredkv import TieredPromptCache

from .load import FLUSH_S, Found

HOT_BYTES = 1 << 16
BLOCK_TOKENS = 8
_LAYERS = 6
_SLICED = ("sliced", None, None)
_HYBRID = ("hybrid", None, None)


def _is_hybrid(tokens: list[int]) -> bool:
    """Whether a prompt is one of the model with a recurrent layer: decided by its first words."""
    return bool(tokens[10] % 4 == 0)


class FullParty:
    """A `TieredPromptCache` with little memory, so that most of what is found is promoted."""

    def __init__(self, directory: Path, cap_bytes: int) -> None:
        self.cache = TieredPromptCache(
            directory, hot_bytes=HOT_BYTES, cold_bytes=cap_bytes, block_tokens=BLOCK_TOKENS
        )

    def store(self, tokens: list[int]) -> bool:
        # An insert that failed is contained, and no business of flush.
        inserted = self.cache.stats().inserts
        self.insert(tokens)
        return self.cache.flush(FLUSH_S) and self.cache.stats().inserts > inserted

    def insert(self, tokens: list[int]) -> None:
        """Insert a prompt, and don't wait for its commit."""
        if _is_hybrid(tokens):
            self.cache.insert_cache(_HYBRID, tokens, make_hybrid(tokens))
        else:
            self.cache.insert_cache(_SLICED, tokens, make(tokens, layers=_LAYERS))

    def find(self, tokens: list[int]) -> Found:
        model = _HYBRID if _is_hybrid(tokens) else _SLICED
        # One token more, for a hit always leaves one.
        caches, rest = self.cache.fetch_nearest_cache(model, [*tokens, 7])
        n = len(tokens) + 1 - len(rest)
        if caches is None:
            return Found(n, n == 0)
        right = holds_hybrid if _is_hybrid(tokens) else holds
        return Found(n, right(caches, tokens[:n]))

    def faults(self) -> dict[str, int]:
        return self.cache.stats().faults

    def problems(self) -> list[str]:
        return [str(problem) for problem in self.cache.check()]

    def close(self) -> None:
        self.cache.close()
