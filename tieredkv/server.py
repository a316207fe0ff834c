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
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import mlx.core as mx
from huggingface_hub.constants import HF_HUB_CACHE
from mlx_lm import server as upstream
from mlx_lm.utils import maybe_set_recommended_wired_limit

from tieredkv import prefill
from tieredkv.core import default_cold_dir
from tieredkv.prompt_cache import TieredPromptCache

_LOG = logging.getLogger("tieredkv")

# The host whose contract this module was written against and is tested with.
UPSTREAM_VERSION = "0.32.2"

# Share of the machine's memory that the hot tier may take if no cap is given.
_HOT_SHARE = 8
_COLD_BYTES = 16 << 30
_CHECKPOINT_TOKENS = 2048

# How long a signal waits for the step under way before the process ends without it.
_STOP_SECONDS = 5.0

# Upstream's own, before `_serve_single` puts another in its place.
_stream_generate = upstream.stream_generate

# No vocabulary is this small, and counting one takes time.
_SMALL_TOP_K = 200

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size(text: str) -> int:
    """Bytes from text such as "500M", "1.5GB" (powers of 1000) or "4GiB" (powers of 1024).

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    digits = text.strip().upper()
    base = 1024 if digits.endswith("IB") else 1000
    digits = digits.removesuffix("IB") if base == 1024 else digits.removesuffix("B")
    unit = digits[-1:] if digits[-1:] in _UNITS else ""
    try:
        value = float(digits.removesuffix(unit))
    except ValueError:
        value = -1
    if not 0 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB, 4GiB or 1000000")
    return int(value * base ** _UNITS[unit])


@contextmanager
def _in_upstream(name: str, value: Any) -> Iterator[None]:
    """Put something else in the place of a global name of upstream's module."""
    before = getattr(upstream, name)
    setattr(upstream, name, value)
    try:
        yield
    finally:
        setattr(upstream, name, before)


class _Built(Exception):
    """Carries upstream's parser out of its `main`."""


def _upstream_parser() -> argparse.ArgumentParser:
    """The parser of mlx-lm's server, which exists only inside its `main`: so all of its flags
    are here in every version, with upstream's meaning and help.
    """

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_: Any, **__: Any) -> NoReturn:
            raise _Built(self)

    shim = SimpleNamespace(**{**vars(argparse), "ArgumentParser": Parser})
    with _in_upstream("argparse", shim):
        try:
            upstream.main()
        except _Built as built:
            parser: argparse.ArgumentParser = built.args[0]
            parser.__class__ = argparse.ArgumentParser
            return parser
    raise RuntimeError("mlx_lm.server.main() no longer builds its parser as it did")


def parser() -> argparse.ArgumentParser:
    """Upstream's flags and ours."""
    p = _upstream_parser()
    p.prog = "tieredkv serve"
    p.description = "mlx-lm's OpenAI-compatible server with a prompt cache that survives restarts."
    for action in p._actions:
        if action.dest == "prompt_cache_bytes":
            action.type = size
            action.metavar = "SIZE"
            action.help = (
                "Cap on the memory of cached prompts, kept on every path "
                f"(default: 1/{_HOT_SHARE} of the machine's memory)"
            )
    group = p.add_argument_group("tiered prompt cache")
    group.add_argument(
        "--prompt-cache-dir",
        default=str(default_cold_dir()),
        metavar="DIR",
        help="Directory of cached prompts on disk, on a local disk, shared by all servers that "
        "are given it; 'none' keeps them in memory only (default: %(default)s). Prompts are "
        "readable by whoever can read it.",
    )
    group.add_argument(
        "--prefill-checkpoint",
        type=int,
        default=_CHECKPOINT_TOKENS,
        metavar="N",
        help="Store long prompts every N tokens while they are computed, so that at most N are "
        "lost to a crash or a client that leaves; 0 for only at the end (default: %(default)s)",
    )
    group.add_argument(
        "--prompt-cache-disk-bytes",
        type=size,
        default=_COLD_BYTES,
        metavar="SIZE",
        help="Cap on the file that holds them (default: 16GiB)",
    )
    return p


class TieredModelProvider(upstream.ModelProvider):
    """Loads models and tells the cache what was loaded."""

    def __init__(self, cli_args: argparse.Namespace, prompt_cache: TieredPromptCache) -> None:
        super().__init__(cli_args)
        self._prompt_cache = prompt_cache

    def _load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> None:
        super()._load(model_path, adapter_path, draft_model_path)
        models = [m for m in (self.model, self.draft_model) if m is not None]
        self._prompt_cache.bind(self.model_key, *models)


class _Tap:
    """A response queue that notes the request's context as it goes by."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.context: Any = None

    def put(self, item: Any) -> None:
        if isinstance(item, upstream.GenerationContext):
            self.context = item
        self._queue.put(item)


class TieredResponseGenerator(upstream.ResponseGenerator):
    """Upstream's generation loop, made to end quickly and to refuse what would kill it."""

    def __init__(self, model_provider: TieredModelProvider, prompt_cache: TieredPromptCache):
        self.failed_to_load = False
        # By id, since contexts can't be hashed.
        self._contexts: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        super().__init__(model_provider, prompt_cache)

    def _run_generate(self) -> None:
        super()._run_generate()
        if self._generation_failed and self.model_provider.model is None:
            # The model given can't be loaded: nothing will ever be served.
            self.failed_to_load = True
            os.kill(os.getpid(), signal.SIGTERM)
        # A thread that used mlx and ends just before the process does can abort it otherwise.
        mx.clear_streams()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        tokenized = super()._tokenize(tokenizer, request, args)
        prompt = tokenized[0]
        if not prompt or not all(isinstance(token, int) for token in prompt):
            raise ValueError("The prompt must be text that is not empty.")
        _, segments, types, *_ = tokenized
        every = self.cli_args.prefill_checkpoint
        if every:
            segments, types = prefill.cut(segments, types, every)
        return (prompt, segments, types, *tokenized[3:])

    def _serve_single(self, request: Any, stream: Any) -> None:
        """Upstream's, whose prefill is stored as it goes and stopped with its request.

        Upstream makes context, caches and progress callback in the middle of its method; they
        come by on their way to the response queue and to `stream_generate`.
        """
        tap = _Tap(request[0])
        with _in_upstream("stream_generate", partial(self._follow, tap)):
            super()._serve_single((tap, *request[1:]), stream)

    def _follow(self, tap: _Tap, **kwargs: Any) -> Iterator[Any]:
        context = tap.context
        if context is not None and kwargs.get("input_embeddings") is None:
            every = self.cli_args.prefill_checkpoint
            follower = prefill.SequentialPrefill(
                self.prompt_cache,
                self.model_provider.model_key,
                context.prompt,
                context.prompt_cache_count,
                kwargs["prompt_cache"],
                lambda: context._should_stop,
                every,
            )
            report = kwargs["prompt_progress_callback"]

            def progress(processed: int, total: int) -> None:
                report(processed, total)
                follower.progress(processed, total)

            kwargs["prompt_progress_callback"] = progress
            kwargs["logits_processors"] = follower.seeing_all(kwargs["logits_processors"])
            if every:
                kwargs["prefill_step_size"] = min(kwargs["prefill_step_size"], every)
        responses: Iterator[Any] = _stream_generate(**kwargs)
        return responses

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's, keeping track of the requests under way."""
        context, responses = super().generate(*args, **kwargs)
        self._contexts[id(context)] = context
        return context, responses

    def stop_and_join(self) -> None:
        """Stop after the step under way, or give up on it after a few seconds."""
        self._stop = True
        for context in list(self._contexts.values()):
            context.stop()
        self._generation_thread.join(_STOP_SECONDS)


class TieredAPIHandler(upstream.APIHandler):
    """Upstream's endpoints. Requests that would kill the generation thread get a 400."""

    top_k: int  # upstream sets it, from the request

    def validate_model_parameters(self) -> None:
        """Upstream's checks, and those whose lack ends its generation thread or the process.

        Raises:
            ValueError: a parameter is out of range; the client gets its text.
        """
        super().validate_model_parameters()
        stop = self.body.get("stop") or []
        words = stop if isinstance(stop, list) else [stop]
        if not all(isinstance(word, str) for word in words):
            raise ValueError("stop must be a string or a list of strings")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError("seed must be at least 0 and less than 2**64")
        tokenizer = self.response_generator.model_provider.tokenizer
        if tokenizer is None or not (self.logit_bias or self.top_k > _SMALL_TOP_K):
            return
        vocabulary = len(tokenizer.get_vocab())
        if not all(0 <= token < vocabulary for token in self.logit_bias or ()):
            raise ValueError(f"logit_bias must be of token ids from 0 to {vocabulary - 1}")
        if self.top_k >= vocabulary:
            self.top_k = 0  # all tokens: the same as without

    def handle_text_completions(self) -> Any:
        """Upstream's, for a prompt that isn't empty."""
        if self.body.get("prompt") in ("", []):
            raise ValueError("prompt must not be empty")
        return super().handle_text_completions()

    def handle_chat_completions(self) -> Any:
        """Upstream's, for messages that aren't empty."""
        if self.body.get("messages") == []:
            raise ValueError("messages must not be empty")
        return super().handle_chat_completions()


def open_cache(args: argparse.Namespace) -> TieredPromptCache:
    """The prompt cache that the flags describe."""
    if args.kv_bits is not None:
        # When the state is quantized depends on where the prefill's steps end, and a hit moves
        # them: the answer would differ from that of a cold run.
        _LOG.warning("--kv-bits: prompts are not cached, since a hit could change the answer")
        return TieredPromptCache(hot_bytes=0)
    if mx.distributed.init().size() > 1:
        _LOG.warning("more than one rank: prompts are not cached, since ranks must hit alike")
        return TieredPromptCache(hot_bytes=0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hot_bytes = args.prompt_cache_bytes
    cache = TieredPromptCache(
        None if args.prompt_cache_dir == "none" else Path(args.prompt_cache_dir),
        hot_bytes=memory // _HOT_SHARE if hot_bytes is None else hot_bytes,
        cold_bytes=args.prompt_cache_disk_bytes,
        max_entries=args.prompt_cache_size,
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
