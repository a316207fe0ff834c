"""Export and import: what comes out of a store goes into another one, and nothing else does."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import caches
import mlx.core as mx
import numpy as np
import pytest
from caches import MODEL
from mlx_lm.models.cache import KVCache
from safetensors.numpy import load

from tieredkv import TieredPromptCache
from tieredkv.cli import main
from tieredkv.codec import PlaneCodec
from tieredkv.core import Block, TensorSpec
from tieredkv.hazard import Standing
from tieredkv.tiers import portable
from tieredkv.tiers.cold import ColdReader
from tieredkv.tiers.pruning import Criteria
from tieredkv.tiers.records import Use, record_of
from tieredkv.tiers.selection import Selection

PROMPTS = ([*range(9)], [50, 51, 52], [0, 1, 2, 3, 9, 9, 9, 9, 8])
HYBRID = ("hybrid", None, None)
SALT = b"very secret"


def fill(folder: Path) -> None:
    with TieredPromptCache(folder, block_tokens=4) as cache:
        for tokens in PROMPTS:
            cache.insert_cache(MODEL, tokens, caches.make(tokens, mx.bfloat16))
        cache.insert_cache(HYBRID, PROMPTS[0], caches.make_hybrid(PROMPTS[0]))
    with TieredPromptCache(folder, block_tokens=4, salt=SALT) as cache:
        cache.insert_cache(MODEL, [1, 2], caches.make([1, 2], mx.bfloat16))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models' prompts, one of them with a snapshot, and one under a salt."""
    folder = tmp_path_factory.mktemp("source")
    fill(folder)
    return folder


@pytest.fixture
def file(source: Path, tmp_path: Path) -> Path:
    path = tmp_path / "prompts.tkv"
    assert main(["export", str(path), "--dir", str(source)]) == 0
    return path


def cold(folder: Path) -> ColdReader:
    return ColdReader(folder, PlaneCodec())


def n_blocks(folder: Path) -> int:
    reader = cold(folder)
    try:
        return reader.n_blocks
    finally:
        reader.close()


def hit(folder: Path, tokens: list[int], model: object = MODEL, salt: bytes = b"") -> int:
    """Tokens found of a prompt that goes on with another one, whose state is right."""
    with TieredPromptCache(folder, block_tokens=4, salt=salt) as cache:
        live, rest = cache.fetch_nearest_cache(model, [*tokens, 77])
        n = len(tokens) + 1 - len(rest)
        if live is not None:
            holds = caches.holds_hybrid if model == HYBRID else caches.holds
            more = () if model == HYBRID else (mx.bfloat16,)
            assert holds(live, tokens[:n], *more)
        return n


# ---- there and back


def test_what_was_exported_hits_elsewhere(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is what a file is for."""
    there = tmp_path / "there"
    assert main(["import", str(file), "--dir", str(there)]) == 0
    assert [hit(there, tokens) for tokens in PROMPTS] == [9, 3, 9]
    assert hit(there, PROMPTS[0], HYBRID) == 9
    assert main(["verify", "--dir", str(there)]) == 0
    assert "10 blocks stored" in capsys.readouterr().out


def test_an_import_goes_on_where_it_was(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a crash nothing may be stored twice, and nothing be left out."""
    there = tmp_path / "there"
    with TieredPromptCache(there, block_tokens=4) as cache:
        cache.insert_cache(MODEL, PROMPTS[0], caches.make(PROMPTS[0], mx.bfloat16))
    for stored, known in ((7, 3), (0, 10)):
        capsys.readouterr()
        assert main(["import", str(file), "--dir", str(there), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["stored"], said["known"], said["left_out"]) == (stored, known, 0)


def test_a_dry_run_stores_nothing(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who asks first wants to be told, and nothing else."""
    capsys.readouterr()
    there = tmp_path / "there"
    assert main(["import", str(file), "--dir", str(there), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored"] == 10
    assert not there.exists()


def test_uses_are_taken_along(source: Path, tmp_path: Path) -> None:
    """What was used often elsewhere must not be the first to be evicted here."""
    there = tmp_path / "there"
    assert hit(source, PROMPTS[1]) == 3
    again = tmp_path / "again.tkv"
    assert main(["export", str(again), "--dir", str(source)]) == 0
    assert main(["import", str(again), "--dir", str(there)]) == 0
    refs = []
    for folder in (source, there):
        reader = cold(folder)
        chosen = reader.choose(portable_selection())
        refs.append({row.key: row.use.standing.refs for row in chosen.rows})
        reader.close()
    assert refs[0] == refs[1]
    assert max(refs[1].values()) == 1


def portable_selection(**more: object) -> object:
    return Selection(Criteria(), **more)


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An import must never push out what is in use, nor pretend."""
    with TieredPromptCache(tmp_path / "a", block_tokens=4, cold_bytes=64 << 20) as cache:
        for start in range(3):
            tokens = [start * 1000 + i for i in range(200)]
            noise = KVCache()
            noise.update_and_fetch(*(mx.random.normal((1, 2, 200, 64)) for _ in range(2)))
            cache.insert_cache(MODEL, tokens, [noise])
            cache.flush()
    path, there = tmp_path / "x.tkv", tmp_path / "b"
    assert main(["export", str(path), "--dir", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    flags = ["--prompt-cache-disk-bytes", "400KB", "--json"]
    assert main(["import", str(path), "--dir", str(there), *flags]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["reason"] == "no_room"
    assert said["stored"] > 0
    assert said["left_out"] > 0
    assert n_blocks(there) == said["stored"]
    assert main(["verify", "--dir", str(there)]) == 0


# ---- what is exported


def test_salted_prompts_go_only_if_asked_for(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file for a colleague must not have a tenant's prompts by accident."""
    path, there = tmp_path / "x.tkv", tmp_path / "there"
    for flags, n in ((["--salted"], 11), (["--salt", "very secret"], 1), (["--unsalted"], 10)):
        capsys.readouterr()
        command = ["export", str(path), "--dir", str(source), "--force", "--json", *flags]
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["blocks"] == n
    assert main(["export", str(path), "--dir", str(source), "--force", "--salted"]) == 0
    assert SALT not in path.read_bytes()
    assert main(["import", str(path), "--dir", str(there)]) == 0
    with TieredPromptCache(there, block_tokens=4, salt=SALT) as cache:
        # Under which base its layout is listed nobody knew: an insert tells.
        cache.insert_cache(MODEL, [8], caches.make([8], mx.bfloat16))
        assert cache.fetch_nearest_cache(MODEL, [1, 2, 3])[1] == [3]


def test_who_names_a_prefix_hears_of_no_salted_ones(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is missing from the file that was asked for."""
    assert main(["ls", "--dir", str(source), "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    plain = next(prefix for m in models if not m["salted"] for prefix in m["prefixes"])
    command = ["export", str(tmp_path / "x"), "--dir", str(source), "--json"]
    assert main([*command, "--id", plain["id"]]) == 0
    assert json.loads(capsys.readouterr().out)["hidden"] == 0
    assert main([*command, "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["hidden"] == 1


def test_a_model_is_chosen_by_name(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most exports are of one model."""
    command = ["export", str(tmp_path / "x"), "--dir", str(source), "--json", "--model", "hyb*"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 4


def test_a_prefix_is_chosen_by_its_id_with_all_before_it(source: Path, tmp_path: Path) -> None:
    """A block without its ancestors can't be found by anybody."""
    reader = cold(source)
    rows = reader.choose(portable_selection()).rows
    reader.close()
    last = next(r for r in rows if len(r.record.tokens) == 8 and r.record.tokens[:1] == b"\x08")
    path, there = tmp_path / "x", tmp_path / "there"
    assert main(["export", str(path), "--dir", str(source), "--id", last.key.hex()[:16]]) == 0
    assert main(["import", str(path), "--dir", str(there)]) == 0
    assert n_blocks(there) in (3, 4)
    assert main(["verify", "--dir", str(there)]) == 0


def test_an_unknown_id_is_said_and_leaves_no_file(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped id must not give an empty file that is taken for a backup."""
    assert main(["export", str(tmp_path / "x"), "--dir", str(source), "--id", "000000"]) == 1
    assert "no block" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_was_used_of_late_can_be_chosen(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a large store most people want what they still use."""
    command = ["export", str(tmp_path / "x"), "--dir", str(source), "--json"]
    assert main([*command, "--newer-than", "1h"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks"] == 10


def test_the_file_is_readable_by_its_owner_alone(file: Path) -> None:
    """It has prompts in it."""
    assert file.stat().st_mode & 0o777 == 0o600


def test_any_unzip_opens_it_and_any_safetensors_reader_its_blobs(file: Path) -> None:
    """Who has lost this program must still get at the data."""
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        names = [n for n in archive.namelist() if n.endswith(".safetensors")]
        assert len(names) == 10
        assert all(load(archive.read(name)) for name in names)


def test_a_file_that_is_there_is_not_replaced_unasked(
    source: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be the only copy of something."""
    before = file.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["export", str(file), "--dir", str(source)])
    assert ended.value.code == 2
    assert "--force" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_an_interrupted_export_leaves_no_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a backup is taken for a whole one."""

    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(ColdReader, "blob", interrupt)
    assert main(["export", str(tmp_path / "x"), "--dir", str(source)]) == 1
    assert not list(tmp_path.iterdir())


# ---- files that mean harm, or were damaged

Members = dict[str, bytes]


def rewritten(path: Path, change: Callable[[Members], None]) -> None:
    """Make the archive anew with other members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def manifest(change: Callable[[dict[str, object]], object]) -> Callable[[Members], None]:
    def changed(members: Members) -> None:
        fields = json.loads(members["manifest.json"])
        change(fields)
        members["manifest.json"] = json.dumps(fields).encode()

    return changed


def blobs(members: Members) -> list[str]:
    return [name for name in members if name.startswith("blobs/")]


def swap(members: Members) -> None:
    a, b = blobs(members)[:2]
    members[a], members[b] = members[b], members[a]


def flip(members: Members) -> None:
    name = blobs(members)[-1]
    data = bytearray(members[name])
    data[-1] ^= 1
    members[name] = bytes(data)


def indexed(change: Callable[[bytes], bytes]) -> Callable[[Members], None]:
    """Another index, with the manifest made to fit."""

    def changed(members: Members) -> None:
        members["index"] = change(members["index"])
        fields = json.loads(members["manifest.json"])
        fields["index_bytes"] = len(members["index"])
        fields["index_blake2b"] = portable._digest(members["index"])
        members["manifest.json"] = json.dumps(fields).encode()

    return changed


def parts(index: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(index):
        stop = at + 4 + int.from_bytes(index[at : at + 4], "little")
        yield index[at:stop]
        at = stop


def without_first_row(index: bytes) -> bytes:
    return b"".join(list(parts(index))[2:])


def rename_namespace(fields: dict[str, object]) -> None:
    for described in fields["namespaces"].values():
        described["model"] = "name:another"


def nested(members: Members) -> None:
    members["manifest.json"] = b"[" * 1_000_000


HARM: dict[str, Callable[[Members], None]] = {
    "blobs swapped": swap,
    "a bit flipped in a blob": flip,
    "a blob missing": lambda m: m.pop(blobs(m)[0]) and None,
    "a member too many": lambda m: m.update({"../../evil": b"x"}),
    "a name that climbs": lambda m: m.update({"../" + blobs(m)[0]: m.pop(blobs(m)[0])}),
    "a namespace of another model": manifest(rename_namespace),
    "another format": manifest(lambda f: f.update(format="x")),
    "another version": manifest(lambda f: f.update(version=99)),
    "a huge number of blocks": manifest(lambda f: f.update(blocks=1 << 62)),
    "a negative number of blocks": manifest(lambda f: f.update(blocks=-1)),
    "more bytes than there are": manifest(lambda f: f.update(blob_bytes=1 << 62)),
    "no namespaces": manifest(lambda f: f.update(namespaces={})),
    "a namespace that is no object": manifest(
        lambda f: f.update(namespaces=dict.fromkeys(f["namespaces"], 3))
    ),
    "a manifest that is no JSON": lambda m: m.update({"manifest.json": b"{"}),
    "a manifest nested without end": nested,
    "an index of other bytes": lambda m: m.update(index=m["index"][:-1] + b"\xff"),
    "an index that is cut off": indexed(lambda i: i[:-7]),
    "a row of huge size": indexed(lambda i: struct.pack("<I", 1 << 31) + i[4:]),
    "a block without its parent": indexed(without_first_row),
    "a block twice": indexed(lambda i: i + i),
}


@pytest.mark.parametrize("what", HARM)
def test_a_file_that_was_changed_is_refused(
    file: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache must hold nothing that it didn't compute; at worst it holds the sound part."""
    rewritten(file, HARM[what])
    there = tmp_path / "there"
    for flags in (["--dry-run"], []):
        capsys.readouterr()
        assert main(["import", str(file), "--dir", str(there), *flags]) == 1
        assert "Traceback" not in "".join(capsys.readouterr())
    if there.exists():
        assert main(["verify", "--dir", str(there)]) == 0
        assert n_blocks(there) < 10


def bomb(path: Path) -> None:
    """A compressed member that is a thousand times its size."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, bytes(50 << 20) if name == "manifest.json" else data)


def large_manifest(path: Path) -> None:
    rewritten(path, lambda m: m.update({"manifest.json": b" " * (portable.MAX_MANIFEST_BYTES + 1)}))


def many_members(path: Path) -> None:
    """An end that says that the list of members takes more than a file may have."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<HHL", data, len(data) - 14, 0xFFFF, 0xFFFF, 0xFFFFFFFF)
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_archive(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def doubled(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("index", b"x")


@pytest.mark.parametrize(
    "harm", [bomb, large_manifest, many_members, truncated, empty, no_archive, doubled]
)
def test_an_archive_that_means_harm_is_refused(
    file: Path, tmp_path: Path, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file from somewhere must not take the machine's memory, nor end in a traceback."""
    harm(file)
    assert main(["import", str(file), "--dir", str(tmp_path / "there")]) == 1
    assert "Traceback" not in "".join(capsys.readouterr())
    assert not (tmp_path / "there").exists()


def test_state_that_is_not_finite_is_refused() -> None:
    """It would spread over everything that is computed after it."""
    spec = TensorSpec("bfloat16", (1, 1, 4, 8))
    words = np.full(spec.shape, 0x3F80, np.uint16)
    words[0, 0, 1, 1] = 0x7F80
    chain = caches.chain([1, 2, 3, 4])
    block = Block(chain.root, chain.root, chain.keys[0], chain.tokens_of(0), (spec,), (words,))
    codec = PlaneCodec()
    blob = codec.encode(block)
    row = portable.Row(block.key, record_of(block, len(blob), bytes(16), 0), Use(Standing(0)))
    with pytest.raises(portable.BadFile, match="finite"):
        portable.checked(row, blob, codec)


def test_bytes_flipped_anywhere_store_nothing_wrong(file: Path, tmp_path: Path) -> None:
    """Whatever a bad disk or cable does to a file, what is stored is as it was computed."""
    good = file.read_bytes()
    rng = random.Random(5)
    for i in range(30):
        data = bytearray(good)
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        file.write_bytes(data)
        there = tmp_path / f"there{i}"
        main(["import", str(file), "--dir", str(there)])
        if there.exists():
            assert not cold_problems(there)


def cold_problems(folder: Path) -> list[object]:
    reader = cold(folder)
    try:
        return list(reader.verify())
    finally:
        reader.close()


def test_an_import_that_is_killed_can_be_run_again(file: Path, tmp_path: Path) -> None:
    """kill -9 at any moment leaves whole blocks with their ancestors, and the rest for later."""
    there = tmp_path / "there"
    program = (
        "import os, signal, sys\n"
        "from tieredkv.tiers.cold import ColdTier\n"
        "from tieredkv.commands import importing\n"
        "from tieredkv.cli import main\n"
        "importing._BATCH_BYTES = 1\n"
        "adopt, left = ColdTier.adopt, [4]\n"
        "def counted(self, *args):\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return adopt(self, *args)\n"
        "ColdTier.adopt = counted\n"
        "main(['import', sys.argv[1], '--dir', sys.argv[2]])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file), str(there)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert n_blocks(there) == 3
    assert main(["import", str(file), "--dir", str(there)]) == 0
    assert n_blocks(there) == 10
    assert main(["verify", "--dir", str(there)]) == 0
