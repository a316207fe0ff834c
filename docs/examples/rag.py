"""Questions about a few documents, answered with the passages that fit: run it twice.

    python docs/examples/rag.py --model mlx-community/Qwen3-4B-4bit

Each question goes to the model behind the passages that BM25 finds for it. The state of what
prompts share is kept in a directory, so the second run, a new process, computes little of it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm import load

from tieredkv import TieredPromptCache, stream_generate

INSTRUCTIONS = (
    "Answer the question with what the passages say, in one or two sentences. "
    "If they don't say it, say so."
)

DOCUMENTS = {
    "Handbook: holidays": (
        "Every employee has 28 days of holiday a year. Days that are not taken by the end of March "
        "of the next year are lost, unless a manager has asked to postpone them. Holidays of more "
        "than two weeks are agreed on at least two months before they begin. Whoever falls ill on "
        "holiday gets the days back, with a note from a doctor. Half days can be taken, too. "
        "Public holidays that fall on a weekend are not made up for."
    ),
    "Handbook: travel": (
        "Trains are booked in second class, and in first class for journeys of more than four "
        "hours. Flights are for distances of more than 700 kilometres. A hotel may cost 140 euros "
        "a night, in capitals 180. Receipts are handed in within 30 days, as photographs. Meals "
        "are paid at 14 euros for half a day and 28 euros for a whole one, without receipts. "
        "Whoever drives their own car gets 30 cents a kilometre."
    ),
    "Handbook: equipment": (
        "New colleagues get a notebook with 32 gigabytes of memory, a monitor and a headset. "
        "Notebooks are replaced after four years. Broken ones are taken to the service desk on the "
        "second floor, which lends another one for the day. Private use is allowed, software from "
        "unknown sources isn't. Disks are encrypted; who forgets the passphrase loses the data, "
        "since nobody else has a key."
    ),
    "Runbook: the database": (
        "The primary database runs on db-1 and is copied to db-2 and db-3. If db-1 doesn't answer "
        "for 20 seconds db-2 takes over by itself. Backups are made at 02:00 and kept for 35 days; "
        "every Monday one of them is restored on a test machine. To restore one by hand, stop the "
        "writers, run restore-db with the date, and start the writers again. Disks are enlarged "
        "when they are 80 percent full."
    ),
    "Runbook: the website": (
        "The website is deployed from the main branch, in the order staging, canary, all. The "
        "canary takes 5 percent of the requests for 30 minutes; if more than 1 percent of its "
        "answers are errors it is rolled back by itself. Certificates are renewed 30 days before "
        "they end. On Fridays after noon nothing is deployed. Logs are kept for 14 days, and for a "
        "year those of payments."
    ),
}

QUESTIONS = (
    "How many days of holiday do I have, and when are they lost?",
    "What may a hotel in a capital cost?",
    "How long are backups of the database kept?",
    "When is a deployment of the website rolled back?",
)


@dataclass(frozen=True)
class Answer:
    """What a question was answered with, and what that took. Times in seconds."""

    question: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    first_token: float


class Bm25:
    """Finds the documents that fit a question best, by the words that they share."""

    def __init__(self, documents: dict[str, str], k1: float = 1.5, b: float = 0.75) -> None:
        self._words = {name: Counter(_words(f"{name} {text}")) for name, text in documents.items()}
        self._length = {name: sum(words.values()) for name, words in self._words.items()}
        self._mean = sum(self._length.values()) / len(documents)
        self._in = Counter(word for words in self._words.values() for word in words)
        self._k1, self._b = k1, b

    def best(self, question: str, n: int) -> list[str]:
        """Names of the ``n`` documents that fit best."""
        ranked = sorted(self._words, key=lambda name: -self._score(name, question))
        return ranked[:n]

    def _score(self, name: str, question: str) -> float:
        return sum(self._weight(name, word) for word in set(_words(question)))

    def _weight(self, name: str, word: str) -> float:
        n, found = self._words[name][word], self._in[word]
        rarity = math.log(1 + (len(self._words) - found + 0.5) / (found + 0.5))
        spread = 1 - self._b + self._b * self._length[name] / self._mean
        return rarity * n * (self._k1 + 1) / (n + self._k1 * spread)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def prompt_of(tokenizer: Any, question: str, names: list[str]) -> list[int]:
    """What prompts share comes first: instructions, passages in an order of their own, question."""
    passages = "\n\n".join(f"{name}\n{DOCUMENTS[name]}" for name in sorted(names))
    messages = [
        {"role": "system", "content": f"{INSTRUCTIONS}\n\n{passages}"},
        {"role": "user", "content": question},
    ]
    tokens: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokens


def answer(
    cache: TieredPromptCache, model: Any, tokenizer: Any, question: str, names: list[str], n: int
) -> Answer:
    """Generate the answer to a question, of at most ``n`` tokens."""
    prompt = prompt_of(tokenizer, question, names)
    began, first = time.perf_counter(), 0.0
    parts, cached = [], 0
    for response in stream_generate(
        cache, model, tokenizer, prompt, max_tokens=n, checkpoint_tokens=256
    ):
        first = first or time.perf_counter() - began
        cached = response.cached_tokens
        parts.append(response.text)
    return Answer(question, "".join(parts).strip(), len(prompt), cached, first)


def say(answered: Answer, before: float | None) -> None:
    """Print an answer, and how long its first token took, also in the first run."""
    saved = f", {before:.2f} s when it was first asked" if before is not None else ""
    print(f"\n{answered.question}\n  {answered.text}")
    print(
        f"  {answered.cached_tokens} of {answered.prompt_tokens} prompt tokens reused, first token "
        f"after {answered.first_token:.2f} s{saved}"
    )


def main() -> None:
    """Answer all questions, and remember how long that took the first time."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--model", required=True, help="path or hub name of a chat model")
    p.add_argument("--dir", type=Path, default=Path("~/.cache/tieredkv-rag").expanduser())
    p.add_argument("--passages", type=int, default=2, help="passages for each question")
    p.add_argument("--max-tokens", type=int, default=60)
    p.add_argument("--question", action="append", help="ask this instead; may be repeated")
    options = p.parse_args()

    search = Bm25(DOCUMENTS)
    times = options.dir / "first-times.json"
    before = json.loads(times.read_text()) if times.exists() else {}
    model, tokenizer = load(options.model)
    answers = []
    with TieredPromptCache(options.dir) as cache:
        cache.bind(options.model, model)
        for question in options.question or QUESTIONS:
            names = search.best(question, options.passages)
            answers.append(answer(cache, model, tokenizer, question, names, options.max_tokens))
            say(answers[-1], before.get(f"{options.model} {question}"))
    first = {f"{options.model} {a.question}": a.first_token for a in answers}
    times.write_text(json.dumps({**first, **before}))
    total = sum(a.first_token for a in answers)
    known = [before[key] for key in first if key in before]
    print(f"\nFirst tokens took {total:.2f} s in all", end="")
    print(f"; {sum(known):.2f} s in the first run" if len(known) == len(first) else "")


if __name__ == "__main__":
    main()
