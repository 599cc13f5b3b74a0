"""All pods of an overlay as processes of this machine, and a client of theirs."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from openai import OpenAI

from tests.support.kubernetes.kubelet import HERE, ClusterFolder, Pod
from tests.support.kubernetes.manifests import Manifest
from tests.support.kubernetes.secrets import KEY, make_secrets
from tests.support.kv.prompts import retries_in
from tests.support.paths import DEMO_MODEL

MODEL = "baton-demo"
DEADLINE = 60.0
LONG = 100
"""Tokens of a stream that is long enough for something to happen to it."""
SERVICES = ("engine", "coordinator", "tokenizer", "detokenizer", "gateway")


class RunningPods(NamedTuple):
    pods: Mapping[str, Pod]
    """By the name of their workload."""

    @property
    def gateway(self) -> Pod:
        return self.pods["gateway"]

    @property
    def engine(self) -> Pod:
        """That of the scheduler."""
        return self.pods["engine"]

    def client(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.url(8000)}/v1", api_key=key, max_retries=0, timeout=DEADLINE)

    def metric(self, pod: Pod, port: int, name: str) -> float:
        """The sum of a metric's samples at a container's own port."""
        with urllib.request.urlopen(f"{pod.url(port)}/metrics", timeout=DEADLINE) as response:
            page = response.read().decode()
        return sum(float(each) for each in re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", page))

    def wait_for_metric(self, pod: Pod, port: int, name: str) -> None:
        """Returns once it is above 0."""
        end = time.monotonic() + DEADLINE
        while self.metric(pod, port, name) <= 0:
            assert time.monotonic() < end, f"{name} stays 0"
            time.sleep(0.1)

    def retries(self) -> int:
        """Attempts beyond the first, but for those of a process that the machine gave no time to speak."""
        return retries_in(self.gateway.whole_log("gateway"))

    def stream(self, seen: threading.Event) -> tuple[int, str | None]:
        """A long completion: its chunks of text, and why it ended. Sets `seen` at the first chunk."""
        chunks, reason = 0, None
        with self.client() as client:
            answer = client.completions.create(
                model=MODEL, prompt="Tell me a story.", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
            )
            for chunk in answer:
                chunks += len(chunk.choices[0].text) > 0
                reason = chunk.choices[0].finish_reason or reason
                seen.set()
        return chunks, reason


def together(pods: Sequence[Pod]) -> ThreadPoolExecutor:
    """Threads for something that all of them do at once."""
    return ThreadPoolExecutor(len(pods))


@contextlib.contextmanager
def running_pods(
    folder: Path, manifests: tuple[Manifest, ...], services: Sequence[str] = SERVICES
) -> Iterator[RunningPods]:
    """Every pod is ready; KEY is a client's."""
    secrets = folder / "secrets"
    make_secrets(secrets, stores=HERE)
    cluster = ClusterFolder(folder, manifests, secrets, DEMO_MODEL)
    running = {name: cluster.pod(name) for name in ("nats", *services)}
    nats, *others = running.values()
    try:
        nats.start()
        with together(others) as threads:
            list(threads.map(Pod.start, others))
        yield RunningPods(running)
    finally:
        for each in reversed(running.values()):
            each.end()
