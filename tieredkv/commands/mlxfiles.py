"""``tieredkv export --mlx`` and ``import --mlx``: mlx-lm's own prompt-cache files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieredkv.commands.console import FINE, MISUSED, Progress
from tieredkv.commands.salts import given_salt
from tieredkv.core import ColdTierUnavailable
from tieredkv.keys import tenant
from tieredkv.prompt_files import BadPrompt, Prompt, of_fields, of_text
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader
from tieredkv.tiers.health import DATA_NAME
from tieredkv.tiers.portable import BadFile
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.records import described
from tieredkv.tiers.selection import Selection

if TYPE_CHECKING:
    from tieredkv.mlxfile import Prompter, Saved
    from tieredkv.prompt_cache import TieredPromptCache

_COLD_BYTES = 16 << 30


def add_mlx(command: argparse.ArgumentParser) -> None:
    """Add the flags that go with --mlx, but for --model."""
    group = command.add_argument_group("mlx-lm's own files, one prompt each")
    group.add_argument(
        "--mlx",
        action="store_true",
        help="FILE is a .safetensors file of mlx_lm.cache_prompt and mlx_lm.generate",
    )
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--text", metavar="TEXT", help="the prompt: a user's message")
    prompt.add_argument(
        "--prompt", type=Path, metavar="TEXTFILE", help="the prompt: a user's message, in a file"
    )
    prompt.add_argument(
        "--messages",
        type=Path,
        metavar="JSONFILE",
        help="the prompt: messages, in a file",
    )
    prompt.add_argument("--tokens", metavar="IDS", help="the prompt: a JSON list of token ids")
    group.add_argument(
        "--raw", action="store_true", help="put no chat template around --text and --prompt"
    )
    group.add_argument("--adapter-path", metavar="PATH", help="weights of an adapter")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="trust code of the tokenizer"
    )


def run_export(options: argparse.Namespace) -> int:
    """Write one prompt as mlx-lm does."""
    prompt = _prompt(options)
    if (prompt is None) == (len(options.ids) != 1):
        options.parser.error("--mlx takes one prompt: one --id, or --text and the like")
    if prompt is not None and options.model is None:
        options.parser.error("--mlx needs --model to compute a prompt")
    try:
        saved = _saved(options, prompt)
    except OSError as error:
        raise BadFile(f"{options.file}: {error.strerror or error}") from error
    _say(options, {"tokens": saved.tokens, "computed": saved.computed}, "written")
    return FINE


def run_import(options: argparse.Namespace) -> int:
    """Store the prompt of a file that mlx-lm wrote."""
    prompt = _prompt(options)
    if prompt is None or options.model is None:
        options.parser.error(
            "--mlx needs --model, and the prompt that the file was made from: --text, --prompt, "
            "--messages or --tokens; such a file doesn't have it"
        )
        return MISUSED
    return _inserted(options, prompt)


def _prompt(options: argparse.Namespace) -> Prompt | None:
    """The prompt that the flags give, if they do. Ends the command if they give a bad one."""
    role = "prompt" if options.raw else "user"
    try:
        if options.text is not None:
            return of_text("--text", options.text, role)
        if options.prompt is not None:
            return of_text(str(options.prompt), options.prompt.read_text("utf-8"), role)
        if options.messages is not None:
            return _of_json("messages", options.messages.read_text("utf-8"))
        if options.tokens is not None:
            return _of_json("tokens", options.tokens)
    except (BadPrompt, OSError, ValueError, RecursionError) as error:
        options.parser.error(str(error))
    return None


def _of_json(field: str, text: str) -> Prompt:
    found = json.loads(text)
    return of_fields(f"--{field}", found if isinstance(found, dict) else {field: found})


def _saved(options: argparse.Namespace, prompt: Prompt | None) -> Saved:
    # Late: it loads mlx.
    from tieredkv import mlxfile

    if prompt is None:
        return _saved_id(options)
    prompter = _prompter(options)
    progress = Progress("computing")
    with _cache(options, prompter) as cache:
        tokens = _salted(options, prompt, prompter.tokens(prompt))
        try:
            return mlxfile.save_prompt(options.file, prompter, cache, tokens, progress)
        finally:
            progress.end()


def _saved_id(options: argparse.Namespace) -> Saved:
    from tieredkv import mlxfile  # late: it loads mlx

    salt = given_salt(options)
    reader = ColdReader(options.dir, QuantizingCodec())
    try:
        chosen = reader.choose(
            Selection(Criteria(options.model, salt), tuple(options.ids), salted=True)
        )
        chain = [row for row in chosen.rows if not row.is_state]
        blocks = reader.load([row.key for row in chain])
        if len(blocks) < len(chain):
            raise mlxfile.NotStored("a block before it was damaged, or removed meanwhile")
        state = [b for row in chosen.rows if row.is_state for b in reader.load([row.key])]
        fields = described(chosen.origins[blocks[0].root].description)
        # A pattern is no path.
        name = str(fields.get("name") or fields.get("model"))
        return mlxfile.save_blocks(options.file, name, str(fields["layout"]), blocks, state)
    finally:
        reader.close()


def _inserted(options: argparse.Namespace, prompt: Prompt) -> int:
    from tieredkv import mlxfile  # late: it loads mlx

    prompter = _prompter(options)
    progress = Progress("computing")
    off = None
    with _cache(options, prompter) as cache:
        tokens = _salted(options, prompt, prompter.tokens(prompt))
        if options.trust:
            print(
                "tieredkv: --trust: what the file holds is not computed. If it is of another "
                "prompt or other weights, answers to this prompt will be wrong",
                file=sys.stderr,
            )
            mlxfile.trust_file(options.file, prompter, cache, tokens)
        else:
            try:
                off = mlxfile.insert_file(options.file, prompter, cache, tokens, progress)
            finally:
                progress.end()
        is_stored = cache.flush() and not cache.stats().refused
        if not is_stored:
            raise mlxfile.NotStored(
                f"not all of it could be stored: {cache.stats().refused or cache.stats().dropped}"
            )
    _say(options, {"tokens": len(tokens), "difference": off and round(off.all, 4)}, "stored")
    return FINE


def _prompter(options: argparse.Namespace) -> Prompter:
    from tieredkv.mlxfile import Prompter  # late: it loads mlx

    return Prompter(options.model, options.adapter_path, options.trust_remote_code)


@contextmanager
def _cache(options: argparse.Namespace, prompter: Prompter) -> Iterator[TieredPromptCache]:
    """The store, whose cap stays as it is, with the model bound."""
    from tieredkv.prompt_cache import TieredPromptCache  # late: it loads mlx

    cap = _cap(options.dir)
    with TieredPromptCache(
        options.dir, cold_bytes=cap or _COLD_BYTES, salt=(options.salt or "").encode()
    ) as cache:
        if not cache.stats().cold.cap_bytes:
            raise ColdTierUnavailable(f"{options.dir} can't be used; the line above says why")
        cache.bind(prompter.key, prompter.model)
        yield cache


def _cap(folder: Path) -> int:
    """The cap of a store that is there, else 0."""
    if not (folder / DATA_NAME).exists():
        return 0
    reader = ColdReader(folder, QuantizingCodec())
    try:
        return reader.cap_bytes
    finally:
        reader.close()


def _salted(options: argparse.Namespace, prompt: Prompt, tokens: list[int]) -> list[int]:
    from tieredkv.prompt_cache import SaltedPrompt  # late: it loads mlx

    salt = prompt.cache_salt or options.cache_salt or ""
    return SaltedPrompt(tokens, tenant(options.api_key or "", salt))


def _say(options: argparse.Namespace, said: dict[str, Any], what: str) -> None:
    if options.json:
        print(json.dumps(said, indent=2))
        return
    tokens = said.pop("tokens")
    more = "".join(f"; {name} {value}" for name, value in said.items() if value is not None)
    print(f"{options.file}: {tokens} tokens {what}{more}")
