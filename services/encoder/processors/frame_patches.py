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
from shared.messages.encoder import FrameGroup
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
    """Makes a frame a square, as LLaVA-OneVision's, LLaVA-NeXT-Video's, InternVL's and SmolVLM's processors of videos
    do: whatever its sides are or, LLaVA-NeXT-Video's, of its middle. Stateless."""

    def __init__(
        self, processor: Any, kind: str, side: int, rows: int, max_rows: int, longest: int | None = None
    ) -> None:
        """`processor`: of the model's images. `kind`: its `model_type`. `side`: pixels. `rows`: of a frame; `max_rows`:
        of a whole video. `longest`: pixels of the longer side of what is made a square, of frames that are scaled
        twice."""
        self._processor, self._side, self._rows, self._max_rows = processor, side, rows, max_rows
        self._cropped, self._as_images, self.closed = kind == _CROPPED, kind == _AS_IMAGES, kind == _CLOSED
        self._longest = longest

    @staticmethod
    def of_model(folder: Path, config: Any, processor: Any, max_rows: int) -> SquareFrames | None:
        """None for a model of another kind."""
        tower, kind = config.vision_config, config.model_type
        longest = None
        if kind == _CLOSED:
            side, rows = tower.image_size, (-(-(tower.image_size // tower.patch_size) // 2)) ** 2
        elif kind == _CROPPED:
            side, rows = tower.image_size, (tower.image_size // tower.patch_size // config.spatial_pool_stride) ** 2
        elif kind == _AS_IMAGES:
            (side, _), (patch, _) = tower.image_size, tower.patch_size
            rows = int((side // patch * config.downsample_ratio) ** 2)
        elif kind == _TWICE:
            longest = (known_processor(folder, "video_processor", _RawTwice) or _RawTwice()).longest
            side, rows = tower.image_size, (tower.image_size // tower.patch_size // config.scale_factor) ** 2
        else:
            return None
        return SquareFrames(_of_frames(folder, processor), kind, side, rows, max_rows, longest)

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
        if self._longest is not None:
            return {"pixel_values": square[None]}
        return {"pixel_values": square} if self._as_images else {"pixel_values_videos": square[None]}

    def _square(self, shown: Any) -> Any:
        side, resample = self._side, self._processor.resample
        if self._longest is not None:
            shown = shown.resize(_within(self._longest, *shown.size), resample)
        if not self._cropped:
            return shown.resize((side, side), resample)
        shorter = min(shown.size)
        width, height = (int(side * each / shorter) for each in shown.size)
        left, top = (width - side) // 2, (height - side) // 2
        return shown.resize((width, height), resample).crop((left, top, left + side, top + side))


_CLOSED, _CROPPED, _AS_IMAGES, _TWICE = "llava_onevision", "llava_next_video", "internvl", "smolvlm"
"""By `model_type`: whose videos end with a row of their own, whose frames are cut, whose tower sees them as it sees
tiles of images, and whose frames are scaled twice."""
_MAX_SIDE = 4096
"""Of a frame that is scaled twice, in between."""


class _RawLongest(Struct):
    longest_edge: int


class _RawSampled(Struct):
    video_size: _RawLongest


class _RawTwice(Struct):
    """SmolVLM's. A `size` of its own goes before that of its sampling, as in the library."""

    size: _RawLongest | None = None
    video_sampling: _RawSampled | None = None

    @property
    def longest(self) -> int:
        """Pixels of the longer side."""
        said = self.size if self.size is not None or self.video_sampling is None else self.video_sampling.video_size
        return min(_MAX_SIDE, 4 * 364 if said is None else said.longest_edge)


def _within(longest: int, width: int, height: int) -> tuple[int, int]:
    """Width and height with a longer side of so many pixels, the other one even: the library's
    `get_resize_output_image_size`."""
    aspect = width / height
    if width >= height:
        other = int(longest / aspect)
        return longest, max(other + other % 2, 1)
    other = int(longest * aspect)
    return max(other + other % 2, 1), longest


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


class _RawRowBounds(Struct):
    min_image_tokens: int = 16
    max_image_tokens: int = 240_000


class CanvasFrames:
    """Makes patches of frames as large as they are, or smaller, with black on the right and below, as GLM-5-Next's
    processor of videos does. Stateless."""

    def __init__(self, processor: Any, bounds: _RawRowBounds, max_rows: int, max_pixels: int | None) -> None:
        """`processor`: of the model's images, with the numbers of its videos. `bounds`: rows of a whole video.
        `max_rows`: of it in a prompt. `max_pixels`: of a frame."""
        self._processor, self._bounds = processor, bounds
        self._max_rows, self._max_pixels = max_rows, max_pixels
        self._side: int = processor.patch_size * processor.merge_size

    @staticmethod
    def of_model(
        folder: Path, config: Any, processor: Any, max_rows: int, max_pixels: int | None
    ) -> CanvasFrames | None:
        """None for a model of another kind."""
        if config.model_type != "glm5_next":
            return None
        said = known_processor(folder, "video_processor", _RawRowBounds) or _RawRowBounds()
        return CanvasFrames(_of_frames(folder, processor), said, max_rows, max_pixels)

    def prepared(self, frames: DecodedFrames) -> dict[str, Tensor]:
        """See `FramePatches.prepared`. Raises ValueError for too many frames."""
        from PIL import Image

        canvases = []
        size, (width, height) = self._sizes(frames.group)
        for shown in images_of(frames):
            canvas = Image.new("RGB", size)
            same = shown.size == (width, height)
            canvas.paste(shown if same else shown.resize((width, height), self._processor.resample))
            canvases.append(canvas)
        return patches_of_two(self._processor, canvases)

    def _sizes(self, group: FrameGroup) -> tuple[tuple[int, int], tuple[int, int]]:
        """Width and height of the canvas, and of what is on it."""
        from transformers.models.glm5_next.image_processing_pil_glm5_next import smart_resize

        row, bounds = PATCHED_FRAMES * self._side**2, self._bounds
        most = min(bounds.max_image_tokens, self._max_rows)
        if self._max_pixels is not None:
            most = min(most, self._max_pixels * group.frames // row)
        if 2 * most < group.frames:
            raise ValueError(f"{group.frames} frames are not allowed; a prompt has room for {most} rows")
        least = min(bounds.min_image_tokens, most)
        high, wide = smart_resize(
            num_frames=group.frames,
            height=group.height,
            width=group.width,
            temporal_factor=PATCHED_FRAMES,
            factor=self._side,
            min_pixels=least,
            max_pixels=most,
        )
        scale = min(high / group.height, wide / group.width)
        if group.frames * group.height * group.width >= row * least:
            scale = min(1.0, scale)
        height, width = (
            max(1, min(most, int(own * scale))) for own, most in ((group.height, high), (group.width, wide))
        )
        return (wide, high), (width, height)


def images_of(frames: DecodedFrames) -> list[Any]:
    """As Pillow has them."""
    from PIL import Image

    size, own = frames.group.frame_bytes, (frames.group.width, frames.group.height)
    starts = range(0, frames.group.pixel_bytes, size)
    return [Image.frombytes("RGB", own, frames.pixels[at : at + size]) for at in starts]


def patches_of_two(processor: Any, images: list[Any]) -> dict[str, Tensor]:
    """Patches of two frames that have their size, and how they lie, as of an image that is two frames deep.
    `processor`: of images."""
    made = processor(images, do_resize=False, return_tensors="pt")
    channels = len(processor.image_mean)
    each = made["pixel_values"].view(PATCHED_FRAMES, -1, channels, PATCHED_FRAMES, processor.patch_size**2)
    patches = torch.stack([each[place, :, :, place] for place in range(PATCHED_FRAMES)], dim=2).flatten(1)
    return {"pixel_values": patches, "image_grid_thw": made["image_grid_thw"][:1]}


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
        """Patches and how they lie. Raises ValueError for frames that are too flat or too many."""
        group = frames.group
        height, width = self._scaled(group.height, group.width, group.frames)
        scaled = [each.resize((width, height), self._processor.resample) for each in images_of(frames)]
        return patches_of_two(self._processor, scaled)

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
