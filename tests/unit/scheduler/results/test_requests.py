"""Requests end when no client waits for them any more."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.scheduler.core.events import (
    GatewayGone,
    SendTokens,
)
from services.scheduler.core.limits import EngineLimits
from shared.ids import RequestId
from shared.messages.gateway import RequestRejected
from shared.messages.scheduler import SequenceFailed, SequenceFault
from tests.support.engines.checking_worker import GATEWAY, generate
from tests.support.engines.single_engine import PROMPT, Ring, started, told


def test_a_gateway_that_is_gone_takes_its_requests_along() -> None:
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64))
    engine.handle(generate("a", [4] * 20), 0.0)
    (tokens,) = engine.handle(GatewayGone(GATEWAY), 0.0)
    assert isinstance(tokens, SendTokens)
    assert [a.request for a in tokens.batch.abandoned] == ["a"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("fault", "kind", "field"), [("invalid_args", "invalid_request", "vllm_xargs"), ("processor", "poisoned", None)]
)
def test_what_a_logits_processor_refuses_or_fails_for_ends_for_good(
    fault: SequenceFault, kind: str, field: str | None
) -> None:
    ring = Ring(EngineLimits(run_ahead=0))
    for name in "ab":
        ring.send(generate(name, PROMPT, max_tokens=5, ignore_eos=True))
    sequence = ring.engine.requests[RequestId("a")].id
    result = ring.worker.step(ring.plans.pop(0))
    (word,) = told(ring.send(replace(result, failed=(SequenceFailed(sequence, "begin: 7 is not", fault),))))
    assert isinstance(word, RequestRejected), "so it is not tried again"
    assert (word.request, word.kind, word.message, word.field) == ("a", kind, "begin: 7 is not", field)
    ring.finish()
    assert len(ring.output_of("b")) == 5


def test_how_long_a_request_waited_is_told_with_its_first_step() -> None:
    ring = Ring(EngineLimits(max_running=1))
    outputs = [*ring.send(generate("a", PROMPT, max_tokens=2)), *ring.send(generate("b", PROMPT, max_tokens=2))]
    ring.now = 3.5
    while ring.plans:
        outputs += ring.step()
    opened = [each for output in outputs if isinstance(output, SendTokens) for each in output.batch.opened]
    assert {each.request: each.queued for each in opened} == {"a": 0.0, "b": 3.5}
