"""A whole engine that launches steps ahead, scheduler and threads and all, says what one says that waits for each."""

from __future__ import annotations

import pytest

from deploy.model_choice import DEMO_MODEL
from services.offline import LLM, RequestOutput, SamplingParams
from services.worker.backend import Step
from services.worker.executor.device_runner import DeviceRunner
from services.worker.executor.runner_parts import RunnerParts
from shared.messages.worker import StepPlan

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
WEATHER = '{"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}'
ASKED: dict[str, SamplingParams] = {
    "The capital of France is": SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1),
    "Once upon a time": SamplingParams(n=3, seed=5, temperature=1.2, top_p=0.9, max_tokens=40, ignore_eos=True),
    "One two three one two three one": SamplingParams(temperature=0, max_tokens=60, repetition_penalty=1.2),
    "Say it again and again and again": SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    "Tell me a long story. " * 20: SamplingParams(seed=9, max_tokens=30, presence_penalty=0.7, bad_words=["the"]),
    "A date:": SamplingParams(seed=3, max_tokens=40, structured_outputs={"regex": r"\d{4}-\d{2}-\d{2}"}),
    "The weather:": SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": WEATHER}),
}


def answers(speculative: str | None, more: dict[str, object] | None = None) -> list[RequestOutput]:
    settings = (more or {}) | {"worker.threads": 1, "scheduler.max_batch_tokens": 64, "scheduler.max_running": 16}
    if speculative is not None:
        settings["worker.speculative"] = speculative
    with LLM(str(DEMO_MODEL), device="cpu", kv_memory="32MiB", settings=settings) as llm:
        return llm.generate(list(ASKED), list(ASKED.values()))


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """Of an engine that waits for each step."""
    return answers(None)


@pytest.mark.features("guided", "speculative", "chunked prefill", "n > 1", "logprobs", "prompt logprobs")
@pytest.mark.parametrize("speculative", [NGRAM, pytest.param(None, marks=pytest.mark.slow)], ids=["ngram", "none"])
def test_launched_ahead_an_engine_says_the_same(
    expected: list[RequestOutput], speculative: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = 0
    prepare = DeviceRunner.prepare

    def counting(runner: DeviceRunner, plan: StepPlan) -> Step:
        nonlocal begun
        begun += 1
        return prepare(runner, plan)

    monkeypatch.setattr(DeviceRunner, "prepare", counting)
    monkeypatch.setattr(RunnerParts, "launches", True)
    found = answers(speculative)
    assert [[c.text for c in output.outputs] for output in found] == [
        [c.text for c in output.outputs] for output in expected
    ]
    for output, one in zip(found, expected, strict=True):
        told, wanted = output.outputs[0].logprobs or [], one.outputs[0].logprobs or []
        assert [list(position) for position in told] == [list(position) for position in wanted]
        assert (output.prompt_logprobs is None) == (one.prompt_logprobs is None)
    assert begun > 30  # the longest takes 60 tokens, of which drafts and the company of others spare some steps
