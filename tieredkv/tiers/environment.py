"""One LMDB environment for all tiers and threads of a process: opened, locked, resized, closed.

The only module besides ``health`` that knows LMDB's calls and errors; what goes in and out of
its transactions is ``ledger``'s. Local disks only: locks and the shared map need one kernel.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import lmdb
from lmdb.verify import VerifyError, verify

from tieredkv.core import FORMAT_VERSION, ColdTierUnavailable, CorruptBlob
from tieredkv.tiers import health, swap
from tieredkv.tiers.gate import GATE_NAME, Gate, GateTimeout, is_marked
from tieredkv.tiers.ledger import CAP, DATABASES, FORMAT, PIECE, Databases, Ledger, Rows
from tieredkv.tiers.records import PIECE_BYTES, unpack_number
from tieredkv.tiers.stamp import Stamp, is_intact

logger = logging.getLogger("tieredkv")

GATE_TIMEOUT_S = 10.0
_ENGINE = (0, 9)
_MAX_READERS = 1024
_COMMITS_PER_READER_CHECK = 20
# What an empty store and a transaction that changes it take.
_LEAST_MAP_BYTES = 1 << 20
# More than this no process can map: a cap beyond it is a damaged one.
_MOST_MAP_BYTES = 1 << 47
# How long a change of the map's size waits for the transactions of this process.
_IDLE_TIMEOUT_S = 10.0

_DAMAGED = "{} is damaged ({}); {}"
_MEND = "tieredkv verify says whether it can be mended"
_BEYOND = "it can't be mended, and a server that starts on it begins anew"
_BUSY = (
    f"{{}}: another process has been writing for {GATE_TIMEOUT_S:.0f} s; "
    "stop it or choose another directory"
)

_T = TypeVar("_T")
_FileId = tuple[int, int]
# The last two: a number in a row was so large that the next one has no room, and nobody counts
# that far.
_DAMAGE = (
    CorruptBlob,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    struct.error,
    OverflowError,
)


class Fault(Exception):
    """The store failed and nothing was changed. ``kind`` is the label to count it under."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Lost(Fault):
    """The files are no longer those in the directory, or LMDB gave them up: open anew."""

    def __init__(self, detail: str) -> None:
        super().__init__("lost", detail)


class Damaged(Fault):
    """A row or a page is not what it must be. Rows can't be mended one by one: start over."""

    def __init__(self, detail: str) -> None:
        super().__init__("damaged", detail)


class _SmallMap(Exception):
    """The store's cap needs a larger map than this process has."""

    def __init__(self, map_bytes: int) -> None:
        super().__init__("the cap was raised by another process")
        self.map_bytes = map_bytes


_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (GateTimeout, "gate"),
    (lmdb.MapFullError, "map_full"),
    (lmdb.MapResizedError, "map_resized"),
    (_SmallMap, "map_resized"),
    (lmdb.ReadersFullError, "readers_full"),
    (lmdb.DiskError, "disk"),
    (OSError, "disk"),
)
# A full disk can show as either: LMDB calls a write that stopped half-way EIO.
_NUMBERS = ((errno.ENOSPC, "disk_full"), (errno.EIO, "disk"))


def map_bytes(cap_bytes: int) -> int:
    """Size of the map for a cap, and so what the file can't outgrow, whatever is pinned or
    scattered. Deletes need free pages too: ``cold`` keeps a tenth of the cap and more free.
    """
    return max(cap_bytes & ~0xFFFF, _LEAST_MAP_BYTES)


def _fault(error: BaseException) -> Fault:
    """An error as the tier is to see it."""
    detail = str(error) or type(error).__name__
    if isinstance(error, Fault):
        return error
    if isinstance(error, _DAMAGE):
        return Damaged(detail)
    if isinstance(error, lmdb.PanicError):
        return Lost(detail)
    # LMDB hands on an error number of the system as text.
    for number, kind in _NUMBERS:
        if os.strerror(number) in detail:
            return Fault(kind, detail)
    kind = next((kind for types, kind in _KINDS if isinstance(error, types)), "lmdb")
    return Fault(kind, detail)


class Environment:
    """One open environment, counted: each tier and each operation under way holds it.

    The last to let go closes it, so that none is ever closed under a thread that is inside a
    transaction. Any thread may call.
    """

    def __init__(
        self,
        directory: Path,
        env: lmdb.Environment,
        dbs: Databases,
        gate: Gate | None = None,
        stamp: Stamp | None = None,
    ) -> None:
        """Take over an open environment with its gate and stamp, which it has if it is open for
        writing.
        """
        self.directory = directory
        self.pid = os.getpid()
        self._env = env
        self._dbs = dbs
        self._gate = gate
        self._stamp = stamp
        self._files = _files(directory)
        self._turn = threading.Condition()
        self._users = 1
        self._txns = 0
        self._commits = 0
        self._closed = False
        self._panicked = False
        self._damage: Damaged | None = None

    @property
    def is_writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._gate is not None

    @property
    def is_current(self) -> bool:
        """Whether the files that are open are those that others would open now.

        The lock file too: with another one each side would use pages again that the other reads.
        """
        return not self._panicked and self._files == _files(self.directory)

    @property
    def is_replaced(self) -> bool:
        """Whether other files are in place of those that are open: made anew, say. Not if they are
        gone.
        """
        found = _files(self.directory)
        return None not in found and found != self._files

    def hold(self) -> bool:
        """Keep it open until ``release``; False if it is closed, or the parent process's."""
        with self._turn:
            if not self._users or self.pid != os.getpid():
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """Undo one ``hold``, or the one of the opening."""
        with self._turn:
            self._users -= 1
            last = not self._users
        if last:
            with _REGISTRY_LOCK:
                self.close_unused()

    def close_unused(self) -> None:
        """Close it unless somebody holds it. The caller holds the registry's lock."""
        with self._turn:
            if self._closed or self._users:
                return
            self._closed = True
        self._env.close()
        if self._gate:
            self._gate.close()
        if self._stamp:
            self._stamp.close()
        for key in [key for key, value in _OPEN.items() if value is self]:
            del _OPEN[key]

    def disown(self) -> None:
        """In a child process: let go of the gate, which the child would keep from being free."""
        if self._gate:
            self._gate.close()

    def read(self, work: Callable[[Rows], _T]) -> _T:
        """Run ``work`` in one short read transaction. What is to outlive it must be copied.

        Raises:
            Fault: it couldn't be read.
        """
        return self._persist(lambda: self._read_once(work))

    def write(self, work: Callable[[Ledger], _T]) -> _T:
        """Run ``work`` in one transaction and commit it, while all other writers wait.

        ``work`` may run more than once; what an earlier run changed was undone.

        Raises:
            Fault: nothing was changed.
        """
        if self._damage:
            raise self._damage
        return self._persist(lambda: self._write_once(work))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep all writers out for the length of a ``with`` block; not for `write` inside it.

        Raises:
            Fault: they couldn't be kept out, or the files are no longer those in the directory.
        """
        try:
            with self._writers_out():
                if not self.is_current:
                    raise Lost("its directory or a file in it was deleted or replaced")
                yield
        except (GateTimeout, OSError) as error:
            raise _fault(error) from error

    def set_aside(self) -> Path | None:
        """Quarantine the files, unless somebody did already; where they are now.

        Raises:
            Fault: it couldn't be done.
        """
        try:
            with self._writers_out():
                return health.quarantine(self.directory) if self.is_current else None
        except (GateTimeout, OSError) as error:
            raise _fault(error) from error

    def file_bytes(self) -> int:
        """Size of the data file, 0 if it is gone."""
        try:
            return (self.directory / health.DATA_NAME).stat().st_size
        except OSError:
            return 0

    def _file_bytes(self) -> int:
        # What LMDB has allocated as of the last commit; the file is no longer than that.
        return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def _persist(self, attempt: Callable[[], _T]) -> _T:
        """Result of ``attempt``, made again once for each kind of error that can be cured."""
        cured: set[type[BaseException]] = set()
        while True:
            try:
                return attempt()
            except (lmdb.Error, _SmallMap, GateTimeout, OSError, *_DAMAGE) as error:
                if type(error) in cured or not self._cure(error):
                    fault = _fault(error)
                    self._remember(error, fault)
                    raise fault from error
                cured.add(type(error))

    def _cure(self, error: BaseException) -> bool:
        """Remove the cause of an error; whether another attempt makes sense."""
        if isinstance(error, _SmallMap):
            return self._resize(error.map_bytes)
        if isinstance(error, lmdb.MapResizedError):
            # 0: take over the size that is in the file.
            return self._resize(0)
        if isinstance(error, lmdb.MapFullError | lmdb.ReadersFullError):
            # A reader that died keeps its slot, and all pages freed since it began.
            with self._reading():
                self._env.reader_check()
            return True
        return False

    def _remember(self, error: BaseException, fault: Fault) -> None:
        if isinstance(error, lmdb.PanicError):
            self._panicked = True
        if isinstance(fault, Damaged):
            self._damage = fault

    def _resize(self, size: int) -> bool:
        """Change the map, as LMDB allows while this process has no transaction under way."""
        with self._turn:
            if not self._turn.wait_for(lambda: not self._txns, timeout=_IDLE_TIMEOUT_S):
                return False
            try:
                self._env.set_mapsize(size)
            except lmdb.MemoryError as error:
                # LMDB has closed it.
                self._panicked = True
                raise Lost(str(error)) from error
            return True

    def _read_once(self, work: Callable[[Rows], _T]) -> _T:
        with self._counted():
            with self._reading():
                begun = self._env.begin(buffers=True)
            with begun as txn:
                return work(Rows(txn, self._dbs))

    def _write_once(self, work: Callable[[Ledger], _T]) -> _T:
        with self._writers_out():
            if not self.is_current:
                raise Lost("its directory or a file in it was deleted or replaced")
            with self._counted(), self._env.begin(write=True) as txn:
                ledger = Ledger(txn, self._dbs, self._file_bytes())
                wanted = map_bytes(ledger.number(CAP) or 0)
                if wanted > _MOST_MAP_BYTES:
                    raise CorruptBlob(f"its cap is {wanted} bytes")
                if wanted > self._env.info()["map_size"]:
                    raise _SmallMap(wanted)
                result = work(ledger)
                ledger.finish()
            if self._stamp:
                self._stamp.write()
            self._commits += 1
            if not self._commits % _COMMITS_PER_READER_CHECK:
                with self._reading():
                    self._env.reader_check()
            return result

    def _reading(self) -> AbstractContextManager[None]:
        return self._gate.reading() if self._gate else nullcontext()

    @contextmanager
    def _writers_out(self) -> Iterator[None]:
        if self._gate is None:
            raise Fault("read_only", "the store is open for reading only")
        with self._gate.hold(GATE_TIMEOUT_S):
            yield

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Around a transaction: while there is one the map must stay as it is."""
        with self._turn:
            self._txns += 1
        try:
            yield
        finally:
            with self._turn:
                self._txns -= 1
                self._turn.notify_all()


# LMDB's locks belong to a process and a file, so an environment opened twice in one process
# loses them at the first close. Two tiers on one directory must therefore share one, and only
# something global to the process can see to it. Keyed by the directory's device and inode.
_OPEN: dict[_FileId, Environment] = {}
_REGISTRY_LOCK = threading.Lock()
# Environments of the parent process, after a fork: kept, for closing them in the child would
# touch locks and maps that the parent goes on using.
_INHERITED: list[Environment] = []


def _forget_after_fork() -> None:
    # A thread that does not exist in the child may have held the lock.
    global _REGISTRY_LOCK
    _REGISTRY_LOCK = threading.Lock()
    for environment in _OPEN.values():
        environment.disown()
    _INHERITED.extend(_OPEN.values())
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def _file_id(path: Path) -> _FileId | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _files(directory: Path) -> tuple[_FileId | None, _FileId | None]:
    return _file_id(directory / health.DATA_NAME), _file_id(directory / health.LOCK_NAME)


def open_for_writing(directory: Path, cap_bytes: int) -> Environment:
    """The environment of ``directory``, created if need be, moved aside first if damaged. Held.

    Raises:
        ColdTierUnavailable: it can't be used; the message says why and what to do.
    """
    _require_engine()
    _prepare(directory)
    return _writable(directory, lambda: _open_checked(directory, cap_bytes, _move_damaged))


def open_to_mend(directory: Path) -> Environment:
    """The environment of ``directory`` for writing, held. Not created, and not moved aside.

    Single rows may be damaged; if the file itself is, it is refused.

    Raises:
        ColdTierUnavailable: there is none, or it can't be used; the message says why.
    """
    _require_engine()
    header = _require_store(directory)
    return _writable(directory, lambda: _open_checked(directory, header.map_bytes, _refuse_broken))


def open_for_reading(
    directory: Path, look: Callable[[Path], str | None] = health.finding
) -> Environment:
    """The environment of ``directory`` as it is, held. Creates and changes nothing.

    ``look`` says what is wrong with it, and None if nothing: also `broken` can be asked.

    Raises:
        ColdTierUnavailable: there is none, or it is damaged or of another format.
    """
    _require_engine()
    _require_store(directory)
    try:
        return _shared(directory, lambda: _open_read_only(directory, look))
    except GateTimeout:
        raise ColdTierUnavailable(_BUSY.format(directory)) from None
    except (OSError, lmdb.Error, CorruptBlob) as error:
        raise ColdTierUnavailable(f"{directory} can't be opened ({error})") from error


def broken(directory: Path) -> str | None:
    """As `health.finding`, but without damage that is in single rows only."""
    found = health.finding(directory)
    data = directory / health.DATA_NAME
    header = health.read_header(data) if found else None
    if header is None or data.stat().st_size < header.n_bytes:
        return found
    try:
        return found if verify(str(directory)) else None  # type: ignore[no-untyped-call] # py-lmdb doesn't annotate it
    except VerifyError as error:
        return str(error)


def _writable(directory: Path, open_new: Callable[[], Environment]) -> Environment:
    try:
        environment = _shared(directory, open_new)
    except GateTimeout:
        raise ColdTierUnavailable(_BUSY.format(directory)) from None
    except (OSError, lmdb.Error, CorruptBlob) as error:
        raise ColdTierUnavailable(
            f"{directory} can't be opened ({error}); mend it or choose another directory"
        ) from error
    if not environment.is_writable:
        environment.release()
        raise ColdTierUnavailable(
            f"{directory}: this process has it open for reading only; close that first"
        )
    return environment


def _require_store(directory: Path) -> health.Header:
    data = directory / health.DATA_NAME
    if not data.exists() or not is_marked(directory):
        raise ColdTierUnavailable(f"{directory}: there is no cold tier here")
    header = health.read_header(data)
    if header is None:
        raise ColdTierUnavailable(f"{directory} is damaged (it has no LMDB header)")
    return header


def _shared(directory: Path, open_new: Callable[[], Environment]) -> Environment:
    """The environment that this process has open for ``directory``, or a new one; held."""
    with _REGISTRY_LOCK:
        at = _file_id(directory)
        known = _OPEN.get(at) if at else None
        if known and known.is_current and known.hold():
            return known
        if known:
            known.close_unused()
        new = open_new()
        if at:
            _OPEN[at] = new
        return new


def _require_engine() -> None:
    if lmdb.version()[:2] != _ENGINE:
        found = ".".join(map(str, lmdb.version()))
        raise ColdTierUnavailable(
            f"LMDB {found} is not 0.9, whose file format and crash behaviour this tier relies on; "
            "install an lmdb package that is built with its own LMDB 0.9"
        )


def _prepare(directory: Path) -> None:
    """Create the directory if need be, and refuse one that can't be used or isn't ours."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ColdTierUnavailable(
            f"{directory} is no directory; move that file away or choose another directory"
        ) from None
    except OSError as error:
        raise ColdTierUnavailable(
            f"{directory} can't be created ({error.strerror}); choose a writable directory"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ColdTierUnavailable(
            f"{directory} is not writable; change its mode or choose another directory"
        )
    data = directory / health.DATA_NAME
    if data.exists() and not is_marked(directory):
        raise ColdTierUnavailable(
            f"{data} was not made by tieredkv ({GATE_NAME} is not beside it); "
            "choose another directory"
        )


def _open_checked(directory: Path, cap_bytes: int, settle: Callable[[Path], bool]) -> Environment:
    """A new environment, after ``settle`` looked at one that nobody uses and said whether it is
    sound in all its parts. Other openers wait.
    """
    gate = Gate(directory)
    try:
        with gate.hold(GATE_TIMEOUT_S):
            swap.finish(directory)
            is_sound = (
                is_intact(directory, health.DATA_NAME)
                if health.in_use(directory)
                else settle(directory)
            )
            gate.mend()
            env = lmdb.open(
                str(directory),
                map_size=map_bytes(cap_bytes),
                # What survives a power cut: without sync nothing may, and without metasync only
                # the last commit may be lost. writemap turns a full disk into SIGBUS.
                sync=True,
                metasync=False,
                writemap=False,
                readahead=True,
                mode=0o600,
                max_dbs=len(DATABASES) + 1,
                max_readers=_MAX_READERS,
                # An idle transaction kept for reuse would be ended, and its slot in the shared
                # table freed, by the exit of a forked child.
                max_spare_txns=0,
            )
            try:
                gate.watch()
                dbs = _databases(env, directory, cap_bytes)
                with gate.reading():
                    env.reader_check()
                _sync_directory(directory)
                stamp = Stamp(directory, health.DATA_NAME) if is_sound else None
                if stamp:
                    stamp.write()
                return Environment(directory, env, dbs, gate, stamp)
            except BaseException:
                env.close()
                raise
    except BaseException:
        gate.close()
        raise


def _move_damaged(directory: Path) -> bool:
    intact = is_intact(directory, health.DATA_NAME)
    found = None if intact else health.finding(directory)
    if found is None:
        health.fill_up(directory)
        return True
    aside = health.quarantine(directory)
    log_quarantine(directory, found, aside)
    return True


def _refuse_broken(directory: Path) -> bool:
    found = broken(directory)
    if found is not None:
        raise ColdTierUnavailable(_DAMAGED.format(directory, found, _BEYOND))
    health.fill_up(directory)
    # Rows may be.
    return False


def log_quarantine(directory: Path, why: str, aside: Path) -> None:
    """The one line that says that a store was given up."""
    logger.error("cold tier in %s is damaged (%s): moved to %s, empty now", directory, why, aside)


def _open_read_only(directory: Path, look: Callable[[Path], str | None]) -> Environment:
    gate = Gate(directory)
    try:
        # The two files must be of one store.
        with gate.hold(GATE_TIMEOUT_S):
            swap.finish(directory)
            found = None if health.in_use(directory) else look(directory)
            if found is not None:
                hint = _BEYOND if look is broken else _MEND
                raise ColdTierUnavailable(_DAMAGED.format(directory, found, hint))
            gate.mend()
            with gate.reading():
                return _open_as_it_is(directory)
    finally:
        gate.close()


def _open_as_it_is(directory: Path) -> Environment:
    header = health.read_header(directory / health.DATA_NAME)
    env = lmdb.open(
        str(directory),
        map_size=header.map_bytes if header else 0,
        readonly=True,
        create=False,
        max_dbs=len(DATABASES) + 1,
    )
    try:
        with env.begin() as txn:
            names = {bytes(name) for name, _ in txn.cursor()}
        _require_ours(names, directory)
        meta = env.open_db(b"meta", create=False)
        with env.begin() as txn:
            _require_format(txn, meta, names, directory)
        dbs = Databases(**{name: env.open_db(name.encode(), create=False) for name in DATABASES})
        return Environment(directory, env, dbs)
    except BaseException:
        env.close()
        raise


def _databases(env: lmdb.Environment, directory: Path, cap_bytes: int) -> Databases:
    """The named databases, created in a new environment, refused in one of another format."""
    with env.begin(write=True) as txn:
        names = {bytes(name) for name, _ in txn.cursor()}
        if names:
            _require_ours(names, directory)
        dbs = Databases(**{name: env.open_db(name.encode(), txn=txn) for name in DATABASES})
        if names:
            _require_format(txn, dbs.meta, names, directory)
            return dbs
        ledger = Ledger(txn, dbs, 0)
        ledger.set_number(FORMAT, FORMAT_VERSION)
        ledger.set_number(PIECE, PIECE_BYTES)
        ledger.set_number(CAP, cap_bytes)
    return dbs


def _require_ours(names: set[bytes], directory: Path) -> None:
    # Those that an earlier format lacks are missed once the format is known.
    if not names >= health.OURS - health.NEW:
        raise ColdTierUnavailable(
            f"{directory} holds another program's LMDB environment; choose another directory"
        )


def _require_format(
    txn: lmdb.Transaction, meta: lmdb._Database, names: set[bytes], directory: Path
) -> None:
    values = [txn.get(name, db=meta) for name in (FORMAT, PIECE)]
    found = [None if value is None else unpack_number(bytes(value)) for value in values]
    if found != [FORMAT_VERSION, PIECE_BYTES]:
        raise ColdTierUnavailable(
            f"{directory} is of format {found[0]}, this version reads {FORMAT_VERSION}; "
            "choose another directory or delete this one"
        )
    if not names >= health.OURS:
        raise ColdTierUnavailable(
            f"{directory} was made by a version of tieredkv that was never released; "
            "choose another directory or delete this one"
        )


def _sync_directory(directory: Path) -> None:
    """Make the names of new files survive a power cut too."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
