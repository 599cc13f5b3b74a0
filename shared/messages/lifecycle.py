"""What every process publishes every half second: its identity, phase, load and progress; and the control of it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.ids import EngineId, Incarnation, InstanceId, ModelName, NodeId
from shared.messages.dialects import Dialect
from shared.messages.kvstore import KvLayout
from shared.messages.scheduler import TransferProgress

Service = Literal["gateway", "tokenizer", "coordinator", "scheduler", "worker", "detokenizer", "kvstore", "supervisor"]
Phase = Literal["starting", "ready", "draining", "stopped", "failed"]


class ModelCard(Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine publishes about the model that it serves."""

    name: ModelName
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    created: int
    """Unix seconds."""


Role = Literal["mixed", "prefill", "decode"]
"""mixed: an engine that does everything. prefill: computes prompts and hands over. decode: takes over; where prefill
engines are busy or gone it computes prompts, too."""


class EngineReport(Struct, frozen=True, array_like=True, kw_only=True):
    """A scheduler's load. Requests are placed by it."""

    model: ModelCard
    waiting: int
    running: int
    max_waiting: int
    max_running: int
    blocks_total: int
    blocks_free: int
    """Blocks that no sequence uses, cached ones included."""
    steps: int
    """Steps finished in this epoch: what progress is judged by."""
    tokens: int
    """Output tokens since the start."""
    role: Role = "mixed"
    node: NodeId | None = None
    """Where its KV store is; None without one."""
    prefill_tokens: int = 0
    """Prompt tokens accepted and yet to be computed."""
    prompt_tokens: int = 0
    """Tokens of all prompts that were begun since the start."""
    cached_tokens: int = 0
    """Those of them that did not have to be computed."""
    drafted_tokens: int = 0
    """Tried by speculative decoding since the start."""
    accepted_tokens: int = 0
    """Those of them that were kept."""


class StoreReport(Struct, frozen=True, array_like=True, kw_only=True):
    """A node's KV store."""

    node: NodeId
    slots: int
    """Over all layouts."""
    committed: int
    reserved: int
    pinned: int
    bytes_used: int
    bytes_total: int
    hits: int
    """Blocks found since the start, in any tier."""
    misses: int
    lower_hits: int = 0
    """Those of `hits` that came from Redis or from another node."""
    transfer: str = ""
    """Host and port where the stores of other nodes fetch blocks ("10.0.0.7:7700"); empty where they cannot."""


class StepSums(Struct, frozen=True, array_like=True, kw_only=True):
    """Where one rank's time went since its start, in seconds over all steps; differences of two reports are rates."""

    steps: int = 0
    wait: float = 0.0
    """Between steps; pauses of traffic left out."""
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    answer: float = 0.0
    paused: float = 0.0
    """Without any plan, because there was no traffic."""
    computed: int = 0
    """Tokens, prompts' included."""
    sampled: int = 0
    """Tokens."""


class WorkerReport(Struct, frozen=True, array_like=True, kw_only=True):
    """One rank of an engine."""

    engine: EngineId
    rank: int
    world_size: int
    model: ModelCard
    num_blocks: int
    device: str
    epoch: Incarnation | None = None
    """Epoch of the newest plan; None before the first."""
    received: int = 0
    """Plans of `epoch` that have arrived. With `published` it lets the scheduler find a message that was
    lost although no later one shows the gap."""
    published: int = 0
    """Steps of `epoch` whose results this rank has published; 0 on ranks that publish none."""
    max_num_seqs: int | None = None
    """Sequences and tokens that a step may hold at the most; the scheduler keeps to them."""
    max_batch_tokens: int | None = None
    layout: KvLayout | None = None
    """None: this worker's KV memory cannot be shared (the simulated one)."""
    transfers: TransferProgress | None = None
    max_speculate: int = 0
    """The upper bound of `SequenceWork.speculate`; 0 if nothing drafts."""
    max_jump_ahead: int = 0
    """The same for sequences with a grammar, where no more is drafted: how many forced tokens one step may yield."""
    stages: int = 1
    """Pipeline stages that the engine's ranks form: so many plans are computed at a time."""
    sums: StepSums = StepSums()


class TokenizerReport(Struct, frozen=True, array_like=True, kw_only=True):
    """What a tokenizer sees in its model's files."""

    model: ModelName
    dialect: Dialect
    """As found in the chat template."""


class Lifecycle(Struct, frozen=True, array_like=True, kw_only=True):
    """Who one process is, its phase, its load and its progress; published every half second and at each change of
    phase."""

    service: Service
    instance: InstanceId
    incarnation: Incarnation
    phase: Phase
    pid: int
    host: str
    started: float
    """Unix seconds."""
    load: int = 0
    """Requests in hand."""
    progress: int = 0
    """Messages handled since the start."""
    metrics_port: int | None = None
    engine: EngineReport | None = None
    worker: WorkerReport | None = None
    store: StoreReport | None = None
    tokenizer: TokenizerReport | None = None


class Drain(Struct, frozen=True, array_like=True, tag=True):
    """Finish what you have, take no more. You stay, drained, until `Undrain` or the end of the process."""


class Undrain(Struct, frozen=True, array_like=True, tag=True):
    """Take requests again."""


InstanceControl = Drain | Undrain
