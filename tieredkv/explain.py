"""Why a prompt hits as far as it does, or misses: the point at which what is stored goes on
differently, or the field of its namespace that differs.

Looks at rows of a cold tier and at what a match found; knows neither mlx nor models.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np

from tieredkv import keys
from tieredkv.core import BlockKey, Chain, Namespace, Tokens
from tieredkv.tiers.ledger import NamespaceRow, Rows
from tieredkv.tiers.records import described, namespace_of

# Tokens that are shown on each side of a divergence.
AROUND = 12
# A text in place of a value of a namespace that is longer is of no use to anybody.
_LONGEST_VALUE = 80

# How far a hit goes, or why there is none. Those of another namespace are "other_" and a field's
# name.
HIT, ENDED, DIVERGED, EVICTED, EXPIRED = "hit", "ended", "diverged", "evicted", "expired"
STATE, STEPS, PACE = "state", "steps", "pace"
SHORT, EMPTY, ABSENT, AMBIGUOUS = "short", "empty", "absent", "ambiguous"
CHANGED, UNREADABLE = "changed", "unreadable"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which the nearest namespace of the store differs from the one that is wanted.

    ``field`` is one of "model", "weights", "adapter", "draft", "mlx_lm", "mlx", "device",
    "kv_bits", "shard", "salt", "block_tokens", "layout" and "cold_quantize".
    """

    field: str
    stored: str
    wanted: str
    text: str


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a stored prompt and the one that was asked for part: at the token ``index``, counted
    from 0. Token ids ``before`` it, which they share, and what ``prompt`` and ``stored`` go on
    with; some of each.
    """

    index: int
    before: tuple[int, ...]
    prompt: tuple[int, ...]
    stored: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a prompt of ``n_prompt`` tokens would find: a hit of ``n_tokens``, 0 for a miss.

    ``reason`` says in a word why not more, ``text`` in sentences for people: "hit" (all but the
    last token, which is always computed), "ended" (nothing stored goes on like the prompt),
    "diverged", "evicted", "expired", "state" (no snapshot or window before), "steps" (quantized
    while it is computed, so hits end with a step), "pace" (slower to read than to compute), "short"
    (no token to look for), "empty" (nothing stored at all), "absent" (nothing for this model),
    "ambiguous" (several layouts, and no model that was bound), "changed" (the model's files were
    replaced while it was loaded), "unreadable" (the store), or "other_" and the field of the first
    of ``differences``.

    ``n_stored`` tokens of the prompt are there, whether they can be restored or not, and
    ``n_elsewhere`` in the nearest namespace that isn't this model's as it is now, which is the one
    that ``differences`` are about. ``id`` names the prefix that a hit comes from.
    """

    reason: str
    text: str
    n_tokens: int = 0
    n_prompt: int = 0
    n_stored: int = 0
    n_elsewhere: int = 0
    id: str | None = None
    divergence: Divergence | None = None
    differences: tuple[Difference, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A namespace as far as it is known. ``namespace.model`` is only the fingerprint of its files
    if ``knows_weights`` is false: what is in memory is not known before the model is loaded.
    """

    namespace: Namespace
    knows_weights: bool = True


@dataclass(frozen=True, slots=True)
class Stored:
    """A namespace in a store as seen from one that is wanted: how it differs, and how many tokens
    of the prompt it has. Those of another salt aren't looked into, and have none.
    """

    root: BlockKey
    namespace: Namespace
    differences: tuple[Difference, ...]
    n_tokens: int

    @property
    def is_wanted(self) -> bool:
        """Whether it differs in nothing that is known."""
        return not self.differences

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The smaller, the nearer."""
        is_other = any(d.field == "model" for d in self.differences)
        return is_other, -self.n_tokens, len(self.differences)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a match found in a namespace: blocks of ``n_stored`` tokens of the prompt, of which
    ``n_tokens`` make a hit that ends in the block ``key``. ``limit`` says why, if it isn't all of
    them: STATE, STEPS or PACE.
    """

    chain: Chain
    n_tokens: int
    n_stored: int
    key: BlockKey | None = None
    limit: str = ""

    @property
    def last(self) -> int:
        """Index of the block in which what is stored ends."""
        return self.n_stored // self.chain.block_tokens


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a tier has at the end of what was found: token ids of the blocks ``beside`` the
    prompt's next one, and whether that or a later one ``was_evicted``, or that one is there but
    ``has_expired``.
    """

    beside: tuple[bytes, ...] = ()
    was_evicted: bool = False
    has_expired: bool = False


# ---- namespaces


def survey(rows: Rows, wanted: Wanted, tokens: Tokens) -> tuple[Stored, ...]:
    """Every namespace in the store, the nearest first."""
    found = filter(None, (_stored(rows, row, wanted, tokens) for row in rows.namespaces()))
    return tuple(sorted(found, key=lambda stored: stored.rank))


def _stored(rows: Rows, row: NamespaceRow, wanted: Wanted, tokens: Tokens) -> Stored | None:
    fields = described(row.origin.description)
    if not fields:
        return None
    salt = wanted.namespace.salt
    there = namespace_of(fields, salt)
    is_salted = bool(fields.get("salted"))
    has_salt = keys.namespace_key(there) == row.root
    differences = tuple(_differences(there, wanted, is_salted, has_salt))
    is_foreign = is_salted and not has_salt
    n_tokens = 0 if is_foreign else _walk(rows, row.root, there.block_tokens, tokens)
    return Stored(row.root, there, differences, n_tokens)


def _walk(rows: Rows, root: BlockKey, block_tokens: int, tokens: Tokens) -> int:
    """How many leading tokens are in the store below ``root``."""
    if not block_tokens:
        return 0
    parent, n = root, 0
    while n < len(tokens):
        part = tokens[n : n + block_tokens].astype("<i8", copy=False).tobytes()
        key = keys.block_key(parent, part)
        if not rows.has(key):
            beside = rows.neighbours(parent, part)
            return n + max((keys.common_prefix(b.record.tokens, part) for b in beside), default=0)
        parent, n = key, n + len(part) // 8
    return n


def _differences(
    there: Namespace, wanted: Wanted, is_salted: bool, has_salt: bool
) -> Iterator[Difference]:
    here = wanted.namespace
    yield from _model_differences(there, wanted)
    for field in ("adapter", "draft"):
        a, b = getattr(there, field), getattr(here, field)
        if a != b:
            yield _difference(field, a, b, f"stored {_with(field, a)}, asked {_with(field, b)}")
    yield from _host_differences(there.host, here.host)
    if there.shard != here.shard:
        text = f"stored by rank {there.shard} of a distributed model, this is {here.shard}"
        yield _difference("shard", there.shard, here.shard, text)
    if there.block_tokens != here.block_tokens:
        a, b = str(there.block_tokens), str(here.block_tokens)
        yield _difference("block_tokens", a, b, f"stored in blocks of {a} tokens, asked for {b}")
    if there.cold_quantize != here.cold_quantize:
        a, b = there.cold_quantize, here.cold_quantize
        yield _difference(
            "cold_quantize", a, b, f"stored with --cold-quantize {a}, asked for with {b}"
        )
    if here.layout and there.layout != here.layout:
        text = "stored by caches of another layout: other classes, heads, widths or dtypes"
        yield _difference("layout", _layout(there.layout), _layout(here.layout), text)
    if not has_salt:
        yield _salt_difference(is_salted, bool(here.salt))


def _salt_difference(is_salted: bool, is_asked_with_one: bool) -> Difference:
    if is_salted and is_asked_with_one:
        return _difference("salt", "another", "this one", "stored under another salt")
    if is_salted:
        return _difference("salt", "a salt", "none", "stored with a salt, asked without one")
    return _difference("salt", "none", "a salt", "stored without a salt, asked with one")


def _model_differences(there: Namespace, wanted: Wanted) -> Iterator[Difference]:
    here = wanted.namespace
    stored, asked = _identity(there.model), _identity(here.model)
    if stored.files != asked.files or stored.more != asked.more:
        if not _is_same_name(there.name, here.name) or stored.more != asked.more:
            text = f"stored for {there.name or there.model}"
            yield _difference("model", there.name or there.model, here.name or here.model, text)
            return
        text = f"stored for other weights: {stored.files}, and the files are {asked.files} now"
        yield _difference("weights", stored.files, asked.files, text)
        return
    if wanted.knows_weights and stored.weights != asked.weights:
        text = "the weights in memory differ: cast, quantized or adapted after they were loaded"
        if not stored.weights or not asked.weights:
            who = "stored" if not stored.weights else "asked for"
            text = f"{who} by a process that did not bind the model, so its weights aren't known"
        yield _difference("weights", stored.weights or "unknown", asked.weights or "unknown", text)


@dataclass(frozen=True, slots=True)
class _Identity:
    files: str
    weights: str = ""
    more: tuple[str, ...] = ()


def _identity(model: str) -> _Identity:
    """Fingerprint of files, digest of weights in memory and what else a model's key has."""
    if not model.startswith("["):
        return _Identity(model)
    try:
        files, weights, *more = map(str, json.loads(model))
    except ValueError:
        return _Identity(model)
    return _Identity(files, weights, tuple(more))


def files_of(model: str) -> str:
    """The fingerprint of its files in the identity of a model."""
    return _identity(model).files


def _is_same_name(a: str, b: str) -> bool:
    """Whether two names are one model's for people: the same, or paths to folders of one name."""
    return a == b or bool(a and b and PurePath(a).name == PurePath(b).name)


_HOST = re.compile(r"mlx-lm ([^,]*), mlx ([^,]*), ([^,]*)(?:, (.*))?", re.DOTALL)
_HOST_FIELDS = ("mlx_lm", "mlx", "device", "kv_bits")


def _host_differences(stored: str, asked: str) -> Iterator[Difference]:
    a, b = (_HOST.fullmatch(host) for host in (stored, asked))
    if a is None or b is None:
        if stored != asked:
            text = f"stored by {stored or 'an unknown host'}, this is {asked}"
            yield _difference("device", stored, asked, text)
        return
    pairs = zip(_HOST_FIELDS, a.groups(""), b.groups(""), strict=True)
    for field, x, y in pairs:
        if x == y:
            continue
        if field == "kv_bits":
            text = f"stored {_quantized(x)}, asked {_quantized(y)}"
        else:
            name = "" if field == "device" else field.replace("_", "-") + " "
            text = f"stored by {name}{x.strip()}, this is {y.strip()}"
        yield _difference(field, x.strip() or "none", y.strip() or "none", text)


def _quantized(how: str) -> str:
    if not how:
        return "without --kv-bits"
    inside = re.fullmatch(
        r"Quantization\(bits=(\d+), group_size=(\d+), start=(\d+), step=(\d+)\)", how
    )
    if inside is None:
        return f"with {how}"
    bits, group, start, step = inside.groups()
    return f"with --kv-bits {bits} (groups of {group}, from {start} tokens, in steps of {step})"


def _with(field: str, value: str) -> str:
    article = "an" if field == "adapter" else "a"
    return f"with {article} {field} ({value})" if value else f"without {article} {field}"


def _layout(layout: str) -> str:
    """The dtypes and classes of a layout, for people."""
    try:
        layers = json.loads(layout)["layers"]
        kinds = {
            f"{x['kind']} {leaf['heads']}x{leaf['width']} {leaf['dtype']}"
            for x in layers
            for leaf in x["leaves"][:1]
        }
    except (ValueError, KeyError, TypeError):
        return "unknown"
    return f"{len(layers)} layers: {', '.join(sorted(kinds))}"


def _difference(field: str, stored: str, wanted: str, text: str) -> Difference:
    return Difference(
        field, stored[:_LONGEST_VALUE] or "none", wanted[:_LONGEST_VALUE] or "none", text
    )


# ---- reasons


def missed(reason: str, why: str, n_prompt: int) -> Explanation:
    """A miss of which no more is known."""
    return Explanation(reason, f"A miss: {why}.", n_prompt=n_prompt)


def gather(rows: Rows, tokens: Tokens, found: Found) -> Evidence:
    """What a cold tier knows of why ``found`` is all that there is of ``tokens``."""
    parent, query = next_block(tokens, found)
    beside = tuple(rows.neighbours(parent, query)) if query else ()
    chain, first = found.chain, found.last
    whole = keys.chain(chain.root, tokens, chain.block_tokens, chain.keys[:first])
    coming = (*chain.keys[first:], *whole.keys[first:])
    # What has expired is there for some seconds yet.
    now = time.time_ns()
    shared = found.n_stored - first * chain.block_tokens
    longer = (b.key for b in beside if keys.common_prefix(b.record.tokens, query) > shared)
    has_expired = any(rows.has(k) and rows.has_expired(k, now) for k in (*coming[:1], *longer))
    texts = tuple(b.record.tokens for b in beside)
    return Evidence(texts, any(map(rows.is_ghost, coming)), has_expired)


def next_block(tokens: Tokens, found: Found) -> tuple[BlockKey, bytes]:
    """Parent and tokens of the block that the prompt would go on with."""
    chain, i = found.chain, found.last
    start = i * chain.block_tokens
    query = tokens[start : start + chain.block_tokens].astype("<i8", copy=False).tobytes()
    return chain.parent(i), query


def explain(
    tokens: Tokens, found: Found | None, stored: Sequence[Stored], evidence: Evidence
) -> Explanation:
    """Why ``found`` is all that there is of ``tokens``, in a store with these namespaces."""
    n_prompt = len(tokens)
    known = _within(tokens, found, evidence) if found else None
    nearest = next((s for s in stored if not s.is_wanted), None)
    is_here = any(s.is_wanted for s in stored)
    if known and (is_here or known.n_stored or known.reason == EVICTED):
        if nearest is None or not _has_more(nearest, known.n_stored, found):
            return known
        return _elsewhere(known, nearest)
    if n_prompt < 2:
        return _short(n_prompt)
    if nearest is None:
        return Explanation(EMPTY, "A miss: nothing is stored here.", n_prompt=n_prompt)
    return _elsewhere(Explanation(EMPTY, "", n_prompt=n_prompt), nearest)


def _has_more(other: Stored, n_stored: int, found: Found | None) -> bool:
    """Whether another namespace has so much more of the prompt that it is what was meant."""
    if any(d.field == "model" for d in other.differences):
        return False
    least = found.chain.block_tokens if found and n_stored else 1
    return other.n_tokens >= n_stored + least


def _elsewhere(known: Explanation, nearest: Stored) -> Explanation:
    first = nearest.differences[0].field
    lead = _lead(known.n_tokens, known.n_prompt)
    texts = [d.text for d in nearest.differences]
    if first == "model":
        name = nearest.namespace.name or nearest.namespace.model
        reason, text = ABSENT, f"Nothing is stored for this model; the nearest is {name}."
    elif nearest.n_tokens:
        reason = f"other_{first}"
        text = f"{nearest.n_tokens:,} of its tokens are in the store, but not for it: they were "
        text += f"{_listed(texts)}."
    else:
        reason = f"other_{first}"
        text = f"What there is of this model was {_listed(texts)}."
    return replace(
        known,
        reason=reason,
        text=f"{lead}. {text}",
        n_elsewhere=nearest.n_tokens,
        differences=nearest.differences,
    )


def _lead(n_tokens: int, n_prompt: int) -> str:
    return f"A hit of {n_tokens:,} of {n_prompt:,} tokens" if n_tokens else "A miss"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{'; '.join(parts[:-1])}; and {parts[-1]}"


def _short(n_prompt: int) -> Explanation:
    text = "A miss: one token is always computed, and the prompt has no others."
    return Explanation(SHORT, text, n_prompt=n_prompt)


def _within(tokens: Tokens, found: Found, evidence: Evidence) -> Explanation:
    """Why a hit in the namespace itself ends where it does."""
    n, n_prompt = found.n_tokens, len(tokens)
    if n_prompt < 2:
        return _short(n_prompt)
    prefix = keys.prefix_id(found.key) if found.key else None
    made = Explanation(HIT, "", n, n_prompt, found.n_stored, id=prefix)
    lead = _lead(n, n_prompt)
    if n == n_prompt - 1:
        return replace(made, text=f"{lead}: all but the last, which is always computed.")
    made = replace(made, divergence=_divergence(tokens, found, evidence.beside))
    if found.n_stored > n:
        return replace(made, reason=found.limit, text=f"{lead}. {_limit(found)}")
    if evidence.has_expired:
        return replace(made, reason=EXPIRED, text=f"{lead}. What comes next has expired.")
    if evidence.was_evicted:
        text = "What comes next was stored, and evicted to make room."
        return replace(made, reason=EVICTED, text=f"{lead}. {text}")
    if made.divergence is None:
        return replace(made, reason=ENDED, text=f"{lead}. What is stored ends there.")
    where = f"token {n:,}" if n else "the first token"
    text = f"{lead}. From {where} on what is stored differs."
    return replace(made, reason=DIVERGED, text=text)


def _limit(found: Found) -> str:
    there = f"{found.n_stored:,} of its tokens are stored, but"
    if found.limit == STATE:
        last = f"the last of these is at {found.n_tokens:,}" if found.n_tokens else "none is there"
        return (
            f"{there} this model has layers that can only be restored where their state was kept, "
            f"at the ends of messages and at checkpoints; {last}."
        )
    if found.limit == STEPS:
        return f"{there} with --kv-bits a hit has to end where a step of the prefill does."
    return f"{there} to read them from the disk takes longer than to compute them."


def _divergence(tokens: Tokens, found: Found, beside: Sequence[bytes]) -> Divergence | None:
    """What is stored in place of the prompt's next token, if anything."""
    n, (_, query) = found.n_stored, next_block(tokens, found)
    shared = n - found.last * found.chain.block_tokens
    for stored in beside:
        if stored == keys.WINDOW_TOKENS or keys.common_prefix(stored, query) != shared:
            continue
        ids = np.frombuffer(stored, "<i8")[shared:]
        if not len(ids):
            continue
        return Divergence(
            n,
            tuple(tokens[max(0, n - AROUND) : n].tolist()),
            tuple(tokens[n : n + AROUND].tolist()),
            tuple(ids[:AROUND].tolist()),
        )
    return None
