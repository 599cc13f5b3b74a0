"""What a worker is told at its start of how ranks share a model: its experts, and rows between products. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from services.worker.distributed.all2all import All2AllBackend
from services.worker.models.expert_parallel.settings import ExpertSettings, read_eplb_config
from services.worker.sim.settings import SimulatedDeviceConfig
from shared.settings import UpOption

MIN_CONTEXT_ROWS = 64
"""A step of fewer, of decodes above all, every rank computes whole, and waits for no other in any layer."""


class ParallelConfig(SimulatedDeviceConfig, frozen=True, kw_only=True):
    """The settings of mixtures and of rows that ranks share, with their bounds."""

    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Whether ranks have whole experts of a mixture, in place of a share of every expert: the --tp "
            "ranks, or those of all engines of a data-parallel group."
        ),
        UpOption("How many"),
    ] = False
    enable_eplb: Annotated[
        bool,
        Meta(
            description="Whether experts are placed on ranks by how often each was picked: as files in expert_load_dir "
            "say at the start, and by the last steps while the engine serves. Needs enable_expert_parallel."
        ),
        UpOption("How many"),
    ] = False
    eplb_config: Annotated[
        str | None,
        Meta(
            description='How enable_eplb goes about it, as vLLM has it, e.g. {"window_size": 1000, "step_interval": '
            '3000, "num_redundant_experts": 8, "log_balancedness": true}; step_interval 0: at the start alone.'
        ),
        UpOption("How many"),
    ] = None
    num_redundant_experts: Annotated[
        int,
        Meta(ge=0, description="Replicas of much picked experts, over all ranks of a stage; as in eplb_config."),
        UpOption("How many"),
    ] = 0
    all2all_backend: Annotated[
        All2AllBackend,
        Meta(
            description="How rows go to experts of other ranks and back with data_parallel_size: low_latency sends a "
            "row only where it is picked, high_throughput, too, without gaps and with sizes exchanged before, "
            "allgather_reducescatter to all. auto: allgather_reducescatter, which is quickest in memory of one host."
        ),
        UpOption("How many"),
    ] = "auto"
    expert_load_dir: Annotated[
        Path | None,
        Meta(description="Directory of files that say how often each expert was picked; each engine writes its own."),
        UpOption("How many"),
    ] = None

    enable_sp: Annotated[
        bool,
        Meta(
            description="Sequence parallelism: of a step's rows each of the --tp ranks has a share between products, "
            "whose norms and residuals it alone computes. On CPUs of one host; text is the same."
        ),
        UpOption("How many"),
    ] = False
    sp_min_token_num: Annotated[
        int | None,
        Meta(ge=1, description="With enable_sp: steps of fewer tokens leave all rows on all ranks; default: 1."),
        UpOption("How many"),
    ] = None

    local_ranks: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Ranks that a container has, from `rank` on, each with a device of its own: this process "
            "starts them, and they end together. `baton up` starts ranks itself.",
        ),
    ] = 1
    prefill_context_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=32,
            description="Ranks that share the rows of prompts in each step (context parallelism), of which each has "
            "all weights and the whole KV cache: for a first token sooner behind long prompts. On CPUs of one host.",
        ),
        UpOption("How many", placed=True),
    ] = 1

    share_weights: Annotated[
        bool,
        Meta(
            description="Whether engines of one host that serve the same model on CPUs have its weights in memory "
            "once: the first loads them, the others find them."
        ),
        UpOption("Capacity"),
    ] = True

    def check_context_parallel(self, world_size: int, stages: int, refused: Mapping[str, object]) -> None:
        """Raises ValueError where an engine of `world_size` ranks in `stages` cannot share rows by context. `refused`:
        settings that do not go with it, each true where it is set."""
        size = f"prefill_context_parallel_size = {self.prefill_context_parallel_size}"
        if self.prefill_context_parallel_size == 1:
            return
        ranks = world_size // (stages * self.prefill_context_parallel_size)
        if ranks * stages * self.prefill_context_parallel_size != world_size:
            raise ValueError(f"{size}: world_size, which is {world_size}, must be a multiple of it")
        asked = {
            f"{ranks} tensor-parallel ranks": ranks > 1,
            f"pp = {stages}": stages > 1,
            "enable_expert_parallel": self.enable_expert_parallel,
            "expert_load_dir": self.expert_load_dir,
            **refused,
        }
        if name := next((name for name, value in asked.items() if value), None):
            raise ValueError(f"{name}: not possible with {size}")

    @property
    def context_rows(self) -> int | None:
        """Rows of the smallest step that ranks with all weights each share; None: they share each layer."""
        return MIN_CONTEXT_ROWS if self.prefill_context_parallel_size > 1 else None

    def check_shared_rows(self, device: str, ranks: int) -> None:
        """Raises ValueError where sequence parallelism is asked for and can have no effect. `ranks`: of a stage."""
        if self.sp_min_token_num is not None and not self.enable_sp:
            raise ValueError(f"sp_min_token_num = {self.sp_min_token_num}: needs enable_sp")
        if self.enable_sp and device == "sim":
            raise ValueError("enable_sp: the simulated device has no rows")
        if self.enable_sp and ranks == 1:
            raise ValueError("enable_sp: needs two tensor-parallel ranks or more (--tp)")

    @property
    def sends_some_rows(self) -> bool:
        """Whether rows of a group's engines go only to ranks of the experts that they pick."""
        return self.all2all_backend not in ("auto", "allgather_reducescatter")

    @property
    def shared_rows(self) -> int | None:
        """Tokens of the smallest step whose rows ranks share; None: all ranks have all rows."""
        return (self.sp_min_token_num or 1) if self.enable_sp else None

    def check_experts(self, device: str) -> None:
        """Raises ValueError where what is asked for can have no effect."""
        if device == "sim" and (self.enable_expert_parallel or self.expert_load_dir is not None):
            name = "enable_expert_parallel" if self.enable_expert_parallel else "expert_load_dir"
            raise ValueError(f"{name}: the simulated device has no experts")
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ValueError("enable_eplb: needs enable_expert_parallel, as else every rank has a share of all experts")
        if self.num_redundant_experts and not self.enable_eplb:
            raise ValueError(f"num_redundant_experts = {self.num_redundant_experts}: needs enable_eplb")
        if self.eplb_config is not None and not self.enable_eplb:
            raise ValueError(f"eplb_config = {self.eplb_config}: needs enable_eplb")
        if read_eplb_config(self.eplb_config).num_redundant_experts and self.num_redundant_experts:
            raise ValueError("num_redundant_experts: is in eplb_config, too; give one of them")

    def expert_settings(self, engine: str) -> ExpertSettings:
        """How a mixture's experts are spread over ranks. `engine`: whose file of loads a rank writes."""
        eplb = read_eplb_config(self.eplb_config)
        return ExpertSettings(
            self.enable_expert_parallel,
            self.enable_eplb,
            self.num_redundant_experts or eplb.num_redundant_experts,
            self.expert_load_dir,
            engine,
            eplb.window_size,
            eplb.step_interval,
            eplb.log_balancedness,
            self.all2all_backend,
        )
