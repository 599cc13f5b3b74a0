"""Prompts that become vectors inside an engine: one prefill, no decode, beside what generates."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.core.events import Output, SendTokens
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId
from shared.messages.detokenizer import PooledPrompt
from shared.messages.gateway import RequestRejected
from shared.messages.generation import PoolingOptions, PoolingType
from shared.messages.worker import MAX_POOLED_BYTES_PER_PLAN
from tests.support.engines.checking_worker import digest, generate, right_output
from tests.support.engines.single_engine import PROMPT, Ring, told


class PoolingRing(Ring):
    """It collects vectors, too."""

    def __init__(self, **more: Any) -> None:
        self.vectors: dict[str, bytes] = {}
        super().__init__(**more)

    def send(self, event: object) -> list[Output]:
        outputs = super().send(event)
        for output in outputs:
            if isinstance(output, SendTokens):
                self._record(output.batch.pooled)
        return outputs

    def _record(self, pooled: tuple[PooledPrompt, ...]) -> None:
        for one in pooled:
            assert one.request not in self.vectors
            self.vectors[one.request] = one.vector


def embed(request: str, prompt: list[int], pooling: PoolingType = "last", dimensions: int = 2, **more: Any) -> Any:
    options = PoolingOptions(pooling=pooling, dimensions=dimensions)
    return generate(request, prompt, pooling=options, max_tokens=0, **more)


def vector(prompt: list[int]) -> bytes:
    return digest(prompt).to_bytes(8, "little", signed=True)


def test_one_prefill_and_its_vector_end_the_request() -> None:
    ring = PoolingRing()
    ring.send(embed("a", PROMPT))
    ring.finish()
    assert ring.vectors == {"a": vector(PROMPT)}
    assert [(entry.tokens, entry.position, entry.finish) for entry in ring.entries] == [((), 0, "length")]
    assert not ring.engine.requests
    assert ring.free == 32


def test_chunks_beside_a_decode_that_goes_on() -> None:
    ring = PoolingRing(limits=EngineLimits(max_batch_tokens=16, max_running=8))
    request = generate("g", [7, 8, 9], max_tokens=12)
    ring.send(request)
    ring.step()
    prompts = {f"e{i}": [4 + (i + j) % 20 for j in range(10 + 13 * i)] for i in range(4)}
    for name, prompt in prompts.items():
        ring.send(embed(name, prompt, "mean" if name == "e2" else "last"))
    ring.finish()
    assert ring.vectors == {name: vector(prompt) for name, prompt in prompts.items()}
    assert ring.output_of("g") == right_output(request, ring.context)[0]


def test_the_last_token_comes_from_behind_the_cache_and_a_mean_from_nothing_but_computing() -> None:
    ring = PoolingRing()
    prompt = [4 + i % 20 for i in range(48)]  # three whole blocks
    for name in ("cold", "warm"):
        ring.send(embed(name, prompt))
        ring.finish()
    work = [ring.worker.computed_tokens]
    ring.send(embed("mean", prompt, "mean"))
    ring.finish()
    work.append(ring.worker.computed_tokens)
    assert work == [48 + 16, 48 + 16 + 48]
    assert ring.vectors == dict.fromkeys(("cold", "warm", "mean"), vector(prompt))


@pytest.mark.parametrize("target", [None, 0.001])  # which every step takes longer than
def test_the_prompts_of_an_encoder_are_computed_in_one_step_each(target: float | None) -> None:
    """One that does not fit into what is left of a step waits for the next one, and nobody overtakes it for good."""
    limits = EngineLimits(
        max_batch_tokens=32, max_running=8, long_prefill_token_threshold=8, prefill_target=target, plan_late=False
    )
    ring = PoolingRing(limits=limits)
    options = PoolingOptions(pooling="last", dimensions=2, whole=True)
    prompts = {f"e{i}": [4 + (i + j) % 20 for j in range(length)] for i, length in enumerate((20, 3, 17, 32, 16))}
    for name, prompt in prompts.items():
        ring.send(generate(name, prompt, pooling=options, max_tokens=0))
    shares: dict[int, int] = {}
    while ring.plans:
        for work in ring.plans[0].work:
            assert work.sample
            assert work.sequence not in shares
            shares[work.sequence] = work.count
        assert sum(work.count for work in ring.plans[0].work) <= 32
        ring.now += 0.1
        ring.step()
    assert sorted(shares.values()) == [3, 16, 17, 20, 32]
    assert ring.vectors == {name: vector(prompt) for name, prompt in prompts.items()}
    assert ring.free == 32


def test_a_plan_reports_no_more_vectors_than_the_bus_takes() -> None:
    """Those beyond wait with their last token."""
    ring = PoolingRing()
    most = MAX_POOLED_BYTES_PER_PLAN // (4 * 2**16)
    for number in range(most + 1):
        ring.send(embed(str(number), [4 + number % 20, 5, 6], dimensions=2**16))
    sizes = []
    while ring.plans:
        known = len(ring.vectors)
        ring.step()
        sizes.append(len(ring.vectors) - known)
    assert len(ring.vectors) == most + 1
    assert max(sizes) <= most


def test_vectors_of_all_tokens_count_by_their_number_and_are_refused_where_no_plan_reports_them() -> None:
    ring = PoolingRing()
    most = MAX_POOLED_BYTES_PER_PLAN // (4 * 2**15)
    ring.send(embed("most", [5] * most, "all", dimensions=2**15))
    ring.send(embed("one", [6], "all", dimensions=2**15))
    (answer,) = told(ring.send(embed("more", [5] * (most + 1), "all", dimensions=2**15)))
    assert isinstance(answer, RequestRejected)
    assert (answer.field, answer.message) == (
        "input",
        f"input: vectors of {most + 1} tokens are not allowed; of 32768 numbers each, {most} are",
    )
    sizes = []
    while ring.plans:
        known = len(ring.vectors)
        ring.step()
        sizes.append(len(ring.vectors) - known)
    assert (len(ring.vectors), max(sizes)) == (2, 1)


def test_only_the_ends_of_steps_count_where_these_alone_are_judged() -> None:
    """A prompt longer than a plan has room for, of which few tokens end steps, is computed; with too many it is not."""
    ring = PoolingRing()
    most = MAX_POOLED_BYTES_PER_PLAN // (4 * 2**15)
    options = PoolingOptions(pooling="all", dimensions=2**15, step_tag_id=9)
    prompt = [5, 9] * most
    ring.send(generate("fits", [*prompt, 5], pooling=options, max_tokens=0))
    (answer,) = told(ring.send(generate("more", [*prompt, 9], pooling=options, max_tokens=0)))
    assert isinstance(answer, RequestRejected)
    assert answer.message.startswith(f"input: vectors of {most + 1} tokens are not allowed")
    ring.finish()
    assert list(ring.vectors) == ["fits"]


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    ring = PoolingRing(max_model_len=64)
    ring.send(embed("whole", [5] * 64))
    ring.finish()
    assert ring.vectors == {"whole": vector([5] * 64)}
    (answer,) = told(ring.send(embed("longer", [5] * 65)))
    assert isinstance(answer, RequestRejected)
    assert (answer.field, answer.code) == ("prompt", "context_length_exceeded")


def test_more_elements_than_there_are_is_refused() -> None:
    (answer,) = told(PoolingRing().send(embed("a", PROMPT, dimensions=2**16 + 1)))
    assert isinstance(answer, RequestRejected)
    assert answer.message == f"dimensions: {2**16 + 1} is not allowed; 1 to {2**16} are"


def test_nothing_is_handed_over() -> None:
    ring = PoolingRing()
    ring.send(embed("a", PROMPT, decode_on=EngineId("other")))
    ring.finish()
    assert ring.vectors == {"a": vector(PROMPT)}
