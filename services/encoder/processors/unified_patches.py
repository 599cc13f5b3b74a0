"""Prepares images for Gemma 4's kind without a tower (12B), each of whose rows is a square of patches.

The library's own processor of it asks for torchvision; that of Gemma 4's tower, which scales an image alike and leaves
its patches as they are, does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct, field

from shared.models.image_models import known_config


class _RawWindow(Struct):
    sliding_window: int = 1024


class _RawUnified(Struct):
    architectures: tuple[str, ...] = ()
    text_config: _RawWindow = field(default_factory=_RawWindow)


def unified_processor(folder: Path) -> Any:
    """Of the model in `folder`. Raises ValueError for images with more rows than its window has tokens, which see each
    other beyond it in the library, and what that does for files that say nothing of use."""
    from transformers import Gemma4ImageProcessorPil

    def merged(self: Any, image: Any, **settings: Any) -> Any:
        """[1, rows, numbers], red, green and blue by turns, and where each row's square lies; none that fill up."""
        made: Any = Gemma4ImageProcessorPil.__call__(self, image, **settings)
        places, side, patch = made["image_position_ids"][0], self.pooling_kernel_size, self.patch_size
        seen = (places >= 0).all(-1)
        columns, lines = (places[seen].amax(0) + 1).tolist()
        squares = (lines // side, side, columns // side, side)
        patches = made["pixel_values"][0][seen].view(*squares, patch, patch, -1)
        made["pixel_values"] = patches.permute(0, 2, 1, 4, 3, 5, 6).flatten(2).flatten(0, 1)[None]
        made["image_position_ids"] = places[seen].view(*squares, 2)[:, 0, :, 0].flatten(0, 1)[None] // side
        return made

    kind: Any = type("UnifiedProcessor", (Gemma4ImageProcessorPil,), {"__call__": merged})
    made = kind.from_pretrained(folder)
    window = (known_config(folder, _RawUnified) or _RawUnified()).text_config.sliding_window
    if made.max_soft_tokens > window:
        raise ValueError(
            f"max_soft_tokens {made.max_soft_tokens} is not allowed; a window (sliding_window) has {window}"
        )
    return made
