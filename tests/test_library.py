"""mlx-lm's generation with a cache around it: the same answers, and what is stored is exact."""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
import tiny
from mlx_lm import server as upstream
from mlx_lm.models.cache import LRUPromptCache

from tieredkv import (
    GenerationThread,
    Quantization,
    TieredPromptCache,
    adopt,
    generate,
    stream_generate,
)
from tieredkv.flags import parser
from tieredkv.library import NotBound

TEXT = "the quiet notes of a tin sun in a stone house " * 8
QUESTION = "and one more?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("library") / "model", "qwen3")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(folder))


@pytest.fixture
def cache(tmp_path: Path, folder: Path, loaded: tuple[Any, Any]) -> Iterator[TieredPromptCache]:
    with TieredPromptCache(tmp_path / "store", block_tokens=64) as made:
        made.bind(str(folder), loaded[0])
        yield made


def plain(model: Any, tokenizer: Any, prompt: Any, **options: Any) -> list[int]:
    """What mlx-lm says by itself."""
    options = {"max_tokens": 8, **options}
    return [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, **options)]


def ours(cache: TieredPromptCache, *loaded: Any, **options: Any) -> tuple[list[int], int]:
    """Tokens said, and prompt tokens reused."""
    options = {"max_tokens": 8, **options}
    said = list(stream_generate(cache, *loaded, **options))
    return [r.token for r in said], said[0].cached_tokens


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "falcon_h1"])
def test_a_hit_says_what_mlx_lm_says(tmp_path: Path, kind: str) -> None:
    """An answer from restored state must be the one without a cache, whatever the layers keep."""
    folder = tiny.save(tmp_path / "model", kind)
    model, tokenizer = mlx_lm.load(str(folder))
    text = tokenizer.encode(TEXT)
    prompts = [text + tokenizer.encode(q) for q in ("what?", QUESTION)]
    with TieredPromptCache(tmp_path / "store", block_tokens=64) as first:
        first.bind(str(folder), model)
        said, n = ours(first, model, tokenizer, prompts[0], checkpoint_tokens=64)
        assert (said, n) == (plain(model, tokenizer, prompts[0]), 0)
    with TieredPromptCache(tmp_path / "store", block_tokens=64) as again:
        again.bind(str(folder), model)
        said, n = ours(again, model, tokenizer, prompts[1], checkpoint_tokens=64)
    assert said == plain(model, tokenizer, prompts[1])
    assert n >= len(text) - 64


def test_text_is_tokenized_as_by_mlx_lm(cache: TieredPromptCache, loaded: tuple[Any, Any]) -> None:
    """Another prompt would be another answer."""
    said, _ = ours(cache, *loaded, TEXT)
    assert said == plain(*loaded, TEXT)


def test_a_conversation_goes_on_where_its_reply_ended(
    cache: TieredPromptCache, loaded: tuple[Any, Any]
) -> None:
    """A reply that isn't stored would be computed again with the next turn."""
    tokens = loaded[1].encode(TEXT)
    said, _ = ours(cache, *loaded, tokens)
    longer = [*tokens, *said, 5, 6, 7]
    again, n = ours(cache, *loaded, longer)
    assert n == len(tokens) + len(said)
    assert again == plain(*loaded, longer)


def test_a_consumer_that_stops_early_leaves_exact_state(
    cache: TieredPromptCache, loaded: tuple[Any, Any]
) -> None:
    """State of a token more or less than its key says would be another answer, or be refused."""
    tokens = loaded[1].encode(TEXT)
    replies = stream_generate(cache, *loaded, tokens, max_tokens=8)
    seen = [next(replies).token for _ in range(3)]
    replies.close()
    again, n = ours(cache, *loaded, [*tokens, *seen, 9])
    assert n == len(tokens) + 3
    assert again == plain(*loaded, [*tokens, *seen, 9])
    assert not cache.stats().refused


def test_the_prompt_is_kept_when_a_sampler_fails(
    cache: TieredPromptCache, loaded: tuple[Any, Any]
) -> None:
    """The error is the caller's, and the prefill was paid for."""
    calls: list[int] = []

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no")
        return mx.argmax(logprobs, axis=-1)

    tokens = loaded[1].encode(TEXT)
    with pytest.raises(RuntimeError, match="no"):
        ours(cache, *loaded, tokens, sampler=sampler)
    said, n = ours(cache, *loaded, tokens)
    assert n == len(tokens) - 1
    assert said == plain(*loaded, tokens)


def test_an_interrupted_prefill_is_kept(cache: TieredPromptCache, loaded: tuple[Any, Any]) -> None:
    """A Ctrl-C in the middle of a long document must not cost all of it."""
    tokens = loaded[1].encode(TEXT)

    def interrupt(done: int, _total: int) -> None:
        if done >= 192:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ours(cache, *loaded, tokens, checkpoint_tokens=64, prompt_progress_callback=interrupt)
    _, n = ours(cache, *loaded, tokens)
    assert n >= 128


def test_processors_see_the_whole_prompt_after_a_hit(
    cache: TieredPromptCache, loaded: tuple[Any, Any]
) -> None:
    """A penalty for repetition that didn't see what was reused would change the answer."""

    def options() -> dict[str, Any]:
        return {
            "logits_processors": mlx_lm.sample_utils.make_logits_processors(
                repetition_penalty=2.0, repetition_context_size=400
            )
        }

    tokens = loaded[1].encode(TEXT)
    ours(cache, *loaded, tokens)
    said, n = ours(cache, *loaded, tokens, **options())
    assert n == len(tokens) - 1
    assert said == plain(*loaded, tokens, **options())
    assert said != plain(*loaded, tokens)


def test_quantized_state_is_kept_if_the_cache_was_told(tmp_path: Path) -> None:
    """A hit must not move the moment of quantization."""
    how = Quantization(8, 32, 128, 64)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 128}
    model = tiny.save(tmp_path / "wide", "qwen3", head_dim=32)
    wide = mlx_lm.load(str(model))
    tokens = wide[1].encode(TEXT)
    with TieredPromptCache(tmp_path / "store", block_tokens=64, quantization=how) as told:
        told.bind(str(model), wide[0])
        want = plain(*wide, tokens, prefill_step_size=64, **options)
        first, _ = ours(told, *wide, tokens, checkpoint_tokens=64, **options)
        again, n = ours(told, *wide, tokens, checkpoint_tokens=64, **options)
        assert first == again == want
        assert n >= 128
        with pytest.raises(ValueError, match="quantization"):
            stream_generate(told, *wide, tokens)


def test_a_draft_model_is_used(tmp_path: Path, folder: Path, loaded: tuple[Any, Any]) -> None:
    """Speculation has the state of two models to keep, and its own rewinding."""
    drafter = tiny.save(tmp_path / "draft", "qwen3", seed=3, part=0.02)
    draft, _ = mlx_lm.load(str(drafter))
    tokens = loaded[1].encode(TEXT)
    with TieredPromptCache(tmp_path / "store", block_tokens=64) as told:
        told.bind((str(folder), None, str(drafter)), loaded[0], draft)
        first, _ = ours(told, *loaded, tokens, draft_model=draft)
        again, n = ours(told, *loaded, tokens, draft_model=draft)
    assert first == again == plain(*loaded, tokens, draft_model=draft)
    assert n == len(tokens) - 1


def test_salts_are_kept_apart(cache: TieredPromptCache, loaded: tuple[Any, Any]) -> None:
    """One tenant could tell from the time of an answer what another has asked."""
    tokens = loaded[1].encode(TEXT)
    ours(cache, *loaded, tokens, cache_salt="a")
    assert ours(cache, *loaded, tokens, cache_salt="b")[1] == 0
    assert ours(cache, *loaded, tokens, cache_salt="a")[1] == len(tokens) - 1


def test_a_prompt_can_be_kept_for_a_while(
    cache: TieredPromptCache, loaded: tuple[Any, Any]
) -> None:
    """What is asked to be forgotten must be."""
    tokens = loaded[1].encode(TEXT)
    ours(cache, *loaded, tokens, cache_ttl=0.001)
    assert ours(cache, *loaded, tokens)[1] == 0
    assert ours(cache, *loaded, tokens)[1] == len(tokens) - 1


def test_a_model_that_was_not_bound_is_said_to_be(tmp_path: Path, loaded: tuple[Any, Any]) -> None:
    """State under a guessed name could be found for other weights."""
    with TieredPromptCache(tmp_path) as unaware, pytest.raises(NotBound, match="bind"):
        generate(unaware, *loaded, "text")


@pytest.mark.parametrize("option", ["prompt_cache", "max_kv_size", "input_embeddings"])
def test_options_that_a_cached_prompt_cannot_have_are_refused(
    cache: TieredPromptCache, loaded: tuple[Any, Any], option: str
) -> None:
    """Each would store state that isn't what its key says."""
    with pytest.raises(ValueError, match=option):
        stream_generate(cache, *loaded, TEXT, **{option: 8})


def test_coroutines_generate_on_one_thread(
    cache: TieredPromptCache, loaded: tuple[Any, Any]
) -> None:
    """Work of mlx on two threads ends the process on some devices."""
    names = set()

    def sampler(logprobs: mx.array) -> mx.array:
        names.add(threading.current_thread().name)
        return mx.argmax(logprobs, axis=-1)

    async def ask(thread: GenerationThread, prompt: str) -> str:
        return await thread.generate(cache, *loaded, prompt, max_tokens=8, sampler=sampler)

    async def both(thread: GenerationThread) -> list[str]:
        return list(await asyncio.gather(ask(thread, TEXT), ask(thread, QUESTION)))

    with GenerationThread() as thread:
        said = asyncio.run(both(thread))
    assert said == [mlx_lm.generate(*loaded, p, max_tokens=8) for p in (TEXT, QUESTION)]
    assert len(names) == 1


def test_a_coroutine_that_stops_early_leaves_exact_state(
    cache: TieredPromptCache, loaded: tuple[Any, Any]
) -> None:
    """A client that leaves a service must not spoil what comes after."""
    tokens = loaded[1].encode(TEXT)

    async def two(thread: GenerationThread) -> list[int]:
        seen = []
        replies = thread.stream_generate(cache, *loaded, tokens, max_tokens=200)
        async for r in replies:
            seen.append(r.token)
            if len(seen) == 2:
                break
        await replies.aclose()
        return seen

    with GenerationThread() as thread:
        seen = asyncio.run(two(thread))
    again, n = ours(cache, *loaded, [*tokens, *seen, 9])
    assert n >= len(tokens) + 2
    assert again == plain(*loaded, [*tokens, *seen, 9])
    assert not cache.stats().refused


def test_an_error_is_raised_where_the_reply_is_awaited(
    cache: TieredPromptCache, loaded: tuple[Any, Any]
) -> None:
    """A service that never hears of it would wait for ever."""

    def sampler(_: mx.array) -> mx.array:
        raise RuntimeError("no")

    async def ask(thread: GenerationThread) -> str:
        return await thread.generate(cache, *loaded, TEXT, sampler=sampler)

    with GenerationThread() as thread, pytest.raises(RuntimeError, match="no"):
        asyncio.run(ask(thread))


# ---- other servers


def arguments(model: Path) -> Namespace:
    return parser().parse_args(["--model", str(model), "--temp", "0"])


def ask(generator: upstream.ResponseGenerator, text: str) -> tuple[str, int]:
    """Text of a plain mlx-lm generator's reply, and how many tokens it reused."""
    request = upstream.CompletionRequest("text", text, [], None, None)
    wanted = upstream.GenerationArguments(
        model=upstream.ModelDescription("default_model", "default_model", None),
        sampling=upstream.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
        logits=upstream.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=[],
        max_tokens=8,
        num_draft_tokens=3,
        logprobs=False,
        top_logprobs=-1,
        seed=None,
        chat_template_kwargs=None,
    )
    context, responses = generator.generate(request, wanted)
    return "".join(r.text for r in responses), context.prompt_cache_count


def test_a_plain_server_of_mlx_lm_adopts_a_cache(tmp_path: Path, folder: Path) -> None:
    """Who runs another server on mlx-lm wants its prompts back after a restart, too."""
    args = arguments(folder)
    said = []
    for _ in range(2):
        generator = upstream.ResponseGenerator(upstream.ModelProvider(args), LRUPromptCache(10))
        with TieredPromptCache(tmp_path / "store") as cache:
            adopt(generator, cache)
            said.append(ask(generator, TEXT))
            generator.stop_and_join()
    plain_generator = upstream.ResponseGenerator(upstream.ModelProvider(args), LRUPromptCache(10))
    want, _ = ask(plain_generator, TEXT)
    plain_generator.stop_and_join()
    assert [text for text, _ in said] == [want, want]
    assert said[0][1] == 0
    assert said[1][1] > 200


def test_what_is_no_generator_of_mlx_lm_is_refused(cache: TieredPromptCache) -> None:
    """It would go on without the cache, and nobody would know."""
    with pytest.raises(TypeError, match="ResponseGenerator"):
        adopt(object(), cache)
