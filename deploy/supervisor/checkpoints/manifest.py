"""Names a model's files by what is in them: SHA-256 of each chunk, an identity for each file and for all together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.packing import NOT_DECODED

CHUNK_BYTES = 4 << 20
"""What is checked, and fetched again, as a whole."""
DIGEST_BYTES = 32
SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})
"""Of files that services read; others of the folder stay where they are."""
MAX_MANIFEST_BYTES = 64 << 20
"""Of a manifest as it is sent: enough for 8 TB."""
MAX_FILES = 10_000
HASH_THREADS = 4


class BadManifest(Exception):
    """What came as a manifest is none that could be used; the text says why."""


class CheckpointFile(Struct, frozen=True, array_like=True):
    """One file of a model."""

    name: str
    size: int
    digests: bytes
    """SHA-256 of each chunk, one behind the other."""

    @property
    def identity(self) -> str:
        """Hex SHA-256 over the size and all digests: whoever has a file of this identity has the same bytes."""
        return sha256(self.size.to_bytes(8, "little") + self.digests).hexdigest()

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.digests) // DIGEST_BYTES

    def digest(self, chunk: int) -> bytes:
        """SHA-256 of a chunk, by its index from 0."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def chunk_size(self, chunk: int) -> int:
        """Bytes of a chunk; the last is shorter."""
        return min(CHUNK_BYTES, self.size - chunk * CHUNK_BYTES)


class CheckpointManifest(Struct, frozen=True, array_like=True):
    """All files of a model, in the order of their names."""

    files: tuple[CheckpointFile, ...]

    @property
    def identity(self) -> str:
        """Hex SHA-256 over names and identities of all files."""
        return sha256(b"".join(f"{each.name}\0{each.identity}\n".encode() for each in self.files)).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files)

    def encoded(self) -> bytes:
        """As it is sent and kept."""
        return msgspec.msgpack.encode(self)


def read_manifest(data: bytes) -> CheckpointManifest:
    """Raises BadManifest: a name must be one of a file of the folder itself, digests those of all its chunks."""
    try:
        manifest = msgspec.msgpack.decode(data, type=CheckpointManifest)
    except NOT_DECODED as error:
        raise BadManifest(f"no manifest: {error}") from None
    names = [each.name for each in manifest.files]
    if not 0 < len(names) <= MAX_FILES or len(set(names)) != len(names):
        raise BadManifest(f"{len(names)} files, of {len(set(names))} names")
    for each in manifest.files:
        if not _is_wanted(each.name) or "/" in each.name or "\0" in each.name:
            raise BadManifest(f"file {each.name[:80]!r}: no name of a model's file")
        if each.size < 0 or len(each.digests) != -(-each.size // CHUNK_BYTES) * DIGEST_BYTES:
            raise BadManifest(f"file {each.name}: {len(each.digests)} bytes of digests for {each.size} bytes")
    return manifest


def _is_wanted(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix in SUFFIXES


def model_files_of(folder: Path, *, weights: bool) -> list[Path]:
    """The files that belong to a model, in the order of their names. Raises OSError."""
    found = [path for path in folder.iterdir() if _is_wanted(path.name) and path.is_file()]
    return sorted(path for path in found if weights or path.suffix != ".safetensors")


def chunk_digests(path: Path, size: int) -> Iterator[bytes]:
    """SHA-256 of each chunk of a file, read by several threads. Raises OSError; a file that is shorter than `size` has
    other digests."""
    file = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="digests") as threads:
            yield from threads.map(
                lambda at: sha256(os.pread(file, min(CHUNK_BYTES, size - at), at)).digest(), range(0, size, CHUNK_BYTES)
            )
    finally:
        os.close(file)


class _KeptManifest(Struct, frozen=True, array_like=True):
    stamps: Mapping[str, tuple[int, int, int]]
    """Of each file, by name: size, time of its last change in nanoseconds, inode."""
    manifest: bytes


def manifest_of(folder: Path, keep: Path, *, weights: bool) -> CheckpointManifest:
    """The manifest of a model's folder. It is kept in the file `keep`, so that an unchanged folder is not read again.
    Raises OSError."""
    paths = model_files_of(folder, weights=weights)
    stamps = _stamps(paths)
    try:
        kept = msgspec.msgpack.decode(keep.read_bytes(), type=_KeptManifest)
        if kept.stamps == stamps:
            return read_manifest(kept.manifest)
    except (*NOT_DECODED, OSError, BadManifest):
        pass  # made anew
    files = tuple(
        CheckpointFile(path.name, stamps[path.name][0], b"".join(chunk_digests(path, stamps[path.name][0])))
        for path in paths
    )
    manifest = CheckpointManifest(files)
    keep_manifest(folder, manifest, keep)
    return manifest


def keep_manifest(folder: Path, manifest: CheckpointManifest, keep: Path) -> None:
    """Writes down that the files of `folder`, as they are now, are those of `manifest`. Raises OSError."""
    kept = _KeptManifest(_stamps([folder / each.name for each in manifest.files]), manifest.encoded())
    replace_file(keep, msgspec.msgpack.encode(kept))


def _stamps(paths: list[Path]) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in paths:
        is_now = path.stat()
        found[path.name] = (is_now.st_size, is_now.st_mtime_ns, is_now.st_ino)
    return found


def replace_file(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


Progress = Callable[[str], None]
"""Is told, in words for people, how far something has come."""
