"""What a model is: a fingerprint of its files' content, not of its name or path.

Weights that differ must differ here, at a cost well below a second for 100 GB: small files are
hashed whole; of a large safetensors file the header and windows of every tensor are, and the
time of its last change, because an edit of a few rows may fall between the windows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from tieredkv.core import TieredKVError

# Files up to this size are hashed whole.
_WHOLE_FILE = 32 << 20

# Read from each tensor of a larger file: at its start, its end and evenly between.
_WINDOWS = 4
_WINDOW_BYTES = 1024

# A header larger than this is not one of a weight file.
_HEADER_LIMIT = 100 << 20

# What decides a model's function. The tokenizer doesn't: keys are token ids.
_PATTERNS = ("*.safetensors", "config.json", "adapter_config.json", "*.py")

_Stat = tuple[tuple[str, int, int, int, int], ...]


class IdentityChanged(TieredKVError):
    """The files of a model are no longer those that were loaded."""


def fingerprint(name: str) -> str:
    """Identity of a model or adapter by its name or path.

    ``hub:<repo>@<revision>``, ``dir:<digest>``, or ``name:<name>`` where no files are behind it.
    Reads files; any thread may call.

    Raises:
        OSError: a file can't be read.
        ValueError: a weight file's header is not JSON.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return "dir:" + _folder_digest(folder)
    revision = _hub_revision(name)
    return f"hub:{name}@{revision}" if revision else f"name:{name}"


def local_folder(name: str) -> Path | None:
    """Where the files of a model are: the folder itself, or that of a hub repository in the local
    cache; None if they are nowhere.
    """
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else _snapshot(name)


def _snapshot(name: str) -> Path | None:
    """Folder of a hub repository in the local cache, by the name of its commit."""
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that a repository can have
        return None
    return Path(found).parent if isinstance(found, str) else None


def _hub_revision(name: str) -> str | None:
    """Commit of a hub repository in the local cache."""
    folder = _snapshot(name)
    return folder.name if folder else None


def _files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)})


def _folder_digest(folder: Path) -> str:
    h = hashlib.blake2b(digest_size=16)
    for path in _files(folder):
        name = path.name.encode()
        status = path.stat()
        size, changed = status.st_size, status.st_mtime_ns if status.st_size > _WHOLE_FILE else 0
        h.update(len(name).to_bytes(4, "little") + name)
        h.update(size.to_bytes(8, "little") + changed.to_bytes(16, "little", signed=True))
        with path.open("rb") as file:
            for start, length in _windows(file.fileno(), path.suffix, size):
                h.update(os.pread(file.fileno(), length, start))
    return h.hexdigest()


def _windows(fd: int, suffix: str, size: int) -> Iterator[tuple[int, int]]:
    """Parts of a file to hash, as (offset, length)."""
    if size <= _WHOLE_FILE:
        yield 0, size
        return
    data = _header_end(fd, size) if suffix == ".safetensors" else None
    if data is None:
        yield from _spread(0, size, 4096)
        return
    yield 0, data
    header = json.loads(os.pread(fd, data - 8, 8))
    for name, tensor in sorted(header.items()):
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            yield from _spread(data + start, end - start, _WINDOWS)


def _header_end(fd: int, size: int) -> int | None:
    end = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    return end if end <= min(size, _HEADER_LIMIT) else None


def _spread(start: int, length: int, n: int) -> Iterator[tuple[int, int]]:
    if length <= n * _WINDOW_BYTES:
        yield start, length
        return
    for i in range(n):
        yield start + (length - _WINDOW_BYTES) * i // (n - 1), _WINDOW_BYTES


def _stat(name: str) -> _Stat:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return ((_hub_revision(name) or "", 0, 0, 0, 0),)
    stats = ((path.name, path.stat()) for path in _files(folder))
    # The status' time too: a file's own can be set back.
    return tuple((n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in stats)


class Fingerprints:
    """Fingerprints of the models in use, each taken once and bound to its files as they were.

    Not for concurrent calls.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Stat, str]] = {}

    def of(self, name: str) -> str:
        """Fingerprint of ``name``, from memory if its files are as they were then.

        Raises:
            IdentityChanged: they are not: whether the weights in memory are the old or the new
                ones can't be told until `renew` is called by who loaded them.
            OSError: a file can't be read.
        """
        stat = _stat(name)
        known = self._known.get(name)
        if known is None:
            return self.renew(name)
        if known[0] != stat:
            raise IdentityChanged(f"the files of {name} changed after they were loaded")
        return known[1]

    def renew(self, name: str) -> str:
        """Take the fingerprint of ``name`` anew, because it has just been loaded."""
        stat = _stat(name)
        found = fingerprint(name)
        self._known[name] = (stat, found)
        return found
