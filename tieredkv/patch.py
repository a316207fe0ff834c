"""What is put in the place of mlx-lm's own where its server leaves no other way in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlx_lm import server as upstream

# The host whose contract the modules around the server were written against and are tested with.
UPSTREAM_VERSION = "0.32.2"


@contextmanager
def in_upstream(name: str, value: Any) -> Iterator[None]:
    """Put something else in the place of a global name of upstream's module."""
    before = getattr(upstream, name)
    setattr(upstream, name, value)
    try:
        yield
    finally:
        setattr(upstream, name, before)
