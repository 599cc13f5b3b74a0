"""The settings of an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from shared.config import ModelServiceConfig
from shared.settings import ByteSize


class EncoderConfig(ModelServiceConfig, frozen=True, kw_only=True):
    """Every setting of an encoder, with its unit and bounds."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Numbers that images are encoded in, and that their rows have; auto: the checkpoint's."),
    ] = "auto"
    threads: Annotated[
        int | None, Meta(ge=1, le=256, description="Threads that encode an image; default: one for each processor.")
    ] = None
    image_cache: Annotated[
        ByteSize, Meta(description="Bytes of images' rows that are kept for further requests; 0: none.")
    ] = 256 * 2**20
    rows_memory: Annotated[
        ByteSize,
        Meta(
            description="Bytes of shared memory that rows may take, those that open requests need and those that are "
            "kept; images wait a minute for room, then 429."
        ),
    ] = 2**30
    rows_dir: Annotated[
        Path | None,
        Meta(
            description="Folder in shared memory where the host's encoders and engines have rows, the same for all of "
            "them; none: rows go to engines by the bus."
        ),
    ] = None
    max_pixels: Annotated[
        int | None,
        Meta(
            ge=1,
            description="Pixels of an image beyond which it is scaled down, for models that take images as large as "
            "they are (Qwen2-VL); default: the model's own bound, but no more than have 128 MiB of rows.",
        ),
    ] = None
    decode_s: Annotated[
        float, Meta(gt=0, le=600, description="Seconds that decoding an image may take; then it is refused.")
    ] = 10.0
