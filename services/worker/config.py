"""What a worker is told at its start. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from kvstore.connectors.installed import ConnectorExtraConfig, ConnectorName, ConnectorRole, open_connector
from kvstore.connectors.interface import KVConnectorBase
from services.worker.distributed.lockstep import GroupTopology
from services.worker.guided.limits import GrammarBackendName, GrammarLimits
from services.worker.kv.layer_groups import HybridKvCache
from services.worker.models.pooling.pooler_config import PoolerSettings, PoolingChoice, pooler_settings
from services.worker.parallel_config import ParallelConfig
from services.worker.rank_identity import RankIdentity
from services.worker.speculation.settings import SpeculationSettings, check_supported, read_speculation
from shared.ids import EngineId, Incarnation, ModelName
from shared.machine.home import expanded
from shared.machine.numa import NumaMode
from shared.messages.model_card import SamplingDefaults
from shared.models.generation_config import GenerationConfigError, read_override, read_sampling_defaults
from shared.settings import ByteSize, ContainerVariable, UpOption


class WorkerConfig(ParallelConfig, frozen=True, kw_only=True):
    """Every setting of a worker rank, with its unit and bounds."""

    engine: Annotated[str, Meta(min_length=1, description="Id of the engine: its scheduler's instance name.")]
    rank: Annotated[int, Meta(ge=0, description="Index of this rank in its engine.")] = 0
    world_size: Annotated[
        int, Meta(ge=1, description="Ranks of the engine: tensor-parallel size × pipeline stages.")
    ] = 1
    local_rank: Annotated[int | None, Meta(ge=0, description="Index of this host's device; default: the rank.")] = None
    pp: Annotated[
        int,
        Meta(ge=1, le=32, description="Pipeline stages of an engine; each has --tp ranks."),
        UpOption("How many", placed=True),
    ] = 1
    pp_layers: Annotated[
        tuple[int, ...],
        Meta(description="Layers of each stage, e.g. 17,15; default: spread evenly."),
        UpOption("How many", placed=True),
    ] = ()
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=31,
            description="Engines that share the experts of a mixture: each has requests, attention and a KV cache of "
            "its own, and experts are spread over all their ranks. On CPUs of one host; needs enable_expert_parallel.",
        ),
        UpOption("How many", placed=True),
    ] = 1
    data_parallel_rank: Annotated[int, Meta(ge=0, description="Index of this rank's engine among those.")] = 0
    rendezvous: Annotated[
        str | None, Meta(description="Where the ranks meet: file:///PATH on one host, tcp://HOST:PORT.")
    ] = None
    asleep: Annotated[
        int,
        Meta(ge=0, le=2, description="Level of sleep in which the rank starts, until it is woken; 0: it is awake."),
    ] = 0
    rendezvous_timeout: Annotated[float, Meta(gt=0, description="Seconds to wait for the other ranks.")] = 300.0
    device: Annotated[
        str,
        Meta(
            min_length=1,
            description="Device of the worker: auto, cpu, cuda, sim (a timing model without a device), or a platform "
            "of an installed package (docs/plugins.md). auto: cuda where there is a GPU, else cpu.",
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Data type of weights. auto: the checkpoint's own."),
        UpOption("Model"),
        ContainerVariable(),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "int8", "int4", "fp8", "w8a8_int8", "w8a8_fp8"],
        Meta(
            description="What weights of linear layers are rounded to when they are loaded: int8 and fp8 with a scale "
            "for each output, int4 with one for each 128 inputs; the head to int8. w8a8_int8, w8a8_fp8: int8 or fp8, "
            "and activations are rounded to the same, with a scale for each token (to fp8 on GPUs). auto: they stay "
            "as they are."
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = "auto"
    pooling_type: Annotated[
        PoolingChoice,
        Meta(
            description="Which hidden states of a prompt make its embedding: the last token's, their mean, the first "
            "token's (cls), or others of sentence-transformers' poolings. step: those of the tokens that end a "
            "solution's steps are judged. auto: what the checkpoint says; where it says nothing, and with none, "
            "/v1/embeddings is not served."
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = "auto"
    pooling_step_tag_id: Annotated[
        int | None,
        Meta(
            ge=0,
            description="With --pooling-type step: the token that ends each step. Without it every token is judged, "
            "or those that the model itself says.",
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = None
    pooling_returned_token_ids: Annotated[
        tuple[int, ...],
        Meta(
            description="With --pooling-type step: the tokens, e.g. 648,387, whose logits a language model judges a "
            "step by, a softmax over them.",
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = ()
    pooler_config: Annotated[
        str | None,
        Meta(
            description='These three as vLLM has them, e.g. {"pooling_type": "STEP", "step_tag_id": 12902, '
            '"returned_token_ids": [648, 387]}, and normalize and use_activation, for requests that do not say.'
        ),
        UpOption("Model"),
    ] = None
    classifier_from_token: Annotated[
        tuple[str, ...],
        Meta(
            max_length=2,
            description="Serve a language model as a classifier with one label: its logit is that of this next token, "
            "or by how much the second's exceeds the first's, as Qwen3-Reranker's yes exceeds no.",
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = ()
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        Meta(
            description="Whose code computes the model; auto: Baton's own where it knows the architecture, else "
            "that of the transformers library."
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        Meta(description="Whether code that comes with a model may run, where transformers computes the model."),
        UpOption("Model"),
        ContainerVariable(),
    ] = False
    generation_config: Annotated[
        str,
        Meta(
            min_length=1,
            description="What requests are sampled with that do not say: auto: what the model's generation_config.json "
            "has; vllm: OpenAI's defaults; or a folder with such a file.",
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = "auto"
    override_generation_config: Annotated[
        str | None,
        Meta(description='Keys that win over it, e.g. {"temperature": 0.6, "max_new_tokens": 2048}.'),
        UpOption("Model"),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Meta(
            description="Source of the weights; dummy: random weights, for a folder without weights or a shape: "
            "deepseek-v3, llama-3.1-8b, qwen3-0.6b, qwen3-30b-a3b."
        ),
        UpOption("Model"),
    ] = "auto"
    language_model_only: Annotated[
        bool,
        Meta(description="Serve a model of images, videos or sounds for texts alone: its tower is not loaded."),
        UpOption("Model"),
    ] = False
    max_model_len: Annotated[
        int | None,
        Meta(ge=2, description="Maximum tokens of a sequence; default: the model's context length."),
        UpOption("Capacity"),
        ContainerVariable(),
    ] = None
    kv_memory: Annotated[
        ByteSize | None,
        Meta(description="Memory for the KV cache, e.g. 2GiB; default: what is free."),
        UpOption("Capacity"),
        ContainerVariable(),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of a GPU's memory, or a platform's, for weights, activations, graphs and KV cache.",
        ),
        UpOption("Capacity"),
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8_per_token_head"],
        Meta(
            description="Data type of the KV cache; auto: the model's; int8_per_token_head: int8 with a scale for each "
            "head of each token, on CPUs."
        ),
        UpOption("Capacity"),
    ] = "auto"
    hybrid_kv_cache: Annotated[
        HybridKvCache,
        Meta(
            description="Whether layers of different attention (full, sliding window) have block tables of their own, "
            "and windows free the blocks behind them. auto: on a CPU without KV connector; on: "
            "anything else is an error."
        ),
        UpOption("Capacity"),
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        Meta(description="Launch a GPU's kernels one by one instead of capturing decode steps in CUDA graphs."),
        UpOption("Capacity"),
    ] = False
    max_num_seqs: Annotated[int, Meta(ge=1, description="Maximum sequences in one step."), UpOption("Capacity")] = 256
    max_batch_tokens: Annotated[int, Meta(ge=1, description="Maximum tokens in one step."), UpOption("Capacity")] = 2048
    min_step_timeout: Annotated[
        float | None,
        Meta(
            gt=0,
            description="Seconds after which a step may count as hung; slow steps get 10 times their usual time. "
            "Default: 2, and 20 on a GPU, where kernels may be compiled.",
        ),
    ] = None
    first_step_timeout: Annotated[
        float, Meta(gt=0, description="Seconds after which the first step of a process counts as hung.")
    ] = 600.0
    kvstore_dir: Annotated[
        Path | None, Meta(description="Directory of the node's KV store; none: no blocks are shared.")
    ] = None
    kv_connector: ConnectorName = None
    kv_connector_extra_config: ConnectorExtraConfig = "{}"
    kv_role: ConnectorRole = "kv_both"
    ops: Annotated[
        Literal["auto", "torch", "native", "triton"], Meta(description="Implementation of the model's operations.")
    ] = "auto"
    instructions: Annotated[
        Literal["auto", "amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2", "neon", "portable"],
        Meta(description="CPU instructions of the native operations; auto: the best that this machine has."),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "triton", "flash-attn"], Meta(description="Attention kernels on a GPU; auto: triton.")
    ] = "auto"
    threads: Annotated[int | None, Meta(ge=1, description="CPU threads; default: this rank's share of the cores.")] = (
        None
    )
    bind: Annotated[
        str,
        Meta(
            pattern="^(auto|none|[0-9,-]+)$",
            description="Processors to run on, e.g. 0-7; auto: those near the GPU; none: no binding.",
        ),
        UpOption("Capacity"),
    ] = "auto"
    numa: NumaMode = "auto"
    numa_share: Annotated[
        str | None,
        Meta(
            pattern="^[0-9]+(,[0-9]+)*:[0-9]+/[0-9]+$",
            description="What a rank without a GPU has of which NUMA nodes: 0:1/2 is the second half of node 0.",
        ),
    ] = None
    """By the supervisor, which knows the other ranks of the machine."""
    speculative: Annotated[
        str | None,
        Meta(description='Speculative decoding, e.g. {"method": "ngram", "num_speculative_tokens": 4}.'),
        UpOption("Model"),
    ] = None
    alias: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=512)], ...],
        Meta(description="Another name by which clients may call the model; may be repeated."),
        UpOption("Model"),
    ] = ()
    lora: Annotated[
        tuple[str, ...],
        Meta(
            description="LoRA adapter as NAME=FOLDER, served under its name beside the model; may be repeated. The "
            "folder is as PEFT writes it."
        ),
        UpOption("Model"),
    ] = ()
    max_loras: Annotated[
        int, Meta(ge=1, le=64, description="Maximum different LoRA adapters in one step."), UpOption("Capacity")
    ] = 8
    max_lora_rank: Annotated[
        int, Meta(ge=1, le=512, description="Maximum rank of a LoRA adapter."), UpOption("Capacity")
    ] = 16
    logits_processors: Annotated[
        tuple[str, ...],
        Meta(
            description="Logits processors of installed packages (docs/plugins.md), comma-separated, in the order in "
            "which they are applied; requests ask for them by vllm_xargs."
        ),
        UpOption("Model"),
    ] = ()
    enable_prompt_embeds: Annotated[
        bool,
        Meta(
            description="Whether /v1/completions takes prompts as embeddings, in the field prompt_embeds, and chats "
            "parts of messages."
        ),
        UpOption("Model"),
        ContainerVariable(),
    ] = False
    grammar_backend: Annotated[
        GrammarBackendName,
        Meta(description="Library that follows grammars; auto: xgrammar, and llguidance for what that refuses."),
        UpOption("Model"),
        ContainerVariable(),
    ] = "auto"
    grammar_compile_s: Annotated[
        float, Meta(gt=0, description="Seconds of processor time that a client's grammar may take to compile.")
    ] = 10.0
    grammar_step_ms: Annotated[
        float,
        Meta(
            gt=0, description="Milliseconds of processor time for each token under a grammar, on average over bursts."
        ),
    ] = 20.0
    grammar_memory: Annotated[
        int,
        # Not ByteSize, which has a least value of its own: a type may say that only once.
        Meta(
            ge=2**24,
            description="Memory that the process of a client's grammar may take.",
            extra={"unit": "bytes"},
        ),
    ] = 256 * 2**20

    def __post_init__(self) -> None:
        if self.rank + self.local_ranks > self.world_size:
            last = self.rank + self.local_ranks - 1
            raise ValueError(f"rank = {last}: must be below world_size, which is {self.world_size}")
        if self.world_size % self.pp:
            raise ValueError(f"pp = {self.pp}: world_size, which is {self.world_size}, must be a multiple of it")
        if self.pp_layers and len(self.pp_layers) != self.pp:
            raise ValueError(f"pp_layers: {len(self.pp_layers)} numbers for {self.pp} stages")
        if self.pp > 1 and self.device == "sim":
            raise ValueError("pp: the simulated device has no pipeline; use tensor parallel ranks")
        self.check_experts(self.device)
        self.check_context_parallel(
            self.world_size,
            self.pp,
            {
                f"device = {self.device}": self.device == "sim",
                f"data_parallel_size = {self.data_parallel_size}": self.data_parallel_size > 1,
                f"kv_connector = {self.kv_connector}": self.kv_connector is not None,
            },
        )
        self.check_shared_rows(self.device, self.world_size // (self.pp * self.prefill_context_parallel_size))
        self._check_group()
        for each in self.lora:
            name, _, folder = each.partition("=")
            if not (name and folder):
                raise ValueError(f"lora = {each}: must be NAME=FOLDER")
        if (self.lora or self.lora_registry) and self.device == "sim":
            name = "lora" if self.lora else "lora_registry"
            raise ValueError(f"{name}: the simulated device has no weights to adapt")
        if self.kv_connector is not None and self.device == "sim":
            raise ValueError(f"kv_connector = {self.kv_connector}: the simulated device has no KV memory of layers")
        if self.enable_prompt_embeds and self.device == "sim":
            raise ValueError("enable_prompt_embeds: the simulated device has no embedding")
        if self.logits_processors and self.device == "sim":
            names = ",".join(self.logits_processors)
            raise ValueError(f"logits_processors = {names}: the simulated device has no logits")
        if self.speculative is not None:
            check_supported(read_speculation(self.speculative), device=self.device, stages=self.pp)
        self.pooler()
        if self.override_generation_config is not None:
            try:
                read_override(self.override_generation_config)
            except GenerationConfigError as error:
                raise ValueError(f"override_generation_config: {error}") from None
        self.check_simulated(self.world_size)
        if self.local_ranks < self.world_size and self.rendezvous is None and self.device != "sim":
            raise ValueError("rendezvous: must be set where there are several ranks")

    def _check_group(self) -> None:
        """What the engines of a data-parallel group do not have yet."""
        size = f"data_parallel_size = {self.data_parallel_size}"
        if self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(f"data_parallel_rank = {self.data_parallel_rank}: must be below {size}")
        if self.data_parallel_size == 1:
            if self.all2all_backend != "auto":
                raise ValueError(f"all2all_backend = {self.all2all_backend}: needs data_parallel_size of 2 or more")
            return
        if not self.enable_expert_parallel:
            raise ValueError(f"{size}: needs enable_expert_parallel; copies that share nothing are made by --engines")
        drafts = None if self.speculative is None else read_speculation(self.speculative).method
        for name, refused in (
            (f"pp = {self.pp}", self.pp > 1),
            (f"sp_min_token_num = {self.sp_min_token_num}", self.sp_min_token_num is not None),
            (f"enable_sp and all2all_backend = {self.all2all_backend}", self.enable_sp and self.sends_some_rows),
            (f"device = {self.device}", self.device not in ("auto", "cpu")),
            (f"kv_connector = {self.kv_connector}", self.kv_connector is not None),
            (f"speculative: method {drafts}", drafts not in (None, "ngram")),
        ):
            if refused:
                raise ValueError(f"{name}: not possible with {size}")
        if self.rendezvous is None:
            raise ValueError(f"rendezvous: must be set with {size}")

    def group_topology(self) -> GroupTopology | None:
        """Where the rank stands in its data-parallel group; None: it is in none."""
        if self.data_parallel_size == 1:
            return None
        return GroupTopology(self.data_parallel_rank, self.data_parallel_size, self.world_size, self.rank)

    def lora_folders(self) -> tuple[tuple[ModelName, Path], ...]:
        """Each adapter's name and folder."""
        named = (each.partition("=") for each in self.lora)
        return tuple((ModelName(name), Path(folder)) for name, _, folder in named)

    @property
    def reads_weights(self) -> bool:
        """Whether the model's weights are read from files."""
        return self.device != "sim" and self.load_format != "dummy"

    @property
    def reads_all_weights_here(self) -> bool:
        """Whether all ranks of the engine are on this host, so that together they read every weight here."""
        alone = self.world_size == 1 or (self.rendezvous or "").startswith("file:")
        return self.reads_weights and alone

    def model_name(self) -> ModelName:
        """What clients call the model: by default a directory's name, or the repository's as it is."""
        folder = expanded(self.model)
        return ModelName(self.served_model_name or (folder.resolve().name if folder.is_dir() else self.model))

    def place(self) -> RankIdentity:
        """Which rank of which engine this process is."""
        return RankIdentity(
            engine=EngineId(self.engine),
            rank=self.rank,
            world_size=self.world_size,
            stages=self.pp,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
            min_step_timeout=self.min_step_timeout,
            first_step_timeout=self.first_step_timeout,
            kvstore_dir=self.kvstore_dir,
            data_parallel_size=self.data_parallel_size,
            aliases=tuple(map(ModelName, self.alias)),
        )

    def connector(self) -> KVConnectorBase | None:
        """This rank's half of the KV connector; None where there is none. Raises ConnectorRefused."""
        if self.kv_connector is None:
            return None
        return open_connector(
            self.kv_connector,
            self.kv_connector_extra_config,
            self.kv_role,
            engine=self.engine,
            rank=self.rank,
            block_size=self.block_size,
        )

    def pooler(self) -> PoolerSettings:
        """How prompts become vectors. Raises ValueError where `pooler_config` cannot be read, or says the same."""
        single = PoolerSettings(self.pooling_type, self.pooling_step_tag_id, self.pooling_returned_token_ids)
        return pooler_settings(self.pooler_config, single)

    def speculation(self) -> SpeculationSettings | None:
        """How tokens are drafted; None if they are not."""
        return None if self.speculative is None else read_speculation(self.speculative)

    def sampling_defaults(self, folder: Path) -> SamplingDefaults | None:
        """Of the model in `folder`. Raises GenerationConfigError."""
        return read_sampling_defaults(folder, self.generation_config, self.override_generation_config)

    def rendezvous_url(self) -> str:
        """Where the ranks meet, as `join` takes it."""
        assert self.rendezvous is not None, "checked at the start"
        return self.rendezvous if "://" in self.rendezvous else f"tcp://{self.rendezvous}"

    def meeting(self, number: Incarnation | None) -> WorkerConfig:
        """The settings of a rank that meets the others under this number, as they have met before: what they have left
        in a file then is nothing to go by. None: they meet for the first time."""
        if number is None or self.rendezvous is None or not self.rendezvous.startswith("file://"):
            return self
        return replace(self, rendezvous=f"{self.rendezvous}-{number:x}")

    def grammar_limits(self) -> GrammarLimits:
        """What a client's grammar may cost."""
        return GrammarLimits(self.grammar_compile_s, self.grammar_memory, self.grammar_step_ms / 1000)
