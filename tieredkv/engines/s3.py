"""Objects in a bucket of S3, or of any of the stores that speak its protocol, by `obstore`.

An object's lifetime is the bucket's: see its lifecycle rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from tieredkv.engines.base import (
    EngineFault,
    RemoteRefused,
    Timeouts,
    is_loopback,
    parse,
    redacted,
)

_T = TypeVar("_T")

# Where obstore takes an endpoint from, if the URL has none.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_CONNECT_SECONDS = 5.0
_DETAIL = 300


class S3Engine:
    """See `base.Engine`."""

    # A request asks for one object.
    batch = 1

    def __init__(self, url: str, timeouts: Timeouts) -> None:
        """Connects to nothing yet.

        Args:
            url: ``s3://bucket/prefix?key=value…``; keys are those of obstore's ``S3Config``, such
                as ``endpoint``, ``region``, ``virtual_hosted_style_request``, and ``allow_http``.
                What isn't there is taken from the environment's ``AWS_…``.
            timeouts: of calls.

        Raises:
            RemoteRefused: something about the URL makes no sense.
        """
        parts, query = parse(url)
        self.title = redacted(url)
        allow_http = query.pop("allow_http", "").lower() in ("1", "true", "yes")
        endpoint = query.get("endpoint") or _endpoint(os.environ)
        if endpoint.startswith("http://") and not allow_http:
            if not is_loopback(urlsplit(endpoint).hostname or ""):
                raise RemoteRefused(
                    f"{self.title}: its endpoint is http, so prompts would cross the network in "
                    "the clear; use https, or add allow_http=true to the URL"
                )
            allow_http = True

        def store(seconds: float) -> S3Store:
            return S3Store(
                parts.hostname,
                prefix=parts.path.strip("/") or None,
                config=query,  # type: ignore[arg-type] # the keys are the user's; checked below
                client_options={
                    "allow_http": allow_http,
                    "timeout": timedelta(seconds=seconds),
                    "connect_timeout": timedelta(seconds=min(seconds, _CONNECT_SECONDS)),
                },
                retry_config={"max_retries": 0},
            )

        try:
            self._reads, self._writes = store(timeouts.read), store(timeouts.write)
        except BaseError as e:
            raise RemoteRefused(f"{self.title}: {_first_line(e)}") from e

    def get(self, name: str, limit: int) -> memoryview | None:
        """See `base.Engine.get`."""

        def read() -> memoryview | None:
            found = self._reads.get(name)
            return memoryview(found.bytes()) if found.meta["size"] <= limit else None

        return _guarded(read, None)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See `base.Engine.exists`. One request a name, one after the other."""
        return [_guarded(partial(self._is_here, name), False) for name in names]

    def _is_here(self, name: str) -> bool:
        return bool(self._reads.head(name))

    def put(self, name: str, data: bytes) -> None:
        """See `base.Engine.put`."""

        def write() -> bool:
            # In one request: nobody has to clear up after an upload in parts that was cut off.
            self._writes.put(name, data, use_multipart=False)
            return True

        if not _guarded(write, False):
            raise EngineFault("refused", "there is no such bucket")

    def enlist(self, folder: str, member: str) -> None:
        """See `base.Engine.enlist`. An empty object."""
        self.put(f"{folder}/{member}", b"")

    def members(self, folder: str, start: str, limit: int) -> list[str]:
        """See `base.Engine.members`."""

        def read() -> list[str]:
            offset = f"{folder}/{start}" if start else None
            pages = self._reads.list(f"{folder}/", offset=offset, chunk_size=limit)
            return [str(o["path"]).rpartition("/")[2] for o in next(iter(pages), [])]

        nothing: list[str] = []
        return _guarded(read, nothing)

    def refresh(self, names: Sequence[str]) -> None:
        """See `base.Engine.refresh`. Nothing: a lifecycle counts from an object's making."""

    def close(self) -> None:
        """See `base.Engine.close`. Connections are closed when they have been idle."""


def _guarded(call: Callable[[], _T], absent: _T) -> _T:
    """What a call returns, or ``absent`` if there is no such object."""
    try:
        return call()
    except FileNotFoundError:
        return absent
    except (PermissionDeniedError, UnauthenticatedError) as e:
        raise EngineFault("refused", _first_line(e)) from e
    except BaseError as e:
        raise EngineFault(_kind(str(e)), _first_line(e)) from e


def _kind(text: str) -> str:
    text = text.lower()
    if "timed out" in text or "timedout" in text:
        return "timeout"
    if "507" in text or "no space left" in text or "quota" in text:
        return "full"
    if "error sending request" in text or "connect" in text:
        return "unreachable"
    return "other"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:_DETAIL]


def _endpoint(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in _ENDPOINTS if environment.get(name)), "")
