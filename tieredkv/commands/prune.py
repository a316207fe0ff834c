"""``tieredkv prune``: remove prompts by what people know of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tieredkv.commands.console import FAILED, FINE, MISUSED, STATUS, Progress, add_command, show
from tieredkv.commands.salts import add_salts, given_salt
from tieredkv.core import ColdTierUnavailable
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader, ColdTier
from tieredkv.tiers.pruning import Criteria, Plan, Victim
from tieredkv.units import bytes_text, duration, size

_PRUNE_HELP = f"""\
examples:
  tieredkv prune --older-than 30d                  what was not used for 30 days
  tieredkv prune --model 'mlx-community/Qwen*'     all of some models, by name
  tieredkv prune --model ./old --older-than 12h    both must hold
  tieredkv prune --cache-salt alice --yes          all of one tenant, without a question
  tieredkv prune --to 20GB --dry-run               what an eviction down to 20 GB would take
  tieredkv prune --to 0                            everything but what is pinned
  tieredkv prune --to 0 --pinned                   everything

What is removed stays readable in the file until it is overwritten, or tieredkv compact was run.
Servers that run keep what they have in memory, and may write it again when it is used.

{STATUS.format(failed="it failed or was stopped; what was removed until then is said")}
"""


def add(commands: Any) -> None:
    """Add the command's parser."""
    prune = add_command(
        commands,
        "prune",
        "remove prompts by model, salt or age, or down to a size",
        "Remove blocks for which all conditions hold that are given. Servers may be running on "
        "the directory.",
        _PRUNE_HELP,
        run,
    )
    prune.add_argument(
        "--model",
        metavar="NAME",
        help="of this model: its name or identity as stats shows them, or a pattern such as '*8B*'",
    )
    add_salts(prune)
    prune.add_argument(
        "--older-than",
        type=duration,
        metavar="TIME",
        help="not used for this long: 90s, 45m, 12h, 30d, 2w",
    )
    prune.add_argument(
        "--to",
        type=size,
        metavar="SIZE",
        help="the least worth keeping first, until this much is in use: 500MB, 4GiB",
    )
    prune.add_argument(
        "--pinned", action="store_true", help="pinned prompts too, which stay otherwise"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    prune.add_argument("--yes", action="store_true", help="don't ask")


def run(options: argparse.Namespace) -> int:
    """Remove what the options mean, or say what would be."""
    criteria = _criteria(options)
    reader = ColdReader(options.dir, QuantizingCodec())
    try:
        plan = reader.plan(criteria)
    finally:
        reader.close()
    doomed = list(plan.until(criteria.to_bytes))
    if options.dry_run or not doomed:
        _say_pruned(options, plan, doomed, "would be removed" if doomed else "to remove")
        return FINE
    if not options.yes and not _agreed(plan, doomed):
        print("tieredkv: nothing was removed; --yes answers the question", file=sys.stderr)
        return FAILED if sys.stdin.isatty() else MISUSED
    return _remove(options, criteria, plan, len(doomed))


def _criteria(options: argparse.Namespace) -> Criteria:
    age = options.older_than
    criteria = Criteria(
        model=options.model,
        salt=given_salt(options),
        unused_since=None if age is None else time.time_ns() - int(age * 1e9),
        to_bytes=options.to,
        pinned=options.pinned,
    )
    if criteria == Criteria(pinned=options.pinned):
        options.parser.error(
            "say what is to go: --model, --salt, --cache-salt, --api-key, --unsalted, "
            "--older-than, --to (--to 0 for everything); --pinned is no condition"
        )
    return criteria


def _agreed(plan: Plan, doomed: Sequence[Victim]) -> bool:
    if not sys.stdin.isatty():
        return False
    lines = _pruned_lines(plan.labels, doomed, "are to be removed")
    show(lines, sys.stderr)
    print("Remove them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(options: argparse.Namespace, criteria: Criteria, plan: Plan, n_doomed: int) -> int:
    tier = ColdTier(options.dir, None, QuantizingCodec())
    progress = Progress("removing")
    gone: list[Victim] = []
    try:
        for victim in tier.prune(criteria):
            gone.append(victim)
            progress(len(gone), max(n_doomed, len(gone)))
        what = "removed"
    except KeyboardInterrupt:
        what = "removed when it was stopped; the others are as they were"
    except ColdTierUnavailable as e:
        what = "removed when it failed; the others are as they were"
        print(f"tieredkv: {e}", file=sys.stderr)
    finally:
        progress.end()
        tier.close()
    _say_pruned(options, plan, gone, what)
    return FINE if what == "removed" else FAILED


def _say_pruned(
    options: argparse.Namespace, plan: Plan, victims: Sequence[Victim], what: str
) -> None:
    if options.json:
        print(json.dumps(_pruned_json(options, plan.labels, victims), indent=2))
        return
    show(_pruned_lines(plan.labels, victims, what))
    if victims and not options.dry_run:
        print(
            "They stay readable in the file until they are overwritten, or this was run:\n"
            f"  tieredkv compact --dir {options.dir}"
        )


def _tally(victims: Iterable[Victim]) -> tuple[Counter[bytes], Counter[bytes]]:
    """Blocks and encoded bytes by namespace."""
    blocks: Counter[bytes] = Counter()
    n_bytes: Counter[bytes] = Counter()
    for victim in victims:
        blocks[victim.root] += 1
        n_bytes[victim.root] += victim.blob_bytes
    return blocks, n_bytes


def _pruned_lines(labels: Mapping[Any, str], victims: Sequence[Victim], what: str) -> list[str]:
    blocks, n_bytes = _tally(victims)
    if not victims:
        return [f"no blocks {what}"]
    return [
        f"{blocks.total()} blocks, {bytes_text(n_bytes.total())}, {what}:",
        *(
            f"  {labels.get(root, root.hex())}: {n} blocks, {bytes_text(n_bytes[root])}"
            for root, n in blocks.most_common()
        ),
    ]


def _pruned_json(
    options: argparse.Namespace, labels: Mapping[Any, str], victims: Sequence[Victim]
) -> dict[str, object]:
    blocks, n_bytes = _tally(victims)
    return {
        "dry_run": options.dry_run,
        "blocks": blocks.total(),
        "bytes": n_bytes.total(),
        "namespaces": [
            {"root": root.hex(), "name": labels.get(root, ""), "blocks": n, "bytes": n_bytes[root]}
            for root, n in blocks.most_common()
        ],
    }
