"""Kills writers and readers of one cold directory, over and over, and then counts.

Usage: ``python -m tests.crash.kill [--kills N] [--posix] [--seed N]``; `--posix` with LMDB's
locks as they are on macOS.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import load, posix_lmdb
from .failpoints import POINTS, Failpoint
from .load import Job, Logs, Verdict

# Longer than any wait of the product: the gate gives up after ten seconds.
HUNG_S = 30.0
# A kill at a random time comes within this after the store was opened, a failpoint that isn't
# passed is given up after the longer one. Some are killed while they open.
_LIFE_S = 0.35
_OPENING_S = 0.1
_WHILE_OPENING = 0.15
_FAILPOINT_LIFE_S = 1.5
_POLL_S = 0.004
# Of all kills, those with all processes at once, so that the next one finds nobody there.
_ALL_AT_ONCE = 0.04
_NTH = (1, 1, 2, 3, 5)
_CAP_STEP = 1 << 16
_JUDGE_S = 300.0
# Points that the party without mlx doesn't pass, and those that a reader passes.
_FULL_ONLY = ("capture", "commit.told", "evict.hot", "promote.hot", "promote.restore")
_READERS = ("open", "promote")
# Only who finds nobody else there looks for damage before opening.
_ALONE = "open.walked"


@dataclass(frozen=True, slots=True)
class Mode:
    """One kind of round: which party, its processes, the cap and whether that keeps everything."""

    name: str
    kind: str
    writers: int
    readers: int
    cap_bytes: int
    keeps: bool


MODES = (
    Mode("cold, nothing evicted", "cold", 3, 1, 1 << 30, True),
    Mode("cold, evicting", "cold", 3, 1, 4 << 20, False),
    Mode("full, nothing evicted", "full", 2, 1, 1 << 28, True),
    Mode("full, evicting", "full", 2, 1, 1 << 20, False),
)
# Kills of a run by mode, in tenths: children of the cold party live and start faster.
_SHARES = (3, 3, 2, 2)
# A round's end costs a look at everything; within one the store and the logs grow.
_ROUND_KILLS = 100


@dataclass(slots=True)
class Tally:
    """What a run of kills gave."""

    kills: int = 0
    at_failpoints: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    lost: int = 0
    wrong: int = 0
    hung: int = 0
    died: int = 0
    problems: list[str] = field(default_factory=list)
    file_per_cap: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing happened that must not happen."""
        return not (self.lost or self.wrong or self.hung or self.died or self.problems)

    def add(self, other: Tally) -> None:
        """Add another run's numbers."""
        self.kills += other.kills
        self.at_failpoints += other.at_failpoints
        self.acknowledged += other.acknowledged
        self.lost += other.lost
        self.wrong += other.wrong
        self.hung += other.hung
        self.died += other.died
        self.problems += other.problems
        self.file_per_cap = max(self.file_per_cap, other.file_per_cap)

    def line(self) -> str:
        """The numbers in one line."""
        at = sum(self.at_failpoints.values())
        return (
            f"{self.kills} kills ({at} at {len(self.at_failpoints)} failpoints), "
            f"{self.acknowledged} prompts acknowledged, {self.lost} lost, {self.wrong} wrong, "
            f"{self.hung} hung, {self.died} died of themselves, "
            f"{len(self.problems)} problems, file/cap {self.file_per_cap:.3f}"
        )


def processes() -> Any:
    """The context that children start in: forked from a server that has all imports and has
    never opened a store, so that nothing of LMDB is carried across.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.load", f"{__package__}.full"])
    return context


@dataclass(slots=True)
class _Slot:
    """One of the processes, the job it has now and when it is to be killed."""

    job: Job
    target: Any
    process: Any = None
    started: float = 0.0
    life: float = 0.0
    doom: float = 0.0


class Round:
    """Some kills on one store."""

    def __init__(self, folder: Path, mode: Mode, dice: random.Random) -> None:
        self.mode = mode
        self.tally = Tally()
        self._dice = dice
        self._context = processes()
        self._streams = iter(range(1, 1 << 30))
        self._armed: Counter[str] = Counter()
        self._directory = folder / "cold"
        self._logs = Logs(folder / "logs")
        (folder / "logs").mkdir(parents=True)
        job = Job(
            self._directory, folder / "logs", mode.cap_bytes, mode.kind, 0, 0, keeps=mode.keeps
        )
        targets = [load.write] * mode.writers + [load.read] * mode.readers
        self._slots = [_Slot(replace(job, slot=i), target) for i, target in enumerate(targets)]

    def run(self, kills: int) -> Tally:
        """Kill until that many are dead and something was stored; end all, look at everything."""
        try:
            for slot in self._slots:
                self._start(slot)
            while self.tally.kills < kills or not self._logs.acknowledged():
                self._step()
                time.sleep(_POLL_S)
        finally:
            for slot in self._slots:
                slot.process.kill()
                slot.process.join()
        self._look_at_everything()
        remove_semaphores(self._directory)
        return self.tally

    def _start(self, slot: _Slot, name: str | None = None) -> None:
        """Start the next process of a slot, half of the time to die at a point: ``name``, or the
        one that was chosen least often.
        """
        failpoint = self._failpoint(slot, name) if self._dice.random() < 0.5 else None
        stream = next(self._streams)
        # Another cap than the one before, as if the setting had been changed.
        cap = self.mode.cap_bytes - stream % 2 * _CAP_STEP
        slot.job = replace(slot.job, stream=stream, cap_bytes=cap, failpoint=failpoint)
        slot.process = self._context.Process(target=slot.target, args=(slot.job,))
        slot.process.start()
        slot.started = time.time()
        slot.life = _FAILPOINT_LIFE_S if failpoint else self._dice.uniform(0, _LIFE_S)
        slot.doom = math.inf
        if not failpoint and self._dice.random() < _WHILE_OPENING:
            slot.doom = slot.started + self._dice.uniform(0, _OPENING_S)

    def _failpoint(self, slot: _Slot, name: str | None) -> Failpoint:
        names = [
            point
            for point in POINTS
            if (self.mode.kind == "full" or not point.startswith(_FULL_ONLY))
            and (slot.target is load.write or point.startswith(_READERS))
            and point != _ALONE
        ]
        self._dice.shuffle(names)
        name = name or min(names, key=self._armed.__getitem__)
        self._armed[name] += 1
        nth = 1 if name.startswith("open") else self._dice.choice(_NTH)
        return Failpoint(name, nth)

    def _step(self) -> None:
        now = time.time()
        for slot in self._slots:
            beat = self._logs.last_beat(slot.job.slot)
            if slot.doom == math.inf and beat >= slot.started:
                slot.doom = beat + slot.life
            if not slot.process.is_alive():
                self._bury(slot)
            elif now - max(slot.started, beat) > HUNG_S:
                self.tally.hung += 1
                self._kill(slot)
            elif now >= slot.doom:
                if self._dice.random() < _ALL_AT_ONCE:
                    self._kill(*self._slots, then=_ALONE)
                else:
                    self._kill(slot)
        self._measure()

    def _kill(self, *slots: _Slot, then: str | None = None) -> None:
        for slot in slots:
            slot.process.kill()
        for slot in slots:
            slot.process.join()
        self.tally.kills += len(slots)
        for slot in slots:
            self._start(slot, then)

    def _bury(self, slot: _Slot) -> None:
        """Start the next in place of one that has ended: at its failpoint, or of itself."""
        failpoint = slot.job.failpoint
        if slot.process.exitcode == -9 and failpoint:
            self.tally.kills += 1
            self.tally.at_failpoints[failpoint.name] += 1
        else:
            self.tally.died += 1
            self.tally.problems.append(f"exit code {slot.process.exitcode}: {slot.job}")
        self._start(slot)

    def _measure(self) -> None:
        data = self._directory / "data.mdb"
        if data.exists():
            size = data.stat().st_size / self.mode.cap_bytes
            self.tally.file_per_cap = max(self.tally.file_per_cap, size)

    def _look_at_everything(self) -> None:
        for report in self._logs.reports():
            self.tally.lost += report.startswith("lost")
            self.tally.wrong += report.startswith("wrong")
            self.tally.problems.append(report)
        verdict = self._verdict()
        if verdict is None:
            self.tally.hung += 1
            return
        self.tally.acknowledged += verdict.acknowledged
        self.tally.lost += verdict.lost
        self.tally.wrong += verdict.wrong
        self.tally.problems += verdict.problems
        self.tally.problems += map(str, self._directory.glob("quarantine-*"))

    def _verdict(self) -> Verdict | None:
        mine, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_send_verdict, args=(theirs, self._slots[0].job))
        process.start()
        theirs.close()
        try:
            return mine.recv() if mine.poll(_JUDGE_S) else None
        except EOFError:
            return Verdict(0, 0, 0, ("the last look died",))
        finally:
            process.kill()
            process.join()


def _send_verdict(pipe: Any, job: Job) -> None:
    pipe.send(load.judge(job))


def remove_semaphores(directory: Path) -> None:
    """Remove what killed processes left of LMDB's POSIX semaphores, if it was built with them."""
    lock = directory / "lock.mdb"
    for name in re.findall(rb"/MDB[rw][^\0]+", lock.read_bytes()[:512]) if lock.exists() else ():
        ctypes.CDLL(None).sem_unlink(name)


def rounds(kills: int) -> Iterator[tuple[Mode, int]]:
    """The rounds of a run: every mode, by its share."""
    for mode, share in zip(MODES, _SHARES, strict=True):
        left = max(1, kills * share // sum(_SHARES))
        while left:
            n = min(left, _ROUND_KILLS)
            yield mode, n
            left -= n


def run(kills: int, folder: Path, seed: int) -> Iterator[tuple[Mode, Tally]]:
    """Each round's mode and numbers, as they come. Empties ``folder`` behind each clean one."""
    dice = random.Random(seed)
    for i, (mode, n) in enumerate(rounds(kills)):
        place = folder / f"round-{i}"
        tally = Round(place, mode, dice).run(n)
        if tally.is_clean:
            shutil.rmtree(place)
        yield mode, tally


def main() -> int:
    """Run the kills and print what came of them; 1 if anything was lost, wrong, hung or broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--posix", action="store_true", help="with LMDB's locks as on macOS")
    arguments = parser.parse_args()
    if arguments.posix and not posix_lmdb.is_in_use():
        return posix_lmdb.run_again(f"{__package__}.kill", sys.argv[1:])
    total = Tally()
    folder = Path(tempfile.mkdtemp(prefix="tieredkv-kill-"))
    started = time.monotonic()
    for mode, tally in run(arguments.kills, folder, arguments.seed):
        print(f"{mode.name}: {tally.line()}", flush=True)
        for problem in tally.problems[:20]:
            print(f"  {problem}")
        total.add(tally)
    print(f"all in {time.monotonic() - started:.0f} s: {total.line()}")
    never = POINTS.keys() - total.at_failpoints.keys()
    if never:
        print(f"nobody was killed at: {', '.join(sorted(never))}")
    if not total.is_clean:
        print(f"what is left of it: {folder}")
        return 1
    os.rmdir(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
