"""The short form of the power cuts; ``make crash`` runs the long one."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from crash import powerloss, shim
from crash.powerloss import Disk, Event, History, images, look

pytestmark = pytest.mark.skipif(bool(shim.why_not()), reason=str(shim.why_not()))


@pytest.fixture(scope="module")
def past(tmp_path_factory) -> History:
    """All that happened to a store in which pages are used again all the time."""
    folder = tmp_path_factory.mktemp("power") / "store"
    return powerloss.history(folder, 3 << 20, 130, keeps=False)


def look_at(folder, past: History, n: int, seed: int = 1):
    return [
        look(folder / f"image-{i}", image, keeps=past.keeps, cap_bytes=past.cap_bytes)
        for i, image in enumerate(images(past, n, seed))
    ]


def test_a_power_cut_costs_the_last_commit_at_most(past, tmp_path, caplog):
    """If this failed, a power cut would cost the store, or prompts long committed."""
    caplog.set_level(logging.CRITICAL, "tieredkv")
    findings = look_at(tmp_path, past, 15)
    assert [f.unopenable for f in findings if f.unopenable] == []
    assert [f.problems for f in findings if f.problems] == []
    assert sum(f.wrong + f.lost for f in findings) == 0
    assert max(f.lost_last for f in findings) <= 1


def test_without_flushes_the_power_cut_is_seen(past, tmp_path, caplog):
    """If this failed, the images would show nothing, whatever the store does."""
    caplog.set_level(logging.CRITICAL, "tieredkv")
    # As if each flush had returned without doing anything.
    events = tuple(replace(e, kind="lie") if e.kind in "SD" else e for e in past.events)
    deaf = replace(past, events=events[len(events) // 2 :])
    findings = look_at(tmp_path, deaf, 4)
    assert any(f.unopenable or f.problems or f.lost or f.lost_last > 1 for f in findings)


def test_the_mark_of_the_directory_is_flushed_before_there_is_data(past):
    """If this failed, a power cut could make a store of ours look like somebody else's."""
    flushed = [(e.kind, e.file) for e in past.events].index(("S", 3))
    assert flushed < [e.file for e in past.events].index(1)


def test_a_flush_makes_durable_what_was_written_before_it():
    """If this failed, the images would not be those of a disk."""
    import random

    disk = Disk()
    disk.take(Event("W", 1, 0, b"a" * 1024))
    disk.take(Event("S", 1, 0, b""))
    disk.take(Event("W", 1, 512, b"b" * 1024))
    made = {disk.image(random.Random(seed)) for seed in range(200)}
    assert all(image[:512] == b"a" * 512 for image in made)
    assert b"a" * 1024 in made
    assert b"a" * 512 + b"b" * 1024 in made
    # Torn: the second sector of the later write without the first.
    assert b"a" * 1024 + b"b" * 512 in made
