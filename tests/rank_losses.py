"""Two real ranks on the loopback address, one of which loses this and that of its cache before a
request, while the other doesn't.

``python tests/rank_losses.py --help`` says how to run the long form.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import mlx.core as mx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402 - found by the line before, also under mlx.launch
from server import Local, Reply  # noqa: E402

import tieredkv.server  # noqa: E402
from tieredkv import TieredPromptCache, keys  # noqa: E402
from tieredkv.tiers.records import piece_key  # noqa: E402

# A request takes seconds at most, on a busy machine; one that hangs, for ever.
_HUNG_SECONDS = 100
_SAME = 1e-2
# Prompts of some hundred tokens are of several blocks then.
_BLOCK_TOKENS = 32

# By name: the module of the model, how ranks share it, and more of its configuration.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tensor": ("qwen3", "tensor", {"num_hidden_layers": 2}),
    "pipeline": ("deepseek_v2", "pipeline", {"num_hidden_layers": 2}),
    "windows": ("gpt_oss", "tensor", {"num_hidden_layers": 2}),
    "hybrid": ("qwen3_next", "pipeline", {"num_hidden_layers": 3}),
}


@dataclass
class Report:
    """What came of it. Tokens ``reused``, and those that the better and the lesser of both ranks
    knew of the same prompts; ``losses`` by rank and kind. After a prompt was pinned, and after all
    was deleted: ``pinned_bytes`` and ``left_blocks`` by rank.
    """

    requests: int = 0
    wrong: int = 0
    hung: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    better: int = 0
    lesser: int = 0
    losses: list[dict[str, int]] = field(default_factory=list)
    pinned_bytes: list[int] = field(default_factory=list)
    left_blocks: list[int] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class LossyCache(TieredPromptCache):
    """A cache that loses something before some fetches, each rank on its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, block_tokens=_BLOCK_TOKENS)
        self.rank = int(self.ranks.shard.partition("/")[0])
        self.losses: Counter[str] = Counter()
        # Tokens that this rank knew, and those that all restored, of each fetch.
        self.known: list[tuple[int, int]] = []
        self._dice = random.Random(_SEED * 1000 + self.rank)
        kinds: dict[str, Callable[[Hashable, Sequence[int]], None]] = {
            "evicted": self._evict,
            "damaged": self._damage,
            "directory": self._delete,
            "demoted": self._demote,
            "disk full": self._fill,
            "fault": self._fail,
            "slow": self._slow,
        }
        self._kinds = kinds
        self._heal: Callable[[], None] = lambda: None

    def fetch_nearest_cache(
        self, model: Hashable, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, list[int]]:
        if _is_salted(tokens):
            return super().fetch_nearest_cache(model, tokens)
        self.flush(5)
        self.heal()
        if self._dice.random() < _LOSSES:
            kind = self._dice.choice([*self._kinds])
            self.losses[kind] += 1
            self._kinds[kind](model, tokens)
        before = self.stats().unshared_tokens
        caches, rest = super().fetch_nearest_cache(model, tokens)
        n = len(tokens) - len(rest)
        self.known.append((n + self.stats().unshared_tokens - before, n))
        return caches, rest

    def lost(self) -> dict[str, int]:
        return dict(self.losses)

    def fetched(self) -> list[tuple[int, int]]:
        return self.known

    def counted(self) -> dict[str, Any]:
        return asdict(self.stats())

    def heal(self) -> None:
        self._heal()
        self._heal = lambda: None

    def pinned(self) -> int:
        return self.pinned_bytes

    def left(self) -> int:
        return self.stats().hot.n_blocks + self.stats().cold.n_blocks

    # ---- losses

    def _some_block(self, model: Hashable, tokens: Sequence[int]) -> bytes | None:
        known = self._known_namespace(model)
        chain = self._chain(known[0], keys.as_tokens(tokens)) if known else None
        stored = self._store.cold.present(chain.keys) if chain else frozenset()
        return self._dice.choice(sorted(stored)) if stored else None

    def _evict(self, model: Hashable, tokens: Sequence[int]) -> None:
        self.trim_to(n_bytes=0)
        if key := self._some_block(model, tokens):
            self._store.cold._write(
                lambda ledger, _: ledger.record(key) and ledger.remove_subtree(key, 1000)
            )

    def _damage(self, model: Hashable, tokens: Sequence[int]) -> None:
        self.trim_to(n_bytes=0)
        key = self._some_block(model, tokens)

        def overwrite(ledger: Any, _: Any) -> None:
            if record := ledger.record(key):
                zeros = bytes(min(65512, record.blob_bytes))
                ledger._txn.put(piece_key(key, 0), zeros, db=ledger._dbs.blob)

        if key:
            self._store.cold._write(overwrite)

    def _delete(self, *_: Any) -> None:
        self.trim_to(n_bytes=0)
        shutil.rmtree(self._store.config.cold_dir)

    def _demote(self, *_: Any) -> None:
        self.trim_to(n_bytes=0)

    def _fill(self, *_: Any) -> None:
        cold, before = self._store.cold, self._store.cold._reserve
        cold._reserve = 1 << 60

        def heal() -> None:
            cold._reserve = before

        self._heal = heal

    def _fail(self, *_: Any) -> None:
        def load(*_: Any) -> None:
            raise OSError("a fault of this rank's own")

        self._store.load = load
        self._heal = lambda: self._store.__dict__.pop("load")

    def _slow(self, *_: Any) -> None:
        pace = self._store.pace
        self.trim_to(n_bytes=0)
        pace._per_byte, before = 1e3, pace._per_byte

        def heal() -> None:
            pace._per_byte = before

        self._heal = heal


def _is_salted(tokens: Sequence[int]) -> bool:
    return bool(getattr(tokens, "salt", b""))


# ---- requests


class Talk:
    """Conversations that begin alike and go on, as agents' do."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._talks = [self._opening(i) for i in range(4)]

    def _words(self, n: int) -> str:
        return " ".join(self._dice.choice(["sea", "salt", "wind", "stone"]) for _ in range(n))

    def _opening(self, i: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": f"{'rules ' * 8}{i % 2} {self._words(6)}"}]

    def next(self) -> dict[str, Any]:
        talk = self._dice.choice(self._talks)
        if len(talk) > 9:
            del talk[1:]
        if talk[-1]["role"] == "user":
            talk.append({"role": "assistant", "content": "wait"})
        talk.append({"role": "user", "content": self._words(self._dice.randrange(2, 12))})
        body: dict[str, Any] = {"messages": [*talk], "max_tokens": 4, "temperature": 0}
        if self._dice.random() < 0.4:
            body["seed"] = 1  # served alone
        body["logprobs"] = True
        return body

    def answered(self, body: dict[str, Any], text: str) -> None:
        """Go on from there, unless another question came in between."""
        for talk in self._talks:
            if talk == body["messages"]:
                talk.append({"role": "assistant", "content": text})


def _same(a: Reply, b: Reply) -> bool:
    if a.text != b.text or len(a.logprobs) != len(b.logprobs):
        return False
    pairs = zip(a.logprobs, b.logprobs, strict=True)
    return all(abs(x["logprob"] - y["logprob"]) < _SAME for x, y in pairs)


def drive(server: Local, n_requests: int, report: Report, folder: Path) -> None:
    """Ask for each answer twice: of the cache, and in a tenant that has nothing stored. Now and
    then two clients ask at once, and another one leaves before its answer.
    """
    talk, dice = Talk(_SEED), random.Random(_SEED)
    with ThreadPoolExecutor(2) as clients:
        while report.requests < n_requests:
            bodies = [talk.next() for _ in range(dice.choice([1, 1, 1, 2]))]
            if dice.random() < 0.1:
                leave(server, bodies[0], dice.random())
            (folder / "progress").write_text(str(report.requests))
            for body, answer, bare in clients.map(partial(ask, server), bodies):
                report.requests += 1
                report.wrong += not _same(answer, bare)
                report.prompt_tokens += answer.n_prompt
                talk.answered(body, answer.text)


def ask(server: Local, body: dict[str, Any]) -> tuple[dict[str, Any], Reply, Reply]:
    answer = server.chat(**body)
    bare = server.chat(**body, cache_salt=f"bare {uuid.uuid4()}")
    if bare.n_cached:
        raise RuntimeError("a prompt of an empty tenant hit")
    return body, answer, bare


def leave(server: Local, body: dict[str, Any], seconds: float) -> None:
    """Send a request, and close its connection while it is being served."""
    connection = server.send({**body, "stream": True, "max_tokens": 1000})
    time.sleep(seconds)
    connection.close()


def administer(server: Local, report: Report) -> None:
    """Pin a prompt and delete everything, through the API of the first rank."""
    on_all = server.generator.on_all_ranks
    on_all("heal")
    prompt = {"messages": [{"role": "user", "content": "to be pinned " * 8}]}
    server.chat(**prompt)
    pinned = server.post(prompt, "/v1/cache/pin")
    if pinned.status != 200:
        raise RuntimeError(pinned.body)
    report.pinned_bytes = on_all("pinned")
    by_id = server.post({"id": pinned.body["id"]}, "/v1/cache/unpin")
    if by_id.status != 409:
        raise RuntimeError(by_id.body)
    gone = Request(f"http://127.0.0.1:{server.port}/v1/cache?pinned=true", method="DELETE")
    try:
        urlopen(gone, timeout=60).close()
    except HTTPError as e:
        raise RuntimeError(e.read()) from e
    report.left_blocks = on_all("left")


# ---- a rank


def rank_main(options: argparse.Namespace) -> None:
    """One rank's process: the server's threads, and on the first rank the clients."""
    tieredkv.server.TieredPromptCache = LossyCache  # type: ignore[misc]  # what open_cache makes
    rank = mx.distributed.init().rank()
    folder = Path(options.folder)
    faulthandler.register(signal.SIGUSR1, (folder / f"stacks{rank}").open("w"))
    flags = ["--pipeline"] if CASES[options.case][1] == "pipeline" else []
    cold = folder / f"cold{rank}"
    if options.tight:
        flags += ["--prompt-cache-bytes", "1MB", "--prompt-cache-disk-bytes", "2MB"]
    with Local(folder / "model", cold, *flags, "--prefill-checkpoint", "32") as server:
        if rank:
            server.generator.join()
            return
        report, start = Report(), time.monotonic()
        drive(server, options.requests, report, folder)
        report.seconds = round(time.monotonic() - start, 1)
        fetched = server.generator.on_all_ranks("fetched")
        for pairs in zip(*fetched, strict=True):
            known, restored = zip(*pairs, strict=True)
            if len(set(restored)) > 1:
                raise RuntimeError(f"the ranks restored {restored} tokens")
            report.reused += restored[0]
            report.better += max(known)
            report.lesser += min(known)
        if not options.tight:
            administer(server, report)
        report.losses = server.generator.on_all_ranks("lost")
        report.stats = server.generator.on_all_ranks("counted")
        (folder / "report.json").write_text(json.dumps(asdict(report)))


def make_model(folder: Path, case: str) -> None:
    """A model that ranks can share, with the index that cutting it by layers needs."""
    name, _, config = CASES[case]
    tiny.save(folder, name, **config)
    names = mx.load(str(folder / "model.safetensors"))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def adjacent_ports() -> int:
    """The first of two free ports, below those that systems give to clients."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", port))
            b.bind(("127.0.0.1", port + 1))
            return port


def start_ranks(script: Sequence[str], logs: Sequence[Path]) -> list[subprocess.Popen[bytes]]:
    """Two ranks as ``mlx.launch`` starts them, without its watching over them, and their logs."""
    hosts, port = logs[0].with_name("hosts"), adjacent_ports()
    hosts.write_text(json.dumps([[f"127.0.0.1:{port + rank}"] for rank in range(2)]))
    processes = []
    for rank, log in enumerate(logs):
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "MLX_HOSTFILE": str(hosts),
            "MLX_RANK": str(rank),
        }
        with log.open("wb") as out:
            command = [sys.executable, *script]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
            )
    return processes


def run(case: str, n_requests: int, seed: int, folder: Path, *more: str) -> Report:
    """Serve so many requests with two ranks that lose their caches' content."""
    make_model(folder / "model", case)
    me = [__file__, "--rank", "--case", case, "--requests", str(n_requests)]
    me += ["--seed", str(seed), "--folder", str(folder), *more]
    logs = [folder / "log0", folder / "log1"]
    ranks = start_ranks(me, logs)
    try:
        hung = not ends(ranks, folder / "progress")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if hung:
        for each in (*logs, folder / "stacks0", folder / "stacks1"):
            print(each.name, each.read_text()[-10_000:], sep="\n", file=sys.stderr)
        return Report(requests=int((folder / "progress").read_text()), hung=1)
    if not (folder / "report.json").exists():
        raise RuntimeError("\n".join(["the ranks failed:", *(f.read_text()[-4000:] for f in logs)]))
    return Report(**json.loads((folder / "report.json").read_text()))


def ends(ranks: Sequence[subprocess.Popen[bytes]], progress: Path) -> bool:
    """Wait for the ranks' end; False, with their threads' stacks in their files, if they hang."""
    seen, since = "", time.monotonic()
    while any(rank.poll() is None for rank in ranks):
        now = progress.read_text() if progress.exists() else ""
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > _HUNG_SECONDS:
            for rank in ranks:
                rank.send_signal(signal.SIGUSR1)
            time.sleep(2)
            return False
        time.sleep(0.1)
    return True


def main() -> int:
    """The long form."""
    global _SEED, _LOSSES
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--case", choices=[*CASES, "all"], default="all")
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--tight",
        action="store_true",
        help="no losses, but caps that have room for some prompts only: what each rank evicts",
    )
    p.add_argument("--folder", help=argparse.SUPPRESS)
    p.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = p.parse_args()
    _SEED = options.seed
    _LOSSES = 0.0 if options.tight else _LOSSES
    if options.rank:
        rank_main(options)
        return 0
    bad = 0
    for case in CASES if options.case == "all" else [options.case]:
        with tempfile.TemporaryDirectory() as folder:
            more = ["--tight"] if options.tight else []
            report = run(case, options.requests, options.seed, Path(folder), *more)
        print(case, json.dumps(asdict(report), indent=1))
        bad += report.wrong + report.hung
    return int(bad > 0)


_SEED = 0
_LOSSES = 0.35

if __name__ == "__main__":
    sys.exit(main())
