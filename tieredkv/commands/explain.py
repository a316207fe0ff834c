"""``tieredkv explain``: how far a prompt would hit, and why not farther."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tieredkv.commands.console import FINE, STATUS, add_command, count, show
from tieredkv.core import BLOCK_TOKENS, COLD_QUANTIZE, Namespace, Quantization, TieredKVError
from tieredkv.explain import Divergence, Explanation, Wanted
from tieredkv.identity import fingerprint
from tieredkv.keys import as_tokens, tenant, tenant_salt
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader
from tieredkv.tiers.null import NullTier
from tieredkv.units import unicode_text

_EXPLAIN_HELP = f"""\
examples:
  tieredkv explain --model ./model prompt.txt                   a completion's prompt, from a file
  tieredkv explain --model org/repo --messages request.json     a chat request, by its template
  echo -n 'Once upon' | tieredkv explain --model ./model        from standard input
  tieredkv explain --model ./model --tokens '[1, 15043, 29892]' --json
  tieredkv explain --model ./model --messages chat.json --cache-salt alice

Tells how many tokens a server on this machine would take from the disk, where what is stored goes
on differently, or in what it differs: weights, adapter, versions, salt, cache layout. Loads no
model: models are compared by their files. What a server has in memory only isn't seen.

{STATUS.format(failed="the store can't be read, or the prompt can't be tokenized")}
"""


class _BadPrompt(TieredKVError):
    """A file or text that isn't what it should be."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    explain = add_command(
        commands,
        "explain",
        "how far a prompt would hit, and why not farther",
        "Look a prompt up and tell how far it would hit, and why not farther. Reads only; a server "
        "may be running on the directory.",
        _EXPLAIN_HELP,
        run,
    )
    prompt = explain.add_argument_group("prompt").add_mutually_exclusive_group()
    prompt.add_argument(
        "file", nargs="?", metavar="FILE", help="text of a completion; - or none: standard input"
    )
    prompt.add_argument("--text", type=unicode_text, metavar="TEXT", help="text of a completion")
    prompt.add_argument(
        "--messages",
        metavar="FILE",
        help="JSON of a chat request, or only of its messages; - is standard input",
    )
    prompt.add_argument(
        "--tokens", metavar="IDS", help="token ids: a JSON list, a file of one, or -"
    )
    model = explain.add_argument_group("model, as the server was given it")
    model.add_argument("--model", required=True, metavar="PATH|REPO", help="folder or repository")
    model.add_argument("--adapter", "--adapter-path", metavar="PATH", help="adapter")
    model.add_argument("--draft", "--draft-model", metavar="PATH|REPO", help="draft model")
    model.add_argument(
        "--tokenizer", metavar="PATH|REPO", help="another tokenizer than the model's own"
    )
    model.add_argument("--chat-template", metavar="TEXT", help="another template than its own")
    model.add_argument(
        "--chat-template-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="as the server's",
    )
    model.add_argument("--kv-bits", type=int, metavar="N", help="as the server's")
    model.add_argument("--kv-group-size", type=int, default=64, metavar="N", help="(default: 64)")
    model.add_argument(
        "--quantized-kv-start", type=int, default=5000, metavar="N", help="(default: 5000)"
    )
    model.add_argument(
        "--prefill-step-size",
        type=count,
        default=2048,
        metavar="N",
        help="the server's, or its --prefill-checkpoint if that is less; counts with --kv-bits "
        "only (default: 2048)",
    )
    model.add_argument(
        "--cold-quantize", choices=COLD_QUANTIZE, default="none", help="(default: none)"
    )
    model.add_argument(
        "--block-tokens",
        type=count,
        default=BLOCK_TOKENS,
        metavar="N",
        help=f"of a cache used as a library (default: {BLOCK_TOKENS})",
    )
    whose = explain.add_argument_group("whose prompt it is")
    whose.add_argument(
        "--salt",
        type=unicode_text,
        metavar="TEXT",
        help="the salt of a cache used as a library",
    )
    whose.add_argument(
        "--cache-salt", type=unicode_text, metavar="TEXT", help="the request's cache_salt"
    )
    whose.add_argument(
        "--api-key",
        type=unicode_text,
        metavar="KEY",
        help="the request's key, for a server with --cache-salt-from-api-key",
    )


def run(options: argparse.Namespace) -> int:
    """Explain it."""
    # Late: they load mlx.
    from tieredkv.inquiry import Inquiry
    from tieredkv.prompt_cache import host_of

    tokenizer = _tokenizer(options)
    tokens = _tokens(options, tokenizer)
    how = _quantization(options)
    reader = ColdReader(options.dir, QuantizingCodec())
    try:
        wanted = Wanted(_namespace(options, host_of(how)), knows_weights=False)
        ids = as_tokens(tokens)
        explained = Inquiry(NullTier(), reader, options.dir, how).explain(wanted, ids)
    except (TypeError, ValueError, OverflowError) as e:
        raise _BadPrompt(f"the prompt can't be used: {e}") from e
    finally:
        reader.close()
    if options.json:
        print(json.dumps(_as_json(explained, tokenizer), indent=2))
    else:
        show(_as_lines(explained, tokenizer))
    return FINE


# ---- what was asked


def _tokenizer(options: argparse.Namespace) -> Any:
    """The model's, or the one that is given; None if none is here and none is needed."""
    from tieredkv.prompts import NoTokenizer, tokenizer_of  # late: it loads mlx

    config = {"chat_template": options.chat_template} if options.chat_template else {}
    try:
        return tokenizer_of(options.tokenizer or options.model, **config)
    except NoTokenizer:
        if options.tokens is None or options.tokenizer:
            raise
        return None


def _tokens(options: argparse.Namespace, tokenizer: Any) -> Sequence[int]:
    from tieredkv.prompts import of_chat, of_text  # late: it loads mlx

    if options.tokens is not None:
        is_list = options.tokens.lstrip().startswith("[")
        found = _parsed(options.tokens if is_list else _read(options.tokens), "--tokens")
        if not isinstance(found, list) or not all(type(token) is int for token in found):
            raise _BadPrompt("--tokens must be a JSON list of token ids")
        return found
    if options.messages is not None:
        found = _parsed(_read(options.messages), options.messages)
        request = found if isinstance(found, dict) else {"messages": found}
        return of_chat(tokenizer, request, options.chat_template_args)
    text = options.text
    return of_text(tokenizer, _read(options.file or "-") if text is None else text)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise _BadPrompt(f"{name} can't be read: {e}") from e


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise _BadPrompt(f"{name} is not JSON: {e}") from e


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _quantization(options: argparse.Namespace) -> Quantization | None:
    if options.kv_bits is None:
        return None
    return Quantization(
        options.kv_bits,
        options.kv_group_size,
        options.quantized_kv_start,
        options.prefill_step_size,
    )


def _namespace(options: argparse.Namespace, host: str) -> Namespace:
    try:
        model, adapter, draft = (
            fingerprint(name) if name else ""
            for name in (options.model, options.adapter, options.draft)
        )
    except (OSError, ValueError) as e:
        raise _BadPrompt(f"the model's files can't be read: {e}") from e
    whose = tenant(options.api_key or "", options.cache_salt or "")
    return Namespace(
        model,
        adapter,
        draft,
        host,
        salt=tenant_salt((options.salt or "").encode(), whose),
        block_tokens=options.block_tokens,
        name=options.model,
        cold_quantize=options.cold_quantize,
    )


# ---- the answer


def _as_json(explained: Explanation, tokenizer: Any) -> dict[str, Any]:
    found = asdict(explained)
    if explained.divergence is not None:
        found["divergence"] |= {
            f"{side}_text": _text(getattr(explained.divergence, side), tokenizer)
            for side in ("before", "prompt", "stored")
        }
    return found


def _text(tokens: Sequence[int], tokenizer: Any) -> str | None:
    from tieredkv.prompts import as_literal  # late: it loads mlx

    return None if tokenizer is None else as_literal(tokenizer, tokens)


def _as_lines(explained: Explanation, tokenizer: Any) -> list[str]:
    lines = [explained.text]
    if explained.id:
        lines.append(f"  from prefix {explained.id}")
    if explained.divergence is not None:
        lines += _parting(explained.divergence, tokenizer)
    if explained.differences:
        lines.append("  what differs:")
        width = max(len(d.field) for d in explained.differences)
        lines += [
            f"    {d.field.ljust(width)}  {d.stored} in the store, {d.wanted} asked for"
            for d in explained.differences
        ]
    return [*lines, *[f"  note: {explained.note}"] * bool(explained.note)]


def _parting(divergence: Divergence, tokenizer: Any) -> list[str]:
    """Both sides of the point at which two prompts part."""
    sides = (
        ("both", "…", divergence.before, "|"),
        ("prompt", "|", divergence.prompt, "…"),
        ("stored", "|", divergence.stored, "…"),
    )
    lines = [f"  they part at token {divergence.index:,}:"]
    for name, left, tokens, right in sides:
        text = _text(tokens, tokenizer)
        shown = "" if text is None else f"{left}{text}{right}  "
        lines.append(f"    {name.ljust(6)}  {shown}{list(tokens)}")
    return lines
