"""What every process publishes of itself: its identity, phase, load and progress; and the messages that control it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.ids import EngineId, Incarnation, InstanceId, LoraId, ModelName, NodeId, RequestId
from shared.kv_groups import KvCacheGroup, StateRecords
from shared.messages.dialects import Dialect
from shared.messages.encoder import EncoderReport
from shared.messages.kvstore import KvLayout, LinkReport, TransferEndpoint
from shared.messages.model_card import LoraRefusal, ModelCard
from shared.messages.scheduler import PauseMode, TransferProgress
from shared.messages.worker import SleepLevel
from shared.protocol import SpokenProtocols

Service = Literal[
    "gateway", "tokenizer", "encoder", "coordinator", "scheduler", "worker", "detokenizer", "kvstore", "supervisor"
]
Phase = Literal["starting", "ready", "draining", "stopped", "failed"]

HEARTBEAT_SECONDS = 0.5
"""Between two lifecycle messages of a process that changes all the time."""
KEEP_ALIVE_SECONDS = 1.0
"""Between two of one that does not change, unless configured otherwise. Receivers of release 0.2 wait twice as long."""
MAX_KEEP_ALIVE_SECONDS = 30.0
MAX_MEASURED = 1e9
Measured = Annotated[float, Meta(ge=0, le=MAX_MEASURED)]
"""A quantity with which a receiver may compute: no infinity."""
MIN_STEP_SHARE = 0.01
"""No step takes less than this share of a mean one, whatever was fitted."""

Role = Literal["mixed", "prefill", "decode"]
"""mixed: an engine that computes prompts and decodes. prefill: it computes prompts and hands them over. decode: it
takes requests over; when prefill engines are busy or gone it computes prompts, too."""


class EngineHealth(Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine's scheduler finds of its own answers. It is the only writer: coordinators that see requests fail
    there tell it (`OutlierReport`), and all read here whether requests should go elsewhere."""

    suspect: str | None = None
    """Why it is taken to fail, for people; None: it is not."""
    ejections: int = 0
    """How often it became a suspect, since it was none for some minutes."""
    faults: int = 0
    """Of a suspect: canaries in a row, up to now, whose answer was wrong, late or missing."""


LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class LatencySums(Struct, frozen=True, array_like=True):
    """What requests waited for at an engine, in seconds over all of them since its start; differences of two reports
    are means. Times before they came to the engine are not in it."""

    first_tokens: int = 0
    """Requests that got their first token there."""
    first_token_seconds: float = 0.0
    """From their coming to their first tokens: TTFT."""
    later_tokens: int = 0
    """Tokens behind the first ones."""
    later_token_seconds: float = 0.0
    """From the token before to each of them: ITL."""
    first_counts: tuple[int, ...] = ()
    """Of `first_tokens` those up to each of LATENCY_BOUNDS, and the rest; empty of a release that does not count so."""
    later_counts: tuple[int, ...] = ()


class BucketCounts(Struct, frozen=True, array_like=True):
    """A histogram since an engine's start: of how many observations each bucket has, and their sum."""

    counts: tuple[int, ...]
    """Up to each of the histogram's bounds, and the rest."""
    total: float


STEP_TOKEN_BOUNDS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class RequestFigures(Struct, frozen=True, array_like=True, kw_only=True):
    """What requests and steps of an engine took since its start, for dashboards. Times are of LATENCY_BOUNDS."""

    queue: BucketCounts
    """From a request's arrival at the engine to the first step that computes something of it."""
    prefill: BucketCounts
    """From that step to its first token."""
    decode: BucketCounts
    """From its first token, or from its load, to its last."""
    inference: BucketCounts
    """Prefill and decode as one, of requests that ended there."""
    step_tokens: BucketCounts
    """Tokens that a step computes, of STEP_TOKEN_BOUNDS."""


class RecomputeReport(Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine has measured of computing and loading KV blocks."""

    block_bytes: int
    """Keys and values of one block, of all layers and heads."""
    block_seconds: Annotated[float, Meta(gt=0)]
    """Of computing the tokens of one block, in a step with many."""
    load_seconds: float = 0.0
    """Of copying one block from the arena of its node; 0 before the first load."""


class StepTimeFit(Struct, frozen=True, array_like=True):
    """How long steps of one kind take at an engine: a plane fitted to its last steps."""

    tokens: Measured
    """Mean tokens of these steps."""
    blocks: Measured
    """Mean KV blocks in use."""
    seconds: Annotated[float, Meta(gt=0, le=MAX_MEASURED)]
    """What a step takes at these means."""
    token_seconds: Measured
    """What each further token adds."""
    block_seconds: Measured
    """What each further block in use adds."""

    def seconds_at(self, tokens: float, blocks: float) -> float:
        """What a step of so many tokens takes while so many blocks are in use; above 0."""
        fitted = (
            self.seconds + self.token_seconds * (tokens - self.tokens) + self.block_seconds * (blocks - self.blocks)
        )
        return max(fitted, MIN_STEP_SHARE * self.seconds)


class StepTimesReport(Struct, frozen=True, array_like=True):
    """What an engine has measured of its steps. Coordinators compare engines by it, at the same tokens and blocks."""

    prompts: StepTimeFit | None = None
    """Of steps with prompt tokens; None before the first few."""
    decodes: StepTimeFit | None = None
    """Of steps without; None before the first few."""


class EngineReport(Struct, frozen=True, array_like=True, kw_only=True):
    """A scheduler's load, by which coordinators place requests."""

    model: ModelCard
    waiting: int
    running: int
    max_waiting: int
    max_running: int
    blocks_total: int
    blocks_free: int
    """Blocks that no sequence uses, cached ones included."""
    steps: int
    """Steps finished in this epoch. The watchdog judges progress by it."""
    tokens: int
    """Output tokens since the start."""
    role: Role = "mixed"
    node: NodeId | None = None
    """The node whose KV store the engine uses; None without a store."""
    prefill_tokens: int = 0
    """Prompt tokens accepted and yet to be computed."""
    prompt_tokens: int = 0
    """Prompt tokens of all requests that entered a step since the start."""
    cached_tokens: int = 0
    """How many of `prompt_tokens` were not computed, because a cache held them."""
    drafted_tokens: int = 0
    """Draft tokens that speculative decoding verified since the start."""
    accepted_tokens: int = 0
    """How many of `drafted_tokens` were accepted."""
    step_deadline: float = 0.0
    """Seconds that the step in flight may take before the scheduler counts its workers as stuck; 0 without one."""
    health: EngineHealth | None = None
    """None: of a release that does not watch it."""
    latency: LatencySums | None = None
    """None: of a release that does not measure it."""
    recompute: RecomputeReport | None = None
    """None before the first prompt of some length, and where blocks are not shared."""
    step_times: StepTimesReport | None = None
    """None before the first few steps, and of a release that does not measure them."""
    loras: tuple[LoraId, ...] = ()
    """The adapters that its ranks have on their devices, so far as the scheduler knows; those used last at the end."""
    lora_refusals: tuple[LoraRefusal, ...] = ()
    """Of the registry's file, those that some rank does not serve."""
    paused: PauseMode | None = None
    """How operators have paused it; None: they have not."""
    figures: RequestFigures | None = None
    """None: of a release that does not report them."""
    preemptions: int = 0
    """Preemptions of running sequences in this epoch."""
    speculated: int = 0
    """Steps of single sequences that verified drafts, since the start."""
    loaded_tokens: int = 0
    """How many of `cached_tokens` were loaded from a KV store."""

    @property
    def suspect(self) -> str | None:
        """Why the engine is taken to fail, for people; None where it is not, or does not say."""
        return None if self.health is None else self.health.suspect


class TierReport(Struct, frozen=True, array_like=True, kw_only=True):
    """What a lower tier of a KV store holds, and how it does."""

    name: str
    """Such as "ssd" or "redis"."""
    present: bool
    """Whether it answers."""
    blocks: int | None = None
    """None where the tier does not know."""
    bytes_used: int | None = None
    bytes_total: int | None = None
    hits: int = 0
    """Blocks that it returned since the start."""
    stored: int = 0
    evictions: int = 0
    read_seconds: float = 0.0
    """Mean time of reading one block."""
    write_seconds: float = 0.0
    direct: bool | None = None
    """Whether its file system takes O_DIRECT; None where it has none."""
    problem: str = ""
    """Why it is away or takes no blocks; empty where all is well."""


class StoreReport(Struct, frozen=True, array_like=True, kw_only=True):
    """The occupancy and hit counts of a node's KV store."""

    node: NodeId
    slots: int
    """Slots of all layouts together."""
    committed: int
    reserved: int
    pinned: int
    bytes_used: int
    bytes_total: int
    hits: int
    """Blocks found since the start, in any tier."""
    misses: int
    lower_hits: int = 0
    """How many of `hits` came from Redis or from another node."""
    transfer: str = ""
    """Host and port where the stores of other nodes fetch blocks ("10.0.0.7:7700"); empty if they cannot."""
    tiers: tuple[TierReport, ...] = ()
    """The lower tiers, in the order in which they are searched."""
    prefetched: int = 0
    """Blocks that came from other nodes since the start while their prompts were computed there."""
    links: tuple[LinkReport, ...] = ()
    """Of the nodes that blocks came from within the last minute."""
    endpoints: tuple[TransferEndpoint, ...] = ()
    """Where blocks are fetched by other transports than gRPC, and by gRPC; empty: `transfer` says it all."""


class StepSums(Struct, frozen=True, array_like=True, kw_only=True):
    """Where one rank's time went since its start, in seconds over all steps; differences of two reports are rates."""

    steps: int = 0
    wait: float = 0.0
    """Idle between steps; time without any traffic is in `paused`."""
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    answer: float = 0.0
    paused: float = 0.0
    """Time without any plan, because there was no traffic."""
    computed: int = 0
    """Tokens that went through the model, prompt tokens included."""
    sampled: int = 0
    """Output tokens that were drawn."""


class LayerExpertLoad(Struct, frozen=True, array_like=True):
    """How evenly picks of a layer's experts fell on the ranks that share these."""

    layer: int
    ranks: tuple[int, ...]
    """What each rank computed of late, in percent of their mean."""


class ExpertReport(Struct, frozen=True, array_like=True):
    """How evenly the picks of a mixture's experts fall on ranks, and how experts were moved."""

    layers: tuple[LayerExpertLoad, ...]
    rearrangements: int | None = None
    """Since the rank started; None: experts stay where they are."""
    experts_moved: int = 0
    """Experts that ranks were given by these."""


SLOWLY = "by PyTorch's operations alone"
"""In `WorkerReport.device`: the faster ones of that device cannot be had."""


class WorkerReport(Struct, frozen=True, array_like=True, kw_only=True):
    """The progress and the limits of one rank of an engine."""

    engine: EngineId
    rank: int
    world_size: int
    model: ModelCard
    num_blocks: int
    device: str
    """For people. Where a rank computes slower than it could, SLOWLY and the reason stand behind the device."""
    epoch: Incarnation | None = None
    """Epoch of the newest plan; None before the first."""
    received: int = 0
    """Number of plans of `epoch` that have arrived. Together with `published` it lets the scheduler notice a lost
    message when no later message shows the gap."""
    published: int = 0
    """Steps of `epoch` whose results this rank has published; 0 on ranks that publish none."""
    max_num_seqs: int | None = None
    """Most sequences that a step may hold; None: this rank sets no limit. The scheduler respects it."""
    max_batch_tokens: int | None = None
    """Most tokens that a step may hold; None: this rank sets no limit. The scheduler respects it."""
    layout: KvLayout | None = None
    """The layout of this rank's KV blocks; None if they cannot be shared."""
    transfers: TransferProgress | None = None
    """The newest transfer progress; None before the first transfer."""
    max_speculate: int = 0
    """The upper bound of `SequenceWork.speculate`; 0 if nothing drafts."""
    max_jump_ahead: int = 0
    """How many tokens forced by a grammar one step may yield. For sequences with a grammar `SequenceWork.speculate` is
    bounded by this or by `max_speculate`, whichever is larger."""
    stages: int = 1
    """Pipeline stages of the engine; as many plans are computed at the same time."""
    sums: StepSums = StepSums()
    cache_format: str = ""
    """A digest of what a block looks like in this rank's caches, for KV connectors, which copy it as it is; empty where
    there is none. Equal on all ranks of an engine."""
    layerwise_loads: bool = False
    """Whether this rank waits for a KV connector's loads layer by layer; see `ConnectorLoad.overlapped`."""
    max_loras: int = 0
    """How many different adapters the sequences that it holds may have; 0 where it serves none."""
    kv_groups: tuple[KvCacheGroup, ...] = ()
    """Groups of layers with block tables of their own, which all take their blocks from the `num_blocks`; plans assign
    blocks to each (`StepPlan`). Empty: one table for all layers, none of which gives blocks back before a sequence
    ends."""
    lora_refusals: tuple[LoraRefusal, ...] = ()
    """Of the registry's file, those that this rank does not serve."""
    state_checkpoints: int | None = None
    """Where layers keep states of a sequence: how many copies of all states the rank has room for, from which sequences
    go on behind blocks that others have computed. 0: none does. None: no layer keeps any."""
    state_records: StateRecords | None = None
    """How the KV store keeps such copies; None: it does not."""
    data_parallel_size: int = 1
    """Engines over whose ranks the model's experts are spread."""
    experts: ExpertReport | None = None
    """Of the first of the ranks that share experts; None of others, and before the first picks."""
    rows_per_draft: int = 1
    """Rows that a step computes at the most for each of `SequenceWork.speculate`: more than 1 where trees are drafted,
    of which one path is accepted."""


class SleepReport(Struct, frozen=True, array_like=True):
    """Reported by a scheduler whose engine sleeps, or by a rank that does."""

    level: SleepLevel
    model: ModelCard | None = None
    """What the engine served before; None of ranks, and where that is not known."""


class TokenizerReport(Struct, frozen=True, array_like=True, kw_only=True):
    """What a tokenizer finds in its model's files."""

    model: ModelName
    dialect: Dialect
    """The markup formats recognised in the chat template."""


class DetokenizerReport(Struct, frozen=True, array_like=True, kw_only=True):
    """What a detokenizer says of itself."""

    model: ModelName
    """Whose text it makes."""


class Lifecycle(Struct, frozen=True, array_like=True, kw_only=True):
    """Identity, phase, load and progress of one process. Published at each change of phase, half a second after any
    other change, and every `keep_alive` seconds at least."""

    service: Service
    instance: InstanceId
    incarnation: Incarnation
    phase: Phase
    pid: int
    host: str
    started: float
    """When the process started, in Unix seconds."""
    load: int = 0
    """Requests that the process currently holds."""
    progress: int = 0
    """Messages handled since the start."""
    metrics_port: int | None = None
    """TCP port of the Prometheus metrics; None if they are not served."""
    engine: EngineReport | None = None
    worker: WorkerReport | None = None
    store: StoreReport | None = None
    tokenizer: TokenizerReport | None = None
    min_protocol: int = 1
    """The oldest version of the messages that the process understands; see `shared.protocol`."""
    protocol: int = 1
    """The newest version that it understands."""
    isolated: RequestId | None = None
    """The suspected request (`Generation.suspect_until`) that the process handles just now, and no other: if it dies,
    it died of this one."""
    standby: bool = False
    """Whether it is to stand by: it loads, and then takes no requests until `Undrain`. Its phase is "starting", and
    "draining" once it has loaded."""
    keep_alive: Annotated[float, Meta(gt=0, le=MAX_KEEP_ALIVE_SECONDS)] = HEARTBEAT_SECONDS
    """Seconds within which the process promises its next message; how long its silence means nothing follows from it. A
    release that does not say it publishes every half second."""
    block_size: int | None = None
    """Tokens of a KV block, as the process is configured; None: of a release that has no such setting."""
    detokenizer: DetokenizerReport | None = None
    sleep: SleepReport | None = None
    """None: it is awake."""
    encoder: EncoderReport | None = None

    @property
    def model(self) -> ModelName | None:
        """The model that the process works for; None: it works for all, or does not say."""
        if self.engine is not None:
            return self.engine.model.name
        report = self.tokenizer or self.detokenizer or self.encoder
        return None if report is None else report.model

    @property
    def is_standby(self) -> bool:
        """Whether it is loaded, and takes no requests although nothing keeps it from that."""
        return self.standby and self.phase == "draining"

    @property
    def shown_phase(self) -> str:
        """The phase for people: a standby that is loaded says so, and who sleeps."""
        if self.sleep is not None and self.phase == "starting":
            return "asleep"
        return "standby" if self.is_standby else self.phase

    @property
    def protocols(self) -> SpokenProtocols:
        """The versions of the messages that the process understands."""
        return SpokenProtocols(self.min_protocol, self.protocol)


class LifecycleRequest(Struct, frozen=True, array_like=True, tag=True):
    """Whoever has just begun to listen → every process: publish your lifecycle within half a second, changed or not."""


class HeartbeatInterval(Struct, frozen=True, array_like=True, tag=True):
    """A coordinator → every process: how often each says what is new, in such a fleet. Repeated for newcomers."""

    keep_alive: Annotated[float, Meta(gt=0, le=MAX_KEEP_ALIVE_SECONDS)]
    """Seconds between two lifecycle messages that say the same, for all that are configured to say it more often; half
    of it between two that say something new but for the phase."""
    kv_events: Annotated[float, Meta(ge=0, le=MAX_KEEP_ALIVE_SECONDS)] = 0.0
    """Seconds for which engines and KV stores gather changes of their blocks, KV_EVENT_SECONDS at least."""


class Drain(Struct, frozen=True, array_like=True, tag=True):
    """Finish the open requests and accept no new ones. The process stays, drained, until `Undrain` or its end."""


class Undrain(Struct, frozen=True, array_like=True, tag=True):
    """Accept requests again after a `Drain`."""


class Standby(Struct, frozen=True, array_like=True, tag=True):
    """Stand by: load, and take no requests until `Undrain`. Open ones are finished."""


InstanceControl = Drain | Undrain | Standby


class NameClaim(Struct, frozen=True, array_like=True):
    """A process that starts asks whether another one has its name; nobody answers if the name is free."""

    incarnation: Incarnation


class NameHolder(Struct, frozen=True, array_like=True):
    """The process that has the name."""

    incarnation: Incarnation
    pid: int
    host: str
