"""The HTTP API of the cache: what is asked, who may ask it, and the answer. No sockets here."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from tieredkv import page
from tieredkv.exposition import Reading, exposition
from tieredkv.journal import Journal
from tieredkv.prompt_cache import TieredPromptCache

_JSON = "application/json"
_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to the API: ``target`` as in its first line, ``client`` its address, and
    ``body`` reads its body.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    client: str
    body: Callable[[], bytes]

    @property
    def path(self) -> str:
        """The target without its query."""
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, list[str]]:
        """The query's fields."""
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call is answered with."""

    status: int
    body: bytes
    content_type: str = _JSON
    headers: Mapping[str, str] = field(default_factory=dict)


class Misuse(Exception):
    """A call that can't be served: an HTTP status, a code for programs, a text for people."""

    def __init__(self, status: int, code: str, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param


def refusal(status: int, code: str, text: str, param: str | None = None) -> Answer:
    """An error in the form of OpenAI's API."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": text, "type": kind, "param": param, "code": code}
    return _json({"error": error}, status)


def _json(value: object, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


class Server(Protocol):
    """What the API needs of the server besides its cache. Any thread may call."""

    cache: TieredPromptCache
    journal: Journal

    @property
    def cache_api(self) -> str:
        """Who may use the API: "local", "anywhere" or "off"."""

    @property
    def models(self) -> list[str]:
        """Names of the models that are loaded."""


def owns(target: str) -> bool:
    """Whether a path is the API's."""
    path = urlsplit(target).path
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
    host = call.headers.get("Host") or ""
    if not _is_loopback(_hostname(f"//{host}")):
        raise Misuse(403, "foreign_host", "ask for localhost or 127.0.0.1 by its name")
    origin = call.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
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

Route = Callable[[Call, Server], Answer]


def _route(call: Call) -> Route:
    methods = ROUTES.get(call.path, _PAGE if page.asset(call.path) else None)
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
        0,
    )
    body, content_type = exposition(reading, call.headers.get("Accept") or "")
    return Answer(200, body, content_type)


def _stats(_: Call, server: Server) -> Answer:
    return _json(stats(server))


def stats(server: Server) -> dict[str, Any]:
    """What ``GET /v1/cache/stats`` answers; times are seconds of Unix time, sizes bytes."""
    now, details, journal = server.cache.stats(), server.cache.details(), server.journal
    directory = server.cache.directory
    faults = sorted((*journal.faults(), *details.faults), key=lambda fault: -fault.time)
    return {
        "time": time.time(),
        "started": journal.started,
        "version": version("tieredkv"),
        "models": server.models,
        "hot": _tier(now.hot),
        "cold": _tier(now.cold)
        | {"directory": str(directory) if directory else None, "pinned_bytes": 0},
        "queue": {"bytes": now.queue_bytes, "blocks": now.queue_blocks},
        "entries": now.entries,
        "hits": now.hits,
        "misses": now.misses,
        "prompt_tokens": journal.totals().tokens,
        "saved_seconds": details.saved_seconds,
        "counters": asdict(now),
        "history": [asdict(minute) for minute in journal.history()],
        "requests": [asdict(report) for report in journal.requests()],
        "prefixes": [],
        "faults": [asdict(fault) for fault in faults[:_FAULTS]],
    }


def _tier(tier: Any) -> dict[str, int]:
    return {"bytes": tier.n_bytes, "cap_bytes": tier.cap_bytes, "blocks": tier.n_blocks}


def _page(call: Call, _: Server) -> Answer:
    found = page.asset(call.path)
    if found is None:
        raise Misuse(404, "not_found", f"there is no {call.path}")
    return Answer(200, *found, page.HEADERS)


_PAGE: dict[str, Route] = {"GET": _page}
ROUTES: dict[str, dict[str, Route]] = {
    "/metrics": {"GET": _metrics},
    "/v1/cache/stats": {"GET": _stats},
}
