"""Made traces of different characters, for ``bench.sim``.

    python -m bench.traces {chat,agents,rag,batches,scan,bursts,phases,mixed} N [SEED] > TRACE

Prompts are cut into blocks of 512 tokens, each named by all that leads to it, as a store does it.
Times are those of a busy single machine. Nothing is drawn from a real trace.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

BLOCK_TOKENS = 512

# Parts of a prompt: what it is, and its tokens. Equal names are equal texts.
Parts = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, order=True)
class Prompt:
    """A prompt at a time in seconds."""

    at: float
    parts: Parts

    @property
    def n_tokens(self) -> int:
        """Its length."""
        return sum(n for _, n in self.parts)


class Cutter:
    """Numbers blocks: equal ones that all leads to is equal of have one number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Parts], int] = {}

    def path(self, parts: Parts) -> list[int]:
        """The blocks of a prompt."""
        path: list[int] = []
        for block in _blocks(parts):
            place = (path[-1] if path else -1, block)
            path.append(self._numbers.setdefault(place, len(self._numbers)))
        return path


def _blocks(parts: Parts) -> Iterator[Parts]:
    block: list[tuple[str, int]] = []
    room = BLOCK_TOKENS
    for name, n_tokens in parts:
        start = 0
        while start < n_tokens:
            taken = min(room, n_tokens - start)
            block.append((f"{name}@{start}", taken))
            start += taken
            room -= taken
            if not room:
                yield tuple(block)
                block, room = [], BLOCK_TOKENS
    if block:
        yield tuple(block)


def _length(random: Random, median: float, spread: float) -> int:
    return int(median * random.lognormvariate(0, spread)) + 8


def chat(random: Random, n: int, at: float = 0.0, name: str = "chat") -> list[Prompt]:
    """Conversations under a few system prompts, answered after a minute or so of thought."""
    prompts: list[Prompt] = []
    waiting: list[tuple[float, int, Parts]] = []
    started = 0
    starts = at
    while len(prompts) < n:
        if not waiting or starts < waiting[0][0]:
            system = min(int(random.paretovariate(1.2)), 5)
            first = (f"{name} user {started}", _length(random, 660, 1.2))
            parts: Parts = ((f"{name} system {system}", 800 + 300 * system), first)
            heapq.heappush(waiting, (starts, started, parts))
            started += 1
            starts += random.expovariate(0.35)
            continue
        now, number, parts = heapq.heappop(waiting)
        prompts.append(Prompt(now, parts))
        if random.random() < 0.7:
            turn = f"{name} {number} {len(parts)}"
            answer = (f"{turn} answer", _length(random, 245, 0.8))
            user = (f"{turn} user", _length(random, 90, 1.2))
            think = 60 * random.lognormvariate(0, 1)
            heapq.heappush(waiting, (now + think, number, (*parts, answer, user)))
    return prompts


def agents(
    random: Random, n: int, at: float = 0.0, name: str = "agent", n_agents: int = 40
) -> list[Prompt]:
    """Agents that call tools: quick steps, each with one more result, until the task is done."""
    prompts: list[Prompt] = []
    waiting = [(at + 30 * random.random(), i, _agent(name, i)) for i in range(n_agents)]
    heapq.heapify(waiting)
    started = n_agents
    while len(prompts) < n:
        now, number, parts = heapq.heappop(waiting)
        if len(parts) == 1:
            parts = (*parts, (f"{name} task {number}", _length(random, 400, 1.0)))
        prompt = Prompt(now, parts)
        prompts.append(prompt)
        if random.random() < 1 / 20 or prompt.n_tokens > 120_000:
            later = now + random.expovariate(1 / 60)
            heapq.heappush(waiting, (later, started, _agent(name, started)))
            started += 1
            continue
        result = (f"{name} {number} {len(parts)}", _length(random, 540, 1.3))
        heapq.heappush(waiting, (now + 2 + random.expovariate(1 / 8), number, (*parts, result)))
    return prompts


def _agent(name: str, number: int) -> Parts:
    return ((f"{name} {number % 3}", 6000),)


def rag(
    random: Random, n: int, at: float = 0.0, name: str = "rag", n_documents: int = 2000
) -> list[Prompt]:
    """Questions on documents, asked for as often as Zipf's law has it."""
    lengths = [_length(random, 3000, 0.7) for _ in range(n_documents)]
    weights = [1 / (i + 1) for i in range(n_documents)]
    prompts = []
    for i, number in enumerate(random.choices(range(n_documents), weights, k=n)):
        at += random.expovariate(1)
        document = (f"{name} document {number}", lengths[number])
        question = (f"{name} question {i}", _length(random, 55, 0.7))
        prompts.append(Prompt(at, ((f"{name} system", 700), document, question)))
    return prompts


def batches(
    random: Random, n: int, at: float = 0.0, name: str = "batch", per_second: float = 5.0
) -> list[Prompt]:
    """Jobs of an API: a template, many items in a run, a few of them sent again."""
    prompts: list[Prompt] = []
    job = 0
    while len(prompts) < n:
        template = (f"{name} job {job}", _length(random, 1480, 0.8))
        sent: list[Parts] = []
        for i in range(int(random.expovariate(1 / 150)) + 10):
            at += random.expovariate(per_second)
            if sent and random.random() < 0.05:
                parts = random.choice(sent)
            else:
                parts = (template, (f"{name} item {job} {i}", _length(random, 660, 0.9)))
                sent.append(parts)
            prompts.append(Prompt(at, parts))
        at += random.expovariate(1 / 200)
        job += 1
    return prompts[:n]


def scan(
    random: Random, n: int, at: float = 0.0, name: str = "scan", n_documents: int = 150
) -> list[Prompt]:
    """The same documents round and round, in the same order, with the question after each."""
    lengths = [_length(random, 4000, 0.5) for _ in range(n_documents)]
    prompts = []
    for i in range(n):
        at += 2 + random.random()
        number = i % n_documents
        document = (f"{name} document {number}", lengths[number])
        prompts.append(
            Prompt(at, ((f"{name} system", 1500), document, (f"{name} question {i}", 60)))
        )
    return prompts


def bursts(random: Random, n: int) -> list[Prompt]:
    """Conversations, and every now and then many prompts in a row that never come again."""
    prompts = chat(random, n * 6 // 10)
    n_bursts = max(1, n // 400)
    rest = n - len(prompts)
    end = prompts[-1].at
    for i in range(rest):
        burst = i * n_bursts // rest
        since = (i - burst * rest / n_bursts) / 20
        system = random.randrange(1, 4)
        once = (f"once {i}", _length(random, 1800, 1.0))
        at = end * (burst + 0.5) / n_bursts + since
        prompts.append(Prompt(at, ((f"chat system {system}", 800 + 300 * system), once)))
    return sorted(prompts)


def phases(random: Random, n: int) -> list[Prompt]:
    """One use after another, each of which takes the machine over from the one before."""
    prompts: list[Prompt] = []
    part = n // 6
    kinds: tuple[Callable[[float], list[Prompt]], ...] = (
        lambda at: chat(random, part, at, "morning"),
        lambda at: rag(random, part, at, n_documents=400),
        lambda at: agents(random, part, at),
        lambda at: scan(random, part, at, n_documents=60),
        lambda at: batches(random, part, at),
        lambda at: chat(random, n - 5 * part, at, "evening"),
    )
    for kind in kinds:
        prompts += sorted(kind(prompts[-1].at + 30 if prompts else 0.0))
    return prompts


def mixed(random: Random, n: int) -> list[Prompt]:
    """Four uses side by side."""
    part = n // 4
    return sorted(
        chat(random, n - 3 * part)
        + agents(random, part, n_agents=10)
        + rag(random, part)
        + batches(random, part, per_second=1.0)
    )


KINDS: dict[str, Callable[[Random, int], list[Prompt]]] = {
    "chat": chat,
    "agents": agents,
    "rag": rag,
    "batches": batches,
    "scan": scan,
    "bursts": bursts,
    "phases": phases,
    "mixed": mixed,
}


def rows(prompts: Sequence[Prompt]) -> Iterator[dict[str, object]]:
    """Lines of a trace, in the order of time."""
    cutter = Cutter()
    for prompt in prompts:
        yield {
            "timestamp": int(1000 * prompt.at),
            "input_length": prompt.n_tokens,
            "output_length": 200,
            "hash_ids": cutter.path(prompt.parts),
        }


def main() -> None:
    """Print a trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("n", type=int, help="requests")
    parser.add_argument("seed", type=int, nargs="?", default=1)
    args = parser.parse_args()
    for row in rows(KINDS[args.kind](Random(args.seed), args.n)):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
