"""The pods of deploy/kubernetes serve: run as processes with the manifests' environment, probes and order of ending."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from openai import AuthenticationError, OpenAI

from deploy.container_secrets import make
from tests.support.kubernetes.kubelet import ClusterFolder, Pod
from tests.support.paths import DEMO_MODEL

MODEL = "baton-demo"
DEADLINE = 60.0
LONG = 100
"""Tokens of a stream that is long enough for something to happen to it."""


class RunningPods(NamedTuple):
    cluster: ClusterFolder
    gateway: Pod
    engine: Pod

    def client(self, key: str = "a-key") -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.url(8000)}/v1", api_key=key, max_retries=0, timeout=DEADLINE)

    def metric(self, pod: Pod, port: int, name: str) -> float:
        """The sum of a metric's samples at a container's own port."""
        with urllib.request.urlopen(f"{pod.url(port)}/metrics", timeout=DEADLINE) as response:
            page = response.read().decode()
        return sum(float(each) for each in re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", page))


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPods]:
    folder = tmp_path_factory.mktemp("kubernetes")
    secrets = folder / "secrets"
    make(secrets)
    (secrets / "api-keys").mkdir()
    (secrets / "api-keys" / "api-keys").write_text("a-key")
    cluster = ClusterFolder(folder, "demo", secrets, DEMO_MODEL)
    running = {
        name: cluster.pod(name) for name in ("nats", "engine", "coordinator", "tokenizer", "detokenizer", "gateway")
    }
    nats, *services = running.values()
    try:
        nats.start()
        with ThreadPoolExecutor() as threads:
            list(threads.map(Pod.start, services))
        yield RunningPods(cluster, running["gateway"], running["engine"])
    finally:
        for each in reversed(running.values()):
            each.end()


def stream(pods: RunningPods, seen: threading.Event) -> tuple[int, str | None]:
    """A long completion: its chunks of text, and why it ended. Sets `seen` at the first chunk."""
    chunks, reason = 0, None
    with pods.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt="Tell me a story.", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        for chunk in answer:
            chunks += len(chunk.choices[0].text) > 0
            reason = chunk.choices[0].finish_reason or reason
            seen.set()
    return chunks, reason


def test_a_client_with_a_key_is_answered(pods: RunningPods) -> None:
    with pods.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, temperature=0, messages=[{"role": "user", "content": "What is the capital of France?"}]
        )
    assert "Paris" in str(answer.choices[0].message.content)
    with pods.client("another-key") as stranger, pytest.raises(AuthenticationError):
        stranger.models.list()


def test_the_rank_and_the_store_share_the_pods_arena(pods: RunningPods) -> None:
    prompt = "The fox and the hare met by the old mill. " * 20
    with pods.client() as client:
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
    assert pods.metric(pods.engine, 9090, "baton_scheduler_kv_blocks_saved_total") > 0
    arenas = [each for each in (pods.engine.volume("arena") / "kvstore").iterdir() if each.stat().st_size > 0]
    assert len(arenas) > 0


@pytest.mark.faults
def test_an_engine_that_loses_its_rank_lives_and_is_not_ready(pods: RunningPods) -> None:
    scheduler = pods.engine.container("scheduler")
    assert pods.engine.probe(scheduler, "readinessProbe")
    pods.engine.kill("worker")
    assert pods.engine.probe(scheduler, "livenessProbe")
    pods.engine.wait_for(scheduler, "readinessProbe")


def test_an_engine_that_ends_finishes_its_streams_first(pods: RunningPods) -> None:
    """With another engine to go on at: what ends here must not have to."""
    seen, found = threading.Event(), []
    client = threading.Thread(target=lambda: found.append(stream(pods, seen)))
    retries = pods.metric(pods.gateway, 9090, "baton_gateway_retries_total")
    client.start()
    assert seen.wait(DEADLINE)
    statuses = pods.engine.terminate()
    client.join(DEADLINE)
    assert statuses == {"scheduler": 0, "worker": 0, "kvstore": 0}
    ((chunks, reason),) = found
    assert reason == "length"
    assert chunks > 1
    assert pods.metric(pods.gateway, 9090, "baton_gateway_retries_total") == retries
    assert not pods.gateway.probe(pods.gateway.container("gateway"), "readinessProbe")
    assert pods.gateway.probe(pods.gateway.container("gateway"), "livenessProbe")
