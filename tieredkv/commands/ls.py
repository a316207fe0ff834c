"""``tieredkv ls``: what is stored, as trees of shared prefixes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tieredkv.commands.console import FINE, STATUS, add_command, count, show
from tieredkv.core import ColdTierUnavailable
from tieredkv.keys import PREFIX_ID_DIGITS
from tieredkv.quantize import QuantizingCodec
from tieredkv.tiers.cold import ColdReader
from tieredkv.tiers.ledger import Rows
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.tree import BY_USE, SORTS, Node, Tree, ends, grow
from tieredkv.units import age_text, bytes_text, left_text

# Branches of a prefix, and levels, that are shown to people if they don't say how many.
_LIMIT, _DEPTH = 10, 6

# Token ids whose text is shown at each end of a prefix, and characters of it.
_TOKENS, _CHARACTERS = 24, 48

_LS_HELP = f"""\
examples:
  tieredkv ls                                      all models, what was used last first
  tieredkv ls --sort size --limit 5                what takes most room
  tieredkv ls --model 'mlx-community/Qwen*' --text with the words that each prefix adds
  tieredkv ls --tokenizer ./model                  the same, with a tokenizer from elsewhere
  tieredkv ls --json | jq '.models[].prefixes[].id'

Each line is a prefix: its id, the tokens that it adds to the one above it, the encoded size of
these, when it or what is below it was used last, and how many later requests found it. Prompts
that part inside of one block of tokens are lines side by side.

{STATUS.format(failed="it can't be read, or there is no such tokenizer")}
"""


@dataclass(frozen=True, slots=True)
class _Line:
    """A prefix that is shown, with token ids of the start and end of what it adds."""

    node: Node
    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Listing:
    """A model, those of its prefixes that are shown, and how many are not, by their parent."""

    tree: Tree
    lines: tuple[_Line, ...]
    hidden: dict[str | None, int]


def add(commands: Any) -> None:
    """Add the command's parser."""
    ls = add_command(
        commands,
        "ls",
        "what is stored, as trees of shared prefixes",
        "List models and what is stored of them, as trees of the prefixes that prompts share. "
        "Reads only; a server may be running on the directory.",
        _LS_HELP,
        run,
    )
    ls.add_argument(
        "--model",
        metavar="NAME",
        help="only of this model: its name or identity, or a pattern such as '*8B*'",
    )
    ls.add_argument(
        "--sort",
        choices=SORTS,
        default=BY_USE,
        help="what comes first: used last, largest, or most hits (default: %(default)s)",
    )
    ls.add_argument(
        "--limit",
        type=count,
        metavar="N",
        help=f"show N branches of each prefix (default: {_LIMIT}; with --json all)",
    )
    ls.add_argument(
        "--depth",
        type=count,
        metavar="N",
        help=f"show N levels (default: {_DEPTH}; with --json all)",
    )
    text = ls.add_mutually_exclusive_group()
    text.add_argument(
        "--tokenizer",
        metavar="PATH|REPO",
        help="show text, by the tokenizer of this folder, or repository in the hub's local cache",
    )
    text.add_argument(
        "--text",
        action="store_true",
        help="show text where a model's own tokenizer is here, at its path or in the hub's cache",
    )
    ls.add_argument(
        "--salted",
        action="store_true",
        help="show text also of what is stored under a salt: prompts that are kept apart",
    )


def run(options: argparse.Namespace) -> int:
    """Print what there is."""
    tokenizers = _Tokenizers(options.tokenizer, options.text)
    reader = ColdReader(options.dir, QuantizingCodec())
    try:
        listings = reader.consult(lambda rows: _listings(rows, options))
    finally:
        reader.close()
    if listings is None:
        raise ColdTierUnavailable(
            f"{options.dir} can't be read; tieredkv verify tells what is wrong with it"
        )
    if options.json:
        models = [_as_json(listing, tokenizers, options.salted) for listing in listings]
        print(json.dumps({"models": models}, indent=2))
        return FINE
    if not listings:
        print("nothing is stored" + f" of a model like {options.model}" * bool(options.model))
    for i, listing in enumerate(listings):
        show([""] * bool(i) + _as_lines(listing, tokenizers, options.salted))
    return FINE


def _listings(rows: Rows, options: argparse.Namespace) -> list[_Listing]:
    everything = options.json
    limit = options.limit if options.limit or everything else _LIMIT
    depth = options.depth if options.depth or everything else _DEPTH
    wants_text = bool(options.tokenizer or options.text)
    trees = grow(rows, Criteria(model=options.model).names, options.sort)
    return [_listing(rows, tree, limit, depth, wants_text) for tree in trees]


def _listing(
    rows: Rows, tree: Tree, limit: int | None, depth: int | None, wants_text: bool
) -> _Listing:
    """What is shown of a tree: so many branches of each prefix, down to so many levels."""
    lines: list[_Line] = []
    shown: dict[str | None, int] = {None: 0}
    hidden: dict[str | None, int] = {}
    for node in tree.nodes:
        if node.parent not in shown:
            continue
        if shown[node.parent] == limit or node.level == depth:
            hidden[node.parent] = hidden.get(node.parent, 0) + 1
            continue
        shown[node.parent] += 1
        shown[node.id] = 0
        lines.append(_Line(node, *(ends(rows, node, _TOKENS) if wants_text else ((), ()))))
    return _Listing(tree, tuple(lines), hidden)


class _Tokenizers:
    """Tokenizers by model, each loaded when it is needed first."""

    def __init__(self, name: str | None, own: bool) -> None:
        self._own = own
        self._common: Any = None
        self._known: dict[str, Any] = {}
        if name:
            from tieredkv.prompts import tokenizer_of  # late: it loads mlx

            self._common = tokenizer_of(name)

    def of(self, model: str) -> Any:
        """That of a model, None if none is wanted or none is here."""
        if not self._own:
            return self._common
        if model not in self._known:
            self._known[model] = self._load(model)
        return self._known[model]

    @staticmethod
    def _load(model: str) -> Any:
        from tieredkv.prompts import NoTokenizer, tokenizer_of  # late: it loads mlx

        try:
            return tokenizer_of(model)
        except NoTokenizer:
            return None


def _words(line: _Line, tokenizer: Any) -> tuple[str, str]:
    """The text at the start and at the end of what a prefix adds."""
    from tieredkv.prompts import as_line  # late: it loads mlx

    start, end = as_line(tokenizer, line.start), as_line(tokenizer, line.end)
    return _cut(start, _CHARACTERS), _cut(end[::-1], _CHARACTERS)[::-1]


def _cut(text: str, n: int) -> str:
    return text if len(text) <= n else text[:n].rpartition(" ")[0] or text[:n]


def _reader(listing: _Listing, tokenizers: _Tokenizers, shows_salted: bool) -> Any:
    """The tokenizer for a model's text; None if that isn't to be shown."""
    tree = listing.tree
    return None if tree.salted and not shows_salted else tokenizers.of(tree.name)


def _as_lines(listing: _Listing, tokenizers: _Tokenizers, shows_salted: bool) -> list[str]:
    tokenizer = _reader(listing, tokenizers, shows_salted)
    drawn = list(_drawn(listing))
    left = max((len(d.branch) for d in drawn), default=0) + PREFIX_ID_DIGITS
    columns = zip(*(_cells(line.node) for line in listing.lines), strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = _head(listing.tree)
    for d in drawn:
        if isinstance(d.what, int):
            lines.append(f"{d.branch}… {d.what:,} more")
            continue
        cells = zip(_cells(d.what.node), widths, strict=True)
        *numbers, more = (cell.rjust(width) for cell, width in cells)
        columns_text = "  ".join((*numbers, more.strip())).rstrip()
        lines.append(f"{(d.branch + d.what.node.id).ljust(left)}  {columns_text}")
        if tokenizer is not None:
            start, end = _words(d.what, tokenizer)
            lines.append(f"{d.under}{start}{' … ' * bool(end)}{end}")
    return lines


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A line that is shown, or a number of those that aren't, and what is drawn in front of it and
    of the text under it.
    """

    what: _Line | int
    branch: str
    under: str


def _drawn(listing: _Listing) -> Iterator[_Drawn]:
    """All lines in order, with the tree that they make."""
    below: dict[str | None, list[_Line | int]] = {}
    for line in listing.lines:
        below.setdefault(line.node.parent, []).append(line)
    for parent, n_hidden in listing.hidden.items():
        below.setdefault(parent, []).append(n_hidden)

    def branches(parent: str | None, stem: str) -> list[tuple[_Line | int, str, bool]]:
        items = below.get(parent, [])
        return [(what, stem, i == len(items) - 1) for i, what in enumerate(items)][::-1]

    stack = branches(None, "")
    while stack:
        what, stem, is_last = stack.pop()
        branch, under = stem + ("└─ " if is_last else "├─ "), stem + ("   " if is_last else "│  ")
        inner = [] if isinstance(what, int) else branches(what.node.id, under)
        yield _Drawn(what, branch, under + ("│  " if inner else "   "))
        stack += inner


def _head(tree: Tree) -> list[str]:
    extras = [f"adapter {tree.adapter}"] * bool(tree.adapter) + [f"draft {tree.draft}"] * bool(
        tree.draft
    )
    extras += ["NOT EXACT: --cold-quantize q8"] * (tree.cold_quantize == "q8")
    return [
        f"{tree.name or tree.model}{' (salted)' * tree.salted}: {tree.blocks:,} blocks, "
        f"{bytes_text(tree.blob_bytes)}",
        f"  {', '.join([tree.model, *extras, tree.host])}",
    ]


def _cells(node: Node) -> tuple[str, ...]:
    more = ["pinned"] * node.pinned
    if node.expires:
        more.append(left_text(node.expires / 1e9 - time.time()))
    more += [f"{bytes_text(node.freed_bytes)} with all below"] * bool(node.n_children)
    more += [f"{node.n_snapshots:,} snapshots"] * bool(node.n_snapshots)
    more += [f"{node.n_windows:,} windows"] * bool(node.n_windows)
    return (
        f"{'+' * bool(node.parent)}{node.tokens:,} tokens",
        bytes_text(node.blob_bytes),
        age_text(time.time() - node.last_use / 1e9),
        f"{node.uses:,} hits",
        ", ".join(more),
    )


def _as_json(listing: _Listing, tokenizers: _Tokenizers, shows_salted: bool) -> dict[str, object]:
    tree = listing.tree
    tokenizer = _reader(listing, tokenizers, shows_salted)
    return {
        "name": tree.name or tree.model,
        "model": tree.model,
        "adapter": tree.adapter,
        "draft": tree.draft,
        "host": tree.host,
        "salted": tree.salted,
        "cold_quantize": tree.cold_quantize,
        "block_tokens": tree.block_tokens,
        "blocks": tree.blocks,
        "bytes": tree.blob_bytes,
        "left_out": sum(listing.hidden.values()),
        "prefixes": [_node_json(line, tokenizer) for line in listing.lines],
    }


def _node_json(line: _Line, tokenizer: Any) -> dict[str, object]:
    node = line.node
    start, end = _words(line, tokenizer) if tokenizer is not None else (None, None)
    return {
        "id": node.id,
        "parent": node.parent,
        "level": node.level,
        "blocks": node.blocks,
        "tokens": node.tokens,
        "prefix_tokens": node.prefix_tokens,
        "snapshots": node.n_snapshots,
        "windows": node.n_windows,
        "bytes": node.blob_bytes,
        "prefix_bytes": node.prefix_bytes,
        "freed_bytes": node.freed_bytes,
        "last_use": node.last_use,
        "uses": node.uses,
        "pinned": node.pinned,
        "expires": node.expires,
        "branches": node.n_children,
        "start": start,
        "end": end,
    }
