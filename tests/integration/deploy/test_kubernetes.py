"""The pods of deploy/kubernetes serve: run as processes with the manifests' environment, probes and order of ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from openai import AuthenticationError

from tests.support.kubernetes.manifests import rendered
from tests.support.kubernetes.running_pods import DEADLINE, MODEL, RunningPods, running_pods


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPods]:
    with running_pods(tmp_path_factory.mktemp("kubernetes"), rendered("demo")) as running:
        yield running


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
    pods.wait_for_metric(pods.engine, 9090, "baton_scheduler_kv_blocks_saved_total")  # saved behind the answer
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
    client = threading.Thread(target=lambda: found.append(pods.stream(seen)))
    retries = pods.retries()
    client.start()
    assert seen.wait(DEADLINE)
    statuses = pods.engine.terminate()
    client.join(DEADLINE)
    assert statuses == {"scheduler": 0, "worker": 0, "kvstore": 0}
    ((chunks, reason),) = found
    assert reason == "length"
    assert chunks > 1
    assert pods.retries() == retries
    gateway, end = pods.gateway.container("gateway"), time.monotonic() + DEADLINE
    while pods.gateway.probe(gateway, "readinessProbe"):  # for as long as new requests wait for an engine
        assert time.monotonic() < end
        time.sleep(0.1)
    assert pods.gateway.probe(pods.gateway.container("gateway"), "livenessProbe")
