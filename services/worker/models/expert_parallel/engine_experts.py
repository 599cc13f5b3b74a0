"""The placement of all experts of an engine's model, on which its ranks agree at their start."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from functools import partial

import msgspec

from services.worker.distributed.communicator import Communicator
from services.worker.distributed.torch_ranks import RankGroup
from services.worker.models.config import ModelConfig, ModelDescription, ModelError
from services.worker.models.expert_parallel.expert_balance import balance_of
from services.worker.models.expert_parallel.expert_load import read_loads
from services.worker.models.expert_parallel.placement import (
    ExpertPlacement,
    balance_experts,
    improve_placement,
    spread_evenly,
)
from services.worker.models.expert_parallel.rearrangement import PlaceLayer
from services.worker.models.expert_parallel.settings import ExpertSettings

_log = logging.getLogger(__name__)


def place_experts(
    settings: ExpertSettings,
    config: ModelConfig,
    model: str,
    communicator: Communicator,
    group: RankGroup | None = None,
) -> tuple[ExpertPlacement, ...]:
    """Of every layer of the model, those without experts included; empty where ranks have shares of all experts. Every
    rank of the engine must come here. `model`: its digest. `group`: over whose ranks they are spread; None: over those
    of a stage. Raises ModelError for what cannot be placed."""
    check_experts(settings, config)
    if not settings.parallel or config.mixture is None:
        return ()
    experts, ranks = config.mixture.experts, communicator.world_size if group is None else group.place.group_size
    even = spread_evenly(experts, ranks)
    if not settings.balanced:
        return (even,) * config.num_layers
    first = communicator.rank == 0 if group is None else group.place.in_group == 0
    loads, hosts = _agreed_loads(settings, model, experts, config.num_layers, group or communicator, first=first)
    placements = tuple(
        balance_experts(load, ranks, redundant=settings.redundant, groups=config.mixture.groups, hosts=hosts)
        for load in loads
    )
    _tell(loads, even, placements)
    return placements


def layer_placer(
    settings: ExpertSettings, config: ModelConfig, communicator: Communicator, group: RankGroup | None
) -> PlaceLayer:
    """Where experts go while steps are computed. Every rank of the engine, or group, must come here."""
    assert config.mixture is not None, "there are experts to place"
    hosts = _hosts((group or communicator).all_gather(socket.gethostname()))
    return partial(improve_placement, redundant=settings.redundant, groups=config.mixture.groups, hosts=hosts)


def check_experts(settings: ExpertSettings, config: ModelDescription) -> None:
    """Raises ModelError where nothing that is asked for can have an effect."""
    if isinstance(config, ModelConfig) and config.mixture is not None:
        return
    if settings.parallel or settings.load_dir is not None:
        name = "enable_expert_parallel" if settings.parallel else "expert_load_dir"
        why = "has no experts" if isinstance(config, ModelConfig) else "is computed by transformers"
        raise ModelError(f"{name}: the model ({config.architecture}) {why}")


def check_library_experts(settings: ExpertSettings, config: ModelDescription) -> None:
    """Raises ModelError for what experts that `transformers` computes are not served with."""
    for name, asked in (("enable_eplb", settings.balanced), ("expert_load_dir", settings.load_dir is not None)):
        if asked:
            raise ModelError(f"{name}: the model ({config.architecture}) is computed by transformers")


def engine_bytes(
    settings: ExpertSettings,
    config: ModelConfig,
    stage_bytes: int,
    placements: Sequence[ExpertPlacement],
    group: RankGroup | None,
) -> int:
    """What the ranks of a stage hold of its weights, if each has as many experts as the rank with most; none of
    `placements`: as many as the others."""
    largest = _largest_share(settings, config, placements)
    if group is None:
        return int(stage_bytes * largest)
    mixed = stage_bytes * config.expert_share
    return int(stage_bytes - mixed + mixed * largest / group.place.engines)


def _largest_share(settings: ExpertSettings, config: ModelConfig, placements: Sequence[ExpertPlacement]) -> float:
    """How many of the model's experts the rank with most of them has, over an equal share: more than 1 where they do
    not divide over ranks, or some have several replicas."""
    if config.mixture is None or not placements:
        return 1.0
    ranks = len(placements[0].ranks)
    if settings.moves:  # anywhere at last, and a layer's twice while it changes
        most = (config.mixture.experts + settings.redundant) // ranks * (len(placements) + 1)
        return most * ranks / (config.mixture.experts * len(placements))
    most = max(sum(len(each.experts_of(rank)) for each in placements) for rank in range(ranks))
    return most * ranks / (config.mixture.experts * len(placements))


def _agreed_loads(
    settings: ExpertSettings, model: str, experts: int, layers: int, others: Communicator | RankGroup, *, first: bool
) -> tuple[list[list[int]], int]:
    """What the first rank has read, as files change; and on how many hosts the ranks are, as many on each."""
    own = read_loads(settings.load_dir, model, experts, layers) if first else []
    said = others.all_gather(msgspec.json.encode((socket.gethostname(), own)).decode())
    found = [msgspec.json.decode(each, type=tuple[str, list[list[int]]]) for each in said]
    return found[0][1], _hosts([host for host, _ in found])


def _hosts(hosts: Sequence[str]) -> int:
    """On how many hosts ranks are, given each one's; 1, too, where these have different numbers of them."""
    return len(set(hosts)) if len({hosts.count(host) for host in hosts}) == 1 else 1


def _tell(loads: list[list[int]], even: ExpertPlacement, placements: tuple[ExpertPlacement, ...]) -> None:
    measured = [(load, placement) for load, placement in zip(loads, placements, strict=True) if any(load)]
    if not measured:
        _log.info("experts are placed evenly: it has not been counted yet how often they are picked")
        return
    before = sum(balance_of(even.loads(load)) for load, _ in measured) / len(measured)
    after = sum(balance_of(placement.loads(load)) for load, placement in measured) / len(measured)
    _log.info(
        "experts are placed by how often they were picked: mean over maximum of the ranks %.2f, evenly it was %.2f",
        *(after, before),
        extra={"layers": len(measured)},
    )
