"""The command line. Loads mlx only for the commands that compute."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from tieredkv.commands import (
    bench,
    compact,
    completion,
    explain,
    exporting,
    importing,
    ls,
    pin,
    prune,
    stats,
    unpin,
    verify,
    warm,
)
from tieredkv.commands.console import FAILED, STATUS
from tieredkv.core import TieredKVError

_COMMANDS = (
    *(stats, ls, explain, warm, pin, unpin, prune, verify, compact),
    *(exporting, importing, bench, completion),
)

_EXAMPLES = f"""\
examples:
  tieredkv serve --model mlx-community/Qwen3-4B-4bit
  tieredkv serve --model ./model --prompt-cache-bytes 8GiB --prompt-cache-disk-bytes 100GB
  tieredkv stats
  tieredkv prune --older-than 30d --dry-run
  tieredkv verify --dir /srv/prompts --json

{STATUS.format(failed="a failure that was explained")}
"""


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="tieredkv",
        description="A tiered prompt (KV) cache for MLX: memory over disk, warm after a crash.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--version", action="version", version=f"tieredkv {version('tieredkv')}")
    commands = p.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser(
        "serve",
        add_help=False,
        help="run the OpenAI-compatible server (tieredkv serve --help lists its flags)",
    )
    for command in _COMMANDS:
        command.add(commands)
    p.set_defaults(root=p, commands=commands)
    return p


def commands() -> Any:
    """The parsers of all commands, as `argparse` keeps them: to write of them, not to parse."""
    return _parser().get_default("commands")


def _print_all() -> None:
    """Have what the terminal's encoding lacks printed as something else: it ends no command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``tieredkv``; returns the exit status, 1 for a failure that was explained."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["serve"]:
        from tieredkv.server import serve  # late: it loads mlx

        return serve(args[1:])
    _print_all()
    options = _parser().parse_args(args)
    try:
        status: int = options.run(options)
        # Not of `sys.stdout`, which is None where it was closed.
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        # Whoever reads, such as head, has seen enough; what is left would fail at exit, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except TieredKVError as e:
        if options.json:
            print(json.dumps({"error": str(e)}, indent=2))
        print(f"tieredkv: {e}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("tieredkv: stopped", file=sys.stderr)
        return FAILED
