"""Machines that serve one model, each with a cache of its own, and a tier that they share.

    python -m bench.fleet TRACE [--machines 1 2 8 32] [--network 110MB] [--json] ...

Replays a block trace (see `bench.sim`) over so many machines. A request goes to one of them, which
has some of its leading blocks on its own disk; of those after them some are in the shared tier.
It fetches these if that is faster than to compute them, waiting included, and computes the rest.
Then all blocks are on its disk, and in the shared tier as far as the upload policy lets them.

What is modelled: a machine reads its disk, fetches and computes one after the other, at the rates
given. The shared tier serves one fetch after another at its own rate, so that with many machines
requests wait for it. Uploads take what fetches leave; what would wait for over a minute is dropped.
What is not modelled: memory above the disk (its tokens count as the disk's), machines that are busy
(see ``load``), decoding, faults, and the time until an upload can be found.

Figures, for each number of machines:

    disk, shared, computed  tokens of prompts by where their state came from, as parts of all
    fetched_bytes           from the shared tier, in all
    uploaded_bytes          to it
    shared_bytes            in it at the end
    dropped_bytes           that were to be uploaded, but for which there was no time
    network_load            of the busiest minute: bytes fetched and uploaded over what the shared
                            tier could move
    skipped                 tokens that were in the shared tier, but faster computed, as part of all
    seconds                 from the arrival of a request until its prompt is there, mean
    seconds_alone           the same without the shared tier
    saved                   what the shared tier saves of them, as a part
    load                    busy seconds of a machine over the trace's length: over 1 is too few
    stops_paying            bytes a second of a machine's network below which ``saved`` is under 1%
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from bench.sim import LeafLru, Request, Trace, rows_of, trace_of_rows
from tieredkv.units import bytes_text, size

MACHINES = (1, 2, 8, 32)
ROUTES = ("random", "round", "prefix", "sticky")
UPLOADS = ("all", "reused")
# Halvings of the range in which the least network is searched: a millionth of the given one to it.
_SEARCH_STEPS = 12
_SEARCHED = 1e-6
_LEAST_SAVED = 0.01
# Seconds that an upload may wait.
_UPLOAD_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Timed:
    """A request and when it comes, in seconds."""

    at: float
    request: Request


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the machines are like. Rates are bytes or tokens a second, of one machine unless said
    otherwise; ``token_bytes`` are encoded. ``disk_bytes`` is a machine's cold tier, and
    ``shared_bytes`` the whole shared one: with none there is no shared tier.
    """

    n_machines: int
    token_bytes: float
    disk_bytes: float
    disk_rate: float
    network_rate: float
    latency: float
    prefill_rate: float
    shared_bytes: float
    server_rate: float
    route: str = "random"
    upload: str = "all"
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fleet made of a trace: see the module."""

    machines: int
    disk: float
    shared: float
    computed: float
    fetched_bytes: float
    uploaded_bytes: float
    dropped_bytes: float
    shared_bytes: float
    network_load: float
    skipped: float
    seconds: float
    seconds_alone: float
    saved: float
    load: float
    stops_paying: float | None


class _Shared:
    """The shared tier: blocks, and when its network is free again, for fetches and for uploads."""

    def __init__(self, room: int, rate: float) -> None:
        self.blocks = LeafLru(room)
        self.has_room = room > 0
        self._rate = rate
        self._free_at = 0.0
        self._idle_at = 0.0
        self.moved: Counter[int] = Counter()

    def wait(self, now: float) -> float:
        """Seconds until it turns to a fetch that comes now."""
        return max(0.0, self._free_at - now)

    def fetch(self, now: float, n_bytes: float) -> None:
        """Give so many bytes, behind all that were asked for before."""
        self._free_at = max(now, self._free_at) + n_bytes / self._rate
        self.moved[int(self._free_at // 60)] += int(n_bytes)

    def take(self, now: float, n_bytes: float) -> bool:
        """Take so many bytes, when nothing else is to be done; False if that is too late."""
        begin = max(now, self._free_at, self._idle_at)
        if begin - now > _UPLOAD_PATIENCE:
            return False
        self._idle_at = begin + n_bytes / self._rate
        self.moved[int(self._idle_at // 60)] += int(n_bytes)
        return True

    def busiest(self) -> float:
        """Bytes moved in the busiest minute over what could have been."""
        return max(self.moved.values(), default=0) / (60 * self._rate)


class _Run:
    """One fleet serving one trace."""

    def __init__(self, fleet: Fleet, trace: Trace) -> None:
        self._fleet = fleet
        self._block_tokens = trace.block_tokens
        block_bytes = trace.block_tokens * fleet.token_bytes
        self._disks = [
            LeafLru(int(fleet.disk_bytes // block_bytes)) for _ in range(fleet.n_machines)
        ]
        self.shared = _Shared(int(fleet.shared_bytes // block_bytes), fleet.server_rate)
        self._random = Random(fleet.seed)
        self._homes: dict[int, int] = {}
        self.tokens: Counter[str] = Counter()
        self.fetched = 0.0
        self.uploaded = 0.0
        self.seconds = 0.0
        self.dropped = 0.0
        routes = {
            "random": self._at_random,
            "round": self._in_turn,
            "prefix": self._by_prefix,
            "sticky": self._by_home,
        }
        self._choose = routes[fleet.route]
        self._turn = 0

    def serve(self, timed: Timed) -> None:
        """Have one of the machines answer a request."""
        fleet, request = self._fleet, timed.request
        disk = self._disks[self._choose(request)]
        n_disk = disk.match(request.path)
        n_shared = self.shared.blocks.match(request.path) if self.shared.has_room else 0
        on_disk = self._tokens(request, n_disk)
        beyond = max(0, self._tokens(request, n_shared) - on_disk)
        fetch = self._fetch_seconds(timed.at, beyond)
        is_worth = beyond > 0 and fetch < beyond / fleet.prefill_rate
        fetched = beyond if is_worth else 0
        self.tokens.update(
            disk=on_disk,
            shared=fetched,
            computed=request.n_tokens - on_disk - fetched,
            skipped=beyond - fetched,
        )
        self.seconds += on_disk * fleet.token_bytes / fleet.disk_rate
        self.seconds += fetch if is_worth else 0.0
        self.seconds += (request.n_tokens - on_disk - fetched) / fleet.prefill_rate
        if is_worth:
            self.fetched += fetched * fleet.token_bytes
            self.shared.fetch(timed.at, fetched * fleet.token_bytes)
        disk.serve(request)
        self._upload(timed, n_disk, n_shared)

    def _fetch_seconds(self, now: float, n_tokens: int) -> float:
        n_bytes = n_tokens * self._fleet.token_bytes
        rate = min(self._fleet.network_rate, self._fleet.server_rate)
        return self._fleet.latency + self.shared.wait(now) + n_bytes / rate

    def _upload(self, timed: Timed, n_disk: int, n_shared: int) -> None:
        request = timed.request
        if not self.shared.has_room:
            return
        n = len(request.path) if self._fleet.upload == "all" else max(n_disk, n_shared)
        if not n:
            return
        kept = Request(self._tokens(request, n), request.path[:n], min(n, request.n_whole))
        new = max(0, kept.n_tokens - self._tokens(request, n_shared)) * self._fleet.token_bytes
        if new and not self.shared.take(timed.at, new):
            self.dropped += new
            return
        self.shared.blocks.serve(kept)
        self.uploaded += new

    def _tokens(self, request: Request, n_blocks: int) -> int:
        return min(request.n_tokens, n_blocks * self._block_tokens)

    def _at_random(self, _: Request) -> int:
        return self._random.randrange(len(self._disks))

    def _in_turn(self, _: Request) -> int:
        self._turn += 1
        return (self._turn - 1) % len(self._disks)

    def _by_prefix(self, request: Request) -> int:
        """Where most of it is; by chance where that is nothing, or as much."""
        found = [disk.match(request.path) for disk in self._disks]
        best = max(found)
        return self._random.choice([i for i, n in enumerate(found) if n == best])

    def _by_home(self, request: Request) -> int:
        """A conversation stays where it began: requests that go on from a block go where it is."""
        known = next((self._homes[b] for b in reversed(request.path) if b in self._homes), None)
        home = self._at_random(request) if known is None or self._is_common(request) else known
        self._homes.update((block, home) for block in request.path if block not in self._homes)
        return home

    def _is_common(self, request: Request) -> bool:
        """Whether it only shares what many begin with: its second block is new."""
        return len(request.path) > 1 and request.path[1] not in self._homes


def parse(lines: Iterable[str]) -> tuple[list[Timed], Trace]:
    """Requests with their times, and as a trace, from JSON lines."""
    rows = rows_of(lines)
    trace = trace_of_rows(rows)
    times = [row["timestamp"] / 1000 for row in rows]
    return [Timed(t, r) for t, r in zip(times, trace.requests, strict=True)], trace


def serve(fleet: Fleet, requests: Sequence[Timed], trace: Trace) -> _Run:
    """A fleet that has served all requests."""
    run = _Run(fleet, trace)
    for timed in requests:
        run.serve(timed)
    return run


def outcome(
    fleet: Fleet,
    requests: Sequence[Timed],
    trace: Trace,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """What a fleet makes of a trace, and the least network with which the shared tier pays."""
    say(f"{fleet.n_machines} machines")
    alone = serve(replace(fleet, shared_bytes=0), requests, trace).seconds
    run = serve(fleet, requests, trace)
    total = max(1, sum(r.n_tokens for r in trace.requests))
    length = max(1.0, requests[-1].at - requests[0].at) if requests else 1.0
    n = max(1, len(requests))
    return Outcome(
        machines=fleet.n_machines,
        disk=run.tokens["disk"] / total,
        shared=run.tokens["shared"] / total,
        computed=run.tokens["computed"] / total,
        fetched_bytes=run.fetched,
        uploaded_bytes=run.uploaded,
        dropped_bytes=run.dropped,
        shared_bytes=len(run.shared.blocks.parents) * trace.block_tokens * fleet.token_bytes,
        network_load=run.shared.busiest(),
        skipped=run.tokens["skipped"] / total,
        seconds=run.seconds / n,
        seconds_alone=alone / n,
        saved=_saved(run.seconds, alone),
        load=run.seconds / fleet.n_machines / length,
        stops_paying=_stops_paying(fleet, requests, trace, alone),
    )


def _saved(seconds: float, alone: float) -> float:
    return 1 - seconds / alone if alone else 0.0


def _stops_paying(
    fleet: Fleet, requests: Sequence[Timed], trace: Trace, alone: float
) -> float | None:
    """The least network rate with which at least 1% is saved; None if none up to the given one."""

    def pays(rate: float) -> bool:
        run = serve(replace(fleet, network_rate=rate), requests, trace)
        return _saved(run.seconds, alone) >= _LEAST_SAVED

    if fleet.n_machines < 2 or not pays(fleet.network_rate):
        return None
    low, high = fleet.network_rate * _SEARCHED, fleet.network_rate
    for _ in range(_SEARCH_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes for people."""
    heads = (
        *("machines", "disk", "shared", "computed", "skipped", "fetched", "uploaded"),
        *("dropped", "busiest", "seconds", "alone", "saved", "load", "stops paying below"),
    )
    rows = [
        (
            str(o.machines),
            *(f"{part:.1%}" for part in (o.disk, o.shared, o.computed, o.skipped)),
            *(bytes_text(int(n)) for n in (o.fetched_bytes, o.uploaded_bytes, o.dropped_bytes)),
            f"{o.network_load:.1%}",
            *(f"{s:.2f}" for s in (o.seconds, o.seconds_alone)),
            f"{o.saved:.1%}",
            f"{o.load:.2f}",
            f"{bytes_text(int(o.stops_paying))}/s" if o.stops_paying else "-",
        )
        for o in outcomes
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (heads, *rows)
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("trace", type=Path)
    p.add_argument("--machines", type=int, nargs="+", default=MACHINES, metavar="N")
    p.add_argument(
        "--token-bytes",
        type=size,
        default=87_000,
        metavar="SIZE",
        help="encoded bytes of a token's state (default: %(default)s, an 8B model's)",
    )
    p.add_argument("--disk", type=size, default=size("100GB"), help="a machine's cold tier")
    p.add_argument("--disk-rate", type=size, default=size("1.5GB"), help="bytes/s of a promote")
    p.add_argument("--network", type=size, default=size("110MB"), help="bytes/s of a machine")
    p.add_argument(
        "--latency", type=float, default=0.005, help="seconds of a fetch (default: .005)"
    )
    p.add_argument(
        "--prefill", type=float, default=400.0, help="tokens/s of a prefill (default: 400)"
    )
    p.add_argument("--shared", type=size, default=size("10TB"), help="the shared tier")
    p.add_argument("--server-rate", type=size, default=size("1.1GB"), help="bytes/s of the same")
    p.add_argument(
        "--route",
        choices=ROUTES,
        default="random",
        help="who gets a request: any, the next, who has most of it, who has its conversation",
    )
    p.add_argument("--upload", choices=UPLOADS, default="all", help="what goes to the shared tier")
    p.add_argument("--speedup", type=float, default=1.0, help="the trace's times divided by this")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--json", action="store_true", help="print JSON: {machines: figures}")
    return p


def _fleet(args: argparse.Namespace, n_machines: int) -> Fleet:
    return Fleet(
        n_machines,
        float(args.token_bytes),
        float(args.disk),
        float(args.disk_rate),
        float(args.network),
        args.latency,
        args.prefill,
        float(args.shared),
        float(args.server_rate),
        args.route,
        args.upload,
        args.seed,
    )


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    rates = (args.disk_rate, args.network, args.prefill, args.server_rate, args.speedup)
    if min(*rates, args.token_bytes, *args.machines) <= 0:
        parser.error("rates, sizes of a token, speedup and numbers of machines must be above 0")
    if args.latency < 0:
        parser.error("--latency must be 0 or more")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what fleets make of a trace; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    try:
        with args.trace.open(encoding="utf-8") as file:
            requests, trace = parse(file)
    except (OSError, ValueError, KeyError, TypeError) as e:
        parser.error(f"{args.trace} is no trace that can be read: {e!r}")
    faster = [Timed(t.at / args.speedup, t.request) for t in requests]

    def say(what: str) -> None:
        print(f"fleet: {what} ...", file=sys.stderr, flush=True)

    outcomes = [outcome(_fleet(args, n), faster, trace, say) for n in args.machines]
    if args.json:
        print(json.dumps({o.machines: asdict(o) for o in outcomes}, indent=2))
    else:
        print(table(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
