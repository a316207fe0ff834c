"""A tiered prompt (KV) cache for MLX: byte-capped memory over LMDB, warm after a crash."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tieredkv.core import (
    Config,
    Hit,
    Namespace,
    Pinned,
    PinRefused,
    Problem,
    Quantization,
    StoreStats,
    TieredKVError,
)

if TYPE_CHECKING:
    from tieredkv.library import GenerationThread, adopt, generate, stream_generate
    from tieredkv.prompt_cache import SaltedPrompt, TieredPromptCache
    from tieredkv.server import serve
    from tieredkv.store import TieredStore

__all__ = [
    "Config",
    "GenerationThread",
    "Hit",
    "Namespace",
    "PinRefused",
    "Pinned",
    "Problem",
    "Quantization",
    "SaltedPrompt",
    "StoreStats",
    "TieredKVError",
    "TieredPromptCache",
    "TieredStore",
    "adopt",
    "generate",
    "serve",
    "stream_generate",
]

# Names whose modules load mlx, fetched at first use: the command line and the health check of
# the cold tier, which is a process of its own, must start without it.
_LATE = {
    "GenerationThread": "tieredkv.library",
    "adopt": "tieredkv.library",
    "generate": "tieredkv.library",
    "stream_generate": "tieredkv.library",
    "SaltedPrompt": "tieredkv.prompt_cache",
    "TieredPromptCache": "tieredkv.prompt_cache",
    "TieredStore": "tieredkv.store",
    "serve": "tieredkv.server",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
