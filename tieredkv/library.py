"""mlx-lm's generation around a TieredPromptCache, for programs that are no server.

`stream_generate` and `generate` take what mlx-lm's take, and a cache in front. They look the prompt
up, compute what is left in steps that are stored as they come, generate with mlx-lm's own functions
and store prompt and reply. `GenerationThread` does the same for asyncio, on one thread of its own.
`adopt` puts a cache into a server of mlx-lm that is built already.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    GenerationResponse,
    generation_stream,
    wired_limit,
)
from mlx_lm.generate import stream_generate as _upstream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from tieredkv import prefill
from tieredkv.core import Quantization, TieredKVError
from tieredkv.keys import tenant
from tieredkv.prompt_cache import SaltedPrompt, TieredPromptCache

CHECKPOINT_TOKENS = 2048
_STEP_TOKENS = 2048

# What mlx-lm's functions take and a cache that outlives the call can't honour.
_REFUSED = {
    "prompt_cache": "the caches come from the prompt cache",
    "max_kv_size": "a ring of that size is no state of the whole prompt",
    "input_embeddings": "state is stored under tokens, and they are none",
}

_T = TypeVar("_T")
_P = ParamSpec("_P")


class NotBound(TieredKVError):
    """A model that the cache was not told of: call ``cache.bind(path, model)`` once, after it
    was loaded.
    """


@dataclass
class Response(GenerationResponse):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's, whose ``prompt_tokens`` are those of the whole prompt, and whose ``prompt_tps``
    are these over all the time before the first token. ``cached_tokens`` of them were reused.
    """

    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A prompt to be computed and answered. ``models`` are a target and maybe a draft."""

    cache: TieredPromptCache
    key: Hashable
    models: tuple[Any, ...]
    tokenizer: Any
    tokens: SaltedPrompt
    checkpoint_tokens: int
    options: dict[str, Any]

    @property
    def step(self) -> int:
        """Most tokens of a prefill step."""
        step = int(self.options.get("prefill_step_size", _STEP_TOKENS))
        return min(step, self.checkpoint_tokens) if self.checkpoint_tokens else step


def stream_generate(
    cache: TieredPromptCache,
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    draft_model: Any = None,
    cache_salt: str = "",
    cache_ttl: float | None = None,
    checkpoint_tokens: int = CHECKPOINT_TOKENS,
    **options: Any,
) -> Iterator[Response]:
    """As `mlx_lm.stream_generate`, with prompts and replies that are kept in ``cache``.

    What is stored is exact wherever it ends: when the reply is complete, when the consumer stops
    early or raises, when the prefill is interrupted. On one thread for all that use the cache.

    Args:
        cache: to which ``model``, and ``draft_model`` with it, were bound.
        model, tokenizer: as ``mlx_lm.load`` gives them.
        prompt: text, or token ids.
        draft_model: as in mlx-lm.
        cache_salt: prompts are shared only with those of the same; as the server's field.
        cache_ttl: seconds after its last use that the prompt is kept; None for the cache's ``ttl``.
        checkpoint_tokens: a long prompt is stored every so many tokens while it is computed, which
            for models with recurrent layers are also the places where another prompt can go on;
            0 for only at its end.
        options: all others of mlx-lm's, such as ``max_tokens`` and ``sampler``.

    Raises:
        NotBound: the cache doesn't know the model.
        ValueError: a prompt that is empty, an option that a cached prompt can't have, or
            ``kv_bits`` other than those that the cache was made with (its ``quantization``).
    """
    request = _request(
        cache,
        [m for m in (model, draft_model) if m is not None],
        tokenizer,
        prompt,
        (tenant("", cache_salt), cache_ttl),
        checkpoint_tokens,
        options,
    )
    return _answer(request, _goes_on)


def generate(
    cache: TieredPromptCache, model: Any, tokenizer: Any, prompt: Any, **options: Any
) -> str:
    """The whole reply as text; arguments and errors as `stream_generate`."""
    return "".join(r.text for r in stream_generate(cache, model, tokenizer, prompt, **options))


def _goes_on() -> bool:
    return False


def _request(
    cache: TieredPromptCache,
    models: Sequence[Any],
    tokenizer: Any,
    prompt: Any,
    kept: tuple[bytes, float | None],
    checkpoint_tokens: int,
    options: dict[str, Any],
) -> _Request:
    """A request that was looked at; ``kept`` are salt and time of its prompt."""
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} doesn't go with a prompt cache: {why}")
    if options.get("max_tokens") == 0:
        raise ValueError("max_tokens must not be 0; -1 is for no limit")
    if checkpoint_tokens < 0:
        raise ValueError("checkpoint_tokens must be 0 or more")
    key = cache.key_of(*models)
    if key is None:
        raise NotBound("bind the model first: cache.bind(path, model), after each load")
    wrapped = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    tokens = SaltedPrompt(_encoded(wrapped, prompt), *kept)
    if not tokens:
        raise ValueError("the prompt must not be empty")
    request = _Request(cache, key, tuple(models), wrapped, tokens, checkpoint_tokens, options)
    _check_quantization(request)
    return request


def _encoded(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt, of text as `mlx_lm.stream_generate` makes them."""
    if not isinstance(prompt, str):
        ids: Any = prompt.tolist() if isinstance(prompt, mx.array) else prompt
        return list(ids)
    bos = tokenizer.bos_token
    special = bos is None or not prompt.startswith(bos)
    return list(tokenizer.encode(prompt, add_special_tokens=special))


def _check_quantization(request: _Request) -> None:
    bits = request.options.get("kv_bits")
    wanted = None
    if bits is not None:
        size = request.options.get("kv_group_size", 64)
        start = request.options.get("quantized_kv_start", DEFAULT_QUANTIZED_KV_START)
        wanted = Quantization(bits, size, start, request.step)
    if wanted != request.cache.quantization:
        raise ValueError(
            f"make the cache with quantization={wanted}: it has {request.cache.quantization}, and "
            "state that was quantized otherwise would change the answer"
        )


def _answer(request: _Request, should_stop: Callable[[], bool]) -> Iterator[Response]:
    """Compute, generate, store. Nothing of a reply is stored if mlx-lm fails in the middle of it:
    only of a token that it gave is it known that the state has just that token more.
    """
    began = time.perf_counter()
    tokens = request.tokens
    live, rest = request.cache.fetch_nearest_cache(request.key, tokens)
    if live is None:
        live = [c for model in request.models for c in make_prompt_cache(model)]
    n_cached = len(tokens) - len(rest)
    options = _prefilled(request, live, n_cached, should_stop)
    seen = tokens[:]
    inner = _upstream_generate(
        request.models[0],
        request.tokenizer,
        prompt_cache=live,
        draft_model=request.models[1] if len(request.models) > 1 else None,
        **options,
    )
    prompt_tps = 0.0
    try:
        for r in inner:
            seen.append(r.token)
            prompt_tps = prompt_tps or len(tokens) / (time.perf_counter() - began)
            whole = {"prompt_tokens": len(tokens), "prompt_tps": prompt_tps}
            yield Response(**{**vars(r), **whole, "cached_tokens": n_cached})
            if should_stop():
                break
    except GeneratorExit:
        pass
    # A draft's tokens that were not accepted leave the state with this.
    inner.close()
    if len(seen) > len(tokens):
        request.cache.insert_cache(request.key, seen, live)


def _prefilled(
    request: _Request, live: list[Any], n_cached: int, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Compute the prompt into ``live`` and store it as it is computed; what mlx-lm's function is to
    be called with for the rest.
    """
    options = dict(request.options)
    report = options.pop("prompt_progress_callback", None) or _tell_nobody
    tokens = request.tokens
    models = prefill.with_caches(request.models, live)
    refuses = len(models) > 1 and not can_trim_prompt_cache(models[0][1])
    if request.cache.quantization is not None or refuses:
        # mlx-lm quantizes at the ends of its own steps. Or it won't speculate, and says so.
        options["prefill_step_size"] = request.step
        done = partial(_store_step, request, live, n_cached, report, should_stop)
        return {**options, "prompt": tokens[n_cached:], "prompt_progress_callback": done}
    segments, types = [list(tokens)], ["user"]
    if request.checkpoint_tokens:
        segments, types = prefill.cut(segments, types, request.checkpoint_tokens)
    follower = prefill.SequentialPrefill(
        request.cache, request.key, tokens, segments, types, n_cached, should_stop
    )
    stream = options.get("stream", generation_stream)
    with mx.stream(stream), wired_limit(request.models[0], [stream]):
        last = follower.run(models, request.step, report)
    if len(models) == 1 and options.get("logits_processors"):
        options["logits_processors"] = follower.seeing_all(options["logits_processors"])
    return {**options, "prompt": last}


def _store_step(
    request: _Request,
    live: list[Any],
    n_cached: int,
    report: Callable[[int, int], None],
    should_stop: Callable[[], bool],
    processed: int,
    total: int,
) -> None:
    """What mlx-lm calls after each step of its own prefill."""
    if 0 < processed < total:
        done = request.tokens[: n_cached + processed]
        request.cache.insert_cache(request.key, done, live, cache_type="user")
    report(processed, total)
    if should_stop():
        raise prefill.Cancelled("nobody waits for it")


def _tell_nobody(_done: int, _total: int) -> None:
    pass


# ---- asyncio


class _End:
    """The last thing that a reply's consumer is sent: why it ended, if not well."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class GenerationThread:
    """One thread on which all work with mlx is done, for programs that run an event loop.

    Replies are generated one after the other, each as fast as it can be, however fast its
    consumer is. A consumer that stops, or is cancelled, ends its reply after the step under way;
    what was computed until then is stored. Methods belong on event loops, which may be several.
    Use it as a context, or `close` it: a thread that used mlx has to end before the process does.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tieredkv-generate")

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``function`` on the thread: ``load``, ``cache.bind`` and all else that uses mlx."""
        work = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def stream_generate(
        self, cache: TieredPromptCache, model: Any, tokenizer: Any, prompt: Any, **options: Any
    ) -> AsyncIterator[Response]:
        """`stream_generate`, as an asynchronous generator."""
        loop = asyncio.get_running_loop()
        replies: asyncio.Queue[Response | _End] = asyncio.Queue()
        stop = threading.Event()

        def send(item: Response | _End) -> None:
            try:
                loop.call_soon_threadsafe(replies.put_nowait, item)
            except RuntimeError:
                # The loop has been closed with its consumers.
                stop.set()

        def work() -> None:
            try:
                with closing(
                    _stoppable(stop.is_set, cache, model, tokenizer, prompt, **options)
                ) as responses:
                    for response in responses:
                        send(response)
                send(_End())
            except BaseException as e:  # noqa: BLE001 - it is raised where it is awaited
                send(_End(e))

        future = self._executor.submit(work)
        try:
            while not isinstance(item := await replies.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            stop.set()
            future.cancel()

    async def generate(
        self, cache: TieredPromptCache, model: Any, tokenizer: Any, prompt: Any, **options: Any
    ) -> str:
        """`generate`, awaited."""
        replies = self.stream_generate(cache, model, tokenizer, prompt, **options)
        async with aclosing(replies) as responses:  # type: ignore[type-var]  # it is a generator
            return "".join([r.text async for r in responses])

    def close(self) -> None:
        """Wait for what was begun, or waits for its turn, and end the thread. Idempotent. Not from
        a coroutine whose replies it waits for.
        """
        try:
            self._executor.submit(mx.clear_streams)
        except RuntimeError:
            return
        self._executor.shutdown(wait=True)

    def __enter__(self) -> GenerationThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stoppable(
    should_stop: Callable[[], bool],
    cache: TieredPromptCache,
    model: Any,
    tokenizer: Any,
    prompt: Any,
    *,
    draft_model: Any = None,
    cache_salt: str = "",
    cache_ttl: float | None = None,
    checkpoint_tokens: int = CHECKPOINT_TOKENS,
    **options: Any,
) -> Any:
    models = [m for m in (model, draft_model) if m is not None]
    kept = tenant("", cache_salt), cache_ttl
    request = _request(cache, models, tokenizer, prompt, kept, checkpoint_tokens, options)
    return _answer(request, should_stop)


# ---- other servers


def adopt(response_generator: Any, cache: TieredPromptCache) -> None:
    """Have a `mlx_lm.server.ResponseGenerator`, or one of its kind, use ``cache``.

    Before its first request. Its model is bound on its own thread, when a request loads it or finds
    it loaded. Close the cache once the generator has been joined.

    Raises:
        TypeError: it has no prompt cache, or no model provider that loads.
    """
    provider: Any = getattr(response_generator, "model_provider", None)
    if not hasattr(response_generator, "prompt_cache") or not hasattr(provider, "load"):
        raise TypeError(f"{type(response_generator).__name__} is no ResponseGenerator of mlx-lm")
    load = provider.load

    def load_and_bind(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        models = [m for m in (provider.model, provider.draft_model) if m is not None]
        if cache.key_of(*models) != provider.model_key:
            cache.bind(provider.model_key, *models)
        return loaded

    provider.load = load_and_bind
    response_generator.prompt_cache = cache
