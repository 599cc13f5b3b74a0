"""Which models take sounds beside text, by their files; what every service has to know of it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from shared.messages.model_card import SoundModel
from shared.models.image_models import QWEN2_AUDIO

_R = TypeVar("_R", bound=Struct)


class _RawSoundText(Struct):
    hidden_size: int = 4096


class _RawSoundModel(Struct):
    architectures: tuple[str, ...] = ()
    text_config: _RawSoundText = field(default_factory=_RawSoundText)


class _RawSoundFeatures(Struct):
    sampling_rate: int = 16_000
    chunk_length: int = 30


class _RawSoundProcessors(Struct):
    feature_extractor: _RawSoundFeatures | None = None


def read_sound_model(folder: Path) -> SoundModel | None:
    """What the files in `folder` say; None where there are none, or the model takes no sounds. What else may be wrong
    with them is for those to say who read all of them."""
    raw = _read(folder / "config.json", _RawSoundModel)
    if raw is None or QWEN2_AUDIO not in raw.architectures:
        return None
    both = _read(folder / "processor_config.json", _RawSoundProcessors)
    features = (None if both is None else both.feature_extractor) or _RawSoundFeatures()
    features = _read(folder / "preprocessor_config.json", _RawSoundFeatures) or features
    return SoundModel(raw.text_config.hidden_size, features.sampling_rate, features.chunk_length)


def _read(path: Path, kind: type[_R]) -> _R | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
