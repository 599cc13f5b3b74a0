"""Makes the proposer that `--speculative` asks for."""

from __future__ import annotations

from services.worker.model.config import ModelError
from services.worker.pipeline import Pipeline
from services.worker.speculation.ngram import NgramProposer
from services.worker.speculation.proposer import Proposer
from services.worker.speculation.settings import Speculation

DEFAULT_TOKENS = 3


def make_proposer(settings: Speculation, pipeline: Pipeline) -> Proposer:
    """Raises ModelError where the method cannot be had."""
    if pipeline.stages > 1 and settings.method != "ngram":
        # The other stages need the drafts before the last one, which has the features, could send them.
        raise ModelError(f"speculative: method {settings.method} is not supported with pipeline stages; ngram is")
    return NgramProposer(
        most=settings.num_speculative_tokens or DEFAULT_TOKENS,
        longest=settings.prompt_lookup_max,
        shortest=settings.prompt_lookup_min,
    )
