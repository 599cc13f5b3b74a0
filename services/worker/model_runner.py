"""The backend that computes: a decoder on CPU or CUDA, its KV memory, its sequences and its sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.worker.backend import StepOutput
from services.worker.guided.guided_sequences import GuidedSequences
from services.worker.guided.library import GrammarLibrary
from services.worker.kv.copier import KvShare
from services.worker.model.decoder import Decoder, KvCaches
from services.worker.ops import BatchMeta
from services.worker.outstanding import OutstandingTokens
from services.worker.parallel import Communicator
from services.worker.pipeline import Pipeline, SingleStage
from services.worker.sampling.parameters import Choices
from services.worker.sampling.sampler import Drawn, sample
from services.worker.sequences import Batch, SequenceTable
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import PromptScored, Sampled, StepTiming
from shared.messages.worker import StepPlan


class ModelRunner:
    """One rank; see :class:`services.worker.backend.Backend`. `torch_backend.create_backend` makes it."""

    def __init__(
        self,
        *,
        card: ModelCard,
        device: torch.device,
        decoder: Decoder,
        num_blocks: int,
        max_num_seqs: int,
        communicator: Communicator,
        digest: str,
        pipeline: Pipeline | None = None,
        grammars: GrammarLibrary | None = None,
    ) -> None:
        """`digest` tells this model's keys and values from those of any other. `grammars`: given to the rank that
        samples."""
        self._card = card
        self._device = device
        self._decoder = decoder
        self._num_blocks = num_blocks
        self._communicator = communicator
        self._pipeline = pipeline or SingleStage()
        self._caches: KvCaches = decoder.allocate_kv(num_blocks)
        self._kv = decoder.share_kv(self._caches, digest)
        self._sequences = SequenceTable(
            max_sequences=max_num_seqs,
            max_model_len=card.max_model_len,
            num_blocks=num_blocks,
            vocab_size=card.vocab_size,
        )
        self._outstanding = OutstandingTokens(self._pipeline, self._sequences)
        self._grammars = grammars
        self._guided = None if grammars is None else GuidedSequences(grammars, card.vocab_size)

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def kv(self) -> KvShare:
        return self._kv

    @property
    def grammars(self) -> GrammarLibrary | None:
        return self._grammars

    @property
    def max_speculate(self) -> int:
        return 0

    @property
    def max_jump_ahead(self) -> int:
        return 0

    def reset(self) -> None:
        self._outstanding.settle_all()
        self._sequences.clear()
        if self._guided is not None:
            self._guided.clear()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput:
        begun = time.perf_counter()
        for sequence in plan.released:
            self._sequences.release(sequence)
            self._outstanding.release(sequence)
            if self._guided is not None:
                self._guided.release(sequence)
        for new in plan.new:
            self._sequences.add(new)
            if self._guided is not None:
                self._guided.add(new)
        if not plan.work:
            return StepOutput((), _timing(begun, *[time.perf_counter()] * 3))
        self._outstanding.settle(plan.work)
        batch = self._sequences.batch(plan.work)
        ids, meta = on_device(batch, self._device)
        prepared = time.perf_counter()
        logits = self._decoder.forward(ids, meta, self._caches)
        choices = self._masked(batch)
        self._wait_for_device()
        forwarded = time.perf_counter()
        logits, scored = self._scored(batch, logits)
        sampled = self._sampled(batch, logits, choices)
        timing = _timing(begun, prepared, forwarded, time.perf_counter())
        return StepOutput(sampled, timing, scored=scored)

    def _scored(self, batch: Batch, logits: Tensor | None) -> tuple[Tensor | None, tuple[PromptScored, ...]]:
        """The logits to draw from, and what the others say of prompts."""
        if batch.merged is None or logits is None:
            return logits, ()
        drawn, scored = (torch.from_numpy(rows).to(logits.device) for rows in batch.merged[1:])
        told = batch.prompts.scored(logits.index_select(0, scored))
        return logits.index_select(0, drawn), told

    def _masked(self, batch: Batch) -> Choices | None:
        """How to draw, with what grammars allow; found out while the device computes."""
        mask = None if self._guided is None else self._guided.mask(batch.sampled)
        return batch.choices if batch.choices is None or mask is None else batch.choices.masked(mask)

    def _sampled(self, batch: Batch, logits: Tensor | None, choices: Choices | None) -> tuple[Sampled, ...]:
        """The next token of each sequence that asked for one; they are appended to the sequences."""
        if choices is None:
            return ()
        if self._pipeline.stage + 1 < self._pipeline.stages:
            self._outstanding.expect(batch)
            return ()
        if logits is not None:
            drawn = sample(logits, choices, self._sequences.history)
        else:
            drawn = Drawn([0] * len(batch.sampled), {})
        tokens = self._agreed(drawn.tokens)
        self._pipeline.tell(tokens)
        self._sequences.append(batch.sampled_slots, np.array(tokens, dtype=np.int32))
        if self._guided is not None:
            self._guided.take(batch.sampled, tokens)
        return tuple(
            Sampled(sequence, (token,), (drawn.logprobs[row],) if row in drawn.logprobs else None)
            for row, (sequence, token) in enumerate(zip(batch.sampled, tokens, strict=True))
        )

    def _agreed(self, tokens: list[int]) -> Sequence[int]:
        """Rank 0's tokens."""
        if self._communicator.world_size == 1:
            return tokens
        told = torch.tensor(tokens, dtype=torch.int32, device=self._device)
        agreed: list[int] = self._communicator.broadcast(told).tolist()
        return agreed

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, BatchMeta]:
    """The batch's token ids and the rest as tensors on `device`, in one copy."""
    arrays = (
        batch.ids,
        batch.positions,
        batch.kv_slots,
        batch.query_starts,
        batch.context_lens,
        batch.logits_rows,
        batch.block_tables.ravel(),
    )
    packed = torch.from_numpy(np.concatenate(arrays)).to(device)
    ids, positions, slots, starts, lengths, rows, tables = torch.split(packed, [len(array) for array in arrays])
    meta = BatchMeta(
        query_starts=starts,
        context_lens=lengths,
        block_tables=tables.view(batch.block_tables.shape),
        slots=slots,
        positions=positions,
        logits_rows=rows,
        num_decodes=batch.num_decodes,
        prefills=batch.prefills,
        max_query=batch.max_query,
        max_context=batch.max_context,
    )
    return ids, meta


def _timing(begun: float, prepared: float, forwarded: float, sampled: float) -> StepTiming:
    return StepTiming(wait=0.0, prepare=prepared - begun, forward=forwarded - prepared, sample=sampled - forwarded)
