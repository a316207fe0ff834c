"""The lossy codec: how far off it may be, what it must leave alone, and whom it must stay from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from caches import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from numpy.typing import NDArray
from test_codec import (
    bounded_decode,
    by_the_book,
    compact,
    contents,
    decoded,
    forge,
    mutated,
    taken_apart,
    words,
)

from tieredkv import TieredPromptCache
from tieredkv.cli import main
from tieredkv.codec import PlaneCodec
from tieredkv.core import FORMAT_VERSION, Block, BlockKey, CorruptBlob, TensorSpec
from tieredkv.keys import WINDOW_TOKENS
from tieredkv.quantize import GROUP_TOKENS, QuantizingCodec

FLOATS = ("bfloat16", "float16", "float32")
# Of the fraction of each dtype, in the last place.
PRECISION = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
# Between the values nearest to zero.
LEAST = {"bfloat16": 0.0, "float16": 2.0**-24, "float32": 0.0}


def rows_of(
    *tensors: tuple[str, NDArray[Any]], n_tokens: int, tokens: bytes | None = None
) -> Block:
    """A block of rows of tokens."""
    return Block(
        BlockKey(b"root"),
        BlockKey(b"parent"),
        BlockKey(b"key"),
        bytes(8 * n_tokens) if tokens is None else tokens,
        tuple(TensorSpec(dtype, array.shape) for dtype, array in tensors),
        tuple(array for _, array in tensors),
    )


def as_floats(dtype: str, array: Any) -> NDArray[np.float64]:
    raw = np.asarray(array)
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(dtype).astype(np.float64)


def as_words(dtype: str, values: NDArray[Any]) -> NDArray[Any]:
    floats = np.ascontiguousarray(values, np.float32)
    if dtype == "bfloat16":
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    return floats.astype(dtype).view({2: np.uint16, 4: np.uint32}[np.dtype(dtype).itemsize])


def groups(values: NDArray[Any]) -> list[NDArray[Any]]:
    """Runs of tokens that share a scale in each channel."""
    return [values[:, :, i : i + GROUP_TOKENS] for i in range(0, values.shape[2], GROUP_TOKENS)]


def assert_close(dtype: str, before: Any, after: Any) -> None:
    pairs = zip(groups(as_floats(dtype, before)), groups(as_floats(dtype, after)), strict=True)
    for old, new in pairs:
        low, high = old.min(2, keepdims=True), old.max(2, keepdims=True)
        # The scale is rounded up to bfloat16; the largest value may be by half a step more.
        step = (high - low) / 255 * (1 + 2.0**-7)
        largest = np.maximum(np.abs(low), np.abs(high)) + step
        assert np.all(np.abs(old - new) <= step / 2 + largest * PRECISION[dtype] * 2 + LEAST[dtype])
        assert np.array_equal(old.min(2), new.min(2))


shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2 * GROUP_TOKENS + 3), st.integers(1, 9)
)


class TestError:
    @given(st.sampled_from(FLOATS), shapes, st.integers(0, 2**32 - 1), st.floats(-9, 3))
    @settings(deadline=None, max_examples=150)
    def test_each_value_is_within_half_a_step_of_its_group(
        self, dtype: str, shape: tuple[int, ...], seed: int, size: float
    ) -> None:
        """If it failed, a promoted prefix would be further off than the docs promise."""
        values = np.random.default_rng(seed).standard_normal(shape) * 10**size
        block = rows_of((dtype, as_words(dtype, values)), n_tokens=shape[2])

        _, (back,) = QuantizingCodec().decode(QuantizingCodec().encode(block), block.n_bytes)

        assert_close(dtype, block.tensors[0], back)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_channels_of_unlike_size_do_not_harm_each_other(self, dtype: str) -> None:
        """If it failed, a key's few large channels would round all others to nothing."""
        values = np.random.default_rng(1).standard_normal((2, 2, 128, 16))
        values[..., 3] *= 1000
        block = rows_of((dtype, as_words(dtype, values)), n_tokens=128)

        _, (back,) = QuantizingCodec().decode(QuantizingCodec().encode(block), block.n_bytes)

        off = np.abs(as_floats(dtype, back) - values)
        assert off[..., 3].max() > 1
        assert np.delete(off, 3, axis=3).max() < 0.05

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("value", [0.0, -3.5, 2.0**-14])
    def test_equal_values_come_back_exactly(self, dtype: str, value: float) -> None:
        """If it failed, a range of zero would divide by zero."""
        block = rows_of((dtype, as_words(dtype, np.full((1, 2, 70, 3), value))), n_tokens=70)

        blob = QuantizingCodec().encode(block)

        assert contents(block.specs, block.tensors) == decoded(
            blob, block.n_bytes, QuantizingCodec()
        )

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_it_is_about_half_of_16_bits(self, dtype: str) -> None:
        """If it failed, what is lost would not even buy room."""
        block = rows_of((dtype, words(dtype, (4, 2, 256, 64), "values")), n_tokens=256)

        share = len(QuantizingCodec().encode(block)) / block.n_bytes

        assert share < (0.29 if dtype == "float32" else 0.55)

    def test_memory_that_was_given_is_written_to(self) -> None:
        """If it failed, a promote would need a copy more, or fill the hot tier with nothing."""
        block = rows_of(("float16", words("float16", (2, 1, 70, 5), "values")), n_tokens=70)
        codec = QuantizingCodec()
        parsed = codec.parse(codec.encode(block), block.n_bytes)
        array = mx.zeros((2, 1, 70, 5), mx.float16)
        mx.eval(array)

        codec.decode_parsed(parsed, [array])

        (alone,) = codec.decode_parsed(parsed)
        assert bytes(memoryview(array)) == alone.tobytes()

    def test_threads_do_not_share_memory(self) -> None:
        """If it failed, two blocks that are promoted at once would mix."""
        codec = QuantizingCodec()
        blocks = [
            rows_of(("bfloat16", words("bfloat16", (3, 2, 90, 40), "values", i)), n_tokens=90)
            for i in range(6)
        ]
        blobs = [QuantizingCodec().encode(b) for b in blocks]
        alone = [decoded(blob, blocks[0].n_bytes, QuantizingCodec()) for blob in blobs]

        def both_ways(i: int) -> bool:
            blob = codec.encode(blocks[i % 6])
            return (blob, decoded(blob, blocks[0].n_bytes, codec)) == (blobs[i % 6], alone[i % 6])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(both_ways, range(48)))


ROWS = ("bfloat16", words("bfloat16", (2, 2, 64, 8), "values"))


class TestExact:
    """What must come back bit for bit, and is stored as by `PlaneCodec`."""

    @pytest.mark.parametrize(
        "block",
        [
            rows_of(ROWS, n_tokens=64, tokens=b""),
            rows_of(
                ("bfloat16", words("bfloat16", (2, 2, 1, 8), "values")),
                n_tokens=1,
                tokens=WINDOW_TOKENS,
            ),
            rows_of(ROWS, ("uint32", words("uint32", (2, 2, 64, 4), "random")), n_tokens=64),
            rows_of(
                ("float16", np.array([[[[1], [np.inf]]]], np.float16).view(np.uint16)), n_tokens=2
            ),
            rows_of(
                ("float32", np.array([[[[1], [np.nan]]]], np.float32).view(np.uint32)), n_tokens=2
            ),
            rows_of(
                ("float32", np.array([[[[3e38], [-3e38]]]], np.float32).view(np.uint32)), n_tokens=2
            ),
            rows_of(("bfloat16", words("bfloat16", (64, 8), "values")), n_tokens=64),
            rows_of(("bfloat16", np.zeros((2, 0, 64, 8), np.uint16)), n_tokens=64),
        ],
        ids=["snapshot", "window", "host-quantized", "inf", "nan", "huge", "no rows", "empty"],
    )
    def test_is_stored_losslessly(self, block: Block) -> None:
        """If it failed, state that can't bear it would be rounded, or a NaN made a number."""
        blob = QuantizingCodec().encode(block)

        assert blob == PlaneCodec().encode(block)
        assert contents(block.specs, block.tensors) == decoded(
            blob, block.n_bytes, QuantizingCodec()
        )

    def test_one_tensor_that_must_stay_exact_does_not_keep_others_from_it(self) -> None:
        """If it failed, an infinite value in one kind of layer would cost all their room."""
        odd = ("float32", np.full((1, 1, 64, 2), np.inf, np.float32).view(np.uint32))
        block = rows_of(odd, ROWS, n_tokens=64)

        specs, (exact, close) = QuantizingCodec().decode(
            QuantizingCodec().encode(block), block.n_bytes
        )

        assert specs == block.specs
        assert exact.tobytes() == block.tensors[0].tobytes()
        assert_close("bfloat16", block.tensors[1], close)


GOOD = QuantizingCodec().encode(rows_of(ROWS, n_tokens=64))
N_BYTES = 2 * 2 * 64 * 8 * 2
MIXED = QuantizingCodec().encode(
    rows_of(
        ("float32", np.full((1, 1, 12, 2), np.inf, np.float32).view(np.uint32)),
        ("float16", words("float16", (1, 2, 12, 3), "values")),
        n_tokens=12,
    )
)
SMALL = [MIXED, GOOD]
SIZES = [96 + 144, N_BYTES]


def restored_by_the_book(blob: bytes) -> NDArray[np.uint16]:
    """A decoder of one bfloat16 tensor, written from the format page."""
    codes, scales, offsets = (
        np.frombuffer(data, np.uint8 if dtype == "uint8" else np.uint16).reshape(shape)
        for dtype, shape, data in by_the_book(blob)
    )
    scales, offsets = ((x.astype(np.uint32) << 16).view(np.float32) for x in (scales, offsets))
    group = np.arange(codes.shape[2]) // 64
    values = codes.astype(np.float32) * scales[:, :, group] + offsets[:, :, group]
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def forged(tensors: Any, payload: bytes = b"") -> bytes:
    """A blob that says that it has these tensors, each unsplit and raw, in 8 bits a value."""
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "tieredkv-q8",
            "tensors": compact(
                [{"dtype": d, "planes": [["raw", n]], "shape": s} for d, s, n in tensors]
            ),
            "version": str(FORMAT_VERSION),
        }
    }
    stop = 0
    for i, (_, _, n) in enumerate(tensors):
        start, stop = stop, stop + n
        header[f"{i}.0"] = {"dtype": "U8", "shape": [n], "data_offsets": [start, stop]}
    return forge(header, payload or bytes(stop))


CODES = ("uint8", (1, 1, 16, 3), 48)
SCALES = ("bfloat16", (1, 1, 1, 3), 6)
HUGE = 1 << 39

# What is wrong → the blob and the raw size its record would name.
HOSTILE: dict[str, tuple[bytes, int]] = {
    "nothing quantized": (forged([("float16", (1, 1, 16, 3), 96)]), 96),
    "no tensors": (forged([]), 0),
    "codes alone": (forged([CODES]), 96),
    "codes without offsets": (forged([CODES, SCALES]), 96),
    "offsets that are no floats": (forged([CODES, SCALES, ("uint16", (1, 1, 1, 3), 6)]), 96),
    "scales of another dtype": (forged([CODES, ("float16", (1, 1, 1, 3), 6), SCALES]), 96),
    "scales of another shape": (forged([CODES, ("bfloat16", (1, 1, 3, 1), 6), SCALES]), 96),
    "more groups than tokens": (
        forged([CODES, ("bfloat16", (1, 1, 2, 3), 12), ("bfloat16", (1, 1, 2, 3), 12)]),
        96,
    ),
    "codes that are no rows of tokens": (
        forged([("uint8", (16, 3), 48), ("bfloat16", (1, 3), 6), ("bfloat16", (1, 3), 6)]),
        96,
    ),
    "no codes in codes": (
        forged([("uint8", (1, 0, 16, 3), 0), *[("bfloat16", (1, 0, 1, 3), 0)] * 2]),
        0,
    ),
    "words among the exact tensors": (
        forged([CODES, SCALES, SCALES, ("uint32", (1, 1, 2, 1), 8)]),
        104,
    ),
    "tokens too few to shrink": (
        forged([("uint8", (1, 1, 4, 3), 12), SCALES, SCALES]),
        24,
    ),
    "another raw size": (forged([CODES, SCALES, SCALES]), 97),
    "the raw size of its own tensors": (forged([CODES, SCALES, SCALES]), 60),
    "larger than its record says": (
        forged([("uint8", (1, 1, HUGE, 1), HUGE), SCALES, SCALES], bytes(20)),
        100,
    ),
    "the other format's name": (
        forged([CODES, SCALES, SCALES]).replace(b"tieredkv-q8", b"tieredkv-q9"),
        96,
    ),
    "a space before the name": (
        forge(b" " + forged([CODES, SCALES, SCALES])[8:], bytes(60)),
        96,
    ),
}


class TestFormat:
    def test_a_stranger_can_decode_it_from_the_format_page(self) -> None:
        """If it failed, blobs would not be safetensors files or not what is documented."""
        block = rows_of(("bfloat16", words("bfloat16", (2, 3, 200, 7), "values")), n_tokens=200)
        blob = QuantizingCodec().encode(block)

        _, (ours,) = QuantizingCodec().decode(blob, block.n_bytes)

        assert np.array_equal(restored_by_the_book(blob), ours)

    def test_who_wants_it_exact_does_not_take_it(self) -> None:
        """If it failed, a server without the option could answer from rounded state."""
        with pytest.raises(CorruptBlob):
            PlaneCodec().decode(GOOD, N_BYTES)

    @pytest.mark.parametrize("name", sorted(HOSTILE))
    def test_a_hostile_blob_is_refused_within_bounds(self, name: str) -> None:
        """If it failed, whoever can write the cold directory could crash or exhaust the reader."""
        with pytest.raises(CorruptBlob):
            bounded_decode(QuantizingCodec(), *HOSTILE[name])

    def test_the_forgers_own_blob_is_good_before_the_damage(self) -> None:
        """If it failed, the table of hostile blobs would be refused for the wrong reason."""
        blob = forged([CODES, SCALES, SCALES])

        assert decoded(blob, 96, QuantizingCodec()) == [("bfloat16", (1, 1, 16, 3), bytes(96))]

    @given(mutated(SMALL))
    @settings(deadline=None, max_examples=400)
    def test_damage_is_corrupt_and_a_header_has_one_spelling(
        self, damaged: tuple[int, bytes]
    ) -> None:
        """If it failed, a damaged file could kill the server or be read as something else."""
        which, blob = damaged
        try:
            bounded_decode(QuantizingCodec(), blob, SIZES[which])
        except CorruptBlob:
            return
        assert blob == forge(*taken_apart(blob))


def live(tokens: list[int], width: int = 16) -> list[Any]:
    """Caches of two layers with noise that depends on the first token."""
    made = []
    for layer in range(2):
        dice = np.random.default_rng([*tokens[:1], layer])
        noise = mx.array(dice.standard_normal((2, 1, 2, len(tokens), width)).astype(np.float32))
        cache = KVCache()
        cache.update_and_fetch(*noise.astype(mx.bfloat16))
        made.append(cache)
    return made


def state(cached: list[Any], n: int) -> list[NDArray[np.float32]]:
    arrays = [a[:, :, :n].astype(mx.float32) for c in cached for a in (c.keys, c.values)]
    return [np.array(a) for a in arrays]


TOKENS = [*range(100, 140)]


@pytest.fixture
def lossy(tmp_path: Path) -> Iterator[TieredPromptCache]:
    with TieredPromptCache(tmp_path / "cold", block_tokens=16, cold_quantize="q8") as cache:
        cache.insert_cache(MODEL, TOKENS, live(TOKENS))
        assert cache.flush(10)
        yield cache
        assert cache.check() == []
        assert cache.stats().faults == {}


def fetched(cache: TieredPromptCache, tokens: list[int] = TOKENS) -> list[NDArray[np.float32]]:
    found, rest = cache.fetch_nearest_cache(MODEL, [*tokens, 1])
    assert found is not None
    assert rest == [1]
    return state(found, len(tokens))


class TestCache:
    def test_a_hot_hit_is_exact_and_a_promoted_one_is_close(self, lossy: TieredPromptCache) -> None:
        """If it failed, memory would lose precision too, or nothing be saved on disk."""
        exact = state(live(TOKENS), len(TOKENS))
        hot = fetched(lossy)
        lossy.trim_to(n_bytes=0)
        cold = fetched(lossy)

        assert all(map(np.array_equal, exact, hot))
        for before, after in zip(exact, cold, strict=True):
            assert 0 < np.abs(before - after).max() < 0.03

    def test_what_was_promoted_is_the_same_each_time(self, lossy: TieredPromptCache) -> None:
        """If it failed, what is restored would not be what the store holds."""
        lossy.trim_to(n_bytes=0)
        first = fetched(lossy)
        from_memory = fetched(lossy)
        lossy.trim_to(n_bytes=0)
        again = fetched(lossy)

        assert all(map(np.array_equal, first, from_memory))
        assert all(map(np.array_equal, first, again))

    def test_a_next_turn_does_not_encode_what_is_there_again(
        self, lossy: TieredPromptCache
    ) -> None:
        """If it failed, a conversation would lose a little more of its start with each turn."""
        lossy.trim_to(n_bytes=0)
        before = fetched(lossy)
        found, _ = lossy.fetch_nearest_cache(MODEL, [*TOKENS, 1])
        assert found is not None
        longer = [*TOKENS, *range(20)]
        for cache, more in zip(found, live(longer), strict=True):
            cache.update_and_fetch(more.keys[:, :, 40:60], more.values[:, :, 40:60])
        written = lossy.stats().bytes_written
        lossy.insert_cache(MODEL, longer, found)
        assert lossy.flush(10)
        lossy.trim_to(n_bytes=0)
        after = fetched(lossy, longer)

        # The tail of 8 tokens is replaced, the two blocks before it stay.
        pairs = zip(before, after, strict=True)
        assert lossy.stats().bytes_written - written < written
        assert all(np.array_equal(a[:, :, :32], b[:, :, :32]) for a, b in pairs)

    def test_caches_with_and_without_it_find_nothing_of_each_other(
        self, lossy: TieredPromptCache, tmp_path: Path
    ) -> None:
        """If it failed, a hit would change the output of a server that was promised it doesn't."""
        with TieredPromptCache(tmp_path / "cold", block_tokens=16) as exact:
            assert exact.fetch_nearest_cache(MODEL, [*TOKENS, 1])[0] is None
            other = [*range(300, 340)]
            exact.insert_cache(MODEL, other, live(other))
            assert exact.flush(10)
            assert lossy.fetch_nearest_cache(MODEL, [*other, 1])[0] is None
            exact.trim_to(n_bytes=0)
            assert all(map(np.array_equal, fetched(exact, other), state(live(other), 40)))

    @pytest.mark.usefixtures("lossy")
    def test_stats_say_that_it_is_not_exact_and_verify_reads_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """If it failed, nobody could tell such prompts from others, or verify would fail."""
        folder = ["--dir", str(tmp_path / "cold")]
        assert main(["stats", *folder]) == 0
        assert "NOT EXACT" in capsys.readouterr().out
        assert main(["stats", "--json", *folder]) == 0
        (namespace,) = json.loads(capsys.readouterr().out)["namespaces"]
        assert namespace["cold_quantize"] == "q8"
        assert main(["verify", *folder]) == 0
        assert main(["prune", "--unsalted", "--dry-run", *folder]) == 0
        assert "3 blocks" in capsys.readouterr().out

    def test_another_way_is_an_error(self) -> None:
        """If it failed, a typing error would keep state in a namespace that nobody asked for."""
        with pytest.raises(ValueError, match="cold_quantize"):
            TieredPromptCache(cold_quantize="q4")
