"""Files that only their owner may read: prompts, answers, keys and passwords stand in journals, logs and state."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700


def private_opener(path: str | os.PathLike[str], flags: int) -> int:
    """For `open(path, mode, opener=private_opener)`: a new file is its owner's alone from its first byte on, whatever
    the umask, and an older one of ours becomes so. What is no regular file, such as a terminal, stays as it is. Raises
    OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != PRIVATE_FILE:
        os.fchmod(descriptor, PRIVATE_FILE)
    return descriptor


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read, from its first byte on. Raises OSError."""
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=private_opener) as file:
        file.write(content)


def replace_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read as a whole: whoever reads it finds the former content or this one,
    and several processes may do so at once. Raises OSError."""
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(new, path)
    except OSError:
        Path(new).unlink(missing_ok=True)
        raise
