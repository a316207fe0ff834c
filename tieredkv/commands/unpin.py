"""``tieredkv unpin``: let prompts go again when there is no room."""

from __future__ import annotations

import argparse
from typing import Any

from tieredkv.commands.console import STATUS, add_command
from tieredkv.commands.pin import each, pinned_in
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdTier

_UNPIN_HELP = f"""\
examples:
  tieredkv unpin 606bfe94afb6eeef
  tieredkv unpin --all --dir /srv/prompts

tieredkv pin lists what is pinned.

{STATUS.format(failed="one wasn't pinned; what was is said")}
"""


def add(commands: Any) -> None:
    """Add the command's parser."""
    unpin = add_command(
        commands,
        "unpin",
        "let pinned prompts go again when there is no room",
        "Protect prefixes of prompts in a cold tier no longer. They stay until they are evicted, "
        "expire or are pruned. Servers may be running on the directory.",
        _UNPIN_HELP,
        run,
    )
    unpin.add_argument("ids", nargs="*", metavar="ID", help="6 hex digits of an id, or more")
    unpin.add_argument("--all", action="store_true", help="all that are pinned")


def run(options: argparse.Namespace) -> int:
    """Unpin the prefixes."""
    if bool(options.ids) == options.all:
        options.parser.error("give the ids of prefixes, or --all")
    # As whole keys: what two of them begin with alike must not stop it.
    ids = [prefix.key for prefix in pinned_in(options.dir)] if options.all else options.ids
    tier = ColdTier(options.dir, None, QuantizingCodec())
    try:
        return each(options, "unpinned", ids, tier.unpin_id)
    finally:
        tier.close()
