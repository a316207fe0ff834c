"""A real server in a process of its own, for tests that talk to it over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from openai import OpenAI


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
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
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=300
        )
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

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10) as r:
                return int(r.status)
        except urllib.error.HTTPError as e:
            return e.code

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

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.kill()
