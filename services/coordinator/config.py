"""The settings of a coordinator: its bounds, and the rules by which it places requests."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.config import ServiceConfig
from shared.settings import UpOption

Policy = Literal["kv", "least-loaded", "round-robin", "random"]
"""kv: the least work, cached blocks counted. least-loaded: the fewest requests, waiting ones four times."""


PdOrder = Literal["prefill-first", "decode-first"]


class CoordinatorConfig(ServiceConfig, frozen=True, kw_only=True):
    """Every setting of a coordinator, with its unit and bounds. Its core reads them here."""

    queue_limit: Annotated[
        int, Meta(ge=0, description="Requests that may wait for an engine; the next one is refused with 429.")
    ] = 1024
    queue_timeout: Annotated[float, Meta(gt=0, description="Seconds that a request may wait for an engine.")] = 60.0
    engine_fill: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(
            description="An engine gets no requests above this multiple of its running limit; "
            "none: it gets requests until its queue is full."
        ),
    ] = None
    """Low values bind requests later, so that they go where work ends first; but the end of work shows only in the next
    report, half a second late."""
    max_ejected_share: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of a model's engines that may be ejected for failing; never the last one."),
    ] = 0.5
    """With more suspects than that the fault is hardly theirs, and a few answers are better than none."""
    fair_fill: Annotated[
        float,
        Meta(
            ge=1,
            description="An engine gets no requests of API keys above this multiple of its running limit; "
            "the others wait in the coordinator, in fair order.",
        ),
    ] = 1.25
    """What waits in an engine goes by arrival: with more there, one key's requests would delay those of all others."""
    router_policy: Annotated[
        Policy,
        Meta(description="Placement of requests. kv: least work, with cached blocks counted as done."),
        UpOption("Routing"),
    ] = "kv"
    router_temperature: Annotated[
        float,
        Meta(ge=0, description="0: take the cheapest engine, rotating among equals; above 0: draw one by its cost."),
    ] = 0.0
    """1 is a factor of e between the chances of the least and the greatest cost."""
    router_store_discount: Annotated[
        float,
        Meta(ge=0, le=1, description="Value of a cached block in a KV store, relative to one on the engine's device."),
    ] = 0.75
    """A block in another node's store is worth this squared, as long as the link to there was not measured: it goes
    through both."""
    router_saturation: Annotated[
        float,
        Meta(ge=1, description="Above this multiple of the mean load an engine's cached blocks do not count."),
    ] = 2.0
    """And a few requests more; neither does one win by its cache whose running batch is full."""
    router_step_times: Annotated[
        bool, Meta(description="Work on engines counts by the time that it takes them, as measured; with kv.")
    ] = True
    """By ADR 51. Without it all engines are taken to be equally fast."""
    router_index_blocks: Annotated[
        int, Meta(ge=1024, description="Blocks in the prefix map; each takes 70 to 100 bytes.")
    ] = 2_000_000
    disaggregate_tokens: Annotated[
        int,
        Meta(ge=0, description="Uncached prompt tokens from which on a prefill engine computes the prompt."),
        UpOption("Routing"),
    ] = 2048
    disaggregate_share: Annotated[
        float,
        Meta(ge=0, description="Or this uncached share of the prompt; above 1: only the number of tokens counts."),
    ] = 0.7
    disaggregate_least: Annotated[
        int, Meta(ge=0, description="With fewer uncached prompt tokens than this, no prefill engine is used.")
    ] = 256
    """So few hold up no step of a decode engine, while they would wait behind long prompts at a prefill engine
    (ADR 7)."""
    disaggregate_busy: Annotated[
        int, Meta(ge=0, description="With more tokens waiting per prefill engine than this, none is used.")
    ] = 16_384
    pd_order: Annotated[
        PdOrder,
        Meta(
            description="Which engine of two gets a request first. prefill-first: the one that computes its prompt. "
            "decode-first: the one that decodes it, which keeps room and decides whether the other computes the prompt."
        ),
        UpOption("Routing"),
    ] = "prefill-first"
    prefill_queue: Annotated[
        bool,
        Meta(
            description="Prefill engines pull prompts from a queue in the coordinators when they have room, instead of "
            "being sent them; needs --pd-order prefill-first."
        ),
        UpOption("Routing"),
    ] = False
    """Its bound are `disaggregate_busy` tokens for each prefill engine; what is beyond it is not disaggregated."""
    prefill_queue_s: Annotated[
        float,
        Meta(
            gt=0, description="Seconds after which a prompt that no engine has pulled goes to an engine that decodes."
        ),
    ] = 5.0
    lifecycle_budget: Annotated[
        float,
        Meta(
            gt=0,
            description="Messages a second by which all processes of one service say that they are there, twice as "
            "many where all have something new to say; of more processes each says it less often.",
        ),
    ] = 128.0
    """What it costs to hear a fleet does not grow with it any more, but a death that nobody announces is noticed
    later."""
    kv_event_budget: Annotated[
        float,
        Meta(
            gt=0,
            description="Messages a second by which all engines and KV stores say which blocks they store and remove, "
            "while all of them do; of more engines each says it less often.",
        ),
    ] = 1280.0
    """As many as 32 engines publish at the shortest interval. Placements are expected where they were made, so that a
    late event costs little."""
    scale_timeout: Annotated[
        float, Meta(gt=0, description="Seconds that the supervisor may take for `admin.scale`.")
    ] = 30.0

    def __post_init__(self) -> None:
        if self.prefill_queue and self.pd_order == "decode-first":
            raise ValueError("prefill_queue: needs pd_order prefill-first; decode-first passes prompts on by itself")
