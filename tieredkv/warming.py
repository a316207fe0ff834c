"""Prompts computed ahead of the requests that will begin with them.

By the server's own loop, with its flags: what is stored is what the server would have stored, under
the same names. Each insert waits for the disk, so that nothing is dropped, and a kill loses what
was computed since the last checkpoint.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm import server as upstream

from tieredkv import prefill
from tieredkv.core import Pinned
from tieredkv.generation import TieredModelProvider, TieredResponseGenerator
from tieredkv.keys import tenant
from tieredkv.prompt_cache import SaltedPrompt, TieredPromptCache
from tieredkv.prompt_files import Prompt
from tieredkv.server import cache_of

_FLUSH_SECONDS = 600.0
_SETTLE_SECONDS = 60.0

# How a text may go on. Its last tokens may depend on that: what is warmed ends before those.
_GOES_ON = (" A", "\n\n1", "b", ".\n")
_QUESTIONS = ("A", "1")
# After these somebody speaks again, and what they say comes behind the end of the message.
_SPEAKS_NEXT = frozenset(("system", "developer", "assistant"))


@dataclass(frozen=True, slots=True)
class Warmed:
    """What came of a prompt: how many tokens of it later requests share, and of these how many
    were computed for it. ``lost`` says that not all of it is on the disk.
    """

    name: str
    tokens: int = 0
    computed: int = 0
    lost: bool = False
    error: str = ""

    @property
    def reused(self) -> int:
        """Tokens that were there already."""
        return self.tokens - self.computed


class _AlreadyWarm(Exception):
    """Nothing is left to compute."""


@dataclass
class _Request(upstream.CompletionRequest):  # type: ignore[misc]  # mlx-lm has no types
    """A request of the server's kind, and others that go on otherwise from where its prompt is
    shared; or a prompt that is ``given`` in tokens. The generation thread notes what is shared.
    """

    others: Sequence[upstream.CompletionRequest] = ()
    given: Sequence[int] = ()
    cache_salt: bytes = b""
    shared: SaltedPrompt | None = None


class DurablePromptCache(TieredPromptCache):
    """A prompt cache whose inserts return when they are committed. ``n_lost`` counts those of which
    something could not be stored.
    """

    n_lost = 0

    def insert_cache(self, *args: Any, **kwargs: Any) -> None:
        """As upstream's; waits for the disk."""
        super().insert_cache(*args, **kwargs)
        self.n_lost += not self.flush(_FLUSH_SECONDS)


class _WarmingGenerator(TieredResponseGenerator):
    """The server's loop, whose prompts have a segment that ends where other requests part."""

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """The server's.

        Raises:
            _AlreadyWarm: all that is shared is stored.
            ValueError: as the server's, and for images.
        """
        prompt, segments, types, state, vision = self._whole(tokenizer, request, args)
        if vision is not None:
            raise ValueError("prompts with images can't be computed ahead")
        n = len(request.given) or self._n_shared(tokenizer, request, args, prompt)
        request.shared = SaltedPrompt(prompt[:n], request.cache_salt)
        known = self.prompt_cache.found(self.model_provider.model_key, request.shared)
        # One token is always left to compute, and a reply is stored with it. Where prompts expire
        # this is a use.
        if known >= min(n, len(prompt) - 1) and self.cli_args.prompt_cache_ttl is None:
            raise _AlreadyWarm
        self._segments = _cut_at(segments, types, n)
        return prompt, *_cut_at(segments, types, n), state, vision

    def _whole(self, tokenizer: Any, request: Any, args: Any) -> Any:
        if not request.given:
            return super()._tokenize(tokenizer, request, args)
        # What comes behind it is of no matter.
        tokens = [*request.given, request.given[-1]]
        segments, types = [tokens], ["user"]
        if every := self.cli_args.prefill_checkpoint:
            segments, types = prefill.cut(segments, types, every)
        return SaltedPrompt(tokens, request.cache_salt), segments, types, "normal", None

    def _n_shared(self, tokenizer: Any, request: Any, args: Any, prompt: list[int]) -> int:
        """Leading tokens of a prompt that all requests share that go on from it."""
        prompts = [prompt]
        for other in request.others:
            prompts.append(super()._tokenize(tokenizer, other, args)[0])
        columns = enumerate(zip(*prompts, strict=False))
        return next((i for i, column in columns if len(set(column)) > 1), min(map(len, prompts)))


def _cut_at(
    segments: Sequence[list[int]], types: Sequence[str], n: int
) -> tuple[list[list[int]], list[str]]:
    """Cut prompt segments once more, ``n`` tokens from the prompt's start."""
    pieces: list[list[int]] = []
    kinds: list[str] = []
    start = 0
    for segment, kind in zip(segments, types, strict=True):
        at = n - start
        parts = [segment[:at], segment[at:]] if 0 < at < len(segment) else [segment]
        pieces += parts
        kinds += [kind] * len(parts)
        start += len(segment)
    return pieces, kinds


# ---- what is asked


def _request(prompt: Prompt) -> _Request:
    salt = tenant("", prompt.cache_salt)
    if prompt.tokens:
        return _Request("text", "", [], None, None, given=prompt.tokens, cache_salt=salt)
    if prompt.text:
        others = [_completion(prompt.text + more) for more in _GOES_ON]
        return _Request("text", prompt.text, [], None, None, others, cache_salt=salt)
    first, *rest = _conversations([dict(m) for m in prompt.messages])
    tools = list(map(dict, prompt.tools)) or None
    others = [_chat(messages, tools) for messages in rest]
    return _Request("chat", "", _copied(first), tools, None, others, cache_salt=salt)


def _conversations(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Conversations that begin with these messages, first the one to be computed. Where the last
    message is a user's, that is its end, and others go on in it; behind a system prompt or a
    reply comes a question, here any.
    """
    last = messages[-1]
    if last["role"] in _SPEAKS_NEXT:
        return [[*messages, {"role": "user", "content": question}] for question in _QUESTIONS]
    if last["role"] != "user":
        return [messages]
    longer = [{**last, "content": _and(last.get("content"), more)} for more in _GOES_ON]
    return [messages, *([*messages[:-1], message] for message in longer)]


def _and(content: Any, more: str) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": more}]
    return f"{content or ''}{more}"


def _copied(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    # mlx-lm changes them in place.
    return copy.deepcopy(list(messages))


def _chat(
    messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> upstream.CompletionRequest:
    return upstream.CompletionRequest("chat", "", _copied(messages), tools, None)


def _completion(text: str) -> upstream.CompletionRequest:
    return upstream.CompletionRequest("text", text, [], None, None)


class Warmer:
    """A server's loop and cache without a server. Use it as a context: its threads end with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        """As ``tieredkv serve`` would be with ``args``, those of `flags.parser`."""
        self._model = upstream.ModelDescription(args.model, args.draft_model, args.adapter_path)
        # It would be loaded at once, and end the process if it can't be.
        args = argparse.Namespace(**{**vars(args), "model": None})
        self.cache = cache_of(DurablePromptCache, args)
        self._provider = TieredModelProvider(args, self.cache)
        self._generator = _WarmingGenerator(self._provider, self.cache)
        self._last = SaltedPrompt()

    def warm(self, prompt: Prompt, report: Callable[[int, int], None]) -> Warmed:
        """Compute and store what is lacking of a prompt.

        ``report`` is told the tokens that are done, of how many are to be computed. A prompt that
        can't be served is said in ``error``.

        Raises:
            ModelUnavailable: the model can't be loaded.
            GenerationEnded: nothing can be computed any more.
        """
        request = _request(prompt)
        lost = self.cache.n_lost
        try:
            context, responses = self._generator.generate(request, self._arguments(prompt), report)
            for _ in responses:
                pass
        except _AlreadyWarm:
            n_cached = len(request.shared or ())
        except (ValueError, TypeError, LookupError) as error:
            return Warmed(prompt.name, error=str(error) or type(error).__name__)
        else:
            n_cached = context.prompt_cache_count
        self._last = request.shared or SaltedPrompt()
        n = len(self._last)
        # Its last insert may still be under way.
        self._generator.settle(_SETTLE_SECONDS)
        return Warmed(prompt.name, n, max(0, n - n_cached), self.cache.n_lost > lost)

    def pin(self) -> Pinned:
        """Pin what later requests share of the prompt that was warmed last.

        Raises:
            PinRefused: it isn't on the disk, or pins would take more than their share.
            ColdTierUnavailable: the disk can't be written.
        """
        return self.cache.pin(self._provider.model_key, self._last)

    def _arguments(self, prompt: Prompt) -> upstream.GenerationArguments:
        """Those of a request for a single token."""
        return upstream.GenerationArguments(
            model=self._model,
            sampling=upstream.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
            logits=upstream.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
            stop_words=[],
            max_tokens=1,
            num_draft_tokens=1,
            logprobs=False,
            top_logprobs=-1,
            seed=None,
            chat_template_kwargs=dict(prompt.template) or None,
        )

    def close(self) -> bool:
        """Stop after the step under way and write what is queued; whether mlx is at rest. If not,
        the process has to end without it.
        """
        self._generator.stop_and_join()
        self.cache.close()
        return not self._generator.generation_available()
