"""Which files hold a checkpoint's weights; and having the kernel read them before they are asked for. No torch.

Weights are read tensor by tensor, each packed before the next, so that a disk waits most of the time. What is asked for
ahead comes in large requests, many at a time, while libraries are imported and ranks meet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import msgspec
from msgspec import Struct

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PIECE = 2 << 20
"""Bytes. Of one request Linux takes no more than its device takes at once (mm/readahead.c, force_page_cache_ra)."""
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
