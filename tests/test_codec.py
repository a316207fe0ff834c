"""Encoded blocks: exact, self-contained, readable by strangers, and never trusted."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tieredkv.codec import MAX_HEADER_BYTES, PlaneCodec, checksum
from tieredkv.core import ITEMSIZE, Block, BlockKey, Codec, CorruptBlob, TensorSpec
from tieredkv.quantize import QuantizingCodec

DATA = Path(__file__).parent / "data"
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FLOATS = ("bfloat16", "float16", "float32")
Tensor = tuple[str, NDArray[Any]]


@pytest.fixture(scope="module", params=[PlaneCodec, QuantizingCodec])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every codec of the cold tier. What isn't rows of tokens must come back exactly from each."""
    made: Codec = request.param()
    return made


def block_of(*tensors: Tensor, tokens: bytes = bytes(8), key: bytes = b"k") -> Block:
    """A block of arrays of words, each under its true dtype."""
    return Block(
        root=BlockKey(b"root"),
        parent=BlockKey(b"parent"),
        key=BlockKey(key),
        tokens=tokens,
        specs=tuple(TensorSpec(dtype, array.shape) for dtype, array in tensors),
        tensors=tuple(array for _, array in tensors),
    )


def words(dtype: str, shape: tuple[int, ...], kind: str, seed: int = 0) -> NDArray[Any]:
    """Words of ``dtype``: uniformly random bits, values that shrink, or one value throughout."""
    rng = np.random.default_rng(seed)
    word = WORDS[ITEMSIZE[dtype]]
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(word)
    if kind == "constant":
        return np.full(shape, 0xFFC1FFC1FFC1FFC1 & np.iinfo(word).max, word)
    if kind == "random" or dtype not in FLOATS:
        top = np.iinfo(word).max if kind == "random" else 40
        return rng.integers(0, top, shape, word, endpoint=True)
    normal = rng.standard_normal(shape, np.float32)
    if dtype == "float32":
        return normal.view(np.uint32)
    if dtype == "float16":
        return normal.astype(np.float16).view(np.uint16)
    return (normal.view(np.uint32) >> 16).astype(np.uint16)


def contents(specs: Any, tensors: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """What must come back: dtypes, shapes and bits."""
    return [
        (spec.dtype, tuple(spec.shape), bytes(memoryview(tensor).cast("B") if tensor.size else b""))
        for spec, tensor in zip(specs, tensors, strict=True)
    ]


def decoded(
    blob: bytes | memoryview, n_bytes: int, codec: Codec | None = None
) -> list[tuple[str, tuple[int, ...], bytes]]:
    return contents(*(codec or PlaneCodec()).decode(blob, n_bytes))


def compact(value: object) -> str:
    """JSON as the format spells it."""
    return json.dumps(value, separators=(",", ":"))


def forge(header: str | bytes | dict[str, Any], payload: bytes = b"") -> bytes:
    """A blob with any header, padded as the format asks for."""
    if isinstance(header, dict):
        header = compact(header)
    raw = header.encode() if isinstance(header, str) else header
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + payload


def taken_apart(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a blob."""
    start = 8 + int.from_bytes(blob[:8], "little")
    return json.loads(blob[8:start]), blob[start:]


def described(
    dtype: object = "uint16",
    shape: object = (2, 3),
    planes: object = (("raw", 12),),
    offsets: object = (0, 12),
    **more: object,
) -> dict[str, Any]:
    """A header of one tensor in one plane; by default one that is right for 12 bytes."""
    tensors = [{"dtype": dtype, "planes": planes, "shape": shape}]
    text = compact(tensors)
    size = 12
    if isinstance(offsets, tuple) and len(offsets) == 2:
        size = int(offsets[1] - offsets[0])
    return {
        "__metadata__": {"format": "tieredkv-block", "tensors": text, "version": "3"},
        "0.0": {"dtype": "U8", "shape": [size], "data_offsets": offsets},
        **more,
    }


def several(*places: tuple[int, int]) -> dict[str, Any]:
    """A header of tensors of 6 bytes at any offsets."""
    head = described()
    tensor = {"dtype": "uint8", "planes": [["raw", 6]], "shape": [6]}
    head["__metadata__"]["tensors"] = compact([tensor] * len(places))
    for i, offsets in enumerate(places):
        head[f"{i}.0"] = {"dtype": "U8", "shape": [6], "data_offsets": offsets}
    return head


def framed(frame: bytes, n_declared: int) -> bytes:
    """A blob of one uint8 tensor of ``n_declared`` bytes stored as the given frame."""
    planes = (("zstd", n_declared),)
    return forge(described("uint8", (n_declared,), planes, (0, len(frame))), frame)


tensors_of_any_kind = st.builds(
    lambda dtype, shape, kind, seed: (dtype, words(dtype, tuple(shape), kind, seed)),
    st.sampled_from(sorted(ITEMSIZE)),
    st.lists(st.integers(0, 9), max_size=5),
    st.sampled_from(["random", "values", "constant"]),
    st.integers(0, 2**32 - 1),
)


class TestRoundTrip:
    @given(st.lists(tensors_of_any_kind, max_size=4))
    @settings(deadline=None)
    def test_any_block_comes_back_bit_for_bit(self, codec: Codec, tensors: list[Tensor]) -> None:
        """If it failed, a hit would change the output."""
        block = block_of(*tensors)

        back = decoded(codec.encode(block), block.n_bytes, codec)

        assert contents(block.specs, block.tensors) == back

    @pytest.mark.parametrize("kind", ["random", "values", "constant"])
    @pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
    def test_a_large_odd_tensor_comes_back_bit_for_bit(
        self, codec: Codec, dtype: str, kind: str
    ) -> None:
        """If it failed, sampling or several zstd blocks a frame would lose data."""
        block = block_of((dtype, words(dtype, (3, 1, 257, 391), kind)))

        back = decoded(codec.encode(block), block.n_bytes, codec)

        assert contents(block.specs, block.tensors) == back

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_every_16_bit_pattern_survives(self, codec: Codec, dtype: str) -> None:
        """If it failed, NaN payloads, infinities or signed zeros would be normalized."""
        block = block_of((dtype, np.arange(1 << 16, dtype=np.uint16)))

        back = decoded(codec.encode(block), block.n_bytes, codec)

        assert contents(block.specs, block.tensors) == back

    def test_float32_nan_payloads_survive(self, codec: Codec) -> None:
        """If it failed, a signalling NaN would be made quiet somewhere on the way."""
        patterns = np.array([0x7F800001, 0xFFC12345, 0x7F800000, 0x80000000] * 300, np.uint32)
        block = block_of(("float32", patterns.view(np.float32)))

        (_, (back,)) = codec.decode(codec.encode(block), block.n_bytes)

        assert patterns.tobytes() == back.tobytes()

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [(name, name) for name in sorted(ITEMSIZE) if name not in ("bfloat16", "float16")]
        + [("bfloat16", "uint16"), ("float16", "uint16")],
    )
    def test_decoded_dtype_is_the_documented_one(
        self, codec: Codec, dtype: str, expected: str
    ) -> None:
        """If it failed, restore would misread the words of a tensor."""
        block = block_of((dtype, words(dtype, (2, 3), "values")))

        (spec,), (tensor,) = codec.decode(codec.encode(block), block.n_bytes)

        assert (dtype, expected) == (spec.dtype, str(tensor.dtype))

    def test_decoded_tensors_outlive_the_blob(self, codec: Codec) -> None:
        """If it failed, tensors would change when the storage engine reuses its memory."""
        tensors = [(d, words(d, (2, 40), k)) for d in FLOATS for k in ("random", "values")]
        block = block_of(*tensors)
        blob = bytearray(codec.encode(block))

        specs, back = codec.decode(memoryview(blob), block.n_bytes)
        blob[:] = bytes(len(blob))

        assert contents(block.specs, block.tensors) == contents(specs, back)

    def test_satisfies_the_codec_contract(self, codec: Codec) -> None:
        """If it failed, the cold tier could not be given this codec."""
        assert codec.decode(codec.encode(block_of()), 0) == ((), ())


class TestInput:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint32"])
    @pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 0, 4), ()])
    def test_an_mlx_array_encodes_as_its_numpy_words(
        self, dtype: str, shape: tuple[int, ...]
    ) -> None:
        """If it failed, blocks of the hot tier could not be stored, or not as they are."""
        raw = words(dtype, shape, "values")
        array = mx.array(raw).view(getattr(mx, dtype))
        mx.eval(array)
        expected = PlaneCodec().encode(block_of((dtype, raw)))

        assert expected == PlaneCodec().encode(block_of((dtype, array)))

    def test_a_strided_tensor_is_refused(self) -> None:
        """If it failed, elements would be stored in another order than their shape says."""
        with pytest.raises(ValueError, match="contiguous"):
            PlaneCodec().encode(block_of(("uint16", np.zeros((4, 6), np.uint16).T)))

    def test_a_tensor_of_another_size_than_its_spec_is_refused(self) -> None:
        """If it failed, a blob would be written that no one can decode."""
        with pytest.raises(ValueError, match="contiguous"):
            PlaneCodec().encode(block_of(("float32", np.zeros((4, 6), np.uint16))))

    @pytest.mark.parametrize(("dtype", "shape"), [("complex64", (1,)), ("uint8", (1,) * 9)])
    def test_what_decode_would_refuse_is_not_encoded(
        self, dtype: str, shape: tuple[int, ...]
    ) -> None:
        """If it failed, blobs would be written that are thrown away as corrupt when read."""
        with pytest.raises(ValueError, match="can't be stored"):
            PlaneCodec().encode(block_of((dtype, np.zeros(shape, np.uint8))))

    def test_more_tensors_than_a_header_may_describe_are_refused(self) -> None:
        """If it failed, a block would be written whose header is too long to be read."""
        tensor = ("uint8", np.zeros(1, np.uint8))
        with pytest.raises(ValueError, match="too many"):
            PlaneCodec().encode(block_of(*[tensor] * 3000))


def sign_first(elements: np.ndarray) -> np.ndarray:
    """Bytes of elements, lowest first, whose sign is moved from below the exponent to the top."""
    bits = np.unpackbits(elements, axis=1, bitorder="little")
    exponent, sign = bits[:, -8:], bits[:, -9:-8]
    moved = np.concatenate([bits[:, :-9], exponent, sign], axis=1)
    return np.packbits(moved, axis=1, bitorder="little")


def by_the_book(blob: bytes) -> list[tuple[str, tuple[int, ...], bytes]]:
    """A decoder written from the format page, on the safetensors and zstd libraries alone."""
    planes = {name: bytes(tensor["data"]) for name, tensor in safetensors.deserialize(blob)}
    result = []
    for i, tensor in enumerate(json.loads(taken_apart(blob)[0]["__metadata__"]["tensors"])):
        columns = []
        for k, (encoding, n_bytes) in enumerate(tensor["planes"]):
            data = planes[f"{i}.{k}"]
            if encoding == "zstd":
                data = zstandard.ZstdDecompressor().decompress(data)
            assert len(data) == n_bytes
            columns.append(np.frombuffer(data, np.uint8))
        elements = np.stack(columns, axis=-1)
        if tensor["dtype"] in ("bfloat16", "float32") and len(columns) > 1:
            elements = sign_first(elements)
        result.append((tensor["dtype"], tuple(tensor["shape"]), elements.tobytes()))
    return result


class TestFormat:
    @given(st.lists(tensors_of_any_kind, min_size=1, max_size=3))
    @settings(deadline=None, max_examples=50)
    def test_a_stranger_can_decode_it_from_the_format_page(self, tensors: list[Tensor]) -> None:
        """If it failed, blobs would not be safetensors files or not what is documented."""
        block = block_of(*tensors)

        assert contents(block.specs, block.tensors) == by_the_book(PlaneCodec().encode(block))

    def test_the_safetensors_library_opens_the_file(self, tmp_path: Path) -> None:
        """If it failed, no tool could look into a stored block."""
        path = tmp_path / "block.safetensors"
        block = block_of(("bfloat16", words("bfloat16", (2, 1, 64, 16), "values")))
        path.write_bytes(PlaneCodec().encode(block))

        with safetensors.safe_open(path, "numpy") as opened:
            assert opened.metadata()["format"] == "tieredkv-block"
            assert set(opened.keys()) == {"0.0", "0.1"}
            assert opened.get_tensor("0.0").shape == (2 * 64 * 16,)

    def test_a_blob_tells_nothing_of_tokens_or_keys(self) -> None:
        """If it failed, a stored blob would leak the prompt or the tenant's salt."""
        tensor = ("float16", words("float16", (2, 30), "values"))
        one = PlaneCodec().encode(block_of(tensor, tokens=bytes(16), key=b"one"))

        assert one == PlaneCodec().encode(block_of(tensor, tokens=bytes(range(16)), key=b"other"))

    def test_bfloat16_splits_in_a_raw_low_and_a_zstd_high_plane(self) -> None:
        """If it failed, the low plane, which is noise in real state, would cost time."""
        header, _ = taken_apart(PlaneCodec().encode(block_of(("bfloat16", np.zeros(99, "<u2")))))

        (tensor,) = json.loads(header["__metadata__"]["tensors"])

        assert tensor["planes"] == [["raw", 99], ["zstd", 99]]

    @pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.75), ("float16", 0.92)])
    def test_normal_values_shrink(self, dtype: str, share: float) -> None:
        """If it failed, the planes would not be compressed, or with the wrong parameters."""
        block = block_of((dtype, words(dtype, (2, 2, 256, 64), "values")))

        assert len(PlaneCodec().encode(block)) < share * block.n_bytes

    @pytest.mark.parametrize("dtype", sorted(set(ITEMSIZE) - {"bool"}))
    def test_incompressible_data_costs_one_percent_at_most(self, dtype: str) -> None:
        """If it failed, the byte cap of the cold tier would hold less than it says."""
        block = block_of((dtype, words(dtype, (2, 256, 99), "random")))

        assert len(PlaneCodec().encode(block)) <= 1.01 * block.n_bytes

    def test_a_tensor_that_does_not_shrink_is_not_split(self) -> None:
        """If it failed, every read would pay for merging planes that saved nothing."""
        block = block_of(("bfloat16", words("bfloat16", (2, 99), "random")))
        _, payload = taken_apart(PlaneCodec().encode(block))

        assert block.tensors[0].tobytes() == payload


def golden_example() -> Block:
    """The worked example of the format page."""
    return block_of(("bfloat16", (0x3F80 + np.arange(32)).astype("<u2").reshape(1, 1, 16, 2)))


def golden_raw() -> Block:
    """Tensors too small or too random to shrink: no byte depends on the zstd library."""
    halves = np.array([0x3C00, 0xC000, 0x7E01, 0x7C00, 0x3800, 0x8000], np.uint16)
    noise = (np.arange(1, 513, dtype=np.uint64) * 0x9E3779B97F4A7C15) >> 40
    return block_of(
        ("float16", halves.reshape(1, 1, 2, 3)),
        ("int64", np.zeros((2, 0, 5), np.int64)),
        ("bfloat16", (noise & 0xFFFF).astype(np.uint16).reshape(2, 1, 4, 64)),
        ("bool", np.array([True, False, True])),
    )


def golden_planes() -> Block:
    """Every dtype with content that shrinks, NaN and infinity among the floats."""
    ramp = np.arange(640, dtype=np.uint64)
    tensors: list[Tensor] = []
    for dtype, size in sorted(ITEMSIZE.items()):
        content = (ramp * ramp) % 2 if dtype == "bool" else (ramp * 37) % 31
        if dtype in FLOATS:
            content = content + (0x7F80 << (8 * size - 16))
        tensors.append((dtype, content.astype(WORDS[size]).reshape(2, 5, 16, 4)))
    return block_of(*tensors)


GOLDEN = {"example": golden_example, "raw": golden_raw, "planes": golden_planes}


class TestGolden:
    @pytest.mark.parametrize("name", sorted(GOLDEN))
    def test_a_blob_written_long_ago_still_decodes(self, name: str) -> None:
        """If it failed, an update would lose every stored block."""
        block = GOLDEN[name]()
        blob = (DATA / f"golden-{name}.bin").read_bytes()

        assert contents(block.specs, block.tensors) == decoded(blob, block.n_bytes)

    def test_encode_still_writes_the_same_bytes(self) -> None:
        """If it failed, the format would have changed without a new version number."""
        assert (DATA / "golden-raw.bin").read_bytes() == PlaneCodec().encode(golden_raw())

    @pytest.mark.parametrize("name", ["example", "planes"])
    def test_encode_still_writes_the_same_planes(self, name: str) -> None:
        """If it failed, the format would have changed but for what a zstd version may change."""
        written = [(DATA / f"golden-{name}.bin").read_bytes(), PlaneCodec().encode(GOLDEN[name]())]

        old, new = ([taken_apart(blob)[0]["__metadata__"], by_the_book(blob)] for blob in written)

        assert old == new


def bounded_decode(codec: Codec, blob: bytes, n_bytes: int) -> None:
    """Decode within bounds of memory: a block's worth, a scratch's, and what a header needs."""
    tracemalloc.start()
    try:
        _, tensors = codec.decode(blob, n_bytes)
        assert n_bytes == sum(tensor.nbytes for tensor in tensors)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 * n_bytes + 32 * min(len(blob), MAX_HEADER_BYTES) + (1 << 16)


TARGETS = [golden_example(), golden_raw(), golden_planes()]
BLOBS = [PlaneCodec().encode(block) for block in TARGETS]
RECORDED = [checksum(blob) for blob in BLOBS]


@st.composite
def mutated(draw: st.DrawFn, blobs: list[bytes]) -> tuple[int, bytes]:
    """Index of a blob, and the blob after one to three edits, of header or payload."""
    which = draw(st.integers(0, len(blobs) - 1))
    blob = bytearray(blobs[which])
    start = 8 + int.from_bytes(blob[:8], "little")
    for _ in range(draw(st.integers(1, 3))):
        top = draw(st.sampled_from([8, start, max(len(blob) - 1, 0)]))
        at = draw(st.integers(0, min(top, len(blob))))
        length = draw(st.integers(0, 40))
        edit = draw(st.sampled_from(["flip", "cut", "insert", "splice", "truncate", "digit"]))
        if edit == "flip" and at < len(blob):
            blob[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == "cut":
            del blob[at : at + length]
        elif edit == "insert":
            blob[at:at] = draw(st.binary(min_size=1, max_size=40))
        elif edit == "splice":
            other = draw(st.sampled_from(blobs))
            source = draw(st.integers(0, len(other)))
            blob[at : at + length] = other[source : source + length]
        elif edit == "truncate":
            del blob[at:]
        elif edit == "digit":
            digits = [i for i in range(min(start, len(blob))) if 48 <= blob[i] <= 57]
            if digits:
                blob[draw(st.sampled_from(digits))] = draw(st.integers(48, 57))
    return which, bytes(blob)


class TestDamage:
    @given(mutated(BLOBS))
    @settings(deadline=None, max_examples=600)
    def test_a_damaged_blob_never_gives_other_data(self, damaged: tuple[int, bytes]) -> None:
        """If it failed, a flipped bit on disk would change the output of a model."""
        which, blob = damaged
        block = TARGETS[which]
        if checksum(blob) != RECORDED[which]:
            assert blob != BLOBS[which]
            return
        assert contents(block.specs, block.tensors) == decoded(blob, block.n_bytes)

    @given(mutated(BLOBS))
    @settings(deadline=None, max_examples=600)
    def test_decode_fails_in_one_way_only(self, damaged: tuple[int, bytes]) -> None:
        """If it failed, a damaged file could kill the server or exhaust its memory."""
        which, blob = damaged
        try:
            bounded_decode(PlaneCodec(), blob, TARGETS[which].n_bytes)
        except CorruptBlob:
            return

    @given(mutated(BLOBS))
    @settings(deadline=None, max_examples=300)
    def test_only_one_spelling_of_a_header_is_accepted(self, damaged: tuple[int, bytes]) -> None:
        """If it failed, the parser would accept headers that the encoder never writes."""
        which, blob = damaged
        try:
            PlaneCodec().decode(blob, TARGETS[which].n_bytes)
        except CorruptBlob:
            return
        header, payload = taken_apart(blob)
        assert blob == forge(header, payload)

    @given(st.binary(max_size=200))
    def test_garbage_is_corrupt(self, codec: Codec, garbage: bytes) -> None:
        """If it failed, a foreign value in the file would raise something unexpected."""
        with pytest.raises(CorruptBlob):
            codec.decode(garbage, 100)

    @given(st.sampled_from(BLOBS), st.integers(0, 1 << 16))
    def test_another_size_than_the_record_says_is_corrupt(
        self, codec: Codec, blob: bytes, n_bytes: int
    ) -> None:
        """If it failed, a blob could make the reader allocate what nobody planned for."""
        if n_bytes in {block.n_bytes for block in TARGETS}:
            return
        with pytest.raises(CorruptBlob):
            codec.decode(blob, n_bytes)

    @pytest.mark.parametrize("at", [0, 1, -1])
    def test_a_checksum_covers_first_and_last_bytes(self, at: int) -> None:
        """If it failed, damage at the edge of a blob would go unseen."""
        blob = bytearray(BLOBS[0])
        blob[at] ^= 1

        assert checksum(bytes(blob)) != checksum(BLOBS[0])

    def test_the_checksum_is_the_documented_one(self) -> None:
        """If it failed, records written before would condemn every blob."""
        assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"


def frame_of(data: bytes, **parameters: Any) -> bytes:
    fast = {"strategy": zstandard.STRATEGY_FAST, "window_log": 17, **parameters}
    made = zstandard.ZstdCompressionParameters(**fast)
    return zstandard.ZstdCompressor(compression_params=made).compress(data)


ZEROS = bytes(1 << 20)
GOOD_FRAME = frame_of(ZEROS)
HUGE = 1 << 62

# What is wrong → the blob and the raw size its record would name.
HOSTILE: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 0),
    "no header": ((0).to_bytes(8, "little"), 0),
    "header length beyond the end": ((1 << 63).to_bytes(8, "little") + b"{}      ", 0),
    "header longer than allowed": (
        forge(several(*[(6 * i, 6 * i + 6) for i in range(3000)]), bytes(18000)),
        18000,
    ),
    "not JSON": (forge("{"), 0),
    "not ASCII": (forge(b'{"\xff":1}'), 0),
    "lone surrogate": (forge('{"__metadata__":{"tensors":"\\ud800"}}'), 0),
    "a list": (forge("[]"), 0),
    "deep nesting": (forge("[" * 100_000), 0),
    "deep nesting of objects": (forge('{"a":' * 40_000), 0),
    "deep nesting in the metadata": (forge({"__metadata__": {"tensors": "[" * 100_000}}), 0),
    "endless integer": (forge('{"__metadata__":' + "9" * 100_000 + "}"), 0),
    "many empty lists": (forge("[" + "[]," * 80_000 + "[]]"), 0),
    "no metadata": (forge({}), 0),
    "metadata is no object": (forge({"__metadata__": []}), 0),
    "tensors are no list": (forge({"__metadata__": {"tensors": "{}"}}), 0),
    "a tensor is no object": (forge({"__metadata__": {"tensors": "[1]"}}), 0),
    "unknown format": (forge(compact(described()).replace("tieredkv", "other"), bytes(12)), 12),
    "unknown version": (forge(compact(described()).replace('"3"', '"1"'), bytes(12)), 12),
    "spaces": (forge(json.dumps(described()), bytes(12)), 12),
    "padding of 16": (
        forge(compact(described()) + " " * 9, bytes(12)),
        12,
    ),
    "repeated name": (
        forge(
            compact(described())[:-1] + ',"0.0":{"dtype":"U8","shape":[12],"data_offsets":[0,12]}}',
            bytes(12),
        ),
        12,
    ),
    "unknown tensor": (
        forge(described(x={"dtype": "U8", "shape": [0], "data_offsets": [12, 12]}), bytes(12)),
        12,
    ),
    "unknown dtype": (forge(described("float64", (2, 3)), bytes(12)), 48),
    "dtype is a list": (forge(described(["uint16"]), bytes(12)), 12),
    "shape is no list": (forge(described(shape=6), bytes(12)), 12),
    "shape of another size": (forge(described(shape=(2, 4)), bytes(12)), 12),
    "fewer bytes than the shape needs": (
        forge(described(shape=(2, 4), planes=(("raw", 16),)), bytes(12)),
        16,
    ),
    "negative shape": (forge(described(shape=(-2, -3)), bytes(12)), 12),
    "float in shape": (forge(described(shape=(2.0, 3)), bytes(12)), 12),
    "bool in shape": (forge(described(shape=(True, 6)), bytes(12)), 12),
    "infinite shape": (forge(described(shape=(float("inf"), 3)), bytes(12)), 12),
    "huge shape": (forge(described(shape=(HUGE, HUGE)), bytes(12)), 2 * HUGE * HUGE),
    "huge shape that wraps to 12 bytes": (forge(described(shape=(HUGE, 4, 3, 2)), bytes(12)), 12),
    "large shape as its record says": (
        forge(described("uint8", (1 << 39,), (("raw", 1 << 39),), (0, 1 << 39)), bytes(12)),
        1 << 39,
    ),
    "huge empty shape": (
        forge(described(shape=(0, HUGE), planes=(("raw", 0),), offsets=(0, 0))),
        0,
    ),
    "many dimensions": (forge(described(shape=(1,) * 60 + (6,)), bytes(12)), 12),
    "no planes": (forge(described(planes=()), bytes(12)), 12),
    "planes are no list": (forge(described(planes="raw"), bytes(12)), 12),
    "three planes of two bytes": (forge(described(planes=(("raw", 4),) * 3), bytes(12)), 12),
    "unknown encoding": (forge(described(planes=(("lz4", 12),)), bytes(12)), 12),
    "wrong raw length": (forge(described(planes=(("raw", 13),)), bytes(12)), 12),
    "raw length is a float": (forge(described(planes=(("raw", 12.0),)), bytes(12)), 12),
    "unsplit words compressed": (
        forge(described(planes=(("zstd", 12),), offsets=(0, 11)), bytes(11)),
        12,
    ),
    "no offsets": (forge(described(offsets=()), bytes(12)), 12),
    "negative offsets": (forge(described(offsets=(-12, 0)), bytes(12)), 12),
    "offsets reversed": (forge(described(offsets=(12, 0)), bytes(12)), 12),
    "float offsets": (forge(described(offsets=(0, 12.0)), bytes(12)), 12),
    "gap before a plane": (forge(described(offsets=(4, 16)), bytes(16)), 12),
    "huge offsets": (forge(described(offsets=(0, HUGE)), bytes(12)), 12),
    "payload too short": (forge(described(), bytes(11)), 12),
    "payload too long": (forge(described(), bytes(13)), 12),
    "all planes raw": (
        forge(
            {
                **described(planes=(("raw", 6), ("raw", 6)), offsets=(0, 6)),
                "0.1": {"dtype": "U8", "shape": [6], "data_offsets": [6, 12]},
            },
            bytes(12),
        ),
        12,
    ),
    "overlapping tensors": (forge(several((0, 6), (3, 9)), bytes(9)), 12),
    "one place for two tensors": (forge(several((0, 6), (0, 6)), bytes(6)), 12),
    "gap between tensors": (forge(several((0, 6), (7, 13)), bytes(13)), 12),
    "tensors in another order": (forge(several((6, 12), (0, 6)), bytes(12)), 12),
    "a bool of 2": (forge(described("bool", (12,)), b"\2" * 12), 12),
    "frame is garbage": (framed(b"\xff" * 20, 100), 100),
    "frame of another size": (framed(GOOD_FRAME, 1000), 1000),
    "frame smaller than its plane": (framed(frame_of(bytes(500)), 1000), 1000),
    "frame without a size": (framed(frame_of(ZEROS, write_content_size=False), 1 << 20), 1 << 20),
    "frame with a checksum": (framed(frame_of(ZEROS, write_checksum=True), 1 << 20), 1 << 20),
    "frame with a huge window": (framed(frame_of(ZEROS, window_log=19), 1 << 20), 1 << 20),
    "frame cut off": (framed(GOOD_FRAME[:-1], 1 << 20), 1 << 20),
    "frame and a byte": (framed(GOOD_FRAME + b"\0", 1 << 20), 1 << 20),
    "two frames": (framed(GOOD_FRAME * 2, 1 << 20), 1 << 20),
    "skippable frame": (framed(b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + bytes(4), 99), 99),
    "frame that holds more than it declares": (
        framed(GOOD_FRAME[:6] + (99999).to_bytes(4, "little") + GOOD_FRAME[10:], 99999),
        99999,
    ),
    "frame as large as its plane": (framed(frame_of(bytes(range(32))), 32), 32),
    "frame of no bytes": (
        forge(described("uint8", (0,), (("zstd", 0),), (0, 0))),
        0,
    ),
}


class TestHostile:
    @pytest.mark.parametrize("name", sorted(HOSTILE))
    def test_is_refused_within_bounds(self, codec: Codec, name: str) -> None:
        """If it failed, whoever can write the cold directory could crash or exhaust the reader."""
        with pytest.raises(CorruptBlob):
            bounded_decode(codec, *HOSTILE[name])

    def test_the_forgers_own_blobs_are_good_before_the_damage(self) -> None:
        """If it failed, the table of hostile blobs would be refused for the wrong reason."""
        both = forge(several((0, 6), (6, 12)), bytes(12))

        assert decoded(forge(described(), bytes(12)), 12) == [("uint16", (2, 3), bytes(12))]
        assert decoded(both, 12) == [("uint8", (6,), bytes(6))] * 2
        assert decoded(framed(GOOD_FRAME, 1 << 20), 1 << 20) == [("uint8", (1 << 20,), ZEROS)]


class TestThreads:
    def test_one_codec_serves_many_threads(self, codec: Codec) -> None:
        """If it failed, the writer thread and a read would corrupt each other's frames."""
        kinds = [(d, k, i) for d in FLOATS for k in ("values", "random") for i in range(3)]
        blocks = [block_of((d, words(d, (2, 64, 200), k, i))) for d, k, i in kinds]
        alone = [type(codec)().encode(block) for block in blocks]

        def both_ways(i: int) -> bool:
            block = blocks[i % len(blocks)]
            blob = codec.encode(block)
            back = contents(*codec.decode(blob, block.n_bytes))
            return blob == alone[i % len(blocks)] and back == contents(block.specs, block.tensors)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(both_ways, range(8 * len(blocks))))
