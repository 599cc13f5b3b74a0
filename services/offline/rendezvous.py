"""Where the ranks of an engine in this process meet: a file among the temporary ones. Its last rank removes it, or this
process as it ends; what one that is killed leaves, the next one removes."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import socket
import tempfile
from pathlib import Path

from shared.addresses import rendezvous_file

_OWNER = re.compile(r"baton-[0-9a-f]+-(?P<pid>\d+)-.*")


def new_rendezvous(folder: Path | None = None) -> str:
    """The address of a file of this process that does not exist yet; removes those that processes of this user left,
    which are gone.
    `folder`: None: the system's for temporary files."""
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    here = _process_numbers()
    for path in folder.glob(f"baton-{here}-*"):
        found = _OWNER.fullmatch(path.name)
        if found is not None and not _is_alive(int(found["pid"])) and _is_own(path):
            _remove(path)
    address = rendezvous_file(folder, f"baton-{here}-{os.getpid()}")
    atexit.register(_remove, Path(address.removeprefix("file://")))
    return address


def _is_own(path: Path) -> bool:
    """Whether it is this user's: root could remove anybody's."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:  # gone meanwhile
        return False
    except AttributeError:  # Windows' files have no user of this kind
        return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, or none
        path.unlink()


def _process_numbers() -> str:
    """Names whose process numbers this process sees: containers may share the folder, and so may hosts, the first PID
    namespace of each of which has the same number."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # this system has only one
        namespace = 0
    return hashlib.blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=6).hexdigest()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True
