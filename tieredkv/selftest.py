"""What this machine makes of a cold tier: disk, codec and promote, and a model's prefill.

All of it together takes seconds and about a gigabyte of disk, which is free again afterwards.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tieredkv.core import ColdTierUnavailable
from tieredkv.identity import local_folder
from tieredkv.prompt_cache import TieredPromptCache
from tieredkv.units import bytes_text

# State of a model of 8B: layers, heads of keys and values, and their width. In bfloat16.
_LAYERS, _HEADS, _WIDTH = 32, 8, 128
SIZES = (256, 512, 1024)
_FILE_BYTES = 128 << 20
_CHUNK_BYTES = 8 << 20
NEEDED_BYTES = 2 << 30
_HOT_BYTES = 4 << 30
_COLD_BYTES = 1 << 30
# A prefill that is slower than this is measured on fewer tokens.
_PREFILL_SECONDS = 15.0
_WARM_UP = 8
_KEY = ("tieredkv bench", None, None)
# macOS' fcntl that reads and writes around the page cache; Python has no name for it.
_F_NOCACHE = 48


@dataclass(frozen=True, slots=True)
class Disk:
    """Sequential speed in bytes per second: written and synced, and read from the disk itself
    where the system lets us forget what is cached.
    """

    write: float
    read: float


@dataclass(frozen=True, slots=True)
class Promoted:
    """State of ``n_tokens`` tokens, ``n_bytes`` of it, that came back in ``seconds``."""

    n_tokens: int
    n_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured. ``encoded`` bytes per second of state went to the disk, packed to
    ``ratio`` of their size. ``prefill`` is in tokens per second, None without a model, and
    ``break_even`` the tokens from which on a promote is faster, None if it never is or no model
    was given.
    """

    directory: str
    model: str | None
    disk: Disk
    encoded: float
    ratio: float
    promoted: tuple[Promoted, ...]
    prefill: float | None
    break_even: int | None

    @property
    def promote(self) -> float:
        """Tokens per second that come back, of the longest prompt."""
        last = self.promoted[-1]
        return last.n_tokens / last.seconds


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """State that is stored under ``tokens``, and how fast a model computed it, if one did."""

    tokens: list[int]
    sizes: tuple[int, ...]
    rate: float | None


def measure(directory: Path, model: str | None, progress: Callable[[int, int], None]) -> Report:
    """Measure in a folder beside ``directory``, which needn't be there; the folder goes again,
    also after an interrupt.

    ``progress`` is told how many steps are done, of how many.

    Raises:
        ColdTierUnavailable: too little disk is free, nothing can be written there, or nothing of
            the model can be stored.
        OSError, ValueError: the model can't be loaded.
    """
    n_steps = 3 + len(SIZES)
    with _folder(directory) as folder:
        disk = _disk(folder / "file")
        progress(1, n_steps)
        loaded = _loaded(model) if model else None
        progress(2, n_steps)
        with _opened(folder) as cache:
            made = _computed(cache, loaded) if model else _made_up(cache)
            start = time.perf_counter()
            stored = cache.flush()
            seconds = time.perf_counter() - start
            raw, written = cache.nbytes, cache.stats().bytes_written
            refused = cache.stats().refused | cache.stats().dropped
        if not stored or not written:
            raise ColdTierUnavailable(f"nothing could be stored: {refused or 'the disk failed'}")
        promoted = []
        for i, n in enumerate(made.sizes):
            progress(3 + i, n_steps)
            promoted.append(_promote(folder, made.tokens[:n]))
        progress(n_steps, n_steps)
    return Report(
        str(directory),
        model,
        disk,
        raw / seconds,
        written / raw,
        tuple(promoted),
        made.rate,
        _break_even(promoted, made.rate),
    )


@contextmanager
def _folder(directory: Path) -> Iterator[Path]:
    """A folder for the time of the measurement, on the disk that ``directory`` is or will be on."""
    beside = directory.expanduser().absolute().parent
    while not beside.exists():
        beside = beside.parent
    free = shutil.disk_usage(beside).free
    if free < NEEDED_BYTES:
        raise ColdTierUnavailable(
            f"{beside}: {bytes_text(free)} of disk are free, and this needs "
            f"{bytes_text(NEEDED_BYTES)} for a moment; --dir chooses another disk"
        )
    try:
        folder = TemporaryDirectory(prefix="tieredkv-bench-", dir=beside)
    except OSError as e:
        raise ColdTierUnavailable(f"nothing can be written in {beside}: {e}") from e
    with folder as name:
        yield Path(name)


def _loaded(model: str) -> Any:
    if local_folder(model) is None:
        raise ValueError("it is neither a folder nor in the hub's local cache")
    return load(model)[0]


def _opened(folder: Path) -> TieredPromptCache:
    return TieredPromptCache(folder / "store", hot_bytes=_HOT_BYTES, cold_bytes=_COLD_BYTES)


# ---- the disk


def _disk(path: Path) -> Disk:
    chunk = np.random.default_rng(0).bytes(_CHUNK_BYTES)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(_FILE_BYTES // _CHUNK_BYTES):
            file.write(chunk)
        _sync(file.fileno())
    write = time.perf_counter() - start
    _forget(path)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        _read_around_cache(file.fileno())
        while file.read(_CHUNK_BYTES):
            pass
    read = time.perf_counter() - start
    path.unlink()
    return Disk(_FILE_BYTES / write, _FILE_BYTES / read)


def _sync(fd: int) -> None:
    # On macOS an fsync leaves what was written in the disk's own memory.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full)


def _forget(path: Path) -> None:
    """Take a file out of the page cache, where the system lets us."""
    if not hasattr(os, "posix_fadvise"):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _read_around_cache(fd: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(fd, _F_NOCACHE, 1)


# ---- state


def _computed(cache: TieredPromptCache, model: Any) -> _Prefilled:
    """A prefill by the model, stored at each of some lengths."""
    tokens = np.random.default_rng(0).integers(1, 200, SIZES[-1]).tolist()
    # The first step compiles what the others use.
    mx.eval(model(mx.array([tokens[:_WARM_UP]]), cache=make_prompt_cache(model)))
    live = make_prompt_cache(model)
    done, seconds = 0, 0.0
    sizes: list[int] = []
    for n in SIZES:
        start = time.perf_counter()
        mx.eval(model(mx.array([tokens[done:n]]), cache=live), [c.state for c in live])
        seconds += time.perf_counter() - start
        done = n
        sizes.append(n)
        cache.insert_cache(_KEY, tokens[:n], live)
        if seconds > _PREFILL_SECONDS:
            break
    return _Prefilled(tokens, tuple(sizes), done / seconds)


def _made_up(cache: TieredPromptCache) -> _Prefilled:
    """State as large as that of a model of 8B, with values of about the sizes that occur."""
    n = SIZES[-1]
    mx.random.seed(0)
    caches = []
    for _ in range(_LAYERS):
        layer = KVCache()
        scale = mx.exp(mx.random.normal((1, _HEADS, 1, _WIDTH)))
        rows = (mx.random.normal((1, _HEADS, n, _WIDTH)) * scale).astype(mx.bfloat16)
        layer.update_and_fetch(rows, rows[..., ::-1])
        caches.append(layer)
    tokens = list(range(n))
    cache.insert_cache(_KEY, tokens, caches)
    return _Prefilled(tokens, SIZES, None)


def _promote(folder: Path, tokens: list[int]) -> Promoted:
    """State of ``tokens`` from disk into caches that a model could go on with."""
    _forget(folder / "store" / "data.mdb")
    with _opened(folder) as cache:
        start = time.perf_counter()
        found, rest = cache.fetch_nearest_cache(_KEY, [*tokens, 0])
        if found is None:
            raise ColdTierUnavailable("what was stored could not be read again")
        mx.eval([c.state for c in found])
        seconds = time.perf_counter() - start
        return Promoted(len(tokens) + 1 - len(rest), cache.nbytes, seconds)


def _break_even(promoted: Sequence[Promoted], rate: float | None) -> int | None:
    """Tokens from which on a promote, of a fixed time and one a token, is faster than a prefill."""
    if rate is None:
        return None
    n_tokens = [p.n_tokens for p in promoted]
    seconds = [p.seconds for p in promoted]
    if len(promoted) == 1:
        return n_tokens[0] if seconds[0] < n_tokens[0] / rate else None
    per_token, fixed = np.polyfit(n_tokens, seconds, 1)
    gain = 1 / rate - per_token
    return max(1, math.ceil(fixed / gain)) if gain > 0 else None
