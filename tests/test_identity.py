"""Identity: other weights are another model, whatever they are called."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tieredkv import identity
from tieredkv.identity import Fingerprints, IdentityChanged, fingerprint


def model(folder: Path, *, large: bool = False) -> Path:
    folder.mkdir()
    n = (identity._WHOLE_FILE // 4 + 100_000) // 8 if large else 100
    weights = {f"layer.{i}": np.full(n, i, np.float32) for i in range(8)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def retrain(folder: Path, name: str = "layer.3") -> None:
    """Change one tensor in place: same name, same size, same header."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8:end])[name]["data_offsets"]
    changed = np.frombuffer(raw[end + start : end + stop], np.float32) + 1
    with path.open("r+b") as f:
        f.seek(end + start)
        f.write(changed.tobytes())


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_one_tensor_retrained_in_place_is_another_model(tmp_path: Path, large: bool) -> None:
    """Same path, same sizes, same header: only the bytes tell that old state is wrong now."""
    folder = model(tmp_path / "m", large=large)
    before = fingerprint(str(folder))
    retrain(folder)
    assert fingerprint(str(folder)) != before


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    """Moving a model would lose everything stored for it."""
    folder = model(tmp_path / "m")
    shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(str(folder)) == fingerprint(str(tmp_path / "copy"))


def test_another_config_is_another_model(tmp_path: Path) -> None:
    """The same weights under another rope scaling compute another state."""
    folder = model(tmp_path / "m")
    before = fingerprint(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1}))
    assert fingerprint(str(folder)) != before


def test_a_few_values_changed_in_a_large_file_are_another_model(tmp_path: Path) -> None:
    """An edit of a few rows can fall between the windows that are read."""
    folder = model(tmp_path / "m", large=True)
    before = fingerprint(str(folder))
    with (folder / "model.safetensors").open("r+b") as f:
        f.seek(2_000_003)
        f.write(b"x")
    assert fingerprint(str(folder)) != before


def test_little_of_a_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing 100 GB at every start would take minutes."""
    folder = model(tmp_path / "m", large=True)
    read = 0
    pread = os.pread

    def counting(fd: int, n: int, offset: int) -> bytes:
        nonlocal read
        read += n
        return pread(fd, n, offset)

    monkeypatch.setattr(os, "pread", counting)
    fingerprint(str(folder))
    assert read < (folder / "model.safetensors").stat().st_size / 100


def test_a_hub_model_is_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot never changes: its commit is its identity, and a new one is another model."""
    cache = tmp_path / "hub"
    repo = cache / "models--org--name"
    for commit in ("a" * 40, "b" * 40):
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    find = identity.try_to_load_from_cache
    monkeypatch.setattr(
        identity, "try_to_load_from_cache", lambda n, f: find(n, f, cache_dir=cache)
    )
    first = fingerprint("org/name")
    (repo / "refs" / "main").write_text("b" * 40)
    assert first == "hub:org/name@" + "a" * 40
    assert fingerprint("org/name") == "hub:org/name@" + "b" * 40


@pytest.mark.parametrize(
    "name", ["test", "org/absent", "/no/such/folder", "a b", "x/y/z", "~nobody"]
)
def test_a_name_without_files_is_itself(name: str) -> None:
    """Tests and callers with keys of their own have no files to look at."""
    assert fingerprint(name) == f"name:{name}"


def test_files_that_change_under_a_loaded_model_are_noticed(tmp_path: Path) -> None:
    """State of the weights in memory must not be stored under the new files' identity."""
    folder = model(tmp_path / "m")
    prints = Fingerprints()
    before = prints.of(str(folder))
    status = (folder / "model.safetensors").stat()
    times = (status.st_atime_ns, status.st_mtime_ns)
    retrain(folder)
    with pytest.raises(IdentityChanged):
        prints.of(str(folder))
    os.utime(folder / "model.safetensors", ns=times)
    with pytest.raises(IdentityChanged):
        prints.of(str(folder))
    assert prints.renew(str(folder)) != before
    assert prints.of(str(folder)) != before
