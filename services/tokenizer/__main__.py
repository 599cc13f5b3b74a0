"""`python -m services.tokenizer --model DIR`: tokenizes for one model."""

from __future__ import annotations

import sys
from pathlib import Path

from services.tokenizer.actor import TokenizerActor
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.encoding import Encoding
from services.tokenizer.template_files import ChatTemplates, read_templates
from services.tokenizer.vocabulary import Vocabulary
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit
from shared.model_files import ModelNotFound, resolve_model
from shared.tokenizer_files import TokenizerUnusable, load_tokenizer


def load(config: TokenizerConfig, folder: Path) -> Encoding:
    files = load_tokenizer(folder)
    templates = ChatTemplates(read_templates(files, config.template_file()), config.content_format())
    return Encoding(Vocabulary(files), templates, files.special_tokens)


def build(config: TokenizerConfig, encoding: Encoding, bus: Bus) -> TokenizerActor:
    return TokenizerActor(bus, config.instance_id(), config.model_name(), encoding, config.threads)


def main() -> None:
    config = load_or_exit("tokenizer", TokenizerConfig)
    try:
        encoding = load(config, resolve_model(config.model, weights=False))
    except (ModelNotFound, TokenizerUnusable) as error:
        print(f"tokenizer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run_service(config, lambda bus: build(config, encoding, bus), "tokenizer")


if __name__ == "__main__":
    main()
