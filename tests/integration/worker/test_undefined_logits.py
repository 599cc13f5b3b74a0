"""NaN in one sequence's logits ends that sequence with a message, on both runners, and touches no other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.worker.backend import Backend, StepOutput, run_step
from services.worker.executor import runner
from services.worker.sampling.sampler import sample, undefined_rows
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.scheduler import SequenceFailed
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.plan_driver import GREEDY
from tests.support.worker.tiny_runner import tiny_runner

RANDOM = SamplingOptions(seed=7, temperature=1.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("undefined"))


def first_step(backend: Backend, *samplings: SamplingOptions) -> StepOutput:
    """One token for a prompt of each."""
    prompt = [5, 6, 7, 8]
    new = tuple(
        NewSequence(
            sequence=SequenceId(number),
            tokens=pack(prompt),
            prompt_length=len(prompt),
            computed=0,
            blocks=b"",
            sampling=sampling,
        )
        for number, sampling in enumerate(samplings)
    )
    work = tuple(SequenceWork(each.sequence, len(prompt), pack([int(each.sequence)]), True) for each in new)
    return run_step(backend, StepPlan(epoch=Incarnation(1), step=0, new=new, work=work))


@pytest.mark.parametrize("launching", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_a_row_of_nan_ends_its_sequence_and_no_other(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, sampling: SamplingOptions, launching: bool
) -> None:
    sound = first_step(tiny_runner(tiny.path, "torch", launching=launching), sampling, sampling, GREEDY)
    assert sound.failed == ()

    def spoilt(logits: Tensor, *more: object) -> object:
        logits[1] = math.nan
        return sample(logits, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "sample", spoilt)
    output = first_step(tiny_runner(tiny.path, "torch", launching=launching), sampling, sampling, GREEDY)
    assert output.failed == (SequenceFailed(SequenceId(1), "the model computed NaN", "nan"),)
    assert [one.tokens for one in output.sampled[::2]] == [one.tokens for one in sound.sampled[::2]]
    assert all(0 <= token < VOCABULARY for one in output.sampled for token in one.tokens), "it is embedded"


def test_a_greedy_draw_finds_a_single_nan() -> None:
    logits = torch.zeros(3, 50)
    logits[2, 17] = math.nan
    drawn = torch.from_numpy(logits.numpy().argmax(axis=1))
    assert undefined_rows(logits, drawn).tolist() == [False, False, True]
