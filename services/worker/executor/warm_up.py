"""Runs dummy plans on a backend: to see what a full batch takes, and to pay every first-time cost before users do."""

from __future__ import annotations

from mmap import mmap
from typing import cast

from msgspec.structs import replace

from services.worker.backend import Backend, run_step
from services.worker.batch.mapped_rows import MappedRows
from shared.blocks import blocks_for
from shared.ids import Incarnation, InstanceId, RowsName, SequenceId
from shared.kv_groups import token_tables
from shared.media.seen_rows import blocks_of_prompt
from shared.messages.generation import EMBEDDING_BYTES, EmbeddingDtype, PromptEmbeds, SamplingOptions
from shared.messages.worker import MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN, NewSequence, SequenceWork, StateCopy, StepPlan
from shared.packing import pack

_EVERYTHING = SamplingOptions(
    seed=0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    logprobs=5,
    allowed_token_ids=(0, 1),
    bad_words=((0,), (0, 1)),
    thinking_budget=0,
    thinking_end=(0, 1),
)
_SCORED = replace(_EVERYTHING, prompt_logprobs=5)
_RANDOM = SamplingOptions(seed=0, top_p=0.9)
"""What most ask for. Where nothing changes the logits they are drawn from as they are, by kernels of their own."""


def warm_up(backend: Backend, *, rows: int, sequences: int, beside: int = 1) -> None:
    """A prefill step of about `rows` rows over at most `sequences` sequences, then a decode step of each, with
    everything that can be asked of the sampler; then a row that asks for little. Leaves no sequence behind. `beside`:
    rows beside the first prompts, where the model attends to any."""
    tables = token_tables(backend.kv_groups)
    lengths, size = _lengths(rows, sequences, _longest(backend)), backend.card.block_size
    run_step(backend, _with_rows(_prefills(lengths, size, tables=tables), backend, beside))
    run_step(backend, _decodes(len(lengths), backend.max_speculate))
    backend.reset()
    run_step(backend, _prefills([1], size, _RANDOM, tables=tables))
    backend.reset()


def warm_up_shapes(backend: Backend, *, rows: int) -> None:
    """Prefills of 2, 4, 8 … up to `rows` rows, each from the start of a prompt and behind a prefix as long as there may
    be: kernels are compiled for some sizes of work anew, which users should not wait for. Behind a prefix, layers with
    states begin at those of a checkpoint; without any, no prompt begins there."""
    longest = _longest(backend)
    for count in _doubling(min(rows, longest)):
        warm_up(backend, rows=count, sequences=1)
        if backend.state_checkpoints != 0:
            run_step(backend, _behind_prefix(count, longest, backend))
            backend.reset()


def _longest(backend: Backend) -> int:
    """Tokens of a prompt, behind which another one can be drawn."""
    tables = token_tables(backend.kv_groups)
    return min(backend.card.max_model_len, backend.num_blocks // tables * backend.card.block_size) - 1


def _doubling(most: int) -> list[int]:
    return [*(1 << power for power in range(1, most.bit_length()) if 1 << power < most), most]


def _behind_prefix(count: int, longest: int, backend: Backend) -> StepPlan:
    """A prompt whose last `count` tokens are left to be computed. It restores a checkpoint, whatever that holds."""
    tables = token_tables(backend.kv_groups)
    new = NewSequence(
        sequence=SequenceId(0),
        tokens=pack([0] * longest),
        prompt_length=longest,
        computed=longest - count,
        blocks=pack(range(blocks_for(longest + 1, backend.card.block_size) * tables)),
        sampling=_RANDOM,
    )
    work = SequenceWork(SequenceId(0), count, b"", True)
    restored = (StateCopy(SequenceId(0), 0),) if backend.state_checkpoints and longest > count else ()
    return StepPlan(epoch=Incarnation(0), step=0, new=(new,), work=(work,), restored=restored)


def _lengths(rows: int, sequences: int, longest: int) -> list[int]:
    """Prompts that add up to `rows`, as many and as even as can be."""
    count = min(sequences, rows)
    even = max(1, min(longest, rows // count))
    return [max(1, min(longest, rows - even * (count - 1))), *[even] * (count - 1)]


def _prefills(lengths: list[int], block_size: int, sampling: SamplingOptions = _EVERYTHING, *, tables: int) -> StepPlan:
    """Every sequence writes to the same blocks, the first of the pool: what is computed is nobody's business. Each has
    so many block tables."""
    scored = _scored(lengths) if sampling is _EVERYTHING else set()
    new = [
        NewSequence(
            sequence=SequenceId(number),
            tokens=pack([0] * length),
            prompt_length=length,
            computed=0,
            blocks=pack(range(blocks_for(length + 1, block_size) * tables)),
            sampling=_SCORED if number in scored else sampling,
        )
        for number, length in enumerate(lengths)
    ]
    work = [SequenceWork(SequenceId(number), length, b"", True) for number, length in enumerate(lengths)]
    return StepPlan(epoch=Incarnation(0), step=0, new=tuple(new), work=tuple(work))


def _with_rows(plan: StepPlan, backend: Backend, rows: int) -> StepPlan:
    """`plan` whose first sequences have so many `rows` beside their prompts together, each as many as it may."""
    card, size, new = backend.card, backend.card.block_size, list(plan.new)
    if (model := card.reads_beside) is None:
        return plan
    dtype = cast(EmbeddingDtype, card.dtype)
    row_bytes = model.row_size * EMBEDDING_BYTES[dtype]
    for number, each in enumerate(plan.new):
        count = min(rows, model.rows)
        if not count:
            break
        rows -= count
        kept = MappedRows(RowsName(bytes(16)), count, InstanceId(""), rows=mmap(-1, count * row_bytes))
        embeds = PromptEmbeds(
            dtype=dtype, size=model.row_size, rows=b"", runs=((0, count),), media=(kept,), encoded=True
        )
        blocks = pack(range(blocks_of_prompt(embeds, size, backend.kv_groups)))
        new[number] = replace(each, prompt_embeds=embeds, encoded_blocks=blocks)
    return replace(plan, new=tuple(new))


def _scored(lengths: list[int]) -> set[int]:
    """The sequences whose prompts are scored: as many as a plan may hold, the shortest ones."""
    chosen, rows = set(), 0
    for number in reversed(range(len(lengths))):
        rows += lengths[number]
        if rows > MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN:
            break
        chosen.add(number)
    return chosen


def _decodes(sequences: int, speculate: int) -> StepPlan:
    work = tuple(SequenceWork(SequenceId(number), 1, b"", True, speculate) for number in range(sequences))
    return StepPlan(epoch=Incarnation(0), step=1, work=work)
