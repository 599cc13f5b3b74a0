"""Makes what `--speculative` asks for."""

from __future__ import annotations

from typing import assert_never

import torch

from services.worker.distributed.communicator import Pipeline
from services.worker.models.config import ModelConfig, ModelError
from services.worker.speculation.draft_model import open_draft_model
from services.worker.speculation.drafter import Drafter, TargetModel
from services.worker.speculation.eagle import open_eagle
from services.worker.speculation.medusa import open_medusa
from services.worker.speculation.ngram import NgramDrafter
from services.worker.speculation.proposer import DraftSettings
from services.worker.speculation.settings import SpeculationError, SpeculationSettings, check_supported

DEFAULT_DRAFT_TOKENS = 3


def draft_settings(settings: SpeculationSettings, pipeline: Pipeline) -> DraftSettings:
    """What every rank must know of the method. Raises ModelError where it cannot be had."""
    try:
        check_supported(settings, device="", stages=pipeline.stages)
    except SpeculationError as error:
        raise ModelError(str(error)) from None
    return DraftSettings(
        settings.num_speculative_tokens or DEFAULT_DRAFT_TOKENS, settings.method in ("medusa", "eagle")
    )


@torch.inference_mode()
def open_drafter(settings: SpeculationSettings, target: TargetModel) -> Drafter:
    """Reads the method's weights. Raises ModelError."""
    most = settings.num_speculative_tokens or DEFAULT_DRAFT_TOKENS
    if settings.method in ("medusa", "eagle") and not isinstance(target.config, ModelConfig):
        raise ModelError(
            f"speculative method {settings.method}: reads hidden states, which transformers keeps: use ngram or draft"
        )
    target = target.for_drafts()
    match settings.method:
        case "ngram":
            return NgramDrafter(settings.prompt_lookup_max, settings.prompt_lookup_min, most)
        case "draft":
            return open_draft_model(settings, target, most)
        case "medusa":
            return open_medusa(settings, target, most)
        case "eagle":
            return open_eagle(settings, target, most)
        case _:
            assert_never(settings.method)
