"""A plug-in's logits processor and its batch: what it is told of requests that come and go, and what it may not do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.sampling.plugins.interface import BatchUpdate, LogitsProcessor, ProcessorConfig, ProcessorParams
from services.worker.sampling.plugins.processor_batch import ProcessorBatch, RequestRow
from shared.messages.generation import SamplingOptions

VOCAB = 7


def row(number: int, tokens: list[int], prompt_length: int = 1, **args: Any) -> RequestRow:
    params = ProcessorParams({"number": number, **args}, SamplingOptions(seed=0))
    return RequestRow((number, 0, 0), params, np.array(tokens, dtype=np.int32), prompt_length)


class Recorder(LogitsProcessor):
    """Holds what it is told, and adds each request's number to its logits."""

    extra_args = ("number",)

    def __init__(self, config: ProcessorConfig | None = None) -> None:
        self.requests: dict[int, tuple[ProcessorParams, list[int], list[int]]] = {}
        self.size = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self.size = batch_update.batch_size
        for index in batch_update.removed:
            del self.requests[index]
        for index, params, prompt, output in batch_update.added:
            self.requests[index] = params, list(prompt), output  # type: ignore[assignment]
        for source, target, _ in batch_update.moved:
            assert target not in self.requests
            self.requests[target] = self.requests.pop(source)

    def apply(self, logits: Tensor) -> Tensor:
        assert sorted(self.requests) == list(range(self.size)) == list(range(len(logits)))
        for index, (params, _, _) in self.requests.items():
            assert logits[index, 0] == params.extra_args["number"], "the row is another request's"
            logits[index] += params.extra_args["number"]
        return logits


def test_each_request_keeps_its_row_however_others_come_and_go() -> None:
    chance, made = random.Random(5), list[Recorder]()

    def make() -> Recorder:
        made.append(Recorder())
        return made[-1]

    batch, outputs = ProcessorBatch("recorder", make), dict[int, list[int]]()
    for _ in range(200):
        for number in range(12):
            if chance.random() < 0.2:
                outputs.pop(number, None)
            elif chance.random() < 0.3:
                outputs.setdefault(number, [chance.randrange(9)] * chance.randrange(3))
        numbers = [number for number in outputs if chance.random() < 0.9]
        chance.shuffle(numbers)
        if not numbers:
            continue
        for number in numbers:
            outputs[number].append(chance.randrange(9))
        rows = [row(number, [number, *outputs[number]]) for number in numbers]
        logits = torch.tensor(numbers, dtype=torch.float32).unsqueeze(1).repeat(1, VOCAB)
        changed, failed = batch.apply(rows, logits.clone())
        assert failed == {}
        assert torch.equal(changed, logits * 2)
        held = {params.extra_args["number"]: output for params, _, output in made[-1].requests.values()}
        assert held == {number: outputs[number] for number in numbers}
    assert len(made) == 1, "it never failed"


class Choosy(Recorder):
    """Fails in the way that a request asks for."""

    def apply(self, logits: Tensor) -> Tensor:
        result = super().apply(logits)
        for index, (params, _, _) in self.requests.items():
            match params.extra_args.get("how"):
                case "raise":
                    raise RuntimeError("a bug")
                case "shape":
                    return result[:, :-1]
                case "none":
                    return None  # type: ignore[return-value]
                case "nan":
                    result[index, 3] = torch.nan
                case "infinity":
                    result[index, 3] = torch.inf
        return result


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raise", "the logits processor choosy failed: RuntimeError('a bug')"),
        ("shape", "apply must return logits of shape (1, 7), not (1, 6)"),
        ("none", "apply must return logits of shape (1, 7), not NoneType"),
        ("nan", "it returned NaN or infinity"),
        ("infinity", "it returned NaN or infinity"),
    ],
)
def test_a_request_that_it_fails_for_fails_alone(how: str, why: str) -> None:
    batch, logits = ProcessorBatch("choosy", Choosy), torch.arange(3.0).unsqueeze(1).repeat(1, VOCAB)
    for _ in range(2):
        rows = [row(0, [1, 2]), row(1, [1], how=how), row(2, [4])]
        changed, failed = batch.apply(rows, logits.clone())
        assert list(failed) == [1]
        assert why in failed[1]
        assert torch.equal(changed[[0, 2]], logits[[0, 2]] * 2)
    rest, failed = batch.apply([row(2, [4, 5]), row(0, [1, 2, 3])], logits[[2, 0]].clone())
    assert failed == {}
    assert torch.equal(rest, logits[[2, 0]] * 2)


def test_one_that_cannot_be_made_again_fails_what_asks_for_it() -> None:
    made = 0

    def once() -> LogitsProcessor:
        nonlocal made
        made += 1
        if made > 1:
            raise OSError("a file is gone")
        return Choosy()

    batch = ProcessorBatch("choosy", once)
    _, failed = batch.apply([row(0, [1], how="raise"), row(1, [1])], torch.arange(2.0).unsqueeze(1).repeat(1, VOCAB))
    assert len(failed) == 2
    assert "a file is gone" in failed[1]
