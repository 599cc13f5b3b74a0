"""A prompt that a prefill pod computed goes on at a decode pod, whose store was sent its blocks over TLS. Each engine
has two ranks in its pod."""

from __future__ import annotations

import pytest

from services.offline import LLM, SamplingParams
from tests.support.kubernetes.manifests import composed, patches_of_the_manual
from tests.support.kubernetes.running_pods import MODEL, SERVICES, running_pods
from tests.support.paths import DEMO_MODEL

PROMPT = "The fox and the hare met by the old mill. " * 40
"""More than `disaggregate_least` tokens."""


def test_a_prompt_is_handed_over_between_pods(tmp_path_factory: pytest.TempPathFactory) -> None:
    with LLM(str(DEMO_MODEL), device="cpu", kv_memory="64MiB", progress=False) as llm:
        (expected,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
    folder = tmp_path_factory.mktemp("kubernetes")
    kustomization = {
        "namespace": "baton",
        "resources": ["base"],
        "components": ["components/pools", "components/nats"],
        "patches": patches_of_the_manual("Several GPUs in a pod"),
    }
    with running_pods(folder, composed(folder, kustomization), (*SERVICES, "prefill")) as pods:
        with pods.client() as client:
            answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0)
        assert answer.choices[0].text == expected.outputs[0].text
        ranks = pods.engine.whole_log("worker")
        assert {rank for rank in range(4) if f'"instance":"engine-0-rank{rank}","event":"startup"' in ranks} == {0, 1}
        prefill = pods.pods["prefill"]
        pods.wait_for_metric(prefill, 9090, "baton_scheduler_hand_overs_total")
        pods.wait_for_metric(pods.engine, 9092, "baton_kvstore_transfer_bytes_total")
        assert prefill.terminate() == {"scheduler": 0, "worker": 0, "kvstore": 0}
        with pods.client() as client:  # engines that decode compute prompts where no others are left
            again = client.completions.create(model=MODEL, prompt=f"Again: {PROMPT}", max_tokens=4, temperature=0)
        assert again.usage is not None
        assert again.usage.completion_tokens == 4
