"""A chat server is killed with SIGKILL and answers a known prompt at once when it is back.

Runs ``python -m tieredkv serve`` on a real model, talks to it over HTTP as any client of the
OpenAI API would, and measures:

1. a long prompt, nothing cached (cold);
2. the conversation going on (hot: state from memory);
3. ``kill -9`` right after that answer, and a new server on the same directory;
4. the first prompt again (promoted from the cold tier), then the continued one again.

The exit status is 0 only if the answers before and after the kill are the same and the new
server reused the prompt. Figures go to ``build/demo.json``, the server's log beside it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import mlx.core as mx
from openai import APIStatusError, OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.table import Table

from bench.model import ModelUnavailable, ensure

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
CACHE = BUILD / "demo-cache"
LOG = BUILD / "demo-server.log"
REPORT = BUILD / "demo.json"

HOST = "127.0.0.1"
TEXT_TOKENS = 1250  # of the long prompt; about a minute of prefill on two slow cores
ANSWER_TOKENS = 24
SYSTEM = "You are a helpful assistant who answers in one short sentence."
FIRST_QUESTION = "In one sentence: what is the text above about?"
NEXT_QUESTION = "Name one word of the text that matters most."

HEALTHY_WITHIN_S = 120
REQUEST_WITHIN_S = 600
LEAST_REUSE = 0.9  # of the first prompt, by the restarted server

# Fall of the time to first token, warm restart against cold prefill, in percent, as published
# for a server that saves whole entries as safetensors files. Larger models on GPUs: only to show
# what others reach, not a comparison under equal conditions.
PUBLISHED = {"M2 Ultra": -89.3, "M3 Max": -94.0}

Messages = list[ChatCompletionMessageParam]
# The server's command line for a model folder and a port.
Command = Callable[[Path, int], Sequence[str]]


class DemoFailed(Exception):
    """The demonstration can't go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it: token counts from the usage, times in seconds.

    ``deltas`` are the pieces of text as they were streamed, about one a token.
    """

    request: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    first_token_s: float
    total_s: float
    deltas: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.deltas)

    def same_as(self, other: Answer) -> bool:
        """Whether both streamed the same answer, piece by piece."""
        return (self.deltas, self.answer_tokens) == (other.deltas, other.answer_tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The four answers, in the order they were asked for."""

    cold: Answer
    hot: Answer
    restarted: Answer
    continued: Answer

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All of them."""
        return self.cold, self.hot, self.restarted, self.continued

    @property
    def drop_percent(self) -> float:
        """Change of the time to first token, warm restart against cold."""
        return 100 * (self.restarted.first_token_s / self.cold.first_token_s - 1)

    @property
    def lost_of_first(self) -> int:
        """Tokens of the first prompt that the new server had to compute, but for the last.

        The last token of a prompt is always computed.
        """
        return self.restarted.prompt_tokens - 1 - self.restarted.cached_tokens

    @property
    def added_by_last_turn(self) -> int:
        """Tokens that only the turn just before the kill had put into the cache."""
        return self.hot.prompt_tokens - self.cold.prompt_tokens - self.cold.answer_tokens

    @property
    def lost_of_last_turn(self) -> int:
        """How many of those the new server had to compute, but for the last."""
        return self.continued.prompt_tokens - 1 - self.continued.cached_tokens

    def faults(self) -> list[str]:
        """What the demonstration was to show and did not; empty when all is well."""
        found = []
        if not self.restarted.same_as(self.cold):
            found.append("the first prompt got another answer after the restart than cold")
        if not self.continued.same_as(self.hot):
            found.append("the continued conversation got another answer after the restart")
        if self.restarted.cached_tokens < LEAST_REUSE * self.restarted.prompt_tokens:
            found.append(
                f"the restarted server reused {self.restarted.cached_tokens} of "
                f"{self.restarted.prompt_tokens} tokens, less than {LEAST_REUSE:.0%}"
            )
        return found


class Steps:
    """Prints a line on each step, with the seconds since the start."""

    def __init__(self) -> None:
        # Without a terminal to ask, rich would wrap the table at 80 columns.
        self.console = Console(highlight=False, markup=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, markup=False, width=120)
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        """One step done."""
        self.console.print(f"[{time.monotonic() - self._start:6.1f} s] {text}")

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """A spinner while the block runs; nothing where there is no terminal."""
        with self.console.status(text):
            yield


# --- the server ----------------------------------------------------------------------------


def tieredkv_command(model: Path, port: int) -> Sequence[str]:
    """The server under demonstration."""
    command = [sys.executable, "-m", "tieredkv", "serve", "--model", str(model)]
    return [*command, "--host", HOST, "--port", str(port), "--prompt-cache-dir", str(CACHE)]


class Server:
    """A server process that is healthy, has its model loaded and has computed once."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.client = OpenAI(
            base_url=f"http://{HOST}:{port}/v1",
            api_key="none",
            max_retries=0,
            timeout=REQUEST_WITHIN_S,
        )

    def kill(self) -> None:
        """SIGKILL: the process gets no chance to save anything."""
        self.process.kill()
        self.process.wait()

    def warm_up(self) -> None:
        """Load the model and run all of its code once, so that every server starts alike.

        The prompt shares no prefix with those that are measured.
        """
        self.client.completions.create(model="default_model", prompt="Hi", max_tokens=1)

    def ask(self, request: str, messages: Messages) -> Answer:
        """Stream the greedy answer to ``messages``."""
        started = time.perf_counter()
        stream = self.client.chat.completions.create(
            model="default_model",
            messages=messages,
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        deltas, first, usage = [], None, None
        for chunk in stream:
            usage = chunk.usage or usage
            delta = chunk.choices[0].delta.content if chunk.choices else None
            if delta:
                first = first or time.perf_counter() - started
                deltas.append(delta)
        total = time.perf_counter() - started
        if usage is None or first is None:
            raise DemoFailed(f"the server sent no usage or no text; see {LOG}")
        details = usage.prompt_tokens_details
        return Answer(
            request=request,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            answer_tokens=usage.completion_tokens,
            first_token_s=first,
            total_s=total,
            deltas=tuple(deltas),
        )


@contextmanager
def serving(command: Command, model: Path, steps: Steps, what: str) -> Iterator[Server]:
    """A warmed-up server, announced as ``what``; gone when the block ends, however it ends.

    Raises:
        DemoFailed: the server ended, or isn't healthy in time.
    """
    port = _free_port()
    with LOG.open("ab") as log:
        process = subprocess.Popen(
            command(model, port),
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Its own session: Ctrl-C reaches this program alone, which then stops the server.
            start_new_session=True,
        )
    try:
        with steps.waiting("server starts ..."):
            _wait_until_healthy(process, port)
            server = Server(process, port)
            server.warm_up()
        steps.say(f"{what} (pid {process.pid}, log in {LOG.relative_to(ROOT)})")
        yield server
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + HEALTHY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoFailed(f"the server ended with status {process.returncode}:{_log_end()}")
        if _healthy(port):
            return
        time.sleep(0.2)
    raise DemoFailed(f"the server was not healthy within {HEALTHY_WITHIN_S} s:{_log_end()}")


def _healthy(port: int) -> bool:
    try:
        with urlopen(f"http://{HOST}:{port}/health", timeout=5) as response:
            return bool(response.status == HTTPStatus.OK)
    except OSError:  # not listening yet, or answering 503
        return False


def _log_end() -> str:
    lines = LOG.read_text(errors="replace").splitlines()[-8:]
    return "".join(f"\n  {line}" for line in lines)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- the conversation ----------------------------------------------------------------------


def long_text(model: Path, n_tokens: int) -> str:
    """The first ``n_tokens`` tokens, cut at a line's end, of this repository's own text."""
    from tokenizers import Tokenizer

    # Not the README: it shows what this printed.
    files = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "tieredkv" / "core.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path.exists())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets[:n_tokens]
    end = offsets[-1][1]
    return text[: text.rfind("\n", 0, end) + 1]


def first_messages(model: Path) -> Messages:
    """The long prompt."""
    text = long_text(model, TEXT_TOKENS)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{text}\n{FIRST_QUESTION}"},
    ]


def continued(messages: Messages, answer: Answer) -> Messages:
    """The conversation after ``answer``, with the next question."""
    return [
        *messages,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": NEXT_QUESTION},
    ]


def demonstrate(command: Command, model: Path, steps: Steps) -> Outcome:
    """Run the four requests, with the kill between the second and the third."""
    messages = first_messages(model)

    def ask(server: Server, request: str, conversation: Messages) -> Answer:
        with steps.waiting(f"{request} ..."):
            answer = server.ask(request, conversation)
        steps.say(
            f"{request}: {answer.cached_tokens:,} of {answer.prompt_tokens:,} prompt tokens "
            f"cached, first token after {answer.first_token_s:.2f} s"
        )
        return answer

    with serving(command, model, steps, "server up") as server:
        cold = ask(server, "long prompt, cold", messages)
        more = continued(messages, cold)
        hot = ask(server, "conversation continued, hot", more)
        server.kill()
        steps.say(f"server killed with SIGKILL (pid {server.process.pid})")
    with serving(command, model, steps, "server up again, same directory") as server:
        restarted = ask(server, "long prompt, after kill -9", messages)
        again = ask(server, "continued, after kill -9", more)
    steps.say("server stopped")
    return Outcome(cold, hot, restarted, again)


# --- the report ----------------------------------------------------------------------------


def table(outcome: Outcome) -> Table:
    """The four requests, one a row."""
    result = Table("request", title="A prompt cache that outlives its server", title_justify="left")
    for column in ("prompt tokens", "cached tokens", "first token", "total"):
        result.add_column(column, justify="right")
    result.add_column("same answer")
    verdicts = (
        "-",
        "-",
        _verdict(outcome.restarted.same_as(outcome.cold), "cold"),
        _verdict(outcome.continued.same_as(outcome.hot), "before the kill"),
    )
    for answer, verdict in zip(outcome.answers, verdicts, strict=True):
        result.add_row(
            answer.request,
            f"{answer.prompt_tokens:,}",
            f"{answer.cached_tokens:,}",
            f"{answer.first_token_s:.2f} s",
            f"{answer.total_s:.2f} s",
            verdict,
        )
    return result


def _verdict(same: bool, as_what: str) -> str:
    return f"{'yes' if same else 'NO'}, as {as_what}"


def show(outcome: Outcome, steps: Steps) -> None:
    """Print the table and what follows from it."""
    show_line = steps.console.print
    show_line()
    show_line(table(outcome))
    published = ", ".join(f"{drop:+.1f} % {machine}" for machine, drop in PUBLISHED.items())
    show_line(f"time to first token, warm restart against cold: {outcome.drop_percent:+.1f} %")
    show_line(f"  published for a whole-entry safetensors save: {published}")
    show_line("  (other models, on GPUs: the slower the cold prefill, the larger the drop)")
    show_line(
        f"lost to the kill: {outcome.lost_of_first:,} tokens of the long prompt, "
        f"{outcome.lost_of_last_turn:,} of the {outcome.added_by_last_turn:,} "
        "that the turn just before it added"
    )
    show_line(f"answer: {outcome.cold.text.strip()}")
    for fault in outcome.faults():
        show_line(f"FAILED: {fault}")


def write_report(outcome: Outcome, model: Path) -> None:
    """All figures, the machine and the versions, to ``build/demo.json``."""
    packages = ("tieredkv", "mlx", "mlx-lm", "lmdb", "openai")
    report: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "mlx_device": str(mx.default_device()),
        },
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in packages},
        "model": model.name,
        "requests": [asdict(answer) for answer in outcome.answers],
        "restart_vs_cold_first_token_percent": round(outcome.drop_percent, 2),
        "published_percent": PUBLISHED,
        "lost_tokens_of_first_prompt": outcome.lost_of_first,
        "lost_tokens_of_last_turn": outcome.lost_of_last_turn,
        "same_as_cold": outcome.restarted.same_as(outcome.cold),
        "same_as_before_the_kill": outcome.continued.same_as(outcome.hot),
        "faults": outcome.faults(),
    }
    REPORT.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name, where the system tells it."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _end_on_signal(number: int, _frame: object) -> None:
    """Leave by an exception, so that the servers are stopped on the way out."""
    sys.exit(128 + number)


def main(command: Command = tieredkv_command) -> int:
    """Run the demonstration with the server that ``command`` starts; 0 if all held."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_on_signal)
    steps = Steps()
    BUILD.mkdir(exist_ok=True)
    shutil.rmtree(CACHE, ignore_errors=True)
    LOG.unlink(missing_ok=True)
    REPORT.unlink(missing_ok=True)
    try:
        model = ensure()
        steps.say(f"model ready: {model.relative_to(ROOT)}")
        # A proxy of the environment has no business between two ends of one machine.
        os.environ["no_proxy"] = HOST
        outcome = demonstrate(command, model, steps)
    except (DemoFailed, ModelUnavailable) as error:
        steps.console.print(f"error: {error}")
        return 1
    except OpenAIError as error:
        said = error.response.text if isinstance(error, APIStatusError) else ""
        steps.console.print(
            f"error: a request failed: {error} {said}\nThe server's log:{_log_end()}"
        )
        return 1
    except KeyboardInterrupt:
        steps.console.print("interrupted; the server is stopped")
        return 128 + signal.SIGINT
    write_report(outcome, model)
    show(outcome, steps)
    steps.say(f"figures in {REPORT.relative_to(ROOT)}")
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
