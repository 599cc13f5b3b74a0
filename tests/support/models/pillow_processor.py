"""The library's own processors of images that ask for torchvision; what they use of it is Pillow's and torch's here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers  # noqa: F401 - which has to be there before what it takes for torchvision
from PIL import Image
from torch import Tensor
from transformers.image_processing_backends import TorchvisionBackend

from tests.support.models.torchvision_stub import import_without_torchvision


def pillow_processor(module: str, name: str, *scaling: type, **settings: Any) -> Any:
    """The processor `name` of `module` of `transformers.models`, with `settings`. `scaling`: has methods that stand
    before the processor's own."""
    own = getattr(import_without_torchvision(f"transformers.models.{module}"), name)
    return type(name, (*scaling, own, _PILLOW), {})(**settings)


def _resize(self: Any, image: Tensor, size: Any, resample: Any = None, **more: Any) -> Tensor:
    """[…, 3, height, width] of bytes."""
    given = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1).numpy()
    made = [Image.fromarray(each).resize((size.width, size.height), resample) for each in given]
    pixels = torch.from_numpy(np.stack([np.asarray(each) for each in made])).permute(0, 3, 1, 2)
    return pixels.reshape(*image.shape[:-2], size.height, size.width)


def _pad(self: Any, images: Tensor, pad_size: Any, **more: Any) -> Tensor:
    """On the right and below, with black."""
    high, wide = images.shape[-2:]
    return torch.nn.functional.pad(images, (0, pad_size.width - wide, 0, pad_size.height - high))


def _normalize(self: Any, image: Tensor, mean: Tensor, std: Tensor, **more: Any) -> Tensor:
    return (image - mean[:, None, None]) / std[:, None, None]


_METHODS = {"resize": _resize, "pad": _pad, "normalize": _normalize, "fetch_images": lambda self, images: images}
_PILLOW = type("Pillow", (TorchvisionBackend,), _METHODS)
"""Stands between a processor and the library's backend."""
