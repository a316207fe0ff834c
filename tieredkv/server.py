"""The mlx-lm server with a TieredPromptCache in it.

Upstream's server, subclassed: its flags, endpoints and batching are untouched. What is replaced
is `run`, which hard-codes the prompt cache and drops `--prompt-cache-bytes`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import mlx.core as mx
from huggingface_hub.constants import HF_HUB_CACHE
from mlx_lm import server as upstream
from mlx_lm.utils import maybe_set_recommended_wired_limit

from tieredkv.core import Quantization
from tieredkv.flags import HOT_SHARE, parser, prefill_step
from tieredkv.generation import TieredModelProvider, TieredResponseGenerator
from tieredkv.handler import TieredAPIHandler
from tieredkv.patch import UPSTREAM_VERSION
from tieredkv.prompt_cache import TieredPromptCache

_LOG = logging.getLogger("tieredkv")


_Cache = TypeVar("_Cache", bound=TieredPromptCache)


def open_cache(args: argparse.Namespace) -> TieredPromptCache:
    """The prompt cache that the flags describe."""
    return cache_of(TieredPromptCache, args)


def cache_of(kind: type[_Cache], args: argparse.Namespace) -> _Cache:
    """A prompt cache of a class of its own, otherwise as `open_cache`."""
    if mx.distributed.init().size() > 1:
        _LOG.warning("more than one rank: prompts are not cached, since ranks must hit alike")
        return kind(hot_bytes=0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hot_bytes = args.prompt_cache_bytes
    cache = kind(
        None if args.prompt_cache_dir == "none" else Path(args.prompt_cache_dir),
        hot_bytes=memory // HOT_SHARE if hot_bytes is None else hot_bytes,
        cold_bytes=args.prompt_cache_disk_bytes,
        max_entries=args.prompt_cache_size,
        quantization=_quantization(args),
        memory_bytes=args.memory_limit,
        reserve_bytes=args.prompt_cache_reserve,
        cold_quantize=args.cold_quantize,
        cold_admit=args.cold_admit,
        ttl=args.prompt_cache_ttl,
        pin_share=args.pin_share,
    )
    if args.cold_quantize != "none":
        _LOG.warning(
            "tieredkv: --cold-quantize %s: prompts that come back from disk are not exact, and "
            "answers to them may differ from those without a cache",
            args.cold_quantize,
        )
    stats = cache.stats()
    _LOG.info(
        "tieredkv: hot tier of at most %.1f GB; cold tier: %s",
        stats.hot.cap_bytes / 1e9,
        f"{stats.cold.n_blocks} blocks in {args.prompt_cache_dir}, at most "
        f"{stats.cold.cap_bytes / 1e9:.1f} GB"
        if stats.cold.cap_bytes
        else "none",
    )
    return cache


def _quantization(args: argparse.Namespace) -> Quantization | None:
    if args.kv_bits is None:
        return None
    step = prefill_step(args)
    return Quantization(args.kv_bits, args.kv_group_size, args.quantized_kv_start, step)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM ends the server as Ctrl-C does, and a second signal at once: an interrupt in the
    middle of ending would leave mlx running while the interpreter goes away under it.
    """

    def end_at_once(number: int, _: FrameType | None) -> NoReturn:
        os._exit(128 + number)

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        for s in both:
            signal.signal(s, end_at_once)
        raise KeyboardInterrupt

    both = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(s, interrupt) for s in both]
    try:
        yield
    finally:
        for s, handler in zip(both, before, strict=True):
            signal.signal(s, handler)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Returns the exit status."""
    cache = open_cache(args)
    with _signals_interrupt():
        generator = TieredResponseGenerator(TieredModelProvider(args, cache), cache)
        status = _serve_until_signal(args, generator)
        generator.stop_and_join()
        _LOG.info("tieredkv: ended with %s", cache.stats())
        cache.close()
    if generator.generation_available():
        # A prefill step can't be interrupted, and nothing needs its end.
        logging.shutdown()
        os._exit(status)
    return status


def _serve_until_signal(args: argparse.Namespace, generator: TieredResponseGenerator) -> int:
    try:
        if mx.distributed.init().rank() == 0:
            upstream._run_http_server(
                args.host, args.port, generator, handler_class=TieredAPIHandler
            )
        else:
            generator.join()
    except KeyboardInterrupt:
        return int(generator.failed_to_load)
    except OSError as e:
        _LOG.error("can't serve on %s:%d: %s", args.host, args.port, e)
        return 1
    # Upstream's server takes the interrupt of a signal as its regular end.
    return int(generator.failed_to_load)


def serve(argv: Sequence[str] | None = None) -> int:
    """Run the server with command-line arguments; `tieredkv serve --help` lists them.

    Returns:
        The exit status: 0 after a signal, 1 if the address can't be served on.
    """
    p = parser()
    args = p.parse_args(argv)
    if args.prompt_cache_size < 0:
        p.error("--prompt-cache-size must be 0 or more")
    if args.prefill_checkpoint < 0:
        p.error("--prefill-checkpoint must be 0 or more")
    if args.prefill_step_size < 1:
        p.error("--prefill-step-size must be 1 or more")
    if not args.prompt_cache_dir:
        p.error("--prompt-cache-dir must be a directory or 'none'")
    if not args.prompt_cache_disk_bytes:
        p.error(
            "--prompt-cache-disk-bytes must be more than 0; --prompt-cache-dir none turns it off"
        )
    # Upstream's list of models fails without the directory that a first download makes.
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    maybe_set_recommended_wired_limit()
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s - %(levelname)s - %(message)s",
        stream=sys.stderr,
    )
    if version("mlx-lm") != UPSTREAM_VERSION:
        _LOG.warning(
            "mlx-lm %s is installed; this server was tested with %s",
            version("mlx-lm"),
            UPSTREAM_VERSION,
        )
    return run(args)
