"""What steps need in operations, by the plans alone, and the peak that it is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.backend import StepOutput
from services.worker.flops import FlopsMeter, peak_flops
from services.worker.sim.shape import ModelShape, read_shape
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.scheduler import SampledTokens, StepTiming
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack
from tests.support.paths import DEMO_MODEL

SHAPE = ModelShape(
    vocab_size=10,
    max_positions=100,
    eos_token_ids=(2,),
    dtype="bfloat16",
    weight_bytes=1,
    kv_bytes_per_token=1,
    kv_heads=1,
    flops_per_token=1000,
    flops_per_pair=10,
    flops_per_sample=100_000,
)
ONE, TWO = SequenceId(1), SequenceId(2)


def new(sequence: SequenceId, length: int, computed: int = 0) -> NewSequence:
    return NewSequence(
        sequence=sequence,
        tokens=pack(range(length)),
        prompt_length=length,
        computed=computed,
        blocks=b"",
        sampling=SamplingOptions(seed=0),
    )


def plan(step: int, work: dict[SequenceId, int], starts: tuple[NewSequence, ...] = (), **more: object) -> StepPlan:
    items = tuple(SequenceWork(sequence, count, b"", True) for sequence, count in work.items())
    return StepPlan(epoch=Incarnation(1), step=step, new=starts, work=items, **more)  # type: ignore[arg-type]


def output(**tokens: int) -> StepOutput:
    sampled = tuple(SampledTokens(SequenceId(int(name[1:])), tuple(range(count))) for name, count in tokens.items())
    return StepOutput(sampled, StepTiming(wait=0.0, prepare=0.0, forward=1.0, sample=0.0))


def test_tokens_pairs_and_draws_count_and_the_ranks_share_them() -> None:
    for ranks in (1, 2):
        meter = FlopsMeter(SHAPE, ranks, None)
        first = meter.record(plan(0, {ONE: 4}, (new(ONE, 4),)), output(s1=1))
        assert first == (4 * 1000 + (1 + 2 + 3 + 4) * 10 + 100_000) / ranks
        second = meter.record(plan(1, {ONE: 1, TWO: 2}, (new(TWO, 18, computed=16),)), output(s1=1, s2=1))
        assert second == (3 * 1000 + (5 + 17 + 18) * 10 + 200_000) / ranks


def test_accepted_drafts_count_and_rejected_ones_do_not() -> None:
    meter = FlopsMeter(SHAPE, 1, None)
    meter.record(plan(0, {ONE: 4}, (new(ONE, 4),)), output(s1=1))
    assert meter.record(plan(1, {ONE: 1}), output(s1=3)) == 3 * 1000 + (5 + 2 * 5) * 10 + 100_000
    assert meter.record(plan(2, {ONE: 1}), output(s1=1)) == 1000 + 8 * 10 + 100_000


def test_nothing_is_kept_of_sequences_that_were_released_nor_of_an_epoch_before() -> None:
    meter = FlopsMeter(SHAPE, 1, None)
    meter.record(plan(0, {ONE: 9}, (new(ONE, 9),)), output(s1=1))
    assert meter.record(plan(1, {}, released=(ONE,)), None) == 0.0
    assert meter.record(plan(2, {ONE: 1}), output(s1=1)) == 1000 + 10 + 100_000
    meter.record(plan(0, {}), None)
    assert meter.record(plan(1, {ONE: 1}), output(s1=1)) == 1000 + 10 + 100_000


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("sim (h200)", 989e12),
        ("NVIDIA L40", None),
        ("cpu", None),
    ],
)
def test_peaks_are_those_of_data_sheets_where_the_device_is_known(device: str, peak: float | None) -> None:
    assert peak_flops(device, "bfloat16") == peak
    assert peak_flops(device, "float32") is None


def test_a_real_models_products_are_twice_its_weights() -> None:
    shape = read_shape(Path(DEMO_MODEL), "auto")
    meter = FlopsMeter(shape, 1, None)
    needed = meter.record(plan(0, {ONE: 1}, (new(ONE, 2),)), output())
    assert needed == shape.flops_per_token + shape.flops_per_pair
