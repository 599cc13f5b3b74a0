"""Which models take images beside text, by their configuration; what every service has to know of it. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

IMAGE_ARCHITECTURES = (
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Those that are served with their vision tower."""


class ImageModel(Struct, frozen=True):
    """What a model's configuration says of its images."""

    token_id: int
    """The token that a chat template writes where an image stands."""


class _RawImageModel(Struct):
    architectures: tuple[str, ...] = ()
    image_token_id: int | None = None
    image_token_index: int | None = None


def read_image_model(folder: Path) -> ImageModel | None:
    """What `config.json` in `folder` says; None where there is no such file, or the model takes no images. What else
    may be wrong with the file is for those to say who read all of it."""
    try:
        raw = msgspec.json.decode((folder / "config.json").read_bytes(), type=_RawImageModel)
    except (OSError, msgspec.MsgspecError):
        return None
    if not any(each in IMAGE_ARCHITECTURES for each in raw.architectures):
        return None
    token = raw.image_token_id if raw.image_token_index is None else raw.image_token_index
    return None if token is None else ImageModel(token)
