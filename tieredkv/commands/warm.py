"""``tieredkv warm``: compute prompts ahead of the requests that begin with them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieredkv.commands.console import FAILED, FINE, STATUS, add_command
from tieredkv.core import PinRefused
from tieredkv.prompt_files import ROLES, BadPrompt, Prompt, read
from tieredkv.units import bytes_text

if TYPE_CHECKING:
    from tieredkv.warming import Warmed, Warmer

_PROGRESS_EVERY_S = 0.1

_HELP = f"""\
examples:
  tieredkv warm --model mlx-community/Qwen3-4B-4bit docs/*.md
  tieredkv warm --model ./model --as system instructions.txt --pin
  tieredkv warm --model ./model contexts.jsonl --prompt-cache-disk-bytes 100GB

A text file is what a user's message begins with (--as system: a system prompt; --as prompt: a
prompt of /v1/completions). A .jsonl file has a prompt a line, with the fields of a request:
  {{"messages": [{{"role": "system", "content": "..."}}], "tools": [...], "cache_salt": "..."}}
  {{"prompt": "..."}}  or  {{"tokens": [1, 2, 3]}}          and, to tell them apart, "id"

What is stored ends where requests can begin to differ: behind the last message's text if it is a
user's, which questions may follow; behind the head of the next message, if it is another's. Give
the flags that the server is run with: what they change in a prompt or its state is found only by a
server that has the same. It may be running meanwhile.

After Ctrl-C, or a crash, run it again: what is stored is passed over.

{STATUS.format(failed="some prompts could not be computed or stored, or it was stopped")}
"""

# Flags of the server that matter here, and what is said of them. Their defaults are the server's.
_VALUES = {
    "--adapter-path": "weights of an adapter",
    "--draft-model": "model for speculative decoding, if the server uses one",
    "--prompt-cache-bytes": "cap on the memory of cached prompts",
    "--prompt-cache-disk-bytes": "cap on the file that holds them",
    "--prompt-cache-reserve": "disk to leave free",
    "--pin-share": "the most of the file that pinned prompts may take",
    "--memory-limit": "what MLX may hold in all",
    "--kv-bits": "bits of a quantized state",
    "--kv-group-size": "group size of a quantized state",
    "--quantized-kv-start": "tokens after which it is quantized",
    "--cold-quantize": "q8 keeps prompts in 8 bits on disk; lossy",
    "--chat-template": "template to use",
    "--chat-template-args": "its variables, as JSON",
    "--prefill-step-size": "most tokens computed at once",
    "--prefill-checkpoint": "store long prompts every so many tokens",
}
_SWITCHES = {
    "--use-default-chat-template": "use the tokenizer's own template if there is none",
    "--trust-remote-code": "trust code of the tokenizer",
}


def add(commands: Any) -> None:
    """Add the command's parser."""
    warm = add_command(
        commands,
        "warm",
        "compute prompts ahead, so that requests which begin with them start at once",
        "Compute prompts and store them as the server would.",
        _HELP,
        run,
    )
    warm.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text, or .jsonl")
    warm.add_argument("--model", required=True, help="path or hub name, as given to the server")
    warm.add_argument(
        "--as",
        dest="role",
        choices=ROLES,
        default="user",
        help="what a text file is (default: %(default)s)",
    )
    warm.add_argument(
        "--pin", action="store_true", help="keep them whatever else has to go, see tieredkv pin"
    )
    warm.add_argument(
        "--ttl",
        dest="prompt_cache_ttl",
        metavar="TIME",
        help="forget them when they were not used for this long: 90s, 45m, 12h, 30d",
    )
    group = warm.add_argument_group("flags of tieredkv serve, with its meaning and defaults")
    for flag, text in _VALUES.items():
        group.add_argument(flag, metavar="X", help=text)
    for flag, text in _SWITCHES.items():
        group.add_argument(flag, action="store_true", help=text)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of all: tokens that later requests share, and of these those computed now. Bytes
    are encoded ones of new blocks.
    """

    prompts: int
    done: int
    failed: int
    tokens: int
    computed: int
    reused: int
    bytes_written: int
    seconds: float
    stopped: bool


def run(options: argparse.Namespace) -> int:
    """Compute what the files hold."""
    try:
        prompts = [prompt for path in options.files for prompt in read(path, options.role)]
    except BadPrompt as error:
        options.parser.error(str(error))
    if not prompts:
        options.parser.error("the files hold no prompts")
    from tieredkv.handler import GenerationEnded, ModelUnavailable  # late: it loads mlx

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s - %(message)s")
    try:
        return _run(options, prompts)
    except (ModelUnavailable, GenerationEnded) as error:
        if options.json:
            print(json.dumps({"error": str(error)}, indent=2))
        print(f"tieredkv: {options.model}: {error}", file=sys.stderr)
        return FAILED


def _server_arguments(options: argparse.Namespace) -> argparse.Namespace:
    """What the server's own parser makes of the flags that were given."""
    from tieredkv.flags import parser  # late: it loads mlx

    given = ["--model", options.model, "--prompt-cache-dir", str(options.dir)]
    for flag in (*_VALUES, "--prompt-cache-ttl"):
        value = getattr(options, flag[2:].replace("-", "_"))
        given += [f"{flag}={value}"] if value is not None else []
    given += [flag for flag in _SWITCHES if getattr(options, flag[2:].replace("-", "_"))]
    server = parser()
    server.prog = options.parser.prog
    return server.parse_args(given)


def _run(options: argparse.Namespace, prompts: Sequence[Prompt]) -> int:
    from tieredkv.warming import Warmer  # late: it loads mlx

    began = time.monotonic()
    warmed: list[Warmed] = []
    stopped = False
    warmer = Warmer(_server_arguments(options))
    line = _Line(sum(prompt.size for prompt in prompts))
    try:
        if not warmer.cache.stats().cold.cap_bytes:
            options.parser.error(f"{options.dir} can't be used; the line above says why")
        for prompt in prompts:
            with line.of(prompt):
                warmed.append(warmer.warm(prompt, line))
            if options.pin and not warmed[-1].error:
                warmed[-1] = _pinned(warmer, warmed[-1])
            line.done(prompt, warmed[-1].computed)
            _tell(line, warmed[-1])
    except KeyboardInterrupt:
        stopped = True
    finally:
        line.clear()
        is_at_rest = warmer.close()
    failed = sum(bool(w.error) or w.lost for w in warmed)
    outcome = _Outcome(
        prompts=len(prompts),
        done=len(warmed) - failed,
        failed=failed,
        tokens=sum(w.tokens for w in warmed),
        computed=sum(w.computed for w in warmed),
        reused=sum(w.reused for w in warmed),
        bytes_written=warmer.cache.stats().bytes_written,
        seconds=round(time.monotonic() - began, 3),
        stopped=stopped,
    )
    _say(options, outcome, [asdict(w) for w in warmed])
    status = FAILED if failed or stopped else FINE
    if not is_at_rest:
        # A prefill step can't be interrupted, and nothing needs its end.
        sys.stdout.flush()
        os._exit(status)
    return status


def _pinned(warmer: Warmer, warmed: Warmed) -> Warmed:
    try:
        warmer.pin()
    except PinRefused as error:
        return replace(warmed, error=f"not pinned: {error}")
    return warmed


def _tell(line: _Line, warmed: Warmed) -> None:
    why = warmed.error or ("not all of it could be stored" if warmed.lost else "")
    if why:
        line.clear()
        print(f"tieredkv: {warmed.name}: {why}", file=sys.stderr)


def _say(
    options: argparse.Namespace, outcome: _Outcome, warmed: Sequence[dict[str, object]]
) -> None:
    if options.json:
        print(json.dumps({**asdict(outcome), "results": warmed}, indent=2))
        return
    pace = f", {outcome.computed / outcome.seconds:.0f} a second" if outcome.computed else ""
    print(
        f"{outcome.done} of {outcome.prompts} prompts are warm: {outcome.tokens} tokens, "
        f"{outcome.computed} computed now{pace}, {outcome.reused} there already\n"
        f"{bytes_text(outcome.bytes_written)} written to {options.dir} in "
        f"{_time_text(outcome.seconds)}"
    )
    if outcome.stopped:
        print("stopped: run it again to go on")


def _time_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Line:
    """A line on a terminal: how far it is, tokens a second, and the time that is left."""

    def __init__(self, total: int) -> None:
        self._total = max(1, total)
        self._done = 0.0
        self._size = 0
        self._computed = 0
        self._running = 0
        self._part = 0.0
        self._began = time.monotonic()
        # Of what was there already the time says nothing.
        self._worked = 0.0
        self._due = 0.0

    @contextmanager
    def of(self, prompt: Prompt) -> Iterator[None]:
        """While a prompt is computed."""
        self._size, self._running, self._part = prompt.size, 0, 0.0
        self._show()
        yield

    def done(self, prompt: Prompt, computed: int) -> None:
        """Count a prompt that was computed."""
        self._done += prompt.size
        self._worked += prompt.size if computed else 0
        self._computed += computed
        self._running, self._part = 0, 0.0

    def __call__(self, processed: int, total: int) -> None:
        """Say that so many of a prompt's tokens are computed."""
        self._running, self._part = processed, processed / max(1, total)
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._due or not sys.stderr.isatty():
            return
        self._due = now + _PROGRESS_EVERY_S
        seconds = max(1e-3, now - self._began)
        worked = self._worked + self._part * self._size
        left = self._total - self._done - self._part * self._size
        remaining = f", {_time_text(left * seconds / worked)} left" if worked else ""
        percent = 100 * (self._total - left) / self._total
        tokens = self._computed + self._running
        print(
            f"\r\x1b[Kwarming: {percent:.0f}%, {tokens / seconds:.0f} tokens/s{remaining}",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        """Take the line away."""
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
