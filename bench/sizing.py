"""What a token of well-known models takes, in memory and on disk: the table of ``docs/sizing.md``.

Shapes are those of the models' own ``config.json``. Sizes come from `tieredkv.layout`, as the
server counts them; what the codec makes of them is the measured share in ``docs/decisions.md``.

Usage: ``python -m bench.sizing`` prints the table; ``--write`` puts it into the page.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tieredkv.core import TensorSpec
from tieredkv.layout import LayerSpec, Layout, LeafSpec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sizing.md"
BEGIN, END = "<!-- made by: python -m bench.sizing --write -->", "<!-- end -->"

BLOCK_TOKENS = 256
PROMPT_TOKENS = 32_768
# A snapshot every so many tokens, for layers that have nothing else: --prefill-checkpoint.
CHECKPOINT_TOKENS = 2048
# What a store may take if nobody says otherwise: --prompt-cache-disk-bytes.
DISK_BYTES = 16 << 30
# Share of the raw bytes that the codec leaves, of bfloat16 and of float32: measured.
ENCODED = {"bfloat16": 0.68, "float32": 0.84}

Layers = tuple[LayerSpec, ...]


@dataclass(frozen=True)
class Model:
    """A model: its layers, and of each recurrent layer the arrays of its state."""

    name: str
    layers: Layers
    state: tuple[TensorSpec, ...] = ()

    @property
    def layout(self) -> Layout:
        """The layers as the server sees them."""
        return Layout(self.layers)


def attention(n: int, heads: int, width: int, dtype: str = "bfloat16") -> Layers:
    """Layers with keys and values of all tokens."""
    return (LayerSpec("KVCache", (LeafSpec(dtype, heads, width),) * 2),) * n


def latent(n: int, rank: int, rotated: int, dtype: str = "bfloat16") -> Layers:
    """Layers with one latent and one rotated key of all tokens."""
    leaves = LeafSpec(dtype, 1, rank), LeafSpec(dtype, 1, rotated)
    return (LayerSpec("KVCache", leaves),) * n


def sliding(n: int, heads: int, width: int, window: int, dtype: str = "bfloat16") -> Layers:
    """Layers with keys and values of the last ``window`` tokens."""
    leaves = (LeafSpec(dtype, heads, width),) * 2
    return (LayerSpec("RotatingKVCache", leaves, (0, window)),) * n


def recurrent(n: int) -> Layers:
    """Layers with state of one position only."""
    return (LayerSpec("ArraysCache"),) * n


def gated_delta(
    keys: tuple[int, int], values: tuple[int, int], kernel: int, dtype: str = "bfloat16"
) -> tuple[TensorSpec, ...]:
    """State of a gated delta net: what its convolution has yet to see, and a matrix for each head
    of values. ``keys`` and ``values`` are heads and their width.
    """
    convolved = 2 * keys[0] * keys[1] + values[0] * values[1]
    return (
        TensorSpec(dtype, (1, kernel - 1, convolved)),
        TensorSpec("float32", (1, *values, keys[1])),
    )


MODELS = (
    Model("SmolLM2-135M", attention(30, 3, 64)),
    Model("Llama 3.2 1B", attention(16, 8, 64)),
    Model("Llama 3.2 3B", attention(28, 8, 128)),
    Model("Llama 3.1 8B", attention(32, 8, 128)),
    Model("Llama 3.3 70B", attention(80, 8, 128)),
    Model("Qwen3 4B, 8B", attention(36, 8, 128)),
    Model("Qwen3 14B", attention(40, 8, 128)),
    Model("Qwen3 32B", attention(64, 8, 128)),
    Model("Qwen3 30B-A3B", attention(48, 4, 128)),
    Model("Mistral Small 24B", attention(40, 8, 128)),
    Model("Phi-4 14B", attention(40, 10, 128)),
    Model("GLM-4.5-Air", attention(46, 8, 128)),
    Model("DeepSeek-V3, Kimi K2", latent(61, 512, 64)),
    Model("Gemma 3 1B", attention(4, 1, 256) + sliding(22, 1, 256, 512)),
    Model("Gemma 3 4B", attention(5, 4, 256) + sliding(29, 4, 256, 1024)),
    Model("Gemma 3 12B", attention(8, 8, 256) + sliding(40, 8, 256, 1024)),
    Model("Gemma 3 27B", attention(10, 16, 128) + sliding(52, 16, 128, 1024)),
    Model("gpt-oss-20b", attention(12, 8, 64) + sliding(12, 8, 64, 128)),
    Model("gpt-oss-120b", attention(18, 8, 64) + sliding(18, 8, 64, 128)),
    Model(
        "Qwen3-Next-80B-A3B",
        attention(12, 2, 256) + recurrent(36),
        gated_delta(keys=(16, 128), values=(32, 128), kernel=4) * 36,
    ),
)


@dataclass(frozen=True)
class Size:
    """Bytes, raw and as the codec leaves them."""

    raw: float
    encoded: float

    def __add__(self, other: Size) -> Size:
        return Size(self.raw + other.raw, self.encoded + other.encoded)

    def __mul__(self, factor: float) -> Size:
        return Size(self.raw * factor, self.encoded * factor)


def _size(specs: tuple[TensorSpec, ...]) -> Size:
    raw = sum(s.n_bytes for s in specs)
    return Size(raw, sum(s.n_bytes * ENCODED[s.dtype] for s in specs))


def a_token(model: Model) -> Size:
    """What each token adds: its rows, and its part of the windows that every block has."""
    windows = _size(model.layout.window_specs(BLOCK_TOKENS)) * (1 / BLOCK_TOKENS)
    return _size(model.layout.specs(1)) + windows


def a_snapshot(model: Model) -> Size:
    """The state of one position, of layers that can't be cut: full windows, and what is
    recurrent.
    """
    rings = tuple(
        TensorSpec(leaf.dtype, (1, leaf.heads, layer.window, leaf.width))
        for layer in model.layers
        if layer.window
        for leaf in layer.leaves
    )
    return _size(rings + model.state)


def a_prompt(model: Model, n_tokens: int) -> Size:
    """All that a prompt takes. With windows the only snapshot is at its end, where no block
    ends; without them there is one at every checkpoint.
    """
    n_snapshots = -(-n_tokens // CHECKPOINT_TOKENS) if model.state else 1
    return a_token(model) * n_tokens + a_snapshot(model) * n_snapshots


def _layers(model: Model) -> str:
    kinds: dict[str, int] = {}
    for layer in model.layers:
        window = f"sliding, {layer.window:,}" if layer.window else "full"
        kind = window if layer.leaves else "recurrent"
        kinds[kind] = kinds.get(kind, 0) + 1
    if list(kinds) == ["full"]:
        return f"{kinds['full']}"
    return " + ".join(f"{n} {kind}" for kind, n in kinds.items())


def _row(model: Model) -> str:
    prompt = a_prompt(model, PROMPT_TOKENS)
    tokens = DISK_BYTES / (prompt.encoded / PROMPT_TOKENS)
    snapshot = a_snapshot(model).raw
    cells = (
        model.name,
        _layers(model),
        f"{a_token(model).raw / 2**10:.1f}",
        f"{snapshot / 2**20:.1f}" if snapshot else "",
        f"{prompt.raw / 2**30:.2f}",
        f"{prompt.encoded / 2**30:.2f}",
        f"{round(tokens, -3):,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The table, in Markdown."""
    head = (
        "| model | layers | a token, KiB | a snapshot, MiB | 32k tokens in memory, GiB "
        "| on disk, GiB | tokens in 16 GiB of disk |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|---|", *map(_row, MODELS)])


def written(page: str) -> str:
    """The page with the table of today between its markers.

    Raises:
        ValueError: the markers aren't there.
    """
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"no place for the table: {BEGIN} and {END} are missing")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(prog="python -m bench.sizing", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    if not parser.parse_args().write:
        print(table())
        return
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
