"""Blocks for tests of the cold tier: cheap, incompressible, and checkable from their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieredkv import keys
from tieredkv.core import Block, Chain, CorruptBlob, Namespace, TensorSpec

NAMESPACE = Namespace(model="test-model", block_tokens=4, layout='{"layers":1}')
BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Plain:
    """A blob and what it holds."""

    blob: bytes | memoryview
    specs: tuple[TensorSpec, ...]


class PlainCodec:
    """Codec of blocks with one uint8 tensor: the blob is the tensor."""

    def encode(self, block: Block) -> bytes:
        return bytes(block.tensors[0])

    def decode(
        self, blob: bytes | memoryview, n_bytes: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[NDArray[Any], ...]]:
        parsed = self.parse(blob, n_bytes)
        return parsed.specs, self.decode_parsed(parsed)

    def parse(self, blob: bytes | memoryview, n_bytes: int) -> Plain:
        if len(blob) != n_bytes:
            raise CorruptBlob("another size")
        return Plain(blob, (TensorSpec("uint8", (1, 1, n_bytes, 1)),))

    def decode_parsed(
        self, parsed: Plain, into: Sequence[Any] | None = None
    ) -> tuple[NDArray[Any], ...]:
        data = np.frombuffer(parsed.blob, np.uint8).reshape(parsed.specs[0].shape)
        if into is not None:
            np.frombuffer(memoryview(into[0]), np.uint8)[...] = data.ravel()
        return (data.copy(),)


def content(key: bytes, n_bytes: int) -> bytes:
    """The only right content of a block: noise that depends on its key."""
    return hashlib.shake_128(key).digest(n_bytes)


def chain(
    tokens: Sequence[int], namespace: Namespace = NAMESPACE, block_tokens: int = BLOCK_TOKENS
) -> Chain:
    root = keys.namespace_key(namespace)
    return keys.chain(root, keys.as_tokens(tokens), block_tokens)


def blocks_of(c: Chain, n_bytes: int = 100) -> list[Block]:
    spec = TensorSpec("uint8", (1, 1, n_bytes, 1))
    return [
        Block(
            c.root,
            c.parent(i),
            key,
            c.tokens_of(i),
            (spec,),
            (np.frombuffer(content(key, n_bytes), np.uint8).reshape(spec.shape),),
        )
        for i, key in enumerate(c.keys)
    ]


def blocks(tokens: Sequence[int], n_bytes: int = 100) -> list[Block]:
    return blocks_of(chain(tokens), n_bytes)


def is_right(block: Block) -> bool:
    """Whether a loaded block has the content that belongs to its key."""
    data = bytes(block.tensors[0])
    return data == content(block.key, len(data))
