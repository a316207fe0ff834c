"""The HTTP API of the cache: which path is answered by what. No sockets here; see docs/api.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from tieredkv import page, steering
from tieredkv.access import check_access
from tieredkv.calls import Answer, Call, Misuse, Server, json_answer, path_of, refusal
from tieredkv.exposition import Reading, exposition
from tieredkv.texts import Texts
from tieredkv.tiers.tree import PrefixUsage

_FAULTS = 20
_PREFIXES = 10

Route = Callable[[Call, Server], Answer]


def owns(target: str) -> bool:
    """Whether a path is the API's."""
    path = path_of(target)
    return path in ("/metrics", "/cache", "/v1/cache") or path.startswith(("/cache/", "/v1/cache/"))


def answer(call: Call, server: Server) -> Answer:
    """The answer to a call whose path the API owns."""
    try:
        check_access(call, server.cache_api)
        return _route(call)(call, server)
    except Misuse as e:
        return refusal(e.status, e.code, str(e), e.param)


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
    return json_answer(stats(server))


def stats(server: Server) -> dict[str, Any]:
    """What ``GET /v1/cache/stats`` answers; times are seconds of Unix time, sizes bytes."""
    cache, journal = server.cache, server.journal
    now, details, directory = cache.stats(), cache.details(), cache.directory
    prefixes = cache.prefixes(_PREFIXES)
    # As of now, also where the rest is some minutes old: the page has a button for it.
    pinned = cache.pinned_among([usage.id for usage in prefixes])
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
        "prefixes": [
            _prefix(usage, server.texts) | {"pinned": usage.id in pinned} for usage in prefixes
        ],
        "faults": [asdict(fault) for fault in faults[:_FAULTS]],
    }


def _prefix(usage: PrefixUsage, texts: Texts) -> dict[str, Any]:
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
        "expires": usage.expires / 1e9 if usage.expires else None,
        "text": between.join(known) if known and len(known) == len(ends) else None,
    }


def _tier(tier: Any) -> dict[str, int]:
    return {"bytes": tier.n_bytes, "cap_bytes": tier.cap_bytes, "blocks": tier.n_blocks}


ROUTES: dict[str, dict[str, Route]] = {
    "/metrics": {"GET": _metrics},
    "/v1/cache/stats": {"GET": _stats},
    "/v1/cache/warm": {"POST": steering.warm},
    "/v1/cache/pin": {"POST": steering.pin},
    "/v1/cache/unpin": {"POST": steering.unpin},
    "/v1/cache/prune": {"POST": steering.prune},
    "/v1/cache/explain": {"POST": steering.explain},
    "/v1/cache": {"DELETE": steering.delete},
}
