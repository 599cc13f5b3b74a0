"""An engine whose ranks are in two network namespaces with a wire between them: run inside a new namespace by the test.

    unshare --net python -m tests.support.cluster.engine_in_two_namespaces FOLDER

The first host is this namespace, the second one is another. What was seen goes to standard output.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.cluster.conversations import QUESTIONS, client_of, stream_chat
from tests.support.cluster.stack import RunningStack
from tests.support.cluster.stores_in_two_namespaces import HERE, PORT, another_namespace, inside
from tests.support.cluster.tls_authority import Authority

TOKENS = 80
DEADLINE = 120.0
TOKEN = {"BATON_CLUSTER_TOKEN": "known to both hosts and to nobody else"}


def host(folder: Path, number: int, within: list[str], authority: Authority) -> RunningStack:
    argv = [
        "--nodes=2",
        f"--node-rank={number}",
        f"--master={HERE}:{PORT}",
        "--tp=2",
        "--pp=2",
        "--device=cpu",
        "--dtype=float32",
    ]
    certificate, key, ca = authority.files(f"host-{number}", HERE)
    argv += [f"--tls-ca={ca}", *([f"--tls-cert={certificate}", f"--tls-key={key}"] if number == 0 else [])]
    return RunningStack(folder / f"host-{number}", [*argv, "--port=0", "--set=worker.threads=1"], TOKEN, within)


async def texts(stack: RunningStack, started: asyncio.Event | None = None) -> list[str]:
    more: dict[str, Any] = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        chats = (stream_chat(client, stack.model, question, started, **more) for question in QUESTIONS[:2])
        return [seen.text for seen in await asyncio.gather(*chats)]


async def interrupted(stack: RunningStack, interrupt: Callable[[], object]) -> list[str]:
    started = asyncio.Event()
    streams = asyncio.create_task(texts(stack, started))
    async with asyncio.timeout(DEADLINE):
        await started.wait()
    assert not streams.done()
    interrupt()
    return await streams


def main() -> None:
    folder = Path(sys.argv[1])
    holder = another_namespace()
    authority = Authority(folder / "tls")
    second, first = host(folder, 1, inside(holder), authority), host(folder, 0, [], authority)
    again: list[RunningStack] = []

    def exchange_second() -> None:
        """Its supervisor is killed, and with it all that it ran; another one is started."""
        second.supervisor.kill()
        second.supervisor.wait()
        again.append(host(folder, 1, inside(holder), authority))

    try:
        for stack in (first, second):
            stack.until(lambda state: state.phase == "ready", DEADLINE)
        first.wait_until_it_serves()
        print("ranks", *first.instances("worker"), *second.instances("worker"))
        print("others there", *(m.service for m in second.state.members if m.service != "worker"))
        expected = asyncio.run(texts(first))
        for stack, victim in ((second, "engine-1-rank3"), (first, "engine-1-rank1")):
            pids = {one: stack_.pid(one) for stack_ in (first, second) for one in stack_.instances("worker")}
            seen = asyncio.run(interrupted(first, lambda stack=stack, victim=victim: stack.kill(victim)))
            print("equal after the death of", victim, seen == expected)
            for stack_ in (first, second):
                for one in stack_.instances("worker"):
                    stack_.replaced(one, pids[one])
        print("equal after the death of the second host", asyncio.run(interrupted(first, exchange_second)) == expected)
        first.interrupt()
        print("second ended", again[0].supervisor.wait(DEADLINE))
    finally:
        for stack in (*again, second, first):
            print(stack.last_words(), file=sys.stderr)
            stack.stop()
        holder.kill()


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    main()
    print("seconds", round(time.monotonic() - started))
