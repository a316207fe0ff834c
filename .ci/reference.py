"""Writes ``docs/cli.md`` from the parsers: every command, its flags, examples and exit statuses.

Not argparse's own help, which is laid out otherwise by each version of Python.

Usage: ``python .ci/reference.py``; with ``--check`` it only says whether the file is up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cli.md"
COMMAND = "python .ci/reference.py"

_HEAD = f"""\
# Command line

Every command has `--help`. Results go to standard output, messages and progress to standard error.
With `--json` a failure that was explained is an object with the field `error`. This page is made
from the parsers by `{COMMAND}`.

| command | |
|---|---|
"""

_SERVE = """\
Takes all flags of mlx-lm's server (`tieredkv serve --help`), and these:
"""


def page() -> str:
    """The text of the page."""
    from tieredkv.cli import commands
    from tieredkv.flags import parser

    found = commands()
    briefs = {action.dest: action.help or "" for action in found._choices_actions}
    lines = [f"| [`tieredkv {name}`](#tieredkv-{name}) | {briefs[name]} |" for name in briefs]
    text = _HEAD + "\n".join(lines) + "\n"
    for name, command in found.choices.items():
        text += f"\n## tieredkv {name}\n\n"
        if name == "serve":
            ours = next(g for g in parser()._action_groups if g.title == "tiered prompt cache")
            text += f"{parser().description}\n\n{_SERVE}\n{_table(ours)}"
        else:
            text += _command(command)
    return text


def _command(command: argparse.ArgumentParser) -> str:
    parts = [f"{command.description}\n"]
    for group in command._action_groups:
        table = _table(group)
        if table:
            title = group.title or ""
            named = title not in ("options", "positional arguments")
            parts.append(f"{title[:1].upper()}{title[1:]}:\n\n{table}" if named else table)
    parts.append(_epilog(command.epilog or ""))
    return "\n".join(parts)


def _table(group: argparse._ArgumentGroup) -> str:
    rows = [
        f"| {_flag(action)} | {_cell(_help(action))} |"
        for action in group._group_actions
        if action.help is not argparse.SUPPRESS and action.dest != "help"
    ]
    return "\n".join(["| flag | |", "|---|---|", *rows]) + "\n" if rows else ""


def _flag(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else None)
    if not action.option_strings:
        return _code(str(value or action.dest))
    if action.nargs != 0:
        value = value or action.dest.upper()
    names = [f"{name} {value}" if value else name for name in action.option_strings]
    return ", ".join(map(_code, names))


def _help(action: argparse.Action) -> str:
    values = vars(action) | {"prog": "tieredkv"}
    return (action.help or "") % values


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _epilog(text: str) -> str:
    """The examples as a code block, and what else there is as it is."""
    return "\n\n".join(_paragraphs(text)) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    for part in text.strip().split("\n\n"):
        head, _, rest = part.partition("\n")
        yield f"```\n{dedent(rest)}\n```" if head == "examples:" else part


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    text = page()
    if arguments != ["--check"]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date: {COMMAND}")
    return 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
