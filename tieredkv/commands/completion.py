"""``tieredkv completion``: what a shell needs to complete our commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import shtab

from tieredkv.commands.console import FINE, STATUS

_SHELLS = ("bash", "zsh")

# What a shell completes for values of these kinds.
_FILES = {"FILE": shtab.FILE, "PATH": shtab.FILE, "PATH|REPO": shtab.FILE, "DIR": shtab.DIRECTORY}

_COMPLETION_HELP = f"""\
examples:
  tieredkv completion bash > ~/.local/share/bash-completion/completions/tieredkv
  source <(tieredkv completion bash)               for this shell only
  tieredkv completion zsh > ~/.zfunc/_tieredkv     with ~/.zfunc in fpath, before compinit

{STATUS.format(failed="it failed")}
"""


def add(commands: Any) -> None:
    """Add the command's parser."""
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands and flags in a shell",
        description="Print a script that completes commands and flags in bash or zsh.",
        epilog=_COMPLETION_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=_SHELLS)
    completion.set_defaults(run=run, json=False)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    from tieredkv.flags import parser  # late: it loads mlx

    serve = options.commands.choices["serve"]
    # What a parser does with its parents, which this one could only have had from the start.
    serve._add_container_actions(parser())
    for action in _actions(options.root):
        kind = _FILES.get(action.metavar) if isinstance(action.metavar, str) else None
        if kind is not None:
            action.complete = kind  # type: ignore[attr-defined]  # shtab's own
    print(shtab.complete(options.root, shell=options.shell))
    return FINE


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
