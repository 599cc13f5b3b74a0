"""Which files hold a checkpoint's weights; and having the kernel read them before they are asked for. No torch.

Weights are read tensor by tensor, each packed before the next, so that a disk waits most of the time. What is asked for
ahead comes in large requests, many at a time, while libraries are imported and ranks meet.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import msgspec
from msgspec import Struct

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PIECE = 2 << 20
"""Bytes. Of one request Linux takes no more than its device takes at once (mm/readahead.c, force_page_cache_ra)."""
_LENGTH_BYTES = 8
_MAX_HEADER = 100 << 20
"""Bytes that the safetensors library reads of a header."""
_MEMINFO = Path("/proc/meminfo")


class _Index(Struct):
    weight_map: dict[str, str]


def weight_files(model_dir: Path) -> list[Path]:
    """The directory's safetensors files, one or many; none where it has none. Raises OSError, msgspec.MsgspecError;
    the latter for an index that names files elsewhere, too."""
    index = model_dir / INDEX
    if index.exists():
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise msgspec.ValidationError(f"weight_map: {name!r} lies outside of the model's directory")
        return [model_dir / name for name in sorted(set(names))]
    return [model_dir / SINGLE] if (model_dir / SINGLE).exists() else []


def has_head_tensor(model_dir: Path) -> bool | None:
    """Whether the directory's safetensors have a tensor of a language model's head, by their names alone; None where
    there are no such files, or they are not as they should be, which is for those to say who read them."""
    try:
        names = _tensor_names(model_dir)
    except (OSError, msgspec.MsgspecError):
        return None
    return any("lm_head" in name.split(".") for name in names) if names else None


def _tensor_names(model_dir: Path) -> Iterable[str]:
    if (index := model_dir / INDEX).exists():
        return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    with (model_dir / SINGLE).open("rb") as file:
        size = min(int.from_bytes(file.read(_LENGTH_BYTES), "little"), _MAX_HEADER)
        return msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])


@contextmanager
def read_ahead(model_dir: Path) -> Iterator[None]:
    """While the context is open the kernel is asked to read the weights into its page cache, as far as half of the
    available memory goes. Best effort: what cannot be read is whoever's that needs it."""
    stop = Event()
    thread = Thread(target=_ask, args=(model_dir, stop), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _ask(model_dir: Path, stop: Event) -> None:
    with suppress(OSError, msgspec.MsgspecError):
        left = _available() // 2
        for path in weight_files(model_dir):
            with path.open("rb") as file:
                size = min(left, os.fstat(file.fileno()).st_size)
                for at in range(0, size, _PIECE):
                    if stop.is_set():
                        return
                    os.posix_fadvise(file.fileno(), at, min(_PIECE, size - at), os.POSIX_FADV_WILLNEED)
            left -= size


def _available() -> int:
    """Bytes of memory that could be had; 0 where the system does not say, or cannot be asked to read ahead."""
    if not hasattr(os, "posix_fadvise") or not _MEMINFO.exists():
        return 0
    line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
