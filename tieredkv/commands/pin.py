"""``tieredkv pin``: keep prompts on disk whatever else has to go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tieredkv.commands.console import FAILED, FINE, STATUS, add_command, show
from tieredkv.core import PIN_SHARE, Pinned, PinRefused
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader, ColdTier
from tieredkv.tiers.pins import PinnedPrefix
from tieredkv.units import bytes_text, share

_PIN_HELP = f"""\
examples:
  tieredkv pin                          what is pinned
  tieredkv pin 606bfe94afb6eeef         a prefix, by its id
  tieredkv pin 606bfe 78aa2c --dir /srv/prompts

The id of a prefix is the start of its last block's key. Pinned prefixes stay on disk, through
restarts, until tieredkv unpin: they are neither evicted nor expire, and prune leaves them alone.

{STATUS.format(failed="one couldn't be pinned; what was is said")}
"""


def add(commands: Any) -> None:
    """Add the command's parser."""
    pin = add_command(
        commands,
        "pin",
        "keep prompts on disk whatever else has to go",
        "Protect prefixes of prompts in a cold tier from eviction, expiry and prune, or list those "
        "that are. Servers may be running on the directory.",
        _PIN_HELP,
        run,
    )
    pin.add_argument("ids", nargs="*", metavar="ID", help="6 hex digits of an id, or more")
    pin.add_argument(
        "--pin-share",
        type=share,
        default=PIN_SHARE,
        metavar="SHARE",
        help="the most of the cap that all pinned prefixes may take (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Pin the prefixes, or list those that are pinned."""
    if not options.ids:
        return _list(options)
    tier = ColdTier(options.dir, None, QuantizingCodec(), pin_share=options.pin_share)
    try:
        return each(options, "pinned", options.ids, tier.pin_id)
    finally:
        tier.close()


def each(
    options: argparse.Namespace,
    what: str,
    ids: Sequence[str],
    act: Callable[[str], Pinned],
) -> int:
    """Do it to every id, and say what came of it."""
    done: list[Pinned] = []
    refused: dict[str, str] = {}
    for prefix_id in ids:
        try:
            done.append(act(prefix_id))
        except PinRefused as e:
            refused[prefix_id] = str(e)
    for prefix_id, why in refused.items():
        show([f"tieredkv: {prefix_id}: {why}"], sys.stderr)
    if options.json:
        print(json.dumps({what: [asdict(prefix) for prefix in done], "refused": refused}, indent=2))
    for prefix in () if options.json else done:
        print(f"{prefix.id} {what}: {prefix.n_tokens} tokens, {bytes_text(prefix.n_bytes)} on disk")
    return FAILED if refused else FINE


def pinned_in(folder: Path) -> list[PinnedPrefix]:
    """All prefixes that are pinned in a directory."""
    reader = ColdReader(folder, QuantizingCodec())
    try:
        return reader.pins()
    finally:
        reader.close()


def _list(options: argparse.Namespace) -> int:
    found = pinned_in(options.dir)
    if options.json:
        print(json.dumps({"pinned": [asdict(prefix) for prefix in found]}, indent=2))
        return FINE
    for prefix in found:
        when = datetime.fromtimestamp(prefix.pinned / 1e9).astimezone()
        line = f"{prefix.id}  {prefix.n_tokens} tokens, {bytes_text(prefix.n_bytes)}, "
        show([line + f"{prefix.name}, since {when.isoformat(' ', 'seconds')}"])
    if not found:
        print("nothing is pinned")
    return FINE
