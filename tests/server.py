"""A real server in a process of its own, for tests that talk to it over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cached_property, partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from openai import OpenAI

import tieredkv.server
from tieredkv import TieredPromptCache


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until_written(folder: Path) -> None:
    """Wait until a server that has nothing to do has committed all that it stored."""
    with TieredPromptCache(folder) as other:
        deadline, seen = time.monotonic() + 30, 0
        while not seen or seen != other.stats().cold.n_blocks:
            assert time.monotonic() < deadline
            seen = other.stats().cold.n_blocks
            time.sleep(0.5)


@dataclass(frozen=True)
class Reply:
    """What a chat or completion request was answered with."""

    status: int
    body: Any

    @property
    def text(self) -> str:
        """All that the model said, its thoughts included."""
        choice = self.body["choices"][0]
        said = choice.get("message", {"content": choice.get("text")})
        return (said.get("reasoning") or "") + (said["content"] or "")

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """Of each token, in upstream's form."""
        return self.body["choices"][0]["logprobs"]["content"]

    @property
    def n_prompt(self) -> int:
        return int(self.body["usage"]["prompt_tokens"])

    @property
    def n_cached(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


class Endpoint:
    """A server on a port of the loopback address."""

    port: int

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=300
        )

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as r:
                return int(r.status)
        except urllib.error.HTTPError as e:
            return e.code

    def post(self, body: Any, path: str = "/v1/chat/completions") -> Reply:
        """Send a request, ``body`` as JSON or, if it is bytes, as it is."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", path, raw, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Reply(response.status, json.loads(response.read()))
        finally:
            connection.close()

    def chat(self, messages: list[dict[str, Any]] | str, **more: Any) -> Reply:
        """Ask for a few greedy tokens, of a conversation or of one user's text."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        reply = self.post({"messages": messages, "max_tokens": 8, "temperature": 0, **more})
        assert reply.status == 200, reply.body
        return reply

    def send(self, body: Any, path: str = "/v1/chat/completions") -> socket.socket:
        """Send a request and leave its answer to the caller, who may close the connection."""
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        connection.sendall(head.encode() + raw)
        return connection


class Local(Endpoint):
    """The server's handler, generator and cache on threads of this process.

    Starts as fast as its model loads, on ``port`` or any free one of the address that the flag
    --host names. Only one of them may serve a sequential request at a time.
    """

    def __init__(self, model: Path, folder: Path | str, *flags: str, port: int = 0) -> None:
        args = tieredkv.server.parser().parse_args(
            ["--model", str(model), "--prompt-cache-dir", str(folder), *flags]
        )
        self.cache = tieredkv.server.open_cache(args)
        provider = tieredkv.server.TieredModelProvider(args, self.cache)
        self.generator = tieredkv.server.TieredResponseGenerator(provider, self.cache)
        handler = partial(tieredkv.server.TieredAPIHandler, self.generator)
        self._http = ThreadingHTTPServer((args.host, port), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.generator.stop_and_join()
        self.cache.close()


class Server(Endpoint):
    """``tieredkv serve`` on a free port of the loopback address."""

    def __init__(
        self,
        model: Path,
        folder: Path | str,
        log: Path,
        *flags: str,
        env: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.log = log
        command = [
            *(sys.executable, "-m", "tieredkv", "serve"),
            *("--model", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--prompt-cache-dir", str(folder), *flags),
        ]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if self.health() == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")

    def leave_at(self, part: float, messages: list[dict[str, str]], seed: int | None) -> int:
        """Send a streamed chat request and drop its connection once ``part`` of the prompt is
        computed; returns how many tokens of it then are.
        """
        body = {"messages": messages, "stream": True, "max_tokens": 2, "seed": seed}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if not line.startswith(b": keepalive"):
                    continue
                done, total = map(int, line.split()[-1].split(b"/"))
                if done >= part * total:
                    return done
        raise RuntimeError("the prompt was computed before the connection could be dropped")

    def kill(self) -> None:
        """SIGKILL: no handler runs."""
        self.process.kill()
        self.process.wait()

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Ask it to end; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.kill()
