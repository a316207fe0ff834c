"""Prompts of people as token ids, the way the server makes them, and token ids as text."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from mlx_lm import server as upstream
from mlx_lm.utils import load_tokenizer

from tieredkv.core import TieredKVError
from tieredkv.identity import local_folder


class NoTokenizer(TieredKVError):
    """There is no tokenizer by that name, or it can't be loaded; the message says what to do."""


class NoPrompt(TieredKVError):
    """What was given can't be made a prompt of the model."""


def tokenizer_of(name: str, **config: Any) -> Any:
    """The tokenizer of a model's folder, or of a repository in the hub's local cache; ``config`` is
    what its loader takes. Loads no model, and nothing from the network.

    Raises:
        NoTokenizer: it isn't there, or can't be loaded.
    """
    folder = local_folder(name)
    if folder is None:
        raise NoTokenizer(
            f"{name} is neither a folder nor in the hub's local cache; say which tokenizer with "
            "--tokenizer"
        )
    try:
        return load_tokenizer(str(folder), config)
    except Exception as e:  # a tokenizer's files can be anything, and its loader raises anything
        raise NoTokenizer(f"the tokenizer of {name} can't be loaded: {e}") from e


def of_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of the prompt of a completion.

    Raises:
        NoPrompt: it is no Unicode text, such as bytes of another encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise NoPrompt(f"the text can't be tokenized: {e}") from e
    return list(map(int, tokenizer.encode(text)))


def of_chat(
    tokenizer: Any, request: Mapping[str, Any], template_args: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat request's body, as the server makes them; ``template_args`` are the
    server's own. Without images.

    Raises:
        NoPrompt: it has no messages, or the model's template doesn't take them.
    """
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NoPrompt("messages must be a list, and not empty")
    provider = SimpleNamespace(
        processor=None, cli_args=SimpleNamespace(chat_template_args=dict(template_args or {}))
    )
    # What upstream tokenizes it changes in place.
    chat = upstream.CompletionRequest(
        "chat",
        "",
        copy.deepcopy(messages),
        request.get("tools") or None,
        request.get("role_mapping"),
    )
    args = SimpleNamespace(chat_template_kwargs=request.get("chat_template_kwargs"))
    try:
        tokenized = upstream.ResponseGenerator._tokenize(
            SimpleNamespace(model_provider=provider), tokenizer, chat, args
        )
    except Exception as e:  # whatever a chat template makes of it
        raise NoPrompt(f"the messages can't be tokenized: {str(e) or type(e).__name__}") from e
    return list(map(int, tokenized[0]))


def as_line(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Token ids as one line that is safe to print: white space is one space, and what a terminal
    would obey is replaced. Images are "[image]".
    """
    line = " ".join(_decoded(tokenizer, tokens).split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def as_literal(tokenizer: Any, tokens: Sequence[int]) -> str:
    """As `as_line`, but exact: white space other than spaces, and all that isn't printable, is
    written as in a Python string, such as ``\\n``.
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in _decoded(tokenizer, tokens)
    )


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    vocabulary = len(tokenizer)
    parts = []
    for is_word, ids in groupby(tokens, lambda token: 0 <= token < vocabulary):
        parts.append(str(tokenizer.decode(list(ids))) if is_word else "[image]")
    return "".join(parts)
