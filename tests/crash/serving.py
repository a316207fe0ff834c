"""A real server in which calls fail, or which is killed, while it answers.

Usage: ``python -m tests.crash.serving [--count N] [--seed N]``. Every answer is compared, token
by token, with that of a server without a cache.
"""

from __future__ import annotations

import argparse
import http.client
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
from server import Endpoint, Local, Server, free_port

from tieredkv.codec import PlaneCodec
from tieredkv.tiers.cold import ColdReader, ColdTier

from . import ROOT
from .armed import Control
from .failpoints import ERRORS, IN_MEMORY, POINTS, Failpoint

# A few prompts of two blocks each: most of what is found is promoted, and all is evicted soon.
HOT_BYTES = 2 << 20
COLD_BYTES = 5 << 20
_ANSWER_TOKENS = 4
# Batches of another size round otherwise: where the two best tokens are closer, either is right.
_MARGIN = 2e-3
_MOST_N = 4
_PATIENCE_S = 10.0
_COMMIT_S = 0.5
_CONVERSATIONS = 12
_WORDS = ("tide", "harbour", "timber", "herring", "sail", "fog", "pilot", "anchor", "rope", "buoy")
_SYSTEMS = tuple(
    f"You are the master of harbour {i}. " + f"{word}, fog, nobody moved; " * 12
    for i, word in enumerate(_WORDS[:3])
)


@dataclass(frozen=True, slots=True)
class Question:
    """A request's messages, and the tokens that a server without a cache answers with."""

    messages: tuple[dict[str, str], ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A first question, and another after its answer."""

    first: Question
    then: Question


def model(folder: Path) -> Path:
    """A model whose state takes 2 KiB a token, in float32."""
    return tiny.save(
        folder,
        "qwen3",
        seed=11,
        head_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


def body(messages: Iterable[dict[str, str]], **more: Any) -> dict[str, Any]:
    """A request for a few greedy tokens and their ids."""
    # Text isn't enough: most of what such a model says is no character at all.
    fixed = {"max_tokens": _ANSWER_TOKENS, "temperature": 0, "logprobs": True}
    return {"messages": list(messages), **fixed, **more}


def _say(dice: random.Random, n: int) -> str:
    return " ".join(dice.choice(_WORDS) for _ in range(n))


class Oracle:
    """A server without a cache, on threads of this process."""

    def __init__(self, folder: Path) -> None:
        self.server = Local(folder, "none", "--prompt-cache-bytes", "0")

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()

    def question(self, messages: Sequence[dict[str, str]]) -> tuple[Question, str] | None:
        """What the messages are answered with; None if another answer were as right."""
        reply = self.server.post(body(messages, top_logprobs=2))
        assert reply.status == 200, reply.body
        best = [[t["logprob"] for t in step["top_logprobs"]] for step in reply.logprobs]
        if any(first - second < _MARGIN for first, second in best):
            return None
        ids = tuple(step["id"] for step in reply.logprobs)
        return Question(tuple(messages), ids), reply.text

    def conversations(self, n: int, seed: int) -> list[Conversation]:
        """So many different ones, the same for the same seed."""
        dice = random.Random(seed)
        made: list[Conversation] = []
        while len(made) < n:
            system = {"role": "system", "content": dice.choice(_SYSTEMS)}
            messages = [system, {"role": "user", "content": _say(dice, 40)}]
            first = self.question(messages)
            if first is None:
                continue
            messages += [
                {"role": "assistant", "content": first[1]},
                {"role": "user", "content": _say(dice, 8)},
            ]
            then = self.question(messages)
            if then is not None:
                made.append(Conversation(first[0], then[0]))
        return made


class ArmedServer(Server):
    """`tests.crash.armed` on a free port, with a folder for its store, its log and its control."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / "log"
        self.cold = folder / "cold"
        command = [
            *(sys.executable, "-m", "tests.crash.armed", str(folder), "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--prompt-cache-dir", str(self.cold)),
            *("--prompt-cache-bytes", str(HOT_BYTES)),
            *("--prompt-cache-disk-bytes", str(COLD_BYTES), "--prompt-cache-reserve", "0"),
        ]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
        self._wait()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: cached tokens, whether the whole prompt was known but for its last token,
    and what was not as it must be, if anything.
    """

    n_cached: int = 0
    is_known: bool = False
    fault: str = ""


def ask(endpoint: Endpoint, question: Question, **more: Any) -> Answer:
    """Ask, and compare the answer."""
    try:
        reply = endpoint.post(body(question.messages, **more))
    except (OSError, http.client.HTTPException) as error:
        return Answer(fault=f"failed: {error!r}")
    if reply.status != 200:
        return Answer(fault=f"failed: {reply.status} {reply.body}")
    cached, of = reply.n_cached, reply.n_prompt
    if tuple(step["id"] for step in reply.logprobs) != question.answer:
        return Answer(cached, fault=f"wrong: {cached} of {of} tokens cached")
    return Answer(cached, cached == of - 1)


@dataclass(slots=True)
class Tally:
    """What a run gave."""

    rounds: int = 0
    asked: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    failed: int = 0
    known: int = 0
    warm: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing happened that must not happen."""
        return not (self.wrong or self.failed or self.problems)

    def add(self, answer: Answer, where: str) -> None:
        """Count one answer."""
        self.asked += 1
        self.known += answer.is_known
        self.wrong += answer.fault.startswith("wrong")
        self.failed += answer.fault.startswith("failed")
        if answer.fault:
            self.problems.append(f"{where}: {answer.fault}")

    def line(self) -> str:
        """The numbers in one line."""
        raised, killed = self.struck.total(), self.killed.total()
        return (
            f"{self.rounds} rounds, {raised} calls failed at {len(self.struck)} points, "
            f"{killed} kills at {len(self.killed)}; {self.asked} answers, {self.wrong} wrong, "
            f"{self.failed} failed, {self.known} to known prompts, {self.warm} of those known "
            f"after a kill, {len(self.problems)} problems"
        )


class Run:
    """Rounds of requests to one store, each with one failpoint armed."""

    def __init__(self, model: Path, folder: Path, conversations: Sequence[Conversation]) -> None:
        self.tally = Tally()
        self._model = model
        self._folder = folder
        self._conversations = conversations
        self._i = 0
        self._control = Control(folder)
        self._control.arm(None)
        self.start()
        for _ in range(4):
            self._count(self._mix(), "before")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()

    def start(self) -> None:
        """Start the server on what the one before has left."""
        self._server = ArmedServer(self._model, self._folder)

    def fail(self, failpoint: Failpoint) -> None:
        """Answer a mix of requests while one call fails, and go on as ever afterwards."""
        self.answer(failpoint)
        self._goes_on(str(failpoint))

    def answer(self, failpoint: Failpoint) -> None:
        """Answer a mix of requests while one call fails."""
        before = self._control.n_struck()
        self._begin(failpoint)
        self._count(self._mix(), str(failpoint))
        self._control.arm(None)
        if self._control.n_struck() > before:
            self.tally.struck[failpoint.name] += 1

    def kill(self, failpoint: Failpoint) -> None:
        """Die in the middle of a mix of requests, and answer them after a restart."""
        # By then what was answered before is committed.
        time.sleep(_COMMIT_S)
        self._begin(failpoint)
        answers = list(self._mix())
        deadline = time.monotonic() + 1.5
        # A use is recorded some time after the answer.
        while self._server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._control.arm(None)
        died = self._server.process.poll() is not None
        if died:
            self.tally.killed[failpoint.name] += 1
        self._count((a for a in answers if not (died and a.fault.startswith("failed"))), "dying")
        self._server.kill()
        self.start()
        asked = self._conversations_of(self._i - 1)
        again = [ask(self._server, c.first) for c in asked]
        again += [ask(self._server, c.then, seed=7) for c in asked]
        self.tally.warm += sum(a.is_known for a in again)
        self._count(again, f"after {failpoint}")
        self._goes_on(f"after {failpoint}")

    def end(self) -> None:
        """End the server in order, and look at what it had and what it leaves."""
        status = self._server.stop()
        books = self._control.books()
        problems = [f"exit status {status}"] if status else []
        problems += [] if books.flushed else ["the queue did not empty"]
        problems += [f"{books.held_bytes} bytes held"] if books.held_bytes else []
        self.tally.problems += [*problems, *books.problems, *left(self._server.cold)]

    def _begin(self, failpoint: Failpoint) -> None:
        self.tally.rounds += 1
        if failpoint.name.startswith("open"):
            # Then the server opens a new one.
            shutil.rmtree(self._server.cold, ignore_errors=True)
        self._control.arm(failpoint)

    def _conversations_of(self, i: int) -> list[Conversation]:
        """The new one of a mix, and those that it comes back to."""
        return [self._conversations[(i - back) % len(self._conversations)] for back in (0, 1, 3)]

    def _mix(self) -> Iterator[Answer]:
        """New prompts, known ones and longer ones; alone, in order and two at once."""
        new, old, older = self._conversations_of(self._i)
        self._i += 1
        server = self._server
        yield ask(server, new.first)
        yield ask(server, older.first, seed=7)
        with ThreadPoolExecutor(2) as both:
            yield from both.map(lambda q: ask(server, q), (new.then, old.first))
        yield ask(server, old.then, seed=7)

    def _goes_on(self, where: str) -> None:
        """What is asked twice is found the second time."""
        if self._server.process.poll() is not None:
            self.tally.problems.append(f"{where}: the server died")
            self.start()
            return
        question = self._conversations_of(self._i - 1)[0].then
        deadline = time.monotonic() + _PATIENCE_S
        while not (answer := ask(self._server, question)).is_known:
            self._count([answer], where)
            if time.monotonic() > deadline:
                self.tally.problems.append(f"{where}: nothing is cached any more")
                return
        self._count([answer], where)
        if self._server.health() != 200:
            self.tally.problems.append(f"{where}: not healthy")

    def _count(self, answers: Iterable[Answer], where: str) -> None:
        for answer in answers:
            self.tally.add(answer, where)


def left(cold: Path) -> list[str]:
    """What is wrong with a store that opening it to write doesn't heal."""
    ColdTier(cold, COLD_BYTES, PlaneCodec()).close()
    reader = ColdReader(cold, PlaneCodec())
    problems = [str(problem) for problem in reader.verify()]
    reader.close()
    if (cold / "data.mdb").stat().st_size > COLD_BYTES:
        problems.append("the file is larger than its cap")
    return problems


def failures(seed: int) -> list[Failpoint]:
    """Every point with every error, at its first passing and at a later one, in random order."""
    dice = random.Random(seed)
    made = [
        Failpoint(name, nth, action)
        for name in POINTS
        for action in ERRORS
        for nth in (1, dice.randint(2, _MOST_N))
    ]
    dice.shuffle(made)
    return made


def kills(seed: int) -> list[Failpoint]:
    """A kill at every point, in random order."""
    dice = random.Random(seed)
    made = [
        Failpoint(name, 1 if name.startswith("open") else dice.choice((1, 1, 2))) for name in POINTS
    ]
    dice.shuffle(made)
    return made


def asked(folder: Path, n: int, seed: int) -> list[Conversation]:
    """So many conversations with `model`, which is made in a folder."""
    # Where upstream logs every request.
    weights = model(folder / "model")
    with (folder / "oracle.log").open("w") as log, redirect_stderr(log), Oracle(weights) as oracle:
        return oracle.conversations(n, seed)


def run(
    folder: Path,
    failing: Sequence[Failpoint],
    killing: Sequence[Failpoint],
    conversations: Sequence[Conversation],
) -> Tally:
    """Serve through all of these. What must not fail is tried last, and judged by answers only."""
    with Run(folder / "model", folder, conversations) as serving:
        for failpoint in failing:
            if failpoint.name not in IN_MEMORY:
                serving.fail(failpoint)
        serving.end()
        serving.start()
        for failpoint in killing:
            serving.kill(failpoint)
        serving.end()
        unlikely = [failpoint for failpoint in failing if failpoint.name in IN_MEMORY]
        if unlikely:
            serving.start()
        for failpoint in unlikely:
            serving.answer(failpoint)
        return serving.tally


def main() -> int:
    """Serve through the faults and print what came of it; 1 if an answer was wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, help="failing calls and kills, this many of each")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="tieredkv-serving-"))
    seed, count = arguments.seed, arguments.count
    conversations = asked(folder, _CONVERSATIONS, seed)
    tally = run(folder, failures(seed)[:count], kills(seed)[:count], conversations)
    for problem in tally.problems[:40]:
        print(problem)
    print(f"{tally.line()}, in {time.monotonic() - started:.0f} s")
    for what, names in (("failed", tally.struck), ("was killed", tally.killed)):
        never = POINTS.keys() - names.keys()
        if never and not count:
            print(f"nobody {what} at: {', '.join(sorted(never))}")
    if not tally.is_clean:
        print(f"what is left of it: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
