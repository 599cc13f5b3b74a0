"""Batches that move the one before on by a place are those that are made anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.batch.batch import Batch, BrokenPlan
from services.worker.batch.decode_reuse import DecodeReuse
from services.worker.batch.sequences import SequenceTable
from services.worker.sampling.parameters import SamplingBatch
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import blocks_for
from shared.ids import SequenceId
from shared.kv_groups import NULL_BLOCK, KvCacheGroup
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence, SequenceWork
from shared.packing import pack

MOST, LONGEST, VOCABULARY = 4, 90, 50
PARAMS = (
    SamplingOptions(seed=1),
    SamplingOptions(seed=2, temperature=0.7, top_k=3),
    SamplingOptions(seed=3, repetition_penalty=1.2, logprobs=1),
    SamplingOptions(seed=4, thinking_budget=3, thinking_end=(7,)),
)


GROUPS = (
    (),
    (KvCacheGroup(layers=2, window=17),),
    (KvCacheGroup(layers=2), KvCacheGroup(layers=2, window=1), KvCacheGroup(layers=1, window=40)),
)


def table(groups: tuple[KvCacheGroup, ...]) -> SequenceTable:
    return SequenceTable(
        max_sequences=MOST,
        max_model_len=LONGEST,
        num_blocks=3000,
        vocab_size=VOCABULARY,
        block_size=BLOCK_SIZE,
        groups=groups,
    )


@dataclass
class Ranks:
    """One that makes every batch anew, and one that does not; both are told the same."""

    groups: tuple[KvCacheGroup, ...] = ()
    lengths: dict[SequenceId, int] = field(default_factory=dict)
    """Tokens that are known, or on their way."""
    computed: dict[SequenceId, int] = field(default_factory=dict)
    held: dict[SequenceId, int] = field(default_factory=dict)
    moved_on: int = 0
    _number: int = 0
    _block: int = 1

    def __post_init__(self) -> None:
        self.anew, self.steady = table(self.groups), table(self.groups)
        self.decodes = DecodeReuse(self.steady)

    def add(self, prompt: int, params: SamplingOptions, min_tokens: int) -> None:
        self._number += 1
        new = NewSequence(
            sequence=SequenceId(self._number),
            tokens=pack(range(prompt)),
            prompt_length=prompt,
            computed=0,
            blocks=b"",
            sampling=params,
            min_tokens=min_tokens,
            stop_token_ids=(2,),
        )
        for each in (self.anew, self.steady):
            each.add(new)
        self.lengths[new.sequence], self.computed[new.sequence], self.held[new.sequence] = prompt, 0, 0

    def release(self, sequence: SequenceId) -> None:
        for each in (self.anew, self.steady):
            each.release(sequence)
        del self.lengths[sequence]

    def work(self, sequence: SequenceId, most: int, early: int, speculate: int) -> SequenceWork:
        """As many of its tokens as `most`, with the blocks for them and `early` more; a decode where one is left."""
        count = min(most, self.lengths[sequence] - self.computed[sequence])
        self.computed[sequence] += count
        missing = max(0, blocks_for(self.computed[sequence], BLOCK_SIZE) + early - self.held[sequence])
        missing = min(missing, blocks_for(LONGEST + 1, BLOCK_SIZE) - self.held[sequence])
        self.held[sequence] += missing
        ids = missing * max(1, len(self.groups))
        self._block += ids
        blocks = pack(range(self._block - ids, self._block))
        return SequenceWork(sequence, count, blocks, self.computed[sequence] == self.lengths[sequence], speculate)

    def step(self, work: tuple[SequenceWork, ...], known: bool, drawn: int) -> None:
        """`known`: nobody has come or gone."""
        scheduled = self.anew.scheduled(work)
        batch = self.decodes.next(work) if known else None
        if not scheduled.work:  # all of them are full
            assert batch is None
            self.decodes.forget()
            self.steady.scheduled(work)
            return
        expected = self.anew.batch(scheduled)
        if batch is None:
            self.decodes.forget()
            batch = self.steady.batch(self.steady.scheduled(work))
            self.decodes.remember(work, batch)
        else:
            self.moved_on += 1
        assert shown(batch, self.groups) == shown(expected, self.groups)
        tokens = (drawn + np.arange(len(batch.sampled), dtype=np.int32)) % VOCABULARY
        for each in (self.anew, self.steady):
            each.fill(batch.sampled_indices, each.advance(batch.sampled_indices), tokens)
        for sequence in batch.sampled:
            self.lengths[sequence] += 1
        rows = batch.rows
        assert (self.steady.tokens[rows.seq_indices, rows.positions] == expected.rows.ids).all()


def shown(batch: Batch, groups: tuple[KvCacheGroup, ...]) -> list[object]:
    """All of it but the tokens, which may not be known yet, and blocks behind windows, which nobody reads."""
    rows = batch.rows._replace(ids=batch.rows.positions)
    tables = [each.copy() for each in (rows.block_tables, *(other.block_tables for other in rows.others))]
    for group, each in zip(groups, tables, strict=False):
        for unit, position in zip(each, rows.positions[rows.query_starts[:-1]].tolist(), strict=True):
            unit[: group.first_needed(position, BLOCK_SIZE)] = NULL_BLOCK
    parts = [
        *rows._replace(others=(), block_tables=tables[0]),
        *tables[1:],
        *(other.kv_slots for other in rows.others),
        batch.logits_rows,
        batch.sampled,
        batch.sampled_indices,
        batch.drafted,
        batch.drawn_rows,
    ]
    return [_plain(part) for part in parts] + [_choices(batch.choices), batch.prompts, batch.merged]


def _choices(choices: SamplingBatch | None) -> object:
    if choices is None:
        return None
    return choices.features, _plain(choices.by_row), _plain(choices.position), _plain(choices.seq_indices), choices.mask


def _plain(part: object) -> object:
    return (str(part.dtype), part.shape, part.tolist()) if isinstance(part, np.ndarray) else part


event = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, 20), st.integers(0, 2)),
    st.tuples(st.just("add"), st.integers(1, 40), st.integers(0, len(PARAMS) - 1)),
    st.tuples(st.just("release"), st.integers(0, MOST - 1), st.just(0)),
    st.tuples(st.just("some"), st.integers(0, 2**MOST - 1), st.just(0)),
    st.tuples(st.just("ask"), st.integers(0, 2), st.just(0)),
)


@given(st.lists(event, min_size=3, max_size=14), st.integers(1, 60), st.sampled_from(GROUPS))
def test_steps_of_decodes_are_the_same_either_way(
    events: list[tuple[str, int, int]], chunk: int, groups: tuple[KvCacheGroup, ...]
) -> None:
    ranks = Ranks(groups)
    ranks.add(5, PARAMS[0], 0)
    known, drawn = False, 0

    def step(sequences: list[SequenceId], early: int = 0, speculate: int = 0) -> None:
        nonlocal known, drawn
        if sequences:
            ranks.step(tuple(ranks.work(each, chunk, early, speculate) for each in sequences), known, drawn)
            known, drawn = True, drawn + 1

    for what, number, detail in events:
        everybody = list(ranks.lengths)
        if what == "decode":
            for _ in range(number):
                step(everybody, early=detail)
        elif what == "add" and len(everybody) < MOST:
            ranks.add(number, PARAMS[detail], min_tokens=number % 3)
            known = False
        elif what == "release" and number < len(everybody):
            ranks.release(everybody[number])
            known = False
        elif what == "some":
            step([each for place, each in enumerate(everybody) if number >> place & 1])
        elif what == "ask":
            step(everybody, speculate=number)


@pytest.mark.parametrize("groups", GROUPS)
def test_most_steps_only_move_on(groups: tuple[KvCacheGroup, ...]) -> None:
    ranks = Ranks(groups)
    for prompt in (5, 16, 31):
        ranks.add(prompt, PARAMS[1], 0)
    for number in range(40):
        ranks.step(tuple(ranks.work(each, 60, 0, 0) for each in ranks.lengths), number > 0, number)
    assert ranks.moved_on == 38, "all but the prompts and the first decodes"


@pytest.mark.parametrize("prompts", [(60,), (5, 60)])
def test_who_has_filled_its_context_is_left_out(prompts: tuple[int, ...]) -> None:
    ranks = Ranks()
    for prompt in prompts:
        ranks.add(prompt, PARAMS[0], 0)
    for number in range(40):
        ranks.step(tuple(ranks.work(each, 60, 0, 0) for each in ranks.lengths), number > 0, number)
    assert max(ranks.lengths.values()) == LONGEST + 1


def test_a_scheduler_that_knows_no_groups_is_refused() -> None:
    ranks = Ranks(GROUPS[2])
    ranks.add(5, PARAMS[0], 0)
    with pytest.raises(BrokenPlan, match="1 block ids for 3 groups of layers"):
        ranks.steady.scheduled((SequenceWork(SequenceId(1), 5, pack([7]), True),))


def test_what_lies_behind_a_window_is_not_looked_at() -> None:
    """The scheduler may have given it to somebody else."""
    ranks = Ranks(GROUPS[2])
    ranks.add(60, PARAMS[0], 0)
    for number in range(20):
        ranks.step(tuple(ranks.work(each, 60, 0, 0) for each in ranks.lengths), number > 0, number)
    assert ranks.computed == {SequenceId(1): 79}
    whole, narrow, wide = (table[0, :5].tolist() for table in (ranks.steady.block_tables, *ranks.steady.blocks.others))
    assert [block != NULL_BLOCK for block in whole] == [True] * 5
    assert [block != NULL_BLOCK for block in narrow] == [False] * 4 + [True], "position 78 is in the fifth block"
    assert [block != NULL_BLOCK for block in wide] == [False] + [True] * 4, "as the last block began it saw 25 to 64"


def test_blocks_that_are_missing_are_a_broken_plan() -> None:
    ranks = Ranks()
    ranks.add(BLOCK_SIZE - 1, PARAMS[0], 0)
    for known in (False, True):
        ranks.step((ranks.work(SequenceId(1), 60, 0, 0),), known, 0)
    plain = SequenceWork(SequenceId(1), 1, b"", True)
    with pytest.raises(BrokenPlan, match="blocks are full"):
        ranks.decodes.next((plain,))


def test_other_sequences_or_another_order_are_made_anew() -> None:
    ranks = Ranks()
    for prompt in (5, 7):
        ranks.add(prompt, PARAMS[0], 0)
    for known in (False, True):
        ranks.step(tuple(ranks.work(SequenceId(each), 60, 0, 0) for each in (1, 2)), known, 0)
    one, two = (SequenceWork(SequenceId(each), 1, b"", True) for each in (1, 2))
    for work in ((one,), (two, one), (one, two, two), (one, asked_to_draft(two))):
        assert ranks.decodes.next(work) is None
    assert ranks.decodes.next((one, two)) is not None


def test_a_step_that_may_draft_is_made_anew_each_time() -> None:
    """Though its work stays the same while nobody has a draft: the drafter is asked again."""
    ranks = Ranks()
    ranks.add(5, PARAMS[0], 0)
    ranks.step((ranks.work(SequenceId(1), 60, 0, 0),), known=False, drawn=0)
    for number in range(5):
        ranks.step((ranks.work(SequenceId(1), 60, 0, 2),), known=True, drawn=number)
    assert ranks.moved_on == 0


def asked_to_draft(work: SequenceWork) -> SequenceWork:
    return SequenceWork(work.sequence, work.count, work.blocks, work.sample, 2)
