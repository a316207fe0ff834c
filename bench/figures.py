"""Pictures of a benchmark run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from bench.claims import Run

Points = Mapping[float, float]

_SIZE = (7.6, 3.3)
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.facecolor": "white",
}


@dataclass(frozen=True, slots=True)
class Line:
    """How a contestant is drawn, whatever the picture."""

    label: str
    color: str
    width: float = 1.6
    dashes: str = "-"
    marker: str = "o"


_OURS = Line("tieredkv", "#0b62d6", 2.6)
_MEMCPY = Line("memcpy of as many bytes", "#8a8a8a", dashes=":", marker="")

_PROMOTE = {
    "seconds": _OURS,
    "seconds, zstd-3 safetensors": Line("safetensors, zstd-3", "#d9731a"),
    "seconds, safetensors": Line("safetensors", "#2a9d5c"),
    "seconds, memcpy": _MEMCPY,
}
_PREFILL = Line("prefill", "#b3261e")
_HOT = {
    "seconds": _OURS,
    "seconds, mlx-lm": Line("mlx-lm's prompt cache", "#d9731a"),
    "seconds, memcpy": _MEMCPY,
}
_POLICIES = {
    "clairvoyant": Line("clairvoyant (knows the future)", "#8a8a8a", dashes=":", marker=""),
    "default": _OURS,
    "leaf-lru": Line("leaf-LRU", "#7fd6a8", 1.2, dashes="--", marker=""),
    "s3fifo": Line("S3-FIFO over leaves", "#a8559e", 1.2),
    "gdsf": Line("GDSF over leaves", "#c79a00", 1.2),
    "whole-lru": Line("whole-entry LRU", "#d9731a"),
}


def draw(run: Run, folder: Path) -> list[Path]:
    """Write those pictures that the run has figures for; their paths."""
    with matplotlib.rc_context(_STYLE):
        pictures = {
            "promote.png": _promote(run),
            "hot-hit.png": _hot_hit(run),
            "eviction.png": _eviction(run),
        }
        return [_saved(figure, folder / name) for name, figure in pictures.items() if figure]


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=96, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return path


def _curve(run: Run, before: str, after: str, key: str) -> Points:
    """A figure by the number of tokens that stands between two parts of benchmarks' names."""
    return {
        float(name.removeprefix(before).removesuffix(after)): figures[key]
        for name, figures in run.items()
        if name.startswith(before) and name.endswith(after) and key in figures
    }


def _promote(run: Run) -> Figure | None:
    small, large = (
        {line: _curve(run, f"test_promote[{shape}-", "]", key) for key, line in _PROMOTE.items()}
        for shape in ("SmolLM2", "8B")
    )
    prefill = {
        float(key.split()[-1]): seconds for key, seconds in run.get("test_prefill", {}).items()
    }
    panels = {"SmolLM2-135M": {_PREFILL: prefill, **small}, "8B": large}
    return _of_tokens(panels, "from disk to the next token's state")


def _hot_hit(run: Run) -> Figure | None:
    panels = {
        f"8B, {mode}": {
            line: _curve(run, f"test_hot_hit[{mode}-8B-", "]", key) for key, line in _HOT.items()
        }
        for mode in ("sequential", "batched")
    }
    return _of_tokens(panels, "from memory to the next token's state")


def _of_tokens(panels: Mapping[str, Mapping[Line, Points]], what: str) -> Figure | None:
    """Times over lengths, both in powers; None if there is nothing to draw."""
    if not any(points for lines in panels.values() for points in lines.values()):
        return None
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        _plot(ax, lines)
        ax.set_title(title)
        ax.set(xscale="log", yscale="log", xlabel="tokens of the prefix")
        _name_tokens(ax, max((n for points in lines.values() for n in points), default=0.0))
        ax.yaxis.set_major_formatter(FuncFormatter(_seconds))
    axes[0].set_ylabel(what)
    _legend(figure, axes)
    return figure


def _eviction(run: Run) -> Figure | None:
    rates = run.get("test_eviction", {})
    lines = {
        line: {
            float(key.rpartition(", ")[2]): rate
            for key, rate in rates.items()
            if key.rpartition(", ")[0] == policy
        }
        for policy, line in _POLICIES.items()
    }
    if not any(lines.values()):
        return None
    figure = Figure(figsize=_SIZE, layout="constrained")
    ax = figure.subplots()
    _plot(ax, lines)
    ax.set(xscale="log", xlabel="size of the tier, of all different blocks", ylim=(0, None))
    ax.set_ylabel("tokens of prompts found")
    shares = sorted({share for points in lines.values() for share in points})
    ax.set_xticks(shares)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _legend(figure, [ax])
    return figure


def _plot(ax: Axes, lines: Mapping[Line, Points]) -> None:
    for line, points in lines.items():
        if not points:
            continue
        ax.plot(
            *zip(*sorted(points.items()), strict=True),
            label=line.label,
            color=line.color,
            linewidth=line.width,
            linestyle=line.dashes,
            marker=line.marker,
            markersize=line.width + 2,
            # What may lie on ours stays to be seen.
            zorder=4 if line.dashes == "--" else 3 if line is _OURS else 2,
        )


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One for all panels, at their right."""
    found = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(list(found.values()), list(found), loc="outside right center")


def _name_tokens(ax: Axes, longest: float) -> None:
    ax.set_xticks([n for n in (256, 1024, 4096, 16384) if n <= longest])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(_tokens))


def _tokens(n: float, _: int) -> str:
    return f"{n:.0f}" if n < 1024 else f"{n / 1024:.0f}k"


def _seconds(value: float, _: int) -> str:
    for unit, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} s"
