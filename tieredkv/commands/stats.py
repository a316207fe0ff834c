"""``tieredkv stats``: what is in a cold tier, by model."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tieredkv.commands.console import FINE, STATUS, add_command, show
from tieredkv.core import ColdTierUnavailable
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader, ColdUsage, NamespaceUsage
from tieredkv.tiers.traffic import thread_bytes
from tieredkv.units import bytes_text

_STATS_HELP = f"""\
examples:
  tieredkv stats
  tieredkv stats --dir /srv/prompts --json

{STATUS.format(failed="it can't be read")}
"""


def add(commands: Any) -> None:
    """Add the command's parser."""
    add_command(
        commands,
        "stats",
        "what is in a cold tier",
        "Print what a cold tier holds, by model. Reads only; a server may be running on the "
        "directory.",
        _STATS_HELP,
        run,
    )


def run(options: argparse.Namespace) -> int:
    """Print what there is."""
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
    if options.json:
        print(json.dumps(asdict(usage), indent=2))
    else:
        show(_report(options.dir, usage))
    return FINE


def _report(folder: Path, usage: ColdUsage) -> list[str]:
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
    if usage.pinned_blocks:
        lines.append(
            f"  {usage.pinned_blocks} blocks, {bytes_text(usage.pinned_bytes)}, are kept for "
            "prompts that are pinned (tieredkv pin lists them)"
        )
    for namespace in usage.namespaces:
        lines += ["", *_namespace_lines(namespace)]
    if not usage.namespaces:
        lines.append("  empty: nothing has been stored here yet")
    return lines


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
