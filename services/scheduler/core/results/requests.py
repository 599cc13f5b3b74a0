"""The requests that the engine has accepted, until their final answer: validated, queued, cancelled, ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, assert_never

from msgspec.structs import replace

from services.scheduler.core.health.canary import CANARY_GATEWAY
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.queue.grammars import GrammarOutcome, Grammars
from services.scheduler.core.queue.sequence_queues import SequenceQueues
from services.scheduler.core.results.outbox import EngineOutbox, token_entry
from services.scheduler.core.sequence import FLOAT_BYTES, QueueKey, Sequence
from services.scheduler.core.transfer.epoch_transfers import EpochTransfers
from services.scheduler.core.transfer.hand_over import HandOverSender
from shared.blocks import HASH_BYTES, blocks_for
from shared.ids import RequestId, SequenceId
from shared.media.seen_rows import blocks_of_rows
from shared.messages.gateway import Death, RequestFailed, RequestRejected
from shared.messages.generation import Generation, PoolingOptions, PromptEmbeds
from shared.messages.model_card import AudioModel, CrossImageModel, EncoderDecoderModel, ModelCard
from shared.messages.scheduler import Cancel, GenerateRequest, GrammarFault, SequenceFailed, StopMatched
from shared.messages.worker import MAX_POOLED_BYTES_PER_PLAN
from shared.packing import TOKEN_BYTES, unpack

OVERLOADED_RETRY = 1.0
"""Seconds after which a client should retry when the waiting queue is full (`Retry-After`)."""


class _InvalidRequest(Exception):
    def __init__(self, field: str | None, message: str, code: Literal["context_length_exceeded"] | None = None) -> None:
        super().__init__(message)
        self.field, self.message, self.code = field, message, code


class RequestValidator:
    """Knows one model on one engine's memory; holds no state of requests. A request that this engine can never serve is
    refused at once instead of waiting for ever."""

    def __init__(
        self, card: ModelCard, num_blocks: int, max_tokens: int, limits: EngineLimits, *, prefix_caching: bool = True
    ) -> None:
        """`max_tokens`: of a sequence that takes all of the `num_blocks`. `prefix_caching`: whether sequences may begin
        behind blocks of others."""
        self.card = card
        """The model's, with the adapters that there are now."""
        self._policy = limits.policy
        self._uncut = limits.max_batch_tokens - limits.max_running + 1
        """Prompt tokens that any step has room for beside its decodes."""
        self._prefix_caching = prefix_caching
        size = self._block_size = card.block_size
        self.context = min(card.max_model_len, max_tokens)
        """Tokens that a sequence may reach: the model's context, or all of KV memory where that is less."""
        self._bound = (
            f"this model's maximum context length is {card.max_model_len} tokens"
            if self.context == card.max_model_len
            else f"this engine's KV memory holds {self.context} tokens ({num_blocks} blocks of {size})"
        )

    def validate(self, generate: GenerateRequest, ticket: int) -> Sequence | RequestRejected:
        """The request's sequence, to be queued, or why it is invalid. `ticket`: its number in the order of arrival."""
        generation = generate.generation
        try:
            self._check_tokens(generation)
            limit = self._limit(generation)
        except _InvalidRequest as invalid:
            return RequestRejected(
                request=generation.request,
                attempt=generation.attempt,
                kind="invalid_request",
                message=invalid.message,
                field=invalid.field,
                code=invalid.code,
            )
        if not self._prefix_caching and generation.prefix_caching:
            generate = replace(generate, generation=replace(generation, prefix_caching=False, block_hashes=b""))
        priority = generation.priority if self._policy == "priority" else 0
        eos = () if generation.stopping.ignore_eos else self.card.eos_token_ids
        stops = frozenset((*generation.stopping.stop_token_ids, *eos))
        return Sequence(generate, QueueKey(priority, generation.arrival, ticket), limit, stops, self._block_size)

    def _check_tokens(self, generation: Generation) -> None:
        count, rest = divmod(len(generation.tokens), TOKEN_BYTES)
        if rest or not 0 < generation.prompt_length <= count:
            raise _InvalidRequest("prompt", "the prompt must hold at least one token")
        hashed = count // self._block_size if generation.prefix_caching else 0
        if len(generation.block_hashes) != hashed * HASH_BYTES:
            raise _InvalidRequest("prompt", "block hashes do not match the prompt")
        if generation.lora is not None and all(each.id != generation.lora for each in self.card.loras):
            raise _InvalidRequest("model", f"model: the adapter {generation.lora.hex()} is not served by this engine")
        if (beside := self.card.reads_beside) is not None and generation.gateway != CANARY_GATEWAY:
            _check_encoded(generation, beside, self._block_size)
        elif (embeds := generation.prompt_embeds) is not None:
            self._check_embeds(generation, embeds)
        if generation.prompt_embeds is not None and generation.sampling.prompt_logprobs is not None:
            allowed = "not allowed beside images, sounds and embeddings, whose tokens are not drawn: leave it out"
            raise _InvalidRequest("prompt_logprobs", f"prompt_logprobs: {allowed}")
        if not math.isfinite(generation.arrival):
            raise _InvalidRequest(None, "arrival must be a finite number")
        vocabulary = self.card.vocab_size
        prompt, images = unpack(generation.tokens), self.card.cross_images
        if images is not None and generation.prompt_embeds is not None:
            prompt = [token for token in prompt if token != images.token]
        for field, ids in (
            ("prompt", prompt),
            ("stop_token_ids", generation.stopping.stop_token_ids),
            ("logit_bias", [token for token, _ in generation.sampling.logit_bias]),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                wrong = next(i for i in ids if not 0 <= i < vocabulary)
                raise _InvalidRequest(field, f"{field}: token id {wrong} is not in the vocabulary of {vocabulary}")

    def _check_embeds(self, generation: Generation, embeds: PromptEmbeds) -> None:
        sounds = self.card.sounds
        expected = self.card.prompt_embeds or self.card.images or (None if sounds is None else sounds.row_size)
        if embeds.encoded:
            raise _InvalidRequest("prompt_embeds", "prompt_embeds: the model attends to no rows of an encoder's")
        if expected is None:
            raise _InvalidRequest("prompt_embeds", "prompt_embeds: this engine takes no prompts as embeddings")
        if not self.card.takes_rows(embeds.size):
            allowed = f"rows of {embeds.size} elements are not allowed; of {expected}"
            raise _InvalidRequest("prompt_embeds", f"prompt_embeds: {allowed}")
        if not embeds.fits(generation.prompt_length):
            raise _InvalidRequest("prompt_embeds", "prompt_embeds: one row for each token of the prompt is expected")
        longest = max((n for (_, n), mutual in zip(embeds.runs, embeds.mutual, strict=False) if mutual), default=0)
        if longest > self._uncut:
            most = f"{self._uncut} are, which is max_batch_tokens beside max_running"
            raise _InvalidRequest(
                "messages", f"messages: an image of {longest} tokens is not allowed in a step; {most}"
            )

    def _limit(self, generation: Generation) -> int:
        prompt, wanted = generation.prompt_length, generation.stopping.max_tokens
        if generation.pooling is not None:
            return self._pooled_limit(generation, generation.pooling)
        if prompt >= self.context:
            raise _InvalidRequest(
                "prompt",
                f"{self._bound}; the prompt has {prompt}, which leaves no room for an answer",
                "context_length_exceeded",
            )
        if wanted is None:
            return self.context
        if wanted < 0 or prompt + wanted > self.context:
            raise _InvalidRequest(
                "max_tokens",
                f"{self._bound}; {prompt + wanted} were requested ({prompt} in the prompt, {wanted} to generate)",
                "context_length_exceeded",
            )
        return prompt + wanted

    def _pooled_limit(self, generation: Generation, pooling: PoolingOptions) -> int:
        """One more than the prompt: planning takes the vector for the one token that is drawn behind it."""
        prompt = generation.prompt_length
        if self.card.pooling is None:
            raise _InvalidRequest("model", "model: this engine makes no embeddings")
        if pooling.dimensions > self.card.pooling.size:
            allowed = f"dimensions: {pooling.dimensions} is not allowed; 1 to {self.card.pooling.size} are"
            raise _InvalidRequest("dimensions", allowed)
        if prompt > self.context:
            message = f"{self._bound}; the prompt has {prompt}"
            raise _InvalidRequest("prompt", message, "context_length_exceeded")
        most = MAX_POOLED_BYTES_PER_PLAN // (FLOAT_BYTES * pooling.dimensions)
        if pooling.pooling == "all" and (vectors := pooling.vectors(unpack(generation.tokens))) > most:
            allowed = f"vectors of {vectors} tokens are not allowed; of {pooling.dimensions} numbers each, {most} are"
            raise _InvalidRequest("input", f"input: {allowed}")
        return prompt + 1


def _check_encoded(
    generation: Generation, beside: AudioModel | EncoderDecoderModel | CrossImageModel, block_size: int
) -> None:
    """Raises _InvalidRequest where rows beside the prompt are missing, or are none of the model's."""
    hears, embeds = isinstance(beside, AudioModel), generation.prompt_embeds
    if isinstance(beside, CrossImageModel):
        if embeds is not None:
            _check_images_beside(generation, embeds, beside, block_size)
        return
    if embeds is None or not embeds.encoded:
        what = (
            "writes down what is said, by /v1/audio/transcriptions"
            if hears
            else "is an encoder with a decoder, which answers prompts of /v1/completions"
        )
        raise _InvalidRequest("model", f"model: it {what} alone")
    if embeds.size != beside.row_size or not embeds.fits(generation.prompt_length) or embeds.count > beside.rows:
        field = "file" if hears else "prompt"
        allowed = f"{beside.rows} of {beside.row_size} elements at most are"
        raise _InvalidRequest(field, f"{field}: {embeds.count} rows of {embeds.size} are not allowed; {allowed}")


def _check_images_beside(
    generation: Generation, embeds: PromptEmbeds, images: CrossImageModel, block_size: int
) -> None:
    """Raises _InvalidRequest."""
    if not embeds.encoded or embeds.size != images.row_size or not embeds.fits(generation.prompt_length):
        raise _InvalidRequest("messages", "messages: the model's prompts have images, and no other rows")
    if blocks_of_rows(embeds, block_size) > blocks_for(images.rows, block_size):
        raise _InvalidRequest(
            "messages", f"messages: {embeds.count} rows of images are not allowed in a prompt; {images.rows} are"
        )


class EngineRequests:
    """Owns the requests of one epoch: when that is over, all have ended."""

    def __init__(
        self,
        validator: RequestValidator,
        limits: EngineLimits,
        tickets: Iterator[int],
        grammars: Grammars,
        queues: SequenceQueues,
        transfers: EpochTransfers,
        sender: HandOverSender,
        outbox: EngineOutbox,
    ) -> None:
        self.held: dict[RequestId, Sequence] = {}
        """Every request that this engine holds; only this class writes it."""
        self._validator = validator
        self._limits = limits
        self._tickets = tickets
        self._grammars = grammars
        self._queues = queues
        self._hand_overs = transfers.hand_overs
        self._remote = transfers.remote
        self._connector = transfers.connector_saves
        self._sender = sender
        self._outbox = outbox

    def receive(self, generate: GenerateRequest, now: float) -> None:
        """Queues a request, or refuses it. A request that arrives after its own cancel, or after a newer attempt, is
        dropped. An older attempt that is still held ends in favour of the new one."""
        generation = generate.generation
        request, attempt = generation.request, generation.attempt
        held = self.held.get(request)
        if generate.handed is not None:
            self._sender.forget(request)
        if self._outbox.fence.is_closed(request, attempt) or (held is not None and held.generation.attempt >= attempt):
            self._outbox.disown(generate)
            return
        if held is not None:
            self.end(held, tell_detokenizer=True)
        sequence = self._validator.validate(generate, next(self._tickets))
        if isinstance(sequence, RequestRejected):
            refusal = sequence
        elif sequence.grammar is not None and (error := self._grammars.error(sequence.grammar.key)) is not None:
            refusal = _refused_grammar(generation, error)
        elif self._queues.backlog(self._limits.max_running) >= self._limits.max_waiting:
            waiting = f"{self._limits.max_waiting} requests are waiting already, and no more may"
            refusal = _overloaded(generation, waiting)
        else:
            sequence.last_token_at = now
            self._accept(sequence)
            return
        self._outbox.refuse(generate, refusal)

    def pass_on(self, sequence: Sequence) -> None:
        """Another engine computes the prompt; the same attempt may come back."""
        del self.held[sequence.generation.request]
        self._queues.remove(sequence)

    def _accept(self, sequence: Sequence) -> None:
        other = sequence.transfer.decode_on
        # A hand-over passes through a KV store, by the names of blocks.
        if other is not None and not (sequence.generation.prefix_caching and self._sender.possible(other)):
            sequence.transfer.stay()
        self.held[sequence.generation.request] = sequence
        self._queues.add(sequence)
        if len(sequence.tokens.known) >= sequence.tokens.limit:  # earlier attempts produced every token
            self._outbox.streams.open(sequence, 0, queued=0.0)
            self._outbox.streams.pending[sequence.detokenizer].entries.append(token_entry(sequence, (), "length"))
            self.end(sequence, tell_detokenizer=False)

    def call_off(self, message: Cancel | StopMatched) -> bool:
        """Ends the request if it is held, in this attempt or an older one. Returns whether it was."""
        sequence = self.held.get(message.request)
        if sequence is None or sequence.generation.attempt > message.attempt:
            return False
        self.end(sequence, tell_detokenizer=isinstance(message, Cancel))
        return True

    def end(self, sequence: Sequence, *, tell_detokenizer: bool) -> None:
        """Ends the request's attempt and frees its blocks. The caller has sent the final answer, or sends it now.
        `tell_detokenizer` is False if the detokenizer knows of the end by a token, or requested it."""
        del self.held[sequence.generation.request]
        self._remote.release(sequence.generation.request)
        if self._hand_overs.waiting:
            self._hand_overs.forget(sequence)
        if self._connector is not None:
            self._connector.finish_request(sequence)
        self._queues.remove(sequence)
        self._outbox.fence.close(sequence.generation.request, sequence.generation.attempt)
        self._outbox.streams.drop_held(sequence)
        if tell_detokenizer:
            self._outbox.streams.abandon(sequence)

    def end_where(self, concerned: Callable[[Sequence], bool]) -> None:
        """Ends them without an answer, because no client waits for one any more."""
        for sequence in [s for s in self.held.values() if concerned(s)]:
            self.end(sequence, tell_detokenizer=True)

    def fail_where(
        self,
        concerned: Callable[[Sequence], bool],
        reason: str,
        *,
        tell_detokenizer: bool,
        deaths: Mapping[SequenceId, Death] | None = None,
    ) -> None:
        """Ends them, and sends their gateways `reason` as the failure. `deaths`: how each sequence that was being
        computed was there when a process died."""
        for sequence in [s for s in self.held.values() if concerned(s)]:
            self.end(sequence, tell_detokenizer=tell_detokenizer)
            generation, tokens = sequence.generation, sequence.tokens
            death = None if deaths is None else deaths.get(sequence.id)
            reached = 0 if death is None else tokens.length - tokens.prompt_length
            failed = RequestFailed(generation.request, generation.attempt, reason, death, reached)
            self._outbox.send_to_gateway(generation, failed)

    def record_grammars(self, outcomes: list[GrammarOutcome]) -> None:
        """Takes the workers' answers: sequences whose grammar was compiled join the queue, the others end."""
        for sequence, error, fault in outcomes:
            if error is None:
                self._queues.finish_compiling(sequence)
            else:
                self._end_guided(sequence, error, fault)

    def record_failed(self, failed: SequenceFailed) -> None:
        """The ranks cannot go on with the sequence: it ends, and tokens that they drew for it are dropped. It is no
        error if it has ended already."""
        sequence = self._queues.by_id.get(failed.sequence)
        if sequence is None:
            return
        if failed.fault == "invalid_args" or failed.fault == "processor":
            self.end(sequence, tell_detokenizer=True)
            self._outbox.send_to_gateway(sequence.generation, _refused_args(sequence.generation, failed))
        elif failed.fault == "nan":
            self._queues.forget_names(sequence)
            self.end(sequence, tell_detokenizer=True)
            self._outbox.send_to_gateway(sequence.generation, _undefined(sequence.generation, failed))
        elif sequence.grammar is not None:
            self._grammars.record_failure(sequence.grammar.key, failed.error, failed.fault)
            self._end_guided(sequence, failed.error, failed.fault)

    def _end_guided(self, sequence: Sequence, error: str, fault: GrammarFault) -> None:
        """With the answer that `fault` asks for: nothing helps, another time, or another attempt."""
        self.end(sequence, tell_detokenizer=True)
        generation = sequence.generation
        answer: RequestRejected | RequestFailed
        match fault:
            case "refused":
                answer = _refused_grammar(generation, error)
            case "busy":
                answer = _overloaded(generation, error)
            case "lost" | "died":
                died = fault == "died"
                answer = RequestFailed(generation.request, generation.attempt, error, grammar_died=died)
            case _:
                assert_never(fault)
        self._outbox.send_to_gateway(generation, answer)


def _overloaded(generation: Generation, message: str) -> RequestRejected:
    request, attempt = generation.request, generation.attempt
    return RequestRejected(
        request=request, attempt=attempt, kind="overloaded", message=message, retry_after=OVERLOADED_RETRY
    )


def _refused_grammar(generation: Generation, error: str) -> RequestRejected:
    """Which of the client's fields the grammar came from, the gateway knows."""
    request, attempt = generation.request, generation.attempt
    return RequestRejected(request=request, attempt=attempt, kind="invalid_request", message=error, field="grammar")


def _undefined(generation: Generation, failed: SequenceFailed) -> RequestFailed | RequestRejected:
    """A client's own embeddings may come to what no model computes; what comes of tokens does not."""
    request, attempt = generation.request, generation.attempt
    if generation.prompt_embeds is None:
        return RequestFailed(request, attempt, failed.error, caches_doubtful=True)
    message = f"prompt_embeds: {failed.error} of these rows; those of the model's own embeddings are near 0"
    return RequestRejected(
        request=request, attempt=attempt, kind="invalid_request", message=message, field="prompt_embeds"
    )


def _refused_args(generation: Generation, failed: SequenceFailed) -> RequestRejected:
    """Another attempt would have the same arguments, and the same processor."""
    request, attempt = generation.request, generation.attempt
    if failed.fault == "invalid_args":
        return RequestRejected(
            request=request, attempt=attempt, kind="invalid_request", message=failed.error, field="vllm_xargs"
        )
    return RequestRejected(request=request, attempt=attempt, kind="poisoned", message=failed.error)
