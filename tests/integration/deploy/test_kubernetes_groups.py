"""An engine whose ranks are the pods of a LeaderWorkerSet serves, comes back as a whole, and drains as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from services.offline import LLM, SamplingParams
from tests.support.kubernetes.kubelet import Pod
from tests.support.kubernetes.manifests import rendered
from tests.support.kubernetes.running_pods import DEADLINE, MODEL, SERVICES, RunningPods, running_pods, together
from tests.support.paths import DEMO_MODEL

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPods]:
    folder = tmp_path_factory.mktemp("kubernetes")
    with running_pods(folder, rendered("multi-node"), (*SERVICES, "engine-worker")) as running:
        yield running


def group(pods: RunningPods) -> tuple[Pod, Pod]:
    """The leader and the worker."""
    return pods.engine, pods.pods["engine-worker"]


def answer(pods: RunningPods) -> str:
    with pods.client() as client:
        chat = client.chat.completions.create(
            model=MODEL, temperature=0, max_tokens=32, messages=[{"role": "user", "content": QUESTION}]
        )
    return str(chat.choices[0].message.content)


def test_a_chat_says_what_one_process_says(pods: RunningPods) -> None:
    with LLM(str(DEMO_MODEL), device="cpu", kv_memory="32MiB", progress=False) as llm:
        (expected,) = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=32))
    assert answer(pods) == expected.outputs[0].text
    leader, worker = group(pods)
    steps = [pods.metric(pod, 9091, "baton_worker_steps_total") for pod in (leader, worker)]
    assert min(steps) > 0  # of equal counts one may be asked for while the other rank still ends its step


@pytest.mark.faults
def test_a_group_that_loses_a_rank_is_made_anew_and_serves(pods: RunningPods) -> None:
    """What RecreateGroupOnPodRestart does once a container has been started again: all pods of the group are deleted,
    and made anew when they are gone."""
    leader, worker = group(pods)
    worker.kill("worker")
    with together((leader, worker)) as threads:
        list(threads.map(Pod.terminate, (leader, worker)))
        list(threads.map(Pod.start, (leader, worker)))
    assert "Paris" in answer(pods)


def test_a_group_that_ends_finishes_its_streams_first(pods: RunningPods) -> None:
    """Its pods are told at once; the worker's rank goes when the leader has drained."""
    seen, found = threading.Event(), []
    client = threading.Thread(target=lambda: found.append(pods.stream(seen)))
    retries = pods.retries()
    client.start()
    assert seen.wait(DEADLINE)
    leader, worker = group(pods)
    with together((leader, worker)) as threads:
        statuses = list(threads.map(Pod.terminate, (leader, worker)))
    client.join(DEADLINE)
    assert statuses == [{"scheduler": 0, "worker": 0}, {"worker": 0}]
    ((chunks, reason),) = found
    assert reason == "length"
    assert chunks > 1
    assert pods.retries() == retries
