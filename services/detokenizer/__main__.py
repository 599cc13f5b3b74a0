"""`python -m services.detokenizer --model DIR`: makes text for one model."""

from __future__ import annotations

import sys

from services.detokenizer.actor import DetokenizerActor
from services.detokenizer.config import DetokenizerConfig
from services.detokenizer.core.kinds import text_vocabulary
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit
from shared.model_files import ModelNotFound, resolve_model
from shared.tokenizer_files import TokenizerUnusable, load_tokenizer, special_ids


def main() -> None:
    config = load_or_exit("detokenizer", DetokenizerConfig)
    try:
        tokenizer = load_tokenizer(resolve_model(config.model, weights=False)).tokenizer
    except (ModelNotFound, TokenizerUnusable) as error:
        print(f"detokenizer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    vocabulary = text_vocabulary(tokenizer, special_ids(tokenizer))

    def build(bus: Bus) -> DetokenizerActor:
        return DetokenizerActor(bus, config.instance_id(), config.model_name(), vocabulary, config.max_streams)

    run_service(config, build, "detokenizer")


if __name__ == "__main__":
    main()
