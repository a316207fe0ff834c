"""The server's command line: mlx-lm's flags and ours."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any, NoReturn

from mlx_lm import server as upstream

from tieredkv.core import (
    COLD_ADMIT,
    COLD_QUANTIZE,
    DEFAULT_COLD_DIR,
    PIN_SHARE,
    default_cold_dir,
)
from tieredkv.patch import in_upstream
from tieredkv.units import duration, share, size

# Share of the machine's memory that the hot tier may take if no cap is given.
HOT_SHARE = 8
_COLD_BYTES = 16 << 30
_RESERVE_BYTES = 2 << 30
_CHECKPOINT_TOKENS = 2048


class _Built(Exception):
    """Carries upstream's parser out of its `main`."""


def _upstream_parser() -> argparse.ArgumentParser:
    """The parser of mlx-lm's server, which exists only inside its `main`: so all of its flags
    are here in every version, with upstream's meaning and help.
    """

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_: Any, **__: Any) -> NoReturn:
            raise _Built(self)

    shim = SimpleNamespace(**{**vars(argparse), "ArgumentParser": Parser})
    with in_upstream("argparse", shim):
        try:
            upstream.main()
        except _Built as built:
            parser: argparse.ArgumentParser = built.args[0]
            parser.__class__ = argparse.ArgumentParser
            return parser
    raise RuntimeError("mlx_lm.server.main() no longer builds its parser as it did")


def parser() -> argparse.ArgumentParser:
    """Upstream's flags and ours."""
    p = _upstream_parser()
    p.prog = "tieredkv serve"
    p.description = "mlx-lm's OpenAI-compatible server with a prompt cache that survives restarts."
    for action in p._actions:
        if action.dest == "prompt_cache_bytes":
            action.type = size
            action.metavar = "SIZE"
            action.help = (
                "Cap on the memory of cached prompts, kept on every path "
                f"(default: 1/{HOT_SHARE} of the machine's memory)"
            )
    group = p.add_argument_group("tiered prompt cache")
    group.add_argument(
        "--prompt-cache-dir",
        default=str(default_cold_dir()),
        metavar="DIR",
        help="Directory of cached prompts on disk, on a local disk, shared by all servers that "
        "are given it; 'none' keeps them in memory only "
        f"(default: {DEFAULT_COLD_DIR}). Prompts are readable by whoever can read it.",
    )
    group.add_argument(
        "--prefill-checkpoint",
        type=int,
        default=_CHECKPOINT_TOKENS,
        metavar="N",
        help="Store long prompts every N tokens while they are computed, so that at most N are "
        "lost to a crash or a client that leaves; 0 for only at the end (default: %(default)s)",
    )
    group.add_argument(
        "--memory-limit",
        type=size,
        metavar="SIZE",
        help="What MLX may hold in all, weights and live prompts included, before cached prompts "
        "give way (default: what Metal recommends as the most; no limit elsewhere)",
    )
    group.add_argument(
        "--cache-salt-from-api-key",
        action="store_true",
        help="Keep the prompts of different API keys apart, so that none can tell from the time "
        "of an answer what others have asked; requests may do the same with a field cache_salt",
    )
    group.add_argument(
        "--prompt-cache-reserve",
        type=size,
        default=_RESERVE_BYTES,
        metavar="SIZE",
        help="Disk to leave free: the file stops growing there, whatever its cap (default: 2GiB)",
    )
    group.add_argument(
        "--prompt-cache-disk-bytes",
        type=size,
        default=_COLD_BYTES,
        metavar="SIZE",
        help="Cap on the file that holds them (default: 16GiB)",
    )
    group.add_argument(
        "--prompt-cache-ttl",
        type=duration,
        metavar="TIME",
        help="Forget prompts that were not used for this long: 90s, 45m, 12h, 30d; requests may "
        "say so for themselves with a field cache_ttl (default: only when there is no room)",
    )
    group.add_argument(
        "--pin-share",
        type=share,
        default=PIN_SHARE,
        metavar="SHARE",
        help="The most of --prompt-cache-disk-bytes that pinned prompts may take "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--cold-admit",
        choices=COLD_ADMIT,
        default="all",
        help="reused writes prompts to disk only when a later one uses them: spares the disk, but "
        "what nobody has used yet is lost with the server (default: %(default)s)",
    )
    group.add_argument(
        "--cold-quantize",
        choices=COLD_QUANTIZE,
        default="none",
        help="q8 keeps them in 8 bits a value on disk. LOSSY: answers after a hit on disk may "
        "differ from those without a cache. Servers with and without it find nothing of each "
        "other's (default: %(default)s)",
    )
    group.add_argument(
        "--cache-api",
        choices=("local", "anywhere", "off"),
        default="local",
        help="Who may use /metrics, /cache and /v1/cache/…: programs on this machine and the "
        "server's own page, everybody who reaches the port, or nobody (default: %(default)s)",
    )
    return p


def prefill_step(args: argparse.Namespace) -> int:
    """Most tokens of a prefill step of a prompt that is served alone: each ends at a checkpoint."""
    step, every = args.prefill_step_size, args.prefill_checkpoint
    return int(min(step, every) if every else step)
