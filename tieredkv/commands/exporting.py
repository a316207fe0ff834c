"""``tieredkv export``: a part of a cold tier as one file."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tieredkv.commands.console import FINE, STATUS, Progress, add_command
from tieredkv.commands.mlxfiles import add_mlx, run_export
from tieredkv.commands.salts import add_salts, given_salt
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader
from tieredkv.tiers.portable import BadFile, Written, write
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.selection import Chosen, Selection
from tieredkv.units import bytes_text, duration

_HELP = f"""\
examples:
  tieredkv export prompts.tkv                            all prompts that have no salt
  tieredkv export qwen.tkv --model '*Qwen3*' --newer-than 7d
  tieredkv export one.tkv --id 3f9a61c2                  one prefix, as tieredkv ls names it
  tieredkv export alice.tkv --cache-salt alice           one tenant's
  tieredkv import prompts.tkv --dir /srv/prompts         on another machine
  tieredkv export one.safetensors --mlx --id 3f9a61c2    for mlx_lm.generate --prompt-cache-file
  tieredkv export doc.safetensors --mlx --model ./model --prompt doc.txt

The file holds prompts in the clear: it is made readable by you alone. Blocks go with all blocks
before them. What a program with other versions of mlx or mlx-lm, or on another kind of device,
computed is not found by this one: state is exact or a miss.

A file of mlx-lm holds one prompt. Give mlx_lm.generate the question alone: it goes on where the
prompt ends, as after mlx_lm.cache_prompt. What is not stored of a prompt is computed.

{STATUS.format(failed="nothing was written; a file that was there is as it was")}
"""


def add(commands: Any) -> None:
    """Add the command's parser."""
    export = add_command(
        commands,
        "export",
        "write prompts into one portable file",
        "Write blocks of a cold tier, as they are stored, into one file with a manifest and "
        "checksums. Reads only; servers may be running on the directory.",
        _HELP,
        run,
    )
    export.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    export.add_argument(
        "--model",
        metavar="NAME",
        help="of this model: its name or identity as stats shows them, or a pattern such as '*8B*'",
    )
    export.add_argument(
        "--id",
        dest="ids",
        action="append",
        type=_id,
        default=[],
        metavar="ID",
        help="the prefix that ends at this block: 6 or more digits of its key; may be repeated",
    )
    export.add_argument(
        "--newer-than",
        type=duration,
        metavar="TIME",
        help="used within this time: 90s, 45m, 12h, 30d, 2w",
    )
    add_salts(export)
    export.add_argument(
        "--salted",
        action="store_true",
        help="also what was stored under salts that aren't given; without them it can be used only "
        "by who knows them",
    )
    add_mlx(export)
    export.add_argument("--force", action="store_true", help="replace FILE if it is there")


def _id(text: str) -> str:
    if len(text) < 6 or not set(text.lower()) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is not 6 or more hexadecimal digits")
    return text.lower()


def run(options: argparse.Namespace) -> int:
    """Write the file."""
    if options.file.exists() and not options.force:
        options.parser.error(f"{options.file} is there already; --force replaces it")
    if options.mlx:
        return run_export(options)
    reader = ColdReader(options.dir, QuantizingCodec())
    try:
        chosen = reader.choose(_selection(options))
        if not chosen.rows:
            raise BadFile(_nothing(chosen))
        written = _written(options, reader, chosen)
    except OSError as error:
        raise BadFile(f"{options.file}: {error.strerror or error}") from error
    finally:
        reader.close()
    _say(options, chosen, written)
    return FINE


def _selection(options: argparse.Namespace) -> Selection:
    salt = given_salt(options)
    age = options.newer_than
    return Selection(
        Criteria(model=options.model, salt=salt),
        ids=tuple(options.ids),
        since=None if age is None else time.time_ns() - int(age * 1e9),
        salted=options.salted or bool(salt),
    )


def _nothing(chosen: Chosen) -> str:
    hidden = f"; {chosen.hidden} blocks have a salt (--salted takes them)" if chosen.hidden else ""
    return f"no blocks to export{hidden}"


def _written(options: argparse.Namespace, reader: ColdReader, chosen: Chosen) -> Written:
    progress = Progress("exporting")
    total = chosen.blob_bytes
    try:
        return write(
            options.file,
            chosen.rows,
            chosen.origins,
            reader.blob,
            lambda done: progress(done, total),
        )
    finally:
        progress.end()


def _say(options: argparse.Namespace, chosen: Chosen, written: Written) -> None:
    size = options.file.stat().st_size
    if options.json:
        said = {**asdict(written), "file_bytes": size, "hidden": chosen.hidden}
        print(json.dumps(said, indent=2))
        return
    lines = [f"{options.file}: {written.blocks} blocks, {bytes_text(size)}"]
    if written.left_out:
        lines.append(f"  {written.left_out} blocks left out: damaged, or gone meanwhile")
    if chosen.hidden:
        lines.append(f"  {chosen.hidden} blocks left out: they have a salt (--salted takes them)")
    print("\n".join(lines))
