"""What a cold directory holds, for people: a report by namespace that names no salt."""

from __future__ import annotations

from dataclasses import dataclass

from tieredkv.core import BlockKey
from tieredkv.tiers import pins
from tieredkv.tiers.ledger import CAP, DISK, ENCODED, Origin, Rows
from tieredkv.tiers.records import Record, Totals, described


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """What one namespace holds. Sizes in bytes, uses in nanoseconds of Unix time."""

    root: str
    name: str
    model: str
    adapter: str
    draft: str
    host: str
    shard: str
    salted: bool
    block_tokens: int
    layout: str
    cold_quantize: str
    blocks: int
    raw_bytes: int
    blob_bytes: int
    oldest_use: int
    newest_use: int


@dataclass(frozen=True, slots=True)
class ColdUsage:
    """What a cold directory holds: bytes of its file, of its pages in use, and its cap. And what
    went into it since the file was made, but for the last commit of each process: encoded bytes of
    blocks, and bytes that went to the disk for them, see `core.ColdCounters`. ``pinned_blocks``
    can't be evicted for a pin of theirs or of one below; their pieces take ``pinned_bytes``.
    """

    file_bytes: int
    live_bytes: int
    cap_bytes: int
    blocks: int
    encoded_bytes: int
    disk_bytes: int
    pinned_blocks: int
    pinned_bytes: int
    namespaces: tuple[NamespaceUsage, ...]


def survey(rows: Rows, file_bytes: int) -> ColdUsage:
    """The usage as one transaction sees it. Reads every index record."""
    spans: dict[bytes, tuple[int, int]] = {}
    for key, data in rows.records():
        root, last = Record.unpack(data).root, rows.use(key).used
        oldest, newest = spans.get(root, (last, last))
        spans[root] = min(oldest, last), max(newest, last)
    namespaces = tuple(
        _namespace_usage(row.root, row.origin, row.totals, spans.get(row.root, (0, 0)))
        for row in rows.namespaces()
    )
    cap = rows.number(CAP) or 0
    pinned = pins.protected(rows)
    return ColdUsage(
        file_bytes,
        rows.live_bytes(),
        cap,
        rows.n_blocks,
        rows.number(ENCODED) or 0,
        rows.number(DISK) or 0,
        len(pinned),
        sum(map(rows.piece_bytes, pinned.values())),
        namespaces,
    )


def _namespace_usage(
    root: BlockKey, origin: Origin, totals: Totals, span: tuple[int, int]
) -> NamespaceUsage:
    fields = described(origin.description)
    texts = {
        name: str(fields.get(name, ""))
        for name in ("name", "model", "adapter", "draft", "host", "shard", "layout")
    }
    tokens = fields.get("block_tokens")
    return NamespaceUsage(
        root=root.hex(),
        **texts,
        salted=bool(fields.get("salted")),
        block_tokens=tokens if isinstance(tokens, int) else 0,
        cold_quantize=str(fields.get("cold_quantize", "none")),
        blocks=totals.blocks,
        raw_bytes=totals.raw_bytes,
        blob_bytes=totals.blob_bytes,
        oldest_use=span[0],
        newest_use=span[1],
    )
