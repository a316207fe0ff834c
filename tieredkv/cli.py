"""The command line. Loads mlx only for the commands that compute."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from tieredkv.codec import PlaneCodec
from tieredkv.core import ColdTierUnavailable, default_cold_dir
from tieredkv.tiers.cold import ColdReader, ColdUsage, NamespaceUsage

_EXAMPLES = """\
examples:
  tieredkv serve --model mlx-community/Qwen3-4B-4bit
  tieredkv serve --model ./model --prompt-cache-bytes 8GiB --prompt-cache-disk-bytes 100GB
  tieredkv stats
  tieredkv stats --dir /srv/prompts --json
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
    stats = commands.add_parser(
        "stats",
        help="what is in a cold tier",
        description="Print what a cold tier holds, by model. Reads only; a server may be running "
        "on the directory.",
    )
    stats.add_argument(
        "--dir",
        type=Path,
        default=default_cold_dir(),
        metavar="DIR",
        help="the cold tier's directory (default: %(default)s)",
    )
    stats.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``tieredkv``; returns the exit status, 1 for a failure that was explained."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["serve"]:
        from tieredkv.server import serve  # late: it loads mlx

        return serve(args[1:])
    options = _parser().parse_args(args)
    try:
        print(_stats(options.dir, as_json=options.json))
    except ColdTierUnavailable as e:
        print(f"tieredkv: {e}", file=sys.stderr)
        return 1
    return 0


def _stats(folder: Path, *, as_json: bool) -> str:
    reader = ColdReader(folder, PlaneCodec())
    try:
        usage = reader.usage()
    finally:
        reader.close()
    return json.dumps(asdict(usage), indent=2) if as_json else _report(folder, usage)


def _report(folder: Path, usage: ColdUsage) -> str:
    lines = [
        f"{folder}",
        f"  {usage.blocks} blocks, {_size(usage.live_bytes)} live, "
        f"{_size(usage.file_bytes)} on disk, cap {_size(usage.cap_bytes)}",
    ]
    for namespace in usage.namespaces:
        lines += ["", *_namespace_lines(namespace)]
    if not usage.namespaces:
        lines.append("  empty: nothing has been stored here yet")
    return "\n".join(lines)


def _namespace_lines(n: NamespaceUsage) -> list[str]:
    ratio = f" ({n.raw_bytes / n.blob_bytes:.2f}x)" if n.blob_bytes else ""
    extras = [f"adapter {n.adapter}"] * bool(n.adapter) + [f"draft {n.draft}"] * bool(n.draft)
    return [
        f"{n.name or n.model}{' (salted)' * n.salted}",
        f"  identity {n.model}",
        *(f"  {extra}" for extra in extras),
        f"  layers: {_layers(n.layout)}",
        f"  {n.blocks} blocks of up to {n.block_tokens} tokens",
        f"  {_size(n.raw_bytes)} of state in {_size(n.blob_bytes)}{ratio}",
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


def _size(n: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def _when(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9).astimezone().isoformat(" ", "seconds") if ns else "-"
