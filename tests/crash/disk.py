"""A prompt cache on a disk that is full for a while, or that does not answer for a while.

Usage: ``python -m tests.crash.disk [--seconds S]``, on the preloaded disk of powerloss.c.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from . import ROOT, shim
from .load import Prompt

CAP = 64 << 20
_WARM = 25
_FLUSH_S = 60.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a cache did before, during and after the disk's bad time. Latencies in seconds."""

    quick: float
    quick_worst: float
    slow: float
    slow_worst: float
    wrong: int
    dropped: int
    flushed_meanwhile: bool
    recovered: bool
    held_bytes: int
    problems: tuple[str, ...]

    def line(self) -> str:
        """The numbers in one line."""
        return (
            f"insert and fetch p50 {self.quick * 1e3:.1f} ms (worst {self.quick_worst * 1e3:.0f}) "
            f"before, {self.slow * 1e3:.1f} (worst {self.slow_worst * 1e3:.0f}) meanwhile, "
            f"{self.wrong} wrong, {self.dropped} dropped, "
            f"{'recovered' if self.recovered else 'NOT recovered'}, {len(self.problems)} problems"
        )


def _bad_time(mark: Path, seconds: float) -> Iterator[None]:
    """Rounds of work while ``mark`` is there, for so many seconds and at least ten."""
    mark.touch()
    until = time.monotonic() + seconds
    rounds = 0
    while rounds < 10 or time.monotonic() < until:
        yield
        rounds += 1
    mark.unlink()


def work(folder: Path, mark: Path, seconds: float) -> Report:
    """Use a cache while ``mark`` tells the disk to be bad. In a process on such a disk."""
    from .full import HOT_BYTES, FullParty

    party = FullParty(folder, CAP)
    numbers = iter(range(1 << 30))
    wrong = 0

    def timed() -> float:
        nonlocal wrong
        tokens = Prompt(3, next(numbers)).tokens()
        started = time.perf_counter()
        party.insert(tokens)
        found = party.find(tokens)
        took = time.perf_counter() - started
        wrong += not found.is_right
        return took

    before = sorted(timed() for _ in range(_WARM))
    party.cache.flush(_FLUSH_S)
    meanwhile = []
    flushed = True
    for _ in _bad_time(mark, seconds):
        meanwhile.append(timed())
        flushed = party.cache.flush(0) and flushed
        # As fast as a busy server, not faster.
        time.sleep(0.02)
    meanwhile.sort()
    party.cache.flush(_FLUSH_S)
    later = [Prompt(4, i).tokens() for i in range(4)]
    recovered = sum(map(party.store, later)) == len(later)
    dropped = sum(party.cache.stats().dropped.values())
    held = party.cache.nbytes
    party.cache.trim_to(n_bytes=0)
    recovered &= all(party.find(tokens).n_tokens == len(tokens) for tokens in later)
    party.cache.trim_to(n_bytes=0)
    problems = [*party.problems(), *(["memory is still held"] if party.cache.nbytes else [])]
    if held > HOT_BYTES:
        problems.append(f"{held} bytes held")
    party.close()
    return Report(
        before[len(before) // 2],
        before[-1],
        meanwhile[len(meanwhile) // 2],
        meanwhile[-1],
        wrong,
        dropped,
        flushed,
        recovered,
        held,
        tuple(problems),
    )


def run(kind: str, seconds: float, folder: Path) -> Report:
    """A cache on a disk that is ``full`` or does ``stall`` for some seconds."""
    mark = folder / "bad"
    environment = shim.environment(**{kind: mark})
    command = [sys.executable, "-m", "tests.crash.disk", "--work", str(folder / "cold"), str(mark)]
    command += ["--seconds", str(seconds)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the cache died: {done.returncode}\n{done.stderr}")
    fields = json.loads(done.stdout)
    return Report(**{**fields, "problems": tuple(fields["problems"])})


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tieredkv-disk-") as folder:
        yield Path(folder)


def main() -> int:
    """Run both and print what came of it; 1 if anything was wrong or did not recover."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--work", nargs=2, metavar=("FOLDER", "MARK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        logging.disable()
        print(json.dumps(asdict(work(*map(Path, arguments.work), arguments.seconds))))
        return 0
    reason = shim.why_not()
    if reason:
        print(f"disk: not run, {reason}")
        return 0
    status = 0
    for kind in ("full", "stall"):
        with _folder() as folder:
            report = run(kind, arguments.seconds, folder)
        print(f"{kind} for {arguments.seconds:.0f} s: {report.line()}", flush=True)
        status |= bool(report.wrong or report.problems or not report.recovered)
    return status


if __name__ == "__main__":
    sys.exit(main())
