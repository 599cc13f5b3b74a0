"""Makes what `--speculative` asks for."""

from __future__ import annotations

from typing import assert_never

import torch

from services.worker.model.config import ModelError
from services.worker.pipeline import Pipeline
from services.worker.speculation.draft_model import open_draft_model
from services.worker.speculation.drafter import Drafter, Target
from services.worker.speculation.eagle import open_eagle
from services.worker.speculation.medusa import open_medusa
from services.worker.speculation.ngram import NgramDrafter
from services.worker.speculation.proposer import Drafting
from services.worker.speculation.settings import Speculation, SpeculationError, check_place

DEFAULT_TOKENS = 3


def drafting_of(settings: Speculation, pipeline: Pipeline) -> Drafting:
    """What every rank must know of it. Raises ModelError where the method cannot be had."""
    try:
        check_place(settings, device="", stages=pipeline.stages)
    except SpeculationError as error:
        raise ModelError(str(error)) from None
    return Drafting(settings.num_speculative_tokens or DEFAULT_TOKENS, settings.method in ("medusa", "eagle"))


@torch.inference_mode()
def open_drafter(settings: Speculation, target: Target) -> Drafter:
    """Reads the method's weights. Raises ModelError."""
    most = settings.num_speculative_tokens or DEFAULT_TOKENS
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
