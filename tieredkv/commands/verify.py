"""``tieredkv verify``: check a cold tier, and mend it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tieredkv.commands.compact import kept, rebuild_shown
from tieredkv.commands.console import FAILED, FINE, STATUS, Progress, add_command
from tieredkv.core import Problem
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader, ColdTier
from tieredkv.tiers.environment import broken
from tieredkv.tiers.rebuild import Rebuilt

_MAX_LISTED = 20

_VERIFY_HELP = f"""\
examples:
  tieredkv verify
  tieredkv verify --fix
  tieredkv verify --dir /srv/prompts --json

{STATUS.format(failed="there are problems, or it can't be read")}
"""


def add(commands: Any) -> None:
    """Add the command's parser."""
    verify = add_command(
        commands,
        "verify",
        "check a cold tier, and mend it",
        "Check every row of a cold tier, and that every block is what was written. Servers may "
        "be running on the directory.",
        _VERIFY_HELP,
        run,
    )
    verify.add_argument(
        "--fix",
        action="store_true",
        help="make the file anew from all sound blocks if there are problems; needs as much free "
        "disk as is in use",
    )


def run(options: argparse.Namespace) -> int:
    """Look for problems, and mend them if told to."""
    n_blocks, problems = _problems(options.dir)
    if not problems or not options.fix:
        _say_verified(options, n_blocks, problems, None)
        return FAILED if problems else FINE
    if not options.json:
        print("\n".join(_problem_lines(problems)))
    rebuilt = rebuild_shown(options.dir)
    _evict_to_cap(options.dir)
    n_blocks, problems = _problems(options.dir)
    _say_verified(options, n_blocks, problems, rebuilt)
    return FAILED if problems else FINE


def _problems(folder: Path) -> tuple[int, list[Problem]]:
    """How many blocks there are, and all that is wrong with them."""
    reader = ColdReader(folder, QuantizingCodec(), broken)
    progress = Progress("checking")
    try:
        return reader.n_blocks, reader.verify(progress)
    finally:
        progress.end()
        reader.close()


def _evict_to_cap(folder: Path) -> None:
    """Do at once what the next writes would do, if the cap was lowered."""
    tier = ColdTier(folder, None, QuantizingCodec())
    try:
        if tier.n_bytes > tier.cap_bytes:
            tier.trim_to(tier.cap_bytes)
    finally:
        tier.close()


def _say_verified(
    options: argparse.Namespace, n_blocks: int, problems: list[Problem], rebuilt: Rebuilt | None
) -> None:
    if options.json:
        report = {
            "blocks": n_blocks,
            "problems": [asdict(problem) for problem in problems],
            "fixed": rebuilt and asdict(rebuilt),
        }
        print(json.dumps(report, indent=2))
        return
    if rebuilt:
        print(f"made anew: {kept(rebuilt)}")
    if problems:
        print("\n".join(_problem_lines(problems)))
        return
    print(f"{options.dir}: {n_blocks} blocks, no problems")


def _problem_lines(problems: list[Problem]) -> list[str]:
    lines = [f"{len(problems)} problems:"]
    lines += [f"  {problem.where}: {problem.what}" for problem in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        lines.append(f"  and {len(problems) - _MAX_LISTED} more (--json lists all)")
    return lines
