"""Settings of a stack itself: how many of each service there are, on which hosts, with which Redis."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from deploy.supervisor.core.plan import MAX_COUNT, LauncherName, StartMethod
from shared.settings import ByteSize, UpOption

Count = Annotated[int, Meta(ge=1)]
SIZE, HOSTS, CLUSTERS, STORE, RUN = "How many", "Several hosts", "Federation", "KV store", "Run"


class StackSettings(Struct, frozen=True, kw_only=True):
    """Settings of `baton up` that are no service's own."""

    tokenizer: Annotated[
        str | None,
        Meta(
            min_length=1,
            description="Directory with a tokenizer, or a repository of the Hugging Face hub, in place of the model's; "
            "its chat template, too.",
        ),
        UpOption("Model", unset="the model's own"),
    ] = None
    download_dir: Annotated[
        str | None,
        Meta(min_length=1, description="Folder that repositories of the Hugging Face hub are fetched to."),
        UpOption("Model", unset="HF_HUB_CACHE, or HF_HOME/hub"),
    ] = None
    engines: Annotated[
        int | None,
        Meta(ge=0, description="Engines that prefill and decode; each is a copy of the model."),
        UpOption(SIZE, unset="1, or 0 beside pools"),
    ] = None
    standby: Annotated[
        int,
        Meta(
            ge=0,
            description="Engines kept loaded without requests, so many in each pool, which take the place of one that "
            "dies or is added by `baton scale`. Each needs the memory of an engine.",
        ),
        UpOption(SIZE),
    ] = 0
    max_instances: Annotated[
        int | None,
        Meta(
            ge=1,
            le=MAX_COUNT,
            description="Processes of a kind, or engines of a pool, beyond which `baton scale` starts no further ones.",
        ),
        UpOption(SIZE, unset="4 for each processor, 16 at least; with --launcher ray 256"),
    ] = None
    tp: Annotated[Count, Meta(description="Worker ranks that share each layer, per engine."), UpOption(SIZE)] = 1
    prefill: Annotated[
        int, Meta(ge=0, description="Prefill engines: they compute prompts and hand them over."), UpOption(SIZE)
    ] = 0
    decode: Annotated[
        int, Meta(ge=0, description="Decode engines: they continue the requests of prefill engines."), UpOption(SIZE)
    ] = 0
    tp_prefill: Annotated[
        int | None, Meta(ge=1, description="Worker ranks per prefill engine."), UpOption(SIZE, unset="--tp")
    ] = None
    tp_decode: Annotated[
        int | None, Meta(ge=1, description="Worker ranks per decode engine."), UpOption(SIZE, unset="--tp")
    ] = None
    pp_prefill: Annotated[
        int | None, Meta(ge=1, le=32, description="Pipeline stages per prefill engine."), UpOption(SIZE, unset="--pp")
    ] = None
    pp_decode: Annotated[
        int | None, Meta(ge=1, le=32, description="Pipeline stages per decode engine."), UpOption(SIZE, unset="--pp")
    ] = None
    gateways: Annotated[Count, Meta(description="Gateway processes; they share the HTTP port."), UpOption(SIZE)] = 2
    """Two, so that the death of one leaves a port that answers."""
    tokenizers: Annotated[Count, Meta(description="Tokenizer processes."), UpOption(SIZE)] = 1
    encoders: Annotated[
        Count, Meta(description="Processes that encode images, for a model that takes any."), UpOption(SIZE)
    ] = 1
    detokenizers: Annotated[Count, Meta(description="Detokenizer processes."), UpOption(SIZE)] = 1
    coordinators: Annotated[Count, Meta(description="Coordinator processes."), UpOption(SIZE)] = 1
    colocate: Annotated[
        bool,
        Meta(
            description="Run each engine's scheduler and rank, a coordinator and a detokenizer in one process, for "
            "machines with few processors: steps then pass no server."
        ),
        UpOption(SIZE),
    ] = False
    advertise_address: Annotated[
        str | None,
        Meta(description="ADDRESS[:PORT] where other hosts reach this one; they join at PORT (6221)."),
        UpOption(HOSTS, unset="no other host can join"),
    ] = None
    route_port: Annotated[
        int,
        Meta(ge=1, le=65535, description="Port of that address where the NATS servers of the hosts meet."),
        UpOption(HOSTS),
    ] = 6222
    model_port: Annotated[
        int,
        Meta(ge=0, le=65535, description="Port of that address where hosts get the model that have none; 0: nowhere."),
        UpOption(HOSTS),
    ] = 6223
    nodes: Annotated[
        Count, Meta(description="Hosts that the ranks of each engine are spread over."), UpOption(HOSTS)
    ] = 1
    node_rank: Annotated[
        int, Meta(ge=0, description="Index of this host; host 0 also runs all other services."), UpOption(HOSTS)
    ] = 0
    master: Annotated[str | None, Meta(description="HOST:PORT of the NATS server of host 0."), UpOption(HOSTS)] = None
    cluster_token: Annotated[
        str | None,
        Meta(description="Secret that all hosts share; better set by environment."),
        UpOption(HOSTS, environment="BATON_CLUSTER_TOKEN"),
    ] = None
    tls_cert: Annotated[
        str | None,
        Meta(description="PEM certificate of host 0, with the name that --master has, for its NATS server."),
        UpOption(HOSTS),
    ] = None
    tls_key: Annotated[str | None, Meta(description="PEM key of that certificate."), UpOption(HOSTS)] = None
    tls_ca: Annotated[
        str | None,
        Meta(description="PEM certificate of the authority that signed it; for every host."),
        UpOption(HOSTS),
    ] = None
    federation_address: Annotated[
        str | None,
        Meta(description="ADDRESS[:PORT] (7222) where other clusters reach this stack's federation server."),
        UpOption(CLUSTERS, unset="in no federation"),
    ] = None
    federate: Annotated[
        tuple[str, ...],
        Meta(description="The --federation-address of another cluster; through one the others are found."),
        UpOption(CLUSTERS),
    ] = ()
    federation_secret: Annotated[
        str | None,
        Meta(description="Secret that all clusters share (baton cluster secret); better set by environment."),
        UpOption(CLUSTERS, environment="BATON_FEDERATION_SECRET"),
    ] = None
    insecure: Annotated[
        bool,
        Meta(
            description="Allow what other machines could misuse: a gateway without API keys, a bus and transfers "
            "without TLS, ranks that meet on a public address."
        ),
        UpOption(RUN),
    ] = False
    redis: Annotated[bool, Meta(description="Start a redis-server for evicted blocks."), UpOption(STORE)] = False
    redis_memory: Annotated[
        ByteSize, Meta(description="Memory limit of the redis-server of --redis."), UpOption(STORE)
    ] = 2**30
    launcher: Annotated[
        LauncherName,
        Meta(
            description="Where processes run. local: on this machine; ray: on the nodes of a Ray cluster, each engine "
            "as a placement group."
        ),
        UpOption(RUN),
    ] = "local"
    ray_address: Annotated[
        str | None,
        Meta(description="With --launcher ray: HOST:PORT of the cluster's head."),
        UpOption(RUN, environment="RAY_ADDRESS", unset="the cluster of this machine"),
    ] = None
    start_method: Annotated[
        StartMethod,
        Meta(
            description="forkserver: workers are forked from a process that has imported PyTorch, which takes seconds "
            "each time, and all other services from one that has imported what they need; spawn: each is started by "
            "itself."
        ),
        UpOption(RUN),
    ] = "forkserver"
    ksm: Annotated[
        bool,
        Meta(
            description="Let the kernel keep equal pages of the stack's processes on this machine once, where it does "
            "that (/sys/kernel/mm/ksm/run is 1; Linux from 6.4 on)."
        ),
        UpOption(RUN),
    ] = False
    gpu_topology: Annotated[
        str,
        Meta(
            description="How GPUs are joined, so that the ranks of an engine get neighbours. auto: as the driver says; "
            "a file with what `nvidia-smi topo -m` prints; off: in the order of their numbers."
        ),
        UpOption("Capacity"),
    ] = "auto"
    start_timeout: Annotated[
        float, Meta(ge=1, description="Seconds within which every process must be ready."), UpOption(RUN)
    ] = 600.0

    def stages(self, pp: int) -> tuple[int, int, int]:
        """Pipeline stages of an engine that does everything, of one that computes prompts, and of one that decodes."""
        return pp, self.pp_prefill or pp, self.pp_decode or pp

    def ranks(self, pp: int, context_parallel: int = 1) -> tuple[int, int, int]:
        """Worker processes of an engine of each kind, in the same order. `context_parallel`: ranks that share the rows
        of prompts; none does where an engine only decodes."""
        plain, prefill, decode = self.stages(pp)
        return (
            self.tp * plain * context_parallel,
            (self.tp_prefill or self.tp) * prefill * context_parallel,
            (self.tp_decode or self.tp) * decode,
        )
