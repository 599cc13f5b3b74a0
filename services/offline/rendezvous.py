"""Where the ranks of an engine in this process meet: a file among the temporary ones. Its last rank removes it, or this
process as it ends; what one that is killed leaves, the next one removes."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import tempfile
from pathlib import Path

from shared.addresses import rendezvous_file

_OWNER = re.compile(r"baton-(?P<namespace>\d+)-(?P<pid>\d+)-.*")


def new_rendezvous(folder: Path | None = None) -> str:
    """The address of a file of this process that does not exist yet; removes those of processes that are gone.
    `folder`: None: the system's for temporary files."""
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    namespace = _pid_namespace()
    for path in folder.glob(f"baton-{namespace}-*"):
        found = _OWNER.fullmatch(path.name)
        if found is not None and not _is_alive(int(found["pid"])):
            _remove(path)
    address = rendezvous_file(folder, f"baton-{namespace}-{os.getpid()}")
    atexit.register(_remove, Path(address.removeprefix("file://")))
    return address


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, or none
        path.unlink()


def _pid_namespace() -> int:
    """In which a process's number means anything: containers may share a folder. 0 where there is only one."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True
