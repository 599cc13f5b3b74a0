"""Links and disks of chaos's own: changed in namespaces that no other process is in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deploy.chaos.namespaces import namespaces_command

INSIDE = """
import pathlib, socket, sys, tempfile
from deploy.chaos.namespaces import mount_small_disk, set_link, unmount

def reachable(server):
    with socket.socket() as client:
        client.settimeout(5)
        return client.connect_ex(server.getsockname()) == 0

set_link(True)
with socket.create_server(("127.0.0.1", 0)) as server:
    seen = [reachable(server)]
    set_link(False)
    seen.append(reachable(server))
    set_link(True)
    seen.append(reachable(server))
with tempfile.TemporaryDirectory() as folder:
    disk = pathlib.Path(folder)
    mount_small_disk(disk, "64k")
    try:
        (disk / "file").write_bytes(bytes(2**20))
    except OSError as error:
        seen.append(error.errno)
    unmount(disk)
print(seen)
"""


def test_a_link_goes_down_and_a_disk_is_small_for_who_is_inside() -> None:
    way = namespaces_command()
    if way is None:
        pytest.skip("namespaces are not permitted here")
    done = subprocess.run([*way, sys.executable, "-c", INSIDE], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[True, False, True, 28]", done.stderr
