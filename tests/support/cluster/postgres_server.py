"""A real Postgres on a free loopback port, for tests, where Debian's package or another is installed."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.cluster.ports import free_port

POSTGRES = shutil.which("postgres")
USER = "postgres"


@contextlib.contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """Yields the URL of an empty database. `folder` must not be there; its parents may be entered by everybody."""
    programs = Path(os.path.realpath(POSTGRES or "")).parent
    # Postgres refuses to run as root.
    user = pwd.getpwnam(USER).pw_name if os.geteuid() == 0 else None
    folder.mkdir(mode=0o700)
    if user is not None:
        shutil.chown(folder, user)
    port = free_port()

    def run(*command: str) -> None:
        subprocess.run(command, check=True, user=user, cwd=folder, capture_output=True, timeout=120)

    run(str(programs / "initdb"), "--no-sync", "-A", "trust", "-U", USER, "-D", str(folder / "data"))
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
    control = str(programs / "pg_ctl")
    run(control, "-D", str(folder / "data"), "-l", str(folder / "log"), "-o", options, "-w", "start")
    try:
        yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
    finally:
        run(control, "-D", str(folder / "data"), "-m", "immediate", "-w", "stop")
