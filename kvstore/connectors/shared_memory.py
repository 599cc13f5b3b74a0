"""A connector that keeps blocks as files in shared memory, named by their tokens' hashes: plain, and of any engine.

One folder for each layout and rank; one file for each block: a checksum, then every layer's keys and values. The
engines that name one folder share what lies there. It is bounded: the least recently used files go first.

    --kv-connector shared-memory --kv-connector-extra-config '{"directory": "/dev/shm/kv", "size": "4GiB"}'
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.connectors.interface import (
    CacheLayout,
    ConnectorConfig,
    ConnectorRequest,
    KVConnectorBase,
    LayerCache,
)
from shared.settings import parse_bytes

CHECKSUM_BYTES = 16
DEFAULT_SIZE = "1GiB"
KEPT_SHARE = 0.9
"""Of the bound, once files are removed, so that not every save removes some."""
OPTIONS = {"directory", "layerwise", "size"}


class _HalfCache(NamedTuple):
    """One layer's keys or values in main memory. Plain memory, as the scheduler's image has no numpy."""

    memory: memoryview
    block_bytes: int

    def block(self, number: int) -> memoryview:
        """The block's bytes, to be read and written."""
        return self.memory[number * self.block_bytes : (number + 1) * self.block_bytes]


class SharedMemoryConnector(KVConnectorBase):
    """See the module. The scheduler's half looks for files, and the ranks' halves read and write them."""

    def __init__(self, config: ConnectorConfig) -> None:
        """Raises ValueError for options that it does not know or cannot use."""
        super().__init__(config)
        extra = config.extra
        if unknown := sorted(extra.keys() - OPTIONS):
            raise ValueError(f"{', '.join(unknown)}: not known; there are {', '.join(sorted(OPTIONS))}")
        self._folder = Path(str(extra.get("directory", "")))
        if not self._folder.is_absolute():
            raise ValueError('directory: an absolute path is expected, such as {"directory": "/dev/shm/kv"}')
        self._layerwise = extra.get("layerwise", False)
        if not isinstance(self._layerwise, bool):
            raise ValueError(f"layerwise = {self._layerwise!r}: true or false is expected")
        self._block_size = config.block_size
        self._size = parse_bytes(str(extra.get("size", DEFAULT_SIZE)))
        self._blocks: _BlockFolder | None = None
        self._layers: list[str] = []
        self._caches: dict[str, tuple[_HalfCache, _HalfCache]] = {}
        self._making: list[_MakingFile] = []
        self._loading: list[_LoadingFile] = []
        self._errors: set[int] = set()

    # ---- the scheduler's half

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int:
        """The leading blocks that every rank has saved."""
        folders = [self._folder_of(request.layout, rank) for rank in range(request.layout.world_size)]
        found = 0
        for name in request.block_hashes[num_computed_tokens // self._block_size :]:
            if not all((folder / name.hex()).exists() for folder in folders):
                break
            found += 1
        return found * self._block_size

    # ---- a rank's half

    @property
    def layerwise(self) -> bool:
        """As `layerwise` in the configuration says."""
        return bool(self._layerwise)

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache], layout: CacheLayout) -> None:
        """Raises ValueError for caches that are not in main memory, OSError where the folder cannot be made."""
        assert self.config.rank is not None, "only ranks have caches"
        self._layers = list(kv_caches)
        self._caches = {name: (_half_of(keys), _half_of(values)) for name, (keys, values) in kv_caches.items()}
        folder = self._folder_of(layout, self.config.rank)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._blocks = _BlockFolder(folder, self._size // layout.world_size)

    def start_load_kv(self) -> None:
        """Finds every block's file. What is missing or spoilt is reported by `get_block_ids_with_load_errors`."""
        assert self.step is not None
        assert self._blocks is not None
        size = sum(half.block_bytes for halves in self._caches.values() for half in halves)
        self._loading = []
        for run in self.step.loads:
            for block, name in zip(run.block_ids, run.hashes, strict=True):
                file = _LoadingFile(self._blocks.path(name.hex()), block)
                if self._blocks.touch(name.hex()) and file.holds(size):
                    self._loading.append(file)
                else:
                    self._errors.add(block)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Reads the layer of every block. Behind the last one it is known which blocks are what was written."""
        loading = []
        for file in self._loading:
            if all(file.read(half.block(file.block)) for half in self._caches[layer_name]):
                loading.append(file)
            else:
                self._errors.add(file.block)
        self._loading = loading
        if layer_name == self._layers[-1]:
            self._errors |= {file.block for file in loading if not file.finish()}
            self._loading = []

    def save_kv_layer(self, layer_name: str, kv_layer: LayerCache) -> None:
        """Writes the layer of every block behind that of the layer before. Raises OSError."""
        assert self.step is not None
        assert self._blocks is not None
        if layer_name == self._layers[0]:
            self._drop_making()
            for run in self.step.saves:
                for block, name in zip(run.block_ids, run.hashes, strict=True):
                    if not self._blocks.touch(name.hex()):
                        self._making.append(_MakingFile(self._blocks.path(name.hex()), block))
        for file in self._making:
            for half in self._caches[layer_name]:
                file.write(half.block(file.block))

    def wait_for_save(self) -> None:
        """Gives each file its name: from here on others find it. Raises OSError."""
        assert self._blocks is not None
        making, self._making = self._making, []
        for file in making:
            self._blocks.add(file)
        self._blocks.make_room()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Those since the last call."""
        errors, self._errors = self._errors, set()
        return errors

    def clear_connector_metadata(self) -> None:
        """Lets go of what was not saved to its end."""
        super().clear_connector_metadata()
        self._drop_making()

    def _drop_making(self) -> None:
        making, self._making = self._making, []
        for file in making:
            file.drop()

    def _folder_of(self, layout: CacheLayout, rank: int) -> Path:
        return self._folder / layout.name / str(rank)


class _MakingFile:
    """A block's file that is not whole yet. It has no name that others look for."""

    def __init__(self, path: Path, block: int) -> None:
        """Raises OSError."""
        self.path, self.block = path, block
        self.making = path.with_name(f"{path.name}.{os.getpid()}.making")
        self._file = self.making.open("wb")
        self._sum = blake2b(digest_size=CHECKSUM_BYTES)
        self.size = CHECKSUM_BYTES
        self._file.write(bytes(CHECKSUM_BYTES))

    def write(self, cells: memoryview) -> None:
        """Adds the bytes of a layer. Raises OSError."""
        self._sum.update(cells)
        self._file.write(cells)
        self.size += cells.nbytes

    def finish(self) -> None:
        """Writes the checksum and gives the file its name. Raises OSError."""
        with self._file:
            self._file.seek(0)
            self._file.write(self._sum.digest())
        self.making.replace(self.path)

    def drop(self) -> None:
        """Removes it."""
        with contextlib.suppress(OSError):
            self._file.close()
        self.making.unlink(missing_ok=True)


class _LoadingFile:
    """A block's file that is read layer by layer. It is opened for each, as a long prompt has more blocks than a
    process may have files."""

    def __init__(self, path: Path, block: int) -> None:
        self.path, self.block = path, block
        self._sum = blake2b(digest_size=CHECKSUM_BYTES)
        self._offset = CHECKSUM_BYTES

    def holds(self, size: int) -> bool:
        """Whether it is there, with so many bytes of keys and values."""
        try:
            return self.path.stat().st_size == CHECKSUM_BYTES + size
        except OSError:
            return False

    def read(self, cells: memoryview) -> bool:
        """Fills `cells` with the bytes that come next; whether it could."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._offset)
                whole = file.readinto(cells) == cells.nbytes
        except OSError:
            return False
        self._sum.update(cells)
        self._offset += cells.nbytes
        return whole

    def finish(self) -> bool:
        """Whether all that was read is what was written. A file that is not is removed."""
        try:
            with self.path.open("rb", buffering=0) as file:
                whole = file.read(CHECKSUM_BYTES) == self._sum.digest()
        except OSError:
            return False
        if not whole:
            self.path.unlink(missing_ok=True)
        return whole


class _BlockFolder:
    """Owns the files of one rank, beside other engines' same rank, and the bound on their size."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._used = self._measured()

    def path(self, name: str) -> Path:
        """Where the block's file is, or would be."""
        return self._folder / name

    def touch(self, name: str) -> bool:
        """Whether the block is there; it counts as used just now."""
        try:
            os.utime(self.path(name))
        except OSError:
            return False
        return True

    def add(self, file: _MakingFile) -> None:
        """Lets others find the block. Raises OSError."""
        file.finish()
        self._used += file.size

    def make_room(self) -> None:
        """Removes the least recently used files where all together are too large; other engines' are counted, too."""
        if self._used <= self._limit:
            return
        self._used = self._measured()
        if self._used <= self._limit:
            return
        for _, size, path in sorted(self._files()):
            if self._used <= self._limit * KEPT_SHARE:
                return
            path.unlink(missing_ok=True)
            self._used -= size

    def _measured(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of each; what nobody has been making for a minute is removed."""
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):
                seen = entry.stat()
                if entry.name.endswith(".making") and time.time() - seen.st_mtime > 60:
                    os.unlink(entry.path)
                    continue
                found.append((seen.st_mtime, seen.st_size, Path(entry.path)))
        return found


def _half_of(cache: Any) -> _HalfCache:
    """The same memory as the tensor's. Raises ValueError for one that is not in main memory."""
    if cache.device.type != "cpu":
        raise ValueError(f"blocks on {cache.device} cannot be mapped: this connector serves CPUs")
    memory = memoryview((ctypes.c_uint8 * cache.nbytes).from_address(cache.data_ptr())).cast("B")
    return _HalfCache(memory, cache.nbytes // cache.shape[0])
