"""Prepares images for MiniMax-M3's tower, by the library's processor of Qwen2-VL's, which needs no torchvision.

The library's own, which does, differs from it in sizes that count where files name none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from shared.models.processor_files import read_processor

_ROW = 28**2
_SIZE = {"shortest_edge": 4 * _ROW, "longest_edge": 576 * _ROW}
_NOT_MEANT = [672, 672]
"""What published files say, and the library reads as nothing."""


class _RawPatchSizes(Struct):
    size: dict[str, Any] | list[int] | None = None


def minimax_processor(folder: Path) -> Any:
    """Of the model in `folder`. Raises OSError, ValueError and TypeError for files that say nothing of use."""
    from transformers import Qwen2VLImageProcessorPil

    said = read_processor(folder, "image_processor", _RawPatchSizes).size
    given: dict[str, Any] = {"size": dict(_SIZE)} if said is None or said == _NOT_MEANT else {}
    return Qwen2VLImageProcessorPil.from_pretrained(folder, **given)
