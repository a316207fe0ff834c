"""Prompts as files have them: text, or JSON lines with the fields of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieredkv.core import TieredKVError

# What a text file is: one message, or a prompt without a template around it.
ROLES = ("user", "system", "prompt")

_FIELDS = frozenset(
    ("messages", "prompt", "tokens", "tools", "chat_template_kwargs", "cache_salt", "id")
)
_KINDS = ("messages", "prompt", "tokens")


class BadPrompt(TieredKVError):
    """A file or a line that holds no prompt; the message names it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of ``messages``, ``text`` and ``tokens``. ``name`` tells people which it is."""

    name: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    tokens: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    template: tuple[tuple[str, Any], ...] = ()
    cache_salt: str = ""

    @property
    def size(self) -> int:
        """About how many characters it has: what progress is measured by."""
        if self.tokens:
            return 4 * len(self.tokens)
        return len(self.text) or len(json.dumps(self.messages))


def read(path: Path, role: str) -> Iterator[Prompt]:
    """The prompts of a file: of one that ends in .jsonl one a line, else its text as a ``role``.

    Raises:
        BadPrompt: it can't be read, or a line of it is no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadPrompt(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix != ".jsonl":
        yield of_text(str(path), text, role)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _of_line(f"{path}:{number}", line)


def of_text(name: str, text: str, role: str) -> Prompt:
    """A text as a prompt: one message of a role, or as it is.

    Raises:
        BadPrompt: it is empty.
    """
    if not text.strip():
        raise BadPrompt(f"{name}: is empty")
    if role == "prompt":
        return Prompt(name, text=text)
    return Prompt(name, messages=({"role": role, "content": text},))


def _of_line(where: str, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadPrompt(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadPrompt(f"{where}: not an object")
    return of_fields(where, fields)


def of_fields(where: str, fields: Mapping[str, Any]) -> Prompt:
    """The prompt that an object with the fields of a request describes.

    Raises:
        BadPrompt: it describes none.
    """
    if unknown := sorted(set(fields) - _FIELDS):
        raise BadPrompt(f"{where}: unknown field {unknown[0]!r:.40}")
    if sum(kind in fields for kind in _KINDS) != 1:
        raise BadPrompt(f"{where}: must have one of {', '.join(_KINDS)}")
    name = str(fields.get("id", where))
    salt = fields.get("cache_salt", "")
    if not isinstance(salt, str):
        raise BadPrompt(f"{where}: cache_salt must be text")
    if "tokens" in fields:
        return Prompt(name, tokens=_tokens(where, fields["tokens"]), cache_salt=salt)
    if "prompt" in fields:
        text = fields["prompt"]
        if not isinstance(text, str) or not text:
            raise BadPrompt(f"{where}: prompt must be text, and not empty")
        return Prompt(name, text=text, cache_salt=salt)
    return Prompt(
        name,
        messages=_objects(where, fields, "messages", "role"),
        tools=_objects(where, fields, "tools"),
        template=tuple(_object(where, fields, "chat_template_kwargs").items()),
        cache_salt=salt,
    )


def _tokens(where: str, value: object) -> tuple[int, ...]:
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise BadPrompt(f"{where}: tokens must be a list of integers, and not empty")


def _objects(
    where: str, fields: Mapping[str, Any], name: str, required: str = ""
) -> tuple[Mapping[str, Any], ...]:
    found = fields.get(name) or []
    sound = isinstance(found, list) and all(isinstance(item, dict) for item in found)
    if not sound or (required and not found):
        raise BadPrompt(f"{where}: {name} must be a list of objects, and not empty")
    if required and not all(isinstance(item.get(required), str) for item in found):
        raise BadPrompt(f"{where}: each of {name} must have a {required}")
    return tuple(found)


def _object(where: str, fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict):
        raise BadPrompt(f"{where}: {name} must be an object")
    return found
