"""What ``--cold-quantize q8`` loses in precision, and what it saves: on a real model and texts.

``python -m bench.quantize`` computes a prefix of each text, stores it in a cold tier in eight bits
and promotes it again. Then the model reads how the text goes on, once after the exact prefix and
once after the promoted one, and its distributions over the next token are compared. Takes some
minutes on slow cores.
"""

from __future__ import annotations

import argparse
import inspect
import json
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import numpy as np
import safetensors
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from bench.compare import fastest
from bench.model import DTYPES, ensure
from tieredkv import TieredPromptCache, keys
from tieredkv.codec import PlaneCodec
from tieredkv.core import Block, Codec
from tieredkv.quantize import QuantizingCodec

DOCS = Path(__file__).resolve().parent.parent / "docs"
KEY = ("quantize", None, None)
STEP = 256


@dataclass(frozen=True, slots=True)
class Reading:
    """Of each position: Kullback-Leibler divergence in nats from the exact distribution, and
    whether the likeliest token is the same. ``blocks`` are those of the prefix, exact.
    """

    divergence: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    blocks: list[Block]


def texts() -> dict[str, str]:
    """Prose, reference and code that is wherever this runs."""
    return {
        "design page": (DOCS / "design.md").read_text(encoding="utf-8"),
        "format page": (DOCS / "format.md").read_text(encoding="utf-8"),
        "Python on classes": topics["class"] + topics["types"],
        "Python on strings": topics["formatstrings"] + topics["strings"],
        "textwrap.py": inspect.getsource(textwrap),
    }


def log_probabilities(model: Any, tokens: Sequence[int], caches: list[Any]) -> NDArray[np.float64]:
    """Of the next token, after each of ``tokens``, which go on from what ``caches`` hold."""
    logits = model(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(np.float64)


def read(model: Any, tokens: Sequence[int], n_prefix: int, folder: Path) -> Reading:
    """Read a text after its exact prefix and after the promoted one."""
    prefix, rest = list(tokens[:n_prefix]), tokens[n_prefix:]
    caches = make_prompt_cache(model)
    for at in range(0, n_prefix, STEP):
        model(mx.array([prefix[at : at + STEP]]), cache=caches)
        mx.eval([c.state for c in caches])
    with TieredPromptCache(folder, hot_bytes=1 << 30, cold_quantize="q8") as store:
        store.bind(KEY, model)
        store.insert_cache(KEY, prefix, caches)
        blocks = _blocks(store, prefix)
        exact = log_probabilities(model, rest, _hit(store, prefix))
        if not store.flush(60):
            raise RuntimeError("not all was stored")
        store.trim_to(n_bytes=0)
        promoted = log_probabilities(model, rest, _hit(store, prefix))
    divergence = (np.exp(exact) * (exact - promoted)).sum(-1)
    return Reading(divergence, exact.argmax(-1) == promoted.argmax(-1), blocks)


def _hit(store: TieredPromptCache, prefix: list[int]) -> list[Any]:
    caches, rest = store.fetch_nearest_cache(KEY, [*prefix, 0])
    if caches is None or len(rest) != 1:
        raise RuntimeError("the prefix isn't there")
    return caches


def _blocks(store: TieredPromptCache, prefix: list[int]) -> list[Block]:
    known = store._known_namespace(KEY)
    if known is None:
        raise RuntimeError("the model isn't bound")
    return store._store.hot.load(store._chain(known[0], keys.as_tokens(prefix)).keys)


def bytes_of(codec: Codec, blocks: Sequence[Block]) -> int:
    """Encoded bytes of blocks."""
    return sum(len(codec.encode(b)) for b in blocks)


def entropy(blocks: Sequence[Block]) -> float:
    """Bits a code that no coding of single codes could go below: each tensor has its own table."""
    counts: list[NDArray[Any]] = []
    for block in blocks:
        for _, tensor in safetensors.deserialize(QuantizingCodec().encode(block)):
            codes = np.frombuffer(bytes(tensor["data"]), np.uint8)
            counts.append(np.bincount(codes, minlength=256))
            break
    bits = sum(float(-(n[n > 0] * np.log2(n[n > 0] / n.sum())).sum()) for n in counts)
    return bits / float(sum(n.sum() for n in counts))


def speeds(block: Block) -> Iterator[tuple[str, float]]:
    """GB/s of raw bytes, of one thread."""
    work: dict[str, Callable[[], object]] = {}
    for name, codec in (("exact", PlaneCodec()), ("q8", QuantizingCodec())):
        blob = codec.encode(block)
        into = [bytearray(spec.n_bytes) for spec in block.specs]
        work[f"encode {name}"] = lambda codec=codec: codec.encode(block)
        work[f"decode {name}"] = lambda codec=codec, blob=blob, into=into: codec.decode_parsed(
            codec.parse(blob, block.n_bytes), into
        )
    for name, seconds in fastest(work, rounds=9).items():
        yield f"{name}, GB/s", block.n_bytes / seconds / 1e9


def main() -> int:
    """Print what was measured, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantize", description=main.__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that are promoted")
    parser.add_argument("--positions", type=int, default=100, help="tokens read after them")
    options = parser.parse_args()
    model, tokenizer = load(str(ensure(options.dtype)))
    length = options.prefix + options.positions
    readings = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, text) in enumerate(texts().items()):
            tokens = tokenizer.encode(text)[:length]
            readings[name] = read(model, tokens, options.prefix, Path(folder) / str(i))
            print(f"{name}: divergence {readings[name].divergence.mean():.2e}", flush=True)
    print(json.dumps(report(list(readings.values())), indent=2))
    return 0


def report(readings: Sequence[Reading]) -> dict[str, float]:
    """All figures of all texts together."""
    divergence = np.concatenate([r.divergence for r in readings])
    blocks = [b for r in readings for b in r.blocks]
    raw = sum(b.n_bytes for b in blocks)
    return {
        "positions": len(divergence),
        "divergence, mean": float(divergence.mean()),
        "divergence, 99th percentile": float(np.percentile(divergence, 99)),
        "divergence, largest": float(divergence.max()),
        "same likeliest token": float(np.concatenate([r.agrees for r in readings]).mean()),
        "raw bytes / encoded exactly": raw / bytes_of(PlaneCodec(), blocks),
        "raw bytes / encoded in q8": raw / bytes_of(QuantizingCodec(), blocks),
        "entropy of a code, bits": entropy(blocks),
        **dict(speeds(blocks[0])),
    }


if __name__ == "__main__":
    raise SystemExit(main())
