"""Messages to every worker rank of an engine: what to compute next. They carry only what changed."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.ids import ArenaId, GrammarKey, Incarnation, LoraId, SequenceId
from shared.messages.generation import Grammar, PoolingOptions, PromptEmbeds, SamplingOptions

MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN = 512
"""Most prompt tokens in a plan that belong to sequences with `SamplingOptions.prompt_logprobs`. Each takes a row of
logits on the device, as wide as the vocabulary; other prompt tokens take none."""
MAX_PROMPT_LOGPROBS_PER_PLAN = 16_384
"""Most log-probabilities of prompt tokens in the result of one plan: each token's own and its most likely ones', a few
bytes each."""


MAX_POOLED_BYTES_PER_PLAN = 2**19
"""Most bytes of vectors (`SequencePooled`) in the result of one plan, so that it fits the bus beside other results."""


class GrammarRef(Struct, frozen=True, array_like=True):
    """A grammar that the workers have compiled: an earlier plan had it in `compile`, and it was answered without an
    error. Its text is never sent again, however many sequences follow it."""

    key: GrammarKey
    after: str = ""
    """See `Grammar.after`."""


class NewSequence(Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence that the worker does not hold yet (or no longer, after preemption)."""

    sequence: SequenceId
    tokens: bytes
    """Packed uint32: all known tokens, prompt and output so far."""
    prompt_length: int
    """Where output begins: sampling positions and the output penalties count from here."""
    computed: int
    """Number of leading tokens whose keys and values already lie in `blocks` (a prefix-cache hit)."""
    blocks: bytes
    """Packed uint32 block ids, in order; holds at least `computed` tokens. More come with the work. See
    `StepPlan`."""
    sampling: SamplingOptions
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that may not be drawn before `min_tokens` (end-of-sequence ids included unless ignored)."""
    grammar: GrammarRef | None = None
    """Grammar of the output; None without one."""
    pooling: PoolingOptions | None = None
    """Set where the step that computes its last token yields its vector in place of a token; None: a token."""
    lora: LoraId | None = None
    """Its adapter; None: the base model alone. All steps together, workers hold sequences of no more different ones at
    a time than `WorkerReport.max_loras`."""
    prompt_embeds: PromptEmbeds | None = None
    """What its prompt has in place of the embeddings of its tokens, or beside them; None: nothing."""
    encoded_blocks: bytes = b""
    """Packed uint32 ids of all blocks for keys and values of the rows that stand beside its prompt
    (`PromptEmbeds.encoded`); empty where it has none."""
    encoded_computed: bool = False
    """Whether keys and values of those rows lie in them already; else the first step that computes some of its tokens
    writes them."""
    cache_salt: str | None = None
    """See `Generation.cache_salt`. Only under an equal salt may drafts come from another sequence's answer."""


class SequenceWork(Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step: compute its next `count` tokens."""

    sequence: SequenceId
    count: int
    blocks: bytes
    """Packed ids of newly assigned blocks, appended to the sequence's block table. See `StepPlan`."""
    sample: bool
    """Draw a token from the last position; the worker appends it to the sequence itself."""
    speculate: int = 0
    """Tokens that the step may yield beyond the drawn one: drafted by the worker and verified in the same step, or
    forced by the grammar. `blocks` has room for all of them. Rejected ones are overwritten by a later step."""


class StateCopy(Struct, frozen=True, array_like=True):
    """All states of a sequence, from or to a checkpoint of the rank."""

    sequence: SequenceId
    checkpoint: int
    """Below `WorkerReport.state_checkpoints`."""


class Transfer(Struct, frozen=True, array_like=True, kw_only=True):
    """KV blocks to copy between a rank's memory and the node's KV store while steps compute; each rank copies its own
    heads.

    A load begins when all plans before this one are computed, a save when this one is. Transfers run in order. Until
    every rank has reported the transfer as done (`TransferProgress`), the blocks are not used and the slots not written
    by anyone else.
    """

    number: int
    """Consecutive within the epoch, from 0."""
    kind: Literal["load", "save"]
    arena: ArenaId
    path: str
    """The arena's file, relative to the directory that worker and store are configured with."""
    blocks: bytes
    """Packed uint32 block ids of the rank."""
    slots: bytes
    """Packed uint32 arena slots, one for each block."""
    generations: bytes
    """Packed uint64, one for each slot. If a slot has another generation its content has changed, and the transfer
    fails."""


class KvBlockRun(Struct, frozen=True, array_like=True):
    """Full blocks of one request that follow each other in it, for a KV connector."""

    request: str
    """The request and its attempt, as the connector knows them."""
    first: int
    """Which block of the request the first of them is."""
    blocks: bytes
    """Packed uint32 block ids of the rank."""
    hashes: bytes
    """Their names, 16 bytes each."""


class ConnectorLoad(Struct, frozen=True, array_like=True, kw_only=True):
    """Blocks that the KV connector fills, once all plans before this one are computed."""

    number: int
    """Of the transfer; see `Transfer.number`."""
    run: KvBlockRun
    awaited: bool = False
    """Whether it is over only when the connector names the request as received."""
    overlapped: bool = False
    """Whether this very plan computes tokens of the request behind these blocks: the forward pass waits before each
    layer's attention until the layer is loaded. Where that takes too long, the load counts as failed."""


class ConnectorSend(Struct, frozen=True, array_like=True, kw_only=True):
    """Blocks of a request that has ended, which are kept until the connector names the request as sent."""

    number: int
    request: str


class ConnectorPlan(Struct, frozen=True, array_like=True, kw_only=True):
    """What a plan has for the KV connector of an engine. Like transfers, its parts run beside steps and are reported by
    their numbers in `TransferProgress`, in any order."""

    loads: tuple[ConnectorLoad, ...] = ()
    save: int | None = None
    """Number of the transfer that saves `saves`; None where there are none."""
    saves: tuple[KvBlockRun, ...] = ()
    """Blocks that are whole once this plan is computed."""
    sends: tuple[ConnectorSend, ...] = ()
    metadata: bytes | None = None
    """What the connector's half beside the scheduler made for its halves beside the ranks; only they know what it
    means. None: it could not be made, so that nothing of this is done, and all of it is reported as failed."""

    @property
    def numbers(self) -> list[int]:
        """Of all its transfers."""
        save = () if self.save is None else (self.save,)
        return [*(load.number for load in self.loads), *save, *(send.number for send in self.sends)]


SleepLevel = Literal[1, 2]
"""What a rank gives up until it is woken: at either level weights, KV cache and device. 1: the kernel keeps of the
weights' files what it read, as long as it has the memory. 2: it gives that up, too."""


class SleepRank(Struct, frozen=True, array_like=True, tag=True):
    """scheduler → every rank: give up your memory."""

    level: SleepLevel


class WakeRank(Struct, frozen=True, array_like=True, tag=True):
    """scheduler → every rank: load the model."""

    number: Incarnation
    """Unlike any before: ranks that wake up by it meet under it."""


class PingRank(Struct, frozen=True, array_like=True, tag=True):
    """scheduler → every rank: a step is late; publish your lifecycle at once, if you live."""


RankOrder = SleepRank | WakeRank | PingRank


class StepPlan(Struct, frozen=True, array_like=True, kw_only=True):
    """scheduler → every rank. (epoch, step) are consecutive from step 0; a new epoch drops every sequence.

    Order of effect: `released`, then `new`, then `work`. All blocks' contents survive until they are written again.
    A plan may hold nothing but transfers.

    A rank that reports groups of layers (`WorkerReport.kv_groups`) has as many block tables for each sequence. Wherever
    its plans assign blocks to a sequence, so many ids follow each other for each block of tokens, one for each group;
    it is NULL_BLOCK where the group needs none. A scheduler that knows no groups assigns too few, which the rank
    refuses.
    """

    epoch: Incarnation
    step: int
    released: tuple[SequenceId, ...] = ()
    new: tuple[NewSequence, ...] = ()
    work: tuple[SequenceWork, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    compile: tuple[Grammar, ...] = ()
    """Compile these beside the steps; the rank that samples answers each with `GrammarCompiled`."""
    forget: tuple[GrammarKey, ...] = ()
    """Compiled grammars that no sequence follows any more."""
    connector: ConnectorPlan | None = None
    """None: nothing for the KV connector, or there is none."""
    forget_loras: tuple[LoraId, ...] = ()
    """Adapters that are served no longer, and that no sequence has any more."""
    restored: tuple[StateCopy, ...] = ()
    """Where models have states: the checkpoints that new sequences go on from, each with work in this plan. They are
    read before the plan is computed."""
    checkpoints: tuple[StateCopy, ...] = ()
    """What is kept of sequences with work in this plan, as they are when it is computed."""
