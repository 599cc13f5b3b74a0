"""`python -m services.encoder --model DIR`: encodes images for one model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from services.encoder.actor import EncoderActor, Reader, Tower
from services.encoder.audio_tower import AudioTower, SampleReader
from services.encoder.config import EncoderConfig
from services.encoder.image_decoder import ImageDecoder
from services.encoder.prompt_tower import PromptTower, TokenReader
from services.encoder.rows_keeper import RowsKeeper
from services.encoder.sound_tower import MediaReader, OmniTower, SoundTower
from services.encoder.tower import ImageTower, TowerUnusable
from shared.actor import run_service
from shared.bus import Bus
from shared.config import load_or_exit
from shared.error_groups import innermost
from shared.models.audio_models import read_audio_model, read_sound_model
from shared.models.encoder_models import read_encoder_decoder
from shared.models.image_models import hears_alone
from shared.models.model_files import ModelNotFound, resolve_model

log = logging.getLogger(__name__)


def build(config: EncoderConfig, folder: Path, bus: Bus) -> EncoderActor:
    """The encoder that `config` describes for the model in `folder`, on `bus`."""
    audio, sounds, instance = read_audio_model(folder), read_sound_model(folder), config.instance_id()
    rows = RowsKeeper(instance, config.rows_dir, config.rows_memory, config.image_cache)
    prompts = read_encoder_decoder(folder)
    load: Callable[[], Tower] = lambda: ImageTower(folder, config.dtype, config.max_pixels)  # noqa: E731 - one of five
    images = ImageDecoder(config.decode_s)
    decoder: Reader = images
    if prompts is not None:
        load, decoder = (lambda: PromptTower(folder, config.dtype)), TokenReader(prompts)
    elif audio is not None:
        load, decoder = (lambda: AudioTower(folder, config.dtype)), SampleReader(audio)
    elif sounds is not None and not hears_alone(folder):
        load, decoder = (
            (lambda: OmniTower(folder, config.dtype, config.max_pixels)),
            MediaReader(images, SampleReader(sounds)),
        )
    elif sounds is not None:
        load, decoder = (lambda: SoundTower(folder, config.dtype)), SampleReader(sounds)
    return EncoderActor(bus, instance, config.model_name(), load, rows, decoder)


def main() -> None:
    """Serves until it is stopped; exits with 2 where the settings or the model's files are wrong."""
    config = load_or_exit("encoder", EncoderConfig)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        folder = resolve_model(config.model, weights=True)
    except ModelNotFound as error:
        print(f"encoder: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        run_service(config, lambda bus: build(config, folder, bus), "encoder")
    except* TowerUnusable as errors:
        log.error("cannot serve", extra={"model": config.model, "reason": str(innermost(errors))})
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
