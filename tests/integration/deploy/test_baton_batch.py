"""`baton batch`, killed and interrupted and run again: every request is answered once."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from deploy.cli.batch.http_server import http_server
from deploy.cli.batch.own_engine import offline_engine
from deploy.cli.batch.run import answer_batch
from deploy.errors import CommandError
from tests.support.engines.engine_on_a_bus import make_model
from tests.support.paths import REPOSITORY

REQUESTS = 60


def write_requests(path: Path, count: int = REQUESTS, **body: Any) -> None:
    """And one line that is none."""
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": [2, 3 + i % 9], **body}}
        for i in range(count)
    ]
    path.write_text("\n".join([*map(json.dumps, lines), "{not json", ""]))


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch(folder: Path) -> subprocess.Popen[bytes]:
    argv = ["batch", "in.jsonl", "-o", "out.jsonl", "--model=model", "--device=sim", "--set=worker.sim_step_ms=30"]
    argv += ["--concurrency=2", f"--run-dir={folder}"]
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", *argv],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        stderr=subprocess.PIPE,
    )


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no answers"
        assert process.poll() is None, "it ended before it was stopped"
        time.sleep(0.002)


def test_killed_and_interrupted_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_requests(tmp_path / "in.jsonl", max_tokens=8, ignore_eos=True)
    output = tmp_path / "out.jsonl"

    killed = batch(tmp_path)
    wait_for_lines(output, 6, killed)
    killed.kill()
    killed.communicate(timeout=120)
    first = output.read_bytes()
    output.write_bytes(first + b'{"id":"batch_req_')  # as if it had been killed within a line

    interrupted = batch(tmp_path)
    wait_for_lines(output, first.count(b"\n") + 6, interrupted)
    interrupted.send_signal(signal.SIGINT)
    _, said = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 130, said
    assert b"run the same command to go on" in said
    assert output.read_bytes().startswith(first)
    assert len(entries(output)) < REQUESTS

    engine = offline_engine(str(tmp_path / "model"), {"device": "sim", "settings": {"worker.sim_step_ms": 0}})
    answer_batch(tmp_path / "in.jsonl", output, engine, 16)
    found = entries(output)
    assert Counter(entry["custom_id"] for entry in found) == Counter([*(f"r{i}" for i in range(REQUESTS)), None])
    for entry in found:
        if entry["custom_id"] is None:
            assert entry["error"]["code"] == "invalid_line"
        else:
            assert entry["response"]["status_code"] == 200
            assert entry["response"]["body"]["usage"]["completion_tokens"] == 8


async def test_a_busy_server_is_asked_again_and_one_that_stays_away_ends_the_run(tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        key = str(body["prompt"])
        asked[key] += 1
        if asked[key] == 1:
            return web.json_response({"error": {"message": "later"}}, status=503, headers={"Retry-After": "0"})
        return web.json_response({"prompt": body["prompt"]}, headers={"X-Request-Id": "theirs"})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    source, output = tmp_path / "in", tmp_path / "out"
    write_requests(source, 5)
    try:
        await run(source, output, port, 30.0)
    finally:
        await runner.cleanup()
    found = entries(output)
    assert Counter(entry["custom_id"] for entry in found) == Counter(["r0", "r1", "r2", "r3", "r4", None])
    assert {entry["response"]["request_id"] for entry in found if entry["response"]} == {"theirs"}
    assert set(asked.values()) == {2}

    output.unlink()
    with pytest.raises(CommandError, match=r"given up after 0 s .*run the same command to go on"):
        await run(source, output, port, 0.0)
    assert all(entry["custom_id"] is None for entry in entries(output))


async def run(source: Path, output: Path, port: int, patience: float) -> None:
    """On a thread, as the command has a loop of its own."""
    server = http_server(f"http://127.0.0.1:{port}/v1", None, 4, patience)
    await asyncio.to_thread(answer_batch, source, output, server, 4)
