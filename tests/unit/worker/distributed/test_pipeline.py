"""Which rank has which layers, and how a stage before the last one learns what was drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from services.worker.batch.sequences import SequenceTable
from services.worker.distributed.communicator import SingleRank
from services.worker.distributed.torch_ranks import RankTopology
from services.worker.executor.pending import STEPS_PER_STAGE, ExpectedSteps
from services.worker.executor.torch_backend import check_agreement
from services.worker.models.config import LayerConfig, ModelConfig, ModelError
from services.worker.models.sharding import stage_of
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import SequenceId
from shared.messages.worker import NewSequence, SequenceWork
from shared.packing import pack
from tests.support.worker.plan_driver import GREEDY
from tests.unit.worker.models.test_native_decoder import LLAMA


def model(layers: int) -> ModelConfig:
    return structs.replace(LLAMA, layers=(LayerConfig(window=None, rope=LLAMA.layers[0].rope),) * layers)


@pytest.mark.parametrize(
    ("layers", "count", "sizes"),
    [(32, 2, [16, 16]), (5, 2, [3, 2]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_layers_are_split_evenly_and_the_last_stage_has_none_of_the_rest(
    layers: int, count: int, sizes: list[int]
) -> None:
    stages = [stage_of(model(layers), index, count) for index in range(count)]
    assert [stage.num_layers for stage in stages] == sizes
    assert [stage.first_layer for stage in stages] == [sum(sizes[:index]) for index in range(count)]
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(i == 0, i == count - 1) for i in range(count)]


def test_layers_are_split_as_asked() -> None:
    stages = [stage_of(model(5), index, 2, (1, 4)) for index in range(2)]
    assert [(stage.first_layer, stage.end_layer) for stage in stages] == [(0, 1), (1, 5)]


@pytest.mark.parametrize(("layers", "count", "split"), [(5, 2, (2, 2)), (5, 2, (5,)), (5, 2, (5, 0)), (2, 3, None)])
def test_a_split_that_does_not_come_out_even_is_refused(layers: int, count: int, split: tuple[int, ...] | None) -> None:
    with pytest.raises(ModelError, match=f"{layers} layers cannot be split"):
        stage_of(model(layers), 0, count, split)


def test_ranks_stand_stage_by_stage() -> None:
    places = [RankTopology(rank, 6, 3) for rank in range(6)]
    assert [place.stage for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.in_stage for place in places] == [0, 1] * 3
    assert places[3].ranks_of(2) == [4, 5]
    assert [places[3].at(stage) for stage in range(3)] == [1, 3, 5]


class Said(SingleRank):
    """Another rank says something of its own."""

    def __init__(self, *others: str) -> None:
        self.others = others

    def all_gather(self, value: str) -> list[str]:
        return [value, *self.others]


def test_ranks_that_have_another_model_are_named() -> None:
    check_agreement(Said("model a", "model a"), "model a")
    with pytest.raises(ModelError, match="here model a; rank 2 has model b"):
        check_agreement(Said("model a", "model b"), "model a")


class LastStage:
    """What it draws comes when it is put here."""

    stage, stages = 0, 2

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.waits: list[int] = []
        self._expected = 0

    def expect_tokens(self, count: int) -> Step:
        self._expected += 1
        return Step(self, self._expected - 1, count)


class Step:
    def __init__(self, stage: LastStage, number: int, count: int) -> None:
        self.stage, self.number, self.count = stage, number, count

    def wait(self) -> Sequence[int]:
        self.stage.waits.append(self.number)
        assert len(self.stage.told[self.number]) == self.count
        return self.stage.told[self.number]


class FirstStage:
    """Does what a first stage does with its plans, but for computing."""

    def __init__(self) -> None:
        self.last = LastStage()
        self.table = SequenceTable(
            max_sequences=4, max_model_len=64, num_blocks=16, vocab_size=100, block_size=BLOCK_SIZE
        )
        self.outstanding = ExpectedSteps(self.last, self.table)  # type: ignore[arg-type]

    def add(self, sequence: int, tokens: list[int]) -> None:
        new = NewSequence(
            sequence=SequenceId(sequence),
            tokens=pack(tokens),
            prompt_length=len(tokens),
            computed=0,
            blocks=pack([sequence]),
            sampling=GREEDY,
        )
        self.table.add(new)

    def release(self, sequence: int) -> None:
        self.table.release(SequenceId(sequence))
        self.outstanding.release(SequenceId(sequence))

    def plan(self, *work: tuple[int, int]) -> list[int]:
        """(sequence, tokens) each, of which the next is drawn; the ids that are computed."""
        asked = tuple(SequenceWork(SequenceId(sequence), count, b"", True) for sequence, count in work)
        self.outstanding.receive_for(asked)
        batch = self.table.batch(self.table.scheduled(asked), None)
        self.outstanding.expect(batch)
        return [int(token) for token in batch.rows.ids]


def test_a_plan_waits_for_the_tokens_that_it_goes_on_with_and_for_no_others() -> None:
    first = FirstStage()
    for sequence in (1, 2, 3):
        first.add(sequence, [10 * sequence, 10 * sequence + 1])
        first.plan((sequence, 2))
    first.last.told = [[71], [72], [73]]
    assert first.plan((2, 1)) == [72]
    assert first.last.waits == [0, 1], "in their order, and not the third"


def test_the_token_of_a_sequence_that_left_is_not_given_to_who_has_its_place() -> None:
    first = FirstStage()
    first.add(1, [10, 11])
    first.plan((1, 2))
    first.release(1)
    first.add(2, [20, 21, 22])
    first.last.told = [[71], [72]]
    assert first.plan((2, 3)) == [20, 21, 22]
    assert first.plan((2, 1)) == [72]


def test_a_sequence_that_comes_back_with_its_token_does_not_get_it_twice() -> None:
    first = FirstStage()
    first.add(1, [10, 11])
    first.plan((1, 2))
    first.release(1)
    first.add(1, [10, 11, 71])
    first.last.told = [[71], [72]]
    assert first.plan((1, 3)) == [10, 11, 71]
    assert first.plan((1, 1)) == [72]


def test_what_nobody_goes_on_with_is_taken_in_some_time() -> None:
    first = FirstStage()
    first.last.told = [[7]] * 20
    for _ in range(20):
        first.add(1, [5])
        first.plan((1, 1))
        first.release(1)
    most = STEPS_PER_STAGE * first.last.stages
    assert len(first.last.waits) in (20 - most, 20 - most - 1), "so many may be on their way"
    first.outstanding.receive_all()
    assert first.last.waits == list(range(20))
