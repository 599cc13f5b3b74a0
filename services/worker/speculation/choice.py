"""Makes what `--speculative` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

import torch

from services.worker.batch.draft_trees import TreeShape
from services.worker.distributed.communicator import Pipeline
from services.worker.models.config import ModelConfig, ModelDescription, ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.loaded_model import CausalLm
from services.worker.platforms.interface import Platform
from services.worker.speculation.draft_model import open_draft_model
from services.worker.speculation.drafter import Drafter, TargetModel
from services.worker.speculation.eagle import open_eagle
from services.worker.speculation.eagle3 import open_eagle3, read_taps
from services.worker.speculation.medusa import open_medusa
from services.worker.speculation.mtp import open_mtp
from services.worker.speculation.ngram import NgramDrafter
from services.worker.speculation.proposer import DraftSettings
from services.worker.speculation.settings import (
    READ_HIDDEN_STATES,
    SpeculationError,
    SpeculationSettings,
    check_supported,
)
from services.worker.speculation.suffix import SuffixDrafter


def draft_settings(settings: SpeculationSettings, pipeline: Pipeline) -> DraftSettings:
    """What every rank must know of the method. Raises ModelError where it cannot be had."""
    try:
        check_supported(settings, device="", stages=pipeline.stages)
    except SpeculationError as error:
        raise ModelError(str(error)) from None
    return DraftSettings(settings.most, settings.method in READ_HIDDEN_STATES, _tree(settings))


def _tree(settings: SpeculationSettings) -> TreeShape | None:
    if settings.speculative_eagle_topk == 1:
        return None
    topk, least = settings.speculative_eagle_topk, settings.speculative_eagle_min_path_prob
    return TreeShape(topk, settings.most, settings.tree_rows - 1, least)


def check_trees(
    settings: SpeculationSettings, config: ModelDescription, platform: Platform, refused: Mapping[str, bool]
) -> None:
    """`refused`: settings that do not go with trees, and which are given. Raises ModelError where a tree of drafts
    cannot be verified."""
    topk = settings.speculative_eagle_topk
    if topk == 1:
        return
    if not platform.in_main_memory:
        reason = f"trees are verified on CPUs, not on {platform}"
    elif not isinstance(config, ModelConfig) or any(
        (config.latent, config.states, config.connections, config.block_index)
    ):
        reason = "trees are verified by models of ours that keep keys and values in all layers"
    elif given := [name for name, asked in refused.items() if asked]:
        reason = f"{given[0]} does not go with trees"
    else:
        return
    raise ModelError(f"speculative: speculative_eagle_topk is {topk}, must be 1: {reason}")


def keep_hidden_states(
    settings: SpeculationSettings, decoder: CausalLm, config: ModelDescription, *, pools: bool
) -> None:
    """Has the model keep what the method reads of its layers; on every rank, before anything else is made of the
    `decoder`. `pools`: it also makes vectors of prompts. Raises ModelError where that cannot be."""
    _check_hidden_states(settings, config)
    if settings.method != "eagle3":
        return
    if pools:
        raise ModelError("speculative method eagle3: is not supported with pooling_type, which reads other rows")
    assert isinstance(decoder, Decoder), "it is ours"
    decoder.use_taps(read_taps(settings.folder(), config.num_layers))


def _check_hidden_states(settings: SpeculationSettings, config: ModelDescription) -> None:
    if settings.method in READ_HIDDEN_STATES and not isinstance(config, ModelConfig):
        raise ModelError(
            f"speculative method {settings.method}: reads hidden states, which transformers keeps: use ngram, suffix "
            "or draft"
        )
    if settings.method in READ_HIDDEN_STATES and isinstance(config, ModelConfig) and config.connections is not None:
        raise ModelError(
            f"speculative method {settings.method}: {config.architecture} takes drafts by ngram, suffix or draft"
        )


@torch.inference_mode()
def open_drafter(settings: SpeculationSettings, target: TargetModel) -> Drafter:
    """Reads the method's weights. Raises ModelError."""
    most = settings.most
    _check_hidden_states(settings, target.config)
    target = target.for_drafts()
    match settings.method:
        case "ngram":
            return NgramDrafter(settings.prompt_lookup_max, settings.prompt_lookup_min, most)
        case "suffix":
            return SuffixDrafter.of(settings, most)
        case "draft":
            return open_draft_model(settings, target, most)
        case "medusa":
            return open_medusa(settings, target, most)
        case "eagle":
            return open_eagle(settings, target, most, _tree(settings))
        case "eagle3":
            return open_eagle3(settings, target, most, _tree(settings))
        case "mtp":
            return open_mtp(target, most)
        case _:
            assert_never(settings.method)
