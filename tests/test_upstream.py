"""The contract with mlx-lm: what this package overrides or calls must be as it was.

A failure here says that the installed mlx-lm differs from the one that was read. Read its
changes to the server and the caches, then move the pin, `UPSTREAM_VERSION` and this file.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest
from mlx_lm import server as upstream
from mlx_lm.models import cache as upstream_cache

from tieredkv import TieredPromptCache
from tieredkv.flags import parser
from tieredkv.patch import UPSTREAM_VERSION


def test_the_installed_version_is_the_one_that_was_read() -> None:
    """Overrides of private methods can break in any release, in silence."""
    assert version("mlx-lm") == UPSTREAM_VERSION


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ModelProvider.__init__", ["self", "cli_args"]),
        ("ModelProvider._load", ["self", "model_path", "adapter_path", "draft_model_path"]),
        ("ResponseGenerator.__init__", ["self", "model_provider", "prompt_cache"]),
        ("ResponseGenerator._run_generate", ["self"]),
        ("ResponseGenerator._tokenize", ["self", "tokenizer", "request", "args"]),
        ("ResponseGenerator.stop_and_join", ["self"]),
        ("ResponseGenerator.generation_available", ["self"]),
        (
            "ResponseGenerator.generate",
            ["self", "request", "generation_args", "progress_callback"],
        ),
        (
            "ModelProvider.load",
            ["self", "model_path", "adapter_path", "draft_model_path"],
        ),
        ("ResponseGenerator._next_request", ["self", "timeout"]),
        ("ResponseGenerator._await_response", ["self", "response_queue"]),
        (
            "ResponseGenerator._make_state_machine",
            ["self", "model_key", "tokenizer", "stop_words"],
        ),
        ("APIHandler._set_completion_headers", ["self", "status_code"]),
        ("APIHandler.do_POST", ["self"]),
        ("APIHandler.do_GET", ["self"]),
        ("APIHandler.do_OPTIONS", ["self"]),
        (
            "APIHandler.completion_usage_response",
            ["self", "prompt_token_count", "completion_token_count", "prompt_cache_count"],
        ),
        ("ModelDescription", ["model", "draft", "adapter"]),
        (
            "SamplingArguments",
            ["temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold"],
        ),
        (
            "LogitsProcessorArguments",
            [
                *("logit_bias", "repetition_penalty", "repetition_context_size"),
                *("presence_penalty", "presence_context_size"),
                *("frequency_penalty", "frequency_context_size"),
            ],
        ),
        (
            "GenerationArguments",
            [
                *("model", "sampling", "logits", "stop_words", "max_tokens", "num_draft_tokens"),
                *("logprobs", "top_logprobs", "seed", "chat_template_kwargs"),
            ],
        ),
        ("_make_sampler", ["args", "tokenizer"]),
        ("_make_logits_processors", ["args"]),
        ("APIHandler.validate_model_parameters", ["self"]),
        ("ResponseGenerator._serve_single", ["self", "request", "stream"]),
        ("APIHandler.handle_text_completions", ["self"]),
        ("APIHandler.handle_chat_completions", ["self"]),
        (
            "_run_http_server",
            ["host", "port", "response_generator", "server_class", "handler_class"],
        ),
    ],
)
def test_what_is_overridden_or_called_is_as_it_was(name: str, parameters: list[str]) -> None:
    """A renamed method would leave the override dead and upstream's cache in use."""
    found = upstream
    for part in name.split("."):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters) == parameters


def test_a_context_says_whether_its_prompt_was_looked_up() -> None:
    """Else requests would be told the tiers of the one before."""
    count = inspect.signature(upstream.GenerationContext).parameters["prompt_cache_count"]
    assert count.default == -1


@pytest.mark.parametrize("method", ["fetch_nearest_cache", "insert_cache", "trim_to"])
def test_the_drop_in_takes_what_upstreams_cache_takes(method: str) -> None:
    """The server calls both in the same way."""
    ours = inspect.signature(getattr(TieredPromptCache, method)).parameters
    theirs = inspect.signature(getattr(upstream_cache.LRUPromptCache, method)).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (upstream_cache.ConcatenateKVCache(), {"keys", "values", "offset"}),
        (
            upstream_cache.QuantizedKVCache(),
            {"keys", "values", "offset", "group_size", "bits"},
        ),
        (
            upstream_cache.RotatingKVCache(8),
            {"keys", "values", "offset", "keep", "max_size", "_idx"},
        ),
        (
            upstream_cache.ChunkedKVCache(8),
            {"keys", "values", "offset", "chunk_size", "start_position"},
        ),
        (upstream_cache.ArraysCache(1), {"cache", "left_padding", "lengths"}),
        (upstream_cache.CacheList(), {"caches"}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_the_other_classes_have_the_fields_that_are_stored(kind: object, fields: set[str]) -> None:
    """A field more would be state that neither a block nor a snapshot holds."""
    assert set(vars(kind)) == fields


def test_a_kv_cache_is_keys_values_and_offset() -> None:
    """A field more would be state that a block doesn't hold."""
    assert set(vars(upstream_cache.KVCache())) == {"keys", "values", "offset"}


def test_all_of_upstreams_flags_are_there() -> None:
    """Users switch by changing the command's name."""
    known = {s for a in parser()._actions for s in a.option_strings}
    assert known >= {
        *("--model", "--adapter-path", "--host", "--port", "--allowed-origins", "--draft-model"),
        *("--num-draft-tokens", "--trust-remote-code", "--log-level", "--chat-template"),
        *("--use-default-chat-template", "--temp", "--top-p", "--top-k", "--min-p"),
        *("--max-tokens", "--chat-template-args", "--decode-concurrency"),
        *("--prompt-concurrency", "--prefill-step-size", "--prompt-cache-size"),
        *("--prompt-cache-bytes", "--kv-bits", "--kv-group-size", "--quantized-kv-start"),
        *("--pipeline", "--prompt-cache-dir", "--prompt-cache-disk-bytes", "--prefill-checkpoint"),
    }
