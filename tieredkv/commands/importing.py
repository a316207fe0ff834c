"""``tieredkv import``: blocks of a portable file into a cold tier."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tieredkv.codec import PlaneCodec
from tieredkv.commands.console import FAILED, FINE, STATUS, Progress, add_command
from tieredkv.commands.mlxfiles import add_mlx, run_import
from tieredkv.core import BlockKey, Codec
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader, ColdTier
from tieredkv.tiers.health import DATA_NAME
from tieredkv.tiers.portable import BadFile, Package, Row, checked
from tieredkv.units import bytes_text, size

_COLD_BYTES = 16 << 30
_RESERVE_BYTES = 2 << 30
_BATCH_BYTES = 32 << 20

_HELP = f"""\
examples:
  tieredkv import prompts.tkv
  tieredkv import prompts.tkv --dry-run                check it, and say what it would bring
  tieredkv import prompts.tkv --dir /srv/prompts --prompt-cache-disk-bytes 100GB
  tieredkv import doc.safetensors --mlx --model ./model --prompt doc.txt

Import only from whom you trust: the state of a prompt decides what the model answers, and can't be
told from its tokens without computing it. All else is checked: that each block is named by what it
holds, and is whole. Nothing is evicted for it; what doesn't fit is said. After Ctrl-C, or a crash,
run it again: it goes on where it was.

A file of mlx-lm (--mlx) doesn't have the tokens of its prompt, so the prompt must be given. It is
computed once and compared with the file; what was computed is stored. --trust stores the file's.

{STATUS.format(failed="the file is damaged, or not all of it could be stored; what was is said")}
"""


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of it, in blocks, and in encoded bytes of the new ones. ``reason`` says why not all
    were stored.
    """

    stored: int = 0
    stored_bytes: int = 0
    known: int = 0
    left_out: int = 0
    reason: str = ""


_REASONS = {
    "no_room": "the cold tier is full: raise its cap (--prompt-cache-disk-bytes), or prune it",
    "disk_reserve": "too little of the disk would stay free (--prompt-cache-reserve)",
    "too_large": "a block is too large for the cap of the cold tier",
    "fault": "the cold tier can't be written; the line above says why",
    "orphan": "a block before them was removed meanwhile: run it again",
    "stopped": "it was stopped: run it again to go on",
}


def add(commands: Any) -> None:
    """Add the command's parser."""
    command = add_command(
        commands,
        "import",
        "take prompts from a portable file",
        "Store the blocks of a file that tieredkv export wrote. Servers may be running on the "
        "directory, and find them at once.",
        _HELP,
        run,
    )
    command.add_argument("file", type=Path, metavar="FILE", help="the file to read")
    command.add_argument("--model", metavar="PATH|REPO", help="with --mlx: the model of the file")
    add_mlx(command)
    command.add_argument("--salt", metavar="TEXT", help="with --mlx: store it under this salt")
    command.add_argument(
        "--cache-salt", metavar="TEXT", help="with --mlx: for requests with this cache_salt"
    )
    command.add_argument(
        "--api-key", metavar="KEY", help="with --mlx: for requests with this API key"
    )
    command.add_argument(
        "--trust",
        action="store_true",
        help="with --mlx: believe that the file is of this prompt and model, and don't compute it",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="check all of it, and only say what it would bring"
    )
    command.add_argument(
        "--prompt-cache-disk-bytes",
        type=size,
        metavar="SIZE",
        help="the cap of the cold tier's file (default: the one that it has; 16GiB for a new one)",
    )
    command.add_argument(
        "--prompt-cache-reserve",
        type=size,
        default=_RESERVE_BYTES,
        metavar="SIZE",
        help="disk to leave free (default: 2GiB)",
    )


def run(options: argparse.Namespace) -> int:
    """Read the file, and store what is new."""
    if options.mlx:
        return run_import(options)
    try:
        with Package(options.file) as package:
            done = _checked(options, package) if options.dry_run else _stored(options, package)
    except BadFile as error:
        raise BadFile(f"{options.file}: {error}") from error
    except OSError as error:
        raise BadFile(f"{options.file}: {error.strerror or error}") from error
    _say(options, done)
    return FAILED if done.reason else FINE


def _there(folder: Path) -> bool:
    return (folder / DATA_NAME).exists()


def _checked(options: argparse.Namespace, package: Package) -> _Done:
    """What would be stored, if there is room."""
    present: frozenset[BlockKey] = frozenset()
    if _there(options.dir):
        reader = ColdReader(options.dir, QuantizingCodec())
        try:
            _compare(package, reader.descriptions())
            present = reader.present([row.key for row in package.rows()])
        finally:
            reader.close()
    progress = Progress("checking")
    stored = n_bytes = read = 0
    try:
        for row in package.rows():
            foreign = checked(row, package.blob(row), _codec(package, row))
            read += len(foreign.blob)
            progress(read, package.blob_bytes)
            if row.key not in present:
                stored += 1
                n_bytes += len(foreign.blob)
    finally:
        progress.end()
    return _Done(stored, n_bytes, package.n_blocks - stored)


def _compare(package: Package, here: Mapping[BlockKey, Mapping[str, object]]) -> None:
    """Refuse a namespace that is here, and described otherwise: what it holds would be taken for
    something else.
    """
    for root, fields in package.fields().items():
        known = here.get(root)
        if known and _without_name(known) != _without_name(fields):
            raise BadFile(f"namespace {root.hex()[:16]} is described otherwise here")


def _without_name(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name != "name"}


def _codec(package: Package, row: Row) -> Codec:
    """Who reads the blobs of a row's namespace: exact state is never taken from an inexact blob."""
    return QuantizingCodec() if package.quantize(row) == "q8" else PlaneCodec()


def _open(options: argparse.Namespace) -> ColdTier:
    cap = options.prompt_cache_disk_bytes
    if cap is None and not _there(options.dir):
        cap = _COLD_BYTES
    return ColdTier(options.dir, cap, QuantizingCodec(), options.prompt_cache_reserve)


def _stored(options: argparse.Namespace, package: Package) -> _Done:
    tier = _open(options)
    progress = Progress("importing")
    known = stored = n_bytes = read = 0
    reason = ""
    try:
        here = tier.descriptions()
        _compare(package, here)
        # Of a namespace that is here more may be known than a file can tell.
        origins = {root: o for root, o in package.origins.items() if not here.get(root)}
        for batch in _batches(package):
            present = tier.present([row.key for row in batch])
            read += sum(row.record.blob_bytes for row in batch)
            new = [row for row in batch if row.key not in present]
            known += len(batch) - len(new)
            foreign = [checked(row, package.blob(row), _codec(package, row)) for row in new]
            held, reason = tier.adopt(foreign, origins)
            stored += held
            n_bytes += sum(len(f.blob) for f in foreign[:held])
            progress(read, package.blob_bytes)
            if reason:
                break
    except KeyboardInterrupt:
        reason = "stopped"
    except BadFile as error:
        reason = str(error)
    finally:
        progress.end()
        tier.close()
    return _Done(stored, n_bytes, known, package.n_blocks - known - stored, reason)


def _batches(package: Package) -> Iterator[list[Row]]:
    batch: list[Row] = []
    n_bytes = 0
    for row in package.rows():
        batch.append(row)
        n_bytes += row.record.blob_bytes
        if n_bytes >= _BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _say(options: argparse.Namespace, done: _Done) -> None:
    if options.json:
        print(json.dumps({**asdict(done), "dry_run": options.dry_run}, indent=2))
        return
    what = "would be stored" if options.dry_run else "stored"
    print(
        f"{options.dir}: {done.stored} blocks {what}, {bytes_text(done.stored_bytes)}; "
        f"{done.known} were there"
    )
    if done.reason:
        print(f"{done.left_out} blocks not stored: {_REASONS.get(done.reason, done.reason)}")
