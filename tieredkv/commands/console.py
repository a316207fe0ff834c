"""What the commands share: exit statuses, their common flags, progress on a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from tieredkv.core import DEFAULT_COLD_DIR, default_cold_dir

FINE, FAILED, MISUSED = 0, 1, 2
STATUS = "exit status: 0 fine, 1 {failed}, 2 wrong use"

_PROGRESS_AFTER_S = 1.0
_PROGRESS_EVERY_S = 0.1


def add_command(
    commands: Any,
    name: str,
    brief: str,
    description: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """A parser with the flags that all commands have; `cli` runs ``run`` with what it parsed.

    The options have the parser itself as ``parser``, for errors that only show when they are
    looked at together.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=brief,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--dir",
        type=Path,
        default=default_cold_dir(),
        metavar="DIR",
        help=f"the cold tier's directory (default: {DEFAULT_COLD_DIR})",
    )
    command.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    command.set_defaults(run=run, parser=command)
    return command


def count(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def show(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines for people, on standard output or ``file``. Names of models come from elsewhere:
    what a terminal would obey is replaced.
    """
    for line in lines:
        shown = (c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
        print("".join(shown), file=file)


class Progress:
    """One line on a terminal that says how far something is, once it takes long."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._due = time.monotonic() + _PROGRESS_AFTER_S
        self._is_shown = False

    def __call__(self, done: int, total: int) -> None:
        """Say that ``done`` of ``total`` is done."""
        now = time.monotonic()
        if now < self._due or not sys.stderr.isatty():
            return
        self._due = now + _PROGRESS_EVERY_S
        self._is_shown = True
        percent = 100 * done // total if total else 100
        print(f"\r{self._what}: {percent}%", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Take the line away."""
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_shown = False
