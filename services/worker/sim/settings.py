"""What `--device sim` is told: the accelerator that it models, and over how many ranks experts are spread."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.worker.sim.accelerator import PROFILES, Accelerator, ProfileName
from services.worker.sim.expert_spread import ExpertSpread
from shared.config import ModelServiceConfig
from shared.settings import ByteSize, UpOption


class SimulatedDeviceConfig(ModelServiceConfig, frozen=True, kw_only=True):
    """The settings of a worker whose device is simulated, with their units and bounds."""

    sim_profile: Annotated[ProfileName, Meta(description="Accelerator that --device sim models.")] = "h200"
    sim_step_ms: Annotated[
        float | None, Meta(ge=0, description="Fixed duration of every simulated step; 0 is allowed."), UpOption("Model")
    ] = None
    sim_time_scale: Annotated[float, Meta(ge=0, description="Factor on the duration of every simulated step.")] = 1.0
    sim_fixed_ms: Annotated[float | None, Meta(ge=0, description="Duration of an empty simulated step.")] = None
    sim_bandwidth: Annotated[
        ByteSize | None, Meta(description="Simulated memory bandwidth per second, e.g. 4800GB.")
    ] = None
    sim_speculate: Annotated[
        int, Meta(ge=0, le=64, description="Maximum draft tokens per sequence and step of the simulated device.")
    ] = 0
    sim_acceptance: Annotated[
        float,
        Meta(ge=0, le=1, description="Probability that a simulated draft is accepted, given that all before it were."),
    ] = 0.7
    sim_tflops: Annotated[float | None, Meta(gt=0, description="Simulated compute rate.")] = None
    sim_link: Annotated[
        ByteSize | None, Meta(description="Simulated bandwidth per second between the ranks of an engine, e.g. 450GB.")
    ] = None
    sim_host_link: Annotated[
        ByteSize | None,
        Meta(description="Simulated bandwidth per second between a rank and its node's KV store, e.g. 50GB."),
    ] = None
    sim_link_us: Annotated[
        float | None, Meta(ge=0, description="Microseconds that one small sum of all simulated ranks takes.")
    ] = None
    sim_expert_ranks: Annotated[
        int | None,
        Meta(
            ge=2,
            description="Ranks over which simulated experts are spread, whole, those of further engines included: wide "
            "expert parallelism. Default: the engine's own ranks have a share of every expert.",
        ),
    ] = None
    sim_node_ranks: Annotated[
        int, Meta(ge=1, description="Simulated ranks of one node; what goes further takes the network.")
    ] = 8
    sim_network: Annotated[
        ByteSize | None, Meta(description="Simulated bandwidth per second from a rank to other nodes, e.g. 40GB.")
    ] = None
    sim_expert_balance: Annotated[
        float,
        Meta(gt=0, le=1, description="Picks of a rank's experts: the mean over the ranks by that of the busiest one."),
    ] = 1.0
    sim_expert_overlap: Annotated[
        bool,
        Meta(description="Whether a simulated step is two halves, of which one is sent while the other is computed."),
    ] = False

    def check_simulated(self, world_size: int) -> None:
        """Raises ValueError for what does not go together."""
        for name in ("sim_bandwidth", "sim_link", "sim_host_link", "sim_network"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}: must be above 0")
        ranks = self.sim_expert_ranks
        if ranks is not None and ranks % world_size:
            raise ValueError(f"sim_expert_ranks = {ranks}: must be a multiple of world_size, which is {world_size}")
        if ranks is None and (self.sim_expert_overlap or self.sim_expert_balance < 1):
            name = "sim_expert_overlap" if self.sim_expert_overlap else "sim_expert_balance"
            raise ValueError(f"{name}: needs sim_expert_ranks")

    def accelerator(self) -> Accelerator:
        """The simulated one: a named profile, with whatever was set by itself."""
        return PROFILES[self.sim_profile].changed(
            fixed_seconds=None if self.sim_fixed_ms is None else self.sim_fixed_ms / 1000,
            bandwidth=self.sim_bandwidth,
            flops=None if self.sim_tflops is None else self.sim_tflops * 1e12,
            link=self.sim_link,
            host_link=self.sim_host_link,
            link_seconds=None if self.sim_link_us is None else self.sim_link_us / 1e6,
            network=self.sim_network,
        )

    def expert_spread(self) -> ExpertSpread | None:
        """Over which ranks experts are spread; None: each of the engine's has a share of every expert."""
        if self.sim_expert_ranks is None:
            return None
        return ExpertSpread(
            ranks=self.sim_expert_ranks,
            node_ranks=self.sim_node_ranks,
            balance=self.sim_expert_balance,
            overlap=self.sim_expert_overlap,
        )
