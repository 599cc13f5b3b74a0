"""How much of a link between two hosts the stores use, and how much of a hand-over hides behind its prefill.

    unshare --net python -m tests.benchmarks.transfer_links --rates 1 10 --json links.json      # as root

Two KV stores in two network namespaces with a wire between them, whose rate `tc tbf` limits. For each rate: the same
bytes over a plain TCP connection, which is what the link has; blocks that one store fetches of the other; and prompts
whose blocks are committed chunk by chunk, with a prefetch and without: what is left to wait for after the last chunk.
Rounds of all alternate, so that other work on the machine strikes them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shared.blocks import BlockHash
from shared.messages.kvstore import KvLayout
from tests.support.cluster.nats_server import BINARY
from tests.support.cluster.stores_in_two_namespaces import HERE, THERE, URL, another_namespace, inside, run
from tests.support.kv.arenas import chain
from tests.support.kv.store_process import StoreClient, StoreProcess, clients, know_each_other

PORT, RAW_PORT, TRANSFER_PORT = 4222, 7800, 7700
LAYOUT = KvLayout(model="links", dtype="bfloat16", layers=32, kv_heads=8, head_dim=128)
"""Blocks of 2 MiB, as of Llama 3.1 8B."""
BLOCK_BYTES = 2 * 2**20
TOKENS_OF_BLOCK = 16
MEBIBYTE = 2**20
GIGABIT = 125_000_000
BURST = "4mb"

SEND = """
import socket, sys
listening = socket.create_server((sys.argv[1], int(sys.argv[2])))
data = bytes(2**20)
print("ready", flush=True)
while True:
    connection, _ = listening.accept()
    with connection:
        for _ in range(int.from_bytes(connection.recv(8))):
            connection.sendall(data)
"""


class Rounds(NamedTuple):
    """Seconds of every round of one kind."""

    plain: list[float]
    fetched: list[float]
    whole: list[float]
    """From the last commit until all blocks are there, when they are fetched then."""
    pipelined: list[float]
    """The same where they were prefetched as they were committed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 10.0], help="Gbit/s; 0: no limit")
    parser.add_argument("--blocks", type=int, default=64, help="of 2 MiB each; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=8, help="of a prompt; default: %(default)s")
    parser.add_argument("--prefill", type=float, default=4000.0, help="tokens/s that commits follow")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-links-") as folder, namespaces(folder) as holder:
        results = asyncio.run(measure(given, holder))
    print("| link | plain TCP | fetched | of the link | tokens/s | whole prompt, then fetched | pipelined |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for rate, rounds in results.items():
        print(row(rate, rounds, given.blocks))
    if given.json:
        given.json.write_text(json.dumps({str(rate): rounds._asdict() for rate, rounds in results.items()}))


def row(rate: float, rounds: Rounds, blocks: int) -> str:
    plain, fetched, whole, pipelined = (statistics.median(seconds) for seconds in rounds)
    sent = blocks * BLOCK_BYTES
    link = rate * GIGABIT if rate else sent / plain
    cells = (
        f"{rate:g} Gbit/s" if rate else "no limit",
        f"{sent / plain / MEBIBYTE:.0f} MiB/s",
        f"{sent / fetched / MEBIBYTE:.0f} MiB/s",
        f"{sent / fetched / link:.0%}",
        f"{blocks * TOKENS_OF_BLOCK / fetched:,.0f}",
        f"{whole * 1e3:.0f} ms",
        f"{pipelined * 1e3:.0f} ms",
    )
    return f"| {' | '.join(cells)} |"


@contextlib.contextmanager
def namespaces(folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """The other namespace, with the bus in this one and a sender of plain bytes in that one."""
    holder = another_namespace()
    bus = subprocess.Popen([str(BINARY), "-a", HERE, "-p", str(PORT)], cwd=folder, stderr=subprocess.DEVNULL)
    sender = subprocess.Popen(
        [*inside(holder), sys.executable, "-c", SEND, THERE, str(RAW_PORT)], stdout=subprocess.PIPE
    )
    try:
        assert sender.stdout is not None
        sender.stdout.readline()
        yield holder
    finally:
        for process in (sender, bus, holder):
            process.kill()
            process.wait()


def limit(holder: subprocess.Popen[bytes], rate: float) -> None:
    """What the other namespace sends passes a token bucket of so many Gbit/s."""
    subprocess.run([*inside(holder), "tc", "qdisc", "del", "dev", "there", "root"], capture_output=True)
    if rate:
        bucket = f"tc qdisc add dev there root tbf rate {rate:g}gbit burst {BURST} latency 50ms"
        run(*inside(holder), *bucket.split())


async def measure(given: argparse.Namespace, holder: subprocess.Popen[bytes]) -> dict[float, Rounds]:
    memory = 4 * given.blocks * BLOCK_BYTES
    port = ("--transfer-port", str(TRANSFER_PORT), "--insecure", "--transfer-host")
    near = StoreProcess(URL, "near", *port, HERE, memory=memory)
    far = StoreProcess(URL, "far", *port, THERE, memory=memory, inside=inside(holder))
    results = {}
    async with clients(URL, near, far, layout=LAYOUT) as (at_near, at_far):
        await know_each_other(at_near, at_far)
        for rate in given.rates:
            limit(holder, rate)
            rounds = Rounds([], [], [], [])
            for number in range(given.rounds + 1):  # the first one takes memory, and counts for nothing
                one = await a_round(given, (rate, number), far, at_near, at_far)
                if number:
                    for seconds, measured in zip(rounds, one, strict=True):
                        seconds.append(measured)
            results[rate] = rounds
    return results


async def a_round(
    given: argparse.Namespace, label: tuple[float, int], far: StoreProcess, at_near: StoreClient, at_far: StoreClient
) -> tuple[float, float, float, float]:
    plain = await asyncio.to_thread(plain_seconds, given.blocks * BLOCK_BYTES // MEBIBYTE)
    names = chain((*label, "fetched"), given.blocks)
    await at_far.save(names)
    begin = time.perf_counter()
    await all_there(at_near, names, far)
    fetched = time.perf_counter() - begin
    whole = await after_prefill(given, (*label, "whole"), far, at_near, at_far, ahead=False)
    pipelined = await after_prefill(given, (*label, "pipelined"), far, at_near, at_far, ahead=True)
    return plain, fetched, whole, pipelined


async def after_prefill(
    given: argparse.Namespace,
    label: object,
    far: StoreProcess,
    at_near: StoreClient,
    at_far: StoreClient,
    *,
    ahead: bool,
) -> float:
    """Seconds from the last commit of a prompt until all of it is at the other node."""
    names = chain(label, given.blocks)
    if ahead:
        await at_near.prefetch(names, source=far)
    size = max(1, given.blocks // given.chunks)
    start = time.perf_counter()
    for end in range(size, given.blocks + 1, size):
        await at_far.save(names[end - size : end])
        await asyncio.sleep(max(0.0, start + end * TOKENS_OF_BLOCK / given.prefill - time.perf_counter()))
    begin = time.perf_counter()
    await all_there(at_near, names, far)
    return time.perf_counter() - begin


async def all_there(client: StoreClient, names: list[BlockHash], source: StoreProcess) -> None:
    lease, found = await client.find_only(names, source=source)
    await client.release(lease)
    if len(found.slots) // 4 < len(names):
        raise SystemExit(f"{len(found.slots) // 4} of {len(names)} blocks came")


def plain_seconds(mebibytes: int) -> float:
    """So many bytes over a connection of their own, from the request to the last of them."""
    buffer = bytearray(MEBIBYTE)
    with socket.create_connection((THERE, RAW_PORT)) as connection:
        begin, left = time.perf_counter(), mebibytes * MEBIBYTE
        connection.sendall(mebibytes.to_bytes(8))
        while left:
            left -= connection.recv_into(buffer)
        return time.perf_counter() - begin


if __name__ == "__main__":
    main()
