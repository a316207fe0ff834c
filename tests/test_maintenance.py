"""Cold directories pruned, verified, mended and made anew, mostly beside a server that runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from dataclasses import replace

import pytest
from cold_blocks import NAMESPACE, blocks, blocks_of, chain, content, is_right

from tieredkv import keys, units
from tieredkv.cli import main
from tieredkv.codec import PlaneCodec
from tieredkv.commands import console
from tieredkv.core import Block, BlockKey, ColdTierUnavailable, Place
from tieredkv.hazard import Standing
from tieredkv.tiers import cold, health, swap
from tieredkv.tiers.cold import ColdReader, ColdTier
from tieredkv.tiers.ledger import DATABASES
from tieredkv.tiers.rebuild import rebuild
from tieredkv.tiers.records import Ghost, Record, Use, due_key, left_key, order_key, piece_key

CAP = 64 << 20
N_BYTES = 3000

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["cold_blocks", "tieredkv.tiers.cold"])


def open_tier(folder):
    tier = ColdTier(folder, CAP, PlaneCodec())
    tier.register(NAMESPACE)
    return tier


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cold"


@pytest.fixture
def server(folder):
    """A tier that stays open all the time, as a server's does."""
    tier = open_tier(folder)
    yield tier
    tier.close()


def run(folder, command, *options):
    return main([command, "--dir", str(folder), *options])


def plant(tier, work):
    """Change rows behind the tier's back; ``work`` gets LMDB's transaction and databases."""
    environment = tier._environment
    environment.write(lambda ledger: work(ledger._txn, ledger._dbs))


def rows(tier, database):
    return tier._read(lambda rows: dict(rows.rows(database)), None)


def state_of(parent, key, grade):
    """A snapshot or window of ``parent``, by its key."""
    (like,) = blocks_of(chain([99]), N_BYTES)
    data = content(key, N_BYTES)
    tokens = b"" if key == keys.snapshot_key(parent) else keys.WINDOW_TOKENS
    tensor = type(like.tensors[0])
    array = like.tensors[0].copy()
    array.reshape(-1)[:] = list(data)
    assert isinstance(array, tensor)
    return Block(like.root, parent, key, tokens, like.specs, (array,), grade)


# The prompt that faults are planted in: three blocks, of which the second has a snapshot and a
# window, and a branch at the second.
A = chain(range(10))
B = chain([0, 1, 2, 3, 9, 9, 9, 9])
SNAPSHOT = keys.snapshot_key(A.keys[1])
WINDOW = keys.window_key(A.keys[1])
BELOW = {A.keys[2], SNAPSHOT, WINDOW}


def fill(tier):
    """Store them, and another prompt; all blocks by key."""
    batches = [
        blocks_of(A, N_BYTES),
        blocks_of(B, N_BYTES),
        [state_of(A.keys[1], SNAPSHOT, 3)],
        [state_of(A.keys[1], WINDOW, 2)],
        blocks(range(50, 62), N_BYTES),
    ]
    for batch in batches:
        assert tier.put(batch) == len(batch)
    tier.touch([A.keys[2], A.keys[2], SNAPSHOT])
    return {block.key: block for batch in batches for block in batch}


def held(tier, known):
    """Which of the known blocks load, and are right."""
    found = {key for key in known for block in tier.load([key]) if is_right(block)}
    assert found == {key for key in known if tier.load([key])}
    return found


# ---- verify


def flip(txn, db, key, at):
    value = bytearray(txn.get(key, db=db))
    value[at] ^= 1
    txn.put(key, bytes(value), db=db)


def change_use(txn, dbs, key, **change):
    use = replace(Use.unpack(bytes(txn.get(key, db=dbs.use))), **change)
    txn.put(key, use.pack(), db=dbs.use)


def move(txn, db, key):
    txn.put(b"m" * 32, bytes(txn.get(key, db=db)), db=db)
    txn.delete(key, db=db)


def first(txn, db):
    cursor = txn.cursor(db)
    assert cursor.first()
    return bytes(cursor.key())


def orphan(txn, dbs):
    parent = BlockKey(b"p" * 32)
    record = Record(A.root, parent, A.tokens_of(0), 10, 10, bytes(16), 1)
    txn.put(keys.block_key(parent, record.tokens), record.pack(), db=dbs.index)


def stray_order(txn, dbs):
    txn.put(order_key(Use(Standing(1)), b"s" * 32), b"", db=dbs.order)


def damaged_pin(txn, dbs):
    txn.put(A.keys[2], b"short", db=dbs.pin)
    use = Use.unpack(bytes(txn.get(A.keys[2], db=dbs.use)))
    txn.delete(order_key(use, A.keys[2]), db=dbs.order)


def ghost_of(txn, dbs, key, left):
    ghost = Ghost(left, Standing(0, awaited=True))
    txn.put(key, ghost.pack(), db=dbs.ghost)
    txn.put(left_key(left, key), b"", db=dbs.left)


def recode(txn, dbs, key):
    """Another blob, with the right checksum, that is none."""
    record = Record.unpack(bytes(txn.get(key, db=dbs.index)))
    blob = bytes(record.blob_bytes)
    txn.put(piece_key(key, 0), blob, db=dbs.blob)
    txn.put(key, replace(record, checksum=cold.checksum(blob)).pack(), db=dbs.index)


# What is done, what verify says of it, and which blocks can't be saved.
FAULTS = {
    "missing piece": (
        lambda txn, dbs: txn.delete(piece_key(A.keys[1], 0), db=dbs.blob),
        "piece 0 is absent",
        {A.keys[1], *BELOW},
    ),
    "wrong checksum": (
        lambda txn, dbs: flip(txn, dbs.blob, piece_key(A.keys[2], 0), 2000),
        "checksum is wrong",
        {A.keys[2]},
    ),
    "checksum of a blob that is none": (
        lambda txn, dbs: recode(txn, dbs, A.keys[2]),
        "header",
        {A.keys[2]},
    ),
    "extra piece": (
        lambda txn, dbs: txn.put(piece_key(A.keys[1], 1), b"x", db=dbs.blob),
        "piece of no block",
        set(),
    ),
    "piece of no block": (
        lambda txn, dbs: txn.put(piece_key(b"s" * 32, 0), b"x", db=dbs.blob),
        "piece of no block",
        set(),
    ),
    "orphan index record": (orphan, "parent is absent", set()),
    "wrong children count": (
        lambda txn, dbs: change_use(txn, dbs, A.keys[0], children=7),
        "counts 7 children, has 2",
        set(),
    ),
    "missing order row": (
        lambda txn, dbs: txn.delete(first(txn, dbs.order), db=dbs.order),
        "order row is absent",
        set(),
    ),
    "extra order row": (stray_order, "order row of no block", set()),
    "wrong namespace totals": (
        lambda txn, dbs: flip(txn, dbs.namespace, A.root, 0),
        "counts Totals",
        set(),
    ),
    "missing namespace row": (
        lambda txn, dbs: txn.delete(A.root, db=dbs.namespace),
        "counts None",
        set(),
    ),
    "damaged namespace row": (
        lambda txn, dbs: txn.put(A.root, b"short", db=dbs.namespace),
        "namespace row is too short",
        set(),
    ),
    "damaged description": (
        lambda txn, dbs: flip(txn, dbs.namespace, A.root, 56),
        "description is not JSON",
        set(),
    ),
    "missing child row": (
        lambda txn, dbs: txn.delete(first(txn, dbs.child), db=dbs.child),
        "child row is absent",
        set(),
    ),
    "extra child row": (
        lambda txn, dbs: txn.put(b"s" * 60, b"s" * 32, db=dbs.child),
        "child row of no block",
        set(),
    ),
    "damaged use record": (
        lambda txn, dbs: txn.put(A.keys[1], b"short", db=dbs.use),
        "use record has another size",
        set(),
    ),
    "missing use record": (
        lambda txn, dbs: txn.delete(A.keys[1], db=dbs.use),
        "use record is absent",
        set(),
    ),
    "use in the future": (
        lambda txn, dbs: change_use(txn, dbs, A.keys[1], standing=Standing(1 << 62)),
        "later than the clock",
        set(),
    ),
    "ghost of a block that is here": (
        lambda txn, dbs: ghost_of(txn, dbs, A.keys[1], 1),
        "among those that left",
        set(),
    ),
    "ghost of the future": (
        lambda txn, dbs: ghost_of(txn, dbs, b"s" * 32, 1 << 62),
        "left at another time",
        set(),
    ),
    "damaged ghost": (
        lambda txn, dbs: txn.put(b"s" * 32, b"short", db=dbs.ghost),
        "ghost has another size",
        set(),
    ),
    "extra row in left": (
        lambda txn, dbs: txn.put(left_key(1, b"s" * 32), b"", db=dbs.left),
        "row in left of no block",
        set(),
    ),
    "pin of no block": (
        lambda txn, dbs: txn.put(b"s" * 32, bytes(8), db=dbs.pin),
        "pin of no block",
        set(),
    ),
    "pinned leaf that can be evicted": (
        lambda txn, dbs: txn.put(A.keys[2], bytes(8), db=dbs.pin),
        "is pinned, and stands in order",
        set(),
    ),
    "damaged pin": (damaged_pin, "pin doesn't say when", set()),
    "missing row in due": (
        lambda txn, dbs: change_use(txn, dbs, A.keys[2], expires=1 << 62),
        "row in due is absent",
        set(),
    ),
    "extra row in due": (
        lambda txn, dbs: txn.put(due_key(1 << 62, b"s" * 32), b"", db=dbs.due),
        "row in due of no block",
        set(),
    ),
    "record CRC": (
        lambda txn, dbs: flip(txn, dbs.index, A.keys[1], 50),
        "fails its CRC",
        {A.keys[1], *BELOW},
    ),
    "wrong key": (
        lambda txn, dbs: move(txn, dbs.index, B.keys[1]),
        "key is not that of its parent and tokens",
        {B.keys[1]},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_and_mended_beside_a_server(server, folder, capsys, name):
    """If this failed, a damaged store would pass, or mending it cost sound blocks or a server."""
    work, said, lost = FAULTS[name]
    known = fill(server)
    assert run(folder, "verify") == 0
    plant(server, work)
    capsys.readouterr()
    assert run(folder, "verify") == 1
    assert said in capsys.readouterr().out
    assert run(folder, "verify", "--fix") == 0
    assert "no problems" in capsys.readouterr().out

    server.touch([A.keys[0]])
    assert held(server, known) == known.keys() - lost
    assert server.put(blocks_of(A, N_BYTES)) == 3
    assert server.put(blocks(range(80, 88), N_BYTES)) == 2
    assert server.verify() == []
    assert set(server.counters().faults) <= {"lost", "damaged", "corrupt"}
    assert list(folder.glob("quarantine-*")) == []


def test_a_damaged_record_is_mended_when_nobody_runs(folder, capsys):
    """If this failed, opening the store to mend it would throw it away, as a server does."""
    tier = open_tier(folder)
    known = fill(tier)
    plant(tier, FAULTS["record CRC"][0])
    tier.close()
    assert run(folder, "verify", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert A.keys[1].hex() in {problem["where"] for problem in report["problems"]}
    assert report["fixed"] is None
    assert run(folder, "verify", "--fix", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert (report["fixed"]["kept"], report["fixed"]["left_out"]) == (len(known) - 4, 4)
    tier = open_tier(folder)
    assert len(held(tier, known)) == len(known) - 4
    tier.close()


@pytest.mark.parametrize("command", [["verify"], ["verify", "--fix"], ["compact"]])
def test_a_file_that_is_torn_is_refused_and_kept(folder, capsys, command):
    """If this failed, a command would die of SIGBUS, or throw the file away."""
    tier = open_tier(folder)
    fill(tier)
    tier.close()
    os.truncate(folder / health.DATA_NAME, 20_000)
    assert run(folder, *command) == 1
    said = capsys.readouterr().err
    assert "damaged" in said
    assert "can't be mended" in said
    assert (folder / health.DATA_NAME).stat().st_size == 20_000
    assert list(folder.glob("quarantine-*")) == []


def test_many_problems_are_counted_and_some_shown(server, folder, capsys):
    """If this failed, a terminal would scroll for minutes, or nobody know how many there are."""
    server.put(blocks(range(200), N_BYTES))
    plant(server, lambda txn, dbs: txn.drop(dbs.order, delete=False) or txn.drop(dbs.child, False))
    assert run(folder, "verify") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "51 problems:"
    assert len(lines) == 22
    assert "31 more" in lines[-1]
    assert run(folder, "verify", "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 51


def test_more_than_a_lowered_cap_is_mended_by_evicting(server, folder, capsys):
    """If this failed, verify would complain for ever about a store that is merely too full."""
    server.put(blocks(range(400), 30_000))
    ColdTier(folder, 2 << 20, PlaneCodec()).close()
    assert run(folder, "verify") == 1
    assert "more than the cap" in capsys.readouterr().out
    assert run(folder, "verify", "--fix") == 0
    server.touch([A.keys[0]])
    assert 0 < server.n_bytes <= 2 << 20
    assert len(server.load(chain(range(400)).keys)) == server.n_blocks


# ---- compact


def test_a_new_store_is_the_old_one_in_less_room(server, folder, capsys):
    """If this failed, what was used, how often, and whose it is would be forgotten."""
    fill(server)
    server.put(blocks(range(1000, 2000), 20_000))
    server.trim_to(server.n_bytes // 10)
    fill(server)
    server.put([replace(b, expires=1 << 62) for b in blocks(range(300, 308), N_BYTES)])
    server.pin([Place(A)])
    names = [*DATABASES]
    names.remove("meta")
    before = {name: rows(server, name) for name in names}
    numbers, size = rows(server, "meta"), server.usage().file_bytes
    assert run(folder, "compact") == 0
    assert "before" in capsys.readouterr().out
    server.close()
    tier = ColdTier(folder, None, PlaneCodec())
    assert {name: rows(tier, name) for name in names} == before
    assert all(before.values())
    for number in (b"format", b"piece", b"cap", b"clock", b"counters"):
        assert rows(tier, "meta")[number] == numbers[number]
    assert tier.usage().file_bytes < size / 3
    assert tier.verify() == []
    assert sorted(os.listdir(folder)) == ["data.mdb", "intact", "lock.mdb", "writer.gate"]
    assert (folder / health.DATA_NAME).stat().st_mode & 0o777 == 0o600
    tier.close()


def test_compact_as_json(server, folder, capsys):
    """If this failed, scripts could not tell what it was good for."""
    known = fill(server)
    assert run(folder, "compact", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kept"], report["left_out"]) == (len(known), 0)
    assert report["after_bytes"] == (folder / health.DATA_NAME).stat().st_size
    assert report["before_bytes"] > report["after_bytes"]


def test_pruned_bytes_are_gone_after_compact(server, folder, capsys):
    """If this failed, a prompt that had to go would stay readable on disk."""
    secret = replace(NAMESPACE, model="secret")
    server.register(secret)
    (gone,) = blocks_of(chain([5551, 5552, 5553, 5554], secret), N_BYTES)
    server.put([gone])
    server.put(blocks(range(8), N_BYTES))
    assert run(folder, "prune", "--model", "secret", "--yes") == 0
    assert "compact --dir" in capsys.readouterr().out
    patterns = [gone.tokens, content(gone.key, N_BYTES)[100:164]]
    data = (folder / health.DATA_NAME).read_bytes()
    assert all(pattern in data for pattern in patterns)
    assert run(folder, "compact") == 0
    data = (folder / health.DATA_NAME).read_bytes()
    assert not any(pattern in data for pattern in patterns)
    assert content(chain(range(8)).keys[0], N_BYTES)[100:164] in data


def test_what_others_do_during_the_copy_is_in_the_new_store(server, folder):
    """If this failed, prompts that insert had returned from would be lost, or evicted ones back."""
    known = fill(server)
    later = blocks(range(70, 78), N_BYTES)
    other = chain(range(50, 62))

    calls = []

    def meanwhile(_done, _total):
        calls.append(1)
        if len(calls) > 1:
            return
        server.put(later)
        server.touch([B.keys[1]])
        plant(server, lambda txn, dbs: flip(txn, dbs.blob, piece_key(other.keys[2], 0), 2000))
        assert len(server.load(other.keys)) == 2
        server.touch([SNAPSHOT])

    assert rebuild(folder, PlaneCodec(), meanwhile).left_out == 0
    assert len(calls) == 2
    uses = rows(server, "use")
    server.close()
    tier = ColdTier(folder, None, PlaneCodec())
    assert rows(tier, "use") == uses
    everything = {**known, **{block.key: block for block in later}}
    assert held(tier, everything) == everything.keys() - {other.keys[2]}
    assert tier.verify() == []
    tier.close()


def write_stream(folder, pipe):
    tier = open_tier(folder)
    i = 0
    while True:
        batch = blocks(range(1000 * i, 1000 * i + 10), 20_000)
        if tier.put(batch) == len(batch):
            pipe.send(i)
        i += 1


def test_a_writing_process_loses_nothing(folder):
    """If this failed, a server would lose prompts, or stop, when its store is made anew."""
    open_tier(folder).close()
    mine, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=write_stream, args=(folder, theirs))
    process.start()
    theirs.close()
    assert mine.poll(20)
    for _ in range(5):
        assert run(folder, "compact") == 0
    time.sleep(0.2)
    process.kill()
    process.join()
    done = []
    try:
        while True:
            done.append(mine.recv())
    except EOFError:
        pass
    tier = open_tier(folder)
    assert tier.verify() == []
    for i in done:
        loaded = tier.load(chain(range(1000 * i, 1000 * i + 10)).keys)
        assert len(loaded) == 3
        assert all(map(is_right, loaded))
    assert len(done) > 20
    tier.close()


# Kills itself at the n-th of these: the blobs are copied; before and after each of two renames.
KILLED = """
import os, signal, sys
from pathlib import Path
from tieredkv.codec import PlaneCodec
from tieredkv.tiers.rebuild import rebuild
left = int(sys.argv[2])
def step(*_):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
rename = os.replace
def replace(old, new):
    step()
    rename(old, new)
    step()
os.replace = replace
rebuild(Path(sys.argv[1]), PlaneCodec(), step)
"""


@pytest.mark.parametrize("left", range(5))
def test_a_kill_at_any_point_leaves_a_whole_store(server, folder, left):
    """If this failed, a power cut while a store is made anew would lose it, or mix two."""
    known = fill(server)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(left)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (folder / swap.FOLDER).exists()
    # Readers that don't write go on with what they have.
    assert held(server, known) == known.keys()
    late = blocks(range(70, 78), N_BYTES)
    assert server.put(late) == 2
    known |= {block.key: block for block in late}
    assert held(server, known) == known.keys()
    assert run(folder, "verify") == 0
    assert run(folder, "compact") == 0
    assert not (folder / swap.FOLDER).exists()
    assert server.put(blocks(range(90, 98), N_BYTES)) == 2
    assert held(server, known) == known.keys()
    assert server.verify() == []


def test_a_half_done_swap_is_finished_before_anybody_opens(folder):
    """If this failed, a new file would be used with the locks and readers of the old one."""
    server = open_tier(folder)
    known = fill(server)
    old_lock = (folder / health.LOCK_NAME).stat().st_ino
    subprocess.run([sys.executable, "-c", KILLED, str(folder), "2"], check=False)
    assert (folder / health.LOCK_NAME).stat().st_ino == old_lock
    reader = ColdReader(folder, PlaneCodec())
    assert (folder / health.LOCK_NAME).stat().st_ino != old_lock
    assert held(reader, known) == known.keys()
    reader.close()
    server.close()


def test_two_at_a_time_are_refused(server, folder, capsys):
    """If this failed, two would overwrite each other's new store."""
    fill(server)
    with swap.workplace(folder):
        assert run(folder, "compact") == 1
    assert "another process" in capsys.readouterr().err
    assert run(folder, "compact") == 0


def written(path):
    """Which file it is, and when it was written last; reading it changes neither."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def test_too_little_free_disk_is_said_first(server, folder, capsys, monkeypatch):
    """If this failed, the disk would fill up, and servers with it, before anybody knew."""
    fill(server)
    usage = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    before = written(folder / health.DATA_NAME)
    assert run(folder, "compact") == 1
    assert "free disk" in capsys.readouterr().err
    assert written(folder / health.DATA_NAME) == before
    assert not (folder / swap.FOLDER).exists()


def test_a_stop_leaves_the_old_store(server, folder):
    """If this failed, Ctrl-C would leave half a store, or a folder that fills the disk."""
    known = fill(server)

    def interrupt(_done, _total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rebuild(folder, PlaneCodec(), interrupt)
    assert not (folder / swap.FOLDER).exists()
    assert held(server, known) == known.keys()
    assert server.put(blocks(range(90, 98), N_BYTES)) == 2
    assert server.counters().faults == {}


# ---- prune


def named(model, name="", salt=b""):
    return replace(NAMESPACE, model=model, name=name, salt=salt)


def store(tier, namespace, tokens=(1, 2, 3, 4, 5)):
    tier.register(namespace)
    batch = blocks_of(chain(list(tokens), namespace), N_BYTES)
    assert tier.put(batch) == len(batch)


def models(tier):
    """Whose blocks are there, by the identity and salt of their namespaces."""
    return {(n.model, n.salted) for n in tier.usage().namespaces}


@pytest.fixture
def models_of_all_kinds(server):
    store(server, named("id-1", "org/Qwen-8B"))
    store(server, named("id-2", "org/Qwen-4B"))
    store(server, named("id-3", "./local"))
    store(server, named("id-4", "salted", b"s"))
    store(server, named("id-5", "tenant", keys.tenant_salt(b"", keys.tenant("", "alice"))))
    store(server, named("id-6", "tenant", keys.tenant_salt(b"s", keys.tenant("", "alice"))))


@pytest.mark.parametrize(
    ("conditions", "gone"),
    [
        (["--model", "org/Qwen-8B"], {"id-1"}),
        (["--model", "org/Qwen*"], {"id-1", "id-2"}),
        (["--model", "id-3"], {"id-3"}),
        (["--model", "Qwen"], set()),
        (["--salt", "s"], {"id-4"}),
        (["--salt", "t"], set()),
        (["--cache-salt", "alice"], {"id-5"}),
        (["--salt", "s", "--cache-salt", "alice"], {"id-6"}),
        (["--unsalted"], {"id-1", "id-2", "id-3"}),
        (["--unsalted", "--model", "*B"], {"id-1", "id-2"}),
        (["--salt", "s", "--model", "org/*"], set()),
        (["--older-than", "1d"], set()),
        (["--to", "0"], {"id-1", "id-2", "id-3", "id-4", "id-5", "id-6"}),
    ],
)
@pytest.mark.usefixtures("models_of_all_kinds")
def test_what_meets_all_conditions_goes(server, folder, capsys, conditions, gone):
    """If this failed, somebody's prompts would stay, or somebody else's go."""
    assert run(folder, "prune", *conditions, "--dry-run", "--json") == 0
    foreseen = json.loads(capsys.readouterr().out)
    assert len(models(server)) == 6
    assert run(folder, "prune", *conditions, "--yes", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert {model for model, _ in models(server)} == {f"id-{i}" for i in range(1, 7)} - gone
    assert done == {**foreseen, "dry_run": False}
    assert done["blocks"] == 2 * len(gone)
    assert server.check() == []


def test_age_is_that_of_the_last_use_of_a_block_or_its_descendants(
    server, folder, capsys, monkeypatch
):
    """If this failed, prompts in use would go, or old ones stay for ever."""
    with monkeypatch.context() as then:
        now = time.time_ns()
        then.setattr(time, "time_ns", lambda: now - 40 * 86400 * 10**9)
        server.put(blocks(range(12), N_BYTES))
        server.put(blocks([0, 1, 2, 3, 9, 9, 9, 9], N_BYTES))
        server.put(blocks(range(50, 58), N_BYTES))
    server.touch([B.keys[1]])
    assert run(folder, "prune", "--older-than", "30d", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 4
    assert server.n_blocks == 2
    assert len(server.load(B.keys)) == 2


def test_a_size_is_reached_by_what_is_worth_least(server, folder, capsys):
    """If this failed, the prompts in use would go before those that nobody asks for."""
    for i in range(20):
        server.put(blocks(range(100 * i, 100 * i + 8), 30_000))
    server.touch([chain(range(8)).keys[1]])
    wanted = server.n_bytes // 2
    assert run(folder, "prune", "--to", str(wanted), "--dry-run", "--json") == 0
    foreseen = json.loads(capsys.readouterr().out)["blocks"]
    assert run(folder, "prune", "--to", str(wanted), "--yes") == 0
    assert wanted - 100_000 < server.n_bytes <= wanted
    assert abs(40 - server.n_blocks - foreseen) <= 2
    assert len(server.load(chain(range(8)).keys)) == 2
    assert server.load(chain(range(100, 108)).keys) == []


def test_what_grows_meanwhile_stays(server):
    """If this failed, a prompt that a server has just continued would lose its root."""
    criteria = cold.Criteria(unused_since=time.time_ns() + 10**10, to_bytes=None)
    server.put(blocks(range(4), N_BYTES))
    server.put(blocks(range(50, 54), N_BYTES))
    plan = server.plan(criteria)
    server.put(blocks(range(8), N_BYTES))
    done = cold._Done()
    server._environment.write(lambda ledger: cold._prune(plan.victims, criteria, ledger, done))
    assert [victim.key for victim in done.pruned] == [chain(range(50, 54)).keys[0]]
    assert server.check() == []


def test_without_a_condition_nothing_goes(server, folder, capsys):
    """If this failed, a command that was entered too early would delete everything."""
    fill(server)
    with pytest.raises(SystemExit) as stop:
        run(folder, "prune", "--yes")
    assert stop.value.code == 2
    assert "--to 0 for everything" in capsys.readouterr().err
    assert server.n_blocks == 9


def test_without_an_answer_nothing_goes(server, folder):
    """If this failed, a script that can't answer would delete, or hang."""
    fill(server)
    command = [sys.executable, "-m", "tieredkv", "prune", "--dir", str(folder), "--to", "0"]
    done = subprocess.run(command, input="y\n", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert server.n_blocks == 9
    assert subprocess.run([*command, "--yes"], capture_output=True, check=True).stderr == b""
    assert server.n_blocks == 0
    assert server.put(blocks(range(8), N_BYTES)) == 2


def test_a_stop_says_how_far_it_got(server, folder, capsys, monkeypatch):
    """If this failed, nobody would know what a Ctrl-C had left, or it would be no valid store."""
    server.put(blocks(range(80), N_BYTES))
    monkeypatch.setattr(cold, "_MAX_PRUNED_BLOCKS", 1)

    def interrupt(_self, done, _total):
        if done == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(console.Progress, "__call__", interrupt)
    assert run(folder, "prune", "--to", "0", "--yes") == 1
    assert "5 blocks" in capsys.readouterr().out
    assert server.n_blocks == 15
    assert server.verify() == []
    assert len(server.load(chain(range(60)).keys)) == 15


def test_a_failure_says_how_far_it_got(server, folder, capsys, monkeypatch):
    """If this failed, nobody would know what was gone when the disk failed half-way."""
    server.put(blocks(range(80), N_BYTES))
    monkeypatch.setattr(cold, "_MAX_PRUNED_BLOCKS", 8)
    write = ColdTier._write

    def failing(self, work):
        return None if server.n_blocks < 10 else write(self, work)

    monkeypatch.setattr(ColdTier, "_write", failing)
    assert run(folder, "prune", "--to", "0", "--yes") == 1
    printed = capsys.readouterr()
    assert "16 blocks" in printed.out
    assert "can't be written" in printed.err
    assert server.n_blocks == 4


def test_a_damaged_store_is_left_to_verify(server, folder, capsys):
    """If this failed, pruning a damaged store would throw all of it away."""
    known = fill(server)
    plant(server, FAULTS["damaged use record"][0])
    for command in (["prune", "--to", "0", "--yes"], ["stats"]):
        assert run(folder, *command) == 1
        assert "tieredkv verify" in capsys.readouterr().err
    assert server.n_blocks == len(known)
    assert list(folder.glob("quarantine-*")) == []


@pytest.mark.parametrize("command", ["verify", "compact", "prune --to 0 --yes"])
def test_what_takes_long_says_how_far_it_is_on_a_terminal(
    server, folder, capsys, monkeypatch, command
):
    """If this failed, minutes would pass in silence, or a log fill up with percentages."""
    fill(server)
    monkeypatch.setattr(console, "_PROGRESS_AFTER_S", 0)
    if command == "verify":
        assert run(folder, command) == 0
        assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(folder, *command.split()) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("\r")
    assert "%" in shown
    assert shown.endswith("\r\x1b[K")


@pytest.mark.parametrize("command", ["prune --to 0 --yes", "verify", "verify --fix", "compact"])
def test_a_directory_that_is_none_is_not_created(tmp_path, capsys, command):
    """If this failed, a typing error would look like a clean, empty store."""
    assert run(tmp_path / "absent", *command.split(), "--json") == 1
    printed = capsys.readouterr()
    assert "no cold tier" in printed.err
    assert "no cold tier" in json.loads(printed.out)["error"]
    assert list(tmp_path.iterdir()) == []


def test_keeping_the_cap_of_a_store_needs_a_store(tmp_path):
    """If this failed, a tool could start a store with a cap that nobody asked for."""
    with pytest.raises(ColdTierUnavailable, match="no cold tier"):
        ColdTier(tmp_path, None, PlaneCodec())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45m", 2700), ("12h", 43200), ("1.5d", 129600), ("2w", 1209600)],
)
def test_times_are_read(text, seconds):
    """If this failed, prompts of the wrong age would go."""
    assert units.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "0d", "1y", "nand"])
def test_what_is_no_time_is_refused(text):
    """If this failed, a mistake would be taken for an age, maybe of nothing."""
    with pytest.raises(ArgumentTypeError):
        units.duration(text)


def test_who_only_reads_goes_over_to_a_file_that_was_made_anew(tmp_path):
    """If this failed, a server would find nothing that was stored after a ``compact``."""
    folder = tmp_path / "cold"
    reading = ColdTier(folder, 64 << 20, PlaneCodec())
    reading.put(blocks_of(chain(range(8)), 2000))
    rebuild(folder, PlaneCodec())
    other = ColdTier(folder, 64 << 20, PlaneCodec())
    try:
        other.put(blocks_of(chain(range(100, 108)), 2000))
        keys = chain(range(100, 108)).keys
        reading.expire(time.time_ns())
        assert len(reading.load(keys)) == len(keys)
        assert reading.counters().faults == {}
    finally:
        other.close()
        reading.close()
