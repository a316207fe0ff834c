"""The generation thread: mlx-lm's loop, whose prompts are stored as they are computed."""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import os
import pickle
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm import server as upstream
from mlx_lm.generate import wired_limit
from mlx_lm.models.cache import can_trim_prompt_cache

from tieredkv import prefill
from tieredkv.core import FetchReport
from tieredkv.flags import prefill_step
from tieredkv.handler import ClientGone, GenerationEnded, ModelUnavailable
from tieredkv.journal import Course, Journal
from tieredkv.patch import in_upstream, make_rings_exact
from tieredkv.prompt_cache import SaltedPrompt, TieredPromptCache
from tieredkv.texts import Texts

_LOG = logging.getLogger("tieredkv")

# How long a signal waits for the step under way before the process ends without it.
_STOP_SECONDS = 5.0

# Upstream's own, before `_serve_single` puts another in its place.
_stream_generate = upstream.stream_generate

# No vocabulary is this small, and counting one takes time.
_SMALL_TOP_K = 200

# How often a request that is being served asks whether its client is still there.
_LOOK_SECONDS = 0.25

# As far before a prompt's end as upstream looks for thoughts that it opens.
_THOUGHTS_TOKENS = 11


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

    def note_fetch(self, fetch: FetchReport) -> None:
        if isinstance(self._queue, _Responses):  # of other ranks nobody asks
            self._queue.course.note_fetch(fetch)

    def put(self, item: Any) -> None:
        if isinstance(item, upstream.GenerationContext):
            self.context = item
        self._queue.put(item)

    @property
    def is_stopped(self) -> bool:
        """Whether its client wants no more of it."""
        return bool(self.context._should_stop)


class _SharedTap(_Tap):
    """Of a request that several ranks serve: its client has a context of its own, since upstream's
    would stop this rank alone, and all others wait for it for ever.
    """

    _client: Any = None

    def note_fetch(self, fetch: FetchReport) -> None:
        super().note_fetch(fetch)
        self._client.prompt_cache_count = self.context.prompt_cache_count

    def put(self, item: Any) -> None:
        if isinstance(item, upstream.GenerationContext):
            self.context, self._client = item, copy.copy(item)
            item = self._client
        self._queue.put(item)

    @property
    def is_stopped(self) -> bool:
        return bool(self._client._should_stop)


class _Responses(queue.Queue[Any]):
    """What the generation thread has for one client, who may leave at any time."""

    def __init__(
        self, is_gone: Callable[[], bool], course: Course, cache: TieredPromptCache
    ) -> None:
        super().__init__()
        self.abandoned = False
        self.course = course
        self._is_gone = is_gone
        self._cache = cache
        self._context: Any = None
        self._next_look = time.monotonic() + _LOOK_SECONDS

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, upstream.GenerationContext):
            self._context = item
            if item.prompt_cache_count >= 0:
                # Of a batch: its prompt was looked up just before. Else it is yet to be.
                self.course.note_fetch(self._cache.last_fetch)
            if self.abandoned:
                item.stop()
        elif isinstance(item, upstream.Response):
            self.course.note_token()
        elif isinstance(item, tuple):
            self.course.note_progress(item[0])
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


class _Identified(Exception):
    """Carries out of upstream's loop what a prompt's state is stored under, as its answer."""

    def __init__(self, model: Hashable, tokens: list[int]) -> None:
        super().__init__("the prompt was only to be tokenized")
        self.model = model
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class _Order:
    """What every rank is to do with its cache, in the order of requests: a method of it."""

    method: str
    arguments: tuple[Any, ...]


class _End:
    """Every rank is to end, in the order of requests."""


def _stays() -> bool:
    """A client that is this process itself: never gone."""
    return False


class TieredResponseGenerator(upstream.ResponseGenerator):
    """Upstream's generation loop, made to end quickly and to refuse what would kill it."""

    def __init__(self, model_provider: TieredModelProvider, prompt_cache: TieredPromptCache):
        self.has_failed = False
        self._is_ending = False
        # A thread whose join was interrupted by a signal passes for ended.
        self._has_ended = threading.Event()
        # Upstream's own reference goes with its thread.
        self.cache = prompt_cache
        self.journal = Journal()
        self.texts = Texts()
        self._settling: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        # By id, since contexts can't be hashed.
        self._contexts: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # Segments and types of the prompt that was tokenized last, None if it has images:
        # upstream's sequential path drops them between `_tokenize` and `_follow`.
        self._segments: tuple[list[list[int]], list[str]] | None = None
        make_rings_exact()
        super().__init__(model_provider, prompt_cache)

    def _run_generate(self) -> None:
        super()._run_generate()
        lost = self._is_distributed or self.model_provider.model is None
        if self._generation_failed and lost and not self._is_ending:
            # The model given can't be loaded, or another rank is gone: nothing will be served any
            # more.
            self.has_failed = True
            os.kill(os.getpid(), signal.SIGTERM)
        # A thread that used mlx and ends just before the process does can abort it otherwise.
        mx.clear_streams()
        self._has_ended.set()

    # ---- a request, on the generation thread

    def _next_request(self, timeout: float | None = None) -> Any:
        self._make_texts()
        with contextlib.suppress(queue.Empty):
            while True:
                self._settling.get_nowait().set()
        request = super()._next_request(timeout)
        if request is None:
            return None
        answers, wanted, *_ = request
        if isinstance(wanted, _End):
            self._stop = True
            return None
        if isinstance(wanted, _Order):
            answers.put(self._carried_out(wanted))
            return None
        if self._is_distributed or not answers.abandoned:
            return request
        return None

    def _carried_out(self, order: _Order) -> list[Any]:
        """What it came to on each rank, a result or an exception."""
        try:
            result = getattr(self.cache, order.method)(*order.arguments)
        except Exception as e:  # noqa: BLE001 - it is the answer
            result = e
        return [pickle.loads(each) for each in self.cache.ranks.gather(_pickled(result))]

    def _make_texts(self) -> None:
        """Between two steps: nothing else may have a text made of tokens then."""
        provider = self.model_provider
        if provider.tokenizer is not None and provider.model_key is not None:
            self.texts.make(str(provider.model_key[0]), provider.tokenizer.decode)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """Upstream's, with segments that end where the next turn may differ, and at checkpoints.

        Here an exception is the client's answer. Between here and the answer's first token
        upstream contains none, so what may fail there is tried here.

        Raises:
            ValueError: the request can't be served; the client gets its text.
            _Identified: it asks for no more than its tokens.
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
        salt, ttl = getattr(request, "cache_salt", b""), getattr(request, "cache_ttl", None)
        if salt or ttl:
            prompt = SaltedPrompt(prompt, salt, ttl)
        if (salt or ttl) and vision is not None:
            vision.cache_key = SaltedPrompt(vision.cache_key, salt, ttl)
        if getattr(request, "only_identify", False):
            stored_as = prompt if vision is None else vision.cache_key
            raise _Identified(self.model_provider.model_key, stored_as)
        # The tokens of an image are not what its state is stored under.
        self._segments = (segments, types) if vision is None else None
        return prompt, segments, types, initial_state, vision

    def _serve_single(self, request: Any, stream: Any) -> None:
        """Upstream's, whose prefill is stored as it goes and stopped with its request.

        Upstream makes context, caches and progress callback in the middle of its method; they
        come by on their way to the response queue and to `stream_generate`.
        """
        tap = (_SharedTap if self._is_distributed else _Tap)(request[0])
        with in_upstream("stream_generate", partial(self._follow, tap)):
            super()._serve_single((tap, *request[1:]), stream)

    def _follow(self, tap: _Tap, **kwargs: Any) -> Iterator[Any]:
        tap.note_fetch(self.prompt_cache.last_fetch)
        context, report = tap.context, kwargs["prompt_progress_callback"]

        def should_stop() -> bool:
            # Ranks that stopped at different steps would wait for each other for ever.
            return any(map(any, self.cache.ranks.exchange([tap.is_stopped])))

        def progress(processed: int, total: int) -> None:
            report(processed, total)
            if should_stop():
                raise prefill.Cancelled("the client is gone")

        def quantized(processed: int, total: int) -> None:
            # Before it is too late: a request that stops keeps this step too.
            if 0 < processed < total:
                done = context.prompt[: context.prompt_cache_count + processed]
                key, live = self.model_provider.model_key, kwargs["prompt_cache"]
                self.prompt_cache.insert_cache(key, done, live, cache_type="user")
            progress(processed, total)

        models = prefill.with_caches(
            [m for m in (kwargs["model"], kwargs["draft_model"]) if m is not None],
            kwargs["prompt_cache"],
        )
        target = models[0][1]
        if self._segments is None or (len(models) > 1 and not can_trim_prompt_cache(target)):
            # Upstream's own prefill: of images, or none, since it refuses to speculate.
            return self._started({**kwargs, "prompt_progress_callback": progress}, should_stop)
        if kwargs["kv_bits"] is not None:
            # Upstream's, too: it quantizes at the ends of its steps.
            step = prefill_step(self.cli_args)
            more = {"prompt_progress_callback": quantized, "prefill_step_size": step}
            return self._started({**kwargs, **more}, should_stop)
        follower = prefill.SequentialPrefill(
            self.prompt_cache,
            self.model_provider.model_key,
            context.prompt,
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
        return self._started(kwargs, should_stop)

    def _started(self, kwargs: dict[str, Any], should_stop: Callable[[], bool]) -> Iterator[Any]:
        responses: Iterator[Any] = _stream_generate(**kwargs)
        return _until(should_stop, responses) if self._is_distributed else responses

    # ---- for the API, on any thread

    @property
    def cache_api(self) -> str:
        """Who may use the API, see `calls.Server`."""
        return str(self.cli_args.cache_api)

    @property
    def models(self) -> list[str]:
        """Names of the model that is loaded, if one is, and of what it is loaded with."""
        key = self.model_provider.model_key
        return [str(name) for name in key or () if name is not None]

    def settle(self, timeout: float) -> None:
        """Wait until what has been answered is stored, too: upstream sends the last token first.
        For at most ``timeout`` seconds, since other answers may keep it from the next request.
        """
        settled = threading.Event()
        self._settling.put(settled)
        settled.wait(timeout)

    # ---- a request, on its client's thread

    def identify(
        self, request: Any, generation_args: Any, is_gone: Callable[[], bool] = _stays
    ) -> tuple[Hashable, list[int]]:
        """Key of the model and tokens under which the state of a request's prompt is stored.

        It goes the way of all requests up to where it would be looked up, since a model that is
        loaded between two steps of a batch would have that batch stored as its own, and the
        tokenizer is its thread's.

        Raises:
            ClientGone, GenerationEnded: as `generate`.
        """
        request.only_identify = True
        try:
            self.generate(request, generation_args, None, is_gone)
        except _Identified as e:
            return e.model, e.tokens
        raise RuntimeError("a request that was only to be tokenized was served")

    def generate(
        self,
        request: Any,
        generation_args: Any,
        progress_callback: Callable[[int, int], None] | None = None,
        is_gone: Callable[[], bool] = _stays,
        course: Course | None = None,
    ) -> Any:
        """Upstream's, for a client that may leave: its request ends with it. How it goes is noted
        in ``course``.

        Raises:
            ClientGone: ``is_gone`` says so; iterating over the responses raises it, too.
            GenerationEnded: nothing will be generated any more.
        """
        if not self.generation_available():
            raise GenerationEnded("the generation thread has ended")
        responses = _Responses(is_gone, course or Course(), self.cache)
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

    @property
    def n_ranks(self) -> int:
        """How many processes serve a model together."""
        return self.cache.ranks.size

    def on_all_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the cache, one that any thread may call, on every rank, in one order
        with the requests: it waits for the step under way, and the next one for it. With one rank
        nothing waits.

        Returns:
            What it came to, by rank.

        Raises:
            GenerationEnded: nothing is done any more.
            Exception: what it raised on the first rank on which it did.
        """
        if not self._is_distributed:
            return [getattr(self.cache, method)(*arguments)]
        if not self.generation_available():
            raise GenerationEnded("the generation thread has ended")
        order = _Order(method, arguments)
        pickle.dumps(order)  # here, since what can't be sent would end the generation thread
        answers = _Responses(_stays, Course(), self.cache)
        self.requests.put((answers, order, None))
        results: list[Any] = self._await_response(answers)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def join(self) -> None:
        """Wait until nothing is generated any more; a signal may interrupt it."""
        self._has_ended.wait()

    def stop_and_join(self) -> None:
        """Stop after the step under way, or give up on it after a few seconds.

        Of several ranks the first one has all of them stop there.
        """
        self._is_ending = True
        for context in list(self._contexts.values()):
            context.stop()
        if self._is_distributed:
            self.requests.put((None, _End(), None))
        else:
            self._stop = True
        if self._has_ended.wait(_STOP_SECONDS):
            self._generation_thread.join()
        else:
            _LOG.warning("tieredkv: the step under way didn't end in time; ending without it")


def _until(should_stop: Callable[[], bool], responses: Iterator[Any]) -> Iterator[Any]:
    """Responses until they should stop.

    Raises:
        Cancelled: they should.
    """
    for response in responses:
        yield response
        if should_stop():
            raise prefill.Cancelled("the client is gone")


def _pickled(result: Any) -> bytes:
    """A result for other ranks; an exception that can't be sent as its text."""
    try:
        data = pickle.dumps(result)
        pickle.loads(data)
    except Exception as e:  # noqa: BLE001 - exceptions with arguments of their own, mostly
        text = f"{type(result).__name__}: {result}" if isinstance(result, Exception) else str(e)
        return pickle.dumps(RuntimeError(text))
    return data


def _check_vocabulary(tokenizer: Any, args: Any) -> None:
    bias = args.logits.logit_bias
    if not bias and args.sampling.top_k <= _SMALL_TOP_K:
        return
    vocabulary = len(tokenizer.get_vocab())
    if not all(0 <= token < vocabulary for token in bias or ()):
        raise ValueError(f"logit_bias must be of token ids from 0 to {vocabulary - 1}")
    if args.sampling.top_k >= vocabulary:
        args.sampling.top_k = 0  # all tokens: the same as without
