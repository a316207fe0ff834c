"""The HTTP API of the cache: what is asked, who may ask it, and the answer. No sockets here."""

from __future__ import annotations

import ipaddress
import json
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from tieredkv import page
from tieredkv.core import Keeping, Pinned, PinRefused
from tieredkv.exposition import Reading, exposition
from tieredkv.journal import Journal, RequestReport
from tieredkv.keys import tenant, tenant_salt
from tieredkv.prompt_cache import TieredPromptCache
from tieredkv.texts import Texts
from tieredkv.tiers.pruning import Criteria, Pruned
from tieredkv.tiers.tree import PrefixUsage
from tieredkv.units import duration, size

_JSON = "application/json"
_FAULTS = 20
_PREFIXES = 10
_WARMED = 1024
_TEXT_CHARACTERS = 1024
_DEEP = "the body is nested too deeply"

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
        return _path(self.target)

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


class Misuse(Exception):
    """A call that can't be served: an HTTP status, a code for programs, a text for people."""

    def __init__(self, status: int, code: str, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param


def refusal(status: int, code: str, text: str, param: str | None = None) -> Answer:
    """An error in the form of OpenAI's API."""
    return _json({"error": _error(status, code, text, param)}, status)


def _error(status: int, code: str, text: str, param: str | None) -> dict[str, str | None]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"message": text, "type": kind, "param": param, "code": code}


def _json(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


class Server(Protocol):
    """What the API needs of the server besides its cache. Any thread may call."""

    cache: TieredPromptCache
    journal: Journal
    texts: Texts

    @property
    def cache_api(self) -> str:
        """Who may use the API: "local", "anywhere" or "off"."""

    @property
    def models(self) -> list[str]:
        """Names of the models that are loaded."""


def _path(target: str) -> str:
    return target.partition("?")[0]


def owns(target: str) -> bool:
    """Whether a path is the API's."""
    path = _path(target)
    return path in ("/metrics", "/cache", "/v1/cache") or path.startswith(("/cache/", "/v1/cache/"))


def answer(call: Call, server: Server) -> Answer:
    """The answer to a call whose path the API owns."""
    try:
        _check_access(call, server.cache_api)
        return _route(call)(call, server)
    except Misuse as e:
        return refusal(e.status, e.code, str(e), e.param)


# ---- who may ask


def _check_access(call: Call, who: str) -> None:
    """Refuse everybody but programs and pages of this machine, if the server is to.

    A web page in the user's browser must not reach the API: neither as itself, which its Origin
    tells, nor under a name of its own that leads here, which the Host tells.
    """
    if who == "off":
        raise Misuse(404, "not_found", "there is no such path")
    if who == "anywhere":
        return
    if not _is_loopback(call.client):
        raise Misuse(
            403,
            "not_local",
            "only this machine is answered here; --cache-api anywhere answers others, too",
        )
    host = (call.headers.get("Host") or "").lower()
    if not _is_loopback(_hostname(f"//{host}")):
        raise Misuse(403, "foreign_host", "ask for localhost or 127.0.0.1 by its name")
    origin = call.headers.get("Origin")
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        raise Misuse(403, "foreign_origin", "pages of other sites are not answered here")


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback


# ---- what is asked

_N = TypeVar("_N", int, float)
Route = Callable[[Call, Server], Answer]


def _route(call: Call) -> Route:
    methods = {"GET": _page} if call.path.startswith("/cache") else ROUTES.get(call.path)
    if methods is None:
        raise Misuse(404, "not_found", f"there is no {call.path}; docs/api.md lists what is")
    if call.method not in methods:
        allowed = ", ".join(methods)
        raise Misuse(405, "method_not_allowed", f"{call.path} takes {allowed}")
    return methods[call.method]


def _metrics(call: Call, server: Server) -> Answer:
    reading = Reading(
        version("tieredkv"),
        server.cache.stats(),
        server.cache.details(),
        server.journal.totals(),
        server.cache.pinned_bytes,
    )
    body, content_type = exposition(reading, call.headers.get("Accept") or "")
    return Answer(200, body, content_type)


def _page(call: Call, _: Server) -> Answer:
    found = page.asset(call.path)
    if found is None:
        raise Misuse(404, "not_found", f"there is no {call.path}")
    return Answer(200, *found, page.HEADERS)


def _stats(_: Call, server: Server) -> Answer:
    return _json(stats(server))


def stats(server: Server) -> dict[str, Any]:
    """What ``GET /v1/cache/stats`` answers; times are seconds of Unix time, sizes bytes."""
    cache, journal = server.cache, server.journal
    now, details, directory = cache.stats(), cache.details(), cache.directory
    prefixes = cache.prefixes(_PREFIXES)
    keeping = cache.keeping([usage.id for usage in prefixes])
    faults = sorted((*journal.faults(), *details.faults), key=lambda fault: -fault.time)
    return {
        "time": time.time(),
        "started": journal.started,
        "version": version("tieredkv"),
        "models": server.models,
        "hot": _tier(now.hot),
        "cold": _tier(now.cold)
        | {"directory": str(directory) if directory else None, "pinned_bytes": cache.pinned_bytes},
        "queue": {"bytes": now.queue_bytes, "blocks": now.queue_blocks},
        "entries": now.entries,
        "hits": now.hits,
        "misses": now.misses,
        "prompt_tokens": journal.totals().tokens,
        "saved_seconds": details.saved_seconds,
        "counters": asdict(now),
        "history": [asdict(minute) for minute in journal.history()],
        "requests": [asdict(report) for report in journal.requests()],
        "prefixes": [_prefix(usage, keeping[usage.id], server.texts) for usage in prefixes],
        "faults": [asdict(fault) for fault in faults[:_FAULTS]],
    }


def _prefix(usage: PrefixUsage, keeping: Keeping, texts: Texts) -> dict[str, Any]:
    """A prefix of the store. Prompts of salted namespaces are not for everybody who looks here."""
    ends = [
        texts.of(usage.model, f"{usage.id} {part}", tokens)
        for part, tokens in (("start", usage.start), ("end", usage.end))
        if tokens and not usage.salted
    ]
    known = [text for text in ends if text is not None]
    # Fewer tokens at the end are all that is left behind those at the start.
    between = " … " if len(usage.end) == len(usage.start) else ""
    return {
        "id": usage.id,
        "model": usage.model,
        "tokens": usage.tokens,
        "bytes": usage.bytes,
        "uses": usage.uses,
        "last_use": usage.last_use / 1e9,
        "pinned": keeping.is_pinned,
        "expires": keeping.expires / 1e9 if keeping.expires else None,
        "text": between.join(known) if known and len(known) == len(ends) else None,
    }


def _tier(tier: Any) -> dict[str, int]:
    return {"bytes": tier.n_bytes, "cap_bytes": tier.cap_bytes, "blocks": tier.n_blocks}


def _explain(call: Call, server: Server) -> Answer:
    body = _body(call)
    _check_request(body)
    return _json(asdict(server.cache.explain(*call.prompts.identify(body))))


def _warm(call: Call, server: Server) -> Answer:
    body = _body(call)
    if "requests" not in body:
        return _json({"results": [_warmed(call, server, _to_warm(body))], "failed": 0})
    _check_fields(body, frozenset(("requests", "pin", "cache_ttl")))
    requests = body["requests"]
    if not isinstance(requests, list) or not 0 < len(requests) <= _WARMED:
        raise Misuse(400, "bad_value", f"requests must be a list of 1 to {_WARMED}", "requests")
    shared = {name: value for name, value in body.items() if name != "requests"}
    # All are looked at before the first is computed, which may take hours.
    wanted = [_to_warm(shared, request, f"requests[{i}].") for i, request in enumerate(requests)]
    results = [_warmed_or_failed(call, server, each) for each in wanted]
    return _json({"results": results, "failed": sum("error" in each for each in results)})


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A prompt that is to be computed, and whether it is to be pinned then."""

    request: dict[str, Any]
    pin: bool


def _to_warm(shared: dict[str, Any], request: object = None, where: str = "") -> _Wanted:
    """A request with what it has of its own and what it shares with others."""
    if request is not None and not isinstance(request, dict):
        raise Misuse(400, "bad_value", "each of requests must be an object", where.rstrip("."))
    whole = shared | (request or {})
    pin = whole.pop("pin", False)
    if not isinstance(pin, bool):
        raise Misuse(400, "bad_value", "pin must be true or false", f"{where}pin")
    _check_request(whole, where)
    return _Wanted(whole, pin)


def _warmed_or_failed(call: Call, server: Server, wanted: _Wanted) -> dict[str, Any]:
    try:
        return _warmed(call, server, wanted)
    except Misuse as e:
        return {"error": _error(e.status, e.code, str(e), e.param)}


def _warmed(call: Call, server: Server, wanted: _Wanted) -> dict[str, Any]:
    report = asdict(call.prompts.compute(wanted.request))
    del report["status"]
    if not wanted.pin:
        return report
    try:
        pinned = server.cache.pin(*call.prompts.identify(wanted.request))
    except PinRefused as e:
        raise _refused(e) from e
    return report | {"pinned": _prefix_of(pinned)}


def _pin(call: Call, server: Server) -> Answer:
    return _pinned(call, server.cache.pin, server.cache.pin_id)


def _unpin(call: Call, server: Server) -> Answer:
    return _pinned(call, server.cache.unpin, server.cache.unpin_id)


def _pinned(
    call: Call,
    prompt: Callable[[Hashable, Sequence[int]], Pinned],
    by_id: Callable[[str], Pinned],
) -> Answer:
    body = _body(call)
    try:
        if "id" not in body:
            _check_request(body)
            return _json(_prefix_of(prompt(*call.prompts.identify(body))))
        _check_fields(body, frozenset(("id",)))
        if not isinstance(body["id"], str):
            raise Misuse(400, "bad_value", "id must be a string", "id")
        return _json(_prefix_of(by_id(body["id"])))
    except PinRefused as e:
        raise _refused(e) from e


def _prefix_of(pinned: Pinned) -> dict[str, Any]:
    return {"id": pinned.id, "tokens": pinned.n_tokens, "bytes": pinned.n_bytes}


_PIN_STATUS = {"absent": 404, "id": 400}


def _refused(why: PinRefused) -> Misuse:
    return Misuse(_PIN_STATUS.get(why.reason, 409), f"pin_{why.reason}", str(why))


_PRUNE_FIELDS = frozenset(
    (
        *("model", "salt", "cache_salt", "api_key", "unsalted"),
        *("older_than", "to", "pinned", "dry_run"),
    )
)


def _prune(call: Call, server: Server) -> Answer:
    body = _body(call)
    _check_fields(body, _PRUNE_FIELDS)
    criteria = _criteria(body)
    if criteria == Criteria(pinned=criteria.pinned):
        raise Misuse(
            400,
            "no_criteria",
            "say what is to go: model, salt, cache_salt, api_key, unsalted, older_than, to; "
            "DELETE /v1/cache removes everything",
        )
    if not _flag(body, "dry_run"):
        return _gone(server.cache.prune(criteria), dry_run=False)
    return _gone(server.cache.would_prune(criteria), dry_run=True)


def _delete(call: Call, server: Server) -> Answer:
    query = call.query
    _check_fields(query, frozenset(("pinned",)))
    pinned = query.get("pinned", ["false"])
    if pinned not in (["true"], ["false"]):
        raise Misuse(400, "bad_value", "pinned must be true or false", "pinned")
    return _gone(server.cache.prune(Criteria(pinned=pinned == ["true"])), dry_run=False)


def _gone(pruned: Pruned, *, dry_run: bool) -> Answer:
    return _json({"blocks": pruned.blocks, "bytes": pruned.n_bytes, "dry_run": dry_run})


def _criteria(body: Mapping[str, Any]) -> Criteria:
    salts = {name: _text(body, name) for name in ("salt", "cache_salt", "api_key")}
    salted = any(text is not None for text in salts.values())
    unsalted = _flag(body, "unsalted")
    if salted and unsalted:
        raise Misuse(400, "bad_value", "unsalted contradicts salt, cache_salt and api_key")
    whose = tenant(salts["api_key"] or "", salts["cache_salt"] or "")
    salt = tenant_salt((salts["salt"] or "").encode(), whose)
    age = _measure(body, "older_than", duration)
    return Criteria(
        model=_text(body, "model"),
        salt=salt if salted or unsalted else None,
        unused_since=None if age is None else time.time_ns() - int(age * 1e9),
        to_bytes=_measure(body, "to", size),
        pinned=_flag(body, "pinned"),
    )


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _TEXT_CHARACTERS:
        text = f"{name} must be a string of 1 to {_TEXT_CHARACTERS} characters"
        raise Misuse(400, "bad_value", text, name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Misuse(400, "bad_value", f"{name} is no Unicode text", name) from None
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise Misuse(400, "bad_value", f"{name} must be true or false", name)
    return value


def _measure(body: Mapping[str, Any], name: str, read: Callable[[str], _N]) -> _N | None:
    """A number as people write it with its unit, or as one of seconds or bytes."""
    value = body.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not isinstance(value, str):
        raise Misuse(400, "bad_value", f"{name} must be a number or a text", name)
    try:
        # A number alone is bytes to the one reader, and nothing to the other.
        return read(f"{value}s" if is_number and read is duration else str(value)[:100])
    except ArgumentTypeError as e:
        raise Misuse(400, "bad_value", f"{name}: {e}", name) from e


def _body(call: Call) -> dict[str, Any]:
    try:
        body = json.loads(call.body())
    except RecursionError:
        raise Misuse(400, "bad_json", _DEEP) from None
    except ValueError as e:
        raise Misuse(400, "bad_json", f"the body is no JSON: {e}") from None
    if not isinstance(body, dict):
        raise Misuse(400, "bad_json", "the body must be a JSON object")
    return body


def _check_fields(body: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    for name in body:
        if name not in known:
            text = f"unknown field {name[:100]!r}; docs/api.md lists what is known"
            raise Misuse(400, "unknown_field", text, f"{where}{name[:100]}")


def _check_request(body: Mapping[str, Any], where: str = "") -> None:
    _check_fields(body, _REQUEST_FIELDS, where)
    if ("messages" in body) == ("prompt" in body):
        raise Misuse(
            400,
            "no_prompt",
            "give messages, as for /v1/chat/completions, or prompt, as for /v1/completions",
            f"{where}messages",
        )


ROUTES: dict[str, dict[str, Route]] = {
    "/metrics": {"GET": _metrics},
    "/v1/cache/stats": {"GET": _stats},
    "/v1/cache/warm": {"POST": _warm},
    "/v1/cache/pin": {"POST": _pin},
    "/v1/cache/unpin": {"POST": _unpin},
    "/v1/cache/prune": {"POST": _prune},
    "/v1/cache/explain": {"POST": _explain},
    "/v1/cache": {"DELETE": _delete},
}
