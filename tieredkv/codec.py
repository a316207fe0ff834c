"""Blocks to bytes and back, bit for bit. Knows no cache class, no key and no token.

A blob is one safetensors file of uint8 tensors, each a byte plane of a tensor of the block or
the whole tensor as it is. ``docs/format.md`` describes it byte for byte.

Byte planes are worth their cost because floating point state is noise but for its exponents:
the plane of the high bytes holds nearly all that can be saved, and entropy coding alone saves
it. Where the exponent has eight bits the sign, which is noise too, goes to the next plane. The
frames are ordinary zstd ones, made with parameters that find next to no matches.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from tieredkv.core import FORMAT_VERSION, ITEMSIZE, Block, CorruptBlob, TensorSpec

FORMAT = "tieredkv-block"
MAX_HEADER_BYTES = 1 << 18
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 40
MAX_WINDOW = 1 << 17
_WINDOW_LOG = 15

_RAW = "raw"
_ZSTD = "zstd"

_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}
# Planes a tensor may be split in: one per byte of an element. uint32 is what MLX packs quantized
# values in; its bytes are all alike, and splitting them only costs time.
_WIDTH = ITEMSIZE | {"uint32": 1}
# Of these the sign goes below the eight bits of exponent before they are split.
_FLOATS = frozenset(("bfloat16", "float32"))
_SIGN_AND_FRACTION = np.int16(0x7F - 0x8000)
# numpy lacks bfloat16, and float16 is treated alike: both stay words once decoded.
_DECODED = {name: name for name in ITEMSIZE} | {"bfloat16": "uint16", "float16": "uint16"}

# A plane that shrinks by less than a tenth is not worth its time in decode.
_WORTH = 0.9
# Words joined at a time: all that is read and written then stays in a core's own cache.
_STRIP_WORDS = 1 << 18
# An odd number of runs, or they would all fall into the keys of a stack of keys and values.
_SAMPLE_RUNS = 13
_RUN_WORDS = 1024

_Buffer = bytes | memoryview
_T = TypeVar("_T")


def checksum(blob: bytes | memoryview) -> bytes:
    """xxh3-128 of the whole blob, 16 bytes: ``decode`` alone can't see a flip in a raw plane."""
    return xxhash.xxh3_128_digest(blob)


@dataclass(frozen=True, slots=True)
class _Plane:
    """One stored uint8 tensor: its encoding and its size in the file in bytes."""

    encoding: str
    n_stored: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the block and its planes: one (unsplit) or one per byte of an element."""

    spec: TensorSpec
    planes: tuple[_Plane, ...]

    @property
    def n_plane(self) -> int:
        """Decoded size of each plane in bytes."""
        return self.spec.n_bytes // len(self.planes)

    @property
    def n_stored(self) -> int:
        return sum(plane.n_stored for plane in self.planes)

    @property
    def word(self) -> type[np.unsignedinteger[Any]]:
        """Words of as many bytes as the tensor's elements have planes."""
        return _WORDS[_WIDTH[self.spec.dtype]]

    @property
    def n_words(self) -> int:
        return self.spec.n_bytes // _WIDTH[self.spec.dtype]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A blob whose header has been read and checked. The blob must stay as long as it is used."""

    blob: memoryview
    entries: tuple[_Entry, ...]
    start: int

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Dtypes and shapes of its tensors."""
        return tuple(entry.spec for entry in self.entries)

    @property
    def n_bytes(self) -> int:
        """Raw bytes of its tensors."""
        return sum(entry.spec.n_bytes for entry in self.entries)


class _Engines(threading.local):
    """A compressor, a decompressor and memory per thread: none may be used by two at once."""

    def __init__(self) -> None:
        # Huffman-only in effect: the table is too small and the shortest match too long to
        # find many matches. Measured on bf16 KV: better ratio than level 3, at twice its speed.
        # A window of 32 KiB lets Huffman tables follow the data: smaller than with 128 KiB.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=_WINDOW_LOG,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=True,
            write_checksum=False,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._scratch = np.empty(0, np.uint8)

    def scratch(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory to overwrite. Kept, for the page faults of fresh memory cost encode a fifth."""
        if self._scratch.size < n_bytes:
            self._scratch = np.empty(n_bytes, np.uint8)
        return self._scratch[:n_bytes]


class PlaneCodec:
    """The lossless codec of the cold tier: byte planes, Huffman-coded where that pays.

    Equal tensors give equal blobs (with one version of the zstd library). Any thread may call;
    numpy, zstd and xxhash release the GIL for most of the time. A thread that encodes keeps as
    much memory as its largest block until it ends.
    """

    def __init__(self, form: str = FORMAT) -> None:
        """``form`` is the ``format`` that its blobs name: who stores other things in the tensors of
        a block names them otherwise.
        """
        self._form = form
        self._engines = _Engines()

    def encode(self, block: Block) -> bytes:
        """One blob of the block's tensors; token ids and keys stay out of it.

        Tensors are read through the buffer protocol alone, so an ``mx.array`` must be evaluated.
        Incompressible data costs the header only, 100 to 300 bytes a tensor.

        Raises:
            ValueError: a tensor that is not C-contiguous or not what its spec says, or more
                tensors than a header may describe (several hundred).
        """
        words = [words_of(*pair) for pair in zip(block.specs, block.tensors, strict=True)]
        scratch = self._engines.scratch(block.n_bytes)
        entries: list[_Entry] = []
        parts: list[_Buffer] = []
        start = 0
        for spec, tensor in zip(block.specs, words, strict=True):
            stop = start + spec.n_bytes
            planes = self._split(spec.dtype, tensor, scratch[start:stop])
            start = stop
            entries.append(_Entry(spec, tuple(_Plane(name, len(data)) for name, data in planes)))
            parts += [data for _, data in planes]
        header = _header(entries, self._form)
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"{len(entries)} tensors are too many for one block")
        return b"".join([len(header).to_bytes(8, "little"), header, *parts])

    def decode(
        self, blob: bytes | memoryview, n_bytes: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[NDArray[Any], ...]]:
        """Specs and tensors of a blob of ``n_bytes`` raw bytes.

        Tensors have the dtype of their spec, but bfloat16 and float16 come as uint16 words.
        They own their memory: the blob may go away.

        Raises:
            CorruptBlob: the blob is none that ``encode`` makes of ``n_bytes`` raw bytes. All
                sizes are checked before anything but the header (256 KiB at most) is read.
        """
        parsed = self.parse(blob, n_bytes)
        return parsed.specs, self.decode_parsed(parsed)

    def parse(self, blob: bytes | memoryview, n_bytes: int) -> Parsed:
        """What a blob of ``n_bytes`` raw bytes says that it holds.

        Raises:
            CorruptBlob: as `decode`, as far as the header shows it.
        """
        parsed = self.parse_within(blob, n_bytes)
        if parsed.n_bytes != n_bytes:
            raise CorruptBlob(f"the tensors are not of {n_bytes} bytes")
        return parsed

    def parse_within(self, blob: bytes | memoryview, most_bytes: int) -> Parsed:
        """As `parse`, of a blob of which only the most raw bytes that it may have are known.

        Raises:
            CorruptBlob: as `parse`.
        """
        view = memoryview(blob).cast("B")
        entries, start = _parse(view, self._form)
        parsed = Parsed(view, tuple(entries), start)
        if parsed.n_bytes > most_bytes:
            raise CorruptBlob(f"the tensors are of more than {most_bytes} bytes")
        return parsed

    def decode_parsed(
        self, parsed: Parsed, into: Sequence[Any] | None = None
    ) -> tuple[NDArray[Any], ...]:
        """Tensors of a parsed blob, as `decode`.

        ``into`` may give memory for each of them: writable, C-contiguous, of the spec's size.
        What is returned are then views of it.

        Raises:
            CorruptBlob: as `decode`. The memory then holds anything.
        """
        start = parsed.start
        tensors: list[NDArray[Any]] = []
        for i, entry in enumerate(parsed.entries):
            stop = start + entry.n_stored
            out = (
                np.empty(entry.n_words, entry.word)
                if into is None
                else writable(entry.spec, into[i], entry.word)
            )
            self._restore(entry, parsed.blob[start:stop], out)
            tensors.append(_typed(entry.spec, out))
            start = stop
        return tuple(tensors)

    def _split(
        self, dtype: str, words: NDArray[Any], scratch: NDArray[np.uint8]
    ) -> list[tuple[str, _Buffer]]:
        """Encodings and data of a tensor's planes, or of the whole where no plane shrinks."""
        rows = scratch.reshape(words.itemsize, words.size)
        plane = _plane_of_float if dtype in _FLOATS else _plane
        frames: dict[int, bytes] = {}
        for k in self._candidates(dtype, words):
            frame = self._compress(plane(words, k, rows[k]))
            if frame is not None:
                frames[k] = frame
        if not frames:
            return [(_RAW, words.view(np.uint8).data)]
        return [
            (_ZSTD, frames[k]) if k in frames else (_RAW, plane(words, k, rows[k]).data)
            for k in range(words.itemsize)
        ]

    def _candidates(self, dtype: str, words: NDArray[Any]) -> list[int]:
        """Planes that promise to shrink."""
        if not words.size:
            return []
        # bfloat16's low bytes are mantissa and sign, noise without exception; its high bytes,
        # the exponent, always shrink on real state.
        if dtype == "bfloat16":
            return [1]
        sample = _sample(words)
        plane = _plane_of_float if dtype in _FLOATS else _plane
        planes = [plane(sample, k, np.empty(sample.size, np.uint8)) for k in range(words.itemsize)]
        return [k for k, data in enumerate(planes) if self._compress(data) is not None]

    def _compress(self, plane: NDArray[np.uint8]) -> bytes | None:
        """The plane as one zstd frame, None if that is not worth it."""
        frame = self._engines.compressor.compress(plane.data)
        return frame if len(frame) <= plane.size * _WORTH else None

    def _restore(self, entry: _Entry, stored: memoryview, out: NDArray[Any]) -> None:
        planes: list[NDArray[np.uint8]] = []
        start = 0
        for plane in entry.planes:
            stop = start + plane.n_stored
            data: _Buffer = stored[start:stop]
            if plane.encoding == _ZSTD:
                data = self._decompress(data, entry.n_plane)
            planes.append(np.frombuffer(data, np.uint8))
            start = stop
        _join_all(entry.spec.dtype, planes, out)

    def _decompress(self, frame: _Buffer, n_bytes: int) -> bytes:
        """The content of exactly one frame that declares, and holds, ``n_bytes``."""
        try:
            declared = zstandard.get_frame_parameters(frame)
            if declared.content_size != n_bytes or declared.window_size > MAX_WINDOW:
                raise CorruptBlob("a frame declares another size than its plane has")
            if declared.dict_id or declared.has_checksum:
                raise CorruptBlob("a frame has a dictionary or a checksum")
            plane = self._engines.decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptBlob(f"damaged frame: {error}") from error
        if len(plane) != n_bytes:
            raise CorruptBlob("a frame holds another size than it declares")
        return plane


def words_of(spec: TensorSpec, tensor: Any) -> NDArray[Any]:
    """The tensor's memory, not copied, as flat words of as many bytes as it has planes.

    Raises:
        ValueError: it isn't C-contiguous, or not what ``spec`` says.
    """
    if not _storable(spec):
        raise ValueError(f"{spec} can't be stored")
    view = memoryview(tensor)
    if not view.c_contiguous or view.nbytes != spec.n_bytes:
        raise ValueError(f"{view.nbytes} bytes of shape {view.shape} are no contiguous {spec}")
    return np.frombuffer(view, _WORDS[_WIDTH[spec.dtype]])


def _storable(spec: TensorSpec) -> bool:
    """Whether dtype and shape are within bounds that keep every product of sizes small."""
    if spec.dtype not in ITEMSIZE or len(spec.shape) > MAX_DIMS:
        return False
    # Zeros are left out of the product: numpy can't have a shape of (0, 2**62) either.
    return min(spec.shape, default=0) >= 0 and math.prod(filter(None, spec.shape)) <= MAX_ELEMENTS


def _sample(words: NDArray[Any]) -> NDArray[Any]:
    """Runs of words from all over the tensor, or all of a small one."""
    stride = words.size // _SAMPLE_RUNS
    if stride <= _RUN_WORDS:
        return words
    return words[: stride * _SAMPLE_RUNS].reshape(_SAMPLE_RUNS, stride)[:, :_RUN_WORDS].ravel()


def _plane(words: NDArray[Any], k: int, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Byte ``k`` of each word, 0 the lowest, in ``out`` unless words are bytes already."""
    if words.itemsize == 1:
        return words
    # Whole-word shifts, of which the low byte is kept, run at 4 times the speed of a strided copy.
    np.right_shift(words, 8 * k, out=out, casting="unsafe")
    return out


def _plane_of_float(words: NDArray[Any], k: int, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """As `_plane`, of words whose sign has been moved down below eight bits of exponent."""
    top = words.itemsize - 1
    if k == top:
        np.right_shift(words, 8 * top - 1, out=out, casting="unsafe")
        return out
    _plane(words, k, out)
    if k == top - 1:
        np.bitwise_and(out, 0x7F, out=out)
        sign = np.empty_like(out)
        np.right_shift(words, 8 * top, out=sign, casting="unsafe")
        np.bitwise_or(out, np.bitwise_and(sign, 0x80, out=sign), out=out)
    return out


def _join(planes: list[NDArray[np.uint8]], out: NDArray[Any], _: NDArray[np.int16]) -> None:
    """Words of byte planes, lowest first."""
    high, *between, low = reversed(planes)
    np.left_shift(high, 8, out=out, dtype=out.dtype)
    for plane in between:
        np.bitwise_or(out, plane, out=out)
        np.left_shift(out, 8, out=out)
    np.bitwise_or(out, low, out=out)


def _join_float(
    planes: list[NDArray[np.uint8]], out: NDArray[Any], spare: NDArray[np.int16]
) -> None:
    """As `_join`, with the sign back in its place. ``spare`` is to be overwritten."""
    *low, signed, exponent = planes
    # An int8 made an int16 has its sign in all of the upper byte, of which the mask keeps one bit.
    np.bitwise_and(signed.view(np.int8), _SIGN_AND_FRACTION, out=spare, dtype=np.int16)
    np.left_shift(exponent, 7, out=out, dtype=out.dtype)
    np.bitwise_or(out, spare.view(np.uint16), out=out)
    for plane in reversed(low):
        np.left_shift(out, 8, out=out)
        np.bitwise_or(out, plane, out=out)


def _join_all(dtype: str, planes: list[NDArray[np.uint8]], words: NDArray[Any]) -> None:
    """Words of a tensor's planes; a single plane is copied as it is."""
    if len(planes) == 1:
        words.view(np.uint8)[...] = planes[0]
        return
    join = _join_float if dtype in _FLOATS else _join
    spare = np.empty(min(words.size, _STRIP_WORDS), np.int16)
    for start in range(0, words.size, _STRIP_WORDS):
        strip = slice(start, start + _STRIP_WORDS)
        join([plane[strip] for plane in planes], words[strip], spare[: words.size - start])


def writable(spec: TensorSpec, memory: Any, word: type[np.generic]) -> NDArray[Any]:
    """Memory that was given for a tensor, as flat words to write to.

    Raises:
        ValueError: it is read-only, not C-contiguous, or not of the tensor's size.
    """
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous or view.nbytes != spec.n_bytes:
        raise ValueError(f"{view.nbytes} bytes of shape {view.shape} can't take {spec}")
    return np.frombuffer(view, word)


def _typed(spec: TensorSpec, words: NDArray[Any]) -> NDArray[Any]:
    # Any other byte in a bool array is undefined behaviour for who reads it.
    if spec.dtype == "bool" and words.size and words.max() > 1:
        raise CorruptBlob("a bool that is neither 0 nor 1")
    return words.view(_DECODED[spec.dtype]).reshape(spec.shape)


def _header(entries: list[_Entry], form: str) -> bytes:
    """The only header that describes ``entries``, padded with spaces to 8 bytes."""
    tensors = [
        {
            "dtype": entry.spec.dtype,
            "planes": [[plane.encoding, entry.n_plane] for plane in entry.planes],
            "shape": entry.spec.shape,
        }
        for entry in entries
    ]
    metadata = {"format": form, "tensors": _dump(tensors), "version": str(FORMAT_VERSION)}
    header: dict[str, Any] = {"__metadata__": metadata}
    stop = 0
    for i, entry in enumerate(entries):
        for k, plane in enumerate(entry.planes):
            start, stop = stop, stop + plane.n_stored
            header[_name(i, k)] = {
                "dtype": "U8",
                "shape": [plane.n_stored],
                "data_offsets": [start, stop],
            }
    text = _dump(header).encode("ascii")
    return text + b" " * (-len(text) % 8)


def _name(tensor: int, plane: int) -> str:
    return f"{tensor}.{plane}"


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _parse(blob: memoryview, form: str) -> tuple[list[_Entry], int]:
    """What the header says, all of it checked, and where the payload starts."""
    start = 8 + int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or start > min(len(blob), 8 + MAX_HEADER_BYTES):
        raise CorruptBlob("the header is cut off or too long")
    header = bytes(blob[8:start])
    entries = _entries(header)
    # One header for one content: this catches unknown and repeated keys, other spellings,
    # gaps, overlaps and everything else that was not looked at on the way here.
    if _header(entries, form) != header:
        raise CorruptBlob("the header is not in canonical form")
    if sum(entry.n_stored for entry in entries) != len(blob) - start:
        raise CorruptBlob("the payload is cut off or too long")
    return entries, start


def _entries(header: bytes) -> list[_Entry]:
    described = _load(header)
    tensors = _load(_field(_field(described, "__metadata__", dict), "tensors", str))
    if not isinstance(tensors, list):
        raise CorruptBlob("the header has no list of tensors")
    return [_entry(i, tensor, described) for i, tensor in enumerate(tensors)]


def _entry(i: int, tensor: object, described: object) -> _Entry:
    shape = tuple(_integer(n) for n in _field(tensor, "shape", list))
    spec = TensorSpec(_field(tensor, "dtype", str), shape)
    if not _storable(spec):
        raise CorruptBlob("a dtype or shape that is never stored")
    names = [_encoding(plane) for plane in _field(tensor, "planes", list)]
    _check_encodings(names, _WIDTH[spec.dtype])
    planes = [_Plane(name, _stored(described, _name(i, k))) for k, name in enumerate(names)]
    entry = _Entry(spec, tuple(planes))
    for plane in planes:
        _check_stored(plane, entry.n_plane)
    return entry


def _check_encodings(names: list[str], width: int) -> None:
    if len(names) not in (1, width):
        raise CorruptBlob(f"{len(names)} planes where 1 or {width} are possible")
    # A tensor is split for the sake of a plane that shrinks, and compressed only if split.
    if width > 1 and (_ZSTD in names) != (len(names) == width):
        raise CorruptBlob("planes in an encoding that is never used")


def _check_stored(plane: _Plane, n_plane: int) -> None:
    if plane.encoding == _RAW and plane.n_stored != n_plane:
        raise CorruptBlob("a raw plane has another size than its tensor needs")
    if plane.encoding == _ZSTD and not 0 < plane.n_stored < n_plane:
        raise CorruptBlob("a frame is larger than its plane")


def _encoding(plane: object) -> str:
    """Encoding of a listed plane. Its raw length follows from the shape: see ``_parse``."""
    if isinstance(plane, list) and len(plane) == 2 and plane[0] in (_RAW, _ZSTD):
        return str(plane[0])
    raise CorruptBlob("a plane in an unknown encoding")


def _stored(described: object, name: str) -> int:
    offsets = _field(_field(described, name, dict), "data_offsets", list)
    if len(offsets) != 2:
        raise CorruptBlob(f"{name} has no start and end")
    return _integer(offsets[1]) - _integer(offsets[0])


def _load(text: bytes | str) -> object:
    """Any JSON value. Numbers of absurd length and endless nesting are errors, not work."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptBlob("the header is not JSON") from error


def _field(described: object, name: str, kind: type[_T]) -> _T:
    value = described.get(name) if isinstance(described, dict) else None
    if not isinstance(value, kind):
        raise CorruptBlob(f"the header lacks {name}")
    return value


def _integer(value: object) -> int:
    # bool is an int to isinstance, and spelled the same once written again.
    if type(value) is not int:
        raise CorruptBlob("a size that is no integer")
    return value
