"""Whether decodes are captured, for which sizes, and what they are said to take."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from services.worker.distributed.communicator import SingleRank, SingleStage
from services.worker.graphs.capture import MAX_DRIVER_BYTES, MeasuredCapture
from services.worker.graphs.choice import DecodeGraphs, RankGraphs, why_eager
from services.worker.platforms.installed import built_in_platform
from services.worker.platforms.interface import MemoryReading, Platform
from services.worker.speculation.proposer import DraftSettings
from tests.support.worker.emulated_graphs import RunAgain

MIB = 1 << 20
CUDA = built_in_platform("cuda")


class Part:
    """Of an engine: operations, or the way to other ranks. `capturable` None: it says nothing of graphs."""

    rank = stage = 0

    def __init__(self, capturable: bool | None = None, name: str = "", world_size: int = 1, stages: int = 1) -> None:
        self.name = name
        self.world_size = world_size
        self.stages = stages
        if capturable is not None:
            self.capturable = capturable


@dataclass(frozen=True)
class Model:
    """As much of a decoder as is looked at."""

    ops: Part
    capturable: bool = True

    @property
    def ops_name(self) -> str:
        return self.ops.name


KERNELS = Model(Part(True))


def why(
    model: Model = KERNELS,
    platform: Platform = CUDA,
    ranks: object = None,
    stages: object = None,
    enforced: bool = False,
) -> str | None:
    return why_eager(model, platform, ranks or SingleRank(), stages or SingleStage(), enforced=enforced)


def test_one_gpu_with_kernels_that_can_be_captured_captures() -> None:
    assert why() is None
    assert why(ranks=Part(True, world_size=2)) is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"enforced": True}, "asked for"),
        ({"platform": built_in_platform("cpu")}, "no graphs on cpu"),
        ({"stages": Part(stages=2)}, "another stage"),
        ({"model": Model(Part(None, "torch"))}, "torch operations cannot"),
        ({"model": Model(Part(False, "odd"))}, "odd operations cannot"),
        ({"model": Model(Part(True), capturable=False)}, "may wait for the device"),
        ({"ranks": Part(False, world_size=2)}, "these collectives cannot"),
        ({"ranks": Part(None, world_size=2)}, "these collectives cannot"),
    ],
)
def test_everything_else_says_why_it_does_not(asked: dict[str, object], reason: str) -> None:
    assert reason in (why(**asked) or "")


@dataclass
class Parts:
    """As much of what runners are made of as is looked at."""

    max_num_seqs: int
    drafting: DraftSettings
    drafter: object = None
    decoder: Model = KERNELS
    platform: Platform = CUDA

    @property
    def card(self) -> Parts:
        return self

    max_model_len: int = 4096


def test_drafts_are_rows_of_a_step_of_decodes() -> None:
    assert DecodeGraphs.of(Parts(8, DraftSettings(0, False))).sizes == (1, 2, 4, 8)
    drafting = DecodeGraphs.of(Parts(8, DraftSettings(3, True)))
    assert drafting.sizes == (1, 2, 4, 8, 16, 24, 32)
    assert drafting.features


@dataclass(frozen=True)
class ModelThatDrafts:
    decoder: Model = KERNELS
    decodes: int = 2


def test_a_model_that_drafts_is_captured_beside_the_model() -> None:
    model, drafts = RankGraphs.of(Parts(8, DraftSettings(3, False), ModelThatDrafts()))
    assert model is not None
    assert drafts is not None
    assert (model.sizes[-1], drafts.sizes[-1]) == (32, 16)
    assert RankGraphs.of(Parts(8, DraftSettings(3, False), ModelThatDrafts(Model(Part(None))))).drafts is None
    assert RankGraphs.of(Parts(8, DraftSettings(3, False), object())).drafts is None


def measured(seen: list[MemoryReading], sizes: int) -> int:
    """What `sizes` graphs are said to take when the memory looked so around the first ones."""
    moments = iter(seen)
    capture = MeasuredCapture(RunAgain(), lambda: next(moments))
    for _ in seen[1:]:
        capture.capture(lambda: None)
    return capture.of_all(sizes)


def test_two_graphs_say_what_all_take() -> None:
    start, first, second = (
        MemoryReading(1000 * MIB, 10 * MIB),
        MemoryReading(780 * MIB, 210 * MIB),
        MemoryReading(770 * MIB, 215 * MIB),
    )
    assert measured([start, first, second], 2) == (220 + 10) * MIB
    assert measured([start, first, second], 35) == (220 + 34 * 10) * MIB
    assert measured([start, first], 1) == 220 * MIB


def test_what_others_take_or_give_back_meanwhile_is_not_counted() -> None:
    start = MemoryReading(9000 * MIB, 10 * MIB)
    assert measured([start, MemoryReading(1000 * MIB, 210 * MIB)], 1) == 200 * MIB + MAX_DRIVER_BYTES
    assert measured([start, MemoryReading(12_000 * MIB, 210 * MIB)], 1) == 200 * MIB
    assert measured([start, MemoryReading(9000 * MIB, 4 * MIB)], 1) == 0
