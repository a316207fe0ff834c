"""What a block takes on disk, and what it costs to make and to read it, by the kind of its data.

Real keys and values of SmolLM2, cast or quantized as other models hold theirs, against zstd of
the same bytes at its level 3, which people use for whole files.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
import zstandard
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import fastest
from bench.state import SMALL, prefilled
from tieredkv.codec import PlaneCodec
from tieredkv.core import Block, BlockKey, TensorSpec

_ROWS = 256
_KEY = BlockKey(bytes(32))


def _stacked() -> mx.array:
    """One block of SmolLM2: (leaves, heads, tokens, width), bfloat16."""
    rows = slice(_ROWS, 2 * _ROWS)
    return mx.concatenate([leaf[:, :, rows] for leaf in prefilled().leaves], axis=0)


def _cast(dtype: mx.Dtype) -> list[mx.array]:
    """In a dtype of more bits, of which those that bfloat16 lacks are noise, as computed ones."""
    values = _stacked()
    if dtype == mx.bfloat16:
        return [values]
    noise = mx.random.uniform(-1, 1, values.shape, key=mx.random.key(0)) * 2.0**-9
    return [(values.astype(mx.float32) * (1 + noise)).astype(dtype)]


def _quantized() -> list[mx.array]:
    words, scales, biases = mx.quantize(_stacked(), group_size=64, bits=4)
    return [words, scales, biases]


def _noise() -> list[mx.array]:
    n = SMALL.bytes_per_token * _ROWS
    return [mx.array(np.frombuffer(os.urandom(n), np.uint32).reshape(1, 1, 1, -1))]


KINDS: dict[str, Callable[[], list[mx.array]]] = {
    "bfloat16": lambda: _cast(mx.bfloat16),
    "float16": lambda: _cast(mx.float16),
    "float32": lambda: _cast(mx.float32),
    "4-bit words": _quantized,
    "noise": _noise,
}


def _block(tensors: list[mx.array]) -> Block:
    mx.eval(tensors)
    specs = tuple(TensorSpec(str(t.dtype).rpartition(".")[2], tuple(t.shape)) for t in tensors)
    return Block(_KEY, _KEY, _KEY, b"", specs, tuple(tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_codec(benchmark: BenchmarkFixture, kind: str) -> None:
    """Bytes and CPU time of one block; decoded into memory that is there."""
    codec, block = PlaneCodec(), _block(KINDS[kind]())
    raw = b"".join(bytes(memoryview(t)) for t in block.tensors)  # type: ignore[arg-type]  # as codec
    packer, unpacker = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    blob, packed = codec.encode(block), packer.compress(raw)
    into = [np.empty(spec.n_bytes, np.uint8) for spec in block.specs]
    parsed = codec.parse(blob, block.n_bytes)
    contestants = {
        "encode": lambda: codec.encode(block),
        "zstd-3": lambda: packer.compress(raw),
        "decode": lambda: codec.decode_parsed(parsed, into),
        "zstd-3 back": lambda: unpacker.decompress(packed),
    }
    seconds = {name: spent.seconds for name, spent in fastest(contestants, rounds=9).items()}
    assert b"".join(memoryview(t).cast("B") for t in into) == raw
    benchmark.pedantic(contestants["decode"], rounds=1)
    benchmark.extra_info |= {
        "encoded / raw bytes": len(blob) / len(raw),
        "zstd-3 / raw bytes": len(packed) / len(raw),
        "encode / zstd-3": seconds["encode"] / seconds["zstd-3"],
        "decode / zstd-3": seconds["decode"] / seconds["zstd-3 back"],
        "encode GB/s": len(raw) / seconds["encode"] / 1e9,
        "decode GB/s": len(raw) / seconds["decode"] / 1e9,
    }
