"""Calls of the HTTP API that warm, explain, pin and remove prompts: see docs/api.md."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from tieredkv.calls import (
    Answer,
    Call,
    Misuse,
    Server,
    body_of,
    check_fields,
    check_request,
    error,
    json_answer,
)
from tieredkv.core import ColdTierUnavailable, Pinned, PinRefused
from tieredkv.keys import tenant, tenant_salt
from tieredkv.tiers.pruning import Criteria, Pruned
from tieredkv.units import duration, size

_WARMED = 1024
_SETTLE_SECONDS = 60.0
_TEXT_CHARACTERS = 1024

_N = TypeVar("_N", int, float)


def explain(call: Call, server: Server) -> Answer:
    """``POST /v1/cache/explain``."""
    body = body_of(call)
    check_request(body)
    return json_answer(asdict(server.cache.explain(*call.prompts.identify(body))))


def warm(call: Call, server: Server) -> Answer:
    """``POST /v1/cache/warm``."""
    body = body_of(call)
    if "requests" not in body:
        result = _warmed(call, server, _to_warm(body))
        server.settle(_SETTLE_SECONDS)
        return json_answer({"results": [result], "failed": 0})
    check_fields(body, frozenset(("requests", "pin", "cache_ttl")))
    requests = body["requests"]
    if not isinstance(requests, list) or not 0 < len(requests) <= _WARMED:
        raise Misuse(400, "bad_value", f"requests must be a list of 1 to {_WARMED}", "requests")
    shared = {name: value for name, value in body.items() if name != "requests"}
    # All are looked at before the first is computed, which may take hours.
    wanted = [_to_warm(shared, request, f"requests[{i}].") for i, request in enumerate(requests)]
    results = [_warmed_or_failed(call, server, each) for each in wanted]
    server.settle(_SETTLE_SECONDS)
    return json_answer({"results": results, "failed": sum("error" in each for each in results)})


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
    check_request(whole, where)
    return _Wanted(whole, pin)


def _warmed_or_failed(call: Call, server: Server, wanted: _Wanted) -> dict[str, Any]:
    try:
        return _warmed(call, server, wanted)
    except Misuse as e:
        return {"error": error(e.status, e.code, str(e), e.param)}


def _warmed(call: Call, server: Server, wanted: _Wanted) -> dict[str, Any]:
    report = asdict(call.prompts.compute(wanted.request))
    del report["status"]
    if not wanted.pin:
        return report
    try:
        # By then it is stored: prompts are identified where they are computed, one after another.
        pinned = _pin(server, *call.prompts.identify(wanted.request))
    except PinRefused as e:
        raise _refused(e) from e
    except ColdTierUnavailable as e:
        raise Misuse(503, "cold_unavailable", str(e)) from e
    return report | {"pinned": _prefix_of(pinned)}


def pin(call: Call, server: Server) -> Answer:
    """``POST /v1/cache/pin``."""
    return _pinned(call, partial(_pin, server), partial(_by_id, server, "pin_id"))


def unpin(call: Call, server: Server) -> Answer:
    """``POST /v1/cache/unpin``."""
    return _pinned(call, partial(_unpin, server), partial(_by_id, server, "unpin_id"))


def _pin(server: Server, model: Hashable, tokens: Sequence[int]) -> Pinned:
    """Pin a prompt on all ranks or on none: what one of them lacks the others can't use."""
    try:
        return _together(server.on_all_ranks("pin", model, tokens))
    except PinRefused:
        if server.n_ranks > 1:
            with suppress(PinRefused):
                _unpin(server, model, tokens)
        raise


def _unpin(server: Server, model: Hashable, tokens: Sequence[int]) -> Pinned:
    return _together(server.on_all_ranks("unpin", model, tokens))


def _together(pinned: Sequence[Pinned]) -> Pinned:
    """What ranks that each pinned its part have pinned: as much as all of them have."""
    first, *_ = pinned
    return Pinned(first.id, min(p.n_tokens for p in pinned), sum(p.n_bytes for p in pinned))


def _by_id(server: Server, method: str, prefix_id: str) -> Pinned:
    if server.n_ranks > 1:
        text = "each rank has ids of its own: give the prompt, as messages or prompt"
        raise Misuse(409, "several_ranks", text, "id")
    return _together(server.on_all_ranks(method, prefix_id))


def _pinned(
    call: Call,
    prompt: Callable[[Hashable, Sequence[int]], Pinned],
    by_id: Callable[[str], Pinned],
) -> Answer:
    body = body_of(call)
    try:
        if "id" not in body:
            check_request(body)
            return json_answer(_prefix_of(prompt(*call.prompts.identify(body))))
        check_fields(body, frozenset(("id",)))
        if not isinstance(body["id"], str):
            raise Misuse(400, "bad_value", "id must be a string", "id")
        return json_answer(_prefix_of(by_id(body["id"])))
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


def prune(call: Call, server: Server) -> Answer:
    """``POST /v1/cache/prune``."""
    body = body_of(call)
    check_fields(body, _PRUNE_FIELDS)
    criteria = _criteria(body)
    if criteria == Criteria(pinned=criteria.pinned):
        raise Misuse(
            400,
            "no_criteria",
            "say what is to go: model, salt, cache_salt, api_key, unsalted, older_than, to; "
            "DELETE /v1/cache removes everything",
        )
    if not _flag(body, "dry_run"):
        return _gone(_pruned(server, criteria), dry_run=False)
    return _gone(server.cache.would_prune(criteria), dry_run=True)


def delete(call: Call, server: Server) -> Answer:
    """``DELETE /v1/cache``."""
    query = call.query
    check_fields(query, frozenset(("pinned",)))
    pinned = query.get("pinned", ["false"])
    if pinned not in (["true"], ["false"]):
        raise Misuse(400, "bad_value", "pinned must be true or false", "pinned")
    return _gone(_pruned(server, Criteria(pinned=pinned == ["true"])), dry_run=False)


def _pruned(server: Server, criteria: Criteria) -> Pruned:
    pruned: list[Pruned] = server.on_all_ranks("prune", criteria)
    return Pruned(sum(p.blocks for p in pruned), sum(p.n_bytes for p in pruned))


def _gone(pruned: Pruned, *, dry_run: bool) -> Answer:
    return json_answer({"blocks": pruned.blocks, "bytes": pruned.n_bytes, "dry_run": dry_run})


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
