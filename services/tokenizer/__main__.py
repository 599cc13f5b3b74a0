"""`python -m services.tokenizer --model DIR`: tokenizes for one model."""

from __future__ import annotations

import sys
from pathlib import Path

from services.tokenizer.actor import TokenizerActor
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.core.chat_template import (
    IMAGE_BOUND,
    IMAGE_FOLLOWED,
    IMAGE_NUMBERED,
    IMAGE_ROW,
    IMAGE_TOKEN,
    IMAGE_TOKENS,
    OF_VIDEOS,
    SOUND_TOKEN,
    VIDEO_FRAME,
    VIDEO_INTRO,
    VIDEO_OUTRO,
    VIDEO_TOKENS,
    ChatTemplates,
    score_template,
)
from services.tokenizer.core.encoder import PromptEncoder
from services.tokenizer.core.template_files import read_template, read_templates
from services.tokenizer.core.tokenizer_info import tokenizer_info
from services.tokenizer.core.vocabulary import Vocabulary
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit
from shared.models.image_models import read_image_model
from shared.models.model_files import ModelNotFound, resolve_model
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer
from shared.models.video_models import read_video_model, read_video_tokens


def load(config: TokenizerConfig, folder: Path) -> PromptEncoder:
    """The encoder for the model in `folder`. Raises TokenizerUnusable."""
    files = load_tokenizer(folder)
    sources = read_templates(files, config.template_file())
    tokens, image = files.special_tokens, read_image_model(folder)
    if image is not None:
        shown, how = read_video_tokens(folder), read_video_model(folder)
        named: list[tuple[str, int | str | None]] = []
        named += zip(IMAGE_TOKENS, (image.token_id, *(image.frame or ())), strict=False)
        if shown is not None and how is not None:
            around = (shown.start, shown.end) if how.timed else ()
            named += zip(VIDEO_TOKENS, (shown.video, shown.row, *around), strict=False)
            written = {VIDEO_FRAME: shown.frame, VIDEO_INTRO: shown.intro, VIDEO_OUTRO: shown.outro}
            tokens |= written if how.timed else {}
            if shown.template is not None and config.template_file() is None:
                sources = {**sources, OF_VIDEOS: shown.template}
        known = files.tokenizer.id_to_token
        found = {key: known(each) if isinstance(each, int) else each for key, each in named}
        tokens |= {key: name for key, name in found.items() if name is not None}
        if image.sound is not None:
            tokens[SOUND_TOKEN] = files.tokenizer.id_to_token(image.sound) or ""
        tokens[IMAGE_TOKEN] = image.shown or tokens.get(IMAGE_ROW, "")
        tokens |= {} if image.numbered is None else {IMAGE_NUMBERED: image.numbered}
        tokens |= {} if image.bounded is None else {IMAGE_BOUND: image.bounded}
        tokens |= {} if image.followed is None else {IMAGE_FOLLOWED: image.followed}
    templates = ChatTemplates(sources, config.content_format())
    pairs = None if config.score_template is None else score_template(read_template(config.score_template))
    info = tokenizer_info(files, sources.get("default"))
    return PromptEncoder(Vocabulary(files), templates, tokens, config.block_size, pairs, info, config.infill_template)


def build(config: TokenizerConfig, encoding: PromptEncoder, bus: Bus) -> TokenizerActor:
    """The tokenizer that `config` describes, on `bus`."""
    return TokenizerActor(bus, config.instance_id(), config.model_name(), encoding, config.threads)


def main() -> None:
    """Serves until it is stopped; exits with 2 where the settings or the model's files are wrong."""
    config = load_or_exit("tokenizer", TokenizerConfig)
    try:
        encoding = load(config, resolve_model(config.model, weights=False))
    except (ModelNotFound, TokenizerUnusable) as error:
        print(f"tokenizer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run_service(config, lambda bus: build(config, encoding, bus), "tokenizer")


if __name__ == "__main__":
    main()
