"""`python -m services.detokenizer --model DIR`: makes text for one model."""

from __future__ import annotations

import sys
from pathlib import Path

from services.detokenizer.actor import DetokenizerActor
from services.detokenizer.config import DetokenizerConfig
from services.detokenizer.core.text import TextVocabulary
from services.detokenizer.core.vocabularies import text_vocabulary
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit
from shared.models.model_files import ModelNotFound, resolve_model
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer, special_ids


def load(folder: Path) -> TextVocabulary:
    """The vocabulary of the model in `folder`. Raises TokenizerUnusable."""
    tokenizer = load_tokenizer(folder).tokenizer
    return text_vocabulary(tokenizer, special_ids(tokenizer))


def build(config: DetokenizerConfig, vocabulary: TextVocabulary, bus: Bus) -> DetokenizerActor:
    """The detokenizer that `config` describes, on `bus`."""
    return DetokenizerActor(bus, config.instance_id(), config.model_name(), vocabulary, config.max_streams)


def main() -> None:
    """Serves until it is stopped; exits with 2 where the settings or the model's files are wrong."""
    config = load_or_exit("detokenizer", DetokenizerConfig)
    try:
        vocabulary = load(resolve_model(config.model, weights=False))
    except (ModelNotFound, TokenizerUnusable) as error:
        print(f"detokenizer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run_service(config, lambda bus: build(config, vocabulary, bus), "detokenizer")


if __name__ == "__main__":
    main()
