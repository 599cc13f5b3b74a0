"""Which models' images Baton prepares itself, as the library's processors of these ask for torchvision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.encoder.processors.canvas_processor import CanvasProcessor
from services.encoder.processors.crop_processor import CropProcessor
from services.encoder.processors.merged_patches import minimax_processor
from services.encoder.processors.patch_processor import PatchProcessor
from services.encoder.processors.ratio_processor import RatioProcessor
from services.encoder.processors.tile_processor import TileProcessor
from services.encoder.processors.unified_patches import unified_processor

OWN_PROCESSORS: dict[str, Callable[[Path], Any]] = {
    "llama4": TileProcessor,
    "cohere2_vision": CanvasProcessor,
    "kimi_k25": PatchProcessor,
    "lfm2_vl": RatioProcessor,
    "minimax_m3_vl": minimax_processor,
    "gemma4_unified": unified_processor,
    "phi4_multimodal": CropProcessor,
}
"""By `model_type`. Each is called with an image and returns what the library's would, by the same names."""
