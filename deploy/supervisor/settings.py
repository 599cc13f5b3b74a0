"""Settings of a stack itself: how many of each service there are, on which hosts, with which Redis."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shared.settings import ByteSize, UpOption

Count = Annotated[int, Meta(ge=1)]
SIZE, HOSTS, STORE, RUN = "How many", "Several hosts", "KV store", "Run"


class StackSettings(Struct, frozen=True, kw_only=True):
    """Settings of `baton up` that are no service's own."""

    engines: Annotated[
        int | None, Meta(ge=0, description="Copies of the model."), UpOption(SIZE, unset="1, or 0 beside pools")
    ] = None
    tp: Annotated[Count, Meta(description="Worker ranks that share each layer, per engine."), UpOption(SIZE)] = 1
    prefill: Annotated[int, Meta(ge=0, description="Engines that compute prompts and hand over."), UpOption(SIZE)] = 0
    decode: Annotated[int, Meta(ge=0, description="Engines that take over from those."), UpOption(SIZE)] = 0
    tp_prefill: Annotated[
        int | None, Meta(ge=1, description="Worker ranks per prefill engine."), UpOption(SIZE, unset="--tp")
    ] = None
    tp_decode: Annotated[
        int | None, Meta(ge=1, description="Worker ranks per decode engine."), UpOption(SIZE, unset="--tp")
    ] = None
    pp_prefill: Annotated[
        int | None, Meta(ge=1, le=32, description="Stages per prefill engine."), UpOption(SIZE, unset="--pp")
    ] = None
    pp_decode: Annotated[
        int | None, Meta(ge=1, le=32, description="Stages per decode engine."), UpOption(SIZE, unset="--pp")
    ] = None
    gateways: Annotated[Count, Meta(description="Gateways, which share the HTTP port."), UpOption(SIZE)] = 1
    tokenizers: Annotated[Count, Meta(description="Tokenizers."), UpOption(SIZE)] = 1
    detokenizers: Annotated[Count, Meta(description="Detokenizers."), UpOption(SIZE)] = 1
    coordinators: Annotated[Count, Meta(description="Coordinators."), UpOption(SIZE)] = 1
    nodes: Annotated[
        Count, Meta(description="Hosts that the ranks of each engine are spread over."), UpOption(HOSTS)
    ] = 1
    node_rank: Annotated[
        int, Meta(ge=0, description="Which of them this is; 0 runs everything else, too."), UpOption(HOSTS)
    ] = 0
    master: Annotated[str | None, Meta(description="HOST:PORT of the first one's NATS server."), UpOption(HOSTS)] = None
    cluster_token: Annotated[
        str | None,
        Meta(description="A secret of all hosts. Better by environment."),
        UpOption(HOSTS, environment="BATON_CLUSTER_TOKEN"),
    ] = None
    redis: Annotated[bool, Meta(description="Start a redis-server for evicted blocks."), UpOption(STORE)] = False
    redis_memory: Annotated[ByteSize, Meta(description="What that server may take."), UpOption(STORE)] = 2**30
    start_timeout: Annotated[
        float, Meta(ge=1, description="Seconds until everything must be ready."), UpOption(RUN)
    ] = 600.0

    def stages(self, pp: int) -> tuple[int, int, int]:
        """Pipeline stages of an engine that does everything, of one that computes prompts, and of one that decodes."""
        return pp, self.pp_prefill or pp, self.pp_decode or pp

    def ranks(self, pp: int) -> tuple[int, int, int]:
        """Worker processes of an engine of each kind, in the same order."""
        plain, prefill, decode = self.stages(pp)
        return self.tp * plain, (self.tp_prefill or self.tp) * prefill, (self.tp_decode or self.tp) * decode
