"""Two KV stores in two network namespaces with a wire between them: run inside a new namespace by the test.

    unshare --net python -m tests.support.cluster.stores_in_two_namespaces FOLDER

The bus and one store are in this namespace, the other store is in another. What was found goes to standard output.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.support.cluster.nats_server import BINARY
from tests.support.kv.arenas import chain
from tests.support.kv.store_process import StoreProcess, clients, know_each_other

HERE, THERE = "10.77.0.1", "10.77.0.2"
PORT = 4222
URL = f"nats://{HERE}:{PORT}"


def unshare() -> list[str]:
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]


def why_no_namespaces() -> str | None:
    """None where this process may make network namespaces and wires between them."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    wire = ["ip", "link", "add", "here", "type", "veth", "peer", "name", "there"]
    tried = subprocess.run([*unshare(), *wire], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"network namespaces are not permitted here: {tried.stderr.strip()}"


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def another_namespace() -> subprocess.Popen[bytes]:
    """A process in a namespace of its own, wired to this one; entered by its number."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "300"])
    ours = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + 60
    while os.readlink(f"/proc/{holder.pid}/ns/net") == ours and time.monotonic() < deadline:
        time.sleep(0.01)
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(holder.pid))
    run("ip", "addr", "add", f"{HERE}/24", "dev", "here")
    run("ip", "link", "set", "here", "up")
    for command in ("ip link set lo up", f"ip addr add {THERE}/24 dev there", "ip link set there up"):
        run(*inside(holder), *command.split())
    return holder


def inside(holder: subprocess.Popen[bytes]) -> list[str]:
    return ["nsenter", "--target", str(holder.pid), "--net"]


async def exchange(holder: subprocess.Popen[bytes]) -> None:
    near = StoreProcess(URL, "near", "--transfer-port", "7700", "--transfer-host", HERE, "--insecure")
    far = StoreProcess(
        URL, "far", "--transfer-port", "7700", "--transfer-host", THERE, "--insecure", inside=inside(holder)
    )
    async with clients(URL, near, far) as (at_near, at_far):
        await know_each_other(at_near, at_far)
        for saves, pulls, source in ((at_near, at_far, near), (at_far, at_near, far)):
            names = chain(f"to be pulled from {source.node}", 6)
            await saves.save(names)
            print("pulled", *await pulls.found(names, source=source))


def main() -> None:
    holder = another_namespace()
    bus = subprocess.Popen([str(BINARY), "-a", HERE, "-p", str(PORT)], cwd=Path(sys.argv[1]), stderr=subprocess.DEVNULL)
    try:
        asyncio.run(exchange(holder))
    finally:
        bus.kill()
        holder.kill()


if __name__ == "__main__":
    main()
