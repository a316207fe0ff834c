"""``tieredkv compact``: give free space back."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tieredkv.commands.console import FINE, STATUS, Progress, add_command
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.rebuild import Rebuilt, rebuild
from tieredkv.units import bytes_text

_COMPACT_HELP = f"""\
examples:
  tieredkv compact
  tieredkv compact --dir /srv/prompts --json

Needs as much free disk as the cold tier has in use. Servers that run go over to the new file, and
let go of the old one's disk space, within some five seconds.

{STATUS.format(failed="it failed, and nothing was changed")}
"""


def add(commands: Any) -> None:
    """Add the command's parser."""
    add_command(
        commands,
        "compact",
        "give free space back, and wipe what was removed",
        "Make the file of a cold tier anew from what is in use, without what was removed or is "
        "damaged. Servers may be running on the directory.",
        _COMPACT_HELP,
        run,
    )


def run(options: argparse.Namespace) -> int:
    """Make the file anew."""
    rebuilt = rebuild_shown(options.dir)
    if options.json:
        print(json.dumps(asdict(rebuilt), indent=2))
        return FINE
    print(
        f"{options.dir}: {bytes_text(rebuilt.before_bytes)} before, "
        f"{bytes_text(rebuilt.after_bytes)} after, {kept(rebuilt)}"
    )
    return FINE


def rebuild_shown(folder: Path) -> Rebuilt:
    """Make the file in ``folder`` anew, and show how far it is."""
    progress = Progress("copying")
    try:
        return rebuild(folder, QuantizingCodec(), progress)
    finally:
        progress.end()


def kept(rebuilt: Rebuilt) -> str:
    """How many blocks were kept, for people."""
    left_out = f", {rebuilt.left_out} damaged ones left out" if rebuilt.left_out else ""
    return f"{rebuilt.kept} blocks kept{left_out}"
