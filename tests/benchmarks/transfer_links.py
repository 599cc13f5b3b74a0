"""How much of a link between two hosts the stores use, and how much of a hand-over hides behind its prefill.

    unshare --net python -m tests.benchmarks.transfer_links --rates 1 10 --json links.json      # as root

KV stores in two network namespaces with a wire between them, whose rate `tc tbf` limits; a pair for each transport. For
each rate: the same bytes over a plain TCP connection, which is what the link has; blocks that one store fetches of the
other, with the processor time of both; and prompts whose blocks are committed chunk by chunk, with a prefetch and
without: what is left to wait for after the last chunk. Rounds of all alternate, so that other work on the machine
strikes them alike.
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

import psutil

from kvstore.core.layout import geometry
from shared.blocks import BlockHash
from shared.messages.kvstore import KvLayout
from tests.support.cluster.nats_server import BINARY
from tests.support.cluster.stores_in_two_namespaces import HERE, THERE, URL, another_namespace, inside, run
from tests.support.cluster.tls_authority import Authority
from tests.support.kv.arenas import chain
from tests.support.kv.store_process import StoreClient, StoreProcess, clients, know_each_other

PORT, RAW_PORT = 4222, 7800
TRANSPORTS = ("grpc", "tcp", "grpc+tls", "tcp+tls")
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
        left = int.from_bytes(connection.recv(8))
        while left:
            connection.sendall(data[: min(left, len(data))])
            left -= min(left, len(data))
"""


class Rounds(NamedTuple):
    """Seconds of every round of one transport."""

    plain: list[float]
    fetched: list[float]
    processor: list[float]
    """Of both stores while blocks were fetched."""
    whole: list[float]
    """From the last commit until all blocks are there, when they are fetched then."""
    pipelined: list[float]
    """The same where they were prefetched as they were committed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 10.0], help="Gbit/s; 0: no limit")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=["grpc", "tcp"])
    parser.add_argument("--blocks", type=int, default=64, help="of a prompt; default: %(default)s")
    parser.add_argument(
        "--model",
        type=int,
        nargs=3,
        default=(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim),
        metavar=("LAYERS", "KV_HEADS", "HEAD_DIM"),
        help="in bfloat16; default: %(default)s, as of Llama 3.1 8B, blocks of 2 MiB. The demo model: 5 4 32",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=8, help="of a prompt; default: %(default)s")
    parser.add_argument("--prefill", type=float, default=4000.0, help="tokens/s that commits follow")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    layers, kv_heads, head_dim = given.model
    given.layout = KvLayout(model="links", dtype="bfloat16", layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    given.block_bytes = geometry(given.layout, 1).payload_bytes
    with tempfile.TemporaryDirectory(prefix="baton-links-") as folder, namespaces(folder) as holder:
        results = asyncio.run(measure(given, holder, Authority(Path(folder) / "tls")))
    heads = ("link", "transport", "plain TCP", "fetched", "of the link", "processor time", "tokens/s")
    print(f"| {' | '.join(heads)} | whole prompt, then fetched | pipelined |")
    print("| --- | --- |" + " ---: |" * 7)
    for (rate, transport), rounds in results.items():
        print(row(rate, transport, rounds, given))
    if given.json:
        measured = [{"gbit": rate, "transport": name, **rounds._asdict()} for (rate, name), rounds in results.items()]
        given.json.write_text(json.dumps(measured))


def row(rate: float, transport: str, rounds: Rounds, given: argparse.Namespace) -> str:
    plain, fetched, processor, whole, pipelined = (statistics.median(seconds) for seconds in rounds)
    sent = given.blocks * given.block_bytes
    link = rate * GIGABIT if rate else sent / plain
    cells = (
        f"{rate:g} Gbit/s" if rate else "no limit",
        transport,
        f"{sent / plain / MEBIBYTE:.0f} MiB/s",
        f"{sent / fetched / MEBIBYTE:.0f} MiB/s",
        f"{sent / fetched / link:.0%}",
        f"{processor * 1e3 / (sent / MEBIBYTE):.2f} ms/MiB",
        f"{given.blocks * TOKENS_OF_BLOCK / fetched:,.0f}",
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


class Pair(NamedTuple):
    """Two stores of one transport, each in its namespace, and an engine at each."""

    near: StoreProcess
    far: StoreProcess
    at_near: StoreClient
    at_far: StoreClient

    def processor_seconds(self) -> float:
        """What both have used so far."""
        return sum(sum(psutil.Process(store.pid).cpu_times()[:2]) for store in (self.near, self.far))


def a_pair(
    number: int, transport: str, memory: int, holder: subprocess.Popen[bytes], tls: Authority
) -> list[StoreProcess]:
    """The near and the far store."""
    name, _, secured = transport.partition("+")
    stores = []
    for side, host, inner in (("near", HERE, []), ("far", THERE, inside(holder))):
        node = f"{side}-{number}"
        flags = tls.flags(node, host) if secured else ("--insecure",)
        port = ("--transfer-port", "0", "--transfer-host", host, "--transfer-transports", name)
        stores.append(StoreProcess(URL, node, *port, *flags, memory=memory, inside=inner))
    return stores


async def measure(
    given: argparse.Namespace, holder: subprocess.Popen[bytes], tls: Authority
) -> dict[tuple[float, str], Rounds]:
    memory = 4 * given.blocks * given.block_bytes + MEBIBYTE
    stores = [
        store for number, name in enumerate(given.transports) for store in a_pair(number, name, memory, holder, tls)
    ]
    results = {}
    async with clients(URL, *stores, layout=given.layout) as at:
        await know_each_other(*at)
        pairs = {
            name: Pair(*stores[2 * number : 2 * number + 2], *at[2 * number : 2 * number + 2])
            for number, name in enumerate(given.transports)
        }
        for rate in given.rates:
            limit(holder, rate)
            rounds = {name: Rounds([], [], [], [], []) for name in pairs}
            for number in range(given.rounds + 1):  # the first one takes memory, and counts for nothing
                for name, pair in pairs.items():
                    one = await a_round(given, (rate, number), pair)
                    if number:
                        for seconds, measured in zip(rounds[name], one, strict=True):
                            seconds.append(measured)
            results.update({(rate, name): each for name, each in rounds.items()})
    return results


async def a_round(
    given: argparse.Namespace, label: tuple[float, int], pair: Pair
) -> tuple[float, float, float, float, float]:
    plain = await asyncio.to_thread(plain_seconds, given.blocks * given.block_bytes)
    names = chain((*label, "fetched"), given.blocks)
    await pair.at_far.save(names)
    used, begin = pair.processor_seconds(), time.perf_counter()
    await all_there(pair.at_near, names, pair.far)
    fetched, processor = time.perf_counter() - begin, pair.processor_seconds() - used
    whole = await after_prefill(given, (*label, "whole"), pair.far, pair.at_near, pair.at_far, ahead=False)
    pipelined = await after_prefill(given, (*label, "pipelined"), pair.far, pair.at_near, pair.at_far, ahead=True)
    return plain, fetched, processor, whole, pipelined


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
        await asyncio.sleep(max(0.0, start + end * TOKENS_OF_BLOCK / given.prefill - time.perf_counter()))
        await at_far.save(names[end - size : end])
    begin = time.perf_counter()
    await all_there(at_near, names, far)
    return time.perf_counter() - begin


async def all_there(client: StoreClient, names: list[BlockHash], source: StoreProcess) -> None:
    lease, found = await client.find_only(names, source=source)
    await client.release(lease)
    if len(found.slots) // 4 < len(names):
        raise SystemExit(f"{len(found.slots) // 4} of {len(names)} blocks came")


def plain_seconds(size: int) -> float:
    """So many bytes over a connection of their own, from the request to the last of them."""
    buffer = bytearray(MEBIBYTE)
    with socket.create_connection((THERE, RAW_PORT)) as connection:
        begin, left = time.perf_counter(), size
        connection.sendall(size.to_bytes(8))
        while left:
            left -= connection.recv_into(buffer)
        return time.perf_counter() - begin


if __name__ == "__main__":
    main()
