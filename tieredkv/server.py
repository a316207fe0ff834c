"""The mlx-lm server with a TieredPromptCache in it.

Upstream's server, subclassed: its flags, endpoints and batching are untouched. What is replaced
is `run`, which hard-codes the prompt cache and drops `--prompt-cache-bytes`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import queue
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import mlx.core as mx
from huggingface_hub.constants import HF_HUB_CACHE
from mlx_lm import server as upstream
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import can_trim_prompt_cache
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

# An automaton of some hundred bytes a character is kept for each set of stop words.
_STOP_WORDS = 64
_STOP_CHARACTERS = 4096

# All of them are drafted before anything can stop the request.
_DRAFT_TOKENS = 64

# Of mlx's indices.
_MOST_TOKENS = (1 << 31) - 1

# A request with images is some megabytes.
_BODY_BYTES = 256 << 20

# How often a request that is being served asks whether its client is still there.
_LOOK_SECONDS = 0.25

# As far before a prompt's end as upstream looks for thoughts that it opens.
_THOUGHTS_TOKENS = 11

# What `apply_chat_template` takes besides the template's own variables. Clients could have the
# server run a template of theirs, or pad a prompt to any length.
_NOT_FOR_CLIENTS = frozenset(
    (
        *("conversation", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)

_FLOATS = (
    *("temperature", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_SIZES = ("repetition_context_size", "presence_context_size", "frequency_context_size")
_INTEGERS = (*_SIZES, "max_tokens", "top_k", "num_draft_tokens", "top_logprobs", "seed")

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


class ModelUnavailable(Exception):
    """A model, adapter or draft model can't be loaded."""


class GenerationEnded(RuntimeError):
    """The generation thread is no more."""


class ClientGone(ConnectionError):
    """The client closed its connection before its answer was complete."""


class TieredModelProvider(upstream.ModelProvider):
    """Loads models and tells the cache what was loaded."""

    def __init__(self, cli_args: argparse.Namespace, prompt_cache: TieredPromptCache) -> None:
        super().__init__(cli_args)
        self._prompt_cache = prompt_cache

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> Any:
        """Upstream's.

        Raises:
            ModelUnavailable: whatever the reason, with its text.
        """
        try:
            return super().load(model_path, adapter_path, draft_model_path)
        except Exception as e:
            raise ModelUnavailable(str(e)) from e

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


class _Responses(queue.Queue[Any]):
    """What the generation thread has for one client, who may leave at any time."""

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        super().__init__()
        self.abandoned = False
        self._is_gone = is_gone
        self._context: Any = None
        self._next_look = time.monotonic() + _LOOK_SECONDS

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, upstream.GenerationContext):
            self._context = item
            if self.abandoned:
                item.stop()
        super().put(item, block, timeout)

    def look(self) -> None:
        """Stop the request if its client is gone.

        Raises:
            ClientGone: it is.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if not self._is_gone():
            return
        # In this order: `put` takes the two steps the other way round, on another thread.
        self.abandoned = True
        if self._context is not None:
            self._context.stop()
        raise ClientGone("the client closed its connection")


def _stays() -> bool:
    """A client that is this process itself: never gone."""
    return False


class TieredResponseGenerator(upstream.ResponseGenerator):
    """Upstream's generation loop, made to end quickly and to refuse what would kill it."""

    def __init__(self, model_provider: TieredModelProvider, prompt_cache: TieredPromptCache):
        self.failed_to_load = False
        # By id, since contexts can't be hashed.
        self._contexts: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # Segments and types of the prompt that was tokenized last, None if it has images:
        # upstream's sequential path drops them between `_tokenize` and `_follow`.
        self._segments: tuple[list[list[int]], list[str]] | None = None
        super().__init__(model_provider, prompt_cache)

    def _run_generate(self) -> None:
        super()._run_generate()
        if self._generation_failed and self.model_provider.model is None:
            # The model given can't be loaded: nothing will ever be served.
            self.failed_to_load = True
            os.kill(os.getpid(), signal.SIGTERM)
        # A thread that used mlx and ends just before the process does can abort it otherwise.
        mx.clear_streams()

    # ---- a request, on the generation thread

    def _next_request(self, timeout: float | None = None) -> Any:
        request = super()._next_request(timeout)
        if request is None or self._is_distributed or not request[0].abandoned:
            return request
        return None

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Upstream's, with segments that end where the next turn may differ, and at checkpoints.

        Here an exception is the client's answer. Between here and the answer's first token
        upstream contains none, so what may fail there is tried here.

        Raises:
            ValueError: the request can't be served; the client gets its text.
        """
        try:
            tokenized = super()._tokenize(tokenizer, request, args)
        except Exception as e:
            # Whatever a chat template makes of it.
            raise ValueError(str(e) or type(e).__name__) from e
        prompt, segments, types, initial_state, vision = tokenized
        if not prompt:
            raise ValueError("the prompt must not be empty")
        _check_vocabulary(tokenizer, args)
        upstream._make_sampler(args, tokenizer)
        upstream._make_logits_processors(args)
        self._make_state_machine(self.model_provider.model_key, tokenizer, args.stop_words)
        if len(segments) == 1 and tokenizer.has_thinking and request.request_type == "chat":
            # After a tool's answer upstream makes one segment.
            start = tokenizer.rfind_think_start(prompt, start=len(prompt) - _THOUGHTS_TOKENS)
            if start > 0:
                segments, types = [prompt[:start], prompt[start:]], ["user", "assistant"]
        if self.cli_args.prefill_checkpoint:
            segments, types = prefill.cut(segments, types, self.cli_args.prefill_checkpoint)
        # The tokens of an image are not what its state is stored under.
        self._segments = (segments, types) if vision is None else None
        return prompt, segments, types, initial_state, vision

    def _serve_single(self, request: Any, stream: Any) -> None:
        """Upstream's, whose prefill is stored as it goes and stopped with its request.

        Upstream makes context, caches and progress callback in the middle of its method; they
        come by on their way to the response queue and to `stream_generate`.
        """
        tap = _Tap(request[0])
        with _in_upstream("stream_generate", partial(self._follow, tap)):
            super()._serve_single((tap, *request[1:]), stream)

    def _follow(self, tap: _Tap, **kwargs: Any) -> Iterator[Any]:
        context, report = tap.context, kwargs["prompt_progress_callback"]

        def should_stop() -> bool:
            # Ranks that stopped at different steps would wait for each other for ever.
            return bool(context._should_stop) and not self._is_distributed

        def progress(processed: int, total: int) -> None:
            report(processed, total)
            if should_stop():
                raise prefill.Cancelled("the client is gone")

        models = self._models(kwargs)
        target = models[0][1]
        if (
            self._segments is None
            or kwargs["kv_bits"] is not None
            or (len(models) > 1 and not can_trim_prompt_cache(target))
        ):
            # Upstream's own prefill: of images, in the steps at whose ends it quantizes, or
            # none, since it refuses to speculate.
            return self._started({**kwargs, "prompt_progress_callback": progress})
        follower = prefill.SequentialPrefill(
            self.prompt_cache,
            self.model_provider.model_key,
            *self._segments,
            context.prompt_cache_count,
            should_stop,
        )
        with mx.stream(kwargs["stream"]), wired_limit(kwargs["model"], [kwargs["stream"]]):
            kwargs["prompt"] = follower.run(models, kwargs["prefill_step_size"], report)
        if len(models) == 1:
            # With a draft model upstream's don't see the prompt.
            kwargs["logits_processors"] = follower.seeing_all(kwargs["logits_processors"])
        del kwargs["prompt_progress_callback"]
        return self._started(kwargs)

    @staticmethod
    def _started(kwargs: dict[str, Any]) -> Iterator[Any]:
        responses: Iterator[Any] = _stream_generate(**kwargs)
        return responses

    @staticmethod
    def _models(kwargs: dict[str, Any]) -> list[tuple[Any, list[Any]]]:
        """Target and maybe draft, each with its layers' caches: upstream has them in one list."""
        target, draft, caches = kwargs["model"], kwargs["draft_model"], kwargs["prompt_cache"]
        if draft is None:
            return [(target, caches)]
        n = len(target.layers)
        return [(target, caches[:n]), (draft, caches[n:])]

    # ---- a request, on its client's thread

    def generate(
        self,
        request: Any,
        generation_args: Any,
        progress_callback: Callable[[int, int], None] | None = None,
        is_gone: Callable[[], bool] = _stays,
    ) -> Any:
        """Upstream's, for a client that may leave: its request ends with it.

        Raises:
            ClientGone: ``is_gone`` says so; iterating over the responses raises it, too.
            GenerationEnded: nothing will be generated any more.
        """
        if not self.generation_available():
            raise GenerationEnded("the generation thread has ended")
        responses = _Responses(is_gone)
        self.requests.put((responses, request, generation_args))
        context = self._await_response(responses)
        if isinstance(context, Exception):
            raise context
        self._contexts[id(context)] = context
        return context, self._each(responses, progress_callback)

    def _each(
        self, responses: _Responses, report: Callable[[int, int], None] | None
    ) -> Iterator[Any]:
        while (response := self._await_response(responses)) is not None:
            if isinstance(response, Exception):
                raise response
            if not isinstance(response, tuple):
                yield response
            elif report is not None:
                report(*response)

    def _await_response(self, response_queue: _Responses) -> Any:
        while True:
            response_queue.look()
            try:
                return response_queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if not self.generation_available():
                    raise GenerationEnded("the generation thread has ended") from None

    def stop_and_join(self) -> None:
        """Stop after the step under way, or give up on it after a few seconds."""
        self._stop = True
        for context in list(self._contexts.values()):
            context.stop()
        self._generation_thread.join(_STOP_SECONDS)


def _check_vocabulary(tokenizer: Any, args: Any) -> None:
    bias = args.logits.logit_bias
    if not bias and args.sampling.top_k <= _SMALL_TOP_K:
        return
    vocabulary = len(tokenizer.get_vocab())
    if not all(0 <= token < vocabulary for token in bias or ()):
        raise ValueError(f"logit_bias must be of token ids from 0 to {vocabulary - 1}")
    if args.sampling.top_k >= vocabulary:
        args.sampling.top_k = 0  # all tokens: the same as without


class _Client:
    """The other end of a connection, and the generator as it sees it."""

    def __init__(self, generator: TieredResponseGenerator, connection: socket.socket) -> None:
        self._generator = generator
        self._connection = connection
        self.failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def is_gone(self) -> bool:
        """Whether it has closed its side. What it sends after its request is dropped."""
        try:
            return not self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        """The generator's, noting why it could not."""
        try:
            return self._generator.generate(request, args, progress_callback, self.is_gone)
        except Exception as e:
            self.failure = e
            raise


# What a request of the wrong shape ends in, wherever it is noticed.
_MISUSE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
    RecursionError,
)


def _status(failure: Exception) -> int:
    if isinstance(failure, ClientGone):
        return 499  # as others log it: nobody reads it
    if isinstance(failure, ModelUnavailable):
        return 404
    if isinstance(failure, GenerationEnded | prefill.Cancelled):
        return 503
    return 400 if isinstance(failure, _MISUSE) else 500


class TieredAPIHandler(upstream.APIHandler):
    """Upstream's endpoints. Every request gets an answer, one that can't be served a 400.

    A request whose client leaves is stopped, whether it streams or not.
    """

    # Upstream sets them, the generator at first and the others from the request.
    response_generator: Any
    body: Any
    stream: bool
    stream_options: dict[str, bool] | None

    _has_answered = False

    def setup(self) -> None:
        super().setup()
        self.response_generator = _Client(self.response_generator, self.connection)

    def end_headers(self) -> None:
        self._has_answered = True
        super().end_headers()

    def _set_completion_headers(self, status_code: int = 200) -> None:
        failure = self.response_generator.failure
        if status_code == 404 and failure is not None:
            # Upstream says so of all that can't be generated.
            status_code = _status(failure)
        super()._set_completion_headers(status_code)

    def do_POST(self) -> None:  # noqa: N802 - the base class looks for this name
        """Upstream's. Its exceptions would drop the connection without a word."""
        try:
            if self._has_right_length():
                super().do_POST()
        except ConnectionError as e:
            _LOG.info("tieredkv: a client left: %s", e)
        except Exception as e:  # noqa: BLE001 - the boundary: the client gets its text
            self._fail(e)

    def _has_right_length(self) -> bool:
        text = self.headers.get("Content-Length") or ""
        if text.startswith("-"):
            self._refuse(400, "Invalid Content-Length header")
            return False
        if text.isdecimal() and (len(text) > 18 or int(text) > _BODY_BYTES):
            self._refuse(413, f"Requests may have at most {_BODY_BYTES} bytes")
            return False
        return True

    def _fail(self, failure: Exception) -> None:
        status = _status(failure)
        _LOG.warning("tieredkv: a request failed: %.300r", failure, exc_info=status == 500)
        text = (str(failure) or type(failure).__name__)[:1000]
        if not self._has_answered:
            self._headers_buffer: list[bytes] = []
            self._refuse(status, text)
        elif self.stream:
            self.wfile.write(f"data: {json.dumps({'error': text})}\n\n".encode())

    def _refuse(self, status: int, text: str) -> None:
        super()._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps({"error": text}).encode())

    def validate_model_parameters(self) -> None:
        """Upstream's checks, and those whose lack ends its generation thread or the process.

        Raises:
            ValueError: a parameter is out of range; the client gets its text.
        """
        super().validate_model_parameters()
        self._validate("requested_draft_model", str, optional=True)
        self._validate("num_draft_tokens", int, max_val=_DRAFT_TOKENS)
        self._validate("seed", int, min_val=0, max_val=(1 << 64) - 1, optional=True)
        for name in (*_INTEGERS, *_FLOATS):
            # mlx takes them for indices of another kind.
            if isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a number")
        for name in _FLOATS:
            setattr(self, name, _finite(name, getattr(self, name)))
        for name in _SIZES:
            setattr(self, name, min(getattr(self, name), _MOST_TOKENS))
        for token, bias in (self.logit_bias or {}).items():
            _finite(f"logit_bias of {token}", bias)
        self._validate("xtc_threshold", float, max_val=0.5)
        _check_body(self.body)
        if self.stream_options is not None:
            self.stream_options = {"include_usage": False, **self.stream_options}

    def handle_text_completions(self) -> Any:
        """Upstream's, for one prompt that isn't empty."""
        prompt = self.body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("prompt must be text, and not empty")
        return super().handle_text_completions()

    def handle_chat_completions(self) -> Any:
        """Upstream's, for messages that aren't empty."""
        messages = self.body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list, and not empty")
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise ValueError("each of messages must be an object with a role")
        return super().handle_chat_completions()


def _finite(name: str, value: float) -> float:
    """A number as a float.

    Raises:
        ValueError: it is infinite, not a number, or too large.
    """
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite")
    return number


def _check_body(body: dict[str, Any]) -> None:
    """Check the shape of what upstream takes from a request's body as it is.

    Raises:
        ValueError: the client gets its text.
    """
    stop = body.get("stop") or []
    words = stop if isinstance(stop, list) else [stop]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("stop must be a string or a list of strings")
    if len(words) > _STOP_WORDS or sum(map(len, words)) > _STOP_CHARACTERS:
        raise ValueError(
            f"stop must be at most {_STOP_WORDS} strings of {_STOP_CHARACTERS} characters in all"
        )
    options = body.get("stream_options")
    if options is not None and not (
        isinstance(options, dict) and isinstance(options.get("include_usage", False), bool)
    ):
        raise ValueError("stream_options must be an object with a boolean include_usage")
    tools = body.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError("tools must be a list of objects")
    variables = body.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise ValueError("chat_template_kwargs must be an object")
    if taken := sorted(_NOT_FOR_CLIENTS & set(variables or ())):
        raise ValueError(f"chat_template_kwargs must not have {', '.join(taken)}")


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
