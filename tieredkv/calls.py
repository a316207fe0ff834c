"""Calls of the HTTP API: what they are, how bodies are read and how they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qs

from tieredkv.journal import Journal, RequestReport
from tieredkv.prompt_cache import TieredPromptCache
from tieredkv.texts import Texts

_JSON = "application/json"

# What a request for a completion may have: what this server looks at, and what others do. A name
# that isn't among them is a slip of the pen, and with a salt's name would end in another tenant.
_REQUEST_FIELDS = frozenset(
    (
        *("messages", "prompt", "model", "adapters", "draft_model", "num_draft_tokens"),
        *("tools", "tool_choice", "parallel_tool_calls", "role_mapping", "chat_template_kwargs"),
        *("cache_salt", "cache_ttl", "stream", "stream_options", "max_tokens"),
        *("max_completion_tokens", "stop", "seed", "n", "best_of", "echo", "suffix", "user"),
        *("temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold"),
        *("repetition_penalty", "repetition_context_size", "presence_penalty"),
        *("presence_context_size", "frequency_penalty", "frequency_context_size"),
        *("logit_bias", "logprobs", "top_logprobs", "response_format", "reasoning_effort"),
        *("metadata", "store", "service_tier", "modalities", "prediction", "safety_identifier"),
        *("prompt_cache_key", "verbosity"),
    )
)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to the API: ``target`` as in its first line, ``client`` its address;
    ``body`` reads its body, and ``prompts`` knows what prompts in it are.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    client: str
    body: Callable[[], bytes]
    prompts: Prompts

    @property
    def path(self) -> str:
        """The target without its query."""
        return path_of(self.target)

    @property
    def query(self) -> dict[str, list[str]]:
        """The query's fields."""
        return parse_qs(self.target.partition("?")[2], keep_blank_values=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call is answered with."""

    status: int
    body: bytes
    content_type: str = _JSON
    headers: Mapping[str, str] = field(default_factory=dict)


class Prompts(Protocol):
    """What a server makes of the body of a request for a completion, as a dict."""

    def identify(self, body: dict[str, Any]) -> tuple[Hashable, Sequence[int]]:
        """Key of the model and tokens under which its prompt's state is stored.

        Raises:
            Misuse: the request can't be served.
        """

    def compute(self, body: dict[str, Any]) -> RequestReport:
        """Serve it with an answer of one token, so that its prompt's state is stored.

        Raises:
            Misuse: the request can't be served.
        """


class Server(Protocol):
    """What the API needs of the server besides its cache. Any thread may call."""

    cache: TieredPromptCache
    journal: Journal
    texts: Texts

    @property
    def cache_api(self) -> str:
        """Who may use the API: "local", "anywhere" or "off"."""

    def settle(self, timeout: float) -> None:
        """Wait until what has been answered is stored, for at most so many seconds."""

    @property
    def models(self) -> list[str]:
        """Names of the models that are loaded."""

    @property
    def n_ranks(self) -> int:
        """How many processes serve a model together, each with a cache of its own."""

    def on_all_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the cache on each of them.

        Returns:
            What it came to, by rank.

        Raises:
            Exception: what it raised on the first rank on which it did.
        """


class Misuse(Exception):
    """A call that can't be served: an HTTP status, a code for programs, a text for people."""

    def __init__(self, status: int, code: str, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param


def refusal(status: int, code: str, text: str, param: str | None = None) -> Answer:
    """An answer that says what is wrong."""
    return json_answer({"error": error(status, code, text, param)}, status)


def error(status: int, code: str, text: str, param: str | None = None) -> dict[str, str | None]:
    """An error in the form of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"message": text, "type": kind, "param": param, "code": code}


def json_answer(value: object, status: int = 200) -> Answer:
    """An answer that is ``value`` as JSON."""
    return Answer(status, json.dumps(value).encode())


def path_of(target: str) -> str:
    """The path of a request, without its query."""
    return target.partition("?")[0]


def body_of(call: Call) -> dict[str, Any]:
    """The JSON object that a call's body is.

    Raises:
        Misuse: it is none.
    """
    try:
        body = json.loads(call.body())
    except RecursionError:
        raise Misuse(400, "bad_json", "the body is nested too deeply") from None
    except ValueError as e:
        raise Misuse(400, "bad_json", f"the body is no JSON: {e}") from None
    if not isinstance(body, dict):
        raise Misuse(400, "bad_json", "the body must be a JSON object")
    return body


def check_fields(body: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    """Raise Misuse for a field that isn't known; ``where`` leads its name."""
    for name in body:
        if name not in known:
            text = f"unknown field {name[:100]!r}; docs/api.md lists what is known"
            raise Misuse(400, "unknown_field", text, f"{where}{name[:100]}")


def check_request(body: Mapping[str, Any], where: str = "") -> None:
    """Raise Misuse if this isn't the body of a request for a completion."""
    check_fields(body, _REQUEST_FIELDS, where)
    if ("messages" in body) == ("prompt" in body):
        raise Misuse(
            400,
            "no_prompt",
            "give messages, as for /v1/chat/completions, or prompt, as for /v1/completions",
            f"{where}messages",
        )
