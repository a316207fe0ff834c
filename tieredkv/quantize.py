"""Blocks to bytes in eight bits a value: smaller than `codec` makes them, and not exact.

For a cold tier whose user asked for it. Only the rows of tokens are quantized, and only in blocks
that are all floating point: snapshots, windows and what the host has quantized itself are stored as
ever. A blob is a file of the same kind, of another ``format``, in which a quantized tensor is
three: codes, scales, offsets. ``docs/format.md`` describes it byte for byte.

Values that share a scale are of one channel, at consecutive tokens. Keys have channels that are
many times larger than others, always the same ones: a scale for a token's channels would be theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredkv.codec import Parsed, PlaneCodec, words_of, writable
from tieredkv.core import Block, CorruptBlob, TensorSpec
from tieredkv.keys import WINDOW_TOKENS

FORMAT = "tieredkv-q8"
# Consecutive tokens of which a channel has one scale and one offset.
GROUP_TOKENS = 64

_MARK = f'{{"__metadata__":{{"format":"{FORMAT}",'.encode()
_LEVELS = np.float32(255)
# What may be quantized: words in memory, and the largest magnitude. Half of what the dtype holds,
# since the last step may end beyond the largest value. Other values, and NaN, are stored exactly.
_WORDS: dict[str, type[np.generic]] = {
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float32": np.float32,
}
_LIMITS = {
    "bfloat16": np.float32(2.0**126),
    "float16": np.float32(2.0**15),
    "float32": np.float32(2.0**126),
}
# Far below what a sum of any two values can show, and its inverse is finite.
_LEAST_SCALE = np.float32(2.0**-120)
_ALIGNED = 8

# Values handled at a time: all that is read and written then stays in a core's own cache.
_STRIP_VALUES = 1 << 16

# Leaves, heads, tokens, and the tokens' group.
_Strip = tuple[slice, slice, slice, int]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A blob of this format whose header has been read and checked. It must stay as long as it is
    used. ``starts`` are the places of the block's tensors among those of the file.
    """

    container: Parsed
    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]


class _Scratch(threading.local):
    """Memory of a thread to overwrite. Kept, for the page faults of fresh memory are a cost."""

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, n_bytes: int) -> NDArray[np.uint8]:
        """``n_bytes`` that stay as they are until the thread asks for this name again."""
        memory = self._memory.get(name)
        if memory is None or memory.size < n_bytes:
            memory = self._memory[name] = np.empty(n_bytes, np.uint8)
        return memory[:n_bytes]


class QuantizingCodec:
    """`core.Codec` that stores rows of tokens in eight bits, and reads what `PlaneCodec` wrote too.

    A value comes back within half a step, which is the range of its channel in its group of tokens
    over 255 (rounded up to bfloat16), and the rounding of its dtype. The smallest of a group comes
    back as it was. Equal tensors give equal blobs, and a blob always the same values. Any thread
    may call. A thread keeps as much memory as its largest block until it ends.
    """

    def __init__(self) -> None:
        self._exact = PlaneCodec()
        self._container = PlaneCodec(FORMAT)
        self._scratch = _Scratch()

    def encode(self, block: Block) -> bytes:
        """One blob, in eight bits where that can be. Tensors are read as buffers.

        Raises:
            ValueError: as `PlaneCodec.encode`.
        """
        if not _is_quantizable(block):
            return self._exact.encode(block)
        specs: list[TensorSpec] = []
        tensors: list[Any] = []
        for spec, tensor in zip(block.specs, block.tensors, strict=True):
            parts = self._quantize(spec, words_of(spec, tensor)) if _shrinks(spec) else None
            specs += _parts(spec) if parts else [spec]
            tensors += parts or [tensor]
        if len(specs) == len(block.specs):
            return self._exact.encode(block)
        whole = Block(
            block.root, block.parent, block.key, block.tokens, tuple(specs), tuple(tensors)
        )
        return self._container.encode(whole)

    def decode(
        self, blob: bytes | memoryview, n_bytes: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[NDArray[Any], ...]]:
        """Specs and tensors of a blob of ``n_bytes`` raw bytes, as `PlaneCodec.decode`.

        Raises:
            CorruptBlob: as `core.Codec.decode`.
        """
        parsed = self.parse(blob, n_bytes)
        return parsed.specs, self.decode_parsed(parsed)

    def parse(self, blob: bytes | memoryview, n_bytes: int) -> Parsed | Quantized:
        """What a blob of either format says that it holds.

        Raises:
            CorruptBlob: as `decode`, as far as the header shows it.
        """
        view = memoryview(blob).cast("B")
        if view[8 : 8 + len(_MARK)] != _MARK:
            return self._exact.parse(view, n_bytes)
        container = self._container.parse_within(view, n_bytes)
        specs, starts = _whole(container.specs)
        if sum(spec.n_bytes for spec in specs) != n_bytes:
            raise CorruptBlob(f"the tensors are not of {n_bytes} bytes")
        return Quantized(container, specs, starts)

    def decode_parsed(
        self, parsed: Parsed | Quantized, into: Sequence[Any] | None = None
    ) -> tuple[NDArray[Any], ...]:
        """Tensors of a parsed blob, in the memory given for each, as `PlaneCodec.decode_parsed`.

        Raises:
            CorruptBlob: as `decode`. The memory then holds anything.
        """
        if isinstance(parsed, Parsed):
            return self._exact.decode_parsed(parsed, into)
        outs = [
            _out(spec, np.empty(spec.n_bytes, np.uint8) if into is None else into[i])
            for i, spec in enumerate(parsed.specs)
        ]
        parts = self._container.decode_parsed(parsed.container, self._places(parsed, outs))
        for spec, start, out in zip(parsed.specs, parsed.starts, outs, strict=True):
            if _is_code(parsed.container.specs[start]):
                codes, scales, offsets = parts[start : start + 3]
                steps, lows = _as_float("bfloat16", scales), _as_float(spec.dtype, offsets)
                self._restore(spec.dtype, codes, steps, lows, out)
        return tuple(outs)

    def _places(self, parsed: Quantized, outs: Sequence[NDArray[Any]]) -> list[Any]:
        """Memory for the tensors of the file: what was stored exactly goes where it belongs."""
        exact = {
            start: out
            for start, out in zip(parsed.starts, outs, strict=True)
            if not _is_code(parsed.container.specs[start])
        }
        sizes = [0 if i in exact else spec.n_bytes for i, spec in enumerate(parsed.container.specs)]
        memory = self._scratch.take("parts", sum(map(_aligned, sizes)))
        places: list[Any] = []
        start = 0
        for i, size in enumerate(sizes):
            places.append(exact.get(i, memory[start : start + size]))
            start += _aligned(size)
        return places

    def _quantize(self, spec: TensorSpec, flat: NDArray[Any]) -> list[NDArray[Any]] | None:
        """Codes, scales and offsets of a tensor; None if it has values that must stay exact."""
        n_leaves, n_heads, n_tokens, width = spec.shape
        words = flat.view(_WORDS[spec.dtype]).reshape(spec.shape)
        grouped = (n_leaves, n_heads, _n_groups(n_tokens), width)
        codes = np.empty(spec.shape, np.uint8)
        scales = np.empty(grouped, np.uint16)
        offsets = np.empty(grouped, words.dtype)
        limit = _LIMITS[spec.dtype]
        for leaves, heads, tokens, group in _strips(spec.shape):
            values = self._values(spec.dtype, words[leaves, heads, tokens])
            low, high = values.min(axis=2), values.max(axis=2)
            # False as well if there is a NaN.
            if not (low.min() >= -limit and high.max() <= limit):
                return None
            step = _rounded_up(np.maximum((high - low) / _LEVELS, _LEAST_SCALE))
            values -= low[:, :, None]
            values *= (1 / step)[:, :, None]
            values += np.float32(0.5)
            np.copyto(codes[leaves, heads, tokens], values, casting="unsafe")
            scales[leaves, heads, group] = step.view(np.uint32) >> 16
            _store(spec.dtype, low, offsets[leaves, heads, group])
        return [codes, scales, offsets]

    def _restore(
        self,
        dtype: str,
        codes: NDArray[np.uint8],
        steps: NDArray[np.float32],
        lows: NDArray[np.float32],
        out: NDArray[Any],
    ) -> None:
        for leaves, heads, tokens, group in _strips(codes.shape):
            part = codes[leaves, heads, tokens]
            values = self._floats_like(part)
            np.copyto(values, part)
            values *= steps[leaves, heads, group, None]
            values += lows[leaves, heads, group, None]
            _store(dtype, values, out[leaves, heads, tokens])

    def _values(self, dtype: str, words: NDArray[Any]) -> NDArray[np.float32]:
        """Words as floats, in memory of this thread."""
        values = self._floats_like(words)
        if dtype == "bfloat16":
            np.left_shift(words, 16, out=values.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(values, words.view(dtype))
        return values

    def _floats_like(self, words: NDArray[Any]) -> NDArray[np.float32]:
        memory = self._scratch.take("values", 4 * words.size)
        return memory.view(np.float32).reshape(words.shape)


def _is_quantizable(block: Block) -> bool:
    """Whether a block is rows of tokens, in floating point throughout.

    Where the host quantizes, words come with scales that are floats and must stay as they are.
    """
    if not block.tokens or block.tokens == WINDOW_TOKENS:
        return False
    return bool(block.specs) and all(
        spec.dtype in _WORDS
        and len(spec.shape) == 4
        and spec.shape[2] == block.n_tokens
        and all(spec.shape)
        for spec in block.specs
    )


def _n_groups(n_tokens: int) -> int:
    return -(-n_tokens // GROUP_TOKENS)


def _parts(spec: TensorSpec) -> list[TensorSpec]:
    """Specs of the codes, scales and offsets that stand for a tensor."""
    n_leaves, n_heads, n_tokens, width = spec.shape
    grouped = (n_leaves, n_heads, _n_groups(n_tokens), width)
    return [
        TensorSpec("uint8", spec.shape),
        TensorSpec("bfloat16", grouped),
        TensorSpec(spec.dtype, grouped),
    ]


def _shrinks(spec: TensorSpec) -> bool:
    """Whether a tensor's parts take less than it does; not where there are just a few tokens."""
    return sum(part.n_bytes for part in _parts(spec)) < spec.n_bytes


def _is_code(spec: TensorSpec) -> bool:
    """Whether a tensor of the file is codes: the block itself has floats only."""
    return spec.dtype == "uint8"


def _whole(stored: Sequence[TensorSpec]) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
    """Specs of the block whose file has these tensors, and where each of them starts.

    Raises:
        CorruptBlob: no block has such a file.
    """
    specs: list[TensorSpec] = []
    starts: list[int] = []
    i = 0
    while i < len(stored):
        starts.append(i)
        first = stored[i]
        if not _is_code(first):
            specs.append(first)
            i += 1
            continue
        dtype = stored[i + 2].dtype if i + 2 < len(stored) else ""
        spec = TensorSpec(dtype, first.shape)
        if dtype not in _WORDS or len(first.shape) != 4 or not all(first.shape):
            raise CorruptBlob("codes without an offset, or of another shape than rows of tokens")
        if list(stored[i : i + 3]) != _parts(spec) or not _shrinks(spec):
            raise CorruptBlob("codes, scales and offsets that don't belong together")
        specs.append(spec)
        i += 3
    if len(specs) == len(stored) or any(spec.dtype not in _WORDS for spec in specs):
        raise CorruptBlob("tensors that are never stored in this format")
    return tuple(specs), tuple(starts)


def _strips(shape: tuple[int, ...]) -> Iterator[_Strip]:
    """All of a tensor in parts, each of one group of tokens."""
    n_leaves, n_heads, n_tokens, width = shape
    n_heads_at_once = min(n_heads, max(1, _STRIP_VALUES // (GROUP_TOKENS * width)))
    n_leaves_at_once = max(1, _STRIP_VALUES // (GROUP_TOKENS * width * n_heads))
    leaves = _cut(n_leaves, n_leaves_at_once)
    heads = _cut(n_heads, n_heads_at_once)
    tokens = _cut(n_tokens, GROUP_TOKENS)
    for some, (group, run), few in product(leaves, enumerate(tokens), heads):
        yield some, few, run, group


def _cut(n: int, step: int) -> list[slice]:
    return [slice(i, i + step) for i in range(0, n, step)]


def _rounded_up(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The next bfloat16s, as floats: a range must fit its 255 steps."""
    bits = values.view(np.uint32) + np.uint32(0xFFFF)
    bits &= np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _store(dtype: str, values: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Write floats as words, rounded to the nearest. Overwrites ``values``."""
    if dtype != "bfloat16":
        np.copyto(out.view(dtype), values, casting="same_kind")
        return
    bits = values.view(np.uint32)
    bits += np.uint32(0x8000)
    np.right_shift(bits, 16, out=out, casting="unsafe")


def _as_float(dtype: str, words: NDArray[Any]) -> NDArray[np.float32]:
    if dtype != "bfloat16":
        return words.view(dtype).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNED) * _ALIGNED


def _out(spec: TensorSpec, memory: Any) -> NDArray[Any]:
    """Memory that was given for a tensor, as its words."""
    return writable(spec, memory, _WORDS[spec.dtype]).reshape(spec.shape)
