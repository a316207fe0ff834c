"""A server whose failpoints can be armed while it runs, by a file.

Usage: ``python -m tests.crash.armed FOLDER FLAGS``: as ``tieredkv serve FLAGS``. What `Control`
of the folder arms happens there; what did is told, and so is what the server held at its end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tieredkv import TieredPromptCache
from tieredkv.server import serve

from .failpoints import POINTS, Failpoint, strike, wrap

_FLUSH_S = 20.0


@dataclass(frozen=True, slots=True)
class Books:
    """What a cache had at its end: whether its queue had emptied, faults of its books, and what
    was held in memory after all of it had been given back.
    """

    flushed: bool
    problems: tuple[str, ...]
    held_bytes: int
    faults: dict[str, int]


class Control:
    """The files by which a server and whoever tests it speak."""

    def __init__(self, folder: Path) -> None:
        self._armed = folder / "armed"
        self._struck = folder / "struck"
        self._books = folder / "books"

    # ---- who tests

    def arm(self, failpoint: Failpoint | None) -> None:
        """Let one failpoint be armed from now on, or none."""
        new = self._armed.with_suffix(".new")
        new.write_text(json.dumps(failpoint and asdict(failpoint)))
        new.replace(self._armed)

    def n_struck(self) -> int:
        """How many failpoints were struck so far."""
        return len(self._struck.read_text().splitlines()) if self._struck.exists() else 0

    def books(self) -> Books:
        """What the server that ended last had; FileNotFoundError if none has ended in order."""
        return Books(**json.loads(self._books.read_text()))

    # ---- the server

    def version(self) -> tuple[int, int] | None:
        """Changes whenever something else is armed."""
        try:
            status = self._armed.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def armed(self) -> Failpoint | None:
        """What is armed."""
        fields = json.loads(self._armed.read_text())
        return Failpoint(**fields) if fields else None

    def tell(self, failpoint: Failpoint) -> None:
        """Note that a failpoint is about to be struck."""
        with self._struck.open("a") as file:
            file.write(f"{failpoint.name}\n")

    def close_books(self, books: Books) -> None:
        """Note what the cache had."""
        self._books.write_text(json.dumps(asdict(books)))


class _Trigger:
    """Watches one control and strikes at the passing that is armed."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        self._armed: Failpoint | None = None
        self._left = 0

    def passed(self, name: str) -> None:
        """Called at each passing of a point, on any thread."""
        failpoint = self._due(name)
        if failpoint:
            self._control.tell(failpoint)
            strike(failpoint.action)

    def _due(self, name: str) -> Failpoint | None:
        with self._lock:
            version = self._control.version()
            if version != self._version:
                self._version, self._armed = version, self._control.armed()
                self._left = self._armed.nth if self._armed else 0
            if self._armed is None or self._armed.name != name:
                return None
            self._left -= 1
            return None if self._left else self._armed


def _closed(control: Control, close: Any, cache: TieredPromptCache) -> None:
    """Close a cache, and tell before what it had."""
    # The first one is told of what was dropped, the second only of what waits.
    cache.flush(_FLUSH_S)
    flushed = cache.flush(_FLUSH_S)
    problems = tuple(map(str, cache.check()))
    cache.trim_to(n_bytes=0)
    control.close_books(Books(flushed, problems, cache.nbytes, cache.stats().faults))
    close(cache)


def main(arguments: list[str]) -> int:
    """Serve, with every point watched; the server's exit status."""
    control = Control(Path(arguments[0]))
    trigger = _Trigger(control)
    for name, point in POINTS.items():
        wrap(point, partial(trigger.passed, name))
    close = TieredPromptCache.close
    # The wrapped close is what `tieredkv.server.run` calls.
    TieredPromptCache.close = lambda cache: _closed(control, close, cache)  # type: ignore[method-assign]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return serve(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
