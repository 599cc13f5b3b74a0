"""Processes of the previous release and of this one serve together: a stack is upgraded one process after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from shared import topics
from shared.bus.codec import encode
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import InstanceId
from shared.messages.lifecycle import Drain, Lifecycle
from shared.messages.model_card import CardVideos
from shared.models.video_models import read_video_model
from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, client_of, stream_chat
from tests.support.cluster.nats_server import NatsServer
from tests.support.cluster.ports import free_port
from tests.support.paths import REPOSITORY
from tests.unit.shared.bus.test_newer_cards import ENGINE, LIFE

PREVIOUS = "0.3.0"
MODEL = REPOSITORY / "deploy/demo/model"
TOKENS = 60
DTYPE = "--dtype=float32"
"""Of both, whatever a release chooses."""
OPS = "--ops=torch"
"""Kernels of the previous release would be compiled for this alone, and others add in another order."""


def commit_of(version: str) -> str:
    """As the changelog names it."""
    found = re.search(rf"^## {re.escape(version)} \(.*commit (\w+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert found is not None, f"CHANGELOG.md names no commit for {version}"
    return found[1]


def git(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *argv], cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The previous release's files."""
    commit = commit_of(PREVIOUS)
    archive = tmp_path_factory.mktemp("archive") / "previous.tar"
    if git("archive", "--format=tar", f"--output={archive}", commit).returncode:
        pytest.skip(f"the history of this checkout ends before {PREVIOUS}, commit {commit}")
    folder = tmp_path_factory.mktemp("previous")
    subprocess.run(["tar", "-xf", str(archive), "-C", str(folder)], check=True)
    return folder


class Processes:
    """Owns services on one bus, each of the release that a test chooses."""

    def __init__(self, server: NatsServer, logs: Path) -> None:
        self._server = server
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, release: Path, service: str, instance: str, *flags: str) -> None:
        common = [f"--instance={instance}", f"--nats-url={self._server.url}", "--metrics-port=none"]
        with (self._logs / f"{instance}.log").open("ab") as log:
            self._running[instance] = subprocess.Popen(
                [sys.executable, "-m", f"services.{service}", *common, *flags],
                cwd=release,
                env={**os.environ, "PYTHONPATH": str(release)},
                stdout=log,
                stderr=log,
            )

    def start_engine(self, release: Path, name: str) -> None:
        self.start(release, "scheduler", name, "--world-size=1")
        flags = (
            f"--engine={name}",
            f"--model={MODEL}",
            "--served-model-name=demo",
            "--device=cpu",
            "--threads=1",
            DTYPE,
            OPS,
        )
        self.start(release, "worker", f"{name}-rank0", *flags)

    def start_ring(self, release: Path, port: int, coordinator_flags: Sequence[str] = ()) -> None:
        self.start(release, "gateway", "gateway-1", f"--port={port}")
        self.start(release, "tokenizer", "tokenizer-1", f"--model={MODEL}", "--served-model-name=demo")
        self.start(release, "coordinator", "coordinator-1", *coordinator_flags)
        self.start(release, "detokenizer", "detokenizer-1", f"--model={MODEL}", "--served-model-name=demo")

    def log(self, instance: str) -> str:
        return (self._logs / f"{instance}.log").read_text()

    def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def processes(own_nats: NatsServer, tmp_path: Path) -> Iterator[Processes]:
    running = Processes(own_nats, tmp_path)
    try:
        yield running
    finally:
        running.stop()
        for log in sorted(tmp_path.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)  # to explain a failed test


async def served(url: str) -> None:
    """Returns once the ring says that it is ready."""

    def ready() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return bool(response.status == 200)
        return False

    async with asyncio.timeout(DEADLINE):
        while not await asyncio.to_thread(ready):
            await asyncio.sleep(0.1)


async def streams(url: str) -> list[Streamed]:
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    async with client_of(url) as client, asyncio.timeout(DEADLINE):
        return await asyncio.gather(*(stream_chat(client, "demo", question, **options) for question in QUESTIONS))


@pytest.mark.faults
@pytest.mark.parametrize("old", ["engine", "ring"])
async def test_an_engine_is_upgraded_under_streams(
    previous: Path, processes: Processes, own_nats: NatsServer, old: str
) -> None:
    """`old`: whether only the engine is of the previous release, or all. A new engine joins, the old one drains."""
    ring = REPOSITORY if old == "engine" else previous
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    processes.start_ring(ring, port)
    processes.start_engine(previous, "engine-1")
    await served(url)
    before = await streams(url)
    bus = await connect(NatsOptions(servers=(own_nats.url,)))
    try:
        ready = asyncio.Event()

        async def heard(life: Lifecycle) -> None:
            if life.instance == "engine-2" and life.phase == "ready":
                ready.set()

        await bus.subscribe(topics.lifecycles(), heard)
        processes.start_engine(REPOSITORY, "engine-2")
        async with asyncio.timeout(DEADLINE):
            await ready.wait()
        both = asyncio.create_task(streams(url))
        await asyncio.sleep(0.2)
        await bus.publish(topics.instance_control(InstanceId("engine-1")), Drain())
        during, after = await both, await streams(url)
    finally:
        await bus.close()
    for seen in (during, after):
        assert [s.text for s in seen] == [s.text for s in before]
        assert [(s.finishes, s.completion_tokens) for s in seen] == [(["length"], TOKENS)] * len(QUESTIONS)
    logs = [processes.log(name) for name in ("gateway-1", "tokenizer-1", "coordinator-1", "detokenizer-1")]
    assert not [log for log in logs if "undecodable message" in log]


_READ = """
import sys
import msgspec
from shared.messages.lifecycle import Lifecycle
for each in msgspec.msgpack.decode(sys.stdin.buffer.read()):
    videos = msgspec.msgpack.decode(each, type=Lifecycle).engine.model.videos
    print(videos.sampling if videos else "none")
"""


@pytest.mark.faults
def test_the_previous_release_reads_every_card_with_videos(previous: Path, tmp_path: Path) -> None:
    """Those that it has no words for are a model's without videos to it."""
    said = []
    for name in ("Qwen3VL", "Glm46V", "LlavaOnevision", "InternVL"):
        config = {"architectures": [f"{name}ForConditionalGeneration"], "video_token_id": 9}
        (tmp_path / "config.json").write_text(json.dumps(config))
        videos = read_video_model(tmp_path)
        assert videos is not None
        card = replace(ENGINE.model, **CardVideos.of(videos)._asdict())
        assert card.shown_videos == videos
        said.append(encode(replace(LIFE, engine=replace(ENGINE, model=card), worker=None, sleep=None)))
    run = subprocess.run(
        [sys.executable, "-c", _READ],
        cwd=previous,
        env={**os.environ, "PYTHONPATH": str(previous)},
        input=msgspec.msgpack.encode(said),
        capture_output=True,
        check=False,
        timeout=DEADLINE,
    )
    assert run.stdout.decode().split() == ["ends", "paces", "shares", "none"], run.stderr.decode()
