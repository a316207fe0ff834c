"""The write gate: one writer at a time, and the repair of what a dead one leaves on macOS."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from tieredkv.tiers.gate import GATE_NAME, LOCK_NAME, Gate, GateTimeout, is_marked

HOLD_FOR_EVER = """
import sys, time
from pathlib import Path
from tieredkv.tiers.gate import Gate
with Gate(Path(sys.argv[1])).hold(5):
    print("in", flush=True)
    time.sleep(60)
"""


def holder(directory):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_FOR_EVER, str(directory)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"in\n"
    return process


def test_threads_take_turns(tmp_path):
    """If this failed, two threads of one process would write at once."""
    gate = Gate(tmp_path)
    inside, most = [], []

    def enter():
        with gate.hold(10):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.002)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 10


def test_two_gates_of_one_directory_exclude_each_other(tmp_path):
    """If this failed, two environments of one process would write at once."""
    with Gate(tmp_path).hold(1), pytest.raises(GateTimeout), Gate(tmp_path).hold(0.05):
        pass


def test_a_waiting_thread_gives_up(tmp_path):
    """If this failed, a writer stuck in a slow disk would block all other threads for ever."""
    gate = Gate(tmp_path)
    with gate.hold(1), pytest.raises(GateTimeout), gate.hold(0.05):
        pass


def test_another_process_keeps_writers_out(tmp_path):
    """If this failed, the gate would not hold across processes."""
    process = holder(tmp_path)
    try:
        with pytest.raises(GateTimeout), Gate(tmp_path).hold(0.05):
            pass
    finally:
        process.kill()
        process.communicate()


def test_the_gate_opens_when_its_owner_is_killed(tmp_path):
    """If this failed, a killed writer would hang every other one for good."""
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    with Gate(tmp_path).hold(2):
        pass


def test_an_exception_inside_opens_the_gate(tmp_path):
    """If this failed, one failed write would be the last one."""
    gate = Gate(tmp_path)
    with pytest.raises(KeyError), gate.hold(1):
        raise KeyError
    with gate.hold(0.05):
        pass


def test_the_gate_file_is_private_and_marks_the_directory(tmp_path):
    """If this failed, other users could block writers, or a foreign directory pass for ours."""
    assert not is_marked(tmp_path)
    Gate(tmp_path).close()
    assert (tmp_path / GATE_NAME).stat().st_mode & 0o777 == 0o600
    assert is_marked(tmp_path)


def test_closing_twice_closes_no_stranger(tmp_path):
    """If this failed, a second close would close a descriptor that is somebody else's by now."""
    gate = Gate(tmp_path)
    gate.close()
    other = os.open(tmp_path, os.O_RDONLY)
    gate.close()
    os.fstat(other)
    os.close(other)


class Semaphore:
    """A POSIX semaphore as LMDB makes one for its writer lock on macOS."""

    def __init__(self, name: bytes, value: int) -> None:
        self.lib = ctypes.CDLL(None, use_errno=True)
        self.lib.sem_open.restype = ctypes.c_void_p
        self.lib.sem_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint]
        for function in (self.lib.sem_trywait, self.lib.sem_post, self.lib.sem_close):
            function.argtypes = [ctypes.c_void_p]
        self.name = name
        self.handle = self.lib.sem_open(name, os.O_CREAT | os.O_EXCL, 0o600, value)
        assert self.handle

    def take(self) -> bool:
        return self.lib.sem_trywait(self.handle) == 0

    def remove(self) -> None:
        self.lib.sem_close(self.handle)
        self.lib.sem_unlink(self.name)


@pytest.fixture
def semaphore(tmp_path):
    """A free writer semaphore, and a lock.mdb that names it."""
    made = Semaphore(b"/MDBwtest%d" % os.getpid(), 1)
    (tmp_path / LOCK_NAME).write_bytes(b"\xde\xc0\xef\xbe" + bytes(60) + made.name + bytes(400))
    yield made
    made.remove()


def test_a_semaphore_left_by_a_dead_writer_is_given_back(tmp_path, semaphore):
    """If this failed, a writer killed in a transaction would hang all others on macOS."""
    assert semaphore.take()
    gate = Gate(tmp_path)
    gate.watch()
    with gate.hold(1):
        assert semaphore.take()
    assert gate.repairs == 1


def test_a_free_semaphore_is_left_as_it_is(tmp_path, semaphore):
    """If this failed, each turn would let one more writer into LMDB at a time."""
    gate = Gate(tmp_path)
    gate.watch()
    for _ in range(3):
        with gate.hold(1):
            pass
    assert gate.repairs == 0
    assert semaphore.take()
    assert not semaphore.take()


def test_a_lock_file_without_a_semaphore_needs_no_repair(tmp_path):
    """If this failed, the gate would break where LMDB uses robust mutexes."""
    (tmp_path / LOCK_NAME).write_bytes(bytes(8192))
    gate = Gate(tmp_path)
    gate.watch()
    with gate.hold(1):
        pass
    assert gate.repairs == 0
