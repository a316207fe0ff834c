"""What the server serves to eight clients at once, over what mlx-lm's own does."""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.compare import nothing
from bench.model import ensure
from bench.state import model, text_tokens

STREAMS = 8
PROMPT_TOKENS = 12
REPLY_TOKENS = 32
PAIRS = 4
_HEALTHY_SECONDS = 120
# Of the kernel's clock ticks, fields 14 and 15 of /proc/PID/stat, in user and in system mode.
_TICKS = slice(11, 13)


@dataclass(frozen=True, slots=True)
class Run:
    """Reply tokens a second, of all clients, and CPU seconds for each."""

    tokens_per_second: float
    cpu_seconds_per_token: float


class Host:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self._port = port

    def serve(self, prompts: list[str]) -> Run:
        """Ask for a completion of all prompts at once."""
        cpu, start = self._cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as clients:
            n_tokens = sum(clients.map(self._complete, prompts))
        seconds = time.perf_counter() - start
        return Run(n_tokens / seconds, (self._cpu_seconds() - cpu) / n_tokens)

    def wait_until_healthy(self) -> None:
        """Raises TimeoutError if it isn't in time, or has ended."""
        deadline = time.monotonic() + _HEALTHY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self._request("GET", "/health", b"").status == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError("the server did not start")

    def _complete(self, prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": REPLY_TOKENS, "temperature": 0}
        reply = self._request("POST", "/v1/completions", json.dumps(body).encode())
        assert reply.status == 200
        return int(json.loads(reply.read())["usage"]["completion_tokens"])

    def _request(self, method: str, path: str, body: bytes) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def _cpu_seconds(self) -> float:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        ticks = stat.rpartition(")")[2].split()[_TICKS]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(log: Path, *module: str) -> Iterator[Host]:
    """A healthy server, killed when the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", *module, "--model", str(ensure()), "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    try:
        host = Host(process, port)
        host.wait_until_healthy()
        yield host
    finally:
        process.kill()
        process.wait()


def prompts() -> Iterator[list[str]]:
    """Prompts for one run after another, no two of which have their first token in common."""
    tokenizer, tokens = model()[1], text_tokens()
    texts: dict[int, str] = {}
    for at in range(0, len(tokens), PROMPT_TOKENS):
        text = tokenizer.decode(tokens[at : at + PROMPT_TOKENS])
        texts.setdefault(tokenizer.encode(text)[0], text)
    distinct = list(texts.values())
    for at in range(0, len(distinct), STREAMS):
        yield distinct[at : at + STREAMS]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU time is read as on Linux")
def test_throughput_of_eight_streams(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Same prompts in the same order, the servers by turns; ours with its cold tier on."""
    ours_flags = ("tieredkv", "serve", "--prompt-cache-dir", str(tmp_path / "cold"))
    fresh = prompts()
    runs: list[tuple[Run, Run]] = []
    with (
        serving(tmp_path / "ours.log", *ours_flags) as ours,
        serving(tmp_path / "theirs.log", "mlx_lm", "server") as theirs,
    ):
        for host in (ours, theirs):
            host.serve(next(fresh)[:1])
        for i in range(PAIRS):
            texts = next(fresh)
            # Who comes first changes, so that a machine that slows down slows both.
            order = (ours, theirs) if i % 2 else (theirs, ours)
            done = {host: host.serve(texts) for host in order}
            runs.append((done[ours], done[theirs]))
    benchmark.pedantic(nothing, rounds=1)
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in runs]
    cpu = [a.cpu_seconds_per_token / b.cpu_seconds_per_token for a, b in runs]
    benchmark.extra_info |= {
        "tokens a second": statistics.median(a.tokens_per_second for a, _ in runs),
        "throughput, ours / mlx-lm": statistics.median(ratios),
        "lowest of the runs": min(ratios),
        "highest of the runs": max(ratios),
        "CPU time a token, ours / mlx-lm": statistics.median(cpu),
    }
