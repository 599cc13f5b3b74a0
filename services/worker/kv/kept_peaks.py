"""Remembers how much memory a step took, so that the next start of the same engine need not try it out again.

Kept for each user, by everything that the figure depends on: what is computed, by which code, with which libraries, on
which machine. Best effort: where nothing can be kept it is measured, as it is where anything of the key is another.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from shared.config import cache_folder
from shared.private_files import replace_private

MAX_KEPT = 128
"""Figures; the oldest go first."""
_MAX_BYTES = 1 << 50
_CODE = Path(__file__).parents[1]
_CPU_INFO = Path("/proc/cpuinfo")


def kept_peak(parts: tuple[object, ...], measure: Callable[[], int]) -> int:
    """The bytes that `measure` found with the same `parts` before, by this code on this kind of machine; else what it
    finds now. `parts` are told apart by their texts."""
    key = key_of(parts)
    with suppress(OSError, ValueError):
        found = int((cache_folder("profiles") / key).read_text())
        if 0 < found < _MAX_BYTES:
            return found
    found = measure()
    with suppress(OSError):
        folder = cache_folder("profiles")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_private(folder / key, str(found).encode())
        forget_oldest(folder, MAX_KEPT)
    return found


def forget_oldest(folder: Path, most: int) -> None:
    """Removes all files of such a folder but the newest ones. Raises OSError, as where another process does the
    same."""
    for old in sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime)[:-most]:
        old.unlink(missing_ok=True)


def key_of(parts: tuple[object, ...]) -> str:
    """Names the texts of `parts`, and with them the worker's code, its libraries and the machine."""
    libraries = torch.__version__, torch.get_num_threads(), platform.python_version(), platform.machine(), _processor()
    return sha256(repr((_code(), libraries, tuple(map(str, parts)))).encode()).hexdigest()[:32]


@cache
def _code() -> list[tuple[str, int, int]]:
    """Changes with every change of the worker's own code: what it is where this process first asks."""
    found = []
    for path in sorted(each for each in _CODE.rglob("*") if each.suffix in (".py", ".cpp", ".h")):
        is_now = path.stat()
        found.append((str(path), is_now.st_size, is_now.st_mtime_ns))
    return found


def _processor() -> str:
    """Its name and its instructions, as Linux has them; others say nothing."""
    with suppress(OSError):
        lines = _CPU_INFO.read_text().splitlines()
        return "".join(next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags"))
    return ""
