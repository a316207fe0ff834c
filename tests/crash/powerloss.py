"""What is left of a store when the power fails: rebuilt from a log of all writes and flushes.

Whatever was written before the last flush of its file is there. Of what was written later any
part may be, in units of a sector or of a page.

Usage: ``python -m tests.crash.powerloss [--images N] [--seed N]``
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tieredkv.core import ColdTierUnavailable
from tieredkv.tiers import health
from tieredkv.tiers.gate import GATE_NAME

from . import ROOT, shim
from .damage import walk_in_fork
from .kill import processes
from .load import ColdParty, Prompt

ACKS = "acks"
_RECORD = struct.Struct("<BBQQ")
_DATA, _LOCK, _GATE, _ACKS = 1, 2, 3, 4
_JUDGE_S = 60.0
# Two stores: in one nothing is evicted, in the other pages are freed and used again all the time.
_CAPS = (256 << 20, 3 << 20)
_PROMPTS = (90, 260)


@dataclass(frozen=True, slots=True)
class Event:
    """One record of the log: W write, D durable write, T truncation or S flush, of a file."""

    kind: str
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class History:
    """All that happened to a store from its creation on, and where each prompt was committed."""

    events: tuple[Event, ...]
    acks: tuple[tuple[int, Prompt], ...]
    keeps: bool
    cap_bytes: int


def fill(directory: Path, acks: Path, cap_bytes: int, n: int) -> None:
    """Store prompts and note each that is committed. Runs on the disk that is logged."""
    party = ColdParty(directory, cap_bytes)
    with acks.open("ab", buffering=0) as file:
        for i in range(n):
            if party.store(Prompt(1, i).tokens()):
                file.write(b"%d\n" % i)
    party.close()


def history(folder: Path, cap_bytes: int, n: int, *, keeps: bool) -> History:
    """Fill a store in ``folder`` and return what happened."""
    log = folder / "log"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.crash.powerloss", "--fill", str(folder)]
    command += [str(cap_bytes), str(n)]
    subprocess.run(command, env=shim.environment(log=log), cwd=ROOT, check=True)
    events = tuple(_parse(log.read_bytes()))
    acks = tuple(
        (i, Prompt(1, int(event.data)))
        for i, event in enumerate(events)
        if event.file == _ACKS and event.kind == "W"
    )
    assert len(acks) > n // 2, "hardly anything was committed"
    return History(events, acks, keeps, cap_bytes)


def _parse(log: bytes) -> Iterator[Event]:
    at = 0
    while at < len(log):
        kind, file, offset, length = _RECORD.unpack_from(log, at)
        at += _RECORD.size
        stop = at + (length if chr(kind) in "WD" else 0)
        yield Event(chr(kind), file, offset, log[at:stop])
        at = stop


class Disk:
    """One file as the platters have it, and what is still on its way to them."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self._pending: list[Event] = []

    def take(self, event: Event) -> None:
        """The next thing that happened to the file."""
        if event.kind == "S":
            for waiting in self._pending:
                _apply(self.durable, waiting)
            self._pending.clear()
        elif event.kind == "D":
            _apply(self.durable, event)
        else:
            self._pending.append(event)

    def image(self, dice: random.Random) -> bytes:
        """The file after a power cut now."""
        data = bytearray(self.durable)
        share, unit = dice.choice((0.0, 0.2, 0.5, 0.9, 1.0)), dice.choice((0, 512, 4096))
        for event in self._pending:
            for part in _torn(event, unit):
                if dice.random() < share:
                    _apply(data, part)
        return bytes(data)


def _apply(data: bytearray, event: Event) -> None:
    if event.kind == "T":
        del data[event.offset :]
        data.extend(bytes(event.offset - len(data)))
        return
    if len(data) < event.offset:
        data.extend(bytes(event.offset - len(data)))
    data[event.offset : event.offset + len(event.data)] = event.data


def _torn(event: Event, unit: int) -> Iterator[Event]:
    """The parts of a write that arrive one without the other; 0 for a write that arrives whole."""
    if event.kind == "T" or not unit:
        yield event
        return
    start = 0
    while start < len(event.data):
        stop = min(len(event.data), start + unit - (event.offset + start) % unit)
        yield Event("W", event.file, event.offset + start, event.data[start:stop])
        start = stop


@dataclass(frozen=True, slots=True)
class Image:
    """What is left after a power cut: files, and the prompts that must be among it, or may."""

    data: bytes
    gate: bytes
    lock: bytes | None
    certain: tuple[Prompt, ...]
    doubtful: tuple[Prompt, ...]


def images(past: History, n: int, seed: int) -> Iterator[Image]:
    """Power cuts at ``n`` random instants of a history, in order of time."""
    dice = random.Random(seed)
    cuts = sorted(dice.sample(range(1, len(past.events)), n))
    disks = {_DATA: Disk(), _GATE: Disk()}
    ack_places = [i for i, _ in past.acks]
    flushed = at = 0
    for cut in cuts:
        for i in range(at, cut):
            event = past.events[i]
            if event.file in disks:
                disks[event.file].take(event)
            if (event.kind, event.file) == ("S", _DATA):
                flushed = i
        at = cut
        sure, known = (bisect_left(ack_places, i) for i in (flushed, cut))
        lock = dice.choice((None, bytes(8192), dice.randbytes(8192)))
        yield Image(
            disks[_DATA].image(dice),
            disks[_GATE].image(dice),
            lock,
            tuple(prompt for _, prompt in past.acks[:sure]),
            tuple(prompt for _, prompt in past.acks[sure:known]),
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """How one image fared: why it can't be opened, prompts lost, wrong ones, a recount."""

    unopenable: str = ""
    lost: int = 0
    lost_last: int = 0
    wrong: int = 0
    problems: tuple[str, ...] = ()


def look(folder: Path, image: Image, *, keeps: bool, cap_bytes: int) -> Finding:
    """Open an image as a server would after the reboot, and look up everything."""
    folder.mkdir()
    (folder / health.DATA_NAME).write_bytes(image.data)
    (folder / GATE_NAME).write_bytes(image.gate)
    if image.lock is not None:
        (folder / health.LOCK_NAME).write_bytes(image.lock)
    try:
        party = ColdParty(folder, cap_bytes)
    except ColdTierUnavailable as error:
        return Finding(str(error))
    # Where there is eviction, only what was stored last must still be there.
    certain = image.certain if keeps else image.certain[-2:]
    found = [party.find(prompt.tokens()) for prompt in image.certain]
    lost = [party.find(p.tokens()).n_tokens != len(p.tokens()) for p in certain]
    lost_last = [party.find(p.tokens()).n_tokens != len(p.tokens()) for p in image.doubtful]
    problems = party.problems()
    # It must go on as well.
    if not party.store(Prompt(2, 0).tokens()):
        problems.append("nothing can be stored")
    problems += [str(path) for path in folder.glob("quarantine-*") if image.certain]
    party.close()
    wrong = sum(not f.is_right for f in found)
    return Finding("", sum(lost), sum(lost_last), wrong, tuple(problems))


@dataclass(slots=True)
class Tally:
    """What the images of a run came to."""

    images: int = 0
    unopenable: int = 0
    died: int = 0
    lost: int = 0
    most_lost_last: int = 0
    wrong: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing happened that must not happen."""
        return not (self.unopenable or self.died or self.lost or self.wrong or self.problems)

    def add(self, finding: Finding | None) -> None:
        """Count one image; None if whoever opened it died of it."""
        self.images += 1
        if finding is None:
            self.died += 1
            return
        self.unopenable += bool(finding.unopenable)
        self.lost += finding.lost
        self.most_lost_last = max(self.most_lost_last, finding.lost_last)
        self.wrong += finding.wrong
        self.problems += [*finding.problems, *filter(None, [finding.unopenable])]

    def line(self) -> str:
        """The numbers in one line."""
        return (
            f"{self.images} images: {self.unopenable} unopenable, {self.died} died, "
            f"{self.wrong} wrong, {self.lost} lost that had been flushed, at most "
            f"{self.most_lost_last} lost that had not, {len(self.problems)} problems"
        )


def _look_at_all(pipe: Any, folder: Path, past: History, n: int, seed: int) -> None:
    logging.disable()
    health._walk_apart = walk_in_fork
    for i, image in enumerate(images(past, n, seed)):
        place = folder / f"image-{i}"
        pipe.send(look(place, image, keeps=past.keeps, cap_bytes=past.cap_bytes))
        shutil.rmtree(place)


def run(n: int, folder: Path, seed: int) -> Tally:
    """``n`` power cuts, half of them of each store."""
    tally = Tally()
    for i, (cap_bytes, prompts) in enumerate(zip(_CAPS, _PROMPTS, strict=True)):
        past = history(folder / f"store-{i}", cap_bytes, prompts, keeps=not i)
        mine, theirs = processes().Pipe(duplex=False)
        arguments = (theirs, folder / f"store-{i}", past, n // 2, seed)
        process = processes().Process(target=_look_at_all, args=arguments)
        process.start()
        theirs.close()
        for _ in range(n // 2):
            finding = _next(mine)
            tally.add(finding)
            if finding is None:
                break
        process.kill()
        process.join()
    return tally


def _next(pipe: Any) -> Finding | None:
    try:
        return pipe.recv() if pipe.poll(_JUDGE_S) else None
    except EOFError:
        return None


def main() -> int:
    """Cut the power and print what came of it; 1 if anything was lost, wrong or unopenable."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fill", nargs=3, metavar=("FOLDER", "CAP", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fill:
        folder, cap_bytes, n = arguments.fill
        fill(Path(folder) / "cold", Path(folder) / ACKS, int(cap_bytes), int(n))
        return 0
    reason = shim.why_not()
    if reason:
        print(f"power loss: not run, {reason}")
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tieredkv-power-") as folder:
        tally = run(arguments.images, Path(folder), arguments.seed)
    for problem in tally.problems[:20]:
        print(problem)
    print(f"{tally.line()}, in {time.monotonic() - started:.0f} s")
    return 0 if tally.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
