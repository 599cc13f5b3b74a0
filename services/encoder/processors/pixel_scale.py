"""Scales an image by Pillow and makes numbers of its pixels, as the library's processors do by torchvision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
Triple = tuple[float, float, float]
"""Of red, green and blue."""


class RawPixels(Struct, kw_only=True):
    """What files say of pixels, by the library's names; kinds of models have defaults of their own."""

    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: int = 2
    rescale_factor: float = 1 / 255
    image_mean: Triple = HALF
    image_std: Triple = HALF

    def scale(self) -> PixelScale:
        """Raises ValueError where one of these steps is left out, which no model's tower was trained with."""
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if not getattr(self, name):
                raise ValueError(f"the processor of images: {name} false is not allowed; only true is")
        return PixelScale(self.resample, self.rescale_factor, self.image_mean, self.image_std)


class PixelScale(Struct, frozen=True):
    """What is taken off each color, and by what the rest is divided."""

    resample: int
    """Pillow's number of a filter."""
    factor: float
    mean: Triple
    deviation: Triple

    def scaled(self, image: Any, width: int, height: int) -> Tensor:
        """[3, height, width] of Pillow's `image`, in float32."""
        return self.numbers(np.asarray(image.resize((width, height), self.resample)))

    def numbers(self, pixels: np.ndarray[Any, Any]) -> Tensor:
        """[3, height, width] of `pixels` [height, width, 3], in float32. The factor is put into mean and deviation, as
        the library does."""
        own = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float()
        mean, deviation = (
            (torch.tensor(each) * (1.0 / self.factor))[:, None, None] for each in (self.mean, self.deviation)
        )
        return (own - mean) / deviation
