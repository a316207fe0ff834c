"""The command line. Loads mlx only for the commands that compute."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tieredkv.core import ColdTierUnavailable, Problem, default_cold_dir
from tieredkv.keys import tenant, tenant_salt
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader, ColdTier, ColdUsage, NamespaceUsage
from tieredkv.tiers.environment import broken
from tieredkv.tiers.pruning import Criteria, Plan, Victim
from tieredkv.tiers.rebuild import Rebuilt, rebuild
from tieredkv.tiers.traffic import thread_bytes
from tieredkv.units import bytes_text, duration, size

_FINE, _FAILED, _MISUSED = 0, 1, 2
_STATUS = "exit status: 0 fine, 1 {failed}, 2 wrong use"
_MAX_LISTED = 20
_PROGRESS_AFTER_S = 1.0
_PROGRESS_EVERY_S = 0.1

_EXAMPLES = f"""\
examples:
  tieredkv serve --model mlx-community/Qwen3-4B-4bit
  tieredkv serve --model ./model --prompt-cache-bytes 8GiB --prompt-cache-disk-bytes 100GB
  tieredkv stats
  tieredkv prune --older-than 30d --dry-run
  tieredkv verify --dir /srv/prompts --json

{_STATUS.format(failed="a failure that was explained")}
"""

_STATS_HELP = f"""\
examples:
  tieredkv stats
  tieredkv stats --dir /srv/prompts --json

{_STATUS.format(failed="it can't be read")}
"""

_PRUNE_HELP = f"""\
examples:
  tieredkv prune --older-than 30d                  what was not used for 30 days
  tieredkv prune --model 'mlx-community/Qwen*'     all of some models, by name
  tieredkv prune --model ./old --older-than 12h    both must hold
  tieredkv prune --cache-salt alice --yes          all of one tenant, without a question
  tieredkv prune --to 20GB --dry-run               what an eviction down to 20 GB would take
  tieredkv prune --to 0                            everything

What is removed stays readable in the file until it is overwritten, or tieredkv compact was run.
Servers that run keep what they have in memory, and may write it again when it is used.

{_STATUS.format(failed="it failed or was stopped; what was removed until then is said")}
"""

_VERIFY_HELP = f"""\
examples:
  tieredkv verify
  tieredkv verify --fix
  tieredkv verify --dir /srv/prompts --json

{_STATUS.format(failed="there are problems, or it can't be read")}
"""

_COMPACT_HELP = f"""\
examples:
  tieredkv compact
  tieredkv compact --dir /srv/prompts --json

Needs as much free disk as the cold tier has in use. Servers that run let go of the old file, and
of its disk space, with their next write.

{_STATUS.format(failed="it failed, and nothing was changed")}
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
    _add_command(
        commands,
        "stats",
        "what is in a cold tier",
        "Print what a cold tier holds, by model. Reads only; a server may be running on the "
        "directory.",
        _STATS_HELP,
    )
    _add_prune(commands)
    verify = _add_command(
        commands,
        "verify",
        "check a cold tier, and mend it",
        "Check every row of a cold tier, and that every block is what was written. Servers may "
        "be running on the directory.",
        _VERIFY_HELP,
    )
    verify.add_argument(
        "--fix",
        action="store_true",
        help="make the file anew from all sound blocks if there are problems; needs as much free "
        "disk as is in use",
    )
    _add_command(
        commands,
        "compact",
        "give free space back, and wipe what was removed",
        "Make the file of a cold tier anew from what is in use, without what was removed or is "
        "damaged. Servers may be running on the directory.",
        _COMPACT_HELP,
    )
    return p


def _add_command(
    commands: Any, name: str, brief: str, description: str, epilog: str
) -> argparse.ArgumentParser:
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
        help="the cold tier's directory (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    return command


def _add_prune(commands: Any) -> None:
    prune = _add_command(
        commands,
        "prune",
        "remove prompts by model, salt or age, or down to a size",
        "Remove blocks for which all conditions hold that are given. Servers may be running on "
        "the directory.",
        _PRUNE_HELP,
    )
    prune.add_argument(
        "--model",
        metavar="NAME",
        help="of this model: its name or identity as stats shows them, or a pattern such as '*8B*'",
    )
    prune.add_argument("--salt", metavar="TEXT", help="stored under this salt")
    prune.add_argument(
        "--cache-salt", metavar="TEXT", help="stored for requests with this cache_salt"
    )
    prune.add_argument(
        "--api-key",
        metavar="KEY",
        help="stored for requests with this key, by a server with --cache-salt-from-api-key",
    )
    prune.add_argument("--unsalted", action="store_true", help="stored without a salt")
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
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    prune.add_argument("--yes", action="store_true", help="don't ask")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``tieredkv``; returns the exit status, 1 for a failure that was explained."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["serve"]:
        from tieredkv.server import serve  # late: it loads mlx

        return serve(args[1:])
    parser = _parser()
    options = parser.parse_args(args)
    try:
        return _run(parser, options)
    except ColdTierUnavailable as e:
        if options.json:
            print(json.dumps({"error": str(e)}, indent=2))
        print(f"tieredkv: {e}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("tieredkv: stopped", file=sys.stderr)
        return _FAILED


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.command == "prune":
        return _prune(parser, options)
    if options.command == "verify":
        return _verify(options)
    if options.command == "compact":
        return _compact(options)
    return _stats(options)


class _Progress:
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


# ---- prune


def _prune(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    criteria = _criteria(parser, options)
    reader = ColdReader(options.dir, QuantizingCodec())
    try:
        plan = reader.plan(criteria)
    finally:
        reader.close()
    doomed = list(plan.until(criteria.to_bytes))
    if options.dry_run or not doomed:
        _say_pruned(options, plan, doomed, "would be removed" if doomed else "to remove")
        return _FINE
    if not options.yes and not _agreed(plan, doomed):
        print("tieredkv: nothing was removed; --yes answers the question", file=sys.stderr)
        return _FAILED if sys.stdin.isatty() else _MISUSED
    return _remove(options, criteria, plan, len(doomed))


def _criteria(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Criteria:
    salts = (options.salt, options.cache_salt, options.api_key)
    salted = any(text is not None for text in salts)
    if options.unsalted and salted:
        parser.error("prune: --unsalted contradicts --salt, --cache-salt and --api-key")
    whose = tenant(options.api_key or "", options.cache_salt or "")
    salt = tenant_salt((options.salt or "").encode(), whose)
    age = options.older_than
    criteria = Criteria(
        model=options.model,
        salt=salt if salted or options.unsalted else None,
        unused_since=None if age is None else time.time_ns() - int(age * 1e9),
        to_bytes=options.to,
    )
    if criteria == Criteria():
        parser.error(
            "prune: say what is to go: --model, --salt, --cache-salt, --api-key, --unsalted, "
            "--older-than, --to (--to 0 for everything)"
        )
    return criteria


def _agreed(plan: Plan, doomed: Sequence[Victim]) -> bool:
    if not sys.stdin.isatty():
        return False
    lines = _pruned_lines(plan.labels, doomed, "are to be removed")
    print("\n".join(lines), file=sys.stderr)
    print("Remove them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(options: argparse.Namespace, criteria: Criteria, plan: Plan, n_doomed: int) -> int:
    tier = ColdTier(options.dir, None, QuantizingCodec())
    progress = _Progress("removing")
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
    return _FINE if what == "removed" else _FAILED


def _say_pruned(
    options: argparse.Namespace, plan: Plan, victims: Sequence[Victim], what: str
) -> None:
    if options.json:
        print(json.dumps(_pruned_json(options, plan.labels, victims), indent=2))
        return
    print("\n".join(_pruned_lines(plan.labels, victims, what)))
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


# ---- verify and compact


def _verify(options: argparse.Namespace) -> int:
    n_blocks, problems = _problems(options.dir)
    if not problems or not options.fix:
        _say_verified(options, n_blocks, problems, None)
        return _FAILED if problems else _FINE
    if not options.json:
        print("\n".join(_problem_lines(problems)))
    rebuilt = _rebuild(options.dir)
    _evict_to_cap(options.dir)
    n_blocks, problems = _problems(options.dir)
    _say_verified(options, n_blocks, problems, rebuilt)
    return _FAILED if problems else _FINE


def _problems(folder: Path) -> tuple[int, list[Problem]]:
    """How many blocks there are, and all that is wrong with them."""
    reader = ColdReader(folder, QuantizingCodec(), broken)
    progress = _Progress("checking")
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


def _rebuild(folder: Path) -> Rebuilt:
    progress = _Progress("copying")
    try:
        return rebuild(folder, QuantizingCodec(), progress)
    finally:
        progress.end()


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
        print(f"made anew: {_kept(rebuilt)}")
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


def _kept(rebuilt: Rebuilt) -> str:
    left_out = f", {rebuilt.left_out} damaged ones left out" if rebuilt.left_out else ""
    return f"{rebuilt.kept} blocks kept{left_out}"


def _compact(options: argparse.Namespace) -> int:
    rebuilt = _rebuild(options.dir)
    if options.json:
        print(json.dumps(asdict(rebuilt), indent=2))
        return _FINE
    print(
        f"{options.dir}: {bytes_text(rebuilt.before_bytes)} before, "
        f"{bytes_text(rebuilt.after_bytes)} after, {_kept(rebuilt)}"
    )
    return _FINE


# ---- stats


def _stats(options: argparse.Namespace) -> int:
    reader = ColdReader(options.dir, QuantizingCodec())
    try:
        usage = reader.usage()
        faults = reader.counters().faults
    finally:
        reader.close()
    if faults:
        raise ColdTierUnavailable(
            f"{options.dir} can't be read; tieredkv verify tells what is wrong with it"
        )
    print(json.dumps(asdict(usage), indent=2) if options.json else _report(options.dir, usage))
    return _FINE


def _report(folder: Path, usage: ColdUsage) -> str:
    lines = [
        f"{folder}",
        f"  {usage.blocks} blocks, {bytes_text(usage.live_bytes)} live, "
        f"{bytes_text(usage.file_bytes)} on disk, cap {bytes_text(usage.cap_bytes)}",
    ]
    if usage.encoded_bytes:
        lines.append(
            f"  {bytes_text(usage.disk_bytes)} written to disk for "
            f"{bytes_text(usage.encoded_bytes)} of new blocks since the file was made "
            f"({usage.disk_bytes / usage.encoded_bytes:.2f}x, {_counted_by()})"
        )
    for namespace in usage.namespaces:
        lines += ["", *_namespace_lines(namespace)]
    if not usage.namespaces:
        lines.append("  empty: nothing has been stored here yet")
    return "\n".join(lines)


def _counted_by() -> str:
    return "by our own count of pages" if thread_bytes() is None else "as the system counts"


def _namespace_lines(n: NamespaceUsage) -> list[str]:
    ratio = f" ({n.raw_bytes / n.blob_bytes:.2f}x)" if n.blob_bytes else ""
    extras = [f"adapter {n.adapter}"] * bool(n.adapter) + [f"draft {n.draft}"] * bool(n.draft)
    return [
        f"{n.name or n.model}{' (salted)' * n.salted}",
        f"  identity {n.model}",
        *(f"  {extra}" for extra in extras),
        f"  layers: {_layers(n.layout)}",
        *["  NOT EXACT: rows of tokens are kept in 8 bits (--cold-quantize q8)"]
        * (n.cold_quantize == "q8"),
        f"  {n.blocks} blocks of up to {n.block_tokens} tokens",
        f"  {bytes_text(n.raw_bytes)} of state in {bytes_text(n.blob_bytes)}{ratio}",
        f"  used {_when(n.oldest_use)} to {_when(n.newest_use)}",
        f"  {n.host}",
    ]


def _layers(layout: str) -> str:
    """A layout in a line: how many layers of which class, and what they keep of a token."""
    try:
        layers = json.loads(layout)["layers"]
        kinds = Counter(
            " ".join(
                [x["kind"], *(f"{a['heads']}x{a['width']} {a['dtype']}" for a in x["leaves"][:1])]
            )
            for x in layers
        )
    except (ValueError, KeyError, TypeError):
        return "unknown"
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def _when(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9).astimezone().isoformat(" ", "seconds") if ns else "-"
