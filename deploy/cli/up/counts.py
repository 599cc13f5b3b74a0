"""How many processes of each kind a stack has, and how they share the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.errors import CommandError
from deploy.supervisor.core.plan import MAX_COUNT, POOLS, Counts
from deploy.supervisor.settings import StackSettings
from services.gateway.config import GatewayConfig
from services.worker.distributed.binding import available_cores
from shared.models.audio_models import read_audio_model
from shared.models.encoder_models import encoder_type, read_encoder_decoder
from shared.models.image_models import read_cross_images, read_image_model
from shared.models.video_models import read_video_model

INSTANCES_PER_CORE, MIN_MAX_INSTANCES = 4, 16
"""What a stack may be scaled to unless --max-instances says."""


def counts_of(
    stack: StackSettings, pp: int, *, has_store: bool, data_parallel: int = 1, context_parallel: int = 1
) -> Counts:
    """How many processes of each kind. Raises CommandError where no engine would decode, no group can be, or ranks
    cannot share the rows of prompts."""
    stages, ranks = stack.stages(pp), stack.ranks(pp, context_parallel)
    check_context(stack, context_parallel, stages, data_parallel)
    if stack.colocate:
        check_colocation(stack, ranks)
    engines = engines_of_groups(data_parallel, stack, pp)
    return Counts(
        gateway=stack.gateways,
        tokenizer=stack.tokenizers,
        detokenizer=0 if stack.colocate else stack.detokenizers,
        coordinator=0 if stack.colocate else stack.coordinators,
        colocate=stack.colocate,
        engines=mixed_engines(engines, stack.prefill, stack.decode),
        data_parallel=data_parallel,
        context_parallel=context_parallel,
        ranks=ranks[0],
        stages=stages[0],
        prefill=stack.prefill,
        prefill_ranks=ranks[1],
        prefill_stages=stages[1],
        decode=stack.decode,
        decode_ranks=ranks[2],
        decode_stages=stages[2],
        kvstore=int(has_store),
        standby=standby_engines(stack),
        hosts=stack.nodes,
        host=stack.node_rank,
    )


def check_colocation(stack: StackSettings, ranks: tuple[int, int, int]) -> None:
    """Raises CommandError for what `--colocate` cannot be combined with."""
    refused = {
        f"engines of {ranks[0]} ranks": ranks[0] > 1,
        f"--prefill {stack.prefill} and --decode {stack.decode}": bool(stack.prefill or stack.decode),
        f"--standby {stack.standby}": bool(stack.standby),
        f"--coordinators {stack.coordinators}": stack.coordinators > 1,
        f"--detokenizers {stack.detokenizers}": stack.detokenizers > 1,
        f"--nodes {stack.nodes}": stack.nodes > 1,
        f"--advertise-address {stack.advertise_address}": stack.advertise_address is not None,
        f"--launcher {stack.launcher}": stack.launcher != "local",
    }
    if what := [each for each, is_given in refused.items() if is_given]:
        allowed = "engines of one rank on this machine alone, each with a coordinator and a detokenizer of its own"
        raise CommandError(f"--colocate: not with {', '.join(what)}, but for {allowed}", status=2)


def check_context(stack: StackSettings, size: int, stages: tuple[int, int, int], data_parallel: int) -> None:
    """Raises CommandError for what `--prefill-context-parallel-size` cannot be combined with: ranks would say so only
    one by one."""
    refused = {
        f"--tp {stack.tp}": stack.tp > 1,
        f"--tp-prefill {stack.tp_prefill}": (stack.tp_prefill or 1) > 1,
        f"--pp {stages[0]}": stages[0] > 1,
        f"--pp-prefill {stages[1]}": stages[1] > 1,
        f"--nodes {stack.nodes}": stack.nodes > 1,
        f"--data-parallel-size {data_parallel}": data_parallel > 1,
    }
    if size > 1 and (what := [each for each, is_given in refused.items() if is_given]):
        why = "its ranks have all weights each, on one host"
        raise CommandError(f"--prefill-context-parallel-size {size}: {why}; not with {', '.join(what)}", status=2)


def mixed_engines(engines: int | None, prefill: int, decode: int) -> int:
    """Number of engines that both prefill and decode: the given one; by default one, or none beside pools. Raises
    CommandError."""
    mixed = engines if engines is not None else int(not prefill and not decode)
    if mixed + decode == 0:
        raise CommandError("no engine would decode: --engines N or --decode N with at least 1 is needed", status=2)
    return mixed


def standby_engines(stack: StackSettings) -> int:
    """As many as were asked for, in each pool. Raises CommandError where none could take another one's place."""
    if not stack.standby:
        return 0
    if stack.nodes > 1:
        raise CommandError(f"--standby {stack.standby}: engines over several hosts cannot be replaced so", status=2)
    if stack.engines == stack.prefill == stack.decode == 0:
        raise CommandError(f"--standby {stack.standby}: there are no engines whose place one could take", status=2)
    return stack.standby


def max_instances(stack: StackSettings) -> int:
    """Processes of a kind, or engines of a pool, that a stack may be scaled to; by default few enough for this machine,
    where they run on it."""
    if stack.max_instances is not None:
        return stack.max_instances
    if stack.launcher == "ray":
        return MAX_COUNT
    return min(MAX_COUNT, max(MIN_MAX_INSTANCES, INSTANCES_PER_CORE * available_cores()))


def check_order(values: Mapping[str, Any], *, prefill: int, decode: int) -> None:
    """Raises CommandError where an order of two engines is asked for, and no request passes through two."""
    apart = bool(prefill and decode)
    if values.get("pd_order") == "decode-first" and not apart:
        raise CommandError("--pd-order decode-first: needs pools: --prefill N --decode N", status=2)
    if values.get("prefill_queue") and not prefill:
        raise CommandError("--prefill-queue: needs engines that pull from it: --prefill N", status=2)
    if values.get("prefill_queue") and values.get("pd_order") == "decode-first":
        raise CommandError("--prefill-queue: needs --pd-order prefill-first", status=2)


def check_hand_overs(values: Mapping[str, Any], *, prefill: int, decode: int, has_store: bool) -> None:
    """As `check_order`; and where engines would hand over and nothing lies between them. Raises CommandError."""
    check_order(values, prefill=prefill, decode=decode)
    for option, asked in (
        ("--pd-order decode-first", values.get("pd_order") == "decode-first"),
        ("--prefill-queue", values.get("prefill_queue")),
    ):
        if asked and not has_store:
            raise CommandError(f"{option}: hands over through a KV store: --kvstore-memory SIZE", status=2)


def check_engines(stack: StackSettings, pp: int, context_parallel: int, data_parallel: int, model: Path) -> None:
    """Raises CommandError for pools, ranks, stages and groups of a model with an encoder: its engines hand nothing
    over, and are a rank each, with all of it."""
    if hands_over(model):
        return
    for option, asked, why in (
        (f"--prefill {stack.prefill}", stack.prefill, "its engines hand nothing over"),
        (f"--decode {stack.decode}", stack.decode, "its engines hand nothing over"),
        (f"--tp {stack.tp}", stack.tp > 1, "one rank computes it"),
        (f"--pp {pp}", pp > 1, "one rank computes it"),
        (f"--prefill-context-parallel-size {context_parallel}", context_parallel > 1, "one rank computes it"),
        (f"--data-parallel-size {data_parallel}", data_parallel > 1, "its engines share nothing"),
    ):
        if asked:
            sentence = f"an encoder reads what is sent to {model}, and {why}"
            raise CommandError(f"{option}: {sentence}; allowed: --engines N", status=2)


def check_images_beside(counts: Counts, model: Path) -> None:
    """`counts`: of a model that is served with its images. Raises CommandError for ranks that share rows where its
    tokens attend to these beside their prompt."""
    if counts.context_parallel > 1 and read_cross_images(model) is not None:
        sentence = f"tokens of {model} attend to images beside their prompt, whose rows are not shared by context"
        allowed = "allowed: --tp N, --pp N; --language-model-only serves it for texts"
        raise CommandError(f"--prefill-context-parallel-size: {sentence}; {allowed}", status=2)


def hands_over(model: Path) -> bool:
    """Whether engines of a model may hand requests over to others, and use a KV store: not what attends to rows beside
    its own tokens, nor an encoder, which keeps nothing of a prompt."""
    return not _attends_to_rows(model) and encoder_type(model) is None


def encoders(stack: StackSettings, model: Path) -> int:
    """How many processes encode images, sounds or prompts: none for a model that has nothing encoded."""
    return stack.encoders if _attends_to_rows(model) or read_image_model(model) else 0


def allows_texts_alone(model: Path, gateway: GatewayConfig) -> bool:
    """Whether a chat may have none of what a model sees or hears."""
    if (images := read_image_model(model)) is None:
        return False
    if images.hears:
        return gateway.max_sounds == 0
    if images.sound is not None and gateway.max_sounds > 0:
        return False
    return gateway.max_images == 0 and (gateway.max_videos == 0 or read_video_model(model) is None)


def _attends_to_rows(model: Path) -> bool:
    return read_audio_model(model) is not None or read_encoder_decoder(model) is not None


def layer_split(text: str | None, counts: Counts) -> tuple[int, ...]:
    """`17,15`: layers of each pipeline stage. Raises CommandError."""
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise CommandError(f"--pp-layers {text}: numbers from 1 on are expected, e.g. 17,15", status=2)
    stages = [counts.stages_of(pool) for pool in POOLS if counts.of(pool)]
    wrong = next((s for s in stages if s not in (1, len(parts))), None)
    if wrong is not None or len(parts) not in stages:
        raise CommandError(f"--pp-layers {text}: {len(parts)} numbers for {wrong or 1} stages (--pp)", status=2)
    return tuple(map(int, parts))


def cpu_share(counts: Counts, numa_nodes: Sequence[int] = ()) -> int | None:
    """Threads for each rank where several engines share this machine; None: a rank knows its share of one engine, or of
    its NUMA nodes."""
    if counts.all_engines == counts.hosts == 1 or numa_nodes:
        return None
    return max(1, available_cores() // counts.all_ranks)


def engines_of_groups(size: int, stack: StackSettings, pp: int) -> int | None:
    """Engines of the stack: as many as were asked for, or one group of `size`; None: nobody said. Raises CommandError
    where they do not make whole groups, or cannot be in any."""
    if size == 1:
        return stack.engines
    option = f"--data-parallel-size {size}"
    for refused, given in (
        (f"--pp {pp}", pp > 1),
        (f"--prefill {stack.prefill}", stack.prefill),
        (f"--decode {stack.decode}", stack.decode),
        (f"--standby {stack.standby}", stack.standby),
        (f"--nodes {stack.nodes}", stack.nodes > 1),
        (f"--advertise-address {stack.advertise_address}", stack.advertise_address is not None),
        (f"--launcher {stack.launcher}", stack.launcher != "local"),
        ("--colocate", stack.colocate),
    ):
        if given:
            raise CommandError(f"{option}: its engines share experts on one host; not with {refused}", status=2)
    engines = size if stack.engines is None else stack.engines
    if not engines or engines % size:
        raise CommandError(f"--engines {engines}: whole groups are needed, of {option} engines each", status=2)
    return engines
