"""Runs made-up plans on a backend: to see what a full batch takes, and to pay every first-time cost before users do."""

from __future__ import annotations

from services.worker.backend import Backend
from shared.blocks import BLOCK_SIZE
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingParams
from shared.messages.worker import NewSequence, StepPlan, Work
from shared.tokens import pack

_EVERYTHING = SamplingParams(
    seed=0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    logprobs=5,
)


def rehearse(backend: Backend, *, rows: int, sequences: int) -> None:
    """A prefill step of about `rows` rows over at most `sequences` sequences, then a decode step of each, with
    everything that can be asked of the sampler. Leaves no sequence behind."""
    lengths = _lengths(rows, sequences, min(backend.card.max_model_len - 1, backend.num_blocks * BLOCK_SIZE - 1))
    backend.step(_prefills(lengths))
    backend.step(_decodes(len(lengths)))
    backend.reset()


def _lengths(rows: int, sequences: int, longest: int) -> list[int]:
    """Prompts that add up to `rows`, as many and as even as can be."""
    count = min(sequences, rows)
    even = max(1, min(longest, rows // count))
    return [max(1, min(longest, rows - even * (count - 1))), *[even] * (count - 1)]


def _prefills(lengths: list[int]) -> StepPlan:
    """Every sequence writes to the same blocks, the first of the pool: what is computed is nobody's business."""
    new = [
        NewSequence(
            sequence=SequenceId(number),
            tokens=pack([0] * length),
            prompt_length=length,
            computed=0,
            blocks=pack(range(length // BLOCK_SIZE + 1)),
            sampling=_EVERYTHING,
        )
        for number, length in enumerate(lengths)
    ]
    work = [Work(SequenceId(number), length, b"", True) for number, length in enumerate(lengths)]
    return StepPlan(epoch=Incarnation(0), step=0, new=tuple(new), work=tuple(work))


def _decodes(sequences: int) -> StepPlan:
    work = tuple(Work(SequenceId(number), 1, b"", True) for number in range(sequences))
    return StepPlan(epoch=Incarnation(0), step=1, work=work)
