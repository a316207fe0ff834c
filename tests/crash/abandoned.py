"""LMDB's two locks left taken by a process that was killed: whether anybody else is held up.

Usage: ``python -m tests.crash.abandoned FOLDER``, with LMDB built by `posix_lmdb`.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from .kill import remove_semaphores
from .load import ColdParty, Prompt

CAP = 64 << 20
_FIRST, _NEXT, _LAST = (Prompt(1, i) for i in range(3))
_PATIENCE_S = 30.0


def _take_both_and_die(folder: Path) -> None:
    # Through a descriptor that stays open: closing one would drop LMDB's own locks on the file.
    header = os.pread(os.open(folder / "lock.mdb", os.O_RDONLY), 512, 0)
    lib = ctypes.CDLL(None)
    lib.sem_open.restype = ctypes.c_void_p
    names = re.findall(rb"/MDB[rw][^\0]+", header)
    assert len(names) == 2, "LMDB was not built with POSIX semaphores"
    for name in names:
        assert not lib.sem_trywait(ctypes.c_void_p(lib.sem_open(name, 0)))
    os.kill(os.getpid(), signal.SIGKILL)


def _use(party: ColdParty, prompt: Prompt) -> None:
    assert party.find(_FIRST.tokens()).n_tokens == len(_FIRST.tokens())
    assert party.store(prompt.tokens())
    assert party.faults() == {}


def _other(folder: Path, role: str) -> int:
    command = [sys.executable, "-m", "tests.crash.abandoned", str(folder), role]
    return subprocess.run(command, timeout=_PATIENCE_S, check=False).returncode


def main(arguments: list[str]) -> int:
    """Have others die and others go on; raises if anybody was held up."""
    folder = Path(arguments[0])
    party = ColdParty(folder, CAP)
    if arguments[1:] == ["die"]:
        _take_both_and_die(folder)
    if arguments[1:] == ["use"]:
        _use(party, _NEXT)
        return 0
    assert party.store(_FIRST.tokens())
    # Who opens the store next, and who has it open all the time.
    assert _other(folder, "die") == -signal.SIGKILL
    assert _other(folder, "use") == 0
    assert _other(folder, "die") == -signal.SIGKILL
    _use(party, _LAST)
    party.close()
    remove_semaphores(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
