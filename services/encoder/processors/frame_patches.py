"""Makes what towers take of frames of a video, as the library's processors of videos do.

These ask for torchvision; the processor of images does not, and scales and normalizes a frame as it does an image.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from services.encoder.image_decoder import DecodedFrames
from shared.messages.generation import PATCHED_FRAMES
from shared.messages.model_card import VideoModel
from shared.models.processor_files import known_processor
from shared.models.video_models import FrameSize, read_frame_size, read_video_model


class _RawFrames(Struct):
    """What files say of pixels of frames, by the library's names."""

    do_rescale: bool | None = None
    do_normalize: bool | None = None
    resample: int | None = None
    rescale_factor: float | None = None
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None


def _of_frames(folder: Path, images: Any) -> Any:
    """The processor of images, with the numbers that the files say of videos."""
    said, made = known_processor(folder, "video_processor", _RawFrames) or _RawFrames(), copy(images)
    for name in said.__struct_fields__:
        if (value := getattr(said, name)) is not None:
            setattr(made, name, value)
    return made


class SquareFrames:
    """Makes a frame a square, as LLaVA-OneVision's, LLaVA-NeXT-Video's and InternVL's processors of videos do: whatever
    its sides are or, LLaVA-NeXT-Video's, of its middle. Stateless."""

    def __init__(self, processor: Any, kind: str, side: int, rows: int, max_rows: int) -> None:
        """`processor`: of the model's images. `kind`: its `model_type`. `side`: pixels. `rows`: of a frame; `max_rows`:
        of a whole video."""
        self._processor, self._side, self._rows, self._max_rows = processor, side, rows, max_rows
        self._cropped, self._as_images, self.closed = kind == _CROPPED, kind == _AS_IMAGES, kind == _CLOSED

    @staticmethod
    def of_model(folder: Path, config: Any, processor: Any, max_rows: int) -> SquareFrames | None:
        """None for a model of another kind."""
        tower, kind = config.vision_config, config.model_type
        if kind == _CLOSED:
            side, rows = tower.image_size, (-(-(tower.image_size // tower.patch_size) // 2)) ** 2
        elif kind == _CROPPED:
            side, rows = tower.image_size, (tower.image_size // tower.patch_size // config.spatial_pool_stride) ** 2
        elif kind == _AS_IMAGES:
            (side, _), (patch, _) = tower.image_size, tower.patch_size
            rows = int((side // patch * config.downsample_ratio) ** 2)
        else:
            return None
        return SquareFrames(_of_frames(folder, processor), kind, side, rows, max_rows)

    def prepared(self, frames: DecodedFrames) -> dict[str, Tensor]:
        """Raises ValueError for too many frames."""
        from PIL import Image

        group, made = frames.group, self._processor
        if group.frames * self._rows + self.closed > self._max_rows:
            raise ValueError(f"{group.frames} frames are not allowed; a prompt has room for {self._max_rows} rows")
        shown = Image.frombytes("RGB", (group.width, group.height), frames.pixels)
        pixels = np.asarray(self._square(shown)).transpose(2, 0, 1)
        if made.do_rescale:
            pixels = made.rescale(pixels, made.rescale_factor)
        if made.do_normalize:
            pixels = made.normalize(pixels, made.image_mean, made.image_std)
        square = torch.from_numpy(pixels)[None]
        return {"pixel_values": square} if self._as_images else {"pixel_values_videos": square[None]}

    def _square(self, shown: Any) -> Any:
        side, resample = self._side, self._processor.resample
        if not self._cropped:
            return shown.resize((side, side), resample)
        shorter = min(shown.size)
        width, height = (int(side * each / shorter) for each in shown.size)
        left, top = (width - side) // 2, (height - side) // 2
        return shown.resize((width, height), resample).crop((left, top, left + side, top + side))


_CLOSED, _CROPPED, _AS_IMAGES = "llava_onevision", "llava_next_video", "internvl"
"""By `model_type`: whose videos end with a row of their own, whose frames are cut, and whose tower sees them as it sees
tiles of images."""


class _RawSoftFrames(Struct):
    max_soft_tokens: int = 70
    do_normalize: bool = True


class SoftFrames:
    """Makes of a frame what Gemma 4's processor makes of an image, within fewer rows. Stateless."""

    def __init__(self, processor: Any, rows: int, max_rows: int) -> None:
        """`processor`: of the model's images, with the numbers of its videos. `rows`: of a frame at most; `max_rows`:
        of a whole video."""
        self._processor, self._rows, self._max_rows = processor, rows, max_rows

    @staticmethod
    def of_model(folder: Path, config: Any, processor: Any, max_rows: int) -> SoftFrames | None:
        """None for a model of another kind."""
        if config.model_type not in ("gemma4", "gemma4_unified"):
            return None
        said = known_processor(folder, "video_processor", _RawSoftFrames) or _RawSoftFrames()
        own = _of_frames(folder, processor)
        own.max_soft_tokens, own.do_normalize = said.max_soft_tokens, said.do_normalize
        return SoftFrames(own, said.max_soft_tokens, max_rows)

    def prepared(self, frames: DecodedFrames) -> dict[str, Tensor]:
        """Raises ValueError for too many frames, and for one that is too flat."""
        from PIL import Image

        group = frames.group
        if group.frames * self._rows > self._max_rows:
            raise ValueError(f"{group.frames} frames are not allowed; a prompt has room for {self._max_rows} rows")
        shown = Image.frombytes("RGB", (group.width, group.height), frames.pixels)
        made = self._processor(shown, do_rescale=False, do_normalize=False, return_tensors="pt")
        places = made["image_position_ids"]
        pixels = torch.where((places >= 0).all(-1)[..., None], self._numbers(made["pixel_values"].float()), 0.0)
        return {"pixel_values": pixels, "image_position_ids": places}

    def _numbers(self, patches: Tensor) -> Tensor:
        """[…, numbers], red, green and blue by turns. The factor is put into mean and deviation, as the library does of
        videos, and not of images: so the last bit is the same."""
        own = self._processor
        factor = own.rescale_factor if own.do_rescale else 1.0
        if not own.do_normalize:
            return patches * factor
        count = patches.shape[-1] // len(own.image_mean)
        mean, deviation = (
            (torch.tensor(each) * (1.0 / factor)).repeat(count) for each in (own.image_mean, own.image_std)
        )
        return (patches - mean) / deviation


class FramePatches:
    """Knows what size frames are given. Stateless."""

    def __init__(
        self, processor: Any, video: VideoModel, size: FrameSize, max_rows: int, max_pixels: int | None
    ) -> None:
        """`processor`: of the model's images. `max_rows`: of a whole video. `max_pixels`: of a frame."""
        self._processor, self._timed = processor, video.timed
        self._size, self._max_rows, self._max_pixels = size, max_rows, max_pixels
        self._side: int = processor.patch_size * processor.merge_size

    @staticmethod
    def of_model(folder: Path, processor: Any, max_rows: int, max_pixels: int | None) -> FramePatches | None:
        """None for a model that takes no videos."""
        video = read_video_model(folder)
        if video is None:
            return None
        size, processor = read_frame_size(folder, video.sampling), _of_frames(folder, processor)
        return FramePatches(processor, video, size, max_rows, max_pixels)

    def prepared(self, frames: DecodedFrames) -> dict[str, Tensor]:
        """Patches and how they lie, as of an image that is two frames deep. Raises ValueError for frames that are too
        flat or too many."""
        from PIL import Image

        group = frames.group
        height, width = self._scaled(group.height, group.width, group.frames)
        size, own = group.frame_bytes, (group.width, group.height)
        shown = [Image.frombytes("RGB", own, frames.pixels[at : at + size]) for at in range(0, group.pixel_bytes, size)]
        images = [each.resize((width, height), self._processor.resample) for each in shown]
        made = self._processor(images, do_resize=False, return_tensors="pt")
        channels = len(self._processor.image_mean)
        each = made["pixel_values"].view(PATCHED_FRAMES, -1, channels, PATCHED_FRAMES, self._processor.patch_size**2)
        patches = torch.stack([each[place, :, :, place] for place in range(PATCHED_FRAMES)], dim=2).flatten(1)
        return {"pixel_values": patches, "image_grid_thw": made["image_grid_thw"][:1]}

    def _scaled(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """The size of frames of a video that has so many: the library's, but for the bounds of what rows a prompt may
        have."""
        rows = self._max_rows // -(-frames // PATCHED_FRAMES)
        own = rows * self._side**2
        if self._max_pixels is not None:
            own = min(own, self._max_pixels)
        if own < self._side**2:
            raise ValueError(f"{frames} frames are not allowed; a prompt has room for {self._max_rows} rows")
        most = min(self._size.longest_edge, own * frames if self._timed else own)
        least = min(self._size.shortest_edge, most)
        if self._timed:
            from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_all

            scaled = of_all(frames, height, width, PATCHED_FRAMES, self._side, least, most)
        else:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_each

            scaled = of_each(height, width, self._side, least, most)
        return int(scaled[0]), int(scaled[1])
